"""Routing metrics against the layer.

The value with its interval, random routing and collapse drawn beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import cut_whiskers, cut_words, plain_log
from moescope.plotting.style import (
    Figure,
    FigureSpec,
    Tables,
    Trace,
    base_layout,
    category_style,
    from_to,
    grey_line,
    number,
)
from moescope.routing.metrics import METRICS
from moescope.weights.figures_alignment import layer_axis

RANDOM = "random routing"
KNOWS_NOTHING = "a router that knows nothing"
IN_LEGENDS = {KNOWS_NOTHING: "knows nothing", "tokens shuffled within documents": "tokens shuffled"}
OPENING = {
    "cv": "Unevenness of load (cv)",
    "max_violation": "The busiest expert's excess (max violation)",
    "load_entropy_share": "Load entropy over log n",
    "gini": "Unevenness of load (Gini)",
    "dropped": "The share of slots that went empty",
    "router_similarity_abs": "Mean |cos| of router rows",
    "sequential_consistency": "The share of tokens that go where the one before went",
}


def can_draw(spec: FigureSpec, tables: Tables) -> bool:
    """Whether the run holds what the figure needs.

    Imported traces have no logits, a single domain no affinities.
    """
    if any(name not in tables or tables[name].empty for name in spec.needs):
        return False
    return all(len(values_of(tables, metric)) for metric in spec.metrics)


def values_of(tables: Tables, metric: str, domain: str = "") -> pd.DataFrame:
    """A metric's rows, one a layer: all domains together unless one is named.

    Layers where it cannot be said are left out.
    """
    rows = tables["routing_layers"]
    found = rows[(rows["metric"] == metric) & (rows["domain"] == domain) & rows["value"].notna()]
    return found.sort_values("layer")


def metric_name(metric: str) -> str:
    return METRICS[metric].title or metric.replace("_", " ")


def line_name(metric: str) -> str:
    """Short, for legends."""
    if metric.startswith("gate_weight_"):
        return "by gate weight"
    return metric_name(metric).removeprefix("specialisation ")


def subject(metric: str) -> str:
    """The metric's name as it opens a sentence."""
    name = OPENING.get(metric, metric_name(metric))
    return name[:1].upper() + name[1:]


def span(rows: pd.DataFrame) -> str:
    """ "runs from 0.2 (layer 3) to 0.9 (layer 5)"."""
    low, high = rows.loc[rows["value"].idxmin()], rows.loc[rows["value"].idxmax()]
    return from_to(low["value"], f"layer {low['layer']}", high["value"], f"layer {high['layer']}")


def between(values: pd.Series) -> str:
    """One number, or the two ends where layers differ."""
    low, high = number(values.min()), number(values.max())
    return low if low == high else f"{low} to {high}"


def references(rows: pd.DataFrame, floor_name: str) -> str:
    """What chance and collapse give, in words; what has no bound is left out."""
    parts = []
    if rows["chance"].notna().any():
        parts.append(f"{between(rows['chance'].dropna())} for {floor_name}")
    if rows["collapse"].notna().any():
        parts.append(f"{between(rows['collapse'].dropna())} at collapse")
    return ", ".join(parts)


def value_line(rows: pd.DataFrame, name: str, index: int, x: str = "layer") -> Trace:
    """The values, with their interval over documents where there is one."""
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": rows[x].to_numpy(),
        "y": rows["value"].to_numpy(float),
        "line": {**category_style(index), "width": 2},
        "marker": {"size": 6},
        "hovertemplate": f"{x} %{{x}}<br>{name} %{{y:.4g}}<extra></extra>",
    }
    if rows["low"].notna().any():
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": (rows["high"] - rows["value"]).to_numpy(float),
            "arrayminus": (rows["value"] - rows["low"]).to_numpy(float),
            "thickness": 1.2,
            "width": 3,
        }
    return trace


def reference_lines(rows: pd.DataFrame, floor_name: str, collapse: bool = True, of: str = "") -> list[Trace]:
    """Chance dashed, collapse dotted, both grey."""
    lines = []
    layers = rows["layer"].to_numpy()
    if rows["chance"].notna().any():
        lines.append(
            grey_line(layers, rows["chance"].to_numpy(float), IN_LEGENDS.get(floor_name, floor_name) + of)
        )
    if collapse and rows["collapse"].notna().any():
        lines.append(grey_line(layers, rows["collapse"].to_numpy(float), "collapse" + of, "dot"))
    return lines


def interval_words(rows: pd.DataFrame) -> str:
    return (
        "Whiskers: 95 % interval over documents."
        if rows["low"].notna().any()
        else "No interval: it needs 20 documents, and is not made for every metric."
    )


def by_layer(
    name: str,
    metrics: Sequence[str],
    axis: str,
    *,
    floor_name: str = RANDOM,
    log: bool = False,
    draw_collapse: bool = True,
    from_zero: bool = True,
) -> FigureSpec:
    """Figure of one metric over layers, or of several that share a scale.

    The title is about the first, which must be there.
    """

    def draw(tables: Tables) -> Figure:
        found = {metric: rows for metric in metrics if len(rows := values_of(tables, metric))}
        first = found[metrics[0]]
        title = f"{subject(metrics[0])} {span(first)}; {references(first, floor_name)}"
        data = [
            value_line(rows, line_name(metric), index) for index, (metric, rows) in enumerate(found.items())
        ]
        drawn: list[np.ndarray] = []  # chances; those that are the same are drawn once, and named once
        for metric, rows in found.items():
            chance = rows["chance"].to_numpy(float)
            if any(
                chance.shape == seen.shape and np.allclose(chance, seen, equal_nan=True) for seen in drawn
            ):
                continue
            of = f", {metric_name(metric)}" if drawn else ""
            lines = reference_lines(rows, floor_name, draw_collapse and not drawn, of)
            data += [{**line, "showlegend": False} for line in lines] if drawn else lines
            drawn.append(chance)
        stated = "" if draw_collapse else f" At collapse: {between(first['collapse'])}."
        data, cut = cut_whiskers(data) if log else (data, None)
        caption = (
            f"{METRICS[metrics[0]].meaning} Dashed: {floor_name}"
            f"{'; dotted: collapse' if draw_collapse else ''}.{stated} "
            f"{interval_words(first)}{cut_words(cut)}"
        )
        yaxis = (plain_log(data) if log else None) or {"rangemode": "tozero" if from_zero else "normal"}
        layout = base_layout("layer", axis, xaxis=layer_axis(pd.Index(first["layer"])), yaxis=yaxis)
        return Figure(name, title, caption, (*found, "chance", "collapse"), data, layout)

    return FigureSpec(name, ("routing_layers",), draw, metrics=(metrics[0],))


def by_domain(
    name: str, metric: str, axis: str, *, floor_name: str = RANDOM, log: bool = False
) -> FigureSpec:
    """The metric of each domain alone, one line a domain.

    Floors differ with the domains' lengths: the largest is drawn.
    """

    def draw(tables: Tables) -> Figure:
        rows = tables["routing_layers"]
        rows = rows[(rows["metric"] == metric) & (rows["domain"] != "") & rows["value"].notna()].sort_values(
            "layer"
        )
        data = [
            value_line(mine, str(domain), index)
            for index, (domain, mine) in enumerate(rows.groupby("domain", sort=True))
        ]
        means = rows.groupby("domain")["value"].mean()
        chances = rows.groupby("layer", as_index=False).agg(
            chance=("chance", "max"), collapse=("collapse", "max")
        )
        data += reference_lines(
            chances, f"{floor_name} (largest)" if chances["chance"].nunique() else floor_name, log
        )
        title = (
            f"{subject(metric)}, mean over layers, "
            f"{from_to(means.min(), str(means.idxmin()), means.max(), str(means.idxmax()))}; "
            f"{references(rows, floor_name)}"
        )
        data, cut = cut_whiskers(data) if log else (data, None)
        caption = f"{METRICS[metric].meaning} Of each domain alone. {interval_words(rows)}{cut_words(cut)}"
        yaxis = (plain_log(data) if log else None) or {"rangemode": "tozero"}
        layout = base_layout("layer", axis, xaxis=layer_axis(pd.Index(chances["layer"])), yaxis=yaxis)
        return Figure(name, title, caption, (metric, "domain", "chance", "collapse"), data, layout)

    return FigureSpec(name, ("routing_layers", "domains"), draw, metrics=(metric,))


DECISIONS = [
    by_layer(
        "routing_entropy_by_layer",
        ["routing_entropy", "chosen_entropy"],
        "entropy (nats)",
        floor_name=KNOWS_NOTHING,
        draw_collapse=False,
    ),
    by_layer(
        "confidence_by_layer", ["confidence", "top_gap"], "probability", floor_name=KNOWS_NOTHING, log=False
    ),
    by_layer("selection_margin_by_layer", ["selection_margin"], "selection score", floor_name=KNOWS_NOTHING),
    by_layer("z_loss_by_layer", ["z_loss"], "squared log-sum-exp", floor_name=KNOWS_NOTHING),
    by_layer(
        "sequence_by_layer", ["sequential_consistency", "adjacent_jaccard"], "shared with the token before"
    ),
    by_domain("routing_entropy_by_domain", "routing_entropy", "entropy (nats)", floor_name=KNOWS_NOTHING),
]
VOCABULARY = [
    by_layer(
        "token_information_by_layer",
        ["token_information"],
        "nats",
        floor_name="tokens shuffled within documents",
    ),
    by_layer(
        "specialisation_by_layer",
        [
            "vocabulary_specialisation_input",
            "vocabulary_specialisation_next",
            "vocabulary_specialisation_predicted",
        ],
        "share at its favourite expert",
        floor_name="tokens shuffled",
    ),
]
