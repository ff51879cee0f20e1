"""Figure building blocks: figure records, palettes, axes, common traces and words.

Layers take sequential colours, experts and views categorical ones, chance levels and nulls grey. A figure is
plain data for plotly.js; text and grid colours are left to the page, which knows whether it is dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from moescope.arguments import consecutive
from moescope.verb import Tables, Trace

GREY = "#8A9099"
# Okabe-Ito; dark red stands for black, which a dark page hides. Views and domains by place, experts by number
CATEGORICAL = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#8A2256")
ALIKE = 4  # categories that colour alone tells apart; from the next one on dash, symbol or pattern vary too
SEQUENTIAL = ("#9050B8", "#4C6FC4", "#2A8FA8", "#2FA778", "#7FB03A", "#C9A800")
PALE, WARM, COOL = "#F3F4F6", ("#F4A582", "#B2182B"), ("#92C5DE", "#2166AC")  # chance, above it, below it
BLUE: list[list[Any]] = [[0.0, PALE], [1.0, "#0B2F5B"]]  # of a quantity without a chance level
LINES_UP_TO = 12  # more lines are drawn as a map
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DASHES = ("solid", "dash", "dot", "dashdot")
CATEGORIES: dict[str, object] = {"type": "category", "nticks": 16, "tickangle": 0}
RANDOM = "random routing"


def values_of(tables: Tables, metric: str, domain: str = "") -> pd.DataFrame:
    """Rows of `routing_layers` of one metric, one per layer, without undefined values.

    The empty domain is all domains together.
    """
    rows = tables["routing_layers"]
    rows = rows[(rows["metric"] == metric) & (rows["domain"] == domain) & rows["value"].notna()]
    return rows.sort_values("layer")


def layer_colors(layers: Sequence[int]) -> dict[int, str]:
    """Layer -> colour, early to late along one sequence."""
    span = max(len(layers) - 1, 1)
    return {layer: blend(SEQUENTIAL, position / span) for position, layer in enumerate(layers)}


def blend(anchors: Sequence[str], position: float) -> str:
    place = min(max(position, 0.0), 1.0) * (len(anchors) - 1)
    low = min(int(place), len(anchors) - 2)
    ends = [[int(anchors[at][i : i + 2], 16) for i in (1, 3, 5)] for at in (low, low + 1)]
    parts = [round((1 - place + low) * a + (place - low) * b) for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{part:02X}" for part in parts)


def category_style(index: int) -> dict[str, Any]:
    """Colour and dash of the index-th category; the dash changes from the fifth on, with every four."""
    return {"color": CATEGORICAL[index % len(CATEGORICAL)], "dash": DASHES[index // ALIKE % len(DASHES)]}


def base_layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": x}, "zeroline": False},
        "yaxis": {"title": {"text": y}},
    }
    for key, value in more.items():
        layout[key] = {**layout[key], **value} if key in layout and isinstance(value, dict) else value
    if layout["yaxis"].get("automargin"):  # names of any length, and the title beside them
        layout["yaxis"]["title"] = {"text": y, "standoff": 8}
    return layout


def k_axis(ks: Iterable[int]) -> dict[str, Any]:
    """A logarithmic axis with ticks at the k grid's powers of two, every other one where they are many."""
    grid = sorted(set(ks))
    powers = [k for k in grid if k & (k - 1) == 0] or grid
    shown = powers if len(powers) <= 8 else powers[::2]
    return {"type": "log", "tickvals": shown, "ticktext": [f"{k:,}" for k in shown]}


def layer_axis(layers: Iterable[int]) -> dict[str, object]:
    """An axis with ticks at integer layers, at most 16."""
    values = [int(layer) for layer in layers]
    values = values[:: max(1, -(-len(values) // 16))]
    return {"tickvals": values, "ticktext": [str(value) for value in values]}


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


def layer_colorbar(layers: Sequence[int]) -> Trace:
    """An invisible trace whose colour bar maps colours to layers.

    The bar is half a layer longer at both ends, so that the last label stays clear of the bar's title.
    """
    ordered = sorted(int(layer) for layer in layers)
    first, last = ordered[0], ordered[-1]
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
                "tickvals": ordered[:: -(-len(ordered) // 8)],  # at most eight
            },
        },
    }


def named_layers(layers: Iterable[int]) -> str:
    """ "layer 3", "layers 0 and 4", "layers 9 to 30", "layers 0, 2 and 5 to 9"."""
    values = sorted({int(layer) for layer in layers})
    if not values:
        return "no layer"
    parts: list[str] = []
    for first, last in consecutive(values):
        parts += [f"{first} to {last}"] if last > first + 1 else map(str, range(first, last + 1))
    return f"{'layer' if len(values) == 1 else 'layers'} {listed(parts)}"


def counted(count: int, noun: str) -> str:
    """ "1 pair", "3 pairs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def span(values: pd.Series) -> str:
    """ "0.2", or "0.2 to 0.9" where values differ."""
    low, high = number(values.min()), number(values.max())
    return low if low == high else f"{low} to {high}"


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
    """A number with three significant digits, without exponent from 0.001 up."""
    if value is None or not math.isfinite(value):
        return "undefined"
    if value < 0:
        return f"−{number(-value)}"
    if value != 0 and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPT)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def chance_words(level: float, name: str = "chance") -> str:
    """ " (chance: 0.125)"; empty where the level was not recorded, as in older runs."""
    return f" ({name}: {number(level)})" if math.isfinite(level) else ""


def byte_size(count: float) -> str:
    """ "830 bytes", "1.2 kB", "3.4 GB"; "undefined" of a damaged table's infinity."""
    if not math.isfinite(count):
        return "undefined"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{number(count / unit)} {name}"
    return counted(int(count), "byte")
