"""Prune by gate weight: the sum of each expert's gates."""

from __future__ import annotations

from collections.abc import Mapping

from moescope.compression.pruning import prune_by
from moescope.types import Array


def gate_weight(sums: Mapping[str, Array]) -> Array:
    """Sum of g_j over X_j."""
    return sums["gate_sums_BE"]


METHOD = prune_by("gate_weight", gate_weight, "drops the experts with the smallest sum of gate weights")
