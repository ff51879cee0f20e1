"""Figures of compress."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moescope.comparison.figures import DISTANCES
from moescope.compression.tables import TABLES
from moescope.plotting.marks import QUANTITY, Bars, Dots, Grid, Lines, define_figures, flags, points
from moescope.plotting.style import CATEGORICAL, GREY, base_layout, counted, grey_line, number, span
from moescope.verb import Drawable, Figure, FigureSpec, Slider, Tables, Trace

MOST_LABELS = 64  # experts whose numbers fit below a dendrogram
OF_MODEL = ("loss_increase", "perplexity", "loss_above_plan", "js_divergence")
OF_LAYERS = ("measured_error", "predicted_error", "router_kl")
# fmt: off
DAMAGE = define_figures(TABLES,
    Dots("damage_by_model", "damage", x=OF_MODEL, y="method", by="role", where="role.notna()", pages=QUANTITY, title="Damage of the plan and of random controls",
        was={"loss_differences": "loss_increase", "perplexities": "perplexity", "divergences": "js_divergence"},
        details="Held-out text; means of domain means. Bars: 95 % intervals over documents, the same ones for both models of a difference. Each random control drops or merges as many experts at random, with another seed."),
    Lines("damage_by_layer", "damage", y=OF_LAYERS, where="role == 'plan'", pages=QUANTITY, title="Damage per layer",
        was={"errors_by_layer": "measured_error", "router_kl_by_layer": "router_kl"},
        details="Error of the routed output: 0 unchanged, 1 as without routed experts; predicted on calibration states before writing, measured on held-out states in the written model. Each layer gets the original's input. Band: range of the random controls."),
)
SALIENCY = define_figures(TABLES,
    Grid("saliency_heatmap", "saliency", z="times_mean", cross="dropped", title="Saliency per layer and expert"),
    Dots("rank_intervals", "saliency", x="rank", y="expert", by="fate", where="rank_low.notna()", pages="layer", title="Saliency rank with 95 % interval",
        details="Rank 1 is the most salient expert. Intervals: groups of documents resampled 1,000 times; 1 to n for an uninformative score."),
)
# fmt: on


def leaf_order(steps: pd.DataFrame, experts: list[int]) -> list[int]:
    """Return experts in an order in which no link crosses another; unmerged groups by first member."""
    under: dict[int, list[int]] = {expert: [expert] for expert in experts}
    for place, step in enumerate(steps.itertuples()):
        both = sorted((under.pop(int(step.left)), under.pop(int(step.right))), key=min)
        under[len(experts) + place] = both[0] + both[1]
    return [expert for group in sorted(under.values(), key=min) for expert in group]


def links(steps: pd.DataFrame, order: list[int]) -> np.ndarray:
    """Return x and y of each merge's link, (merge, 2, 5): up from the left node, across, down; then a gap.

    Heights are relative to that of unrelated experts, so that layers can be compared.
    """
    x = {expert: float(place) for place, expert in enumerate(order)}
    y = dict.fromkeys(order, 0.0)
    lines = []
    heights = steps["height"] / steps["chance_height"].clip(lower=1e-300)
    for place, (left, right, height) in enumerate(zip(steps["left"], steps["right"], heights, strict=True)):
        first, second = sorted((int(left), int(right)), key=x.__getitem__)
        across = [x[first], x[first], x[second], x[second], np.nan]
        lines.append([across, [y[first], height, height, y[second], np.nan]])
        x[len(order) + place], y[len(order) + place] = (x[first] + x[second]) / 2, height
    return np.asarray(lines, float).reshape(-1, 2, 5)


def dendrogram(tables: Tables) -> Figure:
    """Merges of each layer's experts by height, with the cut and the dominant members."""
    data: list[Trace] = []
    captions, layouts, layers = [], [], []
    for layer, steps in tables["merges"].sort_values("merge").groupby("layer"):
        rows = tables["clusters"].query("layer == @layer").set_index("expert").sort_index()
        order = leaf_order(steps, rows.index.tolist())
        drawn, done = links(steps, order), flags(steps["done"]).to_numpy()
        data.append(grey_line([-0.5, len(order) - 0.5], [1.0, 1.0], "unrelated experts"))
        for mask, name, color, width in (
            (done, "merged", CATEGORICAL[0], 2.5),
            (~done, "above the cut", GREY, 1.2),
        ):
            hover = f"{name} at %{{y:.3g}}<extra></extra>"
            x, y = drawn[mask].transpose(1, 0, 2).reshape(2, -1)
            data.append(
                points(name, x, y, "lines", line={"color": color, "width": width}, hovertemplate=hover)
            )
        places = np.flatnonzero(flags(rows.loc[order, "dominant"]) & (rows.loc[order, "members"] > 1))
        text, marker = [str(order[place]) for place in places], {"size": 7, "color": CATEGORICAL[1]}
        words: dict[str, Any] = {
            "hovertemplate": "dominant member %{text}<extra></extra>",
            "cliponaxis": False,
        }
        data.append(
            points("dominant member", places, np.zeros(len(places)), marker=marker, text=text, **words)
        )
        ticks = list(range(len(order))) if len(order) <= MOST_LABELS else []
        axis = {"tickvals": ticks, "ticktext": [str(order[place]) for place in ticks], "showgrid": False}
        layouts.append(base_layout("expert", "distance (1: unrelated experts)", xaxis=axis))
        merged = (
            f", merged at distances {span(steps['height'][done])}" if done.any() else "; nothing is merged"
        )
        groups, chance = rows["cluster"].nunique(), number(steps["chance_height"].iloc[0])
        captions.append(
            f"Layer {layer}: {counted(len(rows), 'expert')} in {counted(groups, 'group')}{merged} "
            f"(unrelated experts: {chance}, dashed)."
        )
        layers.append(str(layer))
    return Figure(
        "dendrogram",
        "Dendrogram of the experts of a layer",
        captions[0],
        ("height", "chance_height", "done", "dominant"),
        data,
        layouts[0],
        Slider("layer", layers, 0, 4, captions=captions, layouts=layouts),
        400,
        "Each link joins two experts or groups at the height of their distance in the method's measure, "
        "divided by that of unrelated experts. Blue: merged; grey: above the cut. Orange: the dominant "
        "member, whose neurons the others are matched to.",
    )


# fmt: off
GROUPS: list[Drawable] = [
    FigureSpec("dendrogram", ("merges", "clusters"), dendrogram, wide=True, condition=lambda tables: bool((tables["clusters"]["members"] > 1).any())),
    *define_figures(TABLES, Bars("group_sizes", "group_sizes", y="groups", by="size", stacked=True, title="Group sizes per layer")),
]
# fmt: on
FIGURES: list[Drawable] = [*DAMAGE, *SALIENCY, *GROUPS, *DISTANCES]
