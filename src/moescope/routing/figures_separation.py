"""Which experts act together, and how alike their router rows are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from scipy.special import ndtri

from moescope.plotting.style import (
    Figure,
    FigureSpec,
    Slider,
    Tables,
    Trace,
    base_layout,
    number,
)
from moescope.routing.figures_load import CATEGORIES, FOLD, fold_of, ratio_heatmap
from moescope.routing.figures_metrics import by_layer

NAMED_FROM = 5.0  # a pair is named where chance would give it so many tokens
DRAWN_FROM = 1.0  # and drawn where it would give it one: less is noise


class Pair(NamedTuple):
    """The pair of a layer most often chosen together, over chance.

    And what the largest of so many pairs reaches by luck.
    """

    a: int
    b: int
    over: float
    by_chance: float


def expected_together(pairs: pd.DataFrame) -> pd.Series:
    """How many tokens random routing would give each pair of one layer, at the experts' own loads.

    C_a c_b/N times chance_lift.
    """
    f_a, f_b, tokens = loads_of(pairs)
    found: pd.Series = f_a * f_b * tokens * pairs["chance_lift"]
    return found


def loads_of(pairs: pd.DataFrame) -> tuple[pd.Series, pd.Series, float]:
    """(share of the tokens that chose a, the same of b, N).

    Read back from share_of_a = c_ab/c_a and lift = N c_ab/(c_a c_b).
    """
    seen = pairs[pairs["tokens"] > 0]
    loads = (seen["tokens"] / seen["share_of_a"]).groupby(seen["expert_a"]).max()
    c_a, c_b = (pairs[name].map(loads).astype(float) for name in ("expert_a", "expert_b"))
    tokens = float((seen["lift"] * (c_a * c_b)[seen.index] / seen["tokens"]).median())
    return c_a / tokens, c_b / tokens, tokens


def strongest_pair(pairs: pd.DataFrame) -> Pair | None:
    """The largest lift over chance of one layer, among pairs that chance would give 5 tokens or more; None
    without such pairs.

    A pair's count strays by sqrt(expected (1 - f_a) (1 - f_b)) by luck, f the shares of tokens that chose
    either; the largest of P pairs
    lies where half of all sets of P normals have none beyond.
    """
    expected = expected_together(pairs)
    over = (pairs["lift"] / pairs["chance_lift"])[expected >= NAMED_FROM]
    if not over.notna().any():
        return None
    top = over.idxmax()
    a, b = sorted((int(pairs.loc[top, "expert_a"]), int(pairs.loc[top, "expert_b"])))
    f_a, f_b, _ = loads_of(pairs)
    spread = np.sqrt((1 - f_a[top]) * (1 - f_b[top]) / expected[top])
    return Pair(a, b, float(over[top]), 1 + float(ndtri(0.5 ** (2 / max(len(over), 2))) * spread))


def lift_over_chance(pairs: pd.DataFrame) -> pd.DataFrame:
    """One layer's matrix lift/chance_lift, expert a by expert b.

    Empty on the diagonal, and where chance would give less than one token.
    """
    enough = expected_together(pairs) >= DRAWN_FROM
    over = pairs.assign(over=(pairs["lift"] / pairs["chance_lift"]).where(enough))
    found: pd.DataFrame = (
        over.pivot(index="expert_a", columns="expert_b", values="over").sort_index().sort_index(axis=1)
    )
    return found


def company_order(over: np.ndarray) -> list[int]:
    """Experts so that those chosen together stand together: average linkage, near means high lift."""
    if len(over) < 3:
        return list(range(len(over)))
    lift = np.nan_to_num(np.clip(over, 0, FOLD))
    near = (lift + lift.T) / 2
    distance = near.max() - near
    np.fill_diagonal(distance, 0)
    return [int(leaf) for leaf in leaves_list(linkage(squareform(distance, checks=False), "average"))]


def coactivation_heatmap(tables: Tables) -> Figure:
    data: list[Trace] = []
    titles, orders, strongest, layers = [], [], [], []
    layers_pairs = list(tables["coactivation"].groupby("layer", sort=True))
    matrices = [lift_over_chance(pairs) for _, pairs in layers_pairs]
    fold = fold_of([matrix.to_numpy(float) for matrix in matrices])
    for (layer, pairs), matrix in zip(layers_pairs, matrices, strict=True):
        experts, over = [int(expert) for expert in matrix.index], matrix.to_numpy(float)
        names = [str(expert) for expert in experts]
        data.append(
            ratio_heatmap(
                over,
                names,
                names,
                ("expert", "with expert"),
                "of the chance lift",
                "lift / chance lift",
                fold,
            )
        )
        orders.append([names[place] for place in company_order(over)])
        layers.append(str(layer))
        top = strongest_pair(pairs)
        strongest.append(top.over if top else 0.0)
        titles.append(
            (
                f"Layer {layer}: experts {top.a} and {top.b} are chosen together {number(top.over)} "
                "times as often as by chance; the largest of "
                f"{len(pairs) // 2:,} such pairs would reach about {number(top.by_chance)}"
            )
            if top
            else (
                f"Layer {layer}: too few tokens to compare pairs (none is expected {NAMED_FROM:.0f} "
                "times by chance)"
            )
        )
    start = int(np.argmax(strongest))
    layout = base_layout("expert", "expert", xaxis=CATEGORIES, yaxis={**CATEGORIES, "autorange": "reversed"})
    return Figure(
        "coactivation_heatmap",
        titles[start],
        (
            "Lift of every pair of experts over the lift of random routing, in doublings; white is "
            "chance. Pairs that chance would give less than one token are empty. Slide to change the "
            "layer; order experts by "
            "number or by company (average linkage)."
        ),
        ("lift", "chance_lift"),
        data,
        layout,
        Slider("layer", layers, start, orders=orders, titles=titles),
        440,
    )


SEPARATION = [
    FigureSpec("coactivation_heatmap", ("coactivation",), coactivation_heatmap, metrics=("expert_overlap",)),
    by_layer(
        "expert_overlap_by_layer", ["expert_overlap"], "mean Jaccard index", floor_name="random routing"
    ),
    by_layer(
        "gram_orthogonality_by_layer", ["gram_orthogonality"], "Gram orthogonality", floor_name="random rows"
    ),
    by_layer(
        "router_similarity_by_layer",
        ["router_similarity_abs", "router_similarity_max"],
        "cosine of router rows",
        floor_name="random rows",
    ),
]
