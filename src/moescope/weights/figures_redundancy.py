"""Redundancy of experts: cosines of their top singular vectors, subspace overlaps, spectra."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.special import betainc, betaincinv

from moescope.plotting.log_axis import log_axis
from moescope.plotting.style import (
    CATEGORICAL,
    base_layout,
    counted,
    from_to,
    grey_line,
    heatmap,
    layer_axis,
    layer_lines,
    lines_or_map,
    named_layers,
    number,
)
from moescope.verb import Figure, Slider, Tables, Trace
from moescope.weights.figures_alignment import compact, line, matrix_layout


def cosine_matrix(pairs: pd.DataFrame) -> tuple[np.ndarray, list[int]]:
    """[E, E] signed cosines of one layer at k = 1, and its experts."""
    first = pairs[pairs["k"] == 1]
    experts = sorted(set(first["expert_a"]) | set(first["expert_b"]))
    place = {expert: index for index, expert in enumerate(experts)}
    matrix = np.eye(len(experts))
    a, b = first["expert_a"].map(place).to_numpy(), first["expert_b"].map(place).to_numpy()
    matrix[a, b] = matrix[b, a] = first["cosine"]
    return matrix, [int(expert) for expert in experts]


def similarity_order(matrix: np.ndarray) -> list[int]:
    """Order that places similar experts side by side: average linkage on 1 - |cos|."""
    if len(matrix) < 3:
        return list(range(len(matrix)))
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    distance = squareform(np.clip(1 - np.abs(matrix), 0, None), checks=False)
    return [int(leaf) for leaf in leaves_list(linkage(distance, "average"))]


def d_model_by_layer(tables: Tables) -> pd.Series:
    widths: pd.Series = tables["orthogonality"].groupby("layer")["d_model"].first()
    return widths


def share_above(threshold: float, d_model: int) -> float:
    """P(|cos| > threshold) of two random directions: cos^2 follows Beta(1/2, (d - 1)/2)."""
    return float(1 - betainc(0.5, (d_model - 1) / 2, threshold**2))


def closest_by_chance(n_pairs: int, d_model: int) -> float:
    """Median of the largest |cos| among that many random pairs."""
    each = 0.5 ** (1 / n_pairs)  # probability that one pair stays below
    return float(np.sqrt(betaincinv(0.5, (d_model - 1) / 2, each)))


def cosine_heatmap(tables: Tables) -> Figure:
    """Cosines of the experts' top singular vectors, one matrix per layer."""
    widths = d_model_by_layer(tables)
    data: list[Trace] = []
    layers, orders, captions, highest = [], [], [], []
    for layer, pairs in tables["similarity"].groupby("layer", sort=True):
        matrix, experts = cosine_matrix(pairs)
        layers.append(str(layer))
        orders.append([str(experts[place]) for place in similarity_order(matrix)])
        axes = ("expert", "expert")
        trace = heatmap(
            matrix,
            experts,
            experts,
            diverging=True,
            bound=1.0,
            noise=widths[layer] ** -0.5,
            label="cos",
            axes=axes,
            text=True,
        )
        data.append(compact(trace))
        off = np.abs(matrix - np.eye(len(matrix)))
        highest.append(float(off.max()))
        a, b = sorted(np.unravel_index(off.argmax(), off.shape))
        n_pairs = int((pairs["k"] == 1).sum())
        captions.append(
            f"Closest pair of layer {layer}: experts {experts[a]} and {experts[b]}, |cos| "
            f"{number(highest[-1])} (chance, closest of {n_pairs:,}: "
            f"{number(closest_by_chance(n_pairs, widths[layer]))})."
        )
    start = int(np.argmax(highest))
    return Figure(
        "cosine_heatmap",
        "Cosines of the experts' top singular vectors",
        captions[start],
        ("cosine", "mean_abs"),
        data,
        matrix_layout("expert", "expert"),
        Slider("layer", layers, start, orders=orders, captions=captions),
        440,
        "Slide to change the layer; order experts by number or by similarity (average linkage).",
    )


def orthogonality_by_layer(tables: Tables) -> Figure:
    """Mean and largest absolute cosine over all expert pairs, by layer."""
    frame = tables["orthogonality"]
    frame = frame[frame["k"] == 1].sort_values("layer")
    layers = frame["layer"].to_numpy()
    collapsed = sorted(frame.loc[frame["n_pairs_above_0_7"] > 0, "layer"])
    over = float((frame["mean_abs"] / frame["chance"]).max())
    caption = (
        f"{counted(int(frame['n_pairs_above_0_7'].sum()), 'collapsed pair')}, in {named_layers(collapsed)}"
        if collapsed
        else "No pair of experts has collapsed"
    )
    ends = [float(layers.min()), float(layers.max())]
    data = [
        line(layers, frame[f"{name}_abs"], f"{name} |cos|", color, f"layer %{{x}}<br>{name} |cos| %{{y:.4g}}")
        for name, color in (("mean", CATEGORICAL[0]), ("max", CATEGORICAL[1]))
    ]
    data += [
        grey_line(layers, frame["chance"].to_numpy(), "chance √(2/(πd))"),
        grey_line(ends, [0.3, 0.3], "redundancy 0.3", "dot"),
        grey_line(ends, [0.7, 0.7], "collapse 0.7", "dot"),
    ]
    return Figure(
        "orthogonality_by_layer",
        "Absolute cosines over all expert pairs",
        f"{caption}; mean |cos| is at most {number(over)} times chance.",
        ("mean_abs", "max_abs", "chance"),
        data,
        base_layout("layer", "|cos|", xaxis=layer_axis(frame["layer"]), yaxis={"range": [0, 1.04]}),
    )


def overlaps(tables: Tables) -> pd.DataFrame:
    """One row per layer and k: mean, smallest and largest overlap over expert pairs, and chance k/d."""
    frame = tables["similarity"].groupby(["layer", "k"])["overlap"].agg(["mean", "min", "max"]).reset_index()
    return frame.assign(chance=frame["k"] / frame["layer"].map(d_model_by_layer(tables)))


def overlap_by_k(tables: Tables) -> Figure:
    """Mean overlap of leading subspaces relative to chance, by k."""
    frame = overlaps(tables).assign(over=lambda f: f["mean"] / f["chance"])
    ks = np.sort(frame["k"].unique())
    data = layer_lines(frame, "k", "over", hover="%{y:.3g} times chance")
    data.append(grey_line(ks, np.ones(len(ks)), "chance k/d"))
    top = frame.loc[frame["over"].idxmax()]
    axis = {"type": "log", "tickvals": ks.tolist(), "ticktext": [str(k) for k in ks]}
    return lines_or_map(
        Figure(
            "overlap_by_k",
            "Overlap of leading subspaces, relative to chance",
            f"Mean overlap is at most {number(top['over'])} times chance (layer {top['layer']:.0f}, "
            f"k = {top['k']:.0f}).",
            ("overlap",),
            data,
            base_layout("k", "mean overlap / chance", xaxis=axis),
        )
    )


def sampled_ranks(length: int, points: int = 60) -> np.ndarray:
    """Up to `points` ranks of a spectrum, evenly spaced on a logarithmic axis, ends included."""
    return np.unique(np.round(np.geomspace(1, length, min(points, length))).astype(int))


def spectra_by_layer(tables: Tables) -> Figure:
    """Singular values of the median expert of each layer, as shares of the largest."""
    spectra = tables["spectra"]
    spectra = spectra[spectra["rank"].notna()]
    medians = []
    for layer, rows in spectra.groupby("layer", sort=True):
        length = int(rows["rank"].min())
        places = sampled_ranks(length)
        shares = [np.asarray(values[:length], float) / values[0] for values in rows["singular_values"]]
        share = np.median(np.stack(shares), axis=0)[places - 1]
        medians.append(pd.DataFrame({"layer": layer, "place": places, "share": share}))
    drawn = pd.concat(medians)
    share = 100 * (spectra["stable_rank"] / spectra["rank"].astype(float)).groupby(spectra["layer"]).median()
    span = from_to(share.min(), f"layer {share.idxmin()}", share.max(), f"layer {share.idxmax()}")
    layout = base_layout(
        "rank of the singular value",
        "share of the largest",
        xaxis=log_axis(drawn["place"]) or {},
        yaxis=log_axis(drawn["share"]) or {},
    )
    return lines_or_map(
        Figure(
            "spectra_by_layer",
            "Singular values of the median expert",
            f"Median stable rank, in % of the rank, {span}.",
            ("singular_values", "stable_rank"),
            layer_lines(drawn, "place", "share", hover="%{y:.3g} of the largest", mode="lines"),
            layout,
        )
    )


def ranks_by_layer(tables: Tables) -> Figure:
    """Effective and stable rank by layer: median and extremes over experts."""
    spectra = tables["spectra"]
    spectra = spectra[spectra["rank"].notna()]
    data: list[Trace] = []
    for column, color in (("effective_rank", CATEGORICAL[0]), ("stable_rank", CATEGORICAL[1])):
        grouped, name = spectra.groupby("layer")[column], column.replace("_", " ")
        middle, low, high = grouped.median(), grouped.min(), grouped.max()
        whiskers = {
            "type": "data",
            "symmetric": False,
            "array": (high - middle).to_numpy(),
            "arrayminus": (middle - low).to_numpy(),
            "thickness": 1,
        }
        hover = f"layer %{{x}}<br>{name} %{{y:.4g}}"
        data.append(line(middle.index, middle, name, color, hover, error_y=whiskers))
    full = spectra.groupby("layer")["rank"].max().astype(float)
    data.append(grey_line(full.index.to_numpy(), full.to_numpy(), "rank"))
    middle = spectra.groupby("layer")["effective_rank"].median()
    span = from_to(middle.min(), f"layer {middle.idxmin()}", middle.max(), f"layer {middle.idxmax()}")
    return Figure(
        "ranks_by_layer",
        "Effective and stable rank: median and extremes",
        f"Median effective rank {span}; largest rank {number(full.max())}.",
        ("effective_rank", "stable_rank"),
        data,
        base_layout("layer", "rank", xaxis=layer_axis(full.index), yaxis={"rangemode": "tozero"}),
    )
