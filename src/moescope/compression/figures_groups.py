"""Figures of merged groups: the dendrogram of their merges, and their sizes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import even_ticks
from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    base_layout,
    blend,
    counted,
    grey_line,
    layer_axis,
    number,
)
from moescope.verb import Figure, Slider, Tables, Trace

MOST_LABELS = 64  # experts whose numbers fit below a dendrogram
ONE_ROW = 12  # labels that fit in one row on a phone; more are written in three rows
SIZES = ("#B8C4D6", "#7FA6D0", "#3F7CB8", "#1B5490", "#0B2F5B")


def leaf_order(steps: pd.DataFrame, experts: list[int]) -> list[int]:
    """Experts in an order in which no link crosses another; unmerged groups by first member."""
    under: dict[int, list[int]] = {expert: [expert] for expert in experts}
    n_experts = len(experts)
    for place, step in enumerate(steps.itertuples()):
        both = sorted((under.pop(int(step.left)), under.pop(int(step.right))), key=min)
        under[n_experts + place] = both[0] + both[1]
    return [expert for group in sorted(under.values(), key=min) for expert in group]


def links(steps: pd.DataFrame, order: list[int]) -> tuple[list[list[float]], list[list[float]]]:
    """x and y of each merge's link: up from the left node, across, down to the right; chance height is 1."""
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
    """Heights over the chance height, so that layers can be compared."""
    return [
        float(height) / max(float(chance), 1e-300)
        for height, chance in zip(steps["height"], steps["chance_height"], strict=True)
    ]


def dendrogram(tables: Tables) -> Figure:
    """Merges of each layer's experts by height, with the cut and the dominant members."""
    layers = sorted(int(layer) for layer in tables["merges"]["layer"].unique())
    data: list[Trace] = []
    captions = []
    top = max(1.0, *relative(tables["merges"]))
    for layer in layers:
        steps = tables["merges"][tables["merges"]["layer"] == layer].sort_values("merge")
        rows = tables["clusters"][tables["clusters"]["layer"] == layer].set_index("expert")
        experts = sorted(int(expert) for expert in rows.index)
        order = leaf_order(steps, experts)
        across, up = links(steps, order)
        data.append(grey_line([-0.5, len(order) - 0.5], [1.0, 1.0], "unrelated experts"))
        for done, color, name in ((True, CATEGORICAL[0], "merged"), (False, GREY, "above the cut")):
            chosen = [index for index, step in enumerate(steps["done"]) if bool(step) == done]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "x": np.array([value for index in chosen for value in across[index]], float),
                    "y": np.array([value for index in chosen for value in up[index]], float),
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
        captions.append(dendrogram_caption(layer, steps, rows))
    layout = base_layout(
        "expert",
        "distance (1: unrelated experts)",
        xaxis={"showticklabels": False, "showgrid": False, "zeroline": False},
        yaxis={"range": [-0.19 * top, 1.08 * top], "zeroline": False, "tickvals": even_ticks(0.0, top)},
    )
    return Figure(
        "dendrogram",
        "Dendrogram of the experts of a layer",
        captions[0],
        ("height", "chance_height", "done", "dominant"),
        data,
        layout,
        Slider("layer", [str(layer) for layer in layers], 0, 6, captions=captions),
        400,
        "Each link joins two experts or groups at the height of their distance in the method's measure, "
        "divided by that of unrelated experts (dashed). Blue: merged; grey: above the cut. Orange: the "
        "dominant member, whose neurons the others are matched to.",
    )


def numbers_below(order: list[int], top: float) -> Trace:
    """The numbers of the experts below the leaves."""
    rows = 1 if len(order) <= ONE_ROW else 3
    return {
        "type": "scatter",
        "mode": "text",
        "x": np.arange(len(order), dtype=float),
        "y": np.array([-top * (0.05 + 0.05 * (place % rows)) for place in range(len(order))]),
        "text": [str(expert) if len(order) <= MOST_LABELS else "" for expert in order],
        "textfont": {"size": 10},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def dendrogram_caption(layer: int, steps: pd.DataFrame, rows: pd.DataFrame) -> str:
    done = steps[steps["done"].astype(bool)]
    caption = (
        f"Layer {layer}: {counted(len(rows), 'expert')} in {counted(rows['cluster'].nunique(), 'group')}"
    )
    if done.empty:
        return f"{caption}; nothing is merged."
    low, high = number(done["height"].min()), number(done["height"].max())
    span = f"distance {low}" if low == high else f"distances {low} to {high}"
    chance = number(float(steps["chance_height"].iloc[0]))
    return f"{caption}, merged at {span} (unrelated experts: {chance}, dashed)."


def group_sizes(tables: Tables) -> Figure:
    """Number of groups by size in every layer, with the singletons expected at random."""
    rows = tables["clusters"][tables["clusters"]["cluster"].notna()]
    sizes = rows.groupby(["layer", "cluster"]).size()
    layers = sorted(int(layer) for layer in rows["layer"].unique())
    bins = size_bins(sizes)
    data: list[Trace] = []
    for place, (low, high) in enumerate(bins):
        name = "alone" if high == 1 else f"{low} members" if low == high else f"{low} to {high} members"
        counts = [int(((sizes.loc[layer] >= low) & (sizes.loc[layer] <= high)).sum()) for layer in layers]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": layers,
                "y": counts,
                "marker": {"color": blend(SIZES, place / max(len(bins) - 1, 1))},
                "hovertemplate": f"layer %{{x}}<br>{name}: %{{y}}<extra></extra>",
            }
        )
    alone = [int((sizes.loc[layer] == 1).sum()) for layer in layers]
    by_chance = [float(value) for value in rows.groupby("layer")["chance_alone"].first().loc[layers]]
    data.append(grey_line(layers, by_chance, "alone if joined at random"))
    largest = int(sizes.max())
    where = int(sizes.idxmax()[0])
    groups = float(np.mean([len(sizes.loc[layer]) for layer in layers]))
    return Figure(
        "group_sizes",
        "Group sizes per layer",
        f"{number(float(np.mean(alone)))} of {number(groups)} experts stay alone on average (joined at "
        f"random: {number(float(np.mean(by_chance)))}). Largest group: {largest} members, layer {where}.",
        ("cluster", "chance_alone"),
        data,
        base_layout(
            "layer",
            "experts after merging",
            xaxis=layer_axis(layers),
            yaxis={"rangemode": "tozero", **({"dtick": 1} if groups <= 10 else {})},
            barmode="stack",
        ),
        details="Experts of the compressed model by how many of the original's they stand for. Dashed: those "
        "that stand for one if each removed expert joins any other at random.",
    )


def size_bins(sizes: pd.Series) -> list[tuple[int, int]]:
    """Up to five sizes, one bin each; beyond, sizes above four share one."""
    present = sorted({int(size) for size in sizes})
    if len(present) <= len(SIZES):
        return [(size, size) for size in present]
    return [*((size, size) for size in present if size <= 4), (5, present[-1])]


def has_groups(tables: Tables) -> bool:
    """Whether any experts are merged."""
    clusters = tables["clusters"]
    return bool(clusters.groupby(["layer", "cluster"]).size().gt(1).any())
