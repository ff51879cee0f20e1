"""Prune at random: the control of the pruning methods."""

from __future__ import annotations

import numpy as np

from moescope.compression.method import Evidence, Method, Proposal
from moescope.compression.pruning import prune
from moescope.families import MoeCheckpoint
from moescope.types import Array


def random_scores(moe: MoeCheckpoint, seed: int) -> dict[int, Array]:
    """A random order of every layer's experts, independent of how many are kept."""
    return {
        layer: np.random.default_rng((seed, layer)).permutation(weights.n_experts).astype(np.float64)
        for layer, weights in moe.layers.items()
    }


def propose(evidence: Evidence) -> Proposal:
    return prune(evidence, random_scores(evidence.moe, evidence.settings.seed))


METHOD = Method("random", "drops experts at random: the control", propose, needs_text=False)
