"""Figures as pictures for papers, through kaleido (the extra `export`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moescope.errors import BadInput
from moescope.figures import ACROSS_LAYERS, COMPLETE_VIEW, ONE_LAYER
from moescope.figures.style import Figure
from moescope.reporting.readings import readings
from moescope.run import Run

PAPER = {
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "font": {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": "#1a1d21"},
    "margin": {"l": 70, "r": 20, "t": 20, "b": 60},
    "width": 720,
}
AXIS = {"gridcolor": "#e4e7eb", "zerolinecolor": "#cfd4da", "linecolor": "#9aa1a9"}


def export_figures(runs: list[Run], folder: Path, format: str, quiet: bool = False) -> list[Path]:
    """Write every figure of every reading as `<reading>-<figure>.<format>`; sliders at their starting value."""
    try:
        import kaleido
    except ImportError:
        raise BadInput("figures need kaleido: pip install 'moescope[export]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written, jobs = [], []
    for index, reading in enumerate(readings(runs)):
        prefix = f"{index}-{reading.keys['matrix']}-{reading.keys['router']}"
        drawn = [(f"{prefix}-{spec.name}", spec.draw(reading.tables)) for spec in ACROSS_LAYERS]
        for layer, tables in reading.by_layer():
            drawn += [
                (f"{prefix}-layer{layer}-{spec.name}", spec.draw(tables)) for spec in (*ONE_LAYER, *COMPLETE_VIEW)
            ]
        for name, figure in drawn:
            path = folder / f"{name}.{format}"
            jobs.append(
                {
                    "fig": paper_figure(figure),
                    "path": path,
                    "opts": {"format": format, "height": figure.height, "width": 720},
                }
            )
            written.append(path)
    kaleido.write_fig_from_object_sync(jobs)
    if not quiet:
        print(f"{len(written)} figures in {folder}", file=sys.stderr)
    return written


def paper_figure(figure: Figure) -> dict[str, Any]:
    """The figure on white; of a slider's traces only those of its starting value."""
    from plotly.graph_objects import Figure as PlotlyFigure

    data = figure.data
    if figure.slider is not None:
        count = len(figure.slider.values) * figure.slider.per_value
        first = figure.slider.start * figure.slider.per_value
        data = [*data[first : first + figure.slider.per_value], *data[count:]]
    layout = {**PAPER, **figure.layout}
    for axis in ("xaxis", "yaxis"):
        layout[axis] = {**AXIS, **layout.get(axis, {})}
    shown: dict[str, Any] = PlotlyFigure({"data": data, "layout": layout}).to_plotly_json()
    return shown
