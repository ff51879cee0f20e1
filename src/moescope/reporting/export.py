"""Figures as files for papers, drawn by kaleido (the extra `export`) in the user's Chrome or Chromium."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moescope.errors import BadInput
from moescope.reporting.joint import joint_sections
from moescope.reporting.page import run_names, summary_of, with_parts
from moescope.run import Run
from moescope.verb import Figure, Section, Selection

PER_MM = 96 / 25.4  # CSS pixels per millimetre
ENLARGED = 1.3  # drawn so much larger than printed: text of 13 px is printed at 7.5 points
SCALES = {"svg": 1 / ENLARGED, "pdf": 1 / ENLARGED, "png": 3.0}  # PNG: about 370 dots per inch
FONT_SIZE = 13
LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"}
AXIS = {"gridcolor": "#e4e7eb", "zerolinecolor": "#cfd4da", "linecolor": "#9aa1a9", "automargin": True}
PAPER: dict[str, Any] = {
    "template": None,
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "font": {"family": "Helvetica, Arial, sans-serif", "size": FONT_SIZE, "color": "#1a1d21"},
}


def check_export(folder: Path) -> None:
    """Reject before the report is built what would fail after it."""
    if find_spec("kaleido") is None:
        raise BadInput("figures as files need kaleido; install it with: python -m pip install kaleido")
    import kaleido
    from kaleido.errors import ChromeNotFoundError

    try:
        kaleido.Kaleido()  # not started: it looks for a browser
    except ChromeNotFoundError:
        raise BadInput(
            "figures as files need Chrome or Chromium and none was found; install one "
            "(kaleido_get_chrome does), or set BROWSER_PATH to its program"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{folder}: cannot be written ({error.strerror}); give another --figures folder"
        ) from None


def export_figures(
    runs: list[Run],
    folder: Path,
    format: str = "svg",
    width: int = 175,
    title: bool = True,
    quiet: bool = False,
    more: Sequence[Section] = (),
) -> list[Path]:
    """Write every figure of the report as a file of that width in millimetres, sliders at their start."""
    check_export(folder)
    import kaleido

    jobs = {}
    for name, figure in report_figures(runs, more):
        path = folder / f"{name}.{format}"
        drawn = paper_figure(figure, width, title)
        size = {side: drawn["layout"][side] for side in ("width", "height")}
        jobs[path] = {
            "fig": drawn,
            "path": path,
            "opts": {"format": format, **size, "scale": SCALES[format]},
        }
    kaleido.write_fig_from_object_sync(  # without MathJax, which would be fetched
        list(jobs.values()), cancel_on_error=True, kopts={"mathjax": False}
    )
    if not quiet:
        print(f"{len(jobs)} figures in {folder}", file=sys.stderr)
    return list(jobs)


def report_figures(runs: list[Run], more: Sequence[Section] = ()) -> Iterator[tuple[str, Figure]]:
    """Yield every figure of the report with a name for its file, `<run>-<section>-<view>-<figure>`.

    In place of the run stands the verb where a figure shows all of its runs, "joint" where it shows several
    verbs. No name occurs twice, not even where files are told apart without case.
    """
    used: set[str] = set()
    for place, section in report_sections(runs, more):
        for name, figure in section_figures(section, place):
            copies = (f"{name}-{count}" if count > 1 else name for count in range(1, 1000))
            unique = next(copy for copy in copies if copy.lower() not in used)
            used.add(unique.lower())
            yield unique, figure


def report_sections(runs: list[Run], more: Sequence[Section] = ()) -> Iterator[tuple[str, Section]]:
    """Yield every section of the page, with the run or the verb that it is of."""
    shown = with_parts(runs)
    names = run_names(shown)
    for run in shown:
        for section in (*run.verb.sections(run, Selection()), *summary_of(run).sections):
            yield file_words(names[run.path]), section
    for name, verb in {run.verb.name: run.verb for run in shown}.items():
        for section in verb.overlay([run for run in shown if run.verb.name == name]):
            yield f"all_{name}", section
    for section in joint_sections(shown):
        yield "joint", section
    for section in more:
        yield "results", section


def section_figures(section: Section, prefix: str) -> Iterator[tuple[str, Figure]]:
    parts = [prefix, file_words(section.anchor), file_words(section.view)]
    place = "-".join(part for part in parts if part)
    for spec, tables in section.figures:
        yield f"{place}-{spec.name}", spec.draw(tables)
    for inner in section.sections:
        yield from section_figures(inner, place)


def file_words(text: str) -> str:
    """Return the text with what a file's name should not hold as underscores."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._")


def paper_figure(figure: Figure, width: int = 175, title: bool = True) -> dict[str, Any]:
    """Return the figure on white as plain data, for a print of that width in millimetres.

    With `title` the title and the caption stand above it.
    """
    wide = round(width * PER_MM * ENLARGED)
    letters = wide // 7  # of the caption, in one line
    titles, captions = textwrap.wrap(figure.title, letters), textwrap.wrap(figure.caption, letters)
    lines = [f"<b>{escape(line)}</b>" for line in titles] + [escape(line) for line in captions]
    top = 18 * len(lines) + 24 if title else 14
    height = figure.height + top + 40
    heading = {
        "text": "<br>".join(lines),
        "x": 0.01,
        "xanchor": "left",
        "y": 1 - 10 / height,
        "yanchor": "top",
        "font": {"size": FONT_SIZE - 1},
    }
    axes = {
        name: {**AXIS, **value} for name, value in figure.layout.items() if re.fullmatch(r"[xy]axis\d*", name)
    }
    layout = {
        **PAPER,
        **figure.layout,
        **axes,
        **({"title": heading} if title else {}),
        "legend": {**figure.layout.get("legend", {}), **LEGEND},
        "margin": {"l": 60, "r": 16, "t": top, "b": 50},
        "width": wide,
        "height": height,
    }
    shown: dict[str, Any] = figure.to_plotly(**layout).to_plotly_json()
    return shown
