"""README, docs, notebooks: what is shown runs or says why not; pictures have commands."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moescope.verbs import VERBS, load_verb

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "decisions" not in path.parts)]
CLONED = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
MARK = re.compile(r"<!-- not executed: (.+) -->")
COMMAND = re.compile(r"^(moescope|make|pip|uvx|pipx|python|torchrun|\.venv/bin/\S+) ")
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MOST_SECONDS = 120  # of processor time per notebook
# What every command takes besides its own options.
COMMON = {"--help", "--json", "--debug", "--no-report", "--dry-run", "--version"}


@dataclass
class Block:
    page: Path
    line: int
    language: str
    text: str
    reason: str  # why it is not executed; empty: it is

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its command lines, whatever the block's language says."""
        if self.language not in ("", "sh", "bash", "text"):
            return []
        lines = [line.partition("  #")[0].strip() for line in self.text.splitlines()]
        return [line.removeprefix("$ ") for line in lines if COMMAND.match(line.removeprefix("$ "))]

    @property
    def runs(self) -> bool:
        return self.language == "python" or bool(self.commands)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, each with the mark on the line before it."""
    found, lines, start = [], page.read_text(encoding="utf-8").splitlines(), None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        mark = MARK.fullmatch(lines[start - 1]) if start else None
        language, text = lines[start].removeprefix("```").strip(), "\n".join(lines[start + 1 : number])
        found.append(Block(page, start + 1, language, text, mark[1] if mark else ""))
        start = None
    assert start is None, f"{page}: a fence is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUNNING = [page for page in PAGES if any(block.runs and not block.reason for block in blocks(page))]


def test_blocks_are_found_and_marks_stand_at_blocks_that_would_run():
    assert sum(block.runs for block in BLOCKS) > 15
    assert all(block.runs for block in BLOCKS if block.reason)
    marks = sum(len(MARK.findall(page.read_text(encoding="utf-8"))) for page in PAGES)
    assert marks == sum(bool(block.reason) for block in BLOCKS), "a mark stands before no block"


def mentioned_commands(page: Path) -> list[str]:
    """`moescope ...` in blocks and in running text."""
    text = page.read_text(encoding="utf-8")
    inline = [" ".join(words.split()) for words in re.findall(r"(?<!`)`(moescope [^`]+)`(?!`)", text)]
    return [
        line for line in [*inline, *(c for b in blocks(page) for c in b.commands)] if line[:9] == "moescope "
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_names_has_a_verb_and_flags_that_exist(page):
    check_flags(mentioned_commands(page))


def check_flags(commands: list[str]) -> None:
    verbs = {name for name, _, _ in VERBS}
    for command in commands:
        words = command.partition(" #")[0].split()[1:]
        if words[0] in ("...", "--help", "--version"):
            continue
        assert words[0] in verbs, command
        known = {option.flag for option in load_verb(words[0]).options} | COMMON
        flags = {word.partition("=")[0].rstrip(".,;)") for word in words if re.match(r"--[a-z]", word)}
        assert flags <= known, f"{command}: {flags - known}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pages and notebooks: they share the demo's run, as they do for a reader."""
    from moescope.demo.verb import demo

    work = tmp_path_factory.mktemp("pages")
    shutil.copytree(DOCS / "data", work / "docs" / "data")
    demo(out=work / "runs" / "demo", quiet=True)
    return work


def run_command(line: str) -> None:
    from moescope.cli import app

    words = shlex.split(line)
    if words[0] == "python":  # a script of the repository
        subprocess.run([sys.executable, ROOT / words[1], *words[2:]], check=True)
        return
    assert words[0] == "moescope", f"{line}: not a command of moescope; mark the block"
    with pytest.raises(SystemExit) as ended:
        app(words[1:])
    assert ended.value.code == 0, line


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning")  # other libraries' own
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_order(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if named := re.match(r"# (\S+\.toml)\n", block.text):
            Path(named[1]).write_text(block.text)
        if block.reason or not block.runs:
            continue
        if block.language == "python":
            exec(compile(block.text, block.where, "exec"), names)
        for line in block.commands:
            run_command(line)


@pytest.mark.parametrize("page", CLONED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_a_title_and_links_that_work_in_a_clone(page):
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# "), "a reader of the file sees no title"
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|<img src=\"([^\"]+)\"", text):
        path = next(filter(None, target))
        if not path.startswith(("https:", "http:", "mailto:")):
            assert (page.parent / path).exists(), path


# --- notebooks


def show(value: Any) -> str:
    """What Jupyter would show of a cell's last value."""
    html = getattr(value, "_repr_html_", None)
    return (html and html()) or repr(value)


def run_cell(source: str, names: dict[str, Any]) -> str:
    """Execute a cell; return what Jupyter shows: its last expression, unless a semicolon ends it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return "" if source.endswith(";") or value is None else show(value)


def test_there_are_five_notebooks_without_stored_output():
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_values(path, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    start = time.process_time()
    shown = [
        run_cell("".join(cell["source"]), names)
        for cell in json.loads(path.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    assert time.process_time() - start < MOST_SECONDS
    assert all("Empty DataFrame" not in text and "Run(" not in text for text in shown)
    assert sum(bool(text) for text in shown) >= 3


# --- pictures


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_picture_has_a_command_and_every_command_a_small_picture():
    pictures, drawings = load_script("pictures"), load_script("drawings")
    made = {picture.file: picture.code for picture in pictures.PICTURES}
    made |= {name: ["python docs/drawings.py"] for name in drawings.DRAWINGS}
    stored = {path.name: path for path in (DOCS / "pictures").iterdir()}
    assert set(stored) == set(made)
    assert all(path.stat().st_size <= pictures.LARGEST for path in stored.values())
    assert all(picture.run in pictures.RUNS for picture in pictures.PICTURES)
    for page in PAGES:
        for target in re.findall(
            r"(?:\]\(|src=\")([^)\"]+\.(?:webp|png|svg))", page.read_text(encoding="utf-8")
        ):
            if target != "growth.svg":  # by `make bench-growth`; its page says so
                assert Path(target).name in made, f"{page.name}: {target}"


def test_figures_of_the_gallery_exist_and_drawings_are_up_to_date():
    pictures, drawings = load_script("pictures"), load_script("drawings")
    names = {spec.name for name, _, _ in VERBS for spec in load_verb(name).figures}
    assert all(picture.figure in names for picture in pictures.PICTURES if picture.figure)
    check_flags(list(pictures.RUNS.values()))
    for name, (draw, height) in drawings.DRAWINGS.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == drawings.svg(draw, height), name


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ('<link rel="stylesheet" href="https://fonts.example/a.css">', True),
        ("<script src=//cdn.example/a.js></script>", True),
        ("body { background: url('http://x.example/a.png') }", True),
        ('<link rel="canonical" href="https://x.example/">', False),
        ('<a href="https://arxiv.org/abs/2407.01906">paper</a><img src="pictures/a.webp">', False),
    ],
)
def test_building_the_site_finds_what_a_browser_would_fetch(text, remote):
    pytest.importorskip("mkdocs")
    assert (load_script("site_pages").remote_reference(text) is not None) == remote
