"""Figures of experts against each other: co-activation, domains, and maps of a layer's experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import ndtri

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
from moescope.routing.expert_maps import expected_pairs, lift_over_chance
from moescope.routing.figures_load import total_load
from moescope.routing.figures_metrics import by_layer, interval_words, layer_range, references, value_lines
from moescope.statistics import FEWEST_DOCUMENTS
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

NAMED_FROM = 5.0  # expected tokens of a pair, or tokens per domain, from which on it is named
PERMUTED_LABELS = "permuted labels"
RANDOM_ROWS = "random rows"
UNUSED = "no token"  # in the place of a domain

# --- co-activation


class Pair(NamedTuple):
    """The most co-activated pair of a layer: its lift over chance, and the largest expected at chance."""

    a: int
    b: int
    over: float
    at_chance: float


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


def coactivation_order(over: np.ndarray) -> list[int]:
    """Experts ordered by average linkage, so that co-activated ones are adjacent."""
    if len(over) < 3:
        return list(range(len(over)))
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

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
            f"often as at chance (largest of {len(layers[layer]) // 2:,} pairs at chance: "
            f"{number(top.at_chance)})."
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
    of_domain: dict[str, list[str]] = {str(name): [] for name in sorted(tables["domains"]["domain"].unique())}
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
        often = rows.groupby("expert")["tokens"].sum() >= NAMED_FROM * len(grid)
        named = rows[rows["expert"].map(often) & rows["affinity"].notna()]
        strongest.append(float(named["affinity"].max()) if len(named) else 0.0)
        captions.append(strongest_use(str(layer), named, len(grid)))
        for domain, texts in of_domain.items():
            texts.append(strongest_use(str(layer), named[named["domain"] == domain], len(grid)))
    start = int(np.argmax(strongest))
    yaxis = {"type": "category", "autorange": "reversed"}
    return Figure(
        "affinity_heatmap",
        "Domain affinity of experts",
        captions[start],
        ("affinity", "domains.low", "share", "domain_information"),
        data,
        base_layout("expert", "domain", xaxis=CATEGORIES, yaxis=yaxis),
        Slider("layer", layers, start, captions=captions, domain_captions=of_domain),
        min(200 + 34 * tables["domains"]["domain"].nunique(), 620),
        "P(i | d)/P(i), every domain weighted equally, on a scale of doublings. In brackets: 95 % interval "
        f"over documents; it needs {FEWEST_DOCUMENTS} documents per domain. The table `domains` has that of "
        "every cell; one of 20 misses 1 by chance.",
    )


def strongest_use(layer: str, rows: pd.DataFrame, domains: int) -> str:
    """One sentence on the highest affinity among the rows."""
    if rows.empty:
        return f"Layer {layer}: too few tokens to name an expert."
    top = rows.loc[rows["affinity"].idxmax()]
    interval = ", no interval" if pd.isna(top["low"]) else f" [{number(top['low'])}, {number(top['high'])}]"
    return (
        f"Layer {layer}: {top['domain']} uses expert {top['expert']} {number(top['affinity'])} times as much "
        f"as the average domain{interval} (chance 1, at most {domains})."
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
        "marker": {"color": CATEGORICAL[0], "opacity": 0.4},  # pale: the chance level is read on it
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
    without_interval, details = interval_words(rows)
    return Figure(
        "purity_bars",
        "Domain purity of experts by layer",
        f"Purity {layer_range(rows)}; {references(rows, PERMUTED_LABELS)}.{without_interval}",
        ("purity", "share", "share_chance"),
        [bars, chance],
        base_layout("layer", "purity", xaxis=layer_axis(rows["layer"]), yaxis={"range": [0, 1]}),
        details=details,
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


class Subject(NamedTuple):
    """A property of experts that is mapped: `of` in the table, its words, and why it may be missing."""

    of: str
    title: str
    chance: str  # what `variance_chance` is of
    columns: tuple[str, ...]
    details: str
    missing: str


SUBJECTS = [
    Subject(
        "router",
        "router rows",
        "random directions",
        ("expert_cosines.cosine",),
        "Directions of router rows: near experts are chosen for similar tokens.",
        "the router has no rows, or the trace is recorded",
    ),
    Subject(
        "coactivation",
        "co-activation profiles",
        "profiles of noise",
        ("lift", "chance_lift"),
        "Profiles of log₂(lift / chance lift) with every other expert: near experts are co-activated alike.",
        "each token chooses one expert",
    ),
    Subject(
        "outputs",
        "mean outputs",
        "random directions",
        ("expert_cosines.cosine",),
        "Directions of mean outputs over up to 1,024 tokens each: near experts add similar vectors.",
        "a model of the lab and a recorded trace hold none",
    ),
]
FAITHFUL = 0.2  # share of neighbours beyond chance that a map must preserve
METHOD_TITLES = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}


def main_domains(tables: Tables, layer: int) -> pd.Series:
    """Domain of highest affinity of each expert; empty without domains."""
    rows = tables.get("domains", pd.DataFrame())
    rows = rows[(rows["layer"] == layer) & rows["affinity"].notna()] if len(rows) else rows
    if not len(rows):
        return pd.Series(dtype=object)
    return rows.loc[rows.groupby("expert")["affinity"].idxmax()].set_index("expert")["domain"]


def map_caption(subject: Subject, method: str, layer: int, first: pd.Series) -> str:
    """What this map holds of its layer, by the map's first row."""
    caption = f"Layer {layer}: "
    if method == "pca":
        caption += (
            f"two axes hold {number(100 * first['variance'])} % of the variance "
            f"({subject.chance}: {number(100 * first['variance_chance'])} %); "
        )
    if np.isnan(first["neighbours"]):
        return caption + "too few experts to compare neighbours."
    share, chance = first["neighbours"], first["neighbours_chance"]
    faint = " Not faithful: its groups mean nothing." if share - chance < FAITHFUL * (1 - chance) else ""
    return caption + (
        f"{number(100 * share)} % of nearest neighbours stay nearest "
        f"(chance: {number(100 * chance)} %).{faint}"
    )


def expert_map(subject: Subject, method: str, tables: Tables) -> Figure:
    """Map of a layer's experts, sized by load and coloured by their main domain."""
    loads = total_load(tables)
    domains = sorted(tables["domains"]["domain"].unique()) if len(tables.get("domains", ())) else []
    groups = [*domains, UNUSED] if 1 < len(domains) <= len(CATEGORICAL) else [""]
    data: list[Trace] = []
    captions, clear, title = [], [], METHOD_TITLES[method]
    maps = tables["maps"]
    shown = maps[(maps["of"] == subject.of) & (maps["method"] == method)]
    layers = dict(tuple(shown.groupby("layer", sort=True)))
    for layer, rows in layers.items():
        experts, at = rows["expert"].to_numpy(), rows[["x", "y"]].to_numpy(float)
        mine = loads[loads["layer"] == layer].set_index("expert")["tokens"]
        times = mine.reindex(experts, fill_value=0).to_numpy(float) / (mine.mean() or 1.0)
        main = main_domains(tables, layer).reindex(experts).fillna(UNUSED)
        for index, group in enumerate(groups):
            mask = np.ones(len(experts), bool) if group == "" else (main == group).to_numpy()
            color = GREY if group == UNUSED else CATEGORICAL[index]
            trace = map_points(experts[mask], at[mask], times[mask], group, color, len(experts))
            data.append(trace if mask.any() or group != UNUSED else {**trace, "showlegend": False})
        captions.append(map_caption(subject, method, layer, rows.iloc[0]))
        # the same for every method, so that all start at one layer
        clear.append(float(rows["variance"].iloc[0] - rows["variance_chance"].iloc[0]))
    start = int(np.argmax(clear))
    return Figure(
        f"expert_map_{subject.of}_{method}",
        f"Map of experts by {subject.title}, {title}",
        captions[start],
        (*subject.columns, "method", "neighbours", *(("affinity",) if len(groups) > 1 else ())),
        data,
        base_layout(f"{title} 1", f"{title} 2"),
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
        "y": at[:, 1],
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


@dataclass(frozen=True)
class MapSpec(FigureSpec):
    """A map, drawn where the table holds its subject by its method."""

    shown: tuple[str, str] = ("", "")

    def can_draw(self, tables: Tables) -> bool:
        return super().can_draw(tables) and self.shown in held_maps(tables)


def held_maps(tables: Tables) -> set[tuple[str, str]]:
    return set(zip(tables["maps"]["of"], tables["maps"]["method"], strict=True))


def map_spec(subject: Subject, method: str) -> MapSpec:
    return MapSpec(
        f"expert_map_{subject.of}_{method}",
        ("maps", "load"),
        partial(expert_map, subject, method),
        description=f"Map of a layer's experts by {subject.title}, {METHOD_TITLES[method]}.",
        shown=(subject.of, method),
    )


MAPS: list[FigureSpec] = [map_spec(subject, method) for subject in SUBJECTS for method in METHOD_TITLES]


def missing_maps(tables: Tables) -> list[str]:
    """Sentences on the maps that a trace does not hold, and how to make them."""
    held = held_maps(tables)
    if not held:
        return ["No maps in this trace: repeat its command with --overwrite to make them."]
    missing = [
        f"No map of {subject.title}: {subject.missing}."
        for subject in SUBJECTS
        if (subject.of, "pca") not in held
    ]
    methods = {method for _, method in held}
    if "tsne" not in methods:
        missing.append("t-SNE needs at least 8 experts per layer.")
    elif "umap" not in methods:
        missing.append("UMAP is made on request: trace --maps umap.")
    return missing
