"""The report's part on routing: every view's figures, tables, experts and text, as data for the template."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any

import pandas as pd

from moescope.figures import DECISIONS, DOMAINS, LOAD, MAPS, OVER_STEPS, SEPARATION, VOCABULARY, FigureSpec
from moescope.plotting.style import Tables, number
from moescope.reporting.pack import plain, table_payload
from moescope.routing.figures_maps import drawable_maps
from moescope.routing.figures_metrics import can_draw, values_of
from moescope.routing.report_experts import layer_payloads
from moescope.routing.report_findings import routing_findings
from moescope.routing.report_text import Excerpt, read_excerpt, text_payload
from moescope.routing.report_views import TraceTables, View
from moescope.run import Run
from moescope.tables import TABLES
from moescope.weights.report import drawn

Keep = Callable[[str, Any], str]

# name, heading, figures, what a reader should know first, what the trace lacks when the first figure cannot
# be drawn
SECTIONS: list[tuple[str, str, list[FigureSpec], str, str]] = [
    (
        "load",
        "Load",
        LOAD,
        (
            "How many tokens each expert gets. The chance is ideal random balanced routing of the "
            "same number of tokens; text lies above it even where a "
            "router is balanced, since neighbouring tokens are alike. Collapse is every token at the "
            "same k experts."
        ),
        "",
    ),
    (
        "decisions",
        "Decisions",
        DECISIONS,
        (
            "How sure the router is, token by token. Neither end is good in itself: a router that "
            "knows nothing spreads its probability evenly, "
            "one that has collapsed gives one answer to everything."
        ),
        "this trace holds no logits",
    ),
    (
        "separation",
        "Separation",
        SEPARATION,
        (
            "Whether experts are used together, and whether their router rows point apart. Chance "
            "for a pair is below 1, since the experts of one token differ."
        ),
        "each token chooses one expert, and no router rows are known",
    ),
    (
        "maps",
        "Maps",
        MAPS,
        (
            "Experts of a layer on a plane, by router rows, company and mean outputs; sized by load, "
            "coloured by domain. Each map says how many of an expert's nearest stay "
            "nearest on it, beside luck. A plane cannot hold it all: PCA keeps large distances, UMAP "
            "and t-SNE neighbourhoods, and the gaps between their groups mean little."
        ),
        "",
    ),
    (
        "domains",
        "Domains",
        DOMAINS,
        (
            "Whether experts serve kinds of text. Chance is what documents' labels dealt anew give, "
            "not zero: few documents look special by themselves."
        ),
        "the text was read as one domain; name several with --domain NAME=PATH",
    ),
    (
        "vocabulary",
        "Vocabulary",
        VOCABULARY,
        (
            "Whether the token itself decides. Held-out information, beside the same with tokens "
            "shuffled within their documents."
        ),
        "this trace holds no token ids",
    ),
]
ROWS_SHOWN = 2000  # of a folded table; the run folder has them all
# section -> (table, its title, the column whose largest values come first)
FOLDED = {
    "load": ("load", "Load of every expert", "tokens"),
    "separation": ("coactivation", "Pairs of experts", "lift"),
    "domains": ("domains", "Domains of every expert", "affinity"),
}
GLANCE = [
    ("cv", "value", "cv"),
    ("cv", "chance", "by chance"),
    ("max_over_mean", "value", "max/mean"),
    ("max_over_mean", "chance", "by chance"),
    ("unused", "value", "unused"),
    ("unused", "chance", "by chance"),
    ("routing_entropy", "value", "entropy"),
    ("routing_entropy", "chance", "by chance"),
    ("confidence", "value", "confidence"),
    ("confidence", "chance", "by chance"),
    ("domain_information", "value", "I(domain)"),
    ("token_information", "value", "I(token)"),
    ("token_information", "chance", "by chance"),
]


def view_entry(view: View, index: int, keep: Keep) -> dict[str, Any]:
    """One view: its sections of figures, its layers, and its text where tokens were kept."""
    sections = {}
    for name, _, specs, _, missing in SECTIONS:
        usable = [spec for spec in specs if can_draw(spec, view.tables)]
        why = missing if view.main else "kept of the other phase only"
        words = "" if specs[0] in usable else f"Not available: {why}."
        if name == "maps" and view.main:
            usable, notes = drawable_maps(view.tables, view.last)
            words = " ".join(notes)
        sections[name] = {
            "figures": [
                keep(f"v{index}-{spec.name}", drawn(spec, view.tables, view.label)) for spec in usable
            ],
            "missing": words,
            "tables": folded_tables(name, view.tables, f"v{index}", keep) if usable else [],
        }
    excerpt = read_excerpt(view)
    return {
        "label": view.label,
        "findings": routing_findings(view),
        "glance": keep(f"v{index}-glance", glance_table(view, index)),
        "sections": sections,
        "layers": [
            {**entry, "payload": keep(f"v{index}-l{entry['layer']}", {"view": index, **payload})}
            for entry, payload in layer_payloads(view)
        ],
        "text": keep(f"v{index}-text", text_payload(excerpt, view)) if excerpt is not None else "",
        "text_missing": "" if excerpt is not None else text_missing(view),
        "excerpt": excerpt,
    }


def folded_tables(section: str, tables: Tables, prefix: str, keep: Keep) -> list[str]:
    """The section's table below its figures, largest values first and 2,000 rows at most."""
    if section not in FOLDED:
        return []
    name, title, largest = FOLDED[section]
    rows = tables.get(name, pd.DataFrame())
    if rows.empty:
        return []
    few = rows.sort_values(largest, ascending=False, kind="stable").head(ROWS_SHOWN)
    title += f" (the {ROWS_SHOWN:,} largest of {len(rows):,})" if len(few) < len(rows) else ""
    columns = [column for column in TABLES[name].columns if column not in ("step", "layer_name", "phase")]
    return [keep(f"{prefix}-t-{name}", table_payload(name, few, columns, title))]


def text_missing(view: View) -> str:
    if not view.main:
        return "Not available: tokens are kept of the other phase only."
    return "Not available: this trace kept no single tokens; trace again with --save-tokens."


def glance_table(view: View, index: int) -> dict[str, Any]:
    """One row a layer: load, decisions, domains and tokens, each with its chance level beside it.

    Columns without a value are left out.
    """
    columns = [{"name": "layer", "title": "layer", "kind": "int"}]
    values: list[pd.Series] = []
    for metric, column, title in GLANCE:
        found = values_of(view.tables, metric).set_index("layer")[column]
        if found.notna().any():
            values.append(found)
            columns.append({"name": metric if column == "value" else column, "title": title, "kind": "float"})
    rows = [[layer, *(column.get(layer, float("nan")) for column in values)] for layer in view.layers]
    return {
        "name": "routing_at_a_glance",
        "title": "Routing at a glance",
        "columns": columns,
        "rows": plain(rows),
        "links": f"v{index}-layer-",
    }


def step_sections(traces: list[TraceTables], names: dict[Any, str], keep: Keep) -> list[dict[str, Any]]:
    """Figures over steps of every trace that has several, in its main phase."""
    sections = []
    for index, trace in enumerate(trace for trace in traces if len(trace.steps) > 1):
        tables = trace.in_main_phase()
        label = f"{names[trace.run.path]} · {trace.phases[0]}"
        specs = [spec for spec in OVER_STEPS if can_draw(spec, tables)]
        figures = [keep(f"o{index}-{spec.name}", drawn(spec, tables, label)) for spec in specs]
        stability = tables["stability"].head(ROWS_SHOWN)
        columns = [column for column in TABLES["stability"].columns if column != "layer_name"]
        shown = table_payload("stability", stability, columns, "Every two steps in every layer")
        kept = [keep(f"o{index}-t-stability", shown)] if len(stability) else []
        sections.append({"label": label if len(traces) > 1 else "", "figures": figures, "tables": kept})
    return sections


def text_notice(traces: list[TraceTables], excerpts: list[Excerpt | None]) -> str:
    """What the report holds of the user's text, to be said at its top; empty where it holds none."""
    if any(excerpt is not None for excerpt in excerpts):
        return (
            "This report holds passages of the text that was read, word for word. Pass it on only "
            "where you would pass on the text."
        )
    if any(trace.tables["contexts"]["before"].notna().any() for trace in traces):
        return (
            "This report holds short passages of the text that was read, word for word (five at "
            "most for each expert). "
            "Pass it on only where you would pass on the text."
        )
    if any(
        trace.tables["vocabulary"]["token"].notna().any()
        for trace in traces
        if len(trace.tables["vocabulary"])
    ):
        return (
            "This report holds single tokens of the text that was read (no passages). Names or "
            "numbers in the text may be among them."
        )
    return ""


# --- how to do it again


def trace_coverage(run: Run) -> list[str]:
    """What was read, in a line; one a step only where they differ."""
    lines = [coverage_line(item) for item in run.info["coverage"]]
    if len(set(lines)) == 1:
        return [lines[0] + (f" in each of {len(lines)} steps" if len(lines) > 1 else "")]
    return [f"{line} (step {setup['step']})" for line, setup in zip(lines, run.info["setup"], strict=True)]


def coverage_line(item: dict[str, Any]) -> str:
    experts, k = ("/".join(map(str, item[key])) for key in ("experts_per_layer", "k"))
    tokens, documents = sum(item["tokens"].values()), sum(item["domains"].values())
    by_domain = ", ".join(f"{name} {count:,}" for name, count in item["tokens"].items())
    chosen = f"up to {k} a token, {number(item['mean_k'])} on average" if "mean_k" in item else f"{k} a token"
    return (
        f"{item['model_type']}: {item['layers']} MoE layers, {experts} experts, {chosen}; "
        f"{tokens:,} tokens in {documents:,} documents"
    ) + (f" ({by_domain})" if len(item["tokens"]) > 1 else "")


def trace_command(trace: TraceTables) -> str:
    """The command that made the run, from what run.json holds."""
    info = trace.run.info
    arguments = info["arguments"]
    models = [
        item["path"] + (f"@{item['revision']}" if item.get("revision") else "")
        for item in info["checkpoints"]
    ]
    command = ["moescope", "trace", *models]
    if "import" in arguments:
        command += [
            "--recorded",
            arguments["import"][0],
            "--format",
            arguments["format"],
            "--experts",
            str(arguments["experts"]),
        ]
        return shlex.join(command)
    without_words = trace.tables["vocabulary"]["token"].isna().all()
    for domain, files in arguments["text"]:
        for path in paths_of(files):
            if len(arguments["text"]) > 1 or domain != "text":
                command += ["--domain", f"{domain}={path}"]
            else:
                command += ["--token-ids" if without_words else "--text", path]
    defaults = {
        "max_tokens": None,
        "phase": "prefill",
        "save_tokens": False,
        "dtype": "auto",
        "batch_size": 8,
        "chat_template": False,
        "seed": 0,
    }
    for word, default in defaults.items():
        if arguments[word] != default:
            flag = f"--{word.replace('_', '-')}"
            command += [flag] if arguments[word] is True else [flag, str(arguments[word])]
    return shlex.join(command)


def paths_of(files: list[Any]) -> list[str]:
    """What was read, as it can be given again.

    Files, - for standard input, the folder they share where they are many.
    """
    given = [file[0] for file in files if isinstance(file, list)]
    piped = ["-"] if len(given) < len(files) else []
    hub = [path for path in given if path.startswith("hf://")]
    paths = [path for path in given if path not in hub]
    return piped + ([os.path.commonpath(paths)] if len(paths) > 8 else paths) + hub
