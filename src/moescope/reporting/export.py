"""Figures as files for papers, through kaleido (the extra `export`)."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moescope.errors import BadInput
from moescope.reporting.page import with_parts
from moescope.run import Run
from moescope.verb import Figure, Section, Selection

PAPER: dict[str, Any] = {
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "font": {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": "#1a1d21"},
    "margin": {"l": 70, "r": 20, "t": 20, "b": 60},
    "width": 720,
}
AXIS = {"gridcolor": "#e4e7eb", "zerolinecolor": "#cfd4da", "linecolor": "#9aa1a9"}


def check_export(folder: Path) -> None:
    """Reject before the report is built what would fail after it."""
    if find_spec("kaleido") is None:
        raise BadInput("figures as files need kaleido; install it with: python -m pip install kaleido")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{folder}: cannot be written ({error.strerror}); give another --figures folder"
        ) from None


def export_figures(runs: list[Run], folder: Path, format: str, quiet: bool = False) -> list[Path]:
    """Write every figure of the report as a file, sliders at their starting value.

    Files are named `<verb><number of the run>-<section>-<view>-<figure>.<format>`.
    """
    check_export(folder)
    import kaleido

    jobs = {}
    for name, figure in report_figures(runs):
        path = folder / f"{name}.{format}"
        size = {"height": figure.height + 60, "width": 720, "scale": 2 if format == "png" else 1}
        jobs[path] = {"fig": paper_figure(figure), "path": path, "opts": {"format": format, **size}}
    kaleido.write_fig_from_object_sync(list(jobs.values()), cancel_on_error=True)  # else errors are silent
    if not quiet:
        print(f"{len(jobs)} figures in {folder}", file=sys.stderr)
    return list(jobs)


def report_figures(runs: list[Run]) -> Iterator[tuple[str, Figure]]:
    """Yield every figure of the runs' sections, with a name for its file."""
    shown = with_parts(runs)
    for index, run in enumerate(shown):
        for section in run.verb.sections(run, Selection()):
            yield from section_figures(section, f"{run.verb.name}{index}")
    for name, verb in {run.verb.name: run.verb for run in shown}.items():
        for section in verb.overlay([run for run in shown if run.verb.name == name]):
            yield from section_figures(section, f"{name}-all")


def section_figures(section: Section, prefix: str) -> Iterator[tuple[str, Figure]]:
    parts = [prefix, section.anchor, re.sub(r"\W+", "_", section.view).strip("_")]
    place = "-".join(part for part in parts if part)
    for spec, tables in section.figures:
        yield f"{place}-{spec.name}", spec.draw(tables)
    for inner in section.sections:
        yield from section_figures(inner, place)


def paper_figure(figure: Figure) -> dict[str, Any]:
    """Return the figure on white, with its title and caption, as plain data."""
    lines = [
        *textwrap.wrap(figure.title, 90),
        *(f"<sup>{line}</sup>" for line in textwrap.wrap(figure.caption, 120)),
    ]
    heading = {"text": "<br>".join(lines[:5]), "x": 0.02, "xanchor": "left", "font": {"size": 14}}
    axes = {axis: {**AXIS, **figure.layout.get(axis, {})} for axis in ("xaxis", "yaxis")}
    margin = {**PAPER["margin"], "t": 30 + 20 * len(lines[:5])}
    layout = {**PAPER, "title": heading, **figure.layout, **axes, "margin": margin}
    shown: dict[str, Any] = figure.to_plotly(**layout).to_plotly_json()
    return shown
