"""M-SMoE: keep the most used experts and merge each other one into the dominant with the most similar router
logits (Li et al. 2024, "Merge, then compress").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from moescope.compression.calibration import Sums, add_to_layer, named_sums, real_tokens
from moescope.compression.grouping import (
    Grouping,
    Merge,
    keep_per_section,
    ordered_grouping,
    routing_sections,
)
from moescope.compression.merging import LayerEvidence, adaptive_layer_dominants, merge_by
from moescope.compression.method import Evidence
from moescope.execution.adapters import Block
from moescope.types import Array, Routing


class LogitProfiles:
    """Collector of inner products of the experts' logit profiles over all tokens: [E, E].

    Each token's mean logit is subtracted first: softmax ignores it, and with it all profiles look alike.
    """

    def __init__(self) -> None:
        self.gram: dict[int, Tensor] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.logits_TE is not None
        logits_TE = routing.logits_TE[real_tokens(routing)].double()
        centred_TE = logits_TE - logits_TE.mean(-1, keepdim=True)
        add_to_layer(self.gram, routing.layer, centred_TE.T @ centred_TE)

    def sums(self) -> Sums:
        return named_sums("logit_gram_EE", self.gram)


def profile_cosines(gram_EE: Array) -> Array:
    """Cosines of the experts' router-logit profiles over all tokens, from their inner products.

    A profile is an expert's logit at every token minus that token's mean logit, so unrelated profiles of n
    experts have cosine -1/(n - 1), not 0. An expert whose profile is zero has cosine 0 with all.
    """
    norms = np.sqrt(np.diag(gram_EE))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_EE = gram_EE / np.outer(norms, norms)
    return np.where(np.isfinite(cosine_EE), cosine_EE, 0.0)


def choose_dominants(usage_E: Array, keep: int, n_groups: int = 1) -> list[int]:
    """The most used experts, equally many per routing group; of equals the first."""
    sections = routing_sections(len(usage_E), n_groups)
    each = keep_per_section(keep, sections)
    return sorted(
        expert
        for section in sections
        for expert in sorted(section, key=lambda expert: (-usage_E[expert], expert))[:each]
    )


def join_dominants(cosine_EE: Array, dominants: Sequence[int], n_groups: int = 1) -> Grouping:
    """Join each other expert to the dominant of its routing group with the nearest profile.

    The height of such a merge is 1 - cosine.
    """
    n_experts = len(cosine_EE)
    groups: dict[int, list[int]] = {dominant: [dominant] for dominant in dominants}
    steps: list[tuple[float, int, int]] = []
    for section in routing_sections(n_experts, n_groups):
        candidates = [dominant for dominant in dominants if dominant in section]
        for expert in section:
            if expert not in groups:
                nearest = max(candidates, key=lambda candidate: (cosine_EE[expert, candidate], -candidate))
                steps.append((1 - float(cosine_EE[expert, nearest]), expert, nearest))
    merges: list[Merge] = []
    node = {dominant: dominant for dominant in dominants}  # the current node of the dominant's group
    for height, expert, dominant in sorted(steps):
        groups[dominant].append(expert)
        merges.append(Merge(node[dominant], expert, height, len(groups[dominant]), True))
        node[dominant] = n_experts + len(merges) - 1
    dominant_of = {expert: dominant for dominant, group in groups.items() for expert in group}
    grouping = ordered_grouping(n_experts, list(groups.values()), lambda group: dominant_of[group[0]], merges)
    return replace(grouping, unrelated=1 + 1 / max(n_experts - 1, 1))


def m_smoe(gram_EE: Array, usage_E: Array, keep: int, n_groups: int = 1) -> Grouping:
    """Group one layer's experts by router logits."""
    return join_dominants(profile_cosines(gram_EE), choose_dominants(usage_E, keep, n_groups), n_groups)


def group_by_logits(evidence: Evidence, layer: LayerEvidence) -> Grouping:
    gram_EE = layer.sums["logit_gram_EE"].double().numpy()
    assert layer.usage_E is not None
    if layer.settings.adaptive:
        return join_dominants(profile_cosines(gram_EE), adaptive_layer_dominants(evidence)[layer.number])
    return m_smoe(gram_EE, layer.usage_E, layer.keep, layer.n_groups)


METHOD = merge_by(
    group_by_logits,
    "m_smoe",
    "merges each rarely used expert into the one with the most similar router logits",
    matched=False,
    collectors=(LogitProfiles,),
    needs_logits=True,
    adapts=True,
)
PERMUTED = merge_by(
    group_by_logits,
    "m_smoe_permuted",
    "m_smoe with the members' neurons matched first",
    matched=True,
    collectors=(LogitProfiles,),
    needs_logits=True,
    adapts=True,
)
