"""Which experts act together, how alike their router rows are, and a map of experts by the company they keep."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from scipy.special import ndtri

from moescope.figures.routing_load import CATEGORIES, FOLD, fold_of, ratio_heatmap, total_load
from moescope.figures.routing_metrics import by_layer
from moescope.figures.style import (
    CATEGORICAL,
    GREY,
    Figure,
    FigureSpec,
    Slider,
    Tables,
    Trace,
    base_layout,
    number,
)

NAMED_FROM = 5.0  # a pair is named where chance would give it so many tokens
DRAWN_FROM = 1.0  # and drawn where it would give it one: less is noise


class Pair(NamedTuple):
    """The pair of a layer most often chosen together, over chance, and what the largest of so many pairs reaches by luck."""

    a: int
    b: int
    over: float
    by_chance: float


def expected_together(pairs: pd.DataFrame) -> pd.Series:
    """How many tokens random routing would give each pair of one layer, at the experts' own loads: c_a c_b/N times chance_lift."""
    f_a, f_b, tokens = loads_of(pairs)
    found: pd.Series = f_a * f_b * tokens * pairs["chance_lift"]
    return found


def loads_of(pairs: pd.DataFrame) -> tuple[pd.Series, pd.Series, float]:
    """(share of the tokens that chose a, the same of b, N), read back from share_of_a = c_ab/c_a and lift = N c_ab/(c_a c_b)."""
    seen = pairs[pairs["tokens"] > 0]
    loads = (seen["tokens"] / seen["share_of_a"]).groupby(seen["expert_a"]).max()
    c_a, c_b = (pairs[name].map(loads).astype(float) for name in ("expert_a", "expert_b"))
    tokens = float((seen["lift"] * (c_a * c_b)[seen.index] / seen["tokens"]).median())
    return c_a / tokens, c_b / tokens, tokens


def strongest_pair(pairs: pd.DataFrame) -> Pair | None:
    """The largest lift over chance of one layer, among pairs that chance would give 5 tokens or more; None without such pairs.

    A pair's count strays by sqrt(expected (1 - f_a) (1 - f_b)) by luck, f the shares of tokens that chose either; the largest of P pairs
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
    """One layer's matrix lift/chance_lift, expert a by expert b; empty on the diagonal, and where chance would give less than one token."""
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
                over, names, names, ("expert", "with expert"), "of the chance lift", "lift / chance lift", fold
            )
        )
        orders.append([names[place] for place in company_order(over)])
        layers.append(str(layer))
        top = strongest_pair(pairs)
        strongest.append(top.over if top else 0.0)
        titles.append(
            f"Layer {layer}: experts {top.a} and {top.b} are chosen together {number(top.over)} times as often as by chance; the largest of "
            f"{len(pairs) // 2:,} such pairs would reach about {number(top.by_chance)}"
            if top
            else f"Layer {layer}: too few tokens to compare pairs (none is expected {NAMED_FROM:.0f} times by chance)"
        )
    start = int(np.argmax(strongest))
    layout = base_layout("expert", "expert", xaxis=CATEGORIES, yaxis={**CATEGORIES, "autorange": "reversed"})
    return Figure(
        "coactivation_heatmap",
        titles[start],
        "Lift of every pair of experts over the lift of random routing, in doublings; white is chance. Pairs that chance would give less than one token are empty. Slide to change the layer; order experts by "
        "number or by company (average linkage).",
        ("lift", "chance_lift"),
        data,
        layout,
        Slider("layer", layers, start, orders=orders, titles=titles),
        440,
    )


def company(over: np.ndarray) -> np.ndarray:
    """Each expert's profile: doublings of lift over chance with every other; pairs that cannot be compared count as chance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        profile = np.clip(np.log2(over), -np.log2(FOLD), np.log2(FOLD))
    profile[np.isnan(profile)] = 0.0
    return with_own_company(profile)


def with_own_company(profile: np.ndarray) -> np.ndarray:
    """An expert keeps company with itself as with its best partner; without that two twins would look different."""
    kept = profile.copy()
    np.fill_diagonal(kept, -np.inf)
    np.fill_diagonal(kept, kept.max(axis=1, initial=0.0))
    return kept


@lru_cache
def plane_by_chance(n: int) -> float:
    """The share of variance that two axes hold of n profiles without any structure: mean of 20 seeded symmetric normal matrices."""
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(20):
        noise = generator.standard_normal((n, n))
        shares.append(principal_plane(with_own_company(noise + noise.T))[1].sum())
    return float(np.mean(shares))


def principal_plane(profile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(coordinates on the first two principal components, their shares of the variance)."""
    centred = profile - profile.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    variance = sizes**2
    share = variance / variance.sum() if variance.sum() else np.zeros_like(variance)
    coordinates = left[:, :2] * sizes[:2]
    for column in range(coordinates.shape[1]):  # a component's sign is arbitrary: the largest is positive
        if coordinates[np.abs(coordinates[:, column]).argmax(), column] < 0:
            coordinates[:, column] *= -1
    return coordinates, share[:2]


def main_domains(tables: Tables, layer: int) -> pd.Series:
    """expert -> its domain of highest affinity; empty without domains."""
    rows = tables.get("domains", pd.DataFrame())
    rows = rows[(rows["layer"] == layer) & rows["affinity"].notna()] if len(rows) else rows
    if not len(rows):
        return pd.Series(dtype=object)
    found: pd.Series = rows.loc[rows.groupby("expert")["affinity"].idxmax()].set_index("expert")["domain"]
    return found


def expert_map(tables: Tables) -> Figure:
    """Experts of a layer on the two main axes of their company, sized by load, coloured by their main domain."""
    loads = total_load(tables)
    domains = sorted(tables["domains"]["domain"].unique()) if len(tables.get("domains", ())) else []
    groups = domains if 1 < len(domains) <= len(CATEGORICAL) else [""]
    data: list[Trace] = []
    titles, layers, clear = [], [], []
    for layer, pairs in tables["coactivation"].groupby("layer", sort=True):
        matrix = lift_over_chance(pairs)
        experts = matrix.index.to_numpy()
        at, share = principal_plane(company(matrix.to_numpy(float)))
        mine = (
            loads[loads["layer"] == layer].set_index("expert")["tokens"].reindex(experts, fill_value=0).to_numpy(float)
        )
        times = mine / (mine.mean() or 1.0)
        main = main_domains(tables, int(layer)).reindex(experts)
        for index, group in enumerate(groups):
            own = np.ones(len(experts), bool) if group == "" else (main == group).to_numpy()
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers+text" if len(experts) <= 32 else "markers",
                    "name": group or "experts",
                    "showlegend": bool(group),
                    "x": at[own, 0],
                    "y": at[own, 1],
                    "text": [str(expert) for expert in experts[own]],
                    "textposition": "top center",
                    "cliponaxis": False,
                    "textfont": {"size": 10},
                    "customdata": np.round(times[own], 3),
                    "marker": {
                        "color": CATEGORICAL[index],
                        "size": np.clip(11 * np.sqrt(times[own]), 4, 40).tolist(),
                        "opacity": 0.8,
                        "line": {"color": GREY, "width": 0.5},
                    },
                    "hovertemplate": "expert %{text}<br>%{customdata} of an even share<extra>"
                    + (group or "")
                    + "</extra>",
                }
            )
        titles.append(
            f"Layer {layer}, PCA of co-activation profiles: two axes hold {number(100 * share.sum())} % of the variance; "
            f"profiles of noise leave {number(100 * plane_by_chance(len(experts)))} % on two"
        )
        layers.append(str(layer))
        clear.append(float(share.sum()) - plane_by_chance(len(experts)))
    start = int(np.argmax(clear))
    return Figure(
        "expert_map",
        titles[start],
        "Principal components of each expert's profile: log₂(lift / chance lift) with every other expert. Near means the same company. "
        "Size: load; colour: the domain of highest affinity, where there are domains. Axes have no unit, and distances between layers cannot be compared.",
        ("lift", "chance_lift", "affinity") if len(groups) > 1 else ("lift", "chance_lift"),
        data,
        base_layout("first principal component", "second principal component"),
        Slider("layer", layers, start, len(groups), titles),
        440,
    )


SEPARATION = [
    FigureSpec("coactivation_heatmap", ("coactivation",), coactivation_heatmap, metrics=("expert_overlap",)),
    FigureSpec("expert_map", ("coactivation", "load"), expert_map, metrics=("expert_overlap",)),
    by_layer("expert_overlap_by_layer", ["expert_overlap"], "mean Jaccard index", floor_name="random routing"),
    by_layer("gram_orthogonality_by_layer", ["gram_orthogonality"], "Gram orthogonality", floor_name="random rows"),
    by_layer("router_similarity_by_layer", ["router_similarity_abs", "router_similarity_max"], "cosine of router rows", floor_name="random rows"),
]  # fmt: skip
