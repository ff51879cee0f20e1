"""Who gets how many tokens: experts of one layer, all layers at once, and how uneven that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import (
    CATEGORICAL,
    DIVERGING,
    Figure,
    FigureSpec,
    Slider,
    Tables,
    Trace,
    base_layout,
    capital,
    counted,
    grey_line,
    layer_lines,
    named_layers,
    number,
)
from moescope.routing.figures_metrics import RANDOM, by_domain, by_layer, values_of

DOMAINS_STACKED = len(CATEGORICAL)
WHOLE_UP_TO = 10  # experts, each with a tick of its own
CATEGORIES: dict[str, object] = {"type": "category", "nticks": 20, "tickangle": 0}
EXACT_CELLS = 64 * 64
FOLD = 8.0  # how far a colour scale of ratios reaches, either way


class Usage(NamedTuple):
    """One layer's load.

    Counts by expert, what an even share is, and how far chance strays from it (2 standard deviations).
    """

    layer: int
    experts: np.ndarray
    counts: np.ndarray
    even: float
    stray: float


def total_load(tables: Tables) -> pd.DataFrame:
    """layer, expert -> tokens, all domains together."""
    found: pd.DataFrame = tables["load"].groupby(["layer", "expert"], as_index=False)["tokens"].sum()
    return found


def tokens_by_layer(tables: Tables) -> dict[int, float]:
    """N of each layer, from the chance of cv: sqrt((n - k)/(N k)) with N k assignments."""
    rows = tables["routing_layers"]
    cv = rows[(rows["metric"] == "cv") & (rows["domain"] == "")].set_index("layer")["chance"]
    found = {}
    for layer, loads in total_load(tables).groupby("layer"):
        assigned, n = float(loads["tokens"].sum()), len(loads)
        chance = float(cv.get(layer, np.nan))
        k = n - chance**2 * assigned
        found[int(layer)] = assigned / k if np.isfinite(k) and k > 0 else np.nan
    return found


def usages(tables: Tables) -> list[Usage]:
    tokens = tokens_by_layer(tables)
    found = []
    for layer, loads in total_load(tables).groupby("layer", sort=True):
        counts, n = loads.sort_values("expert")["tokens"].to_numpy(), len(loads)
        even = float(counts.sum()) / n
        share = even / tokens[int(layer)]
        stray = 2 * np.sqrt(even * max(1 - share, 0)) if np.isfinite(share) else np.nan
        found.append(Usage(int(layer), np.sort(loads["expert"].to_numpy()), counts, even, stray))
    return found


def usage_title(usage: Usage) -> str:
    most, least = int(usage.counts.argmax()), int(usage.counts.argmin())
    chance = (
        f"chance alone strays by about ±{number(100 * usage.stray / usage.even)} %"
        if np.isfinite(usage.stray) and usage.even
        else "an even share is 1"
    )
    if not usage.even:
        return f"Layer {usage.layer}: no token was routed"
    return (
        f"Layer {usage.layer}: expert {usage.experts[most]} gets "
        f"{number(usage.counts[most] / usage.even)} times an even share, "
        f"expert {usage.experts[least]} {number(usage.counts[least] / usage.even)}; {chance}"
    )


def band(usage: Usage, edges: tuple[float, float]) -> list[Trace]:
    """The even share, and the two standard deviations that chance gives, in grey."""
    lines = [grey_line(list(edges), [usage.even] * 2, f"even share (±2 sd of {RANDOM})")]
    if np.isfinite(usage.stray):
        for sign in (-1, 1):
            edge = grey_line(list(edges), [max(usage.even + sign * usage.stray, 0.0)] * 2, "±2 sd", "dot")
            edge["line"]["width"] = 1
            lines.append({**edge, "showlegend": False})
    else:
        lines += [{**lines[0], "showlegend": False}] * 2  # the slider counts traces
    return lines


def usage_by_expert(tables: Tables) -> Figure:
    """Bars of tokens an expert, stacked by domain, one layer at a time."""
    load = tables["load"]
    domains = sorted(load["domain"].unique())
    stacked = domains if 1 < len(domains) <= DOMAINS_STACKED else [None]
    found = usages(tables)
    data: list[Trace] = []
    for usage in found:
        rows = load[load["layer"] == usage.layer]
        for index, domain in enumerate(stacked):
            mine = rows if domain is None else rows[rows["domain"] == domain]
            counts = mine.groupby("expert")["tokens"].sum().reindex(usage.experts, fill_value=0)
            name = "tokens" if domain is None else str(domain)
            data.append(bars(usage, counts.to_numpy(), name, CATEGORICAL[index]))
        data += band(usage, (usage.experts[0] - 0.5, usage.experts[-1] + 0.5))
    return usage_figure(
        "usage_by_expert",
        found,
        data,
        len(stacked) + 3,
        {"rangemode": "tozero"},
        "stack",
        [usage_title(usage) for usage in found],
    )


def usage_by_expert_log(tables: Tables) -> Figure:
    """The same on a logarithmic axis, where rarely used experts can be seen.

    An expert without tokens has no mark.
    """
    found = usages(tables)
    data: list[Trace] = []
    for usage in found:
        marks = bars(usage, np.where(usage.counts > 0, usage.counts, np.nan), "tokens", CATEGORICAL[0])
        data.append(
            {**marks, "type": "scatter", "mode": "markers", "marker": {"color": CATEGORICAL[0], "size": 8}}
        )
        data += band(usage, (usage.experts[0] - 0.5, usage.experts[-1] + 0.5))
    by_chance = values_of(tables, "min_max_ratio").set_index("layer")["chance"]
    titles = [spread_title(usage, float(by_chance.get(usage.layer, np.nan))) for usage in found]
    yaxis = plain_log([trace for trace in data if trace["name"] != "±2 sd"]) or {"rangemode": "tozero"}
    return usage_figure("usage_by_expert_log", found, data, 4, yaxis, "overlay", titles)


def spread_title(usage: Usage, ratio_by_chance: float) -> str:
    idle = int((usage.counts == 0).sum())
    if idle or not usage.even:
        return f"Layer {usage.layer}: {idle} of {len(usage.counts)} experts got no token, and have no mark"
    chance = f"; about {number(1 / ratio_by_chance)} for {RANDOM}" if ratio_by_chance > 0 else ""
    return (
        f"Layer {usage.layer}: the busiest expert has "
        f"{number(usage.counts.max() / usage.counts.min())} times the load of the idlest{chance}"
    )


def bars(usage: Usage, counts: np.ndarray, name: str, color: str) -> Trace:
    times = counts / usage.even if usage.even else counts * 0.0
    return {
        "type": "bar",
        "name": name,
        "x": usage.experts,
        "y": counts,
        "customdata": times,
        "marker": {"color": color},
        "hovertemplate": (
            f"expert %{{x}}<br>{name} %{{y:,}}<br>%{{customdata:.3g}} of an even share<extra></extra>"
        ),
    }


def usage_figure(
    name: str,
    found: list[Usage],
    data: list[Trace],
    per: int,
    yaxis: dict[str, object],
    mode: str,
    titles: list[str],
) -> Figure:
    start = int(np.argmax([usage.counts.max() / usage.even if usage.even else 0.0 for usage in found]))
    scale = ", logarithmic" if yaxis.get("type") == "log" else ""
    return Figure(
        name,
        titles[start],
        (
            f"How many tokens chose each expert of a layer{scale}. Dashed: an even share; dotted: "
            "two standard deviations of random "
            "balanced routing about it. Slide to change the layer; the most uneven is shown first."
        ),
        ("tokens", "max_over_mean", "chance"),
        data,
        base_layout("expert", f"tokens{scale}", yaxis=yaxis, barmode=mode, bargap=0.15),
        Slider("layer", [str(usage.layer) for usage in found], start, per, titles),
        360,
    )


def usage_by_rank(tables: Tables) -> Figure:
    """Every layer's loads from the busiest expert to the idlest, in units of an even share."""
    found = usages(tables)
    rows = []
    for usage in found:
        ordered = np.sort(usage.counts)[::-1] / (usage.even or 1.0)
        rows.append(
            pd.DataFrame(
                {
                    "layer": usage.layer,
                    "rank": np.arange(1, len(ordered) + 1),
                    "times": np.where(ordered > 0, ordered, np.nan),
                }
            )
        )
    frame = pd.concat(rows)
    idle = {usage.layer: int((usage.counts == 0).sum()) for usage in found}
    unused = sum(idle.values())
    half = [
        int(np.searchsorted(np.cumsum(np.sort(usage.counts)[::-1]), usage.counts.sum() / 2) + 1)
        for usage in found
    ]
    few, many = int(np.argmin(half)), int(np.argmax(half))
    sizes = [len(usage.experts) for usage in found]
    title = (
        f"Half of the load goes to {half[few]} of {sizes[few]} experts (layer {found[few].layer})"
        + (
            f" to {half[many]} of {sizes[many]} (layer {found[many].layer})"
            if half[few] != half[many]
            else " at least"
        )
        + f"; even loads would need {-(-sizes[few] // 2)}"
        + (f". {counted(unused, 'expert')} got no token" if unused else "")
    )
    longest = max(sizes)
    data = [
        *layer_lines(frame, "rank", "times", hover="%{y:.3g} of an even share", mode="lines"),
        grey_line([1, longest], [1.0, 1.0], "even share"),
    ]
    return Figure(
        "usage_by_rank",
        title,
        (
            "Loads of each layer from the busiest to the idlest expert, as multiples of an even "
            "share; logarithmic. Experts without tokens have no point."
        ),
        ("tokens", "cv", "unused"),
        data,
        base_layout(
            "expert, by load",
            "times an even share",
            xaxis={"dtick": 1} if longest <= WHOLE_UP_TO else {},  # no half experts
            yaxis=plain_log([{"y": frame["times"].to_numpy(float)}]),
        ),
    )


def fold_of(matrices: Sequence[np.ndarray]) -> float:
    """How far the scale of some heatmaps reaches.

    2, 4 or 8, the least that holds all but one cell in fifty.
    """
    ratios = np.concatenate([matrix.ravel() for matrix in matrices])
    ratios = np.maximum(ratios, 1 / np.where(ratios > 0, ratios, np.nan))
    reach = np.nanquantile(ratios, 0.98) if np.isfinite(ratios).any() else FOLD
    return next((fold for fold in (2.0, 4.0) if reach <= fold), FOLD)


def ratio_heatmap(
    times: np.ndarray,
    x: list[str],
    y: list[str],
    axes: tuple[str, str],
    what: str,
    label: str,
    fold: float = FOLD,
) -> Trace:
    """Ratios on a diverging scale of doublings, white at 1, ends at 1/fold and fold.

    Nothing (0) is at the low end.
    """
    end = int(np.log2(fold))
    names = {-3: "⅛", -2: "¼", -1: "½", -0.5: "0.7", 0: "1", 0.5: "1.4", 1: "2", 2: "4", 3: "8"}
    ticks = [-1, -0.5, 0, 0.5, 1] if end == 1 else list(range(-end, end + 1))
    exact = times.size <= EXACT_CELLS  # beyond, the ratios themselves would double the page
    value = "%{customdata}" if exact else "2 to the power of %{z:.2f}"
    with np.errstate(divide="ignore", invalid="ignore"):
        doublings = np.clip(np.log2(times), -end, end)
    return {
        "type": "heatmap",
        "z": doublings,
        **({"customdata": np.round(times, 4)} if exact else {}),
        "x": x,
        "y": y,
        "colorscale": DIVERGING,
        "zmin": -end,
        "zmax": end,
        "xgap": 1 if len(x) <= 32 else 0,
        "ygap": 1 if len(y) <= 32 else 0,
        "colorbar": {
            "title": {"text": label, "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": ticks,
            "ticktext": [
                ("≤ " if tick == -end else "≥ " if tick == end else "") + names[tick] for tick in ticks
            ],
        },
        "hovertemplate": f"{axes[0]} %{{x}}<br>{axes[1]} %{{y}}<br>{value} {what}<extra></extra>",
    }


def load_heatmap(tables: Tables) -> Figure:
    found = usages(tables)
    widest = max(len(usage.experts) for usage in found)
    times = np.full((len(found), widest), np.nan)
    for row, usage in enumerate(found):
        if usage.even:
            times[row, : len(usage.counts)] = usage.counts / usage.even
    layers = np.array([usage.layer for usage in found])
    loud, silent = (times >= 2).any(axis=1), (times == 0).any(axis=1)
    title = (
        (
            f"{capital(named_layers(layers[loud]))} "
            f"{'has an expert' if loud.sum() == 1 else 'have experts'} with twice an even share or "
            "more"
        )
        if loud.any()
        else f"No expert gets twice an even share: at most {number(np.nanmax(times))} times"
    )
    title += (
        f"; unused experts in {named_layers(layers[silent])}" if silent.any() else "; every expert is used"
    )
    trace = ratio_heatmap(
        times,
        [str(expert) for expert in range(widest)],
        [str(layer) for layer in layers],
        ("expert", "layer"),
        "of an even share",
        "times an even share",
        fold_of([times]),
    )
    layout = base_layout("expert", "layer", xaxis=CATEGORIES, yaxis={**CATEGORIES, "autorange": "reversed"})
    return Figure(
        "load_heatmap",
        title,
        (
            "Load of every expert of every layer over an even share, in doublings; white is even, as "
            "random balanced routing gives."
        ),
        ("tokens", "cv"),
        [trace],
        layout,
        height=min(max(300, 120 + 22 * len(found)), 760),
    )


LOAD = [
    FigureSpec("load_heatmap", ("load", "routing_layers"), load_heatmap, wide=True),
    FigureSpec("usage_by_expert", ("load", "routing_layers"), usage_by_expert),
    FigureSpec("usage_by_expert_log", ("load", "routing_layers"), usage_by_expert_log),
    FigureSpec("usage_by_rank", ("load", "routing_layers"), usage_by_rank),
    by_layer("cv_by_layer", ["cv", "gate_weight_cv"], "coefficient of variation", log=True),
    by_layer(
        "max_violation_by_layer", ["max_violation", "gate_weight_max_violation"], "max violation", log=True
    ),
    by_layer(
        "load_entropy_by_layer",
        ["load_entropy_share", "gate_weight_load_entropy_share"],
        "load entropy / log n",
        from_zero=False,
    ),
    by_layer("gini_by_layer", ["gini", "gate_weight_gini"], "Gini coefficient"),
    by_domain("cv_by_domain", "cv", "coefficient of variation", log=True),
]
