"""Colour carries signal only: what lies inside a cell's own 95 % null interval is pale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import log_axis
from moescope.plotting.style import BLUE, COOL, PALE, WARM, number
from moescope.tables import Column

BOUND = 1.96  # standard deviations of a cell's own 95 % null interval
FOLD = 3.0  # doublings: a scale of ratios ends there, or a single cell near 0 would leave the others pale


def distance(frame: pd.DataFrame, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """Return how far each value is from chance, and the end of its null interval.

    Both are in doublings for ratios, else in standard deviations where the noise is known.
    """
    value, chance, noise = (frame[f"_{word}"].to_numpy(float) for word in ("value", "chance", "noise"))
    with np.errstate(divide="ignore", invalid="ignore"):
        if column.scale == "ratio":
            # the interval is even in the value, not in doublings; where it reaches 0, nothing lies below it
            end = 1 + BOUND * noise / chance * np.sign(value - chance)
            bound = np.where(end > 0, np.abs(np.log2(np.maximum(end, 1e-3))), np.inf)
            return np.log2(value / chance), np.where(np.isnan(end), 0.0, bound)
        if np.isfinite(noise).any():
            return np.where(value == chance, 0.0, (value - chance) / noise), np.full(len(value), BOUND)
    return value - chance, np.zeros(len(value))


def signal(frame: pd.DataFrame, column: Column) -> tuple[np.ndarray, tuple[float, float], dict[str, Any]]:
    """Return what a cell is coloured by, the ends of the scale, and its ticks.

    0 inside the cell's own null interval, growing from the bound outward. The scale ends at the 99th
    percentile, and no earlier than one doubling or three deviations beyond the bound, so that what chance
    leaves outside is faint. A quantity without a chance level is coloured from its least to its most, on a
    logarithmic scale where its column has one.
    """
    value = frame["_value"].to_numpy(float)
    if column.chance is None or frame["_chance"].isna().all():
        ends = ((column.least, np.nanmin(value)), (column.most, np.nanmax(value)))
        low, high = (float(bound) if isinstance(bound, int | float) else float(end) for bound, end in ends)
        if column.scale == "log" and (axis := log_axis(value)):
            ticks = {"tickvals": np.log10(np.asarray(axis["tickvals"], float)), "ticktext": axis["ticktext"]}
            return np.log10(value), (np.log10(np.nanmin(value)), np.log10(np.nanmax(value))), ticks
        return value, (low, high), {}
    away, bound = distance(frame, column)
    drawn = np.sign(away) * np.maximum(np.abs(np.clip(away, -1e9, 1e9)) - bound, 0)
    seen = np.abs(drawn[np.isfinite(away) & ~frame["_few"].to_numpy(bool)])
    known = bool(frame["_noise"].notna().any())
    ratio = column.scale == "ratio"
    least = 1.0 if ratio else 3.0 if known else 1e-12
    end = max(float(np.percentile(seen, 99)) if len(seen) else 0.0, least)
    end = min(end, FOLD) if ratio else end
    drawn = np.clip(drawn, -end, end)
    beyond = float(np.median(bound[np.isfinite(bound)])) if np.isfinite(bound).any() else 0.0

    def words(place: float) -> str:
        size = abs(place) + beyond
        if not place:
            return column.chance_label
        if ratio:
            return f"≥ {number(2.0**size)} ×" if place > 0 else f"≤ 1/{number(2.0**size)}"
        text = f"{number(size)} sd" if known else number(size)
        return f"≥ {text}" if place > 0 else f"≤ −{text}"

    at = [-end, 0.0, end] if (drawn < 0).any() else [0.0, end]
    return drawn, (at[0], at[-1]), {"tickvals": at, "ticktext": [words(place) for place in at]}


def colours(low: float, high: float, column: Column) -> list[list[Any]]:
    """Return pale at chance, warm above it, cool below; without a chance level from pale to blue."""
    if column.chance is None:
        return BLUE
    warm: list[tuple[float, str]] = [(0.0, PALE), (0.5, WARM[0]), (1.0, WARM[1])]
    if low >= 0:
        return [[place, color] for place, color in warm]
    return [[0.0, COOL[1]], [0.25, COOL[0]], *([0.5 + place / 2, color] for place, color in warm)]
