"""Figures as pictures for papers, through kaleido (the extra `export`)."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moescope.errors import BadInput
from moescope.figures import ACROSS_LAYERS, COMPLETE_VIEW, ONE_LAYER, OVER_STEPS, ROUTING
from moescope.plotting.style import Figure
from moescope.reporting.run_kinds import kind_of
from moescope.routing.figures_metrics import can_draw
from moescope.routing.report_views import load_trace, routing_views
from moescope.run import Run
from moescope.weights.report_findings import run_names, views

PAPER: dict[str, Any] = {
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "font": {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": "#1a1d21"},
    "margin": {"l": 70, "r": 20, "t": 20, "b": 60},
    "width": 720,
}
AXIS = {"gridcolor": "#e4e7eb", "zerolinecolor": "#cfd4da", "linecolor": "#9aa1a9"}


def check_export(folder: Path) -> None:
    """Refuse before the report is built what would fail after it."""
    if find_spec("kaleido") is None:
        raise BadInput("figures as files need kaleido; install it with: python -m pip install kaleido")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{folder}: cannot be written ({error.strerror}); give another folder to --figures"
        ) from None


def export_figures(runs: list[Run], folder: Path, format: str, quiet: bool = False) -> list[Path]:
    """Write every figure as a file, sliders at their starting value.

    Of weights `<number of the reading>-<matrix>-<router>-<figure>.<format>`, of routing `routing<number of
    the view>-step<step>-<phase>-<figure>.<format>`.
    """
    check_export(folder)
    import kaleido

    written, jobs = [], []
    for name, figure in [*kind_figures(runs), *weight_figures(runs), *routing_figures(runs)]:
        path = folder / f"{name}.{format}"
        size = {"height": figure.height + 60, "width": 720, "scale": 2 if format == "png" else 1}
        jobs.append({"fig": paper_figure(figure), "path": path, "opts": {"format": format, **size}})
        written.append(path)
    kaleido.write_fig_from_object_sync(jobs, cancel_on_error=True)  # else it keeps its errors to itself
    if not quiet:
        print(f"{len(written)} figures in {folder}", file=sys.stderr)
    return written


def kind_figures(runs: list[Run]) -> Iterator[tuple[str, Figure]]:
    """Figures of the other verbs' runs, section after section."""
    for index, run in enumerate(runs):
        if (kind := kind_of(run)) is not None:
            for section in kind.sections(run):
                for number, (spec, tables) in enumerate(section.figures):
                    yield f"{kind.verb}{index}-{section.anchor}-{number}-{spec.name}", spec.draw(tables)


def weight_figures(runs: list[Run]) -> Iterator[tuple[str, Figure]]:
    for index, reading in enumerate(views([run for run in runs if run.info["verb"] == "scan"])):
        prefix = f"{index}-{reading.keys['matrix']}-{reading.keys['router'] or 'experts'}"
        for spec in reading.drawable(ACROSS_LAYERS):
            yield f"{prefix}-{spec.name}", spec.draw(reading.tables)
        for layer, tables in reading.by_layer():
            for spec in reading.drawable((*ONE_LAYER, *COMPLETE_VIEW)):
                yield f"{prefix}-layer{layer}-{spec.name}", spec.draw(tables)


def routing_figures(runs: list[Run]) -> Iterator[tuple[str, Figure]]:
    """Figures of every trace: of each step and phase shown, and over the steps."""
    traces = [load_trace(run) for run in runs if run.info["verb"] == "trace"]
    for index, view in enumerate(routing_views(traces, run_names(runs))):
        for spec in ROUTING:
            if can_draw(spec, view.tables):
                yield f"routing{index}-step{view.step}-{view.phase}-{spec.name}", spec.draw(view.tables)
    for index, trace in enumerate(trace for trace in traces if len(trace.steps) > 1):
        tables = trace.in_main_phase()
        for spec in OVER_STEPS:
            if can_draw(spec, tables):
                yield f"routing{index}-steps-{spec.name}", spec.draw(tables)


def paper_figure(figure: Figure) -> dict[str, Any]:
    """The figure on white; of a slider's traces only those of its starting value."""
    from plotly.graph_objects import Figure as PlotlyFigure

    data, title = figure.data, figure.title
    if figure.slider is not None:
        count = len(figure.slider.values) * figure.slider.per_value
        first = figure.slider.start * figure.slider.per_value
        data = [*data[first : first + figure.slider.per_value], *data[count:]]
    lines = textwrap.wrap(title, 90)
    heading = {"text": "<br>".join(lines), "x": 0.02, "xanchor": "left", "font": {"size": 14}}
    layout = {**PAPER, "title": heading, **figure.layout}
    layout["margin"] = {**PAPER["margin"], "t": 30 + 20 * len(lines)}
    for axis in ("xaxis", "yaxis"):
        layout[axis] = {**AXIS, **layout.get(axis, {})}
    shown: dict[str, Any] = PlotlyFigure({"data": data, "layout": layout}).to_plotly_json()
    return shown
