"""The house style: one palette used the same way everywhere, and what a figure is.

Layers are sequential, experts and readings categorical, chance and nulls grey. A figure is plain data for
plotly.js, so
drawing needs no plotting library here; text and grid colours are left to the page, which knows whether it is
dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

Tables = dict[str, pd.DataFrame]
Trace = dict[str, Any]

GREY = "#8A9099"
CATEGORICAL = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8C62C7",
    "#A3A500",
)  # Okabe-Ito, no black
SEQUENTIAL = ("#9050B8", "#4C6FC4", "#2A8FA8", "#2FA778", "#7FB03A", "#C9A800")
HEAT = [[0.0, "#440154"], [0.25, "#3B528B"], [0.5, "#21918C"], [0.75, "#5EC962"], [1.0, "#FDE725"]]  # viridis
DIVERGING = [[0.0, "#2166AC"], [0.25, "#92C5DE"], [0.5, "#F7F7F7"], [0.75, "#F4A582"], [1.0, "#B2182B"]]
LEGEND_UP_TO = 10
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Figure:
    """Something to look at.

    Traces and layout for plotly.js, a title made from the data, and where its words are defined.
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]  # the glossary entries it needs
    data: list[Trace]
    layout: dict[str, Any]
    slider: Slider | None = None
    height: int = 340


@dataclass(frozen=True)
class Slider:
    """A choice that a reader slides through: of its traces, `per_value` in a row belong to each value."""

    label: str
    values: list[str]
    start: int = 0
    per_value: int = 1
    titles: list[str] = field(
        default_factory=list
    )  # the figure's title at each value; the first shown is the figure's own
    orders: list[list[str]] = field(default_factory=list)  # another order of the categories at each value
    captions: list[str] = field(default_factory=list)  # the figure's caption at each value, where it changes


@dataclass(frozen=True)
class FigureSpec:
    """A figure that can be drawn.

    Its name, the tables it reads, and the function from those tables to the figure.
    """

    name: str
    needs: tuple[str, ...]
    draw: Callable[[Tables], Figure]
    wide: bool = False
    metrics: tuple[str, ...] = ()  # routing metrics it cannot do without


def layer_colors(layers: Sequence[int]) -> dict[int, str]:
    """Layer -> colour, early to late along one sequence."""
    span = max(len(layers) - 1, 1)
    return {layer: blend(SEQUENTIAL, position / span) for position, layer in enumerate(layers)}


def blend(anchors: Sequence[str], position: float) -> str:
    place = min(max(position, 0.0), 1.0) * (len(anchors) - 1)
    low = min(int(place), len(anchors) - 2)
    parts = [
        round(
            (1 - place + low) * int(anchors[low][i : i + 2], 16)
            + (place - low) * int(anchors[low + 1][i : i + 2], 16)
        )
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02X}" for part in parts)


def category_style(index: int) -> dict[str, Any]:
    """Colour, and once the colours are used up the dash, of the index-th category."""
    return {
        "color": CATEGORICAL[index % len(CATEGORICAL)],
        "dash": DASHES[index // len(CATEGORICAL) % len(DASHES)],
    }


def base_layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for key, value in more.items():
        layout[key] = {**layout[key], **value} if key in layout and isinstance(value, dict) else value
    return layout


def k_axis(ks: Iterable[int]) -> dict[str, Any]:
    """A logarithmic axis of k with the ladder's own rungs, every other one named where they are many."""
    rungs = sorted(set(ks))
    powers = [k for k in rungs if k & (k - 1) == 0] or rungs
    shown = powers if len(powers) <= 8 else powers[::2]
    return {"type": "log", "tickvals": shown, "ticktext": [f"{k:,}" for k in shown]}


def grey_line(x: Any, y: Any, name: str, dash: str = "dash") -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "line": {"color": GREY, "width": 1.5, "dash": dash},
        "hovertemplate": f"{name}: %{{y:.4g}}<extra></extra>",
    }


def layer_lines(
    frame: pd.DataFrame,
    x: str,
    y: str,
    *,
    order: str | None = None,
    hover: str = "%{y:.4g}",
    mode: str = "lines+markers",
) -> list[Trace]:
    """One line a layer, along `order` (x unless given).

    Named in a legend up to ten layers, by a colour bar beyond.
    """
    layers = sorted(frame["layer"].unique())
    colors = layer_colors(layers)
    many = len(layers) > LEGEND_UP_TO
    traces: list[Trace] = []
    for layer, rows in frame.groupby("layer", sort=True):
        ordered = rows.sort_values(order or x)
        traces.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": f"layer {layer}",
                "x": ordered[x].to_numpy(),
                "y": ordered[y].to_numpy(),
                "customdata": ordered[order or x].to_numpy(),
                "line": {"color": colors[layer], "width": 2},
                "marker": {"size": 5},
                "showlegend": not many,
                "hovertemplate": (
                    f"layer {layer}<br>{(order or x).replace('_', ' ')} %{{customdata}}<br>"
                    f"{hover}<extra></extra>"
                ),
            }
        )
    if many:
        traces.append(layer_colorbar(layers))
    return traces


def layer_colorbar(layers: Sequence[int]) -> Trace:
    """An invisible trace whose colour bar says which colour is which layer.

    The bar is half a layer longer at both ends, so that the last layer's name stays clear of the title above
    it.
    """
    first, last = float(min(layers)), float(max(layers))
    end = 0.5 / (last - first + 1)
    inner = [[end + (1 - 2 * end) * position / 5, color] for position, color in enumerate(SEQUENTIAL)]
    scale = [[0.0, SEQUENTIAL[0]], *inner, [1.0, SEQUENTIAL[-1]]]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [None],
        "y": [None],
        "showlegend": False,
        "hoverinfo": "skip",
        "marker": {
            "colorscale": scale,
            "cmin": first - 0.5,
            "cmax": last + 0.5,
            "color": [first],
            "showscale": True,
            "colorbar": {
                "title": {"text": "layer", "side": "top"},
                "thickness": 12,
                "outlinewidth": 0,
                "tickvals": some_of(layers),
            },
        },
    }


def some_of(layers: Sequence[int], most: int = 8) -> list[int]:
    """Layers to be named on a scale: all, or every second, third, ... from the first."""
    ordered = sorted(int(layer) for layer in layers)
    return ordered[:: -(-len(ordered) // most)]


def expert_lines(x: Sequence[float], y_EX: np.ndarray, experts: Sequence[int], what: str) -> list[Trace]:
    """One line an expert.

    Categorical colours up to 16, beyond that one grey-free tangle with the mean drawn over it.
    """
    x = list(x)
    if len(experts) <= 16:
        return [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"expert {expert}",
                "x": x,
                "y": row,
                "line": {**category_style(index), "width": 1.8},
                "marker": {"size": 4},
                "hovertemplate": f"expert {expert}<br>{what} %{{x}}<br>%{{y:.4g}}<extra></extra>",
            }
            for index, (expert, row) in enumerate(zip(experts, y_EX, strict=True))
        ]
    gap = np.full((len(experts), 1), np.nan)
    tangled = {
        "type": "scatter",
        "mode": "lines",
        "name": "each expert",
        "hoverinfo": "skip",
        "opacity": 0.35,
        "x": np.tile([*x, np.nan], len(experts)),
        "y": np.hstack([y_EX, gap]).ravel(),
        "line": {"color": CATEGORICAL[5], "width": 0.8},
    }
    mean = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "mean",
        "x": x,
        "y": np.nanmean(y_EX, axis=0),
        "line": {"color": CATEGORICAL[0], "width": 2.5},
        "hovertemplate": f"mean<br>{what} %{{x}}<br>%{{y:.4g}}<extra></extra>",
    }
    return [tangled, mean]


def heatmap(
    z: np.ndarray,
    x: Sequence[Any],
    y: Sequence[Any],
    *,
    diverging: bool = False,
    bound: float | None = None,
    low: float | None = None,
    high: float | None = None,
    label: str = "",
    axes: tuple[str, str] = ("x", "y"),
    text: bool = False,
) -> Trace:
    """A heatmap; diverging ones are symmetric about zero."""
    if diverging:
        edge = (
            bound
            if bound is not None
            else max(float(np.nanmax(np.abs(z))) if np.isfinite(z).any() else 0.0, 1e-12)
        )
        low, high = -edge, edge
    trace: Trace = {
        "type": "heatmap",
        "z": np.asarray(z, float),
        "x": [str(v) for v in x],
        "y": [str(v) for v in y],
        "colorscale": DIVERGING if diverging else HEAT,
        "zmin": low,
        "zmax": high,
        "xgap": 1 if len(x) <= 32 else 0,
        "ygap": 1 if len(y) <= 32 else 0,
        "colorbar": {"title": {"text": label, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": f"{axes[0]} %{{x}}<br>{axes[1]} %{{y}}<br>{label} %{{z:.4g}}<extra></extra>",
    }
    if text and len(x) <= 16:
        trace["texttemplate"] = "%{z:.2f}"
        trace["textfont"] = {"size": 10}
    return {key: value for key, value in trace.items() if value is not None}


def named_layers(layers: Iterable[int]) -> str:
    """ "layer 3", "layers 0 and 4", "layers 9 to 30", "layers 0, 2 and 5 to 9": for sentences."""
    values = sorted({int(layer) for layer in layers})
    if not values:
        return "no layer"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = []
    for run in runs:
        parts.extend([f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(value) for value in run])
    noun = "layer" if len(values) == 1 else "layers"
    return f"{noun} {listed(parts)}"


def counted(count: int, noun: str) -> str:
    """ "1 pair", "3 pairs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def from_to(low: float, low_place: str, high: float, high_place: str) -> str:
    """ "runs from 3 (layer 0) to 9 (layer 4)", or "is 3 throughout" where both print the same."""
    if number(low) == number(high):
        return f"is {number(low)} throughout"
    return f"runs from {number(low)} ({low_place}) to {number(high)} ({high_place})"


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def number(value: float) -> str:
    """A number as people write it: three significant digits, no exponent in between."""
    if value is None or not math.isfinite(value):
        return "undefined"
    if value < 0:
        return f"−{number(-value)}"
    if value != 0 and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPT)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def byte_size(count: float) -> str:
    """ "830 bytes", "1.2 kB", "3.4 GB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{number(count / unit)} {name}"
    return counted(int(count), "byte")


def reference_k(ks: Iterable[int]) -> int:
    """k = 128 where it exists, else the median of the ladder: where experts are compared at one k."""
    rungs = sorted(set(ks))
    return 128 if 128 in rungs else rungs[len(rungs) // 2]
