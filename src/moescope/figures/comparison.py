"""Several readings side by side: runs, steps, matrices or router readings, one line each. Tables carry a `reading` column."""

from __future__ import annotations

import pandas as pd

from moescope.figures.alignment import layer_axis
from moescope.figures.style import (
    Figure, FigureSpec, Tables, Trace, base_layout, category_style, grey_line, layer_colorbar, layer_colors, number,
)  # fmt: skip


def reading_lines(frame: pd.DataFrame, column: str) -> list[Trace]:
    return [
        {"type": "scatter", "mode": "lines+markers", "name": str(reading), "x": rows.sort_values("layer")["layer"].to_numpy(),
         "y": rows.sort_values("layer")[column].to_numpy(), "line": {**category_style(index), "width": 2},
         "hovertemplate": f"{reading}<br>layer %{{x}}<br>%{{y:.4g}}<extra></extra>"}
        for index, (reading, rows) in enumerate(frame.groupby("reading", sort=False))
    ]  # fmt: skip


def by_layer(name: str, table: str, column: str, label: str, what: str, chance: str | None = None) -> FigureSpec:
    """A column against the layer, one line a reading."""

    def draw(tables: Tables) -> Figure:
        frame = tables[table]
        if table == "orthogonality":
            frame = frame[frame["k"] == 1]
        if table == "spectra":
            frame = frame.groupby(["reading", "layer"], sort=False)[column].median().reset_index()
        means = frame.groupby("reading", sort=False)[column].mean()
        title = f"{what} is highest for {means.idxmax()} ({number(means.max())} on average), lowest for {means.idxmin()} ({number(means.min())})"
        data = reading_lines(frame, column)
        if chance:
            data.append(grey_line(frame.groupby("layer")[chance].mean().index.to_numpy(), frame.groupby("layer")[chance].mean().to_numpy(), "chance"))
        return Figure(name, title, f"{what} of every layer, one line a reading.", (column,), data,
                      base_layout("layer", label, xaxis=layer_axis(pd.Index(sorted(frame["layer"].unique())))))  # fmt: skip

    return FigureSpec(name, (table,), draw)


def by_step(name: str, table: str, column: str, label: str, what: str) -> FigureSpec:
    """A column against the training step, one line a layer; for runs of several checkpoints."""

    def draw(tables: Tables) -> Figure:
        frame = tables[table]
        if table == "orthogonality":
            frame = frame[frame["k"] == 1]
        layers = sorted(frame["layer"].unique())
        colors = layer_colors(layers)
        data: list[Trace] = [
            {"type": "scatter", "mode": "lines+markers", "name": f"layer {layer}", "x": rows["step"].to_numpy(), "y": rows[column].to_numpy(),
             "line": {"color": colors[layer], "width": 2}, "showlegend": len(layers) <= 10,
             "hovertemplate": f"layer {layer}, step %{{x}}<br>%{{y:.4g}}<extra></extra>"}
            for layer, rows in frame.sort_values("step").groupby("layer")
        ]  # fmt: skip
        if len(layers) > 10:
            data.append(layer_colorbar(layers))
        ends = frame.sort_values("step").groupby("layer")[column].agg(["first", "last"])
        rising, falling = int((ends["last"] > ends["first"]).sum()), int((ends["last"] < ends["first"]).sum())
        title = f"{what} rises from first to last step in {rising} of {len(ends)} layers, falls in {falling}"
        return Figure(name, title, f"{what} of every layer against the step.", (column,), data, base_layout("step", label))

    return FigureSpec(name, (table,), draw)


ACROSS_READINGS = [
    by_layer("compare_accuracy", "alignment_tests", "best_accuracy", "best accuracy", "Best argmax accuracy"),
    by_layer("compare_margin", "ambiguity", "alignment_margin", "margin at k*", "Margin at k*"),
    by_layer("compare_ambiguity", "ambiguity", "absolute_score", "absolute ambiguity", "Absolute ambiguity"),
    by_layer("compare_z", "ambiguity", "z_score", "mean z at k*", "Mean z at k*"),
    by_layer("compare_orthogonality", "orthogonality", "mean_abs", "mean |cos|", "Mean |cos| between experts", "chance"),
    by_layer("compare_effective_rank", "spectra", "effective_rank", "effective rank", "Median effective rank"),
]
ACROSS_STEPS = [
    by_step("steps_accuracy", "alignment_tests", "best_accuracy", "best accuracy", "Best argmax accuracy"),
    by_step("steps_margin", "ambiguity", "alignment_margin", "margin at k*", "Margin at k*"),
    by_step("steps_ambiguity", "ambiguity", "absolute_score", "absolute ambiguity", "Absolute ambiguity"),
    by_step("steps_orthogonality", "orthogonality", "mean_abs", "mean |cos|", "Mean |cos| between experts"),
]
