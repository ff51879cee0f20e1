"""Groups of experts: average linkage, dominant members, and the members' weights in a merged expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from moescope.compression.plan import MergeWeights
from moescope.errors import BadInput, unknown_name
from moescope.types import Array

ChooseDominant = Callable[[tuple[int, ...]], int]
MERGE_WEIGHTS = get_args(MergeWeights)
DOMINANT_SHARE = 0.75


@dataclass(frozen=True)
class Merge:
    """Two nodes joined. A node below n experts is that expert; n + i is the result of the layer's merge i."""

    left: int
    right: int
    height: float  # their distance, in the method's own measure
    size: int  # experts in the result
    done: bool  # False above the cut: drawn, not carried out


@dataclass(frozen=True)
class Grouping:
    """One layer's experts in groups, ordered by first member, each with its dominant member."""

    n_experts: int
    groups: tuple[tuple[int, ...], ...]
    dominants: tuple[int, ...]
    merges: tuple[Merge, ...] = ()
    unrelated: float | None = None  # chance level: the height at which unrelated experts would merge


def routing_sections(n_experts: int, n_groups: int) -> list[list[int]]:
    """The experts of each routing group (DeepSeek's n_group), in order.

    Experts are merged within a routing group only, because a token chooses routing groups first.
    """
    size, rest = divmod(n_experts, n_groups)
    if rest:
        raise BadInput(
            f"{n_experts} experts do not divide into {n_groups} routing groups; check n_group in config.json"
        )
    return [list(range(start, start + size)) for start in range(0, n_experts, size)]


def keep_per_section(keep: int, sections: Sequence[Sequence[int]]) -> int:
    """How many groups of experts each routing group keeps."""
    n_experts, step = sum(map(len, sections)), len(sections)
    if keep < 1 or keep > n_experts or keep % step:
        nearest = min(max(round(keep / step), 1) * step, n_experts)
        raise BadInput(
            f"keep {keep} of {n_experts} experts: not possible in {step} routing groups; "
            f"nearest possible: {nearest}"
        )
    return keep // step


def average_linkage(distance_EE: Array, keep: int, choose: ChooseDominant, n_groups: int = 1) -> Grouping:
    """Cluster by average linkage (UPGMA, Sokal and Michener 1958) until `keep` groups are left.

    The distance of two groups is the mean distance of their members. The first n - keep merges are carried
    out, which is scipy's `fcluster(..., "maxclust")` except for ties, where that may leave fewer groups.
    """
    n_experts = len(distance_EE)
    sections = routing_sections(n_experts, n_groups)
    groups_each = keep_per_section(keep, sections)
    groups: list[tuple[int, ...]] = []
    merges: list[Merge] = []
    for section in sections:
        within = np.asarray(distance_EE)[np.ix_(section, section)]
        tree = linkage(squareform(within, checks=False), "average") if len(section) > 1 else np.zeros((0, 4))
        nodes = list(section)
        members: dict[int, tuple[int, ...]] = {node: (node,) for node in nodes}
        for index, (left, right, height, size) in enumerate(tree):
            done = index < len(section) - groups_each
            a, b, node = nodes[int(left)], nodes[int(right)], n_experts + len(merges)
            merges.append(Merge(a, b, float(height), int(size), done))
            nodes.append(node)
            if done:
                members[node] = (*members.pop(a), *members.pop(b))
        groups += members.values()
    return ordered_grouping(n_experts, groups, choose, merges)


def ordered_grouping(
    n_experts: int, groups: Sequence[Sequence[int]], choose: ChooseDominant, merges: Sequence[Merge] = ()
) -> Grouping:
    """A `Grouping` with members ascending and groups ordered by first member."""
    ordered = sorted(tuple(sorted(group)) for group in groups)
    if sorted(expert for group in ordered for expert in group) != list(range(n_experts)):
        raise ValueError(f"groups {ordered} do not hold each of {n_experts} experts once")
    return Grouping(n_experts, tuple(ordered), tuple(choose(group) for group in ordered), tuple(merges))


def most_used(usage_E: Array) -> ChooseDominant:
    """Choose the member with the most tokens; of equals the first."""
    return lambda group: max(group, key=lambda expert: (usage_E[expert], -expert))


def most_central(distance_EE: Array) -> ChooseDominant:
    """Choose the member nearest to the others on average (the medoid); of equals the first."""
    return lambda group: min(group, key=lambda expert: (distance_EE[expert, list(group)].sum(), expert))


def nearest_centre(feature_ED: Array, usage_E: Array) -> ChooseDominant:
    """Choose the member whose feature is nearest to the group's mean; of equals the most used.

    The members of a pair are equally near.
    """

    def choose(group: tuple[int, ...]) -> int:
        features = feature_ED[list(group)]
        distance = np.linalg.norm(features - features.mean(0), axis=1)
        near = distance <= distance.min() + 1e-9 * distance.max()
        return most_used(usage_E)(
            tuple(expert for expert, is_near in zip(group, near, strict=True) if is_near)
        )

    return choose


def adaptive_dominants(usage_LE: Sequence[Array], keep: int) -> list[list[int]]:
    """Dominant experts of every layer, layers x keep in total, under one budget (Li et al. 2024, M-SMoE).

    Each layer's most used expert, then the experts with the largest share of their layer's tokens. Widths
    then differ by layer, which transformers' configs cannot express: for plans and charts only.
    """
    fewest = min(len(usage) for usage in usage_LE)
    if not 1 <= keep <= fewest:
        raise BadInput(f"keep {keep}: give a number of experts per layer from 1 to {fewest}")
    shares = [usage / max(float(usage.sum()), 1.0) for usage in usage_LE]
    dominants = [[int(np.argmax(share))] for share in shares]
    rest = sorted(
        (-float(share), layer, expert)
        for layer, row in enumerate(shares)
        for expert, share in enumerate(row)
        if expert != dominants[layer][0]
    )
    for _, layer, expert in rest[: len(shares) * (keep - 1)]:
        dominants[layer].append(expert)
    return [sorted(experts) for experts in dominants]


# --- weights of members


def merge_weights(
    grouping: Grouping, kind: str, usage_E: Array | None = None, saliency_E: Array | None = None
) -> tuple[tuple[float, ...], ...]:
    """A weight per member, in the shape of `grouping.groups`; each group's weights sum to 1.

    usage: proportional to the tokens routed to each member (Li et al. 2024, M-SMoE); uniform: equal;
    dominant: three quarters for the dominant member, the rest equal; saliency: proportional to REAP. Members
    of a group whose numbers are all zero get equal weights.
    """
    if kind not in MERGE_WEIGHTS:
        raise unknown_name("merge weights", kind, list(MERGE_WEIGHTS))
    numbers = {"usage": usage_E, "saliency": saliency_E}.get(kind, np.ones(grouping.n_experts))
    if numbers is None:
        raise BadInput(f"merge weights {kind} need text; give --text, or --merge-weights uniform")
    return tuple(
        dominant_heavy(group, dominant) if kind == "dominant" else proportional(numbers[list(group)])
        for group, dominant in zip(grouping.groups, grouping.dominants, strict=True)
    )


def proportional(values: Array) -> tuple[float, ...]:
    total = values.sum()
    shares = values / total if total > 0 else np.full(len(values), 1 / len(values))
    return tuple(float(share) for share in shares)


def dominant_heavy(group: Sequence[int], dominant: int) -> tuple[float, ...]:
    others = len(group) - 1
    if not others:
        return (1.0,)
    return tuple(DOMINANT_SHARE if expert == dominant else (1 - DOMINANT_SHARE) / others for expert in group)
