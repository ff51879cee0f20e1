"""Prune by REAP, router-weighted expert activation (Lasby et al. 2025, arXiv:2510.13999)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moescope.compression.pruning import prune_by
from moescope.types import Array


def reap(sums: Mapping[str, Array]) -> Array:
    """Mean over X_j of g_j ||f_j||, 0 where X_j is empty.

    A mean over few tokens is imprecise: see the interval of its rank (rank_low, rank_high).
    """
    tokens = sums["tokens_BE"]
    return np.where(tokens > 0, sums["gated_norm_BE"] / np.maximum(tokens, 1), 0.0)


METHOD = prune_by("reap", reap, "drops the experts with the smallest mean of gate weight times output norm")
