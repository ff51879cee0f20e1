"""Logarithmic axes with ticks written as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moescope.plotting.style import number


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


def even_ticks(low: float, high: float) -> list[float]:
    """Three to eight multiples of 1, 2 or 5 times a power of ten, from low to high."""
    power = 10.0 ** np.floor(np.log10((high - low) / 3))
    step = max(times * power for times in (1, 2, 5) if times * power <= (high - low) / 3)
    return [multiple * step for multiple in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]
