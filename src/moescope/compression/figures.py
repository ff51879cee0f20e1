"""What compressing costs, and which experts it takes.

The plan beside the original and beside random controls.
"""

from __future__ import annotations

import math

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
    counted,
    grey_line,
    layer_axis,
    named_layers,
    number,
    ratio_heatmap,
    ratio_range,
)

SCORES = {"frequency": "tokens", "gate_weight": "gate_weight", "ean": "ean", "reap": "reap"}
SCORE_WORDS = {
    "tokens": "tokens routed to it",
    "gate_weight": "sum of its gates",
    "ean": "sum of its output norms",
    "reap": "mean of gate times output norm",
}
RANDOM = "random control"


def method_of(tables: Tables) -> str:
    return str(tables["clusters"]["method"].iloc[0])


def layer_rows(tables: Tables) -> pd.DataFrame:
    return tables["damage"][tables["damage"]["layer"].notna()].astype({"layer": int})


def whole_rows(tables: Tables) -> pd.DataFrame:
    return tables["damage"][tables["damage"]["layer"].isna()]


def of_plan(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["method"] == method_of(tables)]


def of_controls(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["method"] != method_of(tables)]


def control_traces(rows: pd.DataFrame, column: str) -> list[Trace]:
    """The mean of the controls by layer, and shaded the span of them all."""
    known = rows[rows[column].notna()]
    if known.empty:
        return []
    spread = known.groupby("layer")[column].agg(["min", "mean", "max"]).reset_index()
    many = known["method"].nunique()
    name = f"{RANDOM}, mean of {many}" if many > 1 else RANDOM
    edge: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": spread["layer"].to_numpy(),
        "line": {"width": 0, "color": GREY},
        "showlegend": False,
        "hoverinfo": "skip",
    }
    shade = [
        {**edge, "y": spread["min"].to_numpy(float)},
        {
            **edge,
            "y": spread["max"].to_numpy(float),
            "fill": "tonexty",
            "fillcolor": "rgba(138,144,153,0.22)",
        },
    ]
    return [
        *(shade if many > 1 else []),
        grey_line(spread["layer"].to_numpy(), spread["mean"].to_numpy(float), name),
    ]


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


def errors_by_layer(tables: Tables) -> Figure:
    rows = layer_rows(tables)
    own, others = of_plan(tables, rows), of_controls(tables, rows)
    measured = own["measured_error"].notna().any()
    column = "measured_error" if measured else "predicted_error"
    worst = own.loc[own[column].idxmax()]
    at_random = others[others["layer"] == worst["layer"]][column].mean()
    beside = f", {number(at_random)} where experts go at random" if np.isfinite(at_random) else ""
    data = control_traces(others, column)
    if own["predicted_error"].notna().any():
        data.append(line(own, "predicted_error", f"{method_of(tables)}, predicted", "solid"))
    if measured:
        data.append(line(own, "measured_error", f"{method_of(tables)}, measured", "dot"))
    return Figure(
        "errors_by_layer",
        (
            f"Layer {worst['layer']} loses most: an error of {number(worst[column])} of its routed "
            f"output{beside}"
        ),
        (
            "Predicted on calibration states before anything was written; measured on held-out "
            "states in the written model. Each layer alone, given what "
            "it is given in the original. 0: nothing lost; 1: as if the routed experts gave nothing. "
            "Shaded: all random controls, "
        )
        + ("measured." if measured else "predicted."),
        ("predicted_error", "measured_error"),
        data,
        base_layout(
            "layer",
            "error of the routed output",
            xaxis=layer_axis(pd.Index(sorted(rows["layer"].unique()))),
            yaxis={"rangemode": "tozero"},
        ),
    )


def router_kl_by_layer(tables: Tables) -> Figure:
    rows = layer_rows(tables)
    own, others = of_plan(tables, rows), of_controls(tables, rows)
    worst = own.loc[own["router_kl"].idxmax()]
    at_random = others[others["layer"] == worst["layer"]]["router_kl"].mean()
    beside = f", {number(at_random)} where experts go at random" if np.isfinite(at_random) else ""
    return Figure(
        "router_kl_by_layer",
        f"The router of layer {worst['layer']} changes most: {number(worst['router_kl'])} nats{beside}",
        (
            "How far the new router's probabilities are from the old one's, on calibration states. "
            "0: unchanged. For pruned experts it is −log of the "
            "probability that those kept had together; for merged ones the divergence from the sum "
            "over each group's members."
        ),
        ("router_kl",),
        [*control_traces(others, "router_kl"), line(own, "router_kl", method_of(tables), "solid")],
        base_layout(
            "layer",
            "router KL (nats)",
            xaxis=layer_axis(pd.Index(sorted(rows["layer"].unique()))),
            yaxis={"rangemode": "tozero"},
        ),
    )


# --- the whole model


def points(names: list[str], values: list[float], color: str, label: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label,
        "x": names,
        "y": np.array(values, float),
        "marker": {"size": 12, "color": color},
        "showlegend": False,
        "cliponaxis": False,
        "hovertemplate": f"{label}: %{{y:.4g}}<extra></extra>",
    }


def perplexities(tables: Tables) -> Figure:
    rows = whole_rows(tables)
    own, others = of_plan(tables, rows).iloc[0], of_controls(tables, rows)
    others = others[others["perplexity"].notna()]
    before, after = float(own["perplexity_original"]), float(own["perplexity"])
    method = method_of(tables)
    change = after / before - 1
    words = (
        f"{number(100 * abs(change))} % {'above' if change >= 0 else 'below'} the original's {number(before)}"
    )
    title = f"Perplexity {number(after)}, {words}" + (
        f"; at random {number(others['perplexity'].mean())}" if len(others) else ""
    )
    names = ["original", method, *([RANDOM] if len(others) else [])]
    data = [
        grey_line(names, [before] * len(names), "original"),
        points(["original"], [before], GREY, "original"),
        points([method], [after], CATEGORICAL[0], method),
    ]
    data += [
        points([RANDOM], [float(row["perplexity"])], GREY, str(row["method"])) for _, row in others.iterrows()
    ]
    return Figure(
        "perplexities",
        title,
        (
            "On held-out text, which no method saw. Every random control drops or merges as many "
            "experts, chosen at random with another seed; between the "
            "original and them lies what choosing well can save."
        ),
        ("perplexity", "perplexity_original"),
        [{**trace, "showlegend": False} for trace in data],
        base_layout(
            "model",
            "perplexity",
            xaxis=categories(names),
            yaxis=wide_axis([before, after, *others["perplexity"]]),
        ),
    )


def divergences(tables: Tables) -> Figure:
    rows = whole_rows(tables)
    own, others = of_plan(tables, rows).iloc[0], of_controls(tables, rows)
    others = others[others["js_divergence"].notna()]
    value, method = float(own["js_divergence"]), method_of(tables)
    names = [method, *([RANDOM] if len(others) else [])]
    title = (
        f"Next-token distributions diverge by {number(value)} nats; ln 2 = {number(math.log(2))} is "
        "the most there is"
    )
    title += f", random {number(others['js_divergence'].mean())}" if len(others) else ""
    data = [
        grey_line(names, [math.log(2)] * len(names), "most", "dot"),
        points([method], [value], CATEGORICAL[0], method),
        *(
            points([RANDOM], [float(row["js_divergence"])], GREY, str(row["method"]))
            for _, row in others.iterrows()
        ),
    ]
    return Figure(
        "divergences",
        title,
        (
            "Mean Jensen-Shannon divergence from the original's next-token distribution, over "
            "held-out positions. 0: the same words with the same "
            "probabilities; ln 2, dotted: no word in common."
        ),
        ("js_divergence",),
        [{**trace, "showlegend": False} for trace in data],
        base_layout("model", "JS divergence (nats)", xaxis=categories(names), yaxis={"range": [-0.03, 0.72]}),
    )


def categories(names: list[str]) -> dict[str, object]:
    """Room on both sides of a few names."""
    return {"type": "category", "range": [-0.5, len(names) - 0.5]}


def wide_axis(values: list[float]) -> dict[str, object]:
    """Logarithmic where the largest is ten times the smallest."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    return {"type": "log", "exponentformat": "none"} if max(known) > 10 * min(known) else {}


# --- experts


def score_column(tables: Tables) -> str:
    """The score the run goes by: the method's own, or reap."""
    return SCORES.get(method_of(tables), "reap")


def cut_by_score(tables: Tables) -> bool:
    """Whether a score decided who stays; random pruning has no cut among ranks."""
    return method_of(tables) in SCORES


def saliency_heatmap(tables: Tables) -> Figure:
    column = score_column(tables)
    grid = tables["saliency"].pivot(index="layer", columns="expert", values=column)
    values = grid.to_numpy(float)
    mean = np.nanmean(values, axis=1, keepdims=True)
    times = np.divide(values, mean, out=np.ones_like(values), where=mean > 0)
    layers, experts = [str(layer) for layer in grid.index], [str(expert) for expert in grid.columns]
    heat = ratio_heatmap(
        times,
        experts,
        layers,
        ("expert", "layer"),
        "times the layer's mean",
        f"{column} / mean",
        ratio_range([times]),
    )
    dropped = tables["clusters"][~tables["clusters"]["kept"].astype(bool)]
    data = [heat]
    if len(dropped):
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "dropped",
                "x": [str(e) for e in dropped["expert"]],
                "y": [str(layer) for layer in dropped["layer"]],
                "hoverinfo": "skip",
                "showlegend": False,
                "marker": {
                    "symbol": "x-thin",
                    "size": 8 if len(experts) <= 32 else 4,
                    "line": {"width": 1.5 if len(experts) <= 32 else 1, "color": "#1a1d21"},
                },
            }
        )
    idle = np.array([int(layer) for layer in grid.index])[(values == 0).any(axis=1)]
    title = (
        f"Scores run from {number(float(np.nanmin(times)))} to {number(float(np.nanmax(times)))} "
        "times their layer's mean"
    )
    title += f"; experts without a token in {named_layers(idle)}" if len(idle) else "; every expert was used"
    return Figure(
        "saliency_heatmap",
        title,
        (
            f"{capital(column.replace('_', ' '))}: the {SCORE_WORDS[column]}, on the calibration "
            "text. White is the layer's mean, what every expert would have if none mattered "
            "more than another."
        )
        + (" Crosses are the experts that go." if len(dropped) else ""),
        (column if column == "reap" or column == "ean" else f"saliency.{column}", "kept"),
        data,
        base_layout(
            "expert",
            "layer",
            xaxis={"type": "category", "nticks": 20, "tickangle": 0, "range": [-0.5, len(experts) - 0.5]},
            yaxis={"type": "category", "range": [len(layers) - 0.5, -0.5]},
        ),
        height=max(340, min(900, 120 + 16 * len(layers))),
    )


def rank_intervals(tables: Tables) -> Figure:
    """Every layer's experts in order of rank, with the interval of each.

    Those that could be on either side of the cut are counted.
    """
    kept = tables["clusters"].set_index(["layer", "expert"])["kept"].astype(bool)
    layers = sorted(int(layer) for layer in tables["saliency"]["layer"].unique())
    data: list[Trace] = []
    titles = []
    for layer in layers:
        rows = tables["saliency"][tables["saliency"]["layer"] == layer].copy()
        rows["rank"] = rows[score_column(tables)].rank(ascending=False)
        rows["kept"] = [bool(kept.get((layer, expert), True)) for expert in rows["expert"]]
        rows = rows.sort_values(["rank", "expert"])
        cut = int(rows["kept"].sum())
        pruned = cut < len(rows)
        has_cut = pruned and cut_by_score(tables)
        unsure = (
            rows[(rows["rank_low"] < cut + 0.5) & (rows["rank_high"] > cut + 0.5)]
            if has_cut
            else rows.iloc[:0]
        )
        names = [str(expert) for expert in rows["expert"]]
        # first, so that experts stand in order of rank whatever becomes of them
        cut_line = grey_line(names, [cut + 0.5 if has_cut else np.nan] * len(names), "the cut")
        data.append({**cut_line, "showlegend": has_cut})
        for stays, color, word in ((True, CATEGORICAL[0], "kept"), (False, CATEGORICAL[1], "dropped")):
            mine = rows[rows["kept"] == stays]
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": word,
                    "x": [str(e) for e in mine["expert"]],
                    "y": mine["rank"].to_numpy(float),
                    "error_y": {
                        "type": "data",
                        "symmetric": False,
                        "array": (mine["rank_high"] - mine["rank"]).clip(lower=0).to_numpy(float),
                        "arrayminus": (mine["rank"] - mine["rank_low"]).clip(lower=0).to_numpy(float),
                        "thickness": 1.5,
                        "width": 3,
                    },
                    "marker": {"size": 7, "color": color},
                    "showlegend": bool(pruned),
                    "customdata": np.stack([mine["rank_low"], mine["rank_high"]], -1),
                    "hovertemplate": (
                        "expert %{x}<br>rank %{y}, %{customdata[0]:.3g} to "
                        "%{customdata[1]:.3g}<extra></extra>"
                    ),
                }
            )
        if has_cut:
            titles.append(
                f"Layer {layer}: "
                f"{counted(len(unsure), 'expert') if len(unsure) else 'no expert'} of "
                f"{len(rows)} could be on either side of the cut with other documents"
            )
        else:
            wide = float((rows["rank_high"] - rows["rank_low"]).mean())
            titles.append(
                f"Layer {layer}: ranks are known to within {number(wide)} places of {len(rows)} on average"
            )
    return Figure(
        "rank_intervals",
        titles[0],
        (
            f"Rank by {score_column(tables).replace('_', ' ')} (1: the most salient) with its 95 % "
            "interval: groups of documents drawn anew 1,000 times. Where nothing sets experts "
            "apart, intervals "
            "reach from 1 to the number of experts."
        ),
        ("rank_low", "rank_high", "kept"),
        data,
        base_layout(
            "expert, by rank",
            "rank",
            xaxis={"type": "category", "nticks": 20, "tickangle": 0},
            yaxis={"autorange": "reversed", "tick0": 1, "dtick": max(1, len(kept.loc[layers[0]]) // 8)},
        ),
        Slider("layer", [str(layer) for layer in layers], 0, 3, titles),
    )


COST = [
    FigureSpec("perplexities", ("damage", "clusters"), perplexities),
    FigureSpec("divergences", ("damage", "clusters"), divergences),
    FigureSpec("errors_by_layer", ("damage", "clusters"), errors_by_layer),
    FigureSpec("router_kl_by_layer", ("damage", "clusters"), router_kl_by_layer),
]
SALIENCY = [
    FigureSpec("saliency_heatmap", ("saliency", "clusters"), saliency_heatmap),
    FigureSpec("rank_intervals", ("saliency", "clusters"), rank_intervals),
]
NEEDED = {
    "perplexities": ("damage", "perplexity"),
    "divergences": ("damage", "js_divergence"),
    "errors_by_layer": ("damage", "predicted_error", "measured_error"),
    "router_kl_by_layer": ("damage", "router_kl"),
    "saliency_heatmap": ("saliency", "reap"),
    "rank_intervals": ("saliency", "rank_low"),
}  # table, and columns of which one must hold a number of the plan's own


def can_draw(spec: FigureSpec, tables: Tables) -> bool:
    table, *columns = NEEDED[spec.name]
    if table not in tables:
        return False
    rows = tables[table]
    rows = rows[rows["method"] == method_of(tables)] if "method" in rows else rows
    return bool(rows[columns].notna().any(axis=None))
