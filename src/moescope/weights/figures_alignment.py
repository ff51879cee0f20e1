"""Alignment across the layers of one reading: curves over k, the shuffle null, and experts at one k."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    LEGEND_UP_TO,
    Figure,
    Tables,
    Trace,
    base_layout,
    capital,
    counted,
    from_to,
    grey_line,
    heatmap,
    k_axis,
    layer_axis,
    layer_colorbar,
    layer_colors,
    layer_lines,
    listed,
    named_layers,
    number,
    reference_k,
)


def usable(tables: Tables) -> pd.DataFrame:
    """alignment_layers without degenerate ks, where something can be told."""
    frame = tables["alignment_layers"]
    kept = frame[~frame["degenerate"].astype(bool)]
    return kept if len(kept) else frame


def peak(frame: pd.DataFrame, column: str) -> pd.Series:
    """The row of the column's largest value."""
    row: pd.Series = frame.loc[frame[column].idxmax()]
    return row


def align_by_k(tables: Tables) -> Figure:
    frame = tables["alignment_layers"]
    at = reference_k(usable(tables)["k"])
    here = frame[frame["k"] == at]
    low, high = here.loc[here["align"].idxmin()], peak(here, "align")
    span = from_to(low["align"], f"layer {low['layer']:.0f}", high["align"], f"layer {high['layer']:.0f}")
    title = (
        f"At k = {at}, alignment {span}; a random direction gives {number(here['random_expectation'].mean())}"
    )
    chance = frame.groupby("k")["random_expectation"].mean()
    data = [
        *layer_lines(frame, "k", "align"),
        grey_line(chance.index.to_numpy(), chance.to_numpy(), "random direction"),
    ]
    return Figure(
        "align_by_k",
        title,
        "Mean alignment of routers with their own experts against k, one line a layer.",
        ("align", "random_expectation"),
        data,
        base_layout("k", "alignment", xaxis=k_axis(frame["k"])),
    )


def z_by_k(tables: Tables) -> Figure:
    frame, kept = tables["alignment_layers"], usable(tables)
    best = kept.groupby("layer")["z_vs_shuffle"].max()
    ceilings = frame.groupby("layer")["z_ceiling"].max()
    high = sorted(best.index[best >= 0.9 * ceilings])
    bounds = listed([number(ceiling) for ceiling in sorted(ceilings.unique())])
    title = (
        f"Mean z comes within a tenth of its ceiling of {bounds} in {named_layers(high)}"
        if high
        else f"Mean z peaks at {number(best.max())} (layer {best.idxmax()}), below its ceiling of {bounds}"
    )
    ks = np.sort(frame["k"].unique())
    data = layer_lines(frame, "k", "z_vs_shuffle")
    for ceiling in sorted(ceilings.unique()):
        data.append(grey_line(ks, np.full(len(ks), ceiling), "ceiling √(n−1)"))
    data.append(grey_line(ks, np.zeros(len(ks)), "chance", "dot"))
    return Figure(
        "z_by_k",
        title,
        "Mean z over a layer's experts. It cannot exceed the dashed line, so it is not a confidence.",
        ("z_vs_shuffle", "z_ceiling", "p_value"),
        data,
        base_layout("k", "mean z", xaxis=k_axis(frame["k"])),
    )


def effect_by_k(tables: Tables) -> Figure:
    frame, top = tables["alignment_layers"], peak(usable(tables), "effect_over_random")
    title = (
        f"Effect over a random direction is largest in layer {top['layer']:.0f}: "
        f"{number(top['effect_over_random'])} at k = {top['k']:.0f}, "
        f"where random routers would stray by ±{number(2 * stray_of_mean(top))}"
    )
    ks = np.sort(frame["k"].unique())
    data = [
        *layer_lines(frame, "k", "effect_over_random"),
        grey_line(ks, np.zeros(len(ks)), "random direction"),
    ]
    return Figure(
        "effect_by_k",
        title,
        "Alignment less that of a random direction.",
        ("effect_over_random", "random_expectation"),
        data,
        base_layout("k", "effect over random", xaxis=k_axis(frame["k"])),
    )


def experts_in(row: pd.Series) -> float:
    """n, from the ceiling sqrt(n - 1) of z."""
    return float(row["z_ceiling"]) ** 2 + 1


def stray_of_mean(row: pd.Series) -> float:
    """Standard deviation of the mean alignment of n random directions: each follows Beta(k/2, (d - k)/2)."""
    share = float(row["random_expectation"])
    d_model = max(float(row["k"]) / share, 1.0)
    return float(np.sqrt(2 * share * (1 - share) / (d_model + 2) / experts_in(row)))


def discoveries(p_values: pd.Series, rate: float = 0.05) -> list[int]:
    """Layers called at that false-discovery rate.

    All up to the largest rank i of m with p_(i) <= rate i / m.
    """
    ordered = p_values.sort_values()
    passed = np.flatnonzero(ordered.to_numpy() <= rate * np.arange(1, len(ordered) + 1) / len(ordered))
    return [int(layer) for layer in ordered.index[: passed[-1] + 1]] if len(passed) else []


def delta_by_k(tables: Tables) -> Figure:
    frame, kept = tables["alignment_layers"], usable(tables)
    smallest = kept.groupby("layer")["p_adjusted"].min()
    called = discoveries(smallest)
    beyond = kept[kept["layer"].isin(called) & (kept["p_adjusted"] <= 0.05) & (kept["delta_vs_shuffle"] > 0)]
    top = peak(beyond if len(beyond) else kept, "delta_vs_shuffle")
    largest = f"{number(top['delta_vs_shuffle'])} (layer {top['layer']:.0f}, k = {top['k']:.0f})"
    title = (
        (
            f"Own experts beat the layer's average beyond chance in {named_layers(beyond['layer'])}, "
            f"by up to {largest}"
        )
        if len(beyond)
        else (
            "In no layer do own experts beat the layer's average beyond chance; the largest delta "
            f"is {largest}"
        )
    )
    ks = np.sort(frame["k"].unique())
    data = [*layer_lines(frame, "k", "delta_vs_shuffle"), grey_line(ks, np.zeros(len(ks)), "chance")]
    return Figure(
        "delta_by_k",
        title,
        (
            "Alignment with the own expert less the mean over all experts of the layer. Beyond "
            "chance: q ≤ 0.05 over ks and layers."
        ),
        ("delta_vs_shuffle", "shuffle_mean"),
        data,
        base_layout("k", "delta vs shuffle", xaxis=k_axis(frame["k"])),
    )


def cos_squared_by_layer(tables: Tables) -> Figure:
    experts = tables["alignment"]
    experts = experts[(experts["k"] == 1) & experts["cos_squared"].notna()]
    means = experts.groupby("layer")["cos_squared"].mean()
    chance = float(experts["random_expectation"].mean())
    colors = layer_colors(list(means.index))
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "expert",
            "x": experts["layer"].to_numpy(),
            "y": experts["cos_squared"].to_numpy(),
            "marker": {"size": 6, "opacity": 0.6, "color": [colors[layer] for layer in experts["layer"]]},
            "customdata": experts["expert"].to_numpy(),
            "hovertemplate": "layer %{x}, expert %{customdata}<br>cos² %{y:.4g}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "mean",
            "x": means.index.to_numpy(),
            "y": means.to_numpy(),
            "line": {"color": "#0072B2", "width": 2},
            "hovertemplate": "layer %{x}<br>mean cos² %{y:.4g}<extra></extra>",
        },
        grey_line(means.index.to_numpy(), np.full(len(means), chance), "chance 1/d"),
    ]
    stray = 2 * np.sqrt(
        2 / experts.groupby("layer").size().min()
    )  # cos² of a random direction is about chi-squared over d
    first, last = f"layer {means.idxmin()}", f"layer {means.idxmax()}"
    span = from_to(means.min() / chance, first, means.max() / chance, last)
    title = f"Mean cos² in units of chance {span}; random routers would stray by ±{number(stray)} around 1"
    return Figure(
        "cos_squared_by_layer",
        title,
        "Squared cosine of each router row and its expert's top singular vector; the line is the mean.",
        ("cos_squared",),
        data,
        base_layout("layer", "cos²", xaxis=layer_axis(means.index)),
    )


def experts_at_k(tables: Tables, column: str) -> tuple[np.ndarray, list[int], list[int], int]:
    frame = tables["alignment"]
    at = reference_k(usable(tables)["k"])
    grid = frame[frame["k"] == at].pivot(index="layer", columns="expert", values=column)
    return grid.to_numpy(float), [int(e) for e in grid.columns], [int(layer) for layer in grid.index], at


def align_by_expert(tables: Tables) -> Figure:
    z, experts, layers, at = experts_at_k(tables, "align")
    spread = np.nanmax(z, axis=1) - np.nanmin(z, axis=1)
    title = (
        f"At k = {at}, experts differ most in layer {layers[int(spread.argmax())]}: alignments from "
        f"{number(np.nanmin(z[spread.argmax()]))} to {number(np.nanmax(z[spread.argmax()]))}"
    )
    data = [heatmap(z, experts, layers, low=0.0, label="align", axes=("expert", "layer"))]
    return Figure(
        "align_by_expert",
        title,
        f"Alignment of every router with its own expert at k = {at}.",
        ("align",),
        data,
        base_layout(
            "expert", "layer", yaxis={"autorange": "reversed", "type": "category"}, xaxis={"type": "category"}
        ),
        height=max(300, 90 + 18 * len(layers)),
    )


def delta_by_expert(tables: Tables) -> Figure:
    z, experts, layers, at = experts_at_k(tables, "delta_vs_shuffle")
    negative = int((z < 0).sum())
    title = (
        f"At k = {at}, {negative} of {np.isfinite(z).sum()} routers fit their own expert worse than "
        "the layer's average; by chance about half would"
    )
    data = [heatmap(z, experts, layers, diverging=True, label="delta", axes=("expert", "layer"))]
    return Figure(
        "delta_by_expert",
        title,
        f"Delta vs shuffle of every expert at k = {at}; white is chance.",
        ("delta_vs_shuffle",),
        data,
        base_layout(
            "expert", "layer", yaxis={"autorange": "reversed", "type": "category"}, xaxis={"type": "category"}
        ),
        height=max(300, 90 + 18 * len(layers)),
    )


def align_against_delta(tables: Tables) -> Figure:
    frame = tables["alignment"]
    at = reference_k(usable(tables)["k"])
    here = frame[(frame["k"] == at) & frame["align"].notna()]
    colors = layer_colors(sorted(here["layer"].unique()))
    better = here[here["align"] > here["align"].median()]
    below = int((better["delta_vs_shuffle"] <= 0).sum())
    title = (
        f"Of the {counted(len(better), 'expert')} aligned best at k = {at}, "
        f"{below if below else 'none'} fit no better than their layer's average"
    )
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"layer {layer}",
            "x": rows["align"].to_numpy(),
            "y": rows["delta_vs_shuffle"].to_numpy(),
            "showlegend": len(colors) <= LEGEND_UP_TO,
            "marker": {"color": colors[layer], "size": 7, "opacity": 0.8},
            "customdata": rows[["layer", "expert"]].to_numpy().tolist(),
            "hovertemplate": (
                "layer %{customdata[0]}, expert %{customdata[1]}<br>align %{x:.4g}<br>delta "
                "%{y:.4g}<extra></extra>"
            ),
        }
        for layer, rows in here.groupby("layer", sort=True)
    ]
    data.append(grey_line([float(here["align"].min()), float(here["align"].max())], [0.0, 0.0], "chance"))
    if len(colors) > LEGEND_UP_TO:
        data.append(layer_colorbar(list(colors)))
    return Figure(
        "align_against_delta",
        capital(title),
        f"Each dot is an expert at k = {at}, coloured by layer.",
        ("align", "delta_vs_shuffle"),
        data,
        base_layout("alignment", "delta vs shuffle"),
    )
