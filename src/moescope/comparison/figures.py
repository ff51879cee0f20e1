"""How far experts are apart.

The expert-distance chart of any series, and what moved between two checkpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    Figure,
    FigureSpec,
    Slider,
    Tables,
    Trace,
    base_layout,
    capital,
    category_style,
    from_to,
    grey_line,
    heatmap,
    layer_axis,
    listed,
    number,
)

PROJECTIONS = ("gate", "up", "down")
UNRELATED = "unrelated experts"
MATCHED_RANDOM = "matched random experts"
L2_UNRELATED = float(np.sqrt(2))
SERIES_NAMED = 3  # in a title


# --- the chart


def distance_chart(matrix: str) -> FigureSpec:
    """Of one projection, over layers: R solid, relative L2 dashed, a colour a series, with its interval.

    Grey, what chance gives of both.
    """

    def draw(tables: Tables) -> Figure:
        rows = tables["geometry_layers"]
        rows = rows[rows["matrix"] == matrix].sort_values("layer")
        series = list(dict.fromkeys(rows["series"]))
        data: list[Trace] = [*chance_traces(rows), *quantity_legend()]
        for index, name in enumerate(series):
            own = rows[rows["series"] == name]
            data += interval_bands(own, index)
            data += [
                series_line(own, name, index, "sv_alignment_mean", "R", "solid"),
                series_line(own, name, index, "relative_l2_mean", "relative L2", "dash"),
            ]
            data.append(legend_entry(name, {"color": category_style(index)["color"], "width": 6}, "legend2"))
        lowest = float(rows["sv_alignment_mean"].min()) if rows["sv_alignment_mean"].notna().any() else 0.0
        layout = base_layout(
            "layer",
            "R (solid) and relative L2 (dashed)",
            xaxis=layer_axis(pd.Index(sorted(rows["layer"].unique()))),
            yaxis={"range": [min(-0.12, lowest - 0.05), 1.55]},
            legend={"traceorder": "normal"},  # filled traces would turn it around
            annotations=[
                chance_label(L2_UNRELATED, "L2 by chance", "bottom"),
                chance_label(0.0, "R by chance", "top"),
            ],
            legend2={
                "title": {"text": "series"},
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": -0.25,
                "yanchor": "top",
                "bgcolor": "rgba(0,0,0,0)",
            },
        )
        caption = (
            "Solid: SV alignment R, 1 where both experts have the same singular directions, 0 "
            "expected of unrelated ones. Dashed: relative L2, 0 for equal matrices up to scale, "
            "√2 for "
            "unrelated ones. Shaded in a series' colour: 95 % bootstrap interval of the mean. "
            "Grey: what unrelated experts give as they lie (dotted), and how far matching "
            "their neurons takes random experts of this shape (shaded): a matched series inside "
            "it is no closer than chance."
        )
        columns = ("sv_alignment_mean", "relative_l2_mean", "null_l2", "null_l2_matched", "null_sv_matched")
        return Figure(
            f"expert_distance_{matrix}",
            capital(chart_title(matrix, rows, series)),
            caption,
            columns,
            data,
            layout,
            height=420,
        )

    return FigureSpec(f"expert_distance_{matrix}", ("geometry_layers",), draw)


def chart_title(matrix: str, rows: pd.DataFrame, series: list[str]) -> str:
    """What the run shows, in a sentence: of one series its course over layers, of several their means."""
    chance = f"{UNRELATED} {number(L2_UNRELATED)} and 0"
    if rows["null_l2_matched"].notna().any():
        chance += (
            f", {MATCHED_RANDOM} {number(rows['null_l2_matched'].mean())} and "
            f"{number(rows['null_sv_matched'].mean())}"
        )
    if len(series) == 1:
        r = span(rows, "sv_alignment_mean") if rows["sv_alignment_mean"].notna().any() else "was left out"
        return f"{matrix}, {series[0]}: relative L2 {span(rows, 'relative_l2_mean')}; R {r} ({chance})"
    notes = []
    for name in series[:SERIES_NAMED]:
        own = rows[rows["series"] == name]
        r = own["sv_alignment_mean"].mean()
        notes.append(
            f"{name} {number(own['relative_l2_mean'].mean())}"
            + (f" and {number(r)}" if np.isfinite(r) else "")
        )
    more = f" and {len(series) - SERIES_NAMED} more" if len(series) > SERIES_NAMED else ""
    return f"{matrix}, relative L2 and R, mean over layers: {', '.join(notes)}{more} ({chance})"


def span(rows: pd.DataFrame, column: str) -> str:
    known = rows[rows[column].notna()]
    low, high = known.loc[known[column].idxmin()], known.loc[known[column].idxmax()]
    return from_to(low[column], f"layer {int(low['layer'])}", high[column], f"layer {int(high['layer'])}")


def series_line(rows: pd.DataFrame, name: str, index: int, column: str, what: str, dash: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{name}, {what}",
        "x": rows["layer"].to_numpy(),
        "y": rows[column].to_numpy(float),
        "line": {"color": category_style(index)["color"], "width": 2, "dash": dash},
        "marker": {"size": 5},
        "showlegend": False,
        "hovertemplate": f"{name}<br>layer %{{x}}<br>{what} %{{y:.4g}}<extra></extra>",
    }


def interval_bands(rows: pd.DataFrame, index: int) -> list[Trace]:
    color = category_style(index)["color"]
    found: list[Trace] = []
    for quantity in ("sv_alignment", "relative_l2"):
        known = rows[rows[f"{quantity}_low"].notna()]
        if len(known):
            found += band(known["layer"], known[f"{quantity}_low"], known[f"{quantity}_high"], color, 0.22)
    return found


def band(x: pd.Series, low: pd.Series, high: pd.Series, color: str, opacity: float) -> list[Trace]:
    """Two edges without a line, the space between them filled."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    edge: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": x.to_numpy(),
        "line": {"width": 0, "color": color},
        "showlegend": False,
        "hoverinfo": "skip",
    }
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},{opacity})"}
    return [{**edge, "y": low.to_numpy(float)}, {**edge, "y": high.to_numpy(float), **fill}]


def chance_traces(rows: pd.DataFrame) -> list[Trace]:
    """Unrelated experts dotted, at sqrt 2 and at 0; shaded, how far matching takes random ones from there."""
    by_layer = rows.groupby("layer", as_index=False).agg(
        l2=("null_l2_matched", "min"), r=("null_sv_matched", "max")
    )
    known = by_layer[by_layer["l2"].notna()]
    found: list[Trace] = []
    if len(known):
        found += band(known["layer"], known["l2"], pd.Series(L2_UNRELATED, index=known.index), GREY, 0.45)
        found += band(known["layer"], pd.Series(0.0, index=known.index), known["r"], GREY, 0.45)
    layers = by_layer["layer"].to_numpy()
    for level, of in ((L2_UNRELATED, "relative L2"), (0.0, "R")):
        line = grey_line(layers, np.full(len(layers), level), f"{UNRELATED}, {of}", "dot")
        found.append({**line, "showlegend": False})
    return found


def chance_label(level: float, text: str, anchor: str) -> dict[str, Any]:
    """Which of the two grey bands is which: a small L2 lies near the one of R, which says nothing of it."""
    return {
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": level,
        "yanchor": anchor,
        "text": text,
        "showarrow": False,
        "font": {"size": 10, "color": GREY},
    }


def quantity_legend() -> list[Trace]:
    """The first legend: which line is which quantity, and what grey means. The second names the series."""
    return [
        legend_entry("R", {"color": GREY, "width": 2}),
        legend_entry("relative L2", {"color": GREY, "width": 2, "dash": "dash"}),
        legend_entry(f"{UNRELATED}: √2 and 0", {"color": GREY, "width": 1.5, "dash": "dot"}),
        legend_entry(MATCHED_RANDOM, {"color": "rgba(138,144,153,0.5)", "width": 9}),
    ]


def legend_entry(name: str, line: dict[str, Any], legend: str = "legend") -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [None],
        "y": [None],
        "name": name,
        "line": line,
        "legend": legend,
        "hoverinfo": "skip",
    }


EXPERT_DISTANCE = [distance_chart(matrix) for matrix in PROJECTIONS]


def distance_charts(geometry_layers: pd.DataFrame) -> list[FigureSpec]:
    """The charts of the projections that the table has."""
    here = set(geometry_layers["matrix"])
    return [spec for spec, matrix in zip(EXPERT_DISTANCE, PROJECTIONS, strict=True) if matrix in here]


# --- two checkpoints


def unmatched(tables: Tables) -> pd.DataFrame:
    """The rows of experts as they lie: what training did, not what matching undoes."""
    rows = tables["geometry"]
    return rows[~rows["matched"].astype(bool)]


def drift_heatmap(tables: Tables) -> Figure:
    """Relative L2 of every expert in every layer; one picture a matrix."""
    rows = unmatched(tables)
    matrices = [name for name in (*PROJECTIONS, "router") if name in set(rows["matrix"])]
    data, titles = [], []
    for name in matrices:
        own = rows[rows["matrix"] == name]
        grid = own.pivot(index="layer", columns="expert_a", values="relative_l2").sort_index()
        values = grid.to_numpy(float)
        top = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
        data.append(
            heatmap(
                values,
                list(grid.columns),
                list(grid.index),
                low=0.0,
                high=max(top, 1e-12),
                label="relative L2",
                axes=("expert", "layer"),
            )
        )
        titles.append(most_moved_title(name, own))
    layout = base_layout(
        "expert", "layer", xaxis={"type": "category"}, yaxis={"type": "category", "autorange": "reversed"}
    )
    caption = (
        "How far each expert's matrix, or router row, has moved, layer by layer, whatever its "
        "change of scale. "
        f"Unrelated experts would show √2 = {number(L2_UNRELATED)}."
    )
    slider = Slider("matrix", matrices, titles=titles)
    height = 340 + 6 * max(0, rows["layer"].nunique() - 24)
    return Figure("drift_heatmap", titles[0], caption, ("relative_l2",), data, layout, slider, height)


def most_moved_title(name: str, rows: pd.DataFrame) -> str:
    known = rows[rows["relative_l2"].notna()]
    if known.empty:
        return f"{name}: no distance, all zeros"
    top, median = known.loc[known["relative_l2"].idxmax()], float(known["relative_l2"].median())
    what = "router row" if name == "router" else name
    return (
        f"Moved most, {what}: layer {top['layer']}, expert {top['expert_a']}, relative L2 "
        f"{number(top['relative_l2'])}; "
        f"median of all {number(median)}, {UNRELATED} {number(L2_UNRELATED)}"
    )


def router_cosines(tables: Tables) -> Figure:
    """The cosine of every router row with itself in the other checkpoint, layer by layer."""
    rows = unmatched(tables)
    rows = rows[(rows["matrix"] == "router") & rows["cosine"].notna()].sort_values(["layer", "expert_a"])
    median = rows.groupby("layer")["cosine"].median()
    each: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "each row",
        "x": rows["layer"].to_numpy(),
        "y": rows["cosine"].to_numpy(float),
        "text": [f"expert {expert}" for expert in rows["expert_a"]],
        "marker": {"color": CATEGORICAL[5], "size": 6, "opacity": 0.6},
        "hovertemplate": "layer %{x}, %{text}<br>cosine %{y:.5g}<extra></extra>",
    }
    line: Trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "median",
        "x": median.index.to_numpy(),
        "y": median.to_numpy(float),
        "line": {"color": CATEGORICAL[0], "width": 2.5},
        "hovertemplate": "layer %{x}<br>median %{y:.5g}<extra></extra>",
    }
    layers = median.index.to_numpy()
    unmoved = grey_line(layers, np.ones(len(layers)), "unmoved: 1")
    lowest = rows.loc[rows["cosine"].idxmin()]
    title = (
        f"Router rows turned most in layer {lowest['layer']}, expert {lowest['expert_a']}: "
        f"cosine {number(lowest['cosine'])}; "
        f"median of all {number(rows['cosine'].median())}, unmoved 1, unrelated rows 0"
    )
    caption = (
        "Cosine of each router row before and after. The axis does not start at 0, where "
        "unrelated rows would lie. A vector added to all rows turns each of them, "
        "and a softmax does not see it."
    )
    layout = base_layout("layer", "cosine", xaxis=layer_axis(pd.Index(layers)))
    return Figure("router_cosines", title, caption, ("geometry.cosine",), [each, line, unmoved], layout)


def norm_ratios(tables: Tables) -> Figure:
    """Median and range of the change of norm, layer by layer."""
    rows = unmatched(tables)
    rows = rows[rows["norm_ratio"].notna()]
    data: list[Trace] = []
    notes = []
    for index, name in enumerate(name for name in (*PROJECTIONS, "router") if name in set(rows["matrix"])):
        own = rows[rows["matrix"] == name].groupby("layer")["norm_ratio"].agg(["median", "min", "max"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": own.index.to_numpy(),
                "y": own["median"].to_numpy(float),
                "line": {**category_style(index), "width": 2},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": (own["max"] - own["median"]).to_numpy(float),
                    "arrayminus": (own["median"] - own["min"]).to_numpy(float),
                    "thickness": 1,
                    "width": 3,
                },
                "hovertemplate": f"{name}<br>layer %{{x}}<br>median %{{y:.5g}}<extra></extra>",
            }
        )
        notes.append(f"{name} {number(own['min'].min())} to {number(own['max'].max())}")
    layers = np.array(sorted(rows["layer"].unique()))
    data.append(grey_line(layers, np.ones(len(layers)), "no change: 1"))
    return Figure(
        "norm_ratios",
        f"Norms after over before: {listed(notes)}; 1 is no change",
        "Median over a layer's experts; whiskers reach from the smallest to the largest.",
        ("norm_ratio",),
        data,
        base_layout("layer", "norm, after/before", xaxis=layer_axis(pd.Index(layers))),
    )


DRIFT = [
    FigureSpec("drift_heatmap", ("geometry",), drift_heatmap, wide=True),
    FigureSpec("router_cosines", ("geometry",), router_cosines),
    FigureSpec("norm_ratios", ("geometry",), norm_ratios),
]
