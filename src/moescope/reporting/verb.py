"""report: one run or several into one HTML file, and on request every figure as a picture."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from moescope.errors import BadInput
from moescope.run import Run
from moescope.storage import REPORT, atomic_file, remove_leftovers
from moescope.verb import Section, Verb

OWN_MARK = b'<meta name="generator" content="moescope">'
Format = Literal["svg", "png", "pdf"]


def report(
    *runs: Run | str | Path,
    out: str | Path | None = None,
    figures: str | Path | None = None,
    format: Format = "svg",
    width: int = 175,
    title: bool = True,
    open: bool = False,
    results: Sequence[str | Path] = (),
    anonymous: bool = False,
    quiet: bool = False,
) -> Path:
    """Build one interactive, self-contained HTML report from one run or several.

    Returns the path of the report. Reads tables only; needs no torch. On the command line every verb writes
    the report of its run; in Python only this function does.

    Parameters
    ----------
    *runs : RUN
        Run folders; several are compared side by side.
    out : FILE, default RUN/report.html
        The HTML file to write; a name without extension gets `.html`.
    figures : DIR
        Also write every figure into this folder (needs the extra `export`, and Chrome or Chromium).
    format : FORMAT
        File format of the figures.
    width : MM >= 40, <= 400
        Width of the figures in millimetres: 85 for one column of a paper, 175 for two.
    title : bool
        Write the figures without title and caption.
    open : bool
        Open the report in the browser.
    results : FILE, repeatable
        results.toml of claims that the given studies decide; --json prints them.
    anonymous : bool
        Leave absolute paths out of the page.

    Examples
    --------
    >>> moescope.report("runs/scan-mixtral-1", "runs/trace-mixtral-1", out="mixtral.html")  # doctest: +SKIP
    """
    VERB.settle(locals())
    from moescope.reporting.page import page_content, render

    results = (results,) if isinstance(results, str | Path) else results
    if find_spec("plotly") is None:
        raise BadInput("the report needs plotly; install it with: python -m pip install plotly")
    loaded = [run if isinstance(run, Run) else Run.load(run) for run in runs]
    if not loaded:
        raise BadInput("no run given; give a folder that moescope scan or trace has written")
    target = (
        Path(out) if out is not None else loaded[0].path / (REPORT if len(loaded) == 1 else "compared.html")
    )
    if not target.suffix.strip(".0123456789") and not target.is_dir():
        target = target.with_name(f"{target.name}.html")  # browsers show other files as text
    check_target(target)
    if figures is not None:
        from moescope.reporting.export import check_export

        check_export(Path(figures))
    try:
        more = judged_claims(results, loaded)[1]
        text = render(page_content(loaded, more, anonymous))
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        places = ", ".join(str(run.path) for run in loaded)
        raise BadInput(
            f"{places}: the report cannot be built ({type(error).__name__}: {error}); if a table is damaged, "
            "repeat the run's command with --overwrite; --debug shows the traceback"
        ) from error
    for run in loaded:
        run.tidy()
    remove_leftovers(target.parent)
    with atomic_file(target, "give another --out") as partial:
        partial.write_text(text, encoding="utf-8")
    if figures is not None:
        from moescope.reporting.export import export_figures

        export_figures(loaded, Path(figures), format, width, title, quiet, more)
    if open and not webbrowser.open(target.resolve().as_uri()):
        raise BadInput(f"{target}: written, but no browser could be started; open the file yourself")
    return target


def judged_claims(
    results: Sequence[str | Path], runs: list[Run]
) -> tuple[list[dict[str, Any]], list[Section]]:
    """Return the claims of these files, judged by the runs that can, and their sections of the page."""
    if not results:
        return [], []
    judges = {run.verb.name: run.verb.claims for run in runs if run.verb.claims}
    if not judges:
        raise BadInput("--results: no study among these runs; give a folder that moescope study has written")
    name, claims = next(iter(judges.items()))
    return claims(results, [run for run in runs if run.verb.name == name])


def json_facts(path: Path, given: dict[str, Any]) -> Any:
    """Return what --json prints: the path, and with --results each claim with table, column and seeds."""
    if not given.get("results"):
        return path
    runs = [Run.load(run) for run in given["runs"]]
    return {"report": path, "claims": judged_claims(given["results"], runs)[0]}


def is_outdated(folder: Path) -> bool:
    """Return whether a run folder has no report, or holds a run that changed after it was written."""
    page = folder / REPORT
    runs = [*folder.glob("run.json"), *folder.glob("*/run.json")]
    return not page.exists() or any(run.stat().st_mtime_ns > page.stat().st_mtime_ns for run in runs)


def check_target(target: Path) -> None:
    """Reject a place where no report can or should be written, before any work."""
    if target.is_dir():
        raise BadInput(f"{target}: a folder; give --out a file name such as report.html")
    if not target.parent.is_dir():
        raise BadInput(f"{target.parent}: no such folder; make it, or give another --out")
    if target.exists():
        with target.open("rb") as file:
            ours = OWN_MARK in file.read(4000)
        if not ours:
            raise BadInput(f"{target}: exists and is not a report of moescope's; give another --out")


VERB = Verb("report", report, lines=lambda path: [f"report: {path}"], json_facts=json_facts)
