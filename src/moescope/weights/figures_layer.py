"""One layer of one view in detail. The tables hold that layer only."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import log_axis
from moescope.plotting.style import (
    ANCHORED,
    CATEGORICAL,
    GREY,
    base_layout,
    capital,
    expert_lines,
    from_to,
    grey_line,
    heatmap,
    k_axis,
    number,
    reference_k,
)
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace
from moescope.weights.figures_alignment import (
    IN_WORDS,
    compact,
    line,
    matrix_layout,
    peak,
    random_spread,
    usable,
)
from moescope.weights.figures_redundancy import overlaps, sampled_ranks

PANEL_HEIGHT = 260
# P(cos² > 10/d) of a random direction: chi-squared with one degree of freedom beyond 10
TEN_TIMES_CHANCE = math.erfc(math.sqrt(5))


def first_layer(draw: Callable[[Tables], Figure]) -> Callable[[Tables], Figure]:
    """Let a figure of one layer take the first one where the tables hold several."""

    @functools.wraps(draw)
    def drawn(tables: Tables) -> Figure:
        layers = {name: frame["layer"].to_numpy() for name, frame in tables.items() if len(frame)}
        first = min(numbers.min() for numbers in layers.values())
        several = {name: numbers == first for name, numbers in layers.items() if (numbers != first).any()}
        return draw(tables | {name: tables[name][mask] for name, mask in several.items()})

    return drawn


def experts_by_k(tables: Tables, column: str) -> tuple[np.ndarray, list[int], list[int]]:
    """[E, K] of a column of `alignment`, its experts and its ks."""
    grid = tables["alignment"].pivot(index="expert", columns="k", values=column)
    return grid.to_numpy(float), [int(e) for e in grid.index], [int(k) for k in grid.columns]


def best_k(tables: Tables) -> int:
    best = tables["alignment_tests"]["best_k"].iloc[0]
    return int(tables["alignment"]["k"].max() if pd.isna(best) else best)


@first_layer
def pair_matrix(tables: Tables) -> Figure:
    """Alignment of every router row with every expert of a layer, M(k), with a slider over k."""
    pairs = tables["pairs"]
    ks = sorted(int(k) for k in pairs["k"].unique())
    data: list[Trace] = []
    captions, mutual = [], []
    for k in ks:
        grid = pairs[pairs["k"] == k].pivot(index="router_index", columns="expert", values="align")
        M, axes = grid.to_numpy(float), ("expert", "router")
        matrix = heatmap(M, list(grid.columns), list(grid.index), label="align", axes=axes, text=True)
        data.append(compact(matrix))
        places = np.arange(len(M))
        hits = int((M.argmax(axis=1) == places).sum())
        mutual.append(int((M.argmax(axis=0)[M.argmax(axis=1)] == places).sum()))
        captions.append(f"At k = {k}, {hits} of {len(M)} router rows fit their own expert best (chance: 1).")
    start = ks.index(best_k(tables)) if best_k(tables) in ks else 0
    if tables["alignment_tests"]["verdict"].iloc[0] == "permuted":
        start = int(np.argmax(mutual))  # where the other order is clearest
    return Figure(
        "pair_matrix",
        "Alignment of every router row and expert",
        captions[start],
        ("align", "argmax_accuracy"),
        data,
        matrix_layout("expert", "router"),
        Slider("k", [f"{k:,}" for k in ks], start, captions=captions),
        420,
        "M(k)[i, j]: alignment of router row i with expert j. The diagonal is the stored pairing.",
    )


@first_layer
def expert_cos_squared(tables: Tables) -> Figure:
    """Squared cosine of each router row and its expert's top singular vector, in one layer."""
    rows = tables["alignment"]
    rows = rows[(rows["k"] == 1) & rows["cos_squared"].notna()].sort_values("expert")
    chance = float(rows["random_expectation"].mean())
    above = int((rows["cos_squared"] > 10 * chance).sum())
    experts = rows["expert"].to_numpy()
    data: list[Trace] = [
        {
            "type": "bar",
            "x": experts,
            "y": rows["cos_squared"].to_numpy(),
            "name": "cos²",
            "marker": {"color": CATEGORICAL[0]},
            "hovertemplate": "expert %{x}<br>cos² %{y:.4g}<extra></extra>",
        },
        grey_line([float(experts.min()) - 0.5, float(experts.max()) + 0.5], [chance, chance], "chance 1/d"),
    ]
    return Figure(
        "expert_cos_squared",
        "cos² of router row and top singular vector",
        f"{above} of {len(rows)} experts exceed ten times chance (random directions: "
        f"{number(TEN_TIMES_CHANCE * len(rows))}).",
        ("cos_squared",),
        data,
        base_layout("expert", "cos²", xaxis={"dtick": 1} if len(experts) <= 16 else {}),
    )


@first_layer
def margin_histogram(tables: Tables) -> Figure:
    """Margins of one layer's router rows at the best k."""
    k = best_k(tables)
    margins = tables["alignment"].loc[lambda f: (f["k"] == k) & f["margin"].notna(), ["expert", "margin"]]
    counts, edges = np.histogram(margins["margin"], bins=max(8, min(40, len(margins) // 3)))
    every = max(1, -(-int(counts.max()) // 5))
    data: list[Trace] = [
        {
            "type": "bar",
            "x": (edges[:-1] + edges[1:]) / 2,
            "y": counts,
            "width": np.diff(edges) * 0.94,
            "marker": {"color": CATEGORICAL[0]},
            "name": "router rows",
            "hovertemplate": "around %{x:.3g}<br>%{y} router rows<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "x": margins["margin"].to_numpy(),
            "y": np.full(len(margins), -0.07 * counts.max()),
            "name": "each router row",
            "marker": {"symbol": "line-ns-open", "size": 10, "color": CATEGORICAL[1]},
            "customdata": margins["expert"].to_numpy(),
            "hovertemplate": "expert %{customdata}<br>margin %{x:.4g}<extra></extra>",
        },
    ]
    no_preference = {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1}
    layout = base_layout(
        "margin",
        "router rows",
        yaxis={"tickvals": list(range(0, int(counts.max()) + 1, every))},
        shapes=[{**no_preference, "line": {"color": GREY, "dash": "dash"}}],
    )
    return Figure(
        "margin_histogram",
        f"Margins per router row, k = {k}",
        f"{int((margins['margin'] <= 0).sum())} of {len(margins)} margins are negative "
        f"(chance: {len(margins) - 1}).",
        ("margin", "positive_margin_share", "best_k"),
        data,
        layout,
    )


@first_layer
def overlap_over_k(tables: Tables) -> Figure:
    """Overlap of two experts' leading subspaces by k, in one layer."""
    frame = overlaps(tables)
    ks, low, high = frame["k"].to_numpy(), frame["min"].to_numpy(), frame["max"].to_numpy()
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": np.concatenate([ks, ks[::-1]]),
            "y": np.concatenate([high, low[::-1]]),
            "fill": "toself",
            "fillcolor": "rgba(0,114,178,0.15)",
            "line": {"width": 0},
            "name": "all pairs",
            "hoverinfo": "skip",
        },
        line(ks, frame["mean"], "mean overlap", CATEGORICAL[0], "k %{x}<br>overlap %{y:.4g}"),
        grey_line(ks, frame["chance"].to_numpy(), "chance k/d"),
    ]
    last = frame.iloc[-1]
    return Figure(
        "overlap_over_k",
        "Overlap of two experts' leading subspaces",
        f"At k = {last['k']:.0f}, mean overlap is {number(100 * last['mean'])} % "
        f"(chance: {number(100 * last['chance'])} %); the band spans all pairs.",
        ("overlap", "chance"),
        data,
        base_layout("k", "overlap", xaxis=k_axis(ks)),
    )


@first_layer
def expert_spectra(tables: Tables) -> Figure:
    """Singular values of every expert of one layer."""
    rows = tables["spectra"]
    rows = rows[rows["rank"].notna()].sort_values("expert")
    length = int(rows["rank"].min())
    places = sampled_ranks(length)
    values = np.stack([np.asarray(row[:length], float)[places - 1] for row in rows["singular_values"]])
    low, high = rows.loc[rows["spectral_norm"].idxmin()], peak(rows, "spectral_norm")
    span = from_to(
        low["spectral_norm"], f"expert {low.expert}", high["spectral_norm"], f"expert {high.expert}"
    )
    lines = expert_lines(list(places), values, [int(e) for e in rows["expert"]], "rank")
    return Figure(
        "expert_spectra",
        "Singular values of every expert",
        f"The largest singular value {span}.",
        ("singular_values", "stable_rank", "effective_rank"),
        [{**trace, "mode": "lines"} for trace in lines],
        base_layout(
            "rank", "singular value", xaxis=log_axis(places) or {}, yaxis=log_axis(values.ravel()) or {}
        ),
    )


# --- panels of the complete view


def mean_panel(
    column: str,
    label: str,
    references: dict[str, str] | None = None,
    reference_line: Callable[[pd.DataFrame], Trace] | None = None,
) -> FigureSpec:
    """One column of alignment_layers against k; `references`: column (or zero) -> name of its grey line."""
    name = f"panel_{column}"

    @first_layer
    def draw(tables: Tables) -> Figure:
        frame = tables["alignment_layers"].sort_values("k")
        ks = frame["k"].to_numpy()
        hover = f"k %{{x}}<br>{label} %{{y:.4g}}"
        data = [line(ks, frame[column], label, CATEGORICAL[0], hover, showlegend=False)]
        data += [
            grey_line(ks, frame[source].to_numpy() if source in frame else np.zeros(len(ks)), words)
            for source, words in (references or {}).items()
        ]
        data += [reference_line(frame)] if reference_line else []
        top = peak(usable(tables), column)
        at_top = [(trace["name"], trace["y"][list(trace["x"]).index(top["k"])]) for trace in data[1:]]
        levels = ", ".join(f"{words}: {number(level)}" for words, level in at_top)
        caption = f"At most {number(top[column])}, at k = {top['k']:.0f} ({levels})."
        layout = base_layout("k", label, xaxis=k_axis(ks))
        return Figure(name, capital(label), caption, (column,), data, layout, height=PANEL_HEIGHT)

    description = f"{capital(label)} of one layer by k."
    return FigureSpec(name, ("alignment_layers",), draw, description=description)


def heat_panel(column: str, label: str, noise: str = "") -> FigureSpec:
    """Experts against k as a heatmap; `noise`: column of a difference's standard deviation at chance."""
    diverging = bool(noise)
    name = f"panel_heat_{column}"

    @first_layer
    def draw(tables: Tables) -> Figure:
        z, experts, ks = experts_by_k(tables, column)
        x = [f"{k:,}" for k in ks]
        spread = float(tables["alignment"][noise].median()) if noise in tables["alignment"] else 1.0
        axes = ("k", "expert")
        data = [heatmap(z, x, experts, diverging=diverging, noise=spread, label=label, axes=axes)]
        layers = tables["alignment_layers"]
        degenerate = set(layers.loc[layers["degenerate"].astype(bool), "k"])  # where every alignment is 1
        comparable = np.where([k in degenerate for k in ks], -np.inf, z)
        row, column_ = np.unravel_index(np.nanargmax(comparable), z.shape)
        at_k = tables["alignment"]["k"] == ks[column_]
        chance = 0.0 if diverging else float(tables["alignment"].loc[at_k, "random_expectation"].mean())
        caption = (
            f"Highest for expert {experts[row]} at k = {ks[column_]}: {number(z[row, column_])} "
            f"({'chance' if diverging else 'random direction'}: {number(chance)})."
        )
        title = f"{capital(label)} of each expert by k"
        layout = matrix_layout("k", "expert")
        details = f"{ANCHORED} random pairs." if diverging else ""
        return Figure(name, title, caption, (column,), data, layout, height=PANEL_HEIGHT, details=details)

    description = f"{capital(label)} of each expert of one layer by k, as a heatmap."
    return FigureSpec(name, ("alignment", "alignment_layers"), draw, description=description)


def expert_panel(column: str, label: str, at_one: bool = False) -> FigureSpec:
    """One bar per expert at k = 1, or at 128 or else the median k."""
    name = f"panel_expert_{column}"

    @first_layer
    def draw(tables: Tables) -> Figure:
        k = 1 if at_one else reference_k(usable(tables)["k"])
        rows = tables["alignment"]
        rows = rows[(rows["k"] == k) & rows[column].notna()].sort_values("expert")
        experts, values = rows["expert"].to_numpy(), rows[column].to_numpy(float)
        chance, words = float(rows["random_expectation"].mean()), "random direction"
        if column == "z_vs_shuffle":
            chance, words = 0.0, "chance"
        ends = [float(experts.min()) - 0.5, float(experts.max()) + 0.5]
        data: list[Trace] = [
            {
                "type": "bar",
                "x": experts,
                "y": values,
                "name": label,
                "marker": {"color": CATEGORICAL[0]},
                "hovertemplate": f"expert %{{x}}<br>{label} %{{y:.4g}}<extra></extra>",
            },
            grey_line(ends, [chance, chance], words),
        ]
        low, high = int(np.argmin(values)), int(np.argmax(values))
        span = from_to(values[low], f"expert {experts[low]}", values[high], f"expert {experts[high]}")
        layout = base_layout("expert", label, xaxis={"dtick": 1} if len(experts) <= 16 else {})
        layout["showlegend"] = False
        return Figure(
            name,
            f"{capital(label)} per expert, k = {k}",
            f"{capital(label)} {span} ({words}: {number(chance)}).",
            (column,),
            data,
            layout,
            height=PANEL_HEIGHT,
        )

    description = f"{capital(label)} of every expert of one layer at one k."
    return FigureSpec(name, ("alignment", "alignment_layers"), draw, description=description)


COMPLETE_VIEW = [
    mean_panel("align", "alignment", {"random_expectation": "random direction"}),
    mean_panel("z_vs_shuffle", "mean z", {"z_ceiling": "ceiling √(n−1)", "zero": "chance"}),
    mean_panel("effect_over_random", IN_WORDS["effect_over_random"], {"zero": "random direction"}),
    mean_panel("delta_vs_shuffle", IN_WORDS["delta_vs_shuffle"], {"zero": "chance"}),
    mean_panel("shuffle_mean", IN_WORDS["shuffle_mean"], {"random_expectation": "random direction"}),
    mean_panel("shuffle_std", IN_WORDS["shuffle_std"], reference_line=random_spread),
    heat_panel("align", "alignment"),
    heat_panel("delta_vs_shuffle", "delta", "shuffle_std"),
    heat_panel("z_vs_shuffle", "z", "one"),
    expert_panel("cos_squared", "cos²", at_one=True),
    expert_panel("align", "alignment"),
    expert_panel("z_vs_shuffle", "z"),
]
