"""Figures of routing metrics against the layer: values with intervals, chance level and collapse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import cut_whiskers, cut_words, plain_log
from moescope.plotting.style import (
    RANDOM,
    UNIFORM,
    base_layout,
    capital,
    category_style,
    from_to,
    grey_line,
    layer_axis,
    span,
    values_of,
)
from moescope.routing.metrics import METRICS
from moescope.verb import Figure, FigureSpec, Tables, Trace

INDEPENDENT = "independent tokens"
PERMUTED_TOKENS = "tokens permuted within documents"
IN_CAPTIONS = {PERMUTED_TOKENS: "permuted tokens"}
IN_LEGENDS = {UNIFORM: "uniform router", **IN_CAPTIONS}
HEADINGS = {
    "cv": "Load imbalance (CV)",
    "load_entropy_share": "Load entropy over log n",
    "gini": "Load imbalance (Gini)",
    "dropped": "Share of empty expert slots",
    "router_similarity_abs": "Mean |cos| of router rows",
    "sequential_consistency": "Repeated top expert",
}


def metric_name(metric: str) -> str:
    return METRICS[metric].title or metric.replace("_", " ")


def short_name(metric: str) -> str:
    """The metric's name in the legend of a figure that names what it is about."""
    if metric.startswith("gate_weight_"):
        return "by gate weight"
    return metric_name(metric).removeprefix("specialisation ")


def heading(metric: str) -> str:
    """The metric's name at the start of a title or caption."""
    return HEADINGS.get(metric) or capital(metric_name(metric))


def comparable(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of layers with at least a tenth of the median layer's tokens.

    Few tokens make loads uneven by chance: a prefill may end with a single token in the last layer.
    """
    tokens = rows.get("tokens", pd.Series(dtype=float))
    return rows[~(rows["tokens"] < tokens.median() / 10)] if tokens.notna().any() else rows


def layer_range(rows: pd.DataFrame) -> str:
    """ "runs from 0.2 (layer 3) to 0.9 (layer 5)"."""
    rows = comparable(rows)
    low, high = rows.loc[rows["value"].idxmin()], rows.loc[rows["value"].idxmax()]
    return from_to(low["value"], f"layer {low['layer']}", high["value"], f"layer {high['layer']}")


def references(rows: pd.DataFrame, chance: str) -> str:
    """ "0.01 for random routing, 1.7 at collapse", as far as both exist."""
    parts, rows = [], comparable(rows)
    if rows["chance"].notna().any():
        parts.append(f"{span(rows['chance'].dropna())} for {IN_CAPTIONS.get(chance, chance)}")
    if rows["collapse"].notna().any():
        parts.append(f"{span(rows['collapse'].dropna())} at collapse")
    return ", ".join(parts)


def value_lines(rows: pd.DataFrame, name: str, index: int) -> list[Trace]:
    """The values by layer with their intervals; those of corrected values are drawn around open markers."""
    line: Trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": rows["layer"].to_numpy(),
        "y": rows["value"].to_numpy(float),
        "line": {**category_style(index), "width": 2},
        "marker": {"size": 6},
        "hovertemplate": f"layer %{{x}}<br>{name} %{{y:.4g}}<extra></extra>",
    }
    corrected = rows["corrected"].notna().any()
    if rows["low"].notna().any():
        estimate = rows["corrected"].fillna(rows["value"])
        bars = {
            "type": "data",
            "symmetric": False,
            "array": (rows["high"] - estimate).to_numpy(float),
            "arrayminus": (estimate - rows["low"]).to_numpy(float),
            "thickness": 1.2,
            "width": 3,
        }
        if not corrected:
            return [{**line, "error_y": bars}]
        name = f"{name}, corrected"
        return [
            line,
            {
                **line,
                "mode": "markers",
                "name": name,
                "y": estimate.to_numpy(float),
                "marker": {"size": 7, "symbol": "circle-open", "color": line["line"]["color"]},
                "error_y": bars,
                "customdata": estimate.to_numpy(float),  # a logarithmic axis moves estimates of 0
                "hovertemplate": f"layer %{{x}}<br>{name} %{{customdata:.4g}}<extra></extra>",
            },
        ]
    return [line]


def reference_lines(rows: pd.DataFrame, chance: str, collapse: bool = True) -> list[Trace]:
    """The chance level dashed and collapse dotted, both grey."""
    layers, lines = rows["layer"].to_numpy(), []
    if rows["chance"].notna().any():
        lines.append(grey_line(layers, rows["chance"].to_numpy(float), IN_LEGENDS.get(chance, chance)))
    if collapse and rows["collapse"].notna().any():
        lines.append(grey_line(layers, rows["collapse"].to_numpy(float), "collapse", "dot"))
    return lines


def in_colour(line: Trace, index: int, of: str) -> Trace:
    """A reference line in the colour of the one line that it belongs to."""
    color = category_style(index)["color"]
    name = f"{line['name']}, {of}"
    return {
        **line,
        "name": name,
        "line": {**line["line"], "color": color},
        "hovertemplate": f"{name}: %{{y:.4g}}<extra></extra>",
        "meta": {"reference": True},
    }


def interval_words(rows: pd.DataFrame) -> tuple[str, str]:
    """(what a caption says on intervals: only where there is none, what the details say)."""
    if rows["low"].isna().all():
        return " No interval.", ""
    if rows["corrected"].notna().any():
        return "", "Open markers: values without the bias of few documents, with 95 % intervals."
    return "", "Error bars: 95 % intervals over documents."


def layer_figure(
    name: str,
    title: str,
    caption: str,
    columns: tuple[str, ...],
    data: list[Trace],
    axis: str,
    layers: pd.Series,
    log: bool,
    intervals: pd.DataFrame,
    from_zero: bool = True,
) -> Figure:
    caption_more, details = interval_words(intervals)
    data, cut = cut_whiskers(data) if log else (data, None)
    yaxis = (plain_log(data) if log else None) or {"rangemode": "tozero" if from_zero else "normal"}
    yaxis = {"exponentformat": "power", **yaxis}  # not -5µ
    layout = base_layout("layer", axis, xaxis=layer_axis(layers), yaxis=yaxis)
    return Figure(
        name,
        title,
        caption + caption_more,
        (*columns, "routing_layers.chance", "collapse"),
        data,
        layout,
        details=details + cut_words(cut),
    )


def by_layer(
    name: str,
    metrics: Sequence[str],
    axis: str,
    *,
    chance: str = RANDOM,
    log: bool = False,
    draw_collapse: bool = True,
    from_zero: bool = True,
) -> FigureSpec:
    """Spec of one metric over layers, or of several on one scale; the first is required and captioned."""

    def draw(tables: Tables) -> Figure:
        frames = {metric: rows for metric in metrics if len(rows := values_of(tables, metric))}
        first = frames[metrics[0]]
        data = []
        for index, (metric, rows) in enumerate(frames.items()):
            data += value_lines(rows, short_name(metric), index)
        drawn: list[np.ndarray] = []  # equal chance levels are drawn once; another has its metric's colour
        for index, (metric, rows) in enumerate(frames.items()):
            level = rows["chance"].to_numpy(float)
            if any(level.shape == a.shape and np.allclose(level, a, equal_nan=True) for a in drawn):
                continue
            lines = reference_lines(rows, chance, draw_collapse and not drawn)
            data += [in_colour(line, index, short_name(metric)) for line in lines] if drawn else lines
            drawn.append(level)
        title = f"{heading(metrics[0])} by layer"
        caption = f"{heading(metrics[0])} {layer_range(first)}; {references(first, chance)}."
        return layer_figure(
            name, title, caption, (*frames,), data, axis, first["layer"], log, first, from_zero
        )

    draw.__doc__ = f"{heading(metrics[0])} of each layer, with chance level and collapse."
    return FigureSpec(name, ("routing_layers",), draw, metrics=(metrics[0],))


def by_domain(name: str, metric: str, axis: str, *, chance: str = RANDOM, log: bool = False) -> FigureSpec:
    """Spec of a metric over layers with one line per domain and the largest of their chance levels."""

    def draw(tables: Tables) -> Figure:
        rows = tables["routing_layers"]
        rows = rows[(rows["metric"] == metric) & (rows["domain"] != "") & rows["value"].notna()]
        rows = rows.sort_values("layer")
        data = [
            line
            for index, (domain, mine) in enumerate(rows.groupby("domain", sort=True))
            for line in value_lines(mine, str(domain), index)
        ]
        largest = rows.groupby("layer", as_index=False)[["chance", "collapse"]].max()
        data += reference_lines(
            largest, f"{chance} (largest)" if largest["chance"].nunique() else chance, log
        )
        means = rows.groupby("domain")["value"].mean()
        caption = (
            f"{heading(metric)}, mean over layers, "
            f"{from_to(means.min(), str(means.idxmin()), means.max(), str(means.idxmax()))}; "
            f"{references(rows, chance)}."
        )
        title = f"{heading(metric)} by layer and domain"
        return layer_figure(name, title, caption, (metric, "domain"), data, axis, largest["layer"], log, rows)

    draw.__doc__ = f"{heading(metric)} of each layer and domain, with chance level."
    return FigureSpec(name, ("routing_layers", "domains"), draw, metrics=(metric,))


DECISIONS = [
    by_layer(
        "routing_entropy_by_layer",
        ["routing_entropy", "chosen_entropy"],
        "entropy (nats)",
        chance=UNIFORM,
        draw_collapse=False,
    ),
    by_layer("confidence_by_layer", ["confidence", "top_gap"], "probability", chance=UNIFORM),
    by_layer("selection_margin_by_layer", ["selection_margin"], "selection score", chance=UNIFORM),
    by_layer("load_balancing_loss_by_layer", ["load_balancing_loss"], "n Σ f P", from_zero=False),
    by_layer("z_loss_by_layer", ["z_loss"], "squared log-sum-exp", chance=UNIFORM),
    by_layer(
        "sequence_by_layer",
        ["sequential_consistency", "adjacent_jaccard"],
        "shared with the previous token",
        chance=INDEPENDENT,
    ),
    by_domain("routing_entropy_by_domain", "routing_entropy", "entropy (nats)", chance=UNIFORM),
]
VOCABULARY = [
    by_layer("token_information_by_layer", ["token_information"], "nats", chance=PERMUTED_TOKENS),
    by_layer(
        "specialisation_by_layer",
        [f"vocabulary_specialisation_{role}" for role in ("input", "next", "predicted")],
        "share at its favourite expert",
        chance=PERMUTED_TOKENS,
    ),
]
