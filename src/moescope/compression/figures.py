"""Figures of the damage of a plan, next to the original and random controls, and of experts' saliency."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd

from moescope.comparison.figures import EXPERT_DISTANCE
from moescope.compression.figures_groups import dendrogram, group_sizes, has_groups
from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    base_layout,
    counted,
    grey_line,
    layer_axis,
    named_layers,
    number,
    ratio_heatmap,
    ratio_range,
)
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

SCORES = {"frequency": "tokens", "gate_weight": "gate_weight", "ean": "ean", "reap": "reap"}
SCORE_NAMES = {"tokens": "Routed tokens", "gate_weight": "Gate weight", "ean": "EAN", "reap": "REAP score"}
CONTROL = "random control"


def method_of(tables: Tables) -> str:
    return str(tables["clusters"]["method"].iloc[0])


def layer_rows(tables: Tables) -> pd.DataFrame:
    return tables["damage"][tables["damage"]["layer"].notna()].astype({"layer": int})


def model_rows(tables: Tables) -> pd.DataFrame:
    return tables["damage"][tables["damage"]["layer"].isna()]


def of_plan(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["method"] == method_of(tables)]


def of_controls(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["method"] != method_of(tables)]


def control_traces(rows: pd.DataFrame, column: str) -> list[Trace]:
    """The mean of the controls per layer, and their range shaded."""
    known = rows[rows[column].notna()]
    if known.empty:
        return []
    spread = known.groupby("layer")[column].agg(["min", "mean", "max"]).reset_index()
    controls = known["method"].nunique()
    name = f"{CONTROL}, mean of {controls}" if controls > 1 else CONTROL
    edge: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": spread["layer"].to_numpy(),
        "line": {"width": 0, "color": GREY},
        "showlegend": False,
        "hoverinfo": "skip",
    }
    fill = {"fill": "tonexty", "fillcolor": "rgba(138,144,153,0.22)"}
    shade = [
        {**edge, "y": spread["min"].to_numpy(float)},
        {**edge, "y": spread["max"].to_numpy(float), **fill},
    ]
    mean = grey_line(spread["layer"].to_numpy(), spread["mean"].to_numpy(float), name)
    return [*(shade if controls > 1 else []), mean]


def line(rows: pd.DataFrame, column: str, name: str, dash: str) -> Trace:
    ordered = rows.sort_values("layer")
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": ordered["layer"].to_numpy(),
        "y": ordered[column].to_numpy(float),
        "line": {"color": CATEGORICAL[0], "width": 2, "dash": dash},
        "marker": {"size": 6},
        "hovertemplate": f"layer %{{x}}<br>{name} %{{y:.3g}}<extra></extra>",
    }


def control_mean(values: pd.Series) -> str:
    """The controls' mean in parentheses: a caption's chance level; "" without controls."""
    mean = values.mean()
    return f" (random controls: {number(mean)})" if np.isfinite(mean) else ""


def error_column(tables: Tables) -> str | None:
    """measured_error, or else predicted_error, or None where the plan has neither."""
    plan = of_plan(tables, layer_rows(tables))
    return next((name for name in ("measured_error", "predicted_error") if plan[name].notna().any()), None)


def worst_layer(tables: Tables, column: str) -> tuple[int, float, pd.Series]:
    """The layer where the column is largest, its value, and the controls' values there."""
    rows = layer_rows(tables)
    plan, controls = of_plan(tables, rows), of_controls(tables, rows)
    worst = plan.loc[plan[column].idxmax()]
    return int(worst["layer"]), float(worst[column]), controls[controls["layer"] == worst["layer"]][column]


def layer_layout(rows: pd.DataFrame, quantity: str) -> dict[str, object]:
    axis = layer_axis(sorted(rows["layer"].unique()))
    return base_layout("layer", quantity, xaxis=axis, yaxis={"rangemode": "tozero"})


def errors_by_layer(tables: Tables) -> Figure:
    """Predicted and measured error of each layer's routed output, with random controls."""
    rows = layer_rows(tables)
    plan = of_plan(tables, rows)
    column = error_column(tables)
    assert column is not None
    layer, value, controls = worst_layer(tables, column)
    data = control_traces(of_controls(tables, rows), column)
    for kind, dash in (("predicted", "solid"), ("measured", "dot")):
        if plan[f"{kind}_error"].notna().any():
            data.append(line(plan, f"{kind}_error", f"{method_of(tables)}, {kind}", dash))
    return Figure(
        "errors_by_layer",
        "Error of the routed output per layer",
        f"Largest in layer {layer}: {number(value)}{control_mean(controls)}. 0: unchanged; 1: as without "
        "routed experts.",
        ("predicted_error", "measured_error"),
        data,
        layer_layout(rows, "error of the routed output"),
        details="Predicted on calibration states before writing, measured on held-out states in the written "
        "model. Each layer gets the original's input. Shaded: range of the random controls.",
    )


def router_kl_by_layer(tables: Tables) -> Figure:
    """KL divergence of each layer's new router from the old one, with random controls."""
    rows = layer_rows(tables)
    layer, value, controls = worst_layer(tables, "router_kl")
    data = control_traces(of_controls(tables, rows), "router_kl")
    data.append(line(of_plan(tables, rows), "router_kl", method_of(tables), "solid"))
    return Figure(
        "router_kl_by_layer",
        "KL divergence of the router per layer",
        f"Largest in layer {layer}: {number(value)} nats{control_mean(controls)}. 0: unchanged.",
        ("router_kl",),
        data,
        layer_layout(rows, "router KL (nats)"),
        details="From the old router's probabilities to the new one's, on calibration states. Pruned "
        "experts: -log of the kept probability; merged ones: KL from the sum over each group's members.",
    )


# --- the whole model


def points(
    name: str,
    values: Iterable[float],
    color: str,
    labels: Iterable[str],
    intervals: Iterable[tuple[float, float]] | None = None,
) -> list[Trace]:
    values, labels = list(values), list(labels)
    limits = [(math.nan, math.nan)] * len(values) if intervals is None else list(intervals)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label,
            "x": [name],
            "y": np.array([value], float),
            "marker": {"size": 12, "color": color},
            "showlegend": False,
            "cliponaxis": False,
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [high - value],
                "arrayminus": [value - low],
            },
            "hovertemplate": f"{label}: %{{y:.4g}}<extra></extra>",
        }
        for value, label, (low, high) in zip(values, labels, limits, strict=True)
    ]


def whole_model(tables: Tables, column: str) -> tuple[pd.Series, pd.DataFrame]:
    """The plan's row for the whole model, and those of the controls where the column is known."""
    rows = model_rows(tables)
    controls = of_controls(tables, rows)
    return of_plan(tables, rows).iloc[0], controls[controls[column].notna()]


def perplexities(tables: Tables) -> Figure:
    """Perplexity of original, compressed model and random controls on held-out text."""
    plan, controls = whole_model(tables, "perplexity")
    before, after, method = float(plan["perplexity_original"]), float(plan["perplexity"]), method_of(tables)
    change = 100 * (after / before - 1)
    names = ["original", method, *([CONTROL] if len(controls) else [])]
    data = [
        {**grey_line(names, [before] * len(names), "original"), "showlegend": False},
        *points("original", [before], GREY, ["original"]),
        *points(method, [after], CATEGORICAL[0], [method]),
        *points(CONTROL, controls["perplexity"], GREY, controls["method"]),
    ]
    return Figure(
        "perplexities",
        "Perplexity on held-out text",
        f"{number(after)}, {number(abs(change))} % {'above' if change >= 0 else 'below'} the original's "
        f"{number(before)}{control_mean(controls['perplexity'])}.",
        ("perplexity", "perplexity_original"),
        data,
        base_layout(
            "model",
            "perplexity",
            xaxis=categories(names),
            yaxis=wide_axis([before, after, *controls["perplexity"]]),
        ),
        details="Each random control drops or merges as many experts at random, with another seed. A method "
        "can save at most the difference between the controls and the original.",
    )


def verdict(controls: pd.DataFrame) -> str:
    """How many random controls the plan is better or worse than, from the interval of each difference.

    "; " and the counts; "" without controls, or where a limit is unknown.
    """
    limits = controls[["loss_above_plan_low", "loss_above_plan_high"]]
    if limits.empty or limits.isna().any(axis=None):
        return ""
    better = int((limits["loss_above_plan_low"] > 0).sum())
    worse = int((limits["loss_above_plan_high"] < 0).sum())
    undecided = len(limits) - better - worse
    of_all = f"of {counted(len(limits), 'random control')}"
    return f"; {better} better, {undecided} undecided, {worse} worse {of_all}"


def loss_differences(tables: Tables) -> Figure:
    """Differences of loss with their 95 % intervals: to the original, and of every control to the plan."""
    plan, controls = whole_model(tables, "loss_above_plan")
    method = method_of(tables)
    rows = [
        (f"{row['method']}<br>− {method}", row, "loss_above_plan", GREY) for _, row in controls.iterrows()
    ]
    # the last on top
    rows = [*rows[::-1], (f"{method}<br>− original", plan, "loss_increase", CATEGORICAL[0])]
    names = [name for name, *_ in rows]
    zero = {**grey_line([0] * len(names), names, "no difference"), "showlegend": False}
    documents = counted(int(plan["judged_documents"]), "document")
    above = f"Loss minus the original's: {number(plan['loss_increase'])}"
    if plan[["loss_increase_low", "loss_increase_high"]].isna().any():
        caption = f"{above} nats per token; {documents}: too few for intervals."
    else:
        interval = f"[{number(plan['loss_increase_low'])}, {number(plan['loss_increase_high'])}]"
        compared = verdict(of_controls(tables, model_rows(tables)))
        caption = f"{above} {interval} nats per token, {documents}{compared}."
    return Figure(
        "loss_differences",
        "Loss differences with 95 % intervals",
        caption,
        ("loss_increase", "loss_above_plan", "loss_above_plan_low", "judged_documents"),
        [zero, *(difference_trace(*row) for row in rows)],
        base_layout(
            "difference in loss (nats per token)",
            "models",
            yaxis={
                "title": {"text": "models", "standoff": 12},
                "type": "category",
                "range": [-0.5, len(names) - 0.5],
                "automargin": True,
            },
        ),
        height=160 + 50 * len(names),
        details="Means of domain means. Intervals: held-out documents resampled 2,000 times within domains, "
        "the same ones for both models of a difference. A control right of 0 is worse than the plan. The "
        "intervals are over documents; other random controls differ too.",
    )


def difference_trace(name: str, row: pd.Series, column: str, color: str) -> Trace:
    value, low, high = (float(row[f"{column}{end}"]) for end in ("", "_low", "_high"))
    limits = {"array": np.array([high - value]), "arrayminus": np.array([value - low])}
    interval = "" if math.isnan(low) or math.isnan(high) else f" [{number(low)}, {number(high)}]"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": np.array([value]),
        "y": [name],
        "error_x": {"type": "data", "symmetric": False, **limits, "thickness": 1.5, "width": 4},
        "marker": {"size": 9, "color": color},
        "showlegend": False,
        "hovertemplate": f"{name}: %{{x:.3g}}{interval}<extra></extra>",
    }


def divergences(tables: Tables) -> Figure:
    """Divergence of next-token distributions from the original's, with random controls."""
    plan, controls = whole_model(tables, "js_divergence")
    value, method = float(plan["js_divergence"]), method_of(tables)
    limits = ["js_divergence_low", "js_divergence_high"]
    names = [method, *([CONTROL] if len(controls) else [])]
    data = [
        {**grey_line(names, [math.log(2)] * len(names), "maximum", "dot"), "showlegend": False},
        *points(method, [value], CATEGORICAL[0], [method], [(plan[limits[0]], plan[limits[1]])]),
        *points(
            CONTROL,
            controls["js_divergence"],
            GREY,
            controls["method"],
            controls[limits].itertuples(index=False, name=None),
        ),
    ]
    return Figure(
        "divergences",
        "Jensen-Shannon divergence of next-token distributions",
        f"{number(value)} nats from the original{control_mean(controls['js_divergence'])}. 0: equal; "
        f"ln 2 = {number(math.log(2))} (dotted): disjoint.",
        ("js_divergence",),
        data,
        base_layout("model", "JS divergence (nats)", xaxis=categories(names), yaxis={"range": [-0.03, 0.72]}),
        details="Divergence from the original's distribution at held-out positions: mean of domain means. "
        "Bars: 95 % intervals over documents.",
    )


def categories(names: list[str]) -> dict[str, object]:
    """An axis with room on both sides of a few names."""
    return {"type": "category", "range": [-0.5, len(names) - 0.5]}


def wide_axis(values: list[float]) -> dict[str, object]:
    """A logarithmic axis where the largest value is over ten times the smallest."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    return {"type": "log", "exponentformat": "none"} if max(known) > 10 * min(known) else {}


# --- experts


def score_column(tables: Tables) -> str:
    """The column of the score that the run prunes by; reap where it does not prune by one."""
    return SCORES.get(method_of(tables), "reap")


def cut_by_score(tables: Tables) -> bool:
    """Whether a score decided which experts are kept; random pruning has no cut among ranks."""
    return method_of(tables) in SCORES


def saliency_heatmap(tables: Tables) -> Figure:
    """Saliency of every expert relative to its layer's mean; dropped experts are crossed."""
    column = score_column(tables)
    grid = tables["saliency"].pivot(index="layer", columns="expert", values=column)
    values = grid.to_numpy(float)
    mean = np.nanmean(values, axis=1, keepdims=True)
    times = np.divide(values, mean, out=np.ones_like(values), where=mean > 0)
    layers, experts = [str(layer) for layer in grid.index], [str(expert) for expert in grid.columns]
    label = f"{SCORE_NAMES[column]} / mean"
    axes = ("expert", "layer")
    heat = ratio_heatmap(times, experts, layers, axes, "times the layer's mean", label, ratio_range([times]))
    dropped = tables["clusters"][~tables["clusters"]["kept"].astype(bool)]
    few = len(experts) <= 32
    crosses: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "dropped",
        "x": [str(expert) for expert in dropped["expert"]],
        "y": [str(layer) for layer in dropped["layer"]],
        "hoverinfo": "skip",
        "showlegend": False,
        "marker": {
            "symbol": "x",  # white with a dark edge: visible on every cell, on light and dark pages
            "size": 8 if few else 5,
            "color": "#ffffff",
            "line": {"width": 1, "color": "#1a1d21"},
        },
    }
    unused = np.array([int(layer) for layer in grid.index])[(values == 0).any(axis=1)]
    return Figure(
        "saliency_heatmap",
        f"{SCORE_NAMES[column]} per layer and expert",
        f"{number(float(np.nanmin(times)))} to {number(float(np.nanmax(times)))} times the layer's mean "
        "(equal experts: 1)."
        + (f" Unused experts in {named_layers(unused)}." if len(unused) else " Every expert was used.")
        + (" Crosses: dropped." if len(dropped) else ""),
        (column if column in ("reap", "ean") else f"saliency.{column}", "kept"),
        [heat, *([crosses] if len(dropped) else [])],
        base_layout(
            "expert",
            "layer",
            xaxis={"type": "category", "nticks": 20, "tickangle": 0, "range": [-0.5, len(experts) - 0.5]},
            yaxis={"type": "category", "range": [len(layers) - 0.5, -0.5]},
        ),
        height=max(340, min(900, 120 + 16 * len(layers))),
    )


def rank_intervals(tables: Tables) -> Figure:
    """Rank of every expert of a layer with its 95 % interval, and the cut."""
    kept = tables["clusters"].set_index(["layer", "expert"])["kept"].astype(bool)
    layers = sorted(int(layer) for layer in tables["saliency"]["layer"].unique())
    data: list[Trace] = []
    captions = []
    for layer in layers:
        rows = tables["saliency"][tables["saliency"]["layer"] == layer].copy()
        rows["rank"] = rows[score_column(tables)].rank(ascending=False)
        rows["kept"] = [bool(kept.get((layer, expert), True)) for expert in rows["expert"]]
        rows = rows.sort_values(["rank", "expert"])
        cut = int(rows["kept"].sum()) + 0.5
        pruned = cut < len(rows)
        has_cut = pruned and cut_by_score(tables)
        names = [str(expert) for expert in rows["expert"]]
        # first, so that experts are in order of rank
        cut_line = grey_line(names, [cut if has_cut else np.nan] * len(names), "the cut")
        data.append({**cut_line, "showlegend": has_cut})
        for stays, color, word in ((True, CATEGORICAL[0], "kept"), (False, CATEGORICAL[1], "dropped")):
            data.append(rank_trace(rows[rows["kept"] == stays], color, word, pruned))
        if has_cut:
            unsure = int(((rows["rank_low"] < cut) & (rows["rank_high"] > cut)).sum())
            captions.append(
                f"Layer {layer}: {unsure} of {counted(len(rows), 'expert')} could be on either side of the "
                f"cut with other documents (uninformative score: {len(rows)})."
            )
        else:
            width = float((rows["rank_high"] - rows["rank_low"]).mean())
            captions.append(
                f"Layer {layer}: intervals span {number(width)} of {len(rows)} ranks on average "
                f"(uninformative score: 1 to {len(rows)})."
            )
    return Figure(
        "rank_intervals",
        "Saliency rank with 95 % interval",
        captions[0],
        ("rank_low", "rank_high", "kept"),
        data,
        base_layout(
            "expert, by rank",
            f"rank by {SCORE_NAMES[score_column(tables)]}",
            xaxis={"type": "category", "nticks": 20, "tickangle": 0},
            yaxis={"autorange": "reversed", "tick0": 1, "dtick": max(1, len(kept.loc[layers[0]]) // 8)},
        ),
        Slider("layer", [str(layer) for layer in layers], 0, 3, captions=captions),
        details="Rank 1 is the most salient expert. Intervals: groups of documents resampled 1,000 times.",
    )


def rank_trace(rows: pd.DataFrame, color: str, name: str, legend: bool) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [str(expert) for expert in rows["expert"]],
        "y": rows["rank"].to_numpy(float),
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": (rows["rank_high"] - rows["rank"]).clip(lower=0).to_numpy(float),
            "arrayminus": (rows["rank"] - rows["rank_low"]).clip(lower=0).to_numpy(float),
            "thickness": 1.5,
            "width": 3,
        },
        "marker": {"size": 7, "color": color},
        "showlegend": bool(legend),
        "customdata": np.stack([rows["rank_low"], rows["rank_high"]], -1),
        "hovertemplate": (
            "expert %{x}<br>rank %{y}, %{customdata[0]:.3g} to %{customdata[1]:.3g}<extra></extra>"
        ),
    }


def of_numbers(draw: Callable[[Tables], Figure], table: str, *columns: str) -> FigureSpec:
    """A figure of columns of which the plan must have one."""

    def condition(tables: Tables) -> bool:
        rows = tables[table]
        rows = of_plan(tables, rows) if "method" in rows else rows
        return bool(rows[list(columns)].notna().any(axis=None))

    return FigureSpec(draw.__name__, (table, "clusters"), draw, condition=condition)


DAMAGE = [
    of_numbers(perplexities, "damage", "perplexity"),
    of_numbers(loss_differences, "damage", "loss_increase"),
    of_numbers(divergences, "damage", "js_divergence"),
    of_numbers(errors_by_layer, "damage", "predicted_error", "measured_error"),
    of_numbers(router_kl_by_layer, "damage", "router_kl"),
]
SALIENCY = [
    of_numbers(saliency_heatmap, "saliency", "reap"),
    of_numbers(rank_intervals, "saliency", "rank_low"),
]
GROUPS = [
    FigureSpec("dendrogram", ("merges", "clusters"), dendrogram, wide=True, condition=has_groups),
    FigureSpec("group_sizes", ("clusters",), group_sizes, condition=has_groups),
]
FIGURES: list[FigureSpec] = [*DAMAGE, *SALIENCY, *GROUPS, *EXPERT_DISTANCE]
