"""Figures of compress."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moescope.comparison.figures import DISTANCES
from moescope.compression.tables import TABLES
from moescope.plotting.colour import colours, signal
from moescope.plotting.marks import (
    QUANTITY,
    Bars,
    Dots,
    Grid,
    Lines,
    define_figures,
    flags,
    points,
    standard_rows,
)
from moescope.plotting.style import CATEGORICAL, base_layout, counted, grey_line, number, span
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


def square_map(pairs: pd.DataFrame, name: str, order: list[int], axis: str) -> Trace:
    """Return a map of the pairs of experts in the dendrogram's order."""
    table, n = TABLES["merge_pairs"], len(order)
    column, rows = table.quantity(name), standard_rows(pairs, table, name)
    trace: Trace = {"type": "heatmap", "xaxis": axis, "showscale": False, "hoverongaps": False}
    z, values = np.full((2, n, n), np.nan)
    if len(rows):
        drawn, ends, _ = signal(rows, column)
        place = {expert: at for at, expert in enumerate(order)}
        a, b = (rows[key].map(place).to_numpy() for key in ("expert_a", "expert_b"))
        z[a, b] = z[b, a] = drawn
        values[a, b] = values[b, a] = rows["_value"]
        trace |= {"zmin": ends[0], "zmax": ends[1], "colorscale": colours(*ends, column)}
    text = [[f"experts {one} and {other}" for other in order] for one in order]
    hover = f"%{{text}}<br>{table.label(name)} %{{customdata:.3g}}<extra></extra>"
    drawing = {"x": list(range(n)), "y": list(range(n)), "z": z, "customdata": values, "text": text}
    return {**trace, **drawing, "hovertemplate": hover, "meta": {"categories": True}}


def dendrogram(tables: Tables) -> Figure:
    """Merges of each layer's experts, cut at the plan, beside their similarity and co-activation."""
    data: list[Trace] = []
    captions, layouts, layers = [], [], []
    pairs = tables.get("merge_pairs", pd.DataFrame())
    shown = [name for name in ("similarity", "coactivation") if name in pairs and pairs[name].notna().any()]
    width = (1 - 0.04 * len(shown)) / (1 + len(shown))
    for layer, steps in tables["merges"].sort_values("merge").groupby("layer"):
        rows = tables["clusters"].query("layer == @layer").set_index("expert").sort_index()
        order = leaf_order(steps, rows.index.tolist())
        drawn, done = links(steps, order), flags(steps["done"]).to_numpy()
        data.append(grey_line([1.0, 1.0], [-0.5, len(order) - 0.5], "unrelated experts"))
        for mask, name, color, thick in (
            (done, "merged", CATEGORICAL[0], 2.5),
            (~done, "above the cut", CATEGORICAL[4], 1.2),
        ):
            hover = f"{name} at %{{x:.3g}}<extra></extra>"
            y, x = drawn[mask].transpose(1, 0, 2).reshape(2, -1)
            data.append(
                points(name, x, y, "lines", line={"color": color, "width": thick}, hovertemplate=hover)
            )
        places = np.flatnonzero(flags(rows.loc[order, "dominant"]) & (rows.loc[order, "members"] > 1))
        text, marker = [str(order[place]) for place in places], {"size": 7, "color": CATEGORICAL[1]}
        words: dict[str, Any] = {
            "hovertemplate": "dominant member %{text}<extra></extra>",
            "cliponaxis": False,
        }
        data.append(
            points("dominant member", np.zeros(len(places)), places, marker=marker, text=text, **words)
        )
        of_layer = pairs[pairs["layer"] == layer] if shown else pairs
        data += [square_map(of_layer, name, order, f"x{at}") for at, name in enumerate(shown, 2)]
        ticks = list(range(len(order))) if len(order) <= MOST_LABELS else []
        axis = {"tickvals": ticks, "ticktext": [str(order[place]) for place in ticks], "showgrid": False}
        axes: dict[str, Any] = {"xaxis": {"domain": [0, width], "autorange": "reversed"}}
        for at, name in enumerate(shown, 2):
            left = (at - 1) * (width + 0.04)
            title = {"text": TABLES["merge_pairs"].quantity(name).axis(name)}
            axes[f"xaxis{at}"] = {"domain": [left, left + width], "title": title, "showticklabels": False}
        layouts.append(base_layout("distance (1: unrelated experts)", "expert", yaxis=axis, **axes))
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
        "Merges beside similarity and co-activation" if shown else "Dendrogram of the experts of a layer",
        captions[0],
        ("height", "chance_height", "done", "dominant", *(["similarity"] if shown else [])),
        data,
        layouts[0],
        Slider("layer", layers, 0, 4 + len(shown), captions=captions, layouts=layouts),
        420,
        "Each link joins two experts or groups at the height of their distance in the method's measure, "
        "divided by that of unrelated experts. Blue: merged; thin: above the cut. Orange dot: the dominant "
        "member, whose neurons the others are matched to. Maps have the same order of experts; pale is chance.",
    )


# fmt: off
GROUPS: list[Drawable] = [
    FigureSpec("dendrogram", ("merges", "clusters"), dendrogram, wide=True, condition=lambda tables: bool((tables["clusters"]["members"] > 1).any())),
    *define_figures(TABLES, Bars("group_sizes", "group_sizes", y="groups", by="size", stacked=True, title="Group sizes per layer")),
]
# fmt: on
FIGURES: list[Drawable] = [*DAMAGE, *SALIENCY, *GROUPS, *DISTANCES]
