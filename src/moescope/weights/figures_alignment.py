"""Alignment across the layers of one view: curves over k, the shuffle null, the permutation null, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import log_colours, plain_log
from moescope.plotting.style import (
    ANCHORED,
    CATEGORIES,
    GREY,
    LEGEND_UP_TO,
    LINES_UP_TO,
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
    lines_or_map,
    listed,
    named_layers,
    number,
    reference_k,
)
from moescope.statistics import false_discovery_rates
from moescope.verb import Figure, Slider, Tables, Trace

TAIL = 0.01
IN_WORDS = {  # columns on an axis
    "align": "alignment",
    "z_vs_shuffle": "mean z",
    "effect_over_random": "alignment above random",
    "delta_vs_shuffle": "alignment above average pair",
    "shuffle_mean": "mean alignment of all pairs",
    "shuffle_std": "spread of alignment (std)",
}
EXACT_CELLS = 64 * 64  # larger heatmaps are rounded


# --- building blocks


def line(x: Any, y: Any, name: str, color: str, hover: str, **more: Any) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": np.asarray(x),
        "y": np.asarray(y),
        "line": {"color": color, "width": 2},
        "hovertemplate": f"{hover}<extra></extra>",
        **more,
    }


def compact(trace: Trace) -> Trace:
    """Round a large heatmap to 16-bit integers in units of a power of ten, which halves the page's size."""
    z = trace["z"]
    top = float(np.abs(z).max())
    if z.size <= EXACT_CELLS or not 0 < top < np.inf:
        return trace
    power = int(np.floor(np.log10(np.iinfo(np.int16).max / top)))
    ends = trace.get("zmin", float(z.min())), trace.get("zmax", float(z.max()))
    ticks = round_ticks(*ends)
    axis = {"tickvals": ticks * 10.0**power, "ticktext": [number(tick) for tick in ticks]}
    return {
        **trace,
        "z": np.round(z * 10.0**power).astype(np.int16),
        "meta": {**trace.get("meta", {}), "unit": 10.0**-power},
        "zmin": ends[0] * 10.0**power,
        "zmax": ends[1] * 10.0**power,
        "colorbar": {**trace["colorbar"], **axis},
        "hovertemplate": trace["hovertemplate"].replace("%{z:.4g}", f"%{{z}} × 10<sup>−{power}</sup>"),
    }


def round_ticks(low: float, high: float) -> np.ndarray:
    """Multiples of 1, 2 or 5 times a power of ten between both ends: three to eight."""
    if not high > low:
        return np.array([low])
    rough = (high - low) / 5
    power = 10.0 ** np.floor(np.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= 0.75 * rough)
    ticks = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
    return np.asarray(np.round(ticks, 12))


def matrix_layout(x: str, y: str) -> dict[str, Any]:
    """Layout of a heatmap with named rows and columns, the first row on top."""
    return base_layout(x, y, xaxis=CATEGORIES, yaxis={**CATEGORIES, "autorange": "reversed"})


def usable(tables: Tables) -> pd.DataFrame:
    """alignment_layers without degenerate ks, unless all are."""
    frame = tables["alignment_layers"]
    rows = frame[~frame["degenerate"].astype(bool)]
    return rows if len(rows) else frame


def peak(frame: pd.DataFrame, column: str) -> pd.Series:
    """The row with the column's largest value."""
    row: pd.Series = frame.loc[frame[column].idxmax()]
    return row


def at_k(row: pd.Series) -> str:
    return f"layer {row['layer']:.0f}, k = {row['k']:.0f}"


def by_k(
    name: str,
    title: str,
    caption: str,
    tables: Tables,
    columns: tuple[str, ...],
    lines: list[Trace],
    **layout: Any,
) -> Figure:
    """The first of `columns` from alignment_layers against k, one line per layer, then reference lines."""
    frame, column = tables["alignment_layers"], columns[0]
    label = IN_WORDS.get(column, column.replace("_", " "))
    data = [*layer_lines(frame, "k", column), *lines]
    layout = base_layout("k", label, xaxis=k_axis(frame["k"]), **layout)
    return lines_or_map(Figure(name, title, caption, columns, data, layout))


def constant(tables: Tables, value: float, name: str, dash: str = "dash") -> Trace:
    """A horizontal grey line over all k."""
    ks = np.sort(tables["alignment_layers"]["k"].unique())
    return grey_line(ks, np.full(len(ks), value), name, dash)


def random_direction(tables: Tables) -> Trace:
    chance = tables["alignment_layers"].groupby("k")["random_expectation"].mean()
    return grey_line(chance.index.to_numpy(), chance.to_numpy(), "random direction")


# --- curves over k


def align_by_k(tables: Tables) -> Figure:
    """Mean alignment of router rows with their own experts by k, one line per layer."""
    frame = tables["alignment_layers"]
    k = reference_k(usable(tables)["k"])
    here = frame[frame["k"] == k]
    low, high = here.loc[here["align"].idxmin()], peak(here, "align")
    span = from_to(low["align"], f"layer {low['layer']:.0f}", high["align"], f"layer {high['layer']:.0f}")
    caption = f"At k = {k}, alignment {span} (random direction: {number(here['random_expectation'].mean())})."
    columns = ("align", "random_expectation")
    return by_k("align_by_k", "Mean alignment by k", caption, tables, columns, [random_direction(tables)])


def z_by_k(tables: Tables) -> Figure:
    """Mean z against the shuffle null by k, with its ceiling, one line per layer."""
    best = usable(tables).groupby("layer")["z_vs_shuffle"].max()
    ceilings = tables["alignment_layers"].groupby("layer")["z_ceiling"].max()
    high = sorted(best.index[best >= 0.9 * ceilings])
    bounds = listed([number(ceiling) for ceiling in sorted(ceilings.unique())])
    caption = (
        f"Mean z reaches 90 % of its ceiling {bounds} in {named_layers(high)} (chance: 0). z is not a "
        "confidence."
        if high
        else f"Highest mean z: {number(best.max())} in layer {best.idxmax()} (chance: 0, ceiling: {bounds}). "
        "z is not a confidence."
    )
    lines = [constant(tables, ceiling, "ceiling √(n−1)") for ceiling in sorted(ceilings.unique())]
    columns = ("z_vs_shuffle", "z_ceiling", "p_value")
    lines.append(constant(tables, 0, "chance", "dot"))
    return by_k("z_by_k", "Mean z against the shuffle null", caption, tables, columns, lines)


def effect_by_k(tables: Tables) -> Figure:
    """Alignment above that of a random direction by k, one line per layer."""
    top = peak(usable(tables), "effect_over_random")
    caption = (
        f"Largest effect over random: {number(top['effect_over_random'])} ({at_k(top)}). Random router rows: "
        f"0 ± {number(2 * random_std_of_mean(top))}."
    )
    return by_k(
        "effect_by_k",
        "Alignment above a random direction",
        caption,
        tables,
        ("effect_over_random", "random_expectation"),
        [constant(tables, 0, "random direction")],
    )


def random_variance(d_model: Any, mean: Any) -> Any:
    """Variance of a random direction's alignment: Beta(k/2, (d - k)/2) has 2 m (1 - m)/(d + 2), m = k/d."""
    return 2 * mean * np.maximum(1 - mean, 0) / (d_model + 2)


def random_std_of_mean(row: pd.Series) -> float:
    """Standard deviation of the mean alignment of n random directions."""
    variance = random_variance(row["d_model"], row["random_expectation"])
    return float(np.sqrt(variance / row["n_experts"]))


def discoveries(p_values: pd.Series, rate: float = 0.05) -> list[int]:
    """Layers with a q value (Benjamini-Hochberg) of at most `rate`."""
    return [int(layer) for layer in p_values.index[false_discovery_rates(p_values.to_numpy(float)) <= rate]]


def delta_by_k(tables: Tables) -> Figure:
    """Alignment with the own expert minus the mean over all experts, by k."""
    rows = usable(tables)
    called = discoveries(rows.groupby("layer")["p_adjusted"].min())
    significant = (rows["p_adjusted"] <= 0.05) & (rows["delta_vs_shuffle"] > 0)
    beyond = rows[rows["layer"].isin(called) & significant]
    top = peak(beyond if len(beyond) else rows, "delta_vs_shuffle")
    caption = (
        f"Own experts fit better than average in {named_layers(beyond['layer'])} (q ≤ 0.05)"
        if len(beyond)
        else "In no layer do own experts fit better than average (q ≤ 0.05)"
    )
    caption += f"; largest delta {number(top['delta_vs_shuffle'])} ({at_k(top)})."
    return by_k(
        "delta_by_k",
        "Alignment above the layer's average pair",
        caption,
        tables,
        ("delta_vs_shuffle", "shuffle_mean"),
        [constant(tables, 0, "chance")],
    )


# --- the shuffle null


def shuffle_mean_by_k(tables: Tables) -> Figure:
    """Mean alignment over all router-expert pairs by k, one line per layer."""
    ratio = usable(tables).assign(over=lambda f: f["shuffle_mean"] / f["random_expectation"])
    top = peak(ratio, "over")
    caption = (
        f"Alignment of all pairs is at most {number(top['over'])} times a random direction's ({at_k(top)})."
    )
    return by_k(
        "shuffle_mean_by_k",
        "Mean alignment over all router-expert pairs",
        caption,
        tables,
        ("shuffle_mean", "random_expectation"),
        [random_direction(tables)],
    )


def random_spread(frame: pd.DataFrame) -> Trace:
    """Standard deviation of the alignment of random directions, by k."""
    rows = frame.groupby("k")[["random_expectation", "d_model"]].mean()
    variance = random_variance(rows["d_model"], rows["random_expectation"])
    return grey_line(rows.index.to_numpy(), np.sqrt(variance).to_numpy(), "random directions")


def shuffle_std_by_k(tables: Tables) -> Figure:
    """Spread of alignment over all router-expert pairs by k, the unit of z."""
    top = peak(usable(tables), "shuffle_std")
    random = random_spread(tables["alignment_layers"])
    caption = (
        f"The shuffle null is widest in layer {top['layer']:.0f}: standard deviation "
        f"{number(top['shuffle_std'])} at k = {top['k']:.0f} "
        f"(random directions: {number(random['y'][random['x'] == top['k']][0])})."
    )
    return by_k(
        "shuffle_std_by_k",
        "Spread of alignment over all pairs",
        caption,
        tables,
        ("shuffle_std", "random_expectation"),
        [random],
    )


def shuffle_log_std_by_k(tables: Tables) -> Figure:
    """Spread of alignment over all pairs by k, on a logarithmic scale."""
    frame = usable(tables)
    frame = frame[frame["shuffle_std"] > 0]
    spread = frame.groupby("k")["shuffle_std"].agg(lambda values: values.max() / values.min())
    random = random_spread(frame)
    caption = (
        f"The null's width grows {number(frame['shuffle_std'].max() / frame['shuffle_std'].min())}-fold over "
        f"k (random directions: {number(random['y'].max() / random['y'].min())}-fold)."
        if frame["layer"].nunique() == 1
        else f"At one k the null's width differs between layers by up to {number(spread.max())} times "
        f"(k = {spread.idxmax()}; random directions: 1)."
    )
    data = [*layer_lines(frame, "k", "shuffle_std"), random]
    drawn = [trace for trace in data if trace["x"][0] is not None]  # a colour bar is a trace without points
    layout = base_layout(
        "k", f"{IN_WORDS['shuffle_std']}, log scale", xaxis=k_axis(frame["k"]), yaxis=plain_log(drawn) or {}
    )
    figure = lines_or_map(
        Figure(
            "shuffle_log_std_by_k",
            "Spread of alignment, log scale",
            caption,
            ("shuffle_std", "random_expectation"),
            data,
            layout,
        )
    )
    maps = [log_colours(trace) for trace in figure.data if trace["type"] == "heatmap"]
    return replace(figure, data=maps or figure.data)


def z_decomposed(tables: Tables) -> Figure:
    """z is a slope: delta against std, with rays of equal z."""
    frame = usable(tables)
    widest = float(frame["shuffle_std"].max()) or 1.0
    ceiling = float(frame["z_ceiling"].max())
    hover = "std %{x:.4g}<br>delta %{y:.4g}"
    mode = "lines+markers" if frame["layer"].nunique() <= LINES_UP_TO else "markers"
    data = layer_lines(frame, "shuffle_std", "delta_vs_shuffle", order="k", hover=hover, mode=mode)
    rays = (
        (ceiling, f"z = {ceiling:.2f}, the ceiling", "dash"),
        (1.0, "z = 1", "dot"),
        (0.0, "z = 0", "dot"),
    )
    data += [grey_line([0.0, widest], [0.0, slope * widest], name, dash) for slope, name, dash in rays]
    top = peak(frame, "z_vs_shuffle")
    caption = (
        f"Highest z: {at_k(top)}, delta {number(top['delta_vs_shuffle'])} over a spread of "
        f"{number(top['shuffle_std'])}. z is the slope from the origin; dots are ks."
    )
    columns = ("z_vs_shuffle", "delta_vs_shuffle", "shuffle_std", "z_ceiling")
    layout = base_layout(IN_WORDS["shuffle_std"], IN_WORDS["delta_vs_shuffle"])
    return Figure("z_decomposed", "z decomposed into delta and spread", caption, columns, data, layout)


# --- the permutation null


def density_caption(k: int, above: list[int], below: list[int], layers: int) -> str:
    """Layers whose pairing is better, or worse, than 99 % of random ones, and how many chance gives."""
    if not above + below:
        chance = f"{number(2 * TAIL * layers)} of {layers} layers outside"
        return f"At k = {k}, all layers within the middle 98 % of random pairings (chance: {chance})."
    return (
        f"At k = {k}, above 99 % of random pairings: {named_layers(above)}; below 99 %: "
        f"{named_layers(below)} (chance: {number(TAIL * layers)} of {layers} layers each)."
    )


def null_density(tables: Tables) -> Figure:
    """One ridge per layer: the permutation null of the mean diagonal, and the observed value on it."""
    nulls = tables["nulls"]
    ks, layers = sorted(nulls["k"].unique()), sorted(nulls["layer"].unique())
    colors = layer_colors(layers)
    data: list[Trace] = []
    captions = []
    for k in ks:
        here = nulls[nulls["k"] == k]
        x_ridge: list[float] = []
        y_ridge: list[float] = []
        observed, above, below = [], [], []
        for row, layer in enumerate(reversed(layers)):  # the first layer on top, as in the heatmaps
            bins = here[here["layer"] == layer].sort_values("bin")
            if bins.empty:
                continue
            height = bins["density"] / bins["density"].max() * 0.85
            middle = (bins["left"] + bins["right"]) / 2
            x_ridge += [bins["left"].iloc[0], *middle, bins["right"].iloc[-1], bins["left"].iloc[0], np.nan]
            y_ridge += [row, *(row + height), row, row, np.nan]
            value = float(bins["observed"].iloc[0])
            observed.append((value, row + 0.2, layer))
            share = bins["density"] * (bins["right"] - bins["left"])
            if share[bins["left"] >= value].sum() <= TAIL:
                above.append(layer)
            elif share[bins["right"] <= value].sum() <= TAIL:
                below.append(layer)
        captions.append(density_caption(int(k), above, below, len(observed)))
        data += [
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
            },
            {
                "type": "scatter",
                "mode": "markers",
                "x": [o[0] for o in observed],
                "y": [o[1] for o in observed],
                "name": "stored pairing",
                "marker": {"color": [colors[o[2]] for o in observed], "size": 10, "symbol": "diamond"},
                "customdata": [o[2] for o in observed],
                "hovertemplate": "layer %{customdata}<br>mean alignment %{x:.4g}<extra></extra>",
            },
        ]
    start = len(ks) // 2
    every = max(1, -(-len(layers) // 24))
    ticks = {
        "tickvals": list(range(len(layers) - 1, -1, -every)),
        "ticktext": [str(layer) for layer in layers[::every]],
    }
    return Figure(
        "null_density",
        "Stored pairing against all random pairings",
        captions[start],
        ("p_value", "perm_z", "n_pairings"),
        data,
        base_layout("mean alignment of the pairing", "layer", yaxis=ticks),
        Slider("k", [f"{k:,}" for k in ks], start, per_value=2, captions=captions),
        max(340, 90 + 26 * len(layers)),
        "Grey: mean alignment under all pairings of the layer's router rows and experts (all n! up to 8 "
        "experts, else 20,000 sampled), not a normal approximation. Diamond: the stored pairing.",
    )


# --- experts


def cos_squared_by_layer(tables: Tables) -> Figure:
    """Squared cosine of each router row and its expert's top singular vector, by layer."""
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
        line(means.index, means, "mean", "#0072B2", "layer %{x}<br>mean cos² %{y:.4g}"),
        grey_line(means.index.to_numpy(), np.full(len(means), chance), "chance 1/d"),
    ]
    # cos² of a random direction is about chi-squared over d
    deviation = 2 * np.sqrt(2 / experts.groupby("layer").size().min())
    low, high = f"layer {means.idxmin()}", f"layer {means.idxmax()}"
    span = from_to(means.min() / chance, low, means.max() / chance, high)
    return Figure(
        "cos_squared_by_layer",
        "Router row and top singular vector: cos²",
        f"Mean cos² in units of chance {span} (random router rows: 1 ± {number(deviation)}).",
        ("cos_squared",),
        data,
        base_layout("layer", "cos²", xaxis=layer_axis(means.index)),
    )


def at_reference(tables: Tables) -> pd.Series:
    """Whether a row of `alignment` is at the k at which experts are compared."""
    return tables["alignment"]["k"] == reference_k(usable(tables)["k"])


def expert_map(
    name: str,
    title: str,
    tables: Tables,
    column: str,
    describe: Callable[[np.ndarray, list[int]], str],
    details: str = "",
    **scale: Any,
) -> Figure:
    """A heatmap of layers x experts at one k; `describe` makes the caption from its values and layers."""
    frame = tables["alignment"]
    k = reference_k(usable(tables)["k"])
    grid = frame[frame["k"] == k].pivot(index="layer", columns="expert", values=column)
    z, layers = grid.to_numpy(float), [int(layer) for layer in grid.index]
    data = [heatmap(z, [int(e) for e in grid.columns], layers, axes=("expert", "layer"), **scale)]
    layout, height = matrix_layout("expert", "layer"), max(300, 90 + 18 * len(layers))
    caption = describe(z, layers)
    return Figure(
        name, f"{title} at k = {k}", caption, (column,), data, layout, height=height, details=details
    )


def align_by_expert(tables: Tables) -> Figure:
    """Alignment of every router row with its own expert, layers x experts."""

    def describe(z: np.ndarray, layers: list[int]) -> str:
        low, high = np.nanmin(z, axis=1), np.nanmax(z, axis=1)
        widest = int((high - low).argmax())
        ends = f"{number(low[widest])} to {number(high[widest])}"
        chance = tables["alignment"].loc[at_reference(tables), "random_expectation"].mean()
        return (
            f"Experts differ most in layer {layers[widest]}: alignment from {ends} "
            f"(random direction: {number(chance)})."
        )

    return expert_map(
        "align_by_expert", "Alignment per expert", tables, "align", describe, low=0.0, label="alignment"
    )


def delta_by_expert(tables: Tables) -> Figure:
    """Delta vs shuffle of every expert, layers x experts."""

    def describe(z: np.ndarray, layers: list[int]) -> str:
        return (
            f"{int((z < 0).sum()):,} of {np.isfinite(z).sum():,} router rows fit their own expert worse than "
            "the layer's average (chance: about half)."
        )

    noise = float(tables["alignment"].loc[at_reference(tables), "shuffle_std"].median())
    return expert_map(
        "delta_by_expert",
        "Alignment above average pair",
        tables,
        "delta_vs_shuffle",
        describe,
        f"{ANCHORED} random pairs.",
        diverging=True,
        noise=noise,
        label="alignment above average pair",
    )


def align_against_delta(tables: Tables) -> Figure:
    """Alignment and delta of each expert at one k, coloured by layer."""
    frame = tables["alignment"]
    k = reference_k(usable(tables)["k"])
    here = frame[(frame["k"] == k) & frame["align"].notna()]
    colors = layer_colors(sorted(here["layer"].unique()))
    better = here[here["align"] > here["align"].median()]
    below = int((better["delta_vs_shuffle"] <= 0).sum())
    caption = (
        f"Of the {counted(len(better), 'expert')} with the highest alignment, {below or 'none'} fit no "
        "better than their layer's average (chance: about half)."
    )
    hover = (
        "layer %{customdata[0]}, expert %{customdata[1]}<br>align %{x:.4g}<br>delta %{y:.4g}<extra></extra>"
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
            "hovertemplate": hover,
        }
        for layer, rows in here.groupby("layer", sort=True)
    ]
    data.append(grey_line([float(here["align"].min()), float(here["align"].max())], [0.0, 0.0], "chance"))
    if len(colors) > LEGEND_UP_TO:
        data.append(layer_colorbar(list(colors)))
    return Figure(
        "align_against_delta",
        f"Alignment and delta per expert, k = {k}",
        capital(caption),
        ("align", "delta_vs_shuffle"),
        data,
        base_layout("alignment", IN_WORDS["delta_vs_shuffle"]),
    )
