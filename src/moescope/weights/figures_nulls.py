"""What chance looks like: the shuffle null over k, z taken apart, and the permutation null of each layer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import (
    GREY,
    Figure,
    Slider,
    Tables,
    Trace,
    base_layout,
    grey_line,
    k_axis,
    layer_colors,
    layer_lines,
    named_layers,
    number,
)
from moescope.weights.figures_alignment import peak, usable


def shuffle_mean_by_k(tables: Tables) -> Figure:
    frame = tables["alignment_layers"]
    gap = usable(tables).assign(over=lambda f: f["shuffle_mean"] / f["random_expectation"])
    top = peak(gap, "over")
    title = (
        f"Over all pairs, alignment is at most {number(top['over'])} times that of a random "
        f"direction (layer {top['layer']:.0f}, k = {top['k']:.0f})"
    )
    chance = frame.groupby("k")["random_expectation"].mean()
    data = [
        *layer_lines(frame, "k", "shuffle_mean"),
        grey_line(chance.index.to_numpy(), chance.to_numpy(), "random direction"),
    ]
    return Figure(
        "shuffle_mean_by_k",
        title,
        "Mean alignment over all router-expert pairs, right or wrong.",
        ("shuffle_mean", "random_expectation"),
        data,
        base_layout("k", "shuffle mean", xaxis=k_axis(frame["k"])),
    )


def shuffle_std_by_k(tables: Tables) -> Figure:
    frame, top = tables["alignment_layers"], peak(usable(tables), "shuffle_std")
    title = (
        f"The null is widest in layer {top['layer']:.0f}: standard deviation "
        f"{number(top['shuffle_std'])} at k = {top['k']:.0f}"
    )
    return Figure(
        "shuffle_std_by_k",
        title,
        f"Spread of alignment over all router-expert pairs: the unit of z. {DASHED}",
        ("shuffle_std", "random_expectation"),
        [*layer_lines(frame, "k", "shuffle_std"), random_spread(frame)],
        base_layout("k", "shuffle std", xaxis=k_axis(frame["k"])),
    )


def shuffle_log_std_by_k(tables: Tables) -> Figure:
    frame = usable(tables)
    frame = frame[frame["shuffle_std"] > 0]
    spread = frame.groupby("k")["shuffle_std"].agg(lambda values: values.max() / values.min())
    title = (
        f"At one k the null's width differs between layers by up to {number(spread.max())} times (k "
        f"= {spread.idxmax()})"
    )
    if frame["layer"].nunique() == 1:
        title = (
            "The null's width grows "
            f"{number(frame['shuffle_std'].max() / frame['shuffle_std'].min())}-fold over k"
        )
    lines, chance = layer_lines(frame, "k", "shuffle_std"), random_spread(frame)
    shown = [
        trace for trace in [*lines, chance] if trace["x"][0] is not None
    ]  # a colour bar is a trace without points
    layout = base_layout(
        "k", "shuffle std, log scale", xaxis=k_axis(frame["k"]), yaxis=plain_log(shown) or {}
    )
    return Figure(
        "shuffle_log_std_by_k",
        title,
        f"The same on a logarithmic scale, where small k can be read. Degenerate ks have no width. {DASHED}",
        ("shuffle_std", "random_expectation"),
        [*lines, chance],
        layout,
    )


DASHED = "Dashed: the spread of directions drawn at random."


def random_spread(frame: pd.DataFrame) -> Trace:
    """Standard deviation over random directions.

    Align is Beta(k/2, (d - k)/2), of variance 2 m (1 - m)/(d + 2) about its mean m = k/d.
    """
    mean = frame.groupby("k")["random_expectation"].mean()
    ks = mean.index.to_numpy(float)
    m = mean.to_numpy(float)
    d = np.min(ks / m)  # above a rank k/m is more than d
    return grey_line(
        mean.index.to_numpy(), np.sqrt(2 * m * np.maximum(1 - m, 0) / (d + 2)), "random directions"
    )


def z_decomposed(tables: Tables) -> Figure:
    """z is a slope: delta against std, with rays of equal z."""
    frame = usable(tables)
    widest = float(frame["shuffle_std"].max()) or 1.0
    ceiling = float(frame["z_ceiling"].max())
    hover = "std %{x:.4g}<br>delta %{y:.4g}"
    data = layer_lines(frame, "shuffle_std", "delta_vs_shuffle", order="k", hover=hover)
    for slope, name, dash in (
        (ceiling, f"z = {ceiling:.2f}, the ceiling", "dash"),
        (1.0, "z = 1", "dot"),
        (0.0, "z = 0", "dot"),
    ):
        data.append(grey_line([0.0, widest], [0.0, slope * widest], name, dash))
    top = peak(frame, "z_vs_shuffle")
    title = (
        f"z peaks in layer {top['layer']:.0f} at k = {top['k']:.0f}: a delta of "
        f"{number(top['delta_vs_shuffle'])} "
        f"over a spread of {number(top['shuffle_std'])}"
    )
    caption = (
        "z is the slope from the origin: height is delta, width the null's spread. A large z may "
        "come from a small spread. Dots are ks."
    )
    return Figure(
        "z_decomposed",
        title,
        caption,
        ("z_vs_shuffle", "delta_vs_shuffle", "shuffle_std", "z_ceiling"),
        data,
        base_layout("shuffle std", "delta vs shuffle"),
    )


TAIL = 0.01


def density_title(k: int, above: list[int], below: list[int], layers: int) -> str:
    """Which layers' pairings are better, or worse, than 99 % of random ones.

    And how many would be by chance.
    """
    parts = [f"better than 99 % of random ones in {named_layers(above)}"] if above else []
    parts += [f"worse than 99 % in {named_layers(below)}"] if below else []
    words = " and ".join(parts) or "within the middle 98 % of random ones in every layer"
    return (
        f"At k = {k}, the stored pairing is {words}; by chance {number(2 * TAIL * layers)} of "
        f"{layers} layers would stand outside"
    )


def null_density(tables: Tables) -> Figure:
    """One ridge a layer: the permutation null of the mean diagonal, and the observed value on it."""
    nulls = tables["nulls"]
    ks = sorted(nulls["k"].unique())
    layers = sorted(nulls["layer"].unique())
    colors = layer_colors(layers)
    data: list[Trace] = []
    titles = []
    for k in ks:
        here = nulls[nulls["k"] == k]
        x_ridge: list[float] = []
        y_ridge: list[float] = []
        observed = []
        above, below = [], []
        for row, layer in enumerate(reversed(layers)):  # the first layer on top, as in the heatmaps
            bins = here[here["layer"] == layer].sort_values("bin")
            if bins.empty:
                continue
            height = bins["density"] / bins["density"].max() * 0.85
            middle = (bins["left"] + bins["right"]) / 2
            x_ridge += [bins["left"].iloc[0], *middle, bins["right"].iloc[-1], bins["left"].iloc[0], np.nan]
            y_ridge += [row, *(row + height), row, row, np.nan]
            seen = float(bins["observed"].iloc[0])
            observed.append((seen, row + 0.2, layer))
            share = bins["density"] * (bins["right"] - bins["left"])
            if share[bins["left"] >= seen].sum() <= TAIL:
                above.append(layer)
            elif share[bins["right"] <= seen].sum() <= TAIL:
                below.append(layer)
        titles.append(density_title(int(k), above, below, len(observed)))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": np.array(x_ridge),
                "y": np.array(y_ridge),
                "fill": "toself",
                "fillcolor": "rgba(138,144,153,0.35)",
                "line": {"color": GREY, "width": 1},
                "name": "random pairings",
                "hoverinfo": "skip",
            }
        )
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [o[0] for o in observed],
                "y": [o[1] for o in observed],
                "name": "stored pairing",
                "marker": {"color": [colors[o[2]] for o in observed], "size": 10, "symbol": "diamond"},
                "customdata": [o[2] for o in observed],
                "hovertemplate": "layer %{customdata}<br>mean alignment %{x:.4g}<extra></extra>",
            }
        )
    start = len(ks) // 2
    every = max(1, -(-len(layers) // 24))
    layout = base_layout(
        "mean alignment of the pairing",
        "layer",
        yaxis={
            "tickvals": list(range(len(layers) - 1, -1, -every)),
            "ticktext": [str(layer) for layer in layers[::every]],
        },
    )
    caption = (
        "Grey: mean alignment under every pairing of the layer's routers and experts (all n! up "
        "to 8 experts, else 20,000 drawn), "
        "not a normal approximation. Diamond: the stored pairing. Slide to change k."
    )
    return Figure(
        "null_density",
        titles[start],
        caption,
        ("p_value", "perm_z", "n_pairings"),
        data,
        layout,
        Slider("k", [f"{k:,}" for k in ks], start, per_value=2, titles=titles),
        max(340, 90 + 26 * len(layers)),
    )
