"""How much each member counts in a merged expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moescope.compression.grouping import Grouping
from moescope.errors import BadInput, unknown_name

Array = npt.NDArray[np.float64]
MERGE_WEIGHTS = ("usage", "uniform", "dominant", "saliency")
DOMINANT_SHARE = 0.75  # of the dominant member, where it is to outweigh the others


def merge_weights(
    grouping: Grouping, kind: str, usage_E: Array | None = None, saliency_E: Array | None = None
) -> tuple[tuple[float, ...], ...]:
    """A weight for every member beside the group it belongs to; each group's sum to 1.

    usage: in proportion to the tokens each was chosen for (Li et al. 2024, M-SMoE); uniform: alike; dominant:
    three quarters for the
    dominant member, the rest alike; saliency: in proportion to a pruning score. Where a group's numbers are
    all zero its members count alike.
    """
    if kind not in MERGE_WEIGHTS:
        raise unknown_name("merge weights", kind, list(MERGE_WEIGHTS))
    numbers = {"usage": usage_E, "saliency": saliency_E}.get(kind, np.ones(grouping.n_experts))
    if numbers is None:
        raise BadInput(f"merge weights by {kind} need text; give --text, or choose uniform weights")
    return tuple(
        dominant_heavy(group, dominant) if kind == "dominant" else proportional(numbers[list(group)])
        for group, dominant in zip(grouping.groups, grouping.dominants, strict=True)
    )


def proportional(numbers: Sequence[float] | Array) -> tuple[float, ...]:
    values = np.asarray(numbers, dtype=float)
    total = values.sum()
    shares = values / total if total > 0 else np.full(len(values), 1 / len(values))
    return tuple(float(share) for share in shares)


def dominant_heavy(group: Sequence[int], dominant: int) -> tuple[float, ...]:
    others = len(group) - 1
    if not others:
        return (1.0,)
    return tuple(DOMINANT_SHARE if expert == dominant else (1 - DOMINANT_SHARE) / others for expert in group)
