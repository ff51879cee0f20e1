"""The pages of the site that are made from the code: verbs, tables, Python API, gallery, navigation.

mkdocs runs this file as its hook (`make docs`). A verb or column that is added to the code is on the site.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import moescope
from moescope.tables import Column, Table
from moescope.verb import Option, Verb, summary_of
from moescope.verbs import OTHERS, VERBS, load_verb

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "studies")]

import lab_tables  # noqa: E402
from findings import PAGES, cell, read_results, render, table  # noqa: E402
from pictures import PICTURES, RUNS  # noqa: E402

WIDE = ("results.md", "routers.md")
CONCEPTS = ["alignment", "nulls", "ambiguity", "routing", "merging"]
RECORDS = {name: load_verb(name) for name in [*(name for name, _, _ in VERBS), *OTHERS]}


def on_config(config: Any) -> Any:
    """Set the navigation; a page in docs/ that is listed nowhere joins the guides."""
    findings = ["findings.md", "results.md", "case_study.md", "routers.md", "benchmarks.md"]
    guides = ["monitor.md", "lab.md", "faq.md"]
    listed = {"index.md", *findings, *guides}
    guides += sorted(path.name for path in DOCS.glob("*.md") if path.name not in listed)
    config.nav = [
        {"Start": "index.md"},
        {"Concepts": [f"concepts/{name}.md" for name in CONCEPTS]},
        {"Commands": [f"verbs/{name}.md" for name, _, _ in VERBS]},
        {"Guides": guides},
        {"Findings": findings},
        {"Gallery": "gallery.md"},
        {"Reference": [{"Tables and columns": "tables.md"}, {"Python": "python.md"}]},
        {"Decisions": [f"decisions/{path.name}" for path in decisions()]},
    ]
    return config


def decisions() -> list[Path]:
    return sorted((DOCS / "decisions").glob("*.md"), key=lambda path: (path.name != "README.md", path.name))


def on_files(files: Any, config: Any) -> Any:
    pages = {f"verbs/{name}.md": verb_page(name, line) for name, line, _ in VERBS}
    pages |= {"tables.md": tables_page(), "python.md": python_page(), "gallery.md": gallery_page()}
    for uri, text in pages.items():
        if (written := files.get_file_from_path(uri)) is not None:
            files.remove(written)
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the numbers of stored studies, and the tables of config records; wide tables get the room."""
    if page.file.src_uri in lab_tables.PAGES:
        return lab_tables.render(markdown)
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["navigation"]
    return render(markdown, read_results()) if page.file.src_uri in PAGES else markdown


def on_post_build(config: Any) -> None:
    """Fail if a reader's browser would fetch something from another host."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := remote_reference(path.read_text(encoding="utf-8"))):
            raise PluginError(f"{path}: fetches from the network: {found}")


def remote_reference(text: str) -> str | None:
    """Return what makes a browser fetch from another host, if anything in this HTML or CSS does."""
    tag = r"<(?:script|link|img|iframe)\b[^>]+\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
    found = re.findall(tag + r"|url\([\"']?(?:https?:)?//[^)]*\)", text)
    return next((one for one in found if not re.search(r"rel=[\"']?canonical", one)), None)


# --- verbs


def verb_page(name: str, line: str) -> str:
    verb = RECORDS[name]
    assert verb.run is not None
    example = DOCS / "verbs" / f"{name}.md"
    if example.exists():
        parts = [example.read_text(encoding="utf-8").strip()]
    else:
        parts = [f"# {name}", summary_of(verb.run), docstring_example(verb)]
    for title, more in (("Options", False), ("More options", True)):
        options = [option for option in verb.options if option.more == more]
        if options:
            rows = [(option_name(option), option_help(option)) for option in options]
            parts += [f"## {title}", table(("option", "meaning"), rows)]
    if verb.tables:
        rows = [(f"[`{one.name}`](../tables.md#{one.name})", cell(one.meaning)) for one in own_tables(verb)]
        parts += ["## Tables it writes", table(("table", "one row says"), rows)]
    if verb.figures:
        rows = [(f"`{spec.name}`", cell(spec.line)) for spec in verb.figures]
        parts += [
            "## Figures",
            f'`run.figure("{verb.figures[0].name}")` draws one.',
            table(("figure", "shows"), rows),
        ]
    return "\n\n".join(parts) + "\n"


def docstring_example(verb: Verb) -> str:
    """The lines of the function's own example."""
    lines = [line.strip() for line in (verb.run.__doc__ or "").splitlines()]
    code = [line[4:].partition("  # doctest")[0] for line in lines if line.startswith((">>> ", "... "))]
    return "\n".join(["```python", "import moescope", "", *code, "```"]) if code else ""


def option_name(option: Option) -> str:
    value = option.metavar or "|".join(option.choices)
    if option.positional:
        return f"`{(value or option.name).upper()}`" + (" ..." if option.repeated else "")
    words = option.flag if option.kind == "flag" else f"{option.flag} {value or option.kind.upper()}"
    return f"`{words}`"


def option_help(option: Option) -> str:
    default = option.shown_default or (option.default if option.kind != "flag" else None)
    repeated = " May be given several times." if option.repeated and not option.positional else ""
    ending = f" Default: {default}." if default not in (None, "", ()) else ""
    return cell(option.help + repeated + ending)


def own_tables(verb: Verb) -> list[Table]:
    return list(verb.tables.values())


# --- tables and columns


def tables_page() -> str:
    parts = [
        "# Tables and columns",
        "A run folder holds one parquet file per table; `run.table(name)` reads it. A column that several "
        "tables share is explained at each of them. **chance** is the value where there is nothing to find.",
    ]
    seen: dict[str, Table] = {}
    for verb in RECORDS.values():
        fresh = [one for one in own_tables(verb) if one.name not in seen]
        seen |= {one.name: one for one in fresh}
        if fresh:
            parts.append(f"## Tables of {verb.name}")
        for one in fresh:
            parts += [
                f"### {one.name}",
                one.meaning,
                "Key: " + ", ".join(f"`{key}`" for key in one.keys) + ".",
            ]
            rows = [(f"`{name}`", one.column(name).kind, meaning(one.column(name))) for name in one.columns]
            parts.append(table(("column", "kind", "meaning"), rows))
            if one.terms:
                rows = [(f"`{name}`", meaning(term)) for name, term in one.terms.items()]
                parts += [f"Names in the rows of `{one.name}`:", table(("name", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def meaning(column: Column) -> str:
    facts = [cell(column.meaning)]
    if column.formula:
        facts.append(f"Formula: {cell(column.formula)}.")
    facts += [
        f"**{name.removeprefix('at_')}**: {cell(text)}."
        for name in ("unit", "at_chance", "at_worst", "at_best")
        if (text := getattr(column, name))
    ]
    facts += [f"Misleads: {cell(column.misleads)}"] if column.misleads else []
    return " ".join(facts)


# --- Python, gallery


def python_page() -> str:
    intro = (
        "# Python\n\nThe verbs are functions of the same names and options; each returns a `Run`. "
        "[Commands](verbs/scan.md) lists the options, [tables and columns](tables.md) what a run holds.\n"
    )
    return intro + "\n".join(f"\n::: {place(name)}\n" for name in moescope.__all__)


def place(name: str) -> str:
    value = getattr(moescope, name)
    if name == "demo":  # a package and a verb
        return "moescope.demo.verb.demo"
    return f"{value.__module__}.{value.__qualname__}"


def gallery_page() -> str:
    parts = [
        "# Gallery",
        "Every picture is made by `make docs-pictures`, from the model that comes with moescope and from the "
        "checkpoint that `python tests/planted.py planted` writes. The runs:",
        "\n".join(["```sh", *RUNS.values(), "```"]),
    ]
    for picture in PICTURES:
        parts += [f"## {picture.title}", f"![{picture.title}](pictures/{picture.file})", picture.caption]
        parts.append("\n".join([f"```{picture.language}", *picture.code, "```"]))
    return "\n\n".join(parts) + "\n"
