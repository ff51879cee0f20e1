"""Are experts redundant? Cosines of their top singular vectors, layer by layer, and their spectra."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from scipy.special import betainc, betaincinv

from moescope.plotting.log_axis import log_axis
from moescope.plotting.style import (
    CATEGORICAL,
    Figure,
    Slider,
    Tables,
    Trace,
    base_layout,
    counted,
    from_to,
    grey_line,
    heatmap,
    layer_axis,
    layer_lines,
    named_layers,
    number,
)


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
    """Experts so that similar ones stand together: average linkage on 1 - |cos|."""
    if len(matrix) < 3:
        return list(range(len(matrix)))
    distance = squareform(np.clip(1 - np.abs(matrix), 0, None), checks=False)
    return [int(leaf) for leaf in leaves_list(linkage(distance, "average"))]


def width_of(tables: Tables, layer: int) -> int:
    """d_model, from the chance level sqrt(2 / (pi d)) of |cos| at k = 1."""
    rows = tables["orthogonality"].query("k == 1 and layer == @layer")
    return round(2 / (np.pi * float(rows["chance"].iloc[0]) ** 2))


def share_above(threshold: float, d_model: int) -> float:
    """P(|cos| > threshold) of two random directions: cos^2 follows Beta(1/2, (d - 1)/2)."""
    return float(1 - betainc(0.5, (d_model - 1) / 2, threshold**2))


def chance_of_closest(tables: Tables, layer: int) -> float:
    """|cos| that half of all sets of so many random pairs exceed at least once."""
    n_pairs = len(tables["similarity"].query("k == 1 and layer == @layer"))
    each = 0.5 ** (1 / n_pairs)  # the chance of one pair to stay below
    return float(np.sqrt(betaincinv(0.5, (width_of(tables, layer) - 1) / 2, each)))


def cosine_heatmap(tables: Tables) -> Figure:
    layers = sorted(tables["similarity"]["layer"].unique())
    data: list[Trace] = []
    orders, titles = [], []
    highest: list[float] = []
    for layer, pairs in tables["similarity"].groupby("layer", sort=True):
        matrix, experts = cosine_matrix(pairs)
        orders.append([str(experts[place]) for place in similarity_order(matrix)])
        data.append(
            heatmap(
                matrix,
                experts,
                experts,
                diverging=True,
                bound=1.0,
                label="cos",
                axes=("expert", "expert"),
                text=True,
            )
        )
        off = np.abs(matrix - np.eye(len(matrix)))
        highest.append(float(off.max()))
        pair = sorted(np.unravel_index(off.argmax(), off.shape))
        titles.append(
            f"The closest pair of layer {layer}: experts {experts[pair[0]]} and "
            f"{experts[pair[1]]}, |cos| {number(highest[-1])}; "
            f"by chance the closest of {len(pairs) // pairs['k'].nunique():,} pairs has about "
            f"{number(chance_of_closest(tables, layer))}"
        )
    start = int(np.argmax(highest))
    layout = base_layout(
        "expert", "expert", xaxis={"type": "category"}, yaxis={"type": "category", "autorange": "reversed"}
    )
    caption = (
        "Cosines of the experts' top singular vectors. Slide to change the layer; order experts by "
        "number or by similarity (average linkage)."
    )
    return Figure(
        "cosine_heatmap",
        titles[start],
        caption,
        ("cosine", "mean_abs"),
        data,
        layout,
        Slider("layer", [str(layer) for layer in layers], start, orders=orders, titles=titles),
        440,
    )


def orthogonality_by_layer(tables: Tables) -> Figure:
    frame = tables["orthogonality"]
    frame = frame[frame["k"] == 1].sort_values("layer")
    layers = frame["layer"].to_numpy()
    collapsed = sorted(frame.loc[frame["n_pairs_above_0_7"] > 0, "layer"])
    over = float((frame["mean_abs"] / frame["chance"]).max())
    title = (
        f"{counted(int(frame['n_pairs_above_0_7'].sum()), 'collapsed pair')}, in {named_layers(collapsed)}"
        if collapsed
        else "No pair of experts has collapsed"
    )
    title += f"; mean |cos| is at most {number(over)} times chance"
    ends = [float(layers.min()), float(layers.max())]
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": layers,
            "y": frame[column].to_numpy(),
            "name": name,
            "line": {"color": color, "width": 2},
            "hovertemplate": f"layer %{{x}}<br>{name} %{{y:.4g}}<extra></extra>",
        }
        for column, name, color in (
            ("mean_abs", "mean |cos|", CATEGORICAL[0]),
            ("max_abs", "max |cos|", CATEGORICAL[1]),
        )
    ]
    data += [
        grey_line(layers, frame["chance"].to_numpy(), "chance √(2/(πd))"),
        grey_line(ends, [0.3, 0.3], "redundancy 0.3", "dot"),
        grey_line(ends, [0.7, 0.7], "collapse 0.7", "dot"),
    ]
    return Figure(
        "orthogonality_by_layer",
        title,
        "Absolute cosines of the experts' top singular vectors, over all pairs of a layer.",
        ("mean_abs", "max_abs", "chance"),
        data,
        base_layout("layer", "|cos|", xaxis=layer_axis(frame["layer"]), yaxis={"range": [0, 1.04]}),
    )


def overlaps(tables: Tables) -> pd.DataFrame:
    """A row a layer and k: mean, least and largest overlap over expert pairs, and chance k/d."""
    frame = tables["similarity"].groupby(["layer", "k"])["overlap"].agg(["mean", "min", "max"]).reset_index()
    widths = {layer: width_of(tables, layer) for layer in frame["layer"].unique()}
    return frame.assign(chance=frame["k"] / frame["layer"].map(widths))


def overlap_by_k(tables: Tables) -> Figure:
    frame = overlaps(tables).assign(over=lambda f: f["mean"] / f["chance"])
    ks = np.sort(frame["k"].unique())
    data = layer_lines(frame, "k", "over", hover="%{y:.3g} times chance")
    data.append(grey_line(ks, np.ones(len(ks)), "chance k/d"))
    top = frame.loc[frame["over"].idxmax()]
    title = (
        f"Mean overlap is at most {number(top['over'])} times chance (layer {top['layer']:.0f}, k = "
        f"{top['k']:.0f})"
    )
    layout = base_layout(
        "k",
        "mean overlap / chance",
        xaxis={"type": "log", "tickvals": ks.tolist(), "ticktext": [str(k) for k in ks]},
    )
    return Figure(
        "overlap_by_k",
        title,
        "Mean overlap of two experts' leading k-dimensional subspaces, in units of chance.",
        ("overlap",),
        data,
        layout,
    )


def sampled_ranks(length: int, points: int = 60) -> np.ndarray:
    """Up to `points` places along a spectrum, evenly spaced on a logarithmic axis, ends included."""
    return np.unique(np.round(np.geomspace(1, length, min(points, length))).astype(int))


def spectra_by_layer(tables: Tables) -> Figure:
    spectra = tables["spectra"]
    spectra = spectra[spectra["rank"].notna()]
    medians = []
    for layer, rows in spectra.groupby("layer", sort=True):
        length = int(rows["rank"].min())
        places = sampled_ranks(length)
        normalised = np.stack(
            [np.asarray(values[:length], float) / values[0] for values in rows["singular_values"]]
        )
        medians.append(
            pd.DataFrame(
                {"layer": layer, "place": places, "share": np.median(normalised, axis=0)[places - 1]}
            )
        )
    drawn = pd.concat(medians)
    data = layer_lines(drawn, "place", "share", hover="%{y:.3g} of the largest", mode="lines")
    half = (
        spectra.assign(share=spectra["stable_rank"] / spectra["rank"].astype(float))
        .groupby("layer")["share"]
        .median()
    )
    title = (
        "Stable rank, in % of full rank, "
        f"{from_to(100 * half.min(), f'layer {half.idxmin()}', 100 * half.max(), f'layer {half.idxmax()}')}"
    )
    layout = base_layout(
        "place of the singular value",
        "share of the largest",
        xaxis=log_axis(drawn["place"]) or {},
        yaxis=log_axis(drawn["share"]) or {},
    )
    return Figure(
        "spectra_by_layer",
        title,
        "Singular values of an expert, as shares of its largest; the median expert of each layer.",
        ("singular_values", "stable_rank"),
        data,
        layout,
    )


def ranks_by_layer(tables: Tables) -> Figure:
    spectra = tables["spectra"]
    spectra = spectra[spectra["rank"].notna()]
    data: list[Trace] = []
    for index, (column, name) in enumerate(
        [("effective_rank", "effective rank"), ("stable_rank", "stable rank")]
    ):
        grouped = spectra.groupby("layer")[column]
        middle, low, high = grouped.median(), grouped.min(), grouped.max()
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": middle.index.to_numpy(),
                "y": middle.to_numpy(),
                "line": {"color": CATEGORICAL[index], "width": 2},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": (high - middle).to_numpy(),
                    "arrayminus": (middle - low).to_numpy(),
                    "thickness": 1,
                },
                "hovertemplate": f"layer %{{x}}<br>{name} %{{y:.4g}}<extra></extra>",
            }
        )
    full = spectra.groupby("layer")["rank"].max().astype(float)
    data.append(grey_line(full.index.to_numpy(), full.to_numpy(), "rank"))
    middle = spectra.groupby("layer")["effective_rank"].median()
    title = (
        "Median effective rank "
        f"{from_to(middle.min(), f'layer {middle.idxmin()}', middle.max(), f'layer {middle.idxmax()}')}; "
        f"full rank is {number(full.max())}"
    )
    layout = base_layout("layer", "rank", xaxis=layer_axis(full.index), yaxis={"rangemode": "tozero"})
    return Figure(
        "ranks_by_layer",
        title,
        "Median over experts; whiskers reach the extreme experts.",
        ("effective_rank", "stable_rank"),
        data,
        layout,
    )
