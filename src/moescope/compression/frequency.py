"""Prune by frequency: the number of tokens routed to each expert."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moescope.compression.pruning import prune_by
from moescope.types import Array


def frequency(sums: Mapping[str, Array]) -> Array:
    """Number of tokens in X_j."""
    return sums["tokens_BE"].astype(np.float64)


METHOD = prune_by("frequency", frequency, "drops the experts with the fewest routed tokens")
