"""Several readings side by side: runs, steps, matrices or router readings, one line each. Tables carry a `reading` column."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from moescope.figures.alignment import layer_axis
from moescope.figures.style import (
    Figure,
    FigureSpec,
    Tables,
    Trace,
    base_layout,
    category_style,
    from_to,
    grey_line,
    layer_colorbar,
    layer_colors,
)


def reading_lines(frame: pd.DataFrame, column: str) -> list[Trace]:
    """One line a reading."""
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": str(reading),
            "x": rows.sort_values("layer")["layer"].to_numpy(),
            "y": rows.sort_values("layer")[column].to_numpy(),
            "line": {**category_style(index), "width": 2},
            "hovertemplate": f"{reading}<br>layer %{{x}}<br>%{{y:.4g}}<extra></extra>",
        }
        for index, (reading, rows) in enumerate(frame.groupby("reading", sort=False))
    ]


def without_router(frame: pd.DataFrame) -> pd.DataFrame:
    """Readings that differ in the router alone share these numbers: keep the first of them, without the router in its name."""
    kept = frame.drop_duplicates([key for key in ("run", "step", "layer", "matrix", "k", "expert") if key in frame])
    return kept.assign(reading=kept["reading"].str.replace(r", (raw|centered) router", "", regex=True))


def one_over_n(tables: Tables) -> pd.Series:
    """Layer -> 1/n, from the ceiling sqrt(n - 1) of z."""
    return 1 / (tables["alignment_layers"].groupby("layer")["z_ceiling"].max() ** 2 + 1)


def stated_chance(tables: Tables) -> pd.Series:
    frame = tables["orthogonality"]
    chance: pd.Series = frame[frame["k"] == 1].groupby("layer")["chance"].mean()
    return chance


def zero(tables: Tables) -> pd.Series:
    return tables["alignment_layers"].groupby("layer")["z_ceiling"].max() * 0.0


def full_rank(tables: Tables) -> pd.Series:
    ranks: pd.Series = tables["spectra"].groupby("layer")["rank"].max().astype(float)
    return ranks


def nothing_told(tables: Tables) -> pd.Series:
    """Layer -> the absolute score of a layer at chance: accuracy 1/n, no margin, no z."""
    return 0.4 * (1 - one_over_n(tables)) + 0.6


def by_layer(
    name: str, needs: tuple[str, ...], column: str, what: str, reference: Callable[[Tables], pd.Series], called: str
) -> FigureSpec:
    """A column of the first table needed against the layer, one line a reading, with its reference in grey."""

    def draw(tables: Tables) -> Figure:
        frame = tables[needs[0]]
        if needs[0] == "orthogonality":
            frame = without_router(frame[frame["k"] == 1])
        if needs[0] == "spectra":
            frame = without_router(frame).groupby(["reading", "layer"], sort=False)[column].median().reset_index()
        means = frame.groupby("reading", sort=False)[column].mean()
        span = from_to(means.min(), str(means.idxmin()), means.max(), str(means.idxmax()))
        title = f"{what}, mean over layers, {span}"
        chance = reference(tables)
        data = [*reading_lines(frame, column), grey_line(chance.index.to_numpy(), chance.to_numpy(), called)]
        label = what[:1].lower() + what[1:]
        return Figure(
            name,
            title,
            f"{what} of every layer, one line a reading.",
            (column,),
            data,
            base_layout("layer", label, xaxis=layer_axis(pd.Index(sorted(frame["layer"].unique())))),
        )

    return FigureSpec(name, needs, draw)


def by_step(name: str, table: str, column: str, label: str, what: str) -> FigureSpec:
    """A column against the training step, one line a layer; for runs of several checkpoints."""

    def draw(tables: Tables) -> Figure:
        frame = tables[table]
        if table == "orthogonality":
            frame = frame[frame["k"] == 1]
        layers = sorted(frame["layer"].unique())
        colors = layer_colors(layers)
        data: list[Trace] = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"layer {layer}",
                "x": rows["step"].to_numpy(),
                "y": rows[column].to_numpy(),
                "line": {"color": colors[layer], "width": 2},
                "showlegend": len(layers) <= 10,
                "hovertemplate": f"layer {layer}, step %{{x}}<br>%{{y:.4g}}<extra></extra>",
            }
            for layer, rows in frame.sort_values("step").groupby("layer")
        ]
        if len(layers) > 10:
            data.append(layer_colorbar(layers))
        ends = frame.sort_values("step").groupby("layer")[column].agg(["first", "last"])
        rising, falling = int((ends["last"] > ends["first"]).sum()), int((ends["last"] < ends["first"]).sum())
        title = f"{what} rises from first to last step in {rising} of {len(ends)} layers, falls in {falling}"
        return Figure(
            name, title, f"{what} of every layer against the step.", (column,), data, base_layout("step", label)
        )

    return FigureSpec(name, (table,), draw)


ACROSS_READINGS = [
    by_layer(
        "compare_accuracy",
        ("alignment_tests", "alignment_layers"),
        "best_accuracy",
        "Best argmax accuracy",
        one_over_n,
        "1/n, chance at one k",
    ),
    by_layer(
        "compare_margin", ("ambiguity", "alignment_layers"), "alignment_margin", "Margin at k*", zero, "no preference"
    ),
    by_layer(
        "compare_ambiguity",
        ("ambiguity", "alignment_layers"),
        "absolute_score",
        "Absolute ambiguity",
        nothing_told,
        "a layer at chance",
    ),
    by_layer("compare_z", ("ambiguity", "alignment_layers"), "z_score", "Mean z at k*", zero, "chance"),
    by_layer(
        "compare_orthogonality",
        ("orthogonality",),
        "mean_abs",
        "Mean |cos| between experts",
        stated_chance,
        "chance √(2/(πd))",
    ),
    by_layer("compare_effective_rank", ("spectra",), "effective_rank", "Median effective rank", full_rank, "full rank"),
]
ACROSS_STEPS = [
    by_step("steps_accuracy", "alignment_tests", "best_accuracy", "best accuracy", "Best argmax accuracy"),
    by_step("steps_margin", "ambiguity", "alignment_margin", "margin at k*", "Margin at k*"),
    by_step("steps_ambiguity", "ambiguity", "absolute_score", "absolute ambiguity", "Absolute ambiguity"),
    by_step("steps_orthogonality", "orthogonality", "mean_abs", "mean |cos|", "Mean |cos| between experts"),
]
