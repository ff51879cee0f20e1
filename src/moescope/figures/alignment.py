"""Alignment across the layers of one reading: curves over k, the shuffle null, and experts at one k."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.figures.style import (
    GREY, Figure, Slider, Tables, Trace, base_layout, capital, grey_line, heatmap, k_axis, layer_colorbar, layer_colors,
    layer_lines, named_layers, number, reference_k,
)  # fmt: skip

NOT_DEGENERATE = "k = d_model is left out of the words: every alignment is 1 there."


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
    low, high = peak(here.assign(negative=-here["align"]), "negative"), peak(here, "align")
    title = (
        f"At k = {at}, alignment runs from {number(low['align'])} (layer {low['layer']:.0f}) to {number(high['align'])} "
        f"(layer {high['layer']:.0f}); a random direction gives {number(here['random_expectation'].mean())}"
        if here["layer"].nunique() > 1
        else f"At k = {at}, alignment is {number(high['align'])}; a random direction gives {number(high['random_expectation'])}"
    )
    chance = frame.groupby("k")["random_expectation"].mean()
    data = [*layer_lines(frame, "k", "align"), grey_line(chance.index.to_numpy(), chance.to_numpy(), "random direction")]
    return Figure("align_by_k", title, "Mean alignment of routers with their own experts against k, one line a layer.",
                  ("align", "random_expectation"), data, base_layout("k", "alignment", xaxis=k_axis(frame["k"])))  # fmt: skip


def z_by_k(tables: Tables) -> Figure:
    frame, kept = tables["alignment_layers"], usable(tables)
    best = kept.groupby("layer")["z_vs_shuffle"].max()
    ceiling = float(frame["z_ceiling"].max())
    high = sorted(best.index[best >= 0.9 * ceiling])
    title = f"Mean z comes within a tenth of its ceiling of {number(ceiling)} in {named_layers(high)}" if high else (
        f"Mean z peaks at {number(best.max())}, below its ceiling of {number(ceiling)}"
    )
    ks = np.sort(frame["k"].unique())
    data = [*layer_lines(frame, "k", "z_vs_shuffle"), grey_line(ks, np.full(len(ks), ceiling), "ceiling √(n−1)"),
            grey_line(ks, np.zeros(len(ks)), "chance", "dot")]  # fmt: skip
    return Figure("z_by_k", title, "Mean z over a layer's experts. It cannot exceed the dashed line, so it is not a confidence.",
                  ("z_vs_shuffle", "z_ceiling", "p_value"), data, base_layout("k", "mean z", xaxis=k_axis(frame["k"])))  # fmt: skip


def effect_by_k(tables: Tables) -> Figure:
    frame, top = tables["alignment_layers"], peak(usable(tables), "effect_over_random")
    title = f"Effect over a random direction is largest in layer {top['layer']:.0f}: {number(top['effect_over_random'])} at k = {top['k']:.0f}"
    ks = np.sort(frame["k"].unique())
    data = [*layer_lines(frame, "k", "effect_over_random"), grey_line(ks, np.zeros(len(ks)), "random direction")]
    return Figure("effect_by_k", title, "Alignment less that of a random direction.", ("effect_over_random", "random_expectation"),
                  data, base_layout("k", "effect over random", xaxis=k_axis(frame["k"])))  # fmt: skip


def delta_by_k(tables: Tables) -> Figure:
    frame, top = tables["alignment_layers"], peak(usable(tables), "delta_vs_shuffle")
    below = sorted(usable(tables).groupby("layer")["delta_vs_shuffle"].max().loc[lambda best: best <= 0.005].index)
    title = f"Own experts beat the layer's average by up to {number(top['delta_vs_shuffle'])} (layer {top['layer']:.0f}, k = {top['k']:.0f})"
    title += f"; {named_layers(below)} by less than 0.005 at any k" if below else ""
    ks = np.sort(frame["k"].unique())
    data = [*layer_lines(frame, "k", "delta_vs_shuffle"), grey_line(ks, np.zeros(len(ks)), "chance")]
    return Figure("delta_by_k", title, "Alignment with the own expert less the mean over all experts of the layer.",
                  ("delta_vs_shuffle", "shuffle_mean"), data, base_layout("k", "delta vs shuffle", xaxis=k_axis(frame["k"])))  # fmt: skip


def cos_squared_by_layer(tables: Tables) -> Figure:
    experts = tables["alignment"]
    experts = experts[(experts["k"] == 1) & experts["cos_squared"].notna()]
    means = experts.groupby("layer")["cos_squared"].mean()
    chance = float(experts["random_expectation"].mean())
    colors = layer_colors(list(means.index))
    data: list[Trace] = [
        {
            "type": "scatter", "mode": "markers", "name": "expert", "x": experts["layer"].to_numpy(), "y": experts["cos_squared"].to_numpy(),
            "marker": {"size": 6, "opacity": 0.6, "color": [colors[layer] for layer in experts["layer"]]}, "customdata": experts["expert"].to_numpy(),
            "hovertemplate": "layer %{x}, expert %{customdata}<br>cos² %{y:.4g}<extra></extra>",
        },
        {"type": "scatter", "mode": "lines+markers", "name": "mean", "x": means.index.to_numpy(), "y": means.to_numpy(),
         "line": {"color": "#0072B2", "width": 2}, "hovertemplate": "layer %{x}<br>mean cos² %{y:.4g}<extra></extra>"},
        grey_line(means.index.to_numpy(), np.full(len(means), chance), "chance 1/d"),
    ]  # fmt: skip
    title = f"Mean cos² is {number(means.max() / chance)} times chance in layer {means.idxmax()}, {number(means.min() / chance)} times in layer {means.idxmin()}"
    return Figure("cos_squared_by_layer", title, "Squared cosine of each router row and its expert's top singular vector; the line is the mean.",
                  ("cos_squared",), data, base_layout("layer", "cos²", xaxis=layer_axis(means.index)))  # fmt: skip


def layer_axis(layers: pd.Index) -> dict[str, object]:
    """Whole layers only on the axis."""
    values = [int(layer) for layer in layers]
    every = max(1, -(-len(values) // 16))
    return {"tickvals": values[::every], "ticktext": [str(value) for value in values[::every]]}


def shuffle_mean_by_k(tables: Tables) -> Figure:
    frame = tables["alignment_layers"]
    gap = usable(tables).assign(over=lambda f: f["shuffle_mean"] / f["random_expectation"])
    top = peak(gap, "over")
    title = f"An average expert fits a router up to {number(top['over'])} times better than a random direction (layer {top['layer']:.0f}, k = {top['k']:.0f})"
    chance = frame.groupby("k")["random_expectation"].mean()
    data = [*layer_lines(frame, "k", "shuffle_mean"), grey_line(chance.index.to_numpy(), chance.to_numpy(), "random direction")]
    return Figure("shuffle_mean_by_k", title, "Mean alignment over all router-expert pairs, right or wrong.", ("shuffle_mean", "random_expectation"),
                  data, base_layout("k", "shuffle mean", xaxis=k_axis(frame["k"])))  # fmt: skip


def shuffle_std_by_k(tables: Tables) -> Figure:
    frame, top = tables["alignment_layers"], peak(usable(tables), "shuffle_std")
    title = f"The null is widest in layer {top['layer']:.0f}: standard deviation {number(top['shuffle_std'])} at k = {top['k']:.0f}"
    return Figure("shuffle_std_by_k", title, "Spread of alignment over all router-expert pairs: the unit of z.", ("shuffle_std",),
                  layer_lines(frame, "k", "shuffle_std"), base_layout("k", "shuffle std", xaxis=k_axis(frame["k"])))  # fmt: skip


def shuffle_log_std_by_k(tables: Tables) -> Figure:
    frame = usable(tables)
    frame = frame[frame["shuffle_std"] > 0]
    spread = frame.groupby("k")["shuffle_std"].agg(lambda values: values.max() / values.min())
    title = f"At one k the null's width differs between layers by up to {number(spread.max())} times (k = {spread.idxmax()})"
    if frame["layer"].nunique() == 1:
        title = f"The null's width grows {number(frame['shuffle_std'].max() / frame['shuffle_std'].min())}-fold over k"
    layout = base_layout("k", "shuffle std, log scale", xaxis=k_axis(frame["k"]), yaxis={"type": "log"})
    return Figure("shuffle_log_std_by_k", title, "The same on a logarithmic scale, where small k can be read. Degenerate ks have no width.",
                  ("shuffle_std",), layer_lines(frame, "k", "shuffle_std"), layout)  # fmt: skip


def z_decomposed(tables: Tables) -> Figure:
    """z is a slope: delta against std, with rays of equal z."""
    frame = usable(tables)
    layers = sorted(frame["layer"].unique())
    colors = layer_colors(layers)
    widest = float(frame["shuffle_std"].max()) or 1.0
    ceiling = float(frame["z_ceiling"].max())
    data: list[Trace] = []
    for layer, rows in frame.sort_values("k").groupby("layer"):
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": f"layer {layer}", "x": rows["shuffle_std"].to_numpy(),
                "y": rows["delta_vs_shuffle"].to_numpy(), "line": {"color": colors[layer], "width": 1.2}, "marker": {"size": 6},
                "customdata": rows[["k", "z_vs_shuffle"]].to_numpy().tolist(), "showlegend": len(layers) <= 10,
                "hovertemplate": f"layer {layer}, k %{{customdata[0]}}<br>std %{{x:.4g}}<br>delta %{{y:.4g}}<br>z %{{customdata[1]:.3g}}<extra></extra>",
            }
        )  # fmt: skip
    if len(layers) > 10:
        data.append(layer_colorbar(layers))
    for slope, name, dash in ((ceiling, f"z = {ceiling:.2f}, the ceiling", "dash"), (1.0, "z = 1", "dot"), (0.0, "z = 0", "dot")):
        data.append(grey_line([0.0, widest], [0.0, slope * widest], name, dash))
    top = peak(frame, "z_vs_shuffle")
    title = (
        f"z peaks in layer {top['layer']:.0f} at k = {top['k']:.0f}: a delta of {number(top['delta_vs_shuffle'])} "
        f"over a spread of {number(top['shuffle_std'])}"
    )
    caption = "z is the slope from the origin: height is delta, width the null's spread. A large z may come from a small spread. Dots are ks."
    return Figure("z_decomposed", title, caption, ("z_vs_shuffle", "delta_vs_shuffle", "shuffle_std", "z_ceiling"), data,
                  base_layout("shuffle std", "delta vs shuffle"))  # fmt: skip


def null_density(tables: Tables) -> Figure:
    """One ridge a layer: the permutation null of the mean diagonal, and the observed value on it."""
    nulls = tables["nulls"]
    ks = sorted(nulls["k"].unique())
    layers = sorted(nulls["layer"].unique())
    colors = layer_colors(layers)
    data: list[Trace] = []
    beyond: dict[int, list[int]] = {}
    for k in ks:
        here = nulls[nulls["k"] == k]
        x_ridge: list[float] = []
        y_ridge: list[float] = []
        observed = []
        for row, layer in enumerate(layers):
            bins = here[here["layer"] == layer].sort_values("bin")
            if bins.empty:
                continue
            height = bins["density"] / bins["density"].max() * 0.85
            middle = (bins["left"] + bins["right"]) / 2
            x_ridge += [bins["left"].iloc[0], *middle, bins["right"].iloc[-1], bins["left"].iloc[0], np.nan]
            y_ridge += [row, *(row + height), row, row, np.nan]
            seen = float(bins["observed"].iloc[0])
            observed.append((seen, row + 0.2, layer))
            if seen >= bins["right"].iloc[-1] - (bins["right"].iloc[-1] - bins["left"].iloc[-1]) * 1.01:
                beyond.setdefault(int(k), []).append(layer)
        data.append(
            {"type": "scatter", "mode": "lines", "x": np.array(x_ridge), "y": np.array(y_ridge), "fill": "toself", "fillcolor": "rgba(138,144,153,0.35)",
             "line": {"color": GREY, "width": 1}, "name": "random pairings", "hoverinfo": "skip"}
        )  # fmt: skip
        data.append(
            {"type": "scatter", "mode": "markers", "x": [o[0] for o in observed], "y": [o[1] for o in observed], "name": "stored pairing",
             "marker": {"color": [colors[o[2]] for o in observed], "size": 10, "symbol": "diamond"}, "customdata": [o[2] for o in observed],
             "hovertemplate": "layer %{customdata}<br>mean alignment %{x:.4g}<extra></extra>"}
        )  # fmt: skip
    start = len(ks) // 2
    k = int(ks[start])
    out = beyond.get(k, [])
    title = f"At k = {k}, the stored pairing is at the far end of all random ones in {named_layers(out)}" if out else (
        f"At k = {k}, no layer's pairing stands at the far end of random ones"
    )
    every = max(1, -(-len(layers) // 24))
    layout = base_layout("mean alignment of the pairing", "layer", yaxis={
        "tickvals": list(range(0, len(layers), every)), "ticktext": [str(layer) for layer in layers[::every]]})  # fmt: skip
    caption = (
        "Grey: mean alignment under every pairing of the layer's routers and experts (all n! up to 8 experts, else 20,000 drawn), "
        "not a normal approximation. Diamond: the stored pairing. Slide to change k."
    )
    return Figure("null_density", title, caption, ("p_value", "perm_z", "n_pairings"), data, layout,
                  Slider("k", [f"{k:,}" for k in ks], start, per_value=2), max(340, 90 + 26 * len(layers)))  # fmt: skip


def experts_at_k(tables: Tables, column: str, diverging: bool) -> tuple[np.ndarray, list[int], list[int], int]:
    frame = tables["alignment"]
    at = reference_k(usable(tables)["k"])
    grid = frame[frame["k"] == at].pivot(index="layer", columns="expert", values=column)
    return grid.to_numpy(float), [int(e) for e in grid.columns], [int(layer) for layer in grid.index], at


def align_by_expert(tables: Tables) -> Figure:
    z, experts, layers, at = experts_at_k(tables, "align", False)
    spread = np.nanmax(z, axis=1) - np.nanmin(z, axis=1)
    title = f"At k = {at}, experts differ most in layer {layers[int(spread.argmax())]}: alignments from {number(np.nanmin(z[spread.argmax()]))} to {number(np.nanmax(z[spread.argmax()]))}"
    data = [heatmap(z, experts, layers, low=0.0, label="align", axes=("expert", "layer"))]
    return Figure("align_by_expert", title, f"Alignment of every router with its own expert at k = {at}.", ("align",), data,
                  base_layout("expert", "layer", yaxis={"autorange": "reversed", "type": "category"}, xaxis={"type": "category"}),
                  height=max(300, 90 + 18 * len(layers)))  # fmt: skip


def delta_by_expert(tables: Tables) -> Figure:
    z, experts, layers, at = experts_at_k(tables, "delta_vs_shuffle", True)
    negative = int((z < 0).sum())
    title = f"At k = {at}, {negative} of {np.isfinite(z).sum()} routers fit their own expert worse than the layer's average"
    data = [heatmap(z, experts, layers, diverging=True, label="delta", axes=("expert", "layer"))]
    return Figure("delta_by_expert", title, f"Delta vs shuffle of every expert at k = {at}; white is chance.", ("delta_vs_shuffle",), data,
                  base_layout("expert", "layer", yaxis={"autorange": "reversed", "type": "category"}, xaxis={"type": "category"}),
                  height=max(300, 90 + 18 * len(layers)))  # fmt: skip


def align_against_delta(tables: Tables) -> Figure:
    frame = tables["alignment"]
    at = reference_k(usable(tables)["k"])
    here = frame[(frame["k"] == at) & frame["align"].notna()]
    colors = layer_colors(sorted(here["layer"].unique()))
    correlation = here["align"].corr(here["delta_vs_shuffle"], method="spearman")
    low = here[here["align"] > here["align"].median()]
    title = (
        f"High alignment is not enough: of the better half at k = {at}, {(low['delta_vs_shuffle'] <= 0).sum()} experts "
        f"are at or below their layer's average (rank correlation {number(correlation)})"
    )
    data = [
        {"type": "scatter", "mode": "markers", "x": here["align"].to_numpy(), "y": here["delta_vs_shuffle"].to_numpy(), "showlegend": False,
         "marker": {"color": [colors[layer] for layer in here["layer"]], "size": 7, "opacity": 0.8},
         "customdata": here[["layer", "expert"]].to_numpy().tolist(),
         "hovertemplate": "layer %{customdata[0]}, expert %{customdata[1]}<br>align %{x:.4g}<br>delta %{y:.4g}<extra></extra>"},
        grey_line([float(here["align"].min()), float(here["align"].max())], [0.0, 0.0], "chance"),
        layer_colorbar(sorted(here["layer"].unique())),
    ]  # fmt: skip
    return Figure("align_against_delta", capital(title), f"Each dot is an expert at k = {at}, coloured by layer.", ("align", "delta_vs_shuffle"),
                  data, base_layout("alignment", "delta vs shuffle"))  # fmt: skip
