"""Figures of experts against each other: co-activation, domains, and maps of a layer's experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from scipy.special import ndtri

from moescope.plotting.maps import (
    FEWEST,
    LAYOUTS,
    Cloud,
    Layout,
    plane_of_directions,
    preserved_neighbours,
    principal_plane,
)
from moescope.plotting.style import (
    CATEGORICAL,
    CATEGORIES,
    FOLD,
    GREY,
    base_layout,
    layer_axis,
    number,
    ratio_heatmap,
    ratio_range,
    values_of,
)
from moescope.routing.figures_load import total_load
from moescope.routing.figures_metrics import by_layer, interval_words, layer_range, references, value_lines
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

NAMED_FROM = 5.0  # expected tokens of a pair, or tokens per domain, from which on it is named
DRAWN_FROM = 1.0  # expected tokens of a pair from which on it is drawn
PERMUTED_LABELS = "permuted labels"
RANDOM_ROWS = "random rows"
UNUSED = "no token"  # in the place of a domain
LAYERS_LAID_OUT = 8  # UMAP and t-SNE are slow: maps of so many layers; PCA of all

# --- co-activation


class Pair(NamedTuple):
    """The most co-activated pair of a layer: its lift over chance, and the largest expected at chance."""

    a: int
    b: int
    over: float
    at_chance: float


def expected_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """Rows of `coactivation` with `over` = lift/chance_lift, `expected` = c_a c_b/N chance_lift.

    `share_a` and `share_b` are the shares c/N of tokens that chose either expert.
    """
    tokens = pairs["layer_tokens"].clip(lower=1)
    share_a, share_b = pairs["tokens_a"] / tokens, pairs["tokens_b"] / tokens
    expected = share_a * share_b * tokens * pairs["chance_lift"]
    over = pairs["lift"] / pairs["chance_lift"]
    return pairs.assign(share_a=share_a, share_b=share_b, expected=expected, over=over)


def strongest_pair(pairs: pd.DataFrame) -> Pair | None:
    """The most co-activated of one layer's `expected_pairs`; None if none is expected 5 times.

    A pair's count has standard deviation sqrt(expected (1 - share_a) (1 - share_b)); the largest of P pairs
    is placed at the median maximum of P normals.
    """
    pairs = pairs[pairs["expected"] >= NAMED_FROM]
    if not pairs["over"].notna().any():
        return None
    top = pairs.loc[pairs["over"].idxmax()]
    a, b = sorted((int(top["expert_a"]), int(top["expert_b"])))
    spread = np.sqrt((1 - top["share_a"]) * (1 - top["share_b"]) / top["expected"])
    return Pair(a, b, float(top["over"]), 1 + float(ndtri(0.5 ** (2 / max(len(pairs), 2))) * spread))


def lift_over_chance(pairs: pd.DataFrame) -> pd.DataFrame:
    """Matrix lift/chance_lift of one layer; empty where less than one token is expected."""
    drawn = pairs.assign(over=pairs["over"].where(pairs["expected"] >= DRAWN_FROM))
    return drawn.pivot(index="expert_a", columns="expert_b", values="over").sort_index().sort_index(axis=1)


def coactivation_order(over: np.ndarray) -> list[int]:
    """Experts ordered by average linkage, so that co-activated ones are adjacent."""
    if len(over) < 3:
        return list(range(len(over)))
    lift = np.nan_to_num(np.clip(over, 0, FOLD))
    near = (lift + lift.T) / 2
    distance = near.max() - near
    np.fill_diagonal(distance, 0)
    return [int(leaf) for leaf in leaves_list(linkage(squareform(distance, checks=False), "average"))]


def coactivation_heatmap(tables: Tables) -> Figure:
    """Lift of every pair of experts over the lift of random routing, one layer at a time."""
    data: list[Trace] = []
    captions, orders, strongest = [], [], []
    layers = dict(tuple(expected_pairs(tables["coactivation"]).groupby("layer", sort=True)))
    matrices = {layer: lift_over_chance(pairs) for layer, pairs in layers.items()}
    fold = ratio_range([matrix.to_numpy(float) for matrix in matrices.values()])
    for layer, matrix in matrices.items():
        over, names = matrix.to_numpy(float), [str(expert) for expert in matrix.index]
        axes = ("expert", "with expert")
        data.append(ratio_heatmap(over, names, names, axes, "of the chance lift", "lift / chance lift", fold))
        orders.append([names[place] for place in coactivation_order(over)])
        top = strongest_pair(layers[layer])
        strongest.append(top.over if top else 0.0)
        captions.append(
            f"Layer {layer}: experts {top.a} and {top.b} are chosen together {number(top.over)} times as "
            f"often as at chance; the largest of {len(layers[layer]) // 2:,} pairs reaches about "
            f"{number(top.at_chance)} at chance."
            if top
            else f"Layer {layer}: too few tokens to compare pairs (none is expected {NAMED_FROM:.0f} times)."
        )
    start = int(np.argmax(strongest))
    return Figure(
        "coactivation_heatmap",
        "Co-activation of expert pairs",
        captions[start],
        ("lift", "chance_lift"),
        data,
        base_layout("expert", "expert", xaxis=CATEGORIES, yaxis={**CATEGORIES, "autorange": "reversed"}),
        Slider("layer", [str(layer) for layer in layers], start, orders=orders, captions=captions),
        440,
        "Lift of every pair over the lift of random routing, on a scale of doublings. Pairs with less than "
        "one expected token are empty. Similarity orders experts by average linkage.",
    )


SEPARATION = [
    FigureSpec("coactivation_heatmap", ("coactivation",), coactivation_heatmap, metrics=("expert_overlap",)),
    by_layer("expert_overlap_by_layer", ["expert_overlap"], "Jaccard index, weighted by use"),
    by_layer("gram_orthogonality_by_layer", ["gram_orthogonality"], "Gram orthogonality", chance=RANDOM_ROWS),
    by_layer(
        "router_similarity_by_layer",
        ["router_similarity_abs", "router_similarity_max"],
        "cosine of router rows",
        chance=RANDOM_ROWS,
    ),
]

# --- domains


def affinity_heatmap(tables: Tables) -> Figure:
    """Affinity P(i | d)/P(i) of every domain and expert, domains weighted equally, one layer at a time."""
    data: list[Trace] = []
    captions, layers, strongest = [], [], []
    fold = ratio_range([tables["domains"]["affinity"].to_numpy(float)])
    for layer, rows in tables["domains"].groupby("layer", sort=True):
        grid = rows.pivot(index="domain", columns="expert", values="affinity")
        values = grid.to_numpy(float)
        axes = ("expert", "domain")
        data.append(
            ratio_heatmap(values, grid.columns, grid.index, axes, "of the mean use", "affinity", fold)
        )
        layers.append(str(layer))
        # an expert with a handful of tokens is of one domain by chance: it is drawn, but not named
        often = rows.groupby("expert")["tokens"].sum().reindex(grid.columns) >= NAMED_FROM * len(grid)
        named = np.where(often.to_numpy(), values, np.nan)
        if np.isfinite(named).any():
            d, e = np.unravel_index(np.nanargmax(named), values.shape)
            strongest.append(float(named[d, e]))
            captions.append(
                f"Layer {layer}: {grid.index[d]} uses expert {grid.columns[e]} {number(strongest[-1])} times "
                f"as much as the average domain (chance 1, at most {len(grid)})."
            )
        else:
            strongest.append(0.0)
            captions.append(f"Layer {layer}: too few tokens to name an expert.")
    start = int(np.argmax(strongest))
    yaxis = {"type": "category", "autorange": "reversed"}
    return Figure(
        "affinity_heatmap",
        "Domain affinity of experts",
        captions[start],
        ("affinity", "share", "domain_information"),
        data,
        base_layout("expert", "domain", xaxis=CATEGORIES, yaxis=yaxis),
        Slider("layer", layers, start, captions=captions),
        min(200 + 34 * tables["domains"]["domain"].nunique(), 620),
        "P(i | d)/P(i), every domain weighted equally, on a scale of doublings. With few documents it varies "
        "by chance: compare with I(expert; domain).",
    )


def purity_bars(tables: Tables) -> Figure:
    """Purity of each layer as bars, with the purity of permuted document labels."""
    rows = values_of(tables, "purity")
    (line,) = value_lines(rows, "purity", 0)
    bars: Trace = {
        "type": "bar",
        "name": "purity",
        "x": line["x"],
        "y": line["y"],
        "marker": {"color": CATEGORICAL[0]},
        "hovertemplate": "layer %{x}<br>purity %{y:.4g}<extra></extra>",
        **({"error_y": {**line["error_y"], "color": GREY}} if "error_y" in line else {}),
    }
    chance: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": PERMUTED_LABELS,
        "x": line["x"],
        "y": rows["chance"].to_numpy(float),
        "marker": {
            "symbol": "line-ew-open",
            "size": float(np.clip(300 / max(len(rows), 1), 5, 24)),
            "color": GREY,
            "line": {"width": 2.5, "color": GREY},
        },
        "hovertemplate": f"{PERMUTED_LABELS}: %{{y:.4g}}<extra></extra>",
    }
    return Figure(
        "purity_bars",
        "Domain purity of experts by layer",
        f"Purity {layer_range(rows)}; {references(rows, PERMUTED_LABELS)}. {interval_words(rows)}",
        ("purity", "share", "share_chance"),
        [bars, chance],
        base_layout("layer", "purity", xaxis=layer_axis(rows["layer"]), yaxis={"range": [0, 1]}),
    )


DOMAINS = [
    FigureSpec("affinity_heatmap", ("domains",), affinity_heatmap, wide=True),
    FigureSpec("purity_bars", ("routing_layers",), purity_bars, metrics=("purity",)),
    by_layer(
        "domain_information_by_layer",
        ["domain_information"],
        "nats",
        chance=PERMUTED_LABELS,
        draw_collapse=False,
    ),
]

# --- maps


@dataclass(frozen=True)
class Subject:
    """A property of experts that is mapped: its points in the tables, and their chance level on two axes."""

    name: str
    title: str
    needs: str  # the table
    points: Callable[[Tables, int], tuple[np.ndarray, Cloud, float]]  # experts, points, share of two axes
    chance: str  # what that share is of
    columns: tuple[str, ...]
    details: str
    missing: str
    metrics: tuple[str, ...] = ()


def coactivation_profiles(over: np.ndarray) -> np.ndarray:
    """Each expert's log2 lift over chance with every other expert; pairs without a value count as chance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        profile = np.clip(np.log2(over), -np.log2(FOLD), np.log2(FOLD))
    profile[np.isnan(profile)] = 0.0
    return fill_diagonal(profile)


def fill_diagonal(profile: np.ndarray) -> np.ndarray:
    """Set each expert's own entry to its largest, without which two identical experts would differ."""
    filled = profile.copy()
    np.fill_diagonal(filled, -np.inf)
    np.fill_diagonal(filled, filled.max(axis=1, initial=0.0))
    return filled


@lru_cache
def plane_of_noise(n: int) -> float:
    """Share of variance on two axes of n profiles of noise: mean of 20 seeded symmetric normal matrices."""
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(20):
        noise = generator.standard_normal((n, n))
        shares.append(principal_plane(Cloud.of_rows(fill_diagonal(noise + noise.T)))[1].sum())
    return float(np.mean(shares))


def coactivation_points(tables: Tables, layer: int) -> tuple[np.ndarray, Cloud, float]:
    rows = tables["coactivation"]
    matrix = lift_over_chance(expected_pairs(rows[rows["layer"] == layer]))
    cloud = Cloud.of_rows(coactivation_profiles(matrix.to_numpy(float)))
    return matrix.index.to_numpy(), cloud, plane_of_noise(len(matrix))


def direction_points(of: str, tables: Tables, layer: int) -> tuple[np.ndarray, Cloud, float]:
    """Unit vectors by their cosines; an expert without a vector has no place."""
    rows = tables["expert_cosines"]
    rows = rows[(rows["layer"] == layer) & (rows["of"] == of)]
    gram = np.eye(int(rows["expert_b"].max()) + 1)
    a, b = rows["expert_a"].to_numpy(), rows["expert_b"].to_numpy()
    gram[a, b] = gram[b, a] = rows["cosine"].to_numpy(float)
    experts = np.flatnonzero(np.isfinite(gram).sum(axis=1) > 1)
    level = plane_of_directions(len(experts), int(rows["dimensions"].iloc[0]))
    return experts, Cloud(gram[np.ix_(experts, experts)]), level


SUBJECTS = [
    Subject(
        "router",
        "router rows",
        "expert_cosines",
        partial(direction_points, "router"),
        "random directions",
        ("expert_cosines.cosine", "of"),
        "Directions of router rows: near experts are chosen for similar tokens.",
        "the router has no rows, or the trace is recorded or older",
    ),
    Subject(
        "coactivation",
        "co-activation profiles",
        "coactivation",
        coactivation_points,
        "profiles of noise",
        ("lift", "chance_lift"),
        "Profiles of log₂(lift / chance lift) with every other expert: near experts are co-activated alike.",
        "each token chooses one expert",
        ("expert_overlap",),
    ),
    Subject(
        "outputs",
        "mean outputs",
        "expert_cosines",
        partial(direction_points, "outputs"),
        "random directions",
        ("expert_cosines.cosine", "of"),
        "Directions of mean outputs over up to 1,024 tokens each: near experts add similar vectors.",
        "outputs are unknown: a model of the lab, or a recorded or older trace",
    ),
]


def main_domains(tables: Tables, layer: int) -> pd.Series:
    """Domain of highest affinity of each expert; empty without domains."""
    rows = tables.get("domains", pd.DataFrame())
    rows = rows[(rows["layer"] == layer) & rows["affinity"].notna()] if len(rows) else rows
    if not len(rows):
        return pd.Series(dtype=object)
    return rows.loc[rows.groupby("expert")["affinity"].idxmax()].set_index("expert")["domain"]


def layers_of(subject: Subject, tables: Tables) -> list[int]:
    """The layers that have points."""
    rows = tables[subject.needs]
    if "of" in rows:
        rows = rows[(rows["of"] == subject.name) & rows["cosine"].notna()]
    return sorted(int(layer) for layer in rows["layer"].unique())


def mapped_layers(layout: Layout, layers: list[int]) -> list[int]:
    """All layers, or some from the first to the last for a slow layout."""
    if not layout.package or len(layers) <= LAYERS_LAID_OUT:
        return layers
    return [layers[place] for place in np.linspace(0, len(layers) - 1, LAYERS_LAID_OUT).round().astype(int)]


def map_caption(
    subject: Subject, layout: Layout, layer: int, cloud: Cloud, at: np.ndarray, level: float
) -> str:
    caption = f"Layer {layer}{layout.setting(len(at))}: "
    if layout.name == "pca":
        share = float(principal_plane(cloud)[1].sum())
        caption += (
            f"two axes hold {number(100 * share)} % of the variance "
            f"({subject.chance}: {number(100 * level)} %); "
        )
    preserved, chance, nearest = preserved_neighbours(cloud, at)
    if np.isnan(preserved):
        return caption + "too few experts to compare neighbours."
    return caption + (
        f"{number(100 * preserved)} % of each expert’s {nearest} nearest stay nearest "
        f"(chance: {number(100 * chance)} %)."
    )


def expert_map(subject: Subject, layout: Layout, tables: Tables) -> Figure:
    """Map of a layer's experts, sized by load and coloured by their main domain."""
    loads = total_load(tables)
    domains = sorted(tables["domains"]["domain"].unique()) if len(tables.get("domains", ())) else []
    groups = [*domains, UNUSED] if 1 < len(domains) <= len(CATEGORICAL) else [""]
    data: list[Trace] = []
    captions, clear = [], []
    every = layers_of(subject, tables)
    layers = mapped_layers(layout, every)
    for layer in layers:
        experts, cloud, level = subject.points(tables, layer)
        at = layout.place(cloud)
        mine = loads[loads["layer"] == layer].set_index("expert")["tokens"]
        times = mine.reindex(experts, fill_value=0).to_numpy(float) / (mine.mean() or 1.0)
        main = main_domains(tables, layer).reindex(experts).fillna(UNUSED)
        for index, group in enumerate(groups):
            mask = np.ones(len(experts), bool) if group == "" else (main == group).to_numpy()
            color = GREY if group == UNUSED else CATEGORICAL[index]
            trace = map_points(experts[mask], at[mask], times[mask], group, color, len(experts))
            data.append(trace if mask.any() or group != UNUSED else {**trace, "showlegend": False})
        captions.append(map_caption(subject, layout, layer, cloud, at, level))
        # the same for every layout, so that all start at one layer
        clear.append(float(principal_plane(cloud)[1].sum()) - level)
    if len(layers) < len(every):
        captions = [f"{caption} Maps of {len(layers)} of {len(every)} layers." for caption in captions]
    start = int(np.argmax(clear))
    return Figure(
        f"expert_map_{subject.name}_{layout.name}",
        f"Map of experts by {subject.title}, {layout.title}",
        captions[start],
        (*subject.columns, "affinity") if len(groups) > 1 else subject.columns,
        data,
        base_layout(f"{layout.title} 1", f"{layout.title} 2"),
        Slider("layer", [str(layer) for layer in layers], start, len(groups), captions=captions),
        400,
        f"{subject.details} Size: load; colour: domain of highest affinity. Axes have no unit, and layers "
        "cannot be compared.",
    )


def map_points(
    experts: np.ndarray, at: np.ndarray, times: np.ndarray, group: str, color: str, n: int
) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers+text" if n <= 32 else "markers",
        "name": group or "experts",
        "showlegend": bool(group),
        "x": at[:, 0],
        "y": at[:, 1] if at.shape[1] > 1 else np.zeros(len(at)),
        "text": [str(expert) for expert in experts],
        "textposition": "top center",
        "cliponaxis": False,
        "textfont": {"size": 10},
        "customdata": np.round(times, 3),
        "marker": {
            "color": color,
            "size": np.clip(11 * np.sqrt(times), 4, 40).tolist(),
            "opacity": 0.8,
            "line": {"color": GREY, "width": 0.5},
        },
        "hovertemplate": f"expert %{{text}}<br>%{{customdata}} of an even share<extra>{group}</extra>",
    }


def map_spec(subject: Subject, layout: Layout) -> FigureSpec:
    def draw(tables: Tables) -> Figure:
        return expert_map(subject, layout, tables)

    draw.__doc__ = f"Map of a layer's experts by {subject.title}, {layout.title}."
    name = f"expert_map_{subject.name}_{layout.name}"
    return FigureSpec(name, (subject.needs, "load"), draw, metrics=subject.metrics)


MAPS = [map_spec(subject, layout) for subject in SUBJECTS for layout in LAYOUTS]


def drawable_maps(tables: Tables, every_layout: bool = True) -> tuple[list[FigureSpec], list[str]]:
    """(maps that can be drawn, sentences on what is missing); UMAP and t-SNE need the extra and 8 experts."""
    subjects, missing = [], []
    for subject in SUBJECTS:
        if map_spec(subject, LAYOUTS[0]).can_draw(tables) and layers_of(subject, tables):
            subjects.append(subject)
        else:
            missing.append(f"No map of {subject.title}: {subject.missing}.")
    few = int(tables["load"].groupby("layer")["expert"].nunique().min()) < FEWEST
    absent = [layout.title for layout in LAYOUTS if not layout.installed]
    if subjects and few:
        missing.append(f"UMAP and t-SNE need at least {FEWEST} experts per layer.")
    elif subjects and absent:
        missing.append(f"{' and '.join(absent)}: pip install 'moescope[maps]', then repeat the report.")
    elif subjects and not every_layout:
        missing.append("UMAP and t-SNE are drawn for the last step only.")
    layouts = [
        layout for layout in LAYOUTS if not layout.package or (layout.installed and every_layout and not few)
    ]
    return [map_spec(subject, layout) for subject in subjects for layout in layouts], missing
