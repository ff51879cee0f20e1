"""Every notebook under examples/ runs from top to bottom, and shows what its cells end in."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
MOST_SECONDS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: the notebooks share the demo's run, as they do for a reader."""
    return tmp_path_factory.mktemp("notebooks")


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
