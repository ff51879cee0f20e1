"""One layer of one reading, looked at closely. Tables given here hold that layer only."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import log_axis
from moescope.plotting.style import (
    CATEGORICAL,
    Figure,
    FigureSpec,
    Slider,
    Tables,
    Trace,
    base_layout,
    expert_lines,
    from_to,
    grey_line,
    heatmap,
    k_axis,
    number,
)
from moescope.weights.figures_alignment import usable
from moescope.weights.figures_nulls import random_spread
from moescope.weights.figures_redundancy import overlaps, sampled_ranks

PANEL_HEIGHT = 260
TEN_TIMES_CHANCE = math.erfc(
    math.sqrt(5)
)  # P(cos² > 10/d) of a random direction: chi-squared of one degree beyond 10


def experts_by_k(tables: Tables, column: str) -> tuple[np.ndarray, list[int], list[int]]:
    """[E, K] of a column of `alignment`, its experts and its ks."""
    grid = tables["alignment"].pivot(index="expert", columns="k", values=column)
    return grid.to_numpy(float), [int(e) for e in grid.index], [int(k) for k in grid.columns]


def best_k(tables: Tables) -> int:
    best = tables["alignment_tests"]["best_k"].iloc[0]
    return int(best) if best == best and best is not None else int(tables["alignment"]["k"].max())


def pair_matrix(tables: Tables) -> Figure:
    pairs = tables["pairs"]
    ks = sorted(int(k) for k in pairs["k"].unique())
    data: list[Trace] = []
    titles, mutual = [], []
    for k in ks:
        grid = pairs[pairs["k"] == k].pivot(index="router_index", columns="expert", values="align")
        M = grid.to_numpy(float)
        data.append(
            heatmap(
                M, list(grid.columns), list(grid.index), label="align", axes=("expert", "router"), text=True
            )
        )
        places = np.arange(len(M))
        hits = int((M.argmax(axis=1) == places).sum())
        mutual.append(int((M.argmax(axis=0)[M.argmax(axis=1)] == places).sum()))
        titles.append(
            f"At k = {k}, {hits} of {len(M)} routers fit their own expert best; by chance one would"
        )
    start = ks.index(best_k(tables)) if best_k(tables) in ks else 0
    if tables["alignment_tests"]["verdict"].iloc[0] == "permuted":
        start = int(np.argmax(mutual))  # where the other order is seen best
    layout = base_layout(
        "expert", "router", xaxis={"type": "category"}, yaxis={"type": "category", "autorange": "reversed"}
    )
    return Figure(
        "pair_matrix",
        titles[start],
        (
            "M(k): alignment of every router with every expert. The diagonal is the stored pairing. "
            "Slide to change k."
        ),
        ("align", "argmax_accuracy"),
        data,
        layout,
        Slider("k", [f"{k:,}" for k in ks], start, titles=titles),
        420,
    )


def expert_cos_squared(tables: Tables) -> Figure:
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
    title = (
        f"{above} of {len(rows)} routers exceed ten times chance along their expert's top direction; "
        f"by chance {number(TEN_TIMES_CHANCE * len(rows))} would"
    )
    return Figure(
        "expert_cos_squared",
        title,
        "Squared cosine of each router row and its expert's top singular vector.",
        ("cos_squared",),
        data,
        base_layout("expert", "cos²", xaxis={"dtick": 1} if len(experts) <= 16 else {}),
    )


def margin_histogram(tables: Tables) -> Figure:
    at = best_k(tables)
    margins = tables["alignment"].loc[lambda f: (f["k"] == at) & f["margin"].notna(), ["expert", "margin"]]
    negative = margins[margins["margin"] <= 0]["expert"]
    title = (
        f"At k = {at}, {len(negative)} of {len(margins)} margins are negative; by chance "
        f"{len(margins) - 1} would be"
    )
    counts, edges = np.histogram(margins["margin"], bins=max(8, min(40, len(margins) // 3)))
    every = max(1, -(-int(counts.max()) // 5))
    data: list[Trace] = [
        {
            "type": "bar",
            "x": (edges[:-1] + edges[1:]) / 2,
            "y": counts,
            "width": np.diff(edges) * 0.94,
            "marker": {"color": CATEGORICAL[0]},
            "name": "routers",
            "hovertemplate": "around %{x:.3g}<br>%{y} routers<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "x": margins["margin"].to_numpy(),
            "y": np.full(len(margins), -0.07 * counts.max()),
            "name": "each router",
            "marker": {"symbol": "line-ns-open", "size": 10, "color": CATEGORICAL[1]},
            "customdata": margins["expert"].to_numpy(),
            "hovertemplate": "expert %{customdata}<br>margin %{x:.4g}<extra></extra>",
        },
    ]
    layout = base_layout(
        "margin",
        "routers",
        yaxis={"tickvals": list(range(0, int(counts.max()) + 1, every))},
        shapes=[
            {
                "type": "line",
                "x0": 0,
                "x1": 0,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": "#8A9099", "dash": "dash"},
            }
        ],
    )
    return Figure(
        "margin_histogram",
        title,
        "Own alignment less the best other expert's, router by router, at the best k. Grey: no preference.",
        ("margin", "positive_margin_share", "best_k"),
        data,
        layout,
    )


def overlap_over_k(tables: Tables) -> Figure:
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
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": ks,
            "y": frame["mean"].to_numpy(),
            "name": "mean overlap",
            "line": {"color": CATEGORICAL[0], "width": 2},
            "hovertemplate": "k %{x}<br>overlap %{y:.4g}<extra></extra>",
        },
        grey_line(ks, frame["chance"].to_numpy(), "chance k/d"),
    ]
    last = frame.iloc[-1]
    title = (
        f"At k = {last['k']:.0f}, two experts share {number(100 * last['mean'])} % of their leading "
        f"subspace on average; chance is {number(100 * last['chance'])} %"
    )
    return Figure(
        "overlap_over_k",
        title,
        "Overlap of two experts' leading subspaces; the band spans all pairs.",
        ("overlap", "chance"),
        data,
        base_layout("k", "overlap", xaxis=k_axis(ks)),
    )


def expert_spectra(tables: Tables) -> Figure:
    rows = tables["spectra"]
    rows = rows[rows["rank"].notna()].sort_values("expert")
    length = int(rows["rank"].min())
    places = sampled_ranks(length)
    values = np.stack([np.asarray(row[:length], float)[places - 1] for row in rows["singular_values"]])
    low, high = rows.loc[rows["spectral_norm"].idxmin()], rows.loc[rows["spectral_norm"].idxmax()]
    first, last = f"expert {low.expert}", f"expert {high.expert}"
    span = from_to(low["spectral_norm"], first, high["spectral_norm"], last)
    title = f"The largest singular value {span}"
    layout = base_layout(
        "place", "singular value", xaxis=log_axis(places) or {}, yaxis=log_axis(values.ravel()) or {}
    )
    traces = [
        {**trace, "mode": "lines"}
        for trace in expert_lines(list(places), values, [int(e) for e in rows["expert"]], "place")
    ]
    return Figure(
        "expert_spectra",
        title,
        "Singular values of every expert of the layer.",
        ("singular_values", "stable_rank", "effective_rank"),
        traces,
        layout,
    )


def mean_panel(
    column: str,
    label: str,
    title: str,
    references: dict[str, str] | None = None,
    chance: Callable[[pd.DataFrame], Trace] | None = None,
) -> FigureSpec:
    """A panel of the complete view: one column of alignment_layers against k, with its reference lines.

    Columns, or made by `chance`.
    """

    def draw(tables: Tables) -> Figure:
        frame = tables["alignment_layers"].sort_values("k")
        ks = frame["k"].to_numpy()
        data: list[Trace] = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": ks,
                "y": frame[column].to_numpy(),
                "name": label,
                "line": {"color": CATEGORICAL[0], "width": 2},
                "showlegend": False,
                "hovertemplate": f"k %{{x}}<br>{label} %{{y:.4g}}<extra></extra>",
            }
        ]
        for source, name in (references or {}).items():
            data.append(
                grey_line(ks, frame[source].to_numpy() if source in frame else np.zeros(len(ks)), name)
            )
        if chance is not None:
            data.append(chance(frame))
        kept = usable(tables)
        top = kept.loc[kept[column].idxmax()]
        words = f"{title}: at most {number(top[column])}, at k = {top['k']:.0f}"
        return Figure(
            f"panel_{column}",
            words,
            f"{title} against k.",
            (column,),
            data,
            base_layout("k", label, xaxis=k_axis(ks)),
            height=PANEL_HEIGHT,
        )

    return FigureSpec(f"panel_{column}", ("alignment_layers",), draw)


def heat_panel(column: str, label: str, diverging: bool) -> FigureSpec:
    """A panel of the complete view: experts against k, coloured."""

    def draw(tables: Tables) -> Figure:
        z, experts, ks = experts_by_k(tables, column)
        data = [
            heatmap(
                z, [f"{k:,}" for k in ks], experts, diverging=diverging, label=label, axes=("k", "expert")
            )
        ]
        layers = tables["alignment_layers"]
        degenerate = set(layers.loc[layers["degenerate"].astype(bool), "k"])  # where every alignment is 1
        told = np.where([k in degenerate for k in ks], -np.inf, z)
        place = np.unravel_index(np.nanargmax(told), told.shape)
        title = (
            f"{label[:1].upper() + label[1:]} of each expert at each k: highest for expert "
            f"{experts[place[0]]} at k = {ks[place[1]]}"
        )
        layout = base_layout(
            "k", "expert", xaxis={"type": "category"}, yaxis={"type": "category", "autorange": "reversed"}
        )
        return Figure(
            f"panel_heat_{column}",
            title,
            f"{label.capitalize()} of every expert at every k.",
            (column,),
            data,
            layout,
            height=PANEL_HEIGHT,
        )

    return FigureSpec(f"panel_heat_{column}", ("alignment", "alignment_layers"), draw)


def expert_panel(column: str, label: str, zero: str | None) -> FigureSpec:
    """A panel of the complete view: one line an expert against k."""

    def draw(tables: Tables) -> Figure:
        y, experts, ks = experts_by_k(tables, column)
        finite = np.isfinite(y).all(axis=1)
        data = expert_lines(
            ks, y[finite], [expert for expert, kept in zip(experts, finite, strict=True) if kept], "k"
        )
        if zero:
            data.append(grey_line(ks, np.zeros(len(ks)), zero))
        else:
            chance, _, _ = experts_by_k(tables, "random_expectation")
            data.append(grey_line(ks, np.nanmean(chance, axis=0), "random direction"))
        at = ks.index(best_k(tables)) if best_k(tables) in ks else 0
        low, high = int(np.nanargmin(y[:, at])), int(np.nanargmax(y[:, at]))
        title = (
            f"{label.capitalize()} by expert: at k = {ks[at]} from {number(y[low, at])} (expert "
            f"{experts[low]}) to {number(y[high, at])} (expert {experts[high]})"
        )
        return Figure(
            f"panel_expert_{column}",
            title,
            f"{label.capitalize()} of every expert against k.",
            (column,),
            data,
            base_layout("k", label, xaxis=k_axis(ks), showlegend=False),
            height=PANEL_HEIGHT,
        )

    return FigureSpec(f"panel_expert_{column}", ("alignment", "alignment_tests"), draw)


COMPLETE_VIEW = [
    mean_panel("align", "alignment", "Alignment", {"random_expectation": "random direction"}),
    mean_panel("z_vs_shuffle", "mean z", "Mean z", {"z_ceiling": "ceiling √(n−1)", "zero": "chance"}),
    mean_panel("effect_over_random", "effect", "Effect over random", {"zero": "random direction"}),
    mean_panel("delta_vs_shuffle", "delta", "Delta vs shuffle", {"zero": "chance"}),
    mean_panel("shuffle_mean", "shuffle mean", "Shuffle mean", {"random_expectation": "random direction"}),
    mean_panel("shuffle_std", "shuffle std", "Shuffle std", chance=random_spread),
    heat_panel("align", "alignment", False),
    heat_panel("delta_vs_shuffle", "delta", True),
    heat_panel("z_vs_shuffle", "z", True),
    expert_panel("align", "alignment", None),
    expert_panel("delta_vs_shuffle", "delta", "chance"),
    expert_panel("margin", "margin", "no preference"),
]
