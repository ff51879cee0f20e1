"""M-SMoE.

The most used experts stay, and each other one joins the one that the router likes at the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moescope.compression.grouping import Grouping, Merge, grouped, sections, share_of_each
from moescope.errors import BadInput

Array = npt.NDArray[np.float64]


def profile_cosines(gram_EE: Array) -> Array:
    """Cosines of the experts' router-logit profiles over all tokens, from their inner products.

    An expert's profile is its logit at every token less that token's mean logit, which a softmax ignores;
    subtracting it makes unrelated
    profiles of n experts lie at -1/(n - 1), not 0. An expert whose profile is zero has cosine 0 with all.
    """
    norms = np.sqrt(np.diag(gram_EE))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_EE = gram_EE / np.outer(norms, norms)
    return np.where(np.isfinite(cosine_EE), cosine_EE, 0.0)


def dominants(usage_E: Array, keep: int, n_groups: int = 1) -> list[int]:
    """The most used experts, as many of each routing group; of equals the first."""
    parts = sections(len(usage_E), n_groups)
    each = share_of_each(keep, parts)
    found = [sorted(part, key=lambda expert: (-usage_E[expert], expert))[:each] for part in parts]
    return sorted(expert for part in found for expert in part)


def adaptive_dominants(usage_LE: Sequence[Array], keep: int) -> list[list[int]]:
    """Dominant experts of every layer, layers x keep in all: each layer's most used, then whichever is most
    used in its layer.

    Usage is each layer's share of its own tokens, so layers can be compared. Widths then differ from layer to
    layer (Li et al. 2024), which
    transformers' configs cannot say: for plans and charts.
    """
    layers = len(usage_LE)
    if not 1 <= keep <= min(len(usage) for usage in usage_LE):
        raise BadInput(
            f"{keep} experts a layer cannot be kept; keep 1 to {min(len(usage) for usage in usage_LE)}"
        )
    shares = [usage / max(float(usage.sum()), 1.0) for usage in usage_LE]
    chosen = [[int(np.argmax(share))] for share in shares]
    rest = sorted(
        (-float(share), layer, expert)
        for layer, row in enumerate(shares)
        for expert, share in enumerate(row)
        if expert != chosen[layer][0]
    )
    for _, layer, expert in rest[: layers * keep - layers]:
        chosen[layer].append(expert)
    return [sorted(experts) for experts in chosen]


def joined(cosine_EE: Array, leaders: Sequence[int], n_groups: int = 1) -> Grouping:
    """Each other expert with the dominant one of its routing group whose logit profile is nearest; of equals
    the first.

    The height of such a merge is 1 - cosine.
    """
    n_experts = len(cosine_EE)
    groups: dict[int, list[int]] = {leader: [leader] for leader in leaders}
    steps: list[tuple[float, int, int]] = []
    for part in sections(n_experts, n_groups):
        own = [leader for leader in leaders if leader in part]
        for expert in part:
            if expert not in groups:
                leader = max(own, key=lambda candidate: (cosine_EE[expert, candidate], -candidate))
                steps.append((1 - float(cosine_EE[expert, leader]), expert, leader))
    merges: list[Merge] = []
    node = {leader: leader for leader in leaders}  # what the leader's group is called so far
    for height, expert, leader in sorted(steps):
        groups[leader].append(expert)
        merges.append(Merge(node[leader], expert, height, len(groups[leader]), True))
        node[leader] = n_experts + len(merges) - 1
    by_member = {expert: leader for leader, group in groups.items() for expert in group}
    grouping = grouped(n_experts, list(groups.values()), lambda group: by_member[group[0]], merges)
    return replace(grouping, unrelated=1 + 1 / max(n_experts - 1, 1))


def m_smoe(gram_EE: Array, usage_E: Array, keep: int, n_groups: int = 1) -> Grouping:
    """One layer's groups by router logits (Li et al. 2024, "Merge, then compress")."""
    return joined(profile_cosines(gram_EE), dominants(usage_E, keep, n_groups), n_groups)
