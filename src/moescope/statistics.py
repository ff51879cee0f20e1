"""Resampling shared by several subjects: intervals over documents, never over tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

from moescope.types import Array

BUCKETS = 256  # documents are hashed into this many groups, so that memory does not grow with their number
FEWEST_DOCUMENTS = 20
CONFIDENCE = 0.95
NOT_AVAILABLE = (float("nan"), float("nan"))


def jackknife_interval(
    parts: Array, statistic: Callable[[Array], Array], documents: int, centre: float | None = None
) -> tuple[float, float]:
    """Return a 95 % interval of statistic(sum of parts) from leaving out one part at a time.

    Variance is (B - 1)/B times the sum of squared deviations of the B leave-one-out values; the quantile is
    Student's. Not available (NaN) under 20 documents.

    Parameters
    ----------
    parts : array
        Groups of documents along the first axis.
    statistic : callable
        Must work over leading axes.
    documents : int
        Number of documents in all groups together.
    centre : float, optional
        Replaces the statistic's value where that is corrected for bias.
    """
    if documents < FEWEST_DOCUMENTS:  # first of all: Monitor asks for hundreds of unavailable intervals
        return NOT_AVAILABLE
    total = parts.sum(0)
    used = parts.reshape(len(parts), -1).any(1)
    n = int(used.sum())
    if n < 2:
        return NOT_AVAILABLE
    left_out = statistic(total[None] - parts[used])
    spread = np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1) * spread)
    value = float(statistic(total[None])[0]) if centre is None else centre
    return value - half, value + half
