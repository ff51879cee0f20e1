"""Figures of load: tokens per expert of one layer, of all layers, and how uneven they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import (
    CATEGORICAL,
    CATEGORIES,
    RANDOM,
    base_layout,
    capital,
    counted,
    grey_line,
    layer_lines,
    lines_or_map,
    named_layers,
    number,
    ratio_heatmap,
    ratio_range,
    values_of,
)
from moescope.routing.figures_metrics import by_domain, by_layer
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

ALL_TICKS_UP_TO = 10  # experts that each have a tick


class Usage(NamedTuple):
    """One layer's tokens per expert, the even share, and two standard deviations of random routing."""

    layer: int
    experts: np.ndarray
    counts: np.ndarray
    even: float
    stray: float

    @property
    def times(self) -> np.ndarray:
        """Loads as multiples of the even share."""
        return self.counts / self.even if self.even else self.counts * 0.0


def total_load(tables: Tables) -> pd.DataFrame:
    """Tokens of each layer and expert, all domains together."""
    return tables["load"].groupby(["layer", "expert"], as_index=False)["tokens"].sum()


def tokens_by_layer(tables: Tables) -> pd.Series:
    """Number of tokens of each layer, all domains together."""
    rows = tables["routing_layers"]
    return rows[rows["domain"] == ""].groupby("layer")["tokens"].max()


def usages(tables: Tables) -> list[Usage]:
    """The load of every layer, with the spread of random balanced routing."""
    tokens, layers = tokens_by_layer(tables), []
    for layer, loads in total_load(tables).groupby("layer", sort=True):
        counts = loads.sort_values("expert")["tokens"].to_numpy()
        even = float(counts.sum()) / len(loads)
        share = even / max(tokens[layer], 1)
        stray = 2 * np.sqrt(even * max(1 - share, 0))
        layers.append(Usage(int(layer), np.sort(loads["expert"].to_numpy()), counts, even, stray))
    return layers


def with_enough_tokens(layers: list[Usage]) -> list[Usage]:
    """Layers with at least a tenth of the median layer's choices, as `comparable` of metrics."""
    least = float(np.median([usage.even for usage in layers])) / 10
    return [usage for usage in layers if usage.even >= least]


def busiest(layers: list[Usage]) -> Usage:
    """The layer with the busiest expert, of those with enough tokens."""
    return max(with_enough_tokens(layers), key=lambda usage: float(usage.times.max()))


def usage_caption(usage: Usage) -> str:
    if not usage.even:
        return f"Layer {usage.layer}: no token was routed."
    most, least = int(usage.counts.argmax()), int(usage.counts.argmin())
    return (
        f"Layer {usage.layer}: expert {usage.experts[most]} gets {number(usage.times[most])} times an even "
        f"share, expert {usage.experts[least]} gets {number(usage.times[least])} "
        f"(±{number(100 * usage.stray / usage.even)} % at chance)."
    )


def spread_caption(usage: Usage, ratio_at_chance: float) -> str:
    unused = int((usage.counts == 0).sum())
    if unused or not usage.even:
        return f"Layer {usage.layer}: {unused} of {len(usage.counts)} experts got no token and have no mark."
    chance = f" ({RANDOM}: about {number(1 / ratio_at_chance)})" if ratio_at_chance > 0 else ""
    return (
        f"Layer {usage.layer}: the busiest expert has {number(usage.counts.max() / usage.counts.min())} "
        f"times the load of the least used{chance}."
    )


def chance_band(usage: Usage) -> list[Trace]:
    """Three grey lines: the even share, and two standard deviations of random routing around it."""
    ends = [usage.experts[0] - 0.5, usage.experts[-1] + 0.5]
    lines = [grey_line(ends, [usage.even] * 2, f"even share (±2 sd of {RANDOM})")]
    for sign in (-1, 1):
        edge = grey_line(ends, [max(usage.even + sign * usage.stray, 0.0)] * 2, "±2 sd", "dot")
        edge["line"]["width"] = 1
        lines.append({**edge, "showlegend": False})
    return lines


def usage_trace(usage: Usage, counts: np.ndarray, name: str, color: str, **more: object) -> Trace:
    return {
        "type": "bar",
        "name": name,
        "x": usage.experts,
        "y": counts,
        "customdata": counts / usage.even if usage.even else counts * 0.0,
        "marker": {"color": color},
        "hovertemplate": (
            f"expert %{{x}}<br>{name} %{{y:,}}<br>%{{customdata:.3g}} of an even share<extra></extra>"
        ),
        **more,
    }


def usage_figure(
    name: str,
    layers: list[Usage],
    data: list[Trace],
    yaxis: dict[str, object],
    mode: str,
    captions: list[str],
) -> Figure:
    """One layer at a time, starting with the most uneven that has enough tokens."""
    most = busiest(layers)
    start = next(place for place, usage in enumerate(layers) if usage is most)
    scale = " (logarithmic)" if yaxis.get("type") == "log" else ""
    return Figure(
        name,
        f"Tokens per expert{scale}",
        captions[start],
        ("tokens", "max_over_mean", "routing_layers.chance"),
        data,
        base_layout("expert", f"tokens{scale}", yaxis=yaxis, barmode=mode, bargap=0.15),
        Slider(
            "layer",
            [str(usage.layer) for usage in layers],
            start,
            len(data) // len(layers),
            captions=captions,
        ),
        360,
        "Dashed: an even share; dotted: two standard deviations of balanced random routing.",
    )


def usage_by_expert(tables: Tables) -> Figure:
    """Tokens per expert as bars stacked by domain, one layer at a time."""
    load, layers = tables["load"], usages(tables)
    domains = sorted(load["domain"].unique())
    stacked = domains if 1 < len(domains) <= len(CATEGORICAL) else [None]
    data: list[Trace] = []
    for usage in layers:
        rows = load[load["layer"] == usage.layer]
        for index, domain in enumerate(stacked):
            mine = rows if domain is None else rows[rows["domain"] == domain]
            counts = mine.groupby("expert")["tokens"].sum().reindex(usage.experts, fill_value=0)
            name = "tokens" if domain is None else str(domain)
            data.append(usage_trace(usage, counts.to_numpy(), name, CATEGORICAL[index]))
        data += chance_band(usage)
    captions = [usage_caption(usage) for usage in layers]
    return usage_figure("usage_by_expert", layers, data, {"rangemode": "tozero"}, "stack", captions)


def usage_by_expert_log(tables: Tables) -> Figure:
    """Tokens per expert on a logarithmic axis, one layer at a time; unused experts have no mark."""
    layers = usages(tables)
    marks = {
        "type": "scatter",
        "mode": "markers",
        "marker": {"color": CATEGORICAL[0], "size": 8},
    }
    data: list[Trace] = []
    for usage in layers:
        counts = np.where(usage.counts > 0, usage.counts, np.nan)
        data += [usage_trace(usage, counts, "tokens", CATEGORICAL[0], **marks), *chance_band(usage)]
    ratios = values_of(tables, "min_max_ratio").set_index("layer")["chance"]
    captions = [spread_caption(usage, float(ratios.get(usage.layer, np.nan))) for usage in layers]
    yaxis = plain_log([trace for trace in data if trace["name"] != "±2 sd"]) or {"rangemode": "tozero"}
    return usage_figure("usage_by_expert_log", layers, data, yaxis, "overlay", captions)


def usage_by_rank(tables: Tables) -> Figure:
    """Loads of every layer from the busiest to the least used expert, as multiples of an even share."""
    layers = usages(tables)
    frames, half = [], []  # half: how many experts get half of the layer's load
    for usage in layers:
        ordered = np.sort(usage.counts)[::-1]
        half.append(int(np.searchsorted(np.cumsum(ordered), usage.counts.sum() / 2) + 1))
        times = ordered / (usage.even or 1.0)
        ranks = np.arange(1, len(ordered) + 1)
        frames.append(
            pd.DataFrame({"layer": usage.layer, "rank": ranks, "times": np.where(times > 0, times, np.nan)})
        )
    frame = pd.concat(frames)
    unused = sum(int((usage.counts == 0).sum()) for usage in layers)
    places = [place for place, usage in enumerate(layers) if usage in with_enough_tokens(layers)]
    few, many = min(places, key=lambda place: half[place]), max(places, key=lambda place: half[place])
    sizes = [len(usage.experts) for usage in layers]
    most = (
        f" to {half[many]} of {sizes[many]} (layer {layers[many].layer})" if half[few] != half[many] else ""
    )
    caption = (
        f"Half of the load goes to {half[few]} of {sizes[few]} experts (layer {layers[few].layer}){most}; "
        f"even loads: {-(-sizes[few] // 2)}."
    ) + (f" {counted(unused, 'expert')} got no token." if unused else "")
    data = [
        *layer_lines(frame, "rank", "times", hover="%{y:.3g} of an even share", mode="lines"),
        grey_line([1, max(sizes)], [1.0, 1.0], "even share"),
    ]
    layout = base_layout(
        "expert, by load",
        "times an even share",
        xaxis={"dtick": 1} if max(sizes) <= ALL_TICKS_UP_TO else {},
        yaxis=plain_log([{"y": frame["times"].to_numpy(float)}]),
    )
    return lines_or_map(
        Figure("usage_by_rank", "Load by rank", caption, ("tokens", "cv", "unused"), data, layout)
    )


def load_heatmap(tables: Tables) -> Figure:
    """Load of every expert of every layer as a multiple of an even share."""
    layers = usages(tables)
    times = np.full((len(layers), max(len(usage.experts) for usage in layers)), np.nan)
    for row, usage in enumerate(layers):
        if usage.even:
            times[row, : len(usage.counts)] = usage.times
    numbers = np.array([usage.layer for usage in layers])
    compared = [usage for usage in with_enough_tokens(layers) if usage.even]
    enough = np.isin(numbers, [usage.layer for usage in compared])
    most = np.nanmax(times[enough], initial=0.0)
    doubled, silent = (times >= 2).any(axis=1) & enough, (times == 0).any(axis=1) & enough
    caption = (
        f"{capital(named_layers(numbers[doubled]))} "
        f"{'has an expert' if doubled.sum() == 1 else 'have experts'} with twice an even share or more"
        if doubled.any()
        else f"No expert gets twice an even share (at most {number(most)} times)"
    ) + (f"; unused experts in {named_layers(numbers[silent])}" if silent.any() else "")
    stray = max((usage.stray / usage.even for usage in compared), default=np.nan)
    caption += f" ({RANDOM}: 1 ± {number(stray)})."
    trace = ratio_heatmap(
        times,
        range(times.shape[1]),
        numbers,
        ("expert", "layer"),
        "of an even share",
        "times an even share",
        ratio_range([times]),
    )
    layout = base_layout("expert", "layer", xaxis=CATEGORIES, yaxis={**CATEGORIES, "autorange": "reversed"})
    height = min(max(300, 120 + 22 * len(layers)), 760)
    return Figure(
        "load_heatmap", "Load per layer and expert", caption, ("tokens", "cv"), [trace], layout, height=height
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
