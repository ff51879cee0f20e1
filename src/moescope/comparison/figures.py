"""Figures of expert distances: every series per layer, and the drift between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    base_layout,
    category_style,
    grey_line,
    heatmap,
    layer_axis,
    listed,
    number,
)
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

PROJECTIONS = ("gate", "up", "down")
UNRELATED_L2 = float(np.sqrt(2))
SERIES_NAMED = 3  # in a caption
MATCHED_SERIES = ("_permuted", "_unsigned", "_held_out")  # ends of the names of matched series
BELOW: Trace = {"yaxis": "y2"}  # the panel of relative L2
MOST_COLUMNS = 10  # bars of the columns that changed most
HOW_TO_READ = (
    "Above: SV alignment R, 1 for equal singular directions, 0 expected of unrelated experts. Below: "
    "relative L2, 0 for matrices equal up to scale, √2 for unrelated ones. Coloured bands: 95 % bootstrap "
    "intervals of the mean. Grey: unrelated experts in stored order (dotted), and what matching reaches on "
    "randomly rotated experts (band, for matched series only): a series inside it is at chance level."
)


@dataclass(frozen=True)
class MatrixFigure(FigureSpec):
    """A figure of one matrix, which the table may lack."""

    matrix: str = ""

    def can_draw(self, tables: Tables) -> bool:
        return super().can_draw(tables) and self.matrix in set(tables[self.needs[0]]["matrix"])


# --- distances per series


def distance_chart(matrix: str) -> FigureSpec:
    """R (above) and relative L2 (below) of one projection per layer, one colour per series, chance in
    grey."""

    def draw(tables: Tables) -> Figure:
        rows = tables["geometry_layers"]
        rows = rows[rows["matrix"] == matrix].sort_values("layer")
        data: list[Trace] = [*chance_traces(rows), *grey_legend(rows)]
        for index, (name, group) in enumerate(rows.groupby("series", sort=False)):
            data += interval_bands(group, index)
            data += [
                series_line(group, str(name), index, "sv_alignment_mean", "R", "solid"),
                {**series_line(group, str(name), index, "relative_l2_mean", "relative L2", "dash"), **BELOW},
                legend_entry(str(name), {"color": category_style(index)["color"], "width": 6}, "legend2"),
            ]
        lowest = float(rows["sv_alignment_mean"].min()) if rows["sv_alignment_mean"].notna().any() else 0.0
        legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.25, "yanchor": "top"}
        layout = base_layout(
            "layer",
            "R",
            xaxis={**layer_axis(sorted(rows["layer"].unique())), "anchor": "y2"},
            yaxis={"range": [min(-0.12, lowest - 0.05), 1.05], "domain": [0.54, 1]},
            yaxis2={"range": [-0.08, 1.55], "domain": [0, 0.46], "title": {"text": "relative L2"}},
            legend={"traceorder": "normal"},  # filled traces would reverse it
            legend2={"title": {"text": "series"}, "bgcolor": "rgba(0,0,0,0)", **legend},
        )
        columns = ("sv_alignment_mean", "relative_l2_mean", "null_l2", "null_l2_matched", "null_sv_matched")
        title = f"Expert distances per layer: {matrix}"
        return Figure(
            f"expert_distance_{matrix}",
            title,
            chart_caption(rows),
            columns,
            data,
            layout,
            height=520,
            details=HOW_TO_READ,
        )

    line = f"R (above) and relative L2 (below) of {matrix} per layer, one colour per series, chance in grey."
    return MatrixFigure(
        f"expert_distance_{matrix}", ("geometry_layers",), draw, description=line, matrix=matrix
    )


def chart_caption(rows: pd.DataFrame) -> str:
    """Range over layers of one series, or means of several, with the chance levels."""
    chance = f"unrelated: {number(UNRELATED_L2)} and 0"
    after = matched_rows(rows)
    if after["null_l2_matched"].notna().any():
        matched = [number(after[column].mean()) for column in ("null_l2_matched", "null_sv_matched")]
        chance += f"; matched random: {' and '.join(matched)}"
    series = list(dict.fromkeys(rows["series"]))
    if len(series) == 1:
        r = layer_range(rows, "sv_alignment_mean")
        return f"{series[0]}: relative L2 {layer_range(rows, 'relative_l2_mean')}; R {r} ({chance})."
    means = []
    for name in series[:SERIES_NAMED]:
        group = rows[rows["series"] == name]
        values = [group["relative_l2_mean"].mean(), group["sv_alignment_mean"].mean()]
        means.append(f"{name} {' and '.join(number(value) for value in values if np.isfinite(value))}")
    more = f", {len(series) - SERIES_NAMED} more" if len(series) > SERIES_NAMED else ""
    return f"Mean relative L2 and R: {', '.join(means)}{more} ({chance})."


def layer_range(rows: pd.DataFrame, column: str) -> str:
    """ "0.05 (layer 0) to 0.1 (layer 3)", one number where both print the same, "skipped" without values."""
    known = rows[rows[column].notna()]
    if known.empty:
        return "skipped"
    ends = [known.loc[known[column].idxmin()], known.loc[known[column].idxmax()]]
    low, high = (number(end[column]) for end in ends)
    if low == high:
        return low
    return f"{low} (layer {int(ends[0]['layer'])}) to {high} (layer {int(ends[1]['layer'])})"


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
    traces: list[Trace] = []
    for quantity in ("sv_alignment", "relative_l2"):
        known = rows[rows[f"{quantity}_low"].notna()]
        if len(known):
            limits = known[f"{quantity}_low"], known[f"{quantity}_high"]
            panel = BELOW if quantity == "relative_l2" else {}
            traces += [{**edge, **panel} for edge in band(known["layer"], *limits, color, 0.22)]
    return traces


def band(x: pd.Series, low: pd.Series, high: pd.Series, color: str, opacity: float) -> list[Trace]:
    """Two invisible edges with the space between them filled."""
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
    """Unrelated experts dotted, at sqrt 2 and at 0; for matched series a band from there to matched rotated
    experts."""
    by_layer = (
        matched_rows(rows)
        .groupby("layer", as_index=False)
        .agg(l2=("null_l2_matched", "min"), r=("null_sv_matched", "max"))
    )
    known = by_layer[by_layer["l2"].notna()]
    traces: list[Trace] = []
    if len(known):
        unrelated = pd.Series(UNRELATED_L2, index=known.index)
        traces += [{**edge, **BELOW} for edge in band(known["layer"], known["l2"], unrelated, GREY, 0.45)]
        traces += band(known["layer"], pd.Series(0.0, index=known.index), known["r"], GREY, 0.45)
    layers = np.array(sorted(rows["layer"].unique()))
    for level, quantity, panel in ((UNRELATED_L2, "relative L2", BELOW), (0.0, "R", {})):
        line = grey_line(layers, np.full(len(layers), level), f"unrelated experts, {quantity}", "dot")
        traces.append({**line, "showlegend": False, **panel})
    return traces


def matched_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of series whose neurons were matched."""
    return rows[rows["series"].str.endswith(MATCHED_SERIES)]


def grey_legend(rows: pd.DataFrame) -> list[Trace]:
    """The first legend says what grey means; the second one names the series."""
    entries = [
        legend_entry("unrelated experts: R 0, relative L2 √2", {"color": GREY, "width": 1.5, "dash": "dot"})
    ]
    if matched_rows(rows)["null_l2_matched"].notna().any():
        line = {"color": "rgba(138,144,153,0.5)", "width": 9}
        entries.append(legend_entry("matched rotated experts", line))
    return entries


def legend_entry(name: str, line: dict[str, Any], legend: str = "legend") -> Trace:
    entry = {"type": "scatter", "mode": "lines", "x": [None], "y": [None], "hoverinfo": "skip"}
    return {**entry, "name": name, "line": line, "legend": legend}


EXPERT_DISTANCE = [distance_chart(matrix) for matrix in PROJECTIONS]


# --- drift between two checkpoints


def unmatched(tables: Tables) -> pd.DataFrame:
    """Rows of experts in stored order: what training did, not what matching undoes."""
    rows = tables["geometry"]
    return rows[~rows["matched"].astype(bool)]


def drift_heatmap(tables: Tables) -> Figure:
    """Relative L2 of every expert in every layer, one map per matrix."""
    rows = unmatched(tables)
    matrices = [name for name in (*PROJECTIONS, "router") if name in set(rows["matrix"])]
    data, captions = [], []
    for name in matrices:
        group = rows[rows["matrix"] == name]
        grid = group.pivot(index="layer", columns="expert_a", values="relative_l2").sort_index()
        values = grid.to_numpy(float)
        top = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
        experts, layers, high = list(grid.columns), list(grid.index), max(top, 1e-12)
        axes = ("expert", "layer")
        data.append(heatmap(values, experts, layers, low=0.0, high=high, label="relative L2", axes=axes))
        captions.append(drift_caption(name, group))
    yaxis = {"type": "category", "autorange": "reversed"}
    return Figure(
        "drift_heatmap",
        "Relative L2 per expert and layer",
        captions[0],
        ("relative_l2",),
        data,
        base_layout("expert", "layer", xaxis={"type": "category"}, yaxis=yaxis),
        Slider("matrix", matrices, captions=captions),
        height=340 + 6 * max(0, rows["layer"].nunique() - 24),
        details="Each expert's matrix or router row against itself in the other checkpoint, scale aside.",
    )


def drift_caption(name: str, rows: pd.DataFrame) -> str:
    matrix = "router row" if name == "router" else name
    known = rows[rows["relative_l2"].notna()]
    if known.empty:
        return f"{matrix}: no distance, all zeros."
    mean = float(known["relative_l2"].mean())
    return (
        f"Largest change, {matrix}: {largest_change(known)[1]}; mean of all {number(mean)} "
        f"(unrelated experts: {number(UNRELATED_L2)})."
    )


def largest_change(experts: pd.DataFrame) -> tuple[dict[str, int], str]:
    """Return where relative L2 is largest, as layer and expert and in words.

    It is a layer if its median expert explains most of the change (in logs), otherwise an expert. `experts`
    has one row per layer and expert, not all zero.
    """
    top = experts.loc[experts["relative_l2"].idxmax()]
    layer = int(top["layer"])
    rows = experts[experts["layer"] == layer]
    of_layer, of_all = (float(frame["relative_l2"].median()) for frame in (rows, experts))
    if of_layer**2 >= top["relative_l2"] * of_all and of_layer > of_all:
        means = experts.groupby("layer")["relative_l2"].mean()
        layer = int(means.idxmax())
        words = f"mean relative L2 {number(means.max())} over its experts"
        return {"layer": layer}, f"layer {layer} as a whole, {words}"
    expert = int(top["expert_a"])
    words = f"layer {layer}, expert {expert}, relative L2 {number(top['relative_l2'])}"
    return {"layer": layer, "expert": expert}, words


def router_cosines(tables: Tables) -> Figure:
    """Cosine of every router row with itself in the other checkpoint, per layer."""
    rows = unmatched(tables)
    rows = rows[(rows["matrix"] == "router") & rows["cosine"].notna()].sort_values(["layer", "expert_a"])
    median = rows.groupby("layer")["cosine"].median()
    layers = median.index.to_numpy()
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
        "x": layers,
        "y": median.to_numpy(float),
        "line": {"color": CATEGORICAL[0], "width": 2.5},
        "hovertemplate": "layer %{x}<br>median %{y:.5g}<extra></extra>",
    }
    lowest = rows.loc[rows["cosine"].idxmin()]
    return Figure(
        "router_cosines",
        "Router row cosine per layer",
        f"Lowest in layer {lowest['layer']}, expert {lowest['expert_a']}: {number(lowest['cosine'])}; "
        f"median {number(rows['cosine'].median())} (unchanged: 1; unrelated rows: 0).",
        ("geometry.cosine",),
        [each, line, grey_line(layers, np.ones(len(layers)), "unchanged: 1")],
        base_layout("layer", "cosine", xaxis=layer_axis(layers)),
        details="Cosine of each router row before and after; the axis does not start at 0. A vector added "
        "to all rows turns each of them without changing a softmax.",
    )


def norm_ratios(tables: Tables) -> Figure:
    """Median and range of the norm ratio per layer."""
    rows = unmatched(tables)
    rows = rows[rows["norm_ratio"].notna()]
    data: list[Trace] = []
    ranges = []
    names = [name for name in (*PROJECTIONS, "router") if name in set(rows["matrix"])]
    for index, name in enumerate(names):
        ratio = rows[rows["matrix"] == name].groupby("layer")["norm_ratio"].agg(["median", "min", "max"])
        whiskers = {
            "type": "data",
            "symmetric": False,
            "array": (ratio["max"] - ratio["median"]).to_numpy(float),
            "arrayminus": (ratio["median"] - ratio["min"]).to_numpy(float),
            "thickness": 1,
            "width": 3,
        }
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": ratio.index + 0.15 * (index - (len(names) - 1) / 2),  # whiskers side by side
                "customdata": ratio.index.to_numpy(),
                "y": ratio["median"].to_numpy(float),
                "line": {**category_style(index), "width": 2},
                "error_y": whiskers,
                "hovertemplate": f"{name}<br>layer %{{customdata}}<br>median %{{y:.5g}}<extra></extra>",
            }
        )
        ranges.append(f"{name} {number(ratio['min'].min())} to {number(ratio['max'].max())}")
    layers = np.array(sorted(rows["layer"].unique()))
    data.append(grey_line(layers, np.ones(len(layers)), "unchanged: 1"))
    return Figure(
        "norm_ratios",
        "Norm after over before, per layer",
        f"After over before: {listed(ranges)} (unchanged: 1).",
        ("norm_ratio",),
        data,
        base_layout("layer", "norm, after/before", xaxis=layer_axis(layers)),
        details="Median over a layer's experts; whiskers reach from the smallest to the largest.",
    )


DRIFT = [
    FigureSpec("drift_heatmap", ("geometry",), drift_heatmap, wide=True),
    MatrixFigure("router_cosines", ("geometry",), router_cosines, matrix="router"),
    FigureSpec("norm_ratios", ("geometry",), norm_ratios),
]


# --- two traces


def agreement_layers(tables: Tables) -> Figure:
    """Share of experts and of whole sets that two traces agree on, per layer, beside random pairs."""
    rows = tables["agreement"].sort_values("layer")
    layers = rows["layer"].to_numpy()
    data: list[Trace] = []
    for index, (column, name) in enumerate((("overlap", "overlap"), ("equal_sets", "equal sets"))):
        line: Trace = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": layers,
            "y": rows[column].to_numpy(float),
            "line": {**category_style(index), "width": 2},
            "marker": {"size": 5},
            "hovertemplate": f"layer %{{x}}<br>{name} %{{y:.2%}}<extra></extra>",
        }
        data += [line, grey_line(layers, rows[f"{column}_chance"].to_numpy(float), f"{name}, random tokens")]
    data.append(grey_line(layers, np.ones(len(layers)), "identical: 1", "dot"))
    return Figure(
        "agreement_layers",
        "Agreement of two traces per layer",
        agreement_words(rows),
        ("overlap", "equal_sets", "overlap_chance", "equal_sets_chance"),
        data,
        base_layout(
            "layer", "share", xaxis=layer_axis(layers), yaxis={"tickformat": ".0%", "range": [0, 1.03]}
        ),
        height=380,
    )


def agreement_words(rows: pd.DataFrame) -> str:
    """Where two traces agree least, with the chance level."""
    least = rows.loc[rows["equal_sets"].idxmin()]
    return (
        f"Least in layer {int(least['layer'])}: {100 * least['equal_sets']:.1f} % of tokens have the same "
        f"experts (random tokens: {100 * least['equal_sets_chance']:.1f} %); overlap "
        f"{number(least['overlap'])} (random: {number(least['overlap_chance'])})."
    )


def agreement_divergence(tables: Tables) -> Figure:
    """Share of tokens whose experts differ in a layer for the first time."""
    rows = tables["agreement"].sort_values("layer")
    never = 1 - float(rows["first_divergence"].sum())
    bars: Trace = {
        "type": "bar",
        "name": "first difference",
        "x": rows["layer"].to_numpy(),
        "y": rows["first_divergence"].to_numpy(float),
        "marker": {"color": CATEGORICAL[1]},
        "hovertemplate": "layer %{x}<br>%{y:.2%} of tokens<extra></extra>",
    }
    alike = np.zeros(len(rows))
    return Figure(
        "agreement_divergence",
        "First layer in which tokens diverge",
        f"{100 * never:.1f} % of tokens have the same experts in all layers (identical traces: 100 %).",
        ("first_divergence",),
        [bars, grey_line(rows["layer"].to_numpy(), alike, "identical: 0", "dot")],
        base_layout("layer", "share of tokens", xaxis=layer_axis(rows["layer"]), yaxis={"tickformat": ".1%"}),
        height=380,
    )


AGREED = [
    FigureSpec("agreement_layers", ("agreement",), agreement_layers),
    FigureSpec("agreement_divergence", ("agreement",), agreement_divergence),
]


# --- two runs


def largest_changes(tables: Tables) -> Figure:
    """Largest change of each column between two runs, in units of its spread over rows."""
    rows = tables["changes"]
    rows = rows[np.isfinite(rows["spreads"].astype(float))].head(MOST_COLUMNS).iloc[::-1]
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "x": rows["spreads"].to_numpy(float),
            "y": rows["name"].tolist(),
            "customdata": rows["where"].tolist(),
            "marker": {"color": CATEGORICAL[0]},
            "hovertemplate": "%{y}<br>%{x:.3g} spreads at %{customdata}<extra></extra>",
        }
    ]
    caption = "No column changed by a finite number of spreads (0: unchanged)."
    if len(rows):
        top = rows.iloc[-1]
        caption = (
            f"Most: {top['name']}, {number(top['spreads'])} spreads at {top['where']} "
            "(0: unchanged; 1: as much as rows differ)."
        )
    layout = base_layout("largest change / spread", "", showlegend=False, yaxis={"automargin": True})
    height = 160 + 22 * len(rows)
    title = "Largest change of each column"
    return Figure("largest_changes", title, caption, (), data, layout, height=height)


LARGEST_CHANGES = FigureSpec("largest_changes", ("changes",), largest_changes)
FIGURES = [*EXPERT_DISTANCE, *DRIFT, *AGREED, LARGEST_CHANGES]
