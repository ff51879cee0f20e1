"""Routing over checkpoints.

How even, how decided, which experts, and how much of the final routing is already there.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import (
    CATEGORICAL,
    Figure,
    FigureSpec,
    Slider,
    Tables,
    Trace,
    base_layout,
    blend,
    from_to,
    grey_line,
    heatmap,
    layer_lines,
    number,
)
from moescope.routing.figures_load import CATEGORIES, fold_of, ratio_heatmap
from moescope.routing.figures_metrics import IN_LEGENDS, KNOWS_NOTHING, RANDOM, between, subject
from moescope.routing.metrics import METRICS

AREAS = 12  # so many experts get an area of their own; the rest share one
STEPS_NAMED = 10  # on an axis of steps that are categories


def metric_by_step(
    name: str, metric: str, axis: str, floor_name: str = RANDOM, log: bool = False, from_zero: bool = True
) -> FigureSpec:
    """The metric of every layer against the step, the chance in grey."""

    def draw(tables: Tables) -> Figure:
        rows = tables["routing_layers"]
        rows = rows[(rows["metric"] == metric) & (rows["domain"] == "") & rows["value"].notna()]
        chance = rows.groupby("step")["chance"].mean()
        data = [
            *layer_lines(rows, "step", "value"),
            grey_line(
                chance.index.to_numpy(), chance.to_numpy(float), IN_LEGENDS.get(floor_name, floor_name)
            ),
        ]
        means = rows.groupby("step")["value"].mean()
        collapse = rows["collapse"].dropna()
        title = (
            f"{subject(metric)}, mean over layers, goes from {number(means.iloc[0])} (step "
            f"{means.index[0]}) to "
            f"{number(means.iloc[-1])} (step {means.index[-1]}); {between(rows['chance'])} for "
            f"{floor_name}"
        ) + (f", {between(collapse)} at collapse" if len(collapse) else "")
        shown = [
            trace for trace in data if trace["x"][0] is not None
        ]  # a colour bar is a trace without points
        yaxis = (plain_log(shown) if log else None) or {"rangemode": "tozero" if from_zero else "normal"}
        caption = f"{METRICS[metric].meaning} One line a layer; dashed: {floor_name}."
        layout = base_layout("step", axis, xaxis=step_axis(means.index), yaxis=yaxis)
        return Figure(name, title, caption, (metric, "chance", "collapse"), data, layout)

    return FigureSpec(name, ("routing_layers",), draw, metrics=(metric,))


def step_axis(steps: pd.Index) -> dict[str, object]:
    values = [int(step) for step in steps]
    every = max(1, -(-len(values) // 10))
    return {"tickvals": values[::every], "ticktext": [f"{value:,}" for value in values[::every]]}


def shares_by_step(tables: Tables, layer: int) -> pd.DataFrame:
    """One layer's shares of the load: expert by step."""
    load = tables["load"]
    counts = (
        load[load["layer"] == layer].groupby(["expert", "step"])["tokens"].sum().unstack("step", fill_value=0)
    )
    found: pd.DataFrame = counts / counts.sum().clip(lower=1)
    return found


def moved(shares: pd.DataFrame) -> tuple[int, float]:
    """(the expert whose share moved most from first to last step, by how much)."""
    change = shares.iloc[:, -1] - shares.iloc[:, 0]
    expert = change.abs().idxmax()
    return int(expert), float(change[expert])


def step_titles(tables: Tables) -> tuple[list[str], list[str], list[pd.DataFrame], int]:
    """(layers, a title each, shares each, the layer that moved most)."""
    layers = sorted(int(layer) for layer in tables["load"]["layer"].unique())
    shares = [shares_by_step(tables, layer) for layer in layers]
    titles = []
    for layer, frame in zip(layers, shares, strict=True):
        expert, _ = moved(frame)
        titles.append(
            f"Layer {layer}: expert {expert} moves most, from "
            f"{number(100 * frame.loc[expert].iloc[0])} % to "
            f"{number(100 * frame.loc[expert].iloc[-1])} % of the load; an even share is "
            f"{number(100 / len(frame))} %"
        )
    start = int(np.argmax([abs(moved(frame)[1]) for frame in shares]))
    return [str(layer) for layer in layers], titles, shares, start


def expert_by_step(tables: Tables) -> Figure:
    layers, titles, shares, start = step_titles(tables)
    times = [frame.to_numpy(float) * len(frame) for frame in shares]
    fold = fold_of(times)
    data = [
        ratio_heatmap(
            over,
            [str(step) for step in frame.columns],
            [str(expert) for expert in frame.index],
            ("step", "expert"),
            "of an even share",
            "times an even share",
            fold,
        )
        for frame, over in zip(shares, times, strict=True)
    ]
    steps = [str(step) for step in shares[start].columns]
    named = steps[:: -(-len(steps) // STEPS_NAMED)]  # all of them would run into each other
    layout = base_layout(
        "step",
        "expert",
        xaxis={**CATEGORIES, "tickvals": named},
        yaxis={**CATEGORIES, "autorange": "reversed"},
    )
    return Figure(
        "expert_by_step",
        titles[start],
        (
            "Load of every expert of a layer at every step over an even share, in doublings; white "
            "is even. Slide to change the layer."
        ),
        ("tokens", "usage_sigma"),
        data,
        layout,
        Slider("layer", layers, start, titles=titles),
        440,
    )


def usage_area(tables: Tables) -> Figure:
    """Shares of the load stacked over steps, one area an expert.

    Beyond twelve the smaller ones share an area.
    """
    layers, titles, shares, start = step_titles(tables)
    widest = max(min(len(frame), AREAS + 1) for frame in shares)
    data: list[Trace] = []
    for frame in shares:
        named = frame.mean(axis=1).sort_values(ascending=False).index[:AREAS].sort_values()
        rest = frame.drop(index=named).sum()
        bands = [(f"expert {expert}", frame.loc[expert]) for expert in named]
        bands += [(f"other {len(frame) - AREAS}", rest)] if len(frame) > AREAS else []
        bands += [("", pd.Series(0.0, index=frame.columns))] * (widest - len(bands))
        for index, (name, values) in enumerate(bands):
            color = "#8A9099" if name.startswith("other") else area_color(index)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "stackgroup": "one",
                    "name": name,
                    "showlegend": bool(name),
                    "x": values.index.to_numpy(),
                    "y": values.to_numpy(float),
                    "line": {"width": 0.6, "color": color},
                    "fillcolor": color,
                    "hovertemplate": f"{name}<br>step %{{x}}<br>%{{y:.1%}} of the load<extra></extra>",
                }
            )
    steps = shares[0].columns
    layout = base_layout(
        "step", "share of the load", xaxis=step_axis(steps), yaxis={"range": [0, 1], "tickformat": ".0%"}
    )
    return Figure(
        "usage_area",
        titles[start],
        (
            f"Shares of a layer's load, stacked; up to {AREAS} experts have an area of their own. "
            "Even areas are an even load. Slide to change the layer."
        ),
        ("tokens", "usage_sigma"),
        data,
        layout,
        Slider("layer", layers, start, widest, titles),
        460,
    )


def area_color(index: int) -> str:
    """The palette, then the same a shade lighter: neighbours always differ."""
    base = CATEGORICAL[index % len(CATEGORICAL)]
    return base if index < len(CATEGORICAL) else blend((base, "#FFFFFF"), 0.45)


def expected(observed: pd.Series, corrected: pd.Series) -> pd.Series:
    """What usages alone would share: e of corrected = (o - e)/(1 - e)."""
    found: pd.Series = (observed - corrected) / (1 - corrected).where(corrected < 1)
    return found


def saturation_curves(tables: Tables) -> Figure:
    frame = tables["stability"]
    last = int(frame["step_b"].max())
    rows = frame[frame["step_b"] == last].assign(
        chance=lambda rows: expected(rows["routing_consistency"], rows["routing_consistency_corrected"]),
        chance_top1=lambda rows: expected(rows["top1_agreement"], rows["top1_corrected"]),
    )
    means = rows.groupby("step_a")[["chance", "saturation_top1", "chance_top1"]].mean()
    data = [
        *layer_lines(rows, "step_a", "saturation_topk", hover="top-k %{y:.3f}"),
        grey_line(means.index.to_numpy(), means["chance"].to_numpy(float), "usages alone"),
        {
            **grey_line(
                means.index.to_numpy(),
                means["saturation_top1"].to_numpy(float),
                "first choices, mean",
                "solid",
            ),
            "mode": "lines+markers",
            "line": {"color": CATEGORICAL[0], "width": 1.5},
        },
        grey_line(means.index.to_numpy(), means["chance_top1"].to_numpy(float), "their usages alone", "dot"),
    ]
    first = rows[rows["step_a"] == rows["step_a"].min()]
    words = from_to(
        first["saturation_topk"].min(),
        f"layer {first.loc[first['saturation_topk'].idxmin(), 'layer']}",
        first["saturation_topk"].max(),
        f"layer {first.loc[first['saturation_topk'].idxmax(), 'layer']}",
    )
    return Figure(
        "saturation_curves",
        (
            f"At step {rows['step_a'].min()}, the share of the final routing (step {last}) that is "
            f"already there {words}; usages alone "
            f"give {number(first['chance'].mean())}, and first choices agree for "
            f"{number(100 * first['saturation_top1'].mean())} %, "
            f"{number(100 * first['chance_top1'].mean())} % by their usages alone"
        ),
        (
            f"Of the experts a token has at step {last}, the share it has at an earlier step "
            "already, on the same tokens. Dashed: what the experts' usages "
            "alone would share, mean over layers. First choices: the share of tokens whose first "
            "choice is the final one, mean over layers; dotted: by usages alone."
        ),
        ("saturation_topk", "saturation_top1", "routing_consistency_corrected", "top1_corrected"),
        data,
        base_layout(
            "step", f"shared with step {last}", xaxis=step_axis(means.index), yaxis={"range": [0, 1.02]}
        ),
    )


def consistency_matrix(tables: Tables) -> Figure:
    """Checkpoint by checkpoint, beyond chance, one layer at a time; the mean over layers first."""
    frame = tables["stability"]
    steps = sorted({*frame["step_a"], *frame["step_b"]})
    layers = sorted(int(layer) for layer in frame["layer"].unique())
    mean = frame.groupby(["step_a", "step_b"], as_index=False)["routing_consistency_corrected"].mean()
    parts = [("mean", mean), *((str(layer), frame[frame["layer"] == layer]) for layer in layers)]
    data: list[Trace] = []
    titles = []
    for name, rows in parts:
        matrix = np.eye(len(steps))
        for a, b, value in rows[["step_a", "step_b", "routing_consistency_corrected"]].itertuples(
            index=False
        ):
            matrix[steps.index(a), steps.index(b)] = matrix[steps.index(b), steps.index(a)] = value
        data.append(
            heatmap(
                matrix,
                steps,
                steps,
                low=0.0,
                high=1.0,
                label="beyond chance",
                axes=("step", "step"),
                text=True,
            )
        )
        where = "Mean over layers" if name == "mean" else f"Layer {name}"
        titles.append(
            f"{where}: steps {steps[0]} and {steps[-1]} share {number(matrix[0, -1])} of their "
            "routing beyond chance (0), "
            f"the last two {number(matrix[-2, -1])}; 1 is the same routing"
        )
    layout = base_layout(
        "step", "step", xaxis={"type": "category"}, yaxis={"type": "category", "autorange": "reversed"}
    )
    return Figure(
        "consistency_matrix",
        titles[0],
        (
            "Corrected consistency (o − e)/(1 − e) of every two checkpoints on the same tokens; 0 is "
            "what the experts' usages alone would share. "
            "Slide from the mean to single layers."
        ),
        ("routing_consistency_corrected", "routing_consistency", "top1_corrected"),
        data,
        layout,
        Slider("layer", [name for name, _ in parts], 0, titles=titles),
        420,
    )


OVER_STEPS = [
    metric_by_step("cv_by_step", "cv", "coefficient of variation", log=True),
    metric_by_step("max_violation_by_step", "max_violation", "max violation", log=True),
    metric_by_step("load_entropy_by_step", "load_entropy_share", "load entropy / log n", from_zero=False),
    metric_by_step("routing_entropy_by_step", "routing_entropy", "entropy (nats)", KNOWS_NOTHING),
    FigureSpec("usage_area", ("load",), usage_area),
    FigureSpec("expert_by_step", ("load",), expert_by_step),
    FigureSpec("saturation_curves", ("stability",), saturation_curves),
    FigureSpec("consistency_matrix", ("stability",), consistency_matrix),
]
