"""M-SMoE: keep the most used experts and merge each other one into the dominant with the most similar router
logits (Li et al. 2024, "Merge, then compress").
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moescope.compression.calibration import SumCollector, real_tokens
from moescope.compression.merging import (
    Grouping,
    LayerEvidence,
    Merge,
    keep_per_section,
    merge_both,
    ordered_grouping,
    routing_sections,
)
from moescope.execution.adapters import Block
from moescope.types import Array, Routing


class LogitProfiles(SumCollector):
    """Inner products of the experts' logit profiles over all tokens: [E, E].

    Each token's mean logit is subtracted first: softmax ignores it, and with it all profiles look alike.
    """

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.logits_TE is not None
        logits_TE = routing.logits_TE[real_tokens(routing)].double()
        centred_TE = logits_TE - logits_TE.mean(-1, keepdim=True)
        self.add(routing.layer, logit_gram_EE=centred_TE.T @ centred_TE)


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


def m_smoe(gram_EE: Array, usage_E: Array, keep: int, n_groups: int = 1) -> Grouping:
    """Group one layer's experts: each joins the dominant of its routing group with the nearest logit profile.

    The height of such a merge is 1 - cosine.
    """
    n_experts, cosine_EE = len(gram_EE), profile_cosines(gram_EE)
    dominants = choose_dominants(usage_E, keep, n_groups)
    leader = {dominant: dominant for dominant in dominants}  # of every expert
    for section in routing_sections(n_experts, n_groups):
        candidates = [dominant for dominant in dominants if dominant in section]
        for expert in (expert for expert in section if expert not in dominants):
            leader[expert] = max(candidates, key=lambda candidate: (cosine_EE[expert, candidate], -candidate))
    joins = [(1 - float(cosine_EE[a, b]), a, b) for a, b in leader.items() if a != b]
    merges: list[Merge] = []
    nodes = {dominant: (dominant, 1) for dominant in dominants}  # the current node of its group, and its size
    for height, expert, dominant in sorted(joins):
        node, size = nodes[dominant]
        merges.append(Merge(node, expert, height, size + 1, True))
        nodes[dominant] = n_experts + len(merges) - 1, size + 1
    groups = [[expert for expert in leader if leader[expert] == dominant] for dominant in dominants]
    grouping = ordered_grouping(n_experts, groups, lambda group: leader[group[0]], merges)
    return replace(grouping, unrelated=1 + 1 / max(n_experts - 1, 1), distance_EE=1 - cosine_EE)


def group_by_logits(layer: LayerEvidence) -> Grouping:
    gram_EE = layer.sums["logit_gram_EE"].double().numpy()
    assert layer.usage_E is not None
    return m_smoe(gram_EE, layer.usage_E, layer.keep, layer.n_groups)


METHOD, PERMUTED = merge_both(
    group_by_logits,
    "m_smoe",
    "merges each rarely used expert into the one with the most similar router logits",
    (LogitProfiles,),
    needs_logits=True,
)
