"""Intervals over documents, never over tokens: leave out one document (or one group of them) at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

from moescope.types import Array

BUCKETS = 256  # documents are hashed into so many groups, so that memory does not grow with their number
FEWEST_DOCUMENTS = 20
CONFIDENCE = 0.95
NOT_AVAILABLE = (float("nan"), float("nan"))


def interval(
    parts: Array, statistic: Callable[[Array], Array], documents: int, centre: float | None = None
) -> tuple[float, float]:
    """A 95 % interval of statistic(sum of parts) from leaving out one part at a time; parts stand along the
    first axis.

    Variance is (B - 1)/B times the sum of squared deviations of the B values left; the quantile is Student's.
    Not available
    under 20 documents. `statistic` must work over leading axes; `centre` replaces its value where that is
    corrected for bias.
    """
    if (
        documents < FEWEST_DOCUMENTS
    ):  # before any sum is made: a Monitor asks for hundreds of intervals that are not available
        return NOT_AVAILABLE
    whole = parts.sum(0)
    used = parts.reshape(len(parts), -1).any(1)
    n = int(used.sum())
    if n < 2:
        return NOT_AVAILABLE
    left_out = statistic(whole[None] - parts[used])
    spread = np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1) * spread)
    value = float(statistic(whole[None])[0]) if centre is None else centre
    return value - reach, value + reach
