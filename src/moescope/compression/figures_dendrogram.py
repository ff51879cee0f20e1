"""Groups of experts that become one: the steps that made them, and how large they are."""

from __future__ import annotations

from collections import Counter

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
    blend,
    counted,
    grey_line,
    layer_axis,
    number,
)

NAMED_UP_TO = 64  # experts whose numbers fit below a dendrogram
ONE_ROW = 12  # experts whose numbers fit side by side on a phone; more are written in three rows
SIZES = ("#B8C4D6", "#7FA6D0", "#3F7CB8", "#1B5490", "#0B2F5B")


def leaf_order(steps: pd.DataFrame, experts: list[int]) -> list[int]:
    """Experts so that what is merged stands side by side and no link crosses another.

    Groups that never meet by first member.
    """
    under: dict[int, list[int]] = {expert: [expert] for expert in experts}
    n_experts = len(experts)
    for place, step in enumerate(steps.itertuples()):
        both = sorted((under.pop(int(step.left)), under.pop(int(step.right))), key=min)
        under[n_experts + place] = both[0] + both[1]
    return [expert for group in sorted(under.values(), key=min) for expert in group]


def links(steps: pd.DataFrame, order: list[int]) -> tuple[list[list[float]], list[list[float]]]:
    """For every step the corners of its link: up from the left node, across, and down to the right one.

    Heights in units of chance.
    """
    x = {expert: float(place) for place, expert in enumerate(order)}
    y = dict.fromkeys(order, 0.0)
    across, up = [], []
    for place, (left, right, height) in enumerate(
        zip(steps["left"], steps["right"], relative(steps), strict=True)
    ):
        first, second = sorted((int(left), int(right)), key=x.__getitem__)
        across.append([x[first], x[first], x[second], x[second], np.nan])
        up.append([y[first], height, height, y[second], np.nan])
        made = len(order) + place
        x[made], y[made] = (x[first] + x[second]) / 2, height
    return across, up


def relative(steps: pd.DataFrame) -> list[float]:
    """Heights over that of unrelated experts, so that layers can be compared.

    Measures differ in size from layer to layer.
    """
    return [
        float(height) / max(float(chance), 1e-300)
        for height, chance in zip(steps["height"], steps["chance_height"], strict=True)
    ]


def dendrogram(tables: Tables) -> Figure:
    layers = sorted(int(layer) for layer in tables["merges"]["layer"].unique())
    data: list[Trace] = []
    titles = []
    top = max(1.0, *relative(tables["merges"]))
    for layer in layers:
        steps = tables["merges"][tables["merges"]["layer"] == layer].sort_values("merge")
        rows = tables["clusters"][tables["clusters"]["layer"] == layer].set_index("expert")
        experts = sorted(int(expert) for expert in rows.index)
        order = leaf_order(steps, experts)
        across, up = links(steps, order)
        data.append(grey_line([-0.5, len(order) - 0.5], [1.0, 1.0], "unrelated experts"))
        for done, color, name in ((True, CATEGORICAL[0], "merged"), (False, GREY, "above the cut")):
            kept = [place for place, step in enumerate(steps["done"]) if bool(step) == done]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "x": np.array([value for place in kept for value in across[place]], float),
                    "y": np.array([value for place in kept for value in up[place]], float),
                    "line": {"color": color, "width": 2.5 if done else 1.2},
                    "hovertemplate": f"{name} at %{{y:.3g}}<extra></extra>",
                }
            )
        sizes = rows.groupby("cluster").size()
        leads = {
            expert
            for expert in order
            if bool(rows.loc[expert, "dominant"]) and sizes[rows.loc[expert, "cluster"]] > 1
        }
        for led, color, name in ((False, GREY, "expert"), (True, CATEGORICAL[1], "dominant member")):
            places = [place for place, expert in enumerate(order) if (expert in leads) == led]
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": np.array(places, float),
                    "y": np.zeros(len(places)),
                    "text": [str(order[place]) for place in places],
                    "cliponaxis": False,
                    "showlegend": led and bool(places),
                    "marker": {"size": 7, "color": color},
                    "hovertemplate": f"{name} %{{text}}<extra></extra>",
                }
            )
        data.append(numbers_below(order, top))
        titles.append(dendrogram_title(layer, steps, rows))
    layout = base_layout(
        "expert",
        "distance (1: unrelated experts)",
        xaxis={"showticklabels": False, "showgrid": False, "zeroline": False},
        yaxis={"range": [-0.19 * top, 1.08 * top], "zeroline": False, "tick0": 0},
    )
    return Figure(
        "dendrogram",
        titles[0],
        (
            "Each link joins two experts, or groups of them, at the height of their distance by the "
            "method's own measure, divided by that of experts that have nothing to do with each "
            "other (dashed). "
            "Blue links are carried out, grey ones lie above the cut. Orange: the dominant member of "
            "a group, whose neurons give the order. Slide to change the layer."
        ),
        ("height", "chance_height", "done", "dominant"),
        data,
        layout,
        Slider("layer", [str(layer) for layer in layers], 0, 6, titles),
        400,
    )


def numbers_below(order: list[int], top: float) -> Trace:
    """The experts' numbers below their places."""
    rows = 1 if len(order) <= ONE_ROW else 3
    return {
        "type": "scatter",
        "mode": "text",
        "x": np.arange(len(order), dtype=float),
        "y": np.array([-top * (0.05 + 0.05 * (place % rows)) for place in range(len(order))]),
        "text": [str(expert) if len(order) <= NAMED_UP_TO else "" for expert in order],
        "textfont": {"size": 10},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def dendrogram_title(layer: int, steps: pd.DataFrame, rows: pd.DataFrame) -> str:
    done = steps[steps["done"].astype(bool)]
    groups = rows["cluster"].nunique()
    said = f"Layer {layer}: {counted(len(rows), 'expert')} in {counted(groups, 'group')}"
    if done.empty:
        return f"{said}; nothing is merged"
    low, high = number(done["height"].min()), number(done["height"].max())
    span = f"at a distance of {low}" if low == high else f"at distances of {low} to {high}"
    return f"{said}, merged {span}; unrelated experts lie at {number(float(steps['chance_height'].iloc[0]))}"


def group_sizes(tables: Tables) -> Figure:
    """Groups by size in every layer, stacked; what joining at random would leave alone beside it."""
    rows = tables["clusters"][tables["clusters"]["cluster"].notna()]
    sizes = rows.groupby(["layer", "cluster"]).size()
    layers = sorted(int(layer) for layer in rows["layer"].unique())
    bins = size_bins(sizes)
    data: list[Trace] = []
    for place, (low, high) in enumerate(bins):
        name = "alone" if high == 1 else f"{low} members" if low == high else f"{low} to {high} members"
        own = [int(((sizes.loc[layer] >= low) & (sizes.loc[layer] <= high)).sum()) for layer in layers]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": layers,
                "y": own,
                "marker": {"color": blend(SIZES, place / max(len(bins) - 1, 1))},
                "hovertemplate": f"layer %{{x}}<br>{name}: %{{y}}<extra></extra>",
            }
        )
    experts = tables["clusters"].groupby("layer").size()
    alone = [int((sizes.loc[layer] == 1).sum()) for layer in layers]
    by_chance = [alone_by_chance(int(experts[layer]), len(sizes.loc[layer])) for layer in layers]
    data.append(grey_line(layers, by_chance, "alone, were the others to join at random"))
    largest = int(sizes.max())
    where = int(sizes.idxmax()[0])
    title = (
        f"{number(float(np.mean(alone)))} of "
        f"{number(float(np.mean([len(sizes.loc[layer]) for layer in layers])))} experts stay "
        "alone on average, "
        f"{number(float(np.mean(by_chance)))} were the others to join at random; the largest "
        f"group has {largest} members (layer {where})"
    )
    return Figure(
        "group_sizes",
        title,
        (
            "How many experts of the compressed model stand for one, two or more of the original's, "
            "layer by layer. Dashed: how many would stand for one alone if each expert that goes "
            "joined "
            "any of those that stay."
        ),
        ("cluster",),
        data,
        base_layout(
            "layer",
            "experts after merging",
            xaxis=layer_axis(pd.Index(layers)),
            yaxis={"rangemode": "tozero"},
            barmode="stack",
        ),
    )


def size_bins(sizes: pd.Series) -> list[tuple[int, int]]:
    """Sizes as they are up to five of them; beyond, those above four together."""
    found = sorted(Counter(int(size) for size in sizes))
    if len(found) <= len(SIZES):
        return [(size, size) for size in found]
    few = [size for size in found if size <= 4]
    return [(size, size) for size in few] + [(5, found[-1])]


def alone_by_chance(n_experts: int, groups: int) -> float:
    """Expected groups of one when each of n - K others joins one of K at random: K (1 - 1/K)^(n - K)."""
    return groups * (1 - 1 / groups) ** (n_experts - groups) if groups else 0.0


GROUPS = [
    FigureSpec("dendrogram", ("merges", "clusters"), dendrogram, wide=True),
    FigureSpec("group_sizes", ("clusters",), group_sizes),
]
