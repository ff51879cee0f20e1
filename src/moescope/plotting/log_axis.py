"""Logarithmic axes: ticks written as plain numbers, error bars cut where the axis ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from moescope.plotting.style import Trace, number

LEAST = 3  # error bars are cut at the smallest drawn value divided by this


def plain_log(data: list[Trace]) -> dict[str, object] | None:
    """A logarithmic axis over all values and error bars; None if one is not positive."""
    return log_axis(np.concatenate([reach(trace) for trace in data]))


def log_axis(values: Iterable[float]) -> dict[str, object] | None:
    """A logarithmic axis with ticks at 1, 2 and 5 (over three decades: at 1); None if one is not positive.

    Ticks are evenly spaced where fewer than two of those lie among the values.
    """
    drawn = np.asarray(values, float)
    drawn = drawn[np.isfinite(drawn)]
    if not drawn.size or drawn.min() <= 0:
        return None
    low, high = np.log10(drawn.min()), np.log10(drawn.max())
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    exponents = range(int(np.floor(low)) - 1, int(np.ceil(high)) + 2)
    ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
    ticks = [tick for tick in ticks if low - 0.35 <= np.log10(tick) <= high + 0.35]
    if sum(low <= np.log10(tick) <= high for tick in ticks) < 2 and high > low:
        ticks = even_ticks(float(drawn.min()), float(drawn.max()))
    return {"type": "log", "tickvals": ticks, "ticktext": [number(tick) for tick in ticks]}


def log_colours(heatmap: Trace) -> Trace:
    """Return a map with colours on a logarithmic scale; as it is if one value is not positive."""
    values = np.asarray(heatmap["z"], float)
    axis = log_axis(values.ravel())
    if axis is None:
        return heatmap
    ticks = {"tickvals": np.log10(np.asarray(axis["tickvals"], float)), "ticktext": axis["ticktext"]}
    return {
        **heatmap,
        "z": np.log10(values),
        "zmin": np.log10(heatmap["zmin"]),
        "zmax": np.log10(heatmap["zmax"]),
        "colorbar": {**heatmap["colorbar"], **ticks},
        "customdata": values,
        "hovertemplate": heatmap["hovertemplate"].replace("%{z:", "%{customdata:"),
    }


def even_ticks(low: float, high: float) -> list[float]:
    """Three to eight multiples of 1, 2 or 5 times a power of ten, from low to high."""
    power = 10.0 ** np.floor(np.log10((high - low) / 3))
    step = max(times * power for times in (1, 2, 5) if times * power <= (high - low) / 3)
    return [multiple * step for multiple in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]


def reach(trace: Trace) -> np.ndarray:
    """All y values of a trace: its points and the ends of its error bars."""
    y = np.asarray(trace["y"], float)
    whiskers: dict[str, Any] = trace.get("error_y") or {}
    if not whiskers:
        return y
    return np.concatenate([y, y - whiskers["arrayminus"], y + whiskers["array"]])


def cut_whiskers(data: list[Trace]) -> tuple[list[Trace], float | None]:
    """The traces with error bars cut to fit a logarithmic axis, and the value where any was cut.

    An interval that reaches 0 would leave such an axis, or stretch it until nothing else is visible. So would
    an estimate of 0, a point without a line: it stands where the axis ends.
    """
    lines = [trace for trace in data if trace.get("mode") != "markers"]
    points = np.concatenate([np.asarray(trace["y"], float) for trace in lines])
    points = points[np.isfinite(points) & (points > 0)]
    if not points.size:
        return data, None
    bottom, cut, traces = float(points.min()) / LEAST, False, []
    for trace in data:
        if whiskers := trace.get("error_y"):
            y, minus = np.asarray(trace["y"], float), np.asarray(whiskers["arrayminus"], float)
            placed = np.maximum(y, bottom) if trace.get("mode") == "markers" else y
            plus = np.maximum(y + np.asarray(whiskers["array"], float) - placed, 0)
            beyond = (placed > 0) & (y - minus < bottom)
            cut = cut or bool(beyond.any())
            ends = {"array": plus, "arrayminus": np.where(beyond, placed - bottom, minus)}
            trace = {**trace, "y": placed, "error_y": {**whiskers, **ends}}
        traces.append(trace)
    return traces, bottom if cut else None


def cut_words(bottom: float | None) -> str:
    return "" if bottom is None else f" Error bars are cut at {number(bottom)}."
