"""Prune by EAN, expert activation norm (Jaiswal et al. 2025, arXiv:2504.05586)."""

from __future__ import annotations

from collections.abc import Mapping

from moescope.compression.pruning import prune_by
from moescope.types import Array


def ean(sums: Mapping[str, Array]) -> Array:
    """Sum over X_j of ||f_j||."""
    return sums["norm_BE"]


METHOD = prune_by("ean", ean, "drops the experts with the smallest sum of output norms")
