"""Experts in groups.

Average linkage cut to a number of groups, groups drawn at random, and the merges a dendrogram shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from moescope.errors import BadInput

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Merge:
    """Two nodes joined.

    A node below the number of experts is that expert; n + i is what the layer's i-th merge made.
    """

    left: int
    right: int
    height: float  # their distance, in the method's own measure
    size: int  # experts in what results
    done: bool  # False above the cut: drawn, not carried out


@dataclass(frozen=True)
class Grouping:
    """One layer's experts in groups, ordered by their first member; each group names its dominant one."""

    n_experts: int
    groups: tuple[tuple[int, ...], ...]
    dominants: tuple[int, ...]
    merges: tuple[Merge, ...] = ()
    unrelated: float | None = (
        None  # the height at which experts that have nothing to do with each other would merge
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(group) for group in self.groups)

    @property
    def singletons(self) -> int:
        return self.sizes.count(1)


def sections(n_experts: int, n_groups: int) -> list[list[int]]:
    """The experts of each routing group (DeepSeek's n_group), in order.

    Experts are merged within one only: a token chooses groups first.
    """
    size, rest = divmod(n_experts, n_groups)
    if rest:
        raise BadInput(
            f"{n_experts} experts do not divide into {n_groups} routing groups; check n_group in config.json"
        )
    return [list(range(start, start + size)) for start in range(0, n_experts, size)]


def share_of_each(keep: int, parts: Sequence[Sequence[int]]) -> int:
    """How many groups of experts each routing group is left with."""
    if keep < 1 or keep > sum(map(len, parts)) or keep % len(parts):
        step, most = len(parts), sum(map(len, parts))
        nearest = min(max(round(keep / step), 1) * step, most)
        raise BadInput(
            f"{keep} of {most} experts cannot be kept in {step} routing groups; nearest possible: {nearest}"
        )
    return keep // len(parts)


def average_linkage(
    distance_EE: Array, keep: int, choose: Callable[[tuple[int, ...]], int], n_groups: int = 1
) -> Grouping:
    """The groups left when average linkage (UPGMA, Sokal and Michener 1958) stops at `keep` of them.

    The distance of two groups is the mean distance of their members. `choose` names a group's dominant
    member. The first n - keep merges
    are carried out, which is scipy's `fcluster(..., "maxclust")` except for ties, where that may leave fewer
    groups than asked for.
    """
    n_experts = len(distance_EE)
    parts = sections(n_experts, n_groups)
    left_in_each = share_of_each(keep, parts)
    groups: list[tuple[int, ...]] = []
    merges: list[Merge] = []
    for part in parts:
        own = np.asarray(distance_EE)[np.ix_(part, part)]
        tree = linkage(squareform(own, checks=False), "average") if len(part) > 1 else np.zeros((0, 4))
        nodes = list(part)
        members: dict[int, tuple[int, ...]] = {node: (node,) for node in nodes}
        for index, (left, right, height, size) in enumerate(tree):
            done = index < len(part) - left_in_each
            a, b, made = nodes[int(left)], nodes[int(right)], n_experts + len(merges)
            merges.append(Merge(a, b, float(height), int(size), done))
            nodes.append(made)
            if done:
                members[made] = (*members.pop(a), *members.pop(b))
        groups += members.values()
    return grouped(n_experts, groups, choose, merges)


def grouped(
    n_experts: int,
    groups: Sequence[Sequence[int]],
    choose: Callable[[tuple[int, ...]], int],
    merges: Sequence[Merge] = (),
) -> Grouping:
    """Groups in their standing order: members ascending, groups by first member."""
    ordered = sorted(tuple(sorted(group)) for group in groups)
    if sorted(expert for group in ordered for expert in group) != list(range(n_experts)):
        raise ValueError(f"groups {ordered} do not hold each of {n_experts} experts once")
    return Grouping(n_experts, tuple(ordered), tuple(choose(group) for group in ordered), tuple(merges))


def most_used(usage_E: Array) -> Callable[[tuple[int, ...]], int]:
    """The member that most tokens chose; of equals the first."""
    return lambda group: max(group, key=lambda expert: (usage_E[expert], -expert))


def most_central(distance_EE: Array) -> Callable[[tuple[int, ...]], int]:
    """The member nearest the others on average (the medoid); of equals the first."""
    return lambda group: min(group, key=lambda expert: (distance_EE[expert, list(group)].sum(), expert))


def random_groups(
    n_experts: int,
    sizes: Sequence[int],
    generator: np.random.Generator,
    choose: Callable[[tuple[int, ...]], int],
    n_groups: int = 1,
) -> Grouping:
    """Experts dealt at random into groups of those sizes: what merging costs when nothing is known about the
    experts.

    With routing groups, `sizes` are those of each routing group in turn.
    """
    groups: list[list[int]] = []
    waiting = list(sizes)
    for part in sections(n_experts, n_groups):
        dealt = [int(expert) for expert in generator.permutation(part)]
        while dealt:
            if not waiting or waiting[0] > len(dealt):
                raise ValueError(
                    f"sizes {list(sizes)} do not fill {n_groups} routing groups of {len(part)} experts"
                )
            size = waiting.pop(0)
            groups.append(dealt[:size])
            dealt = dealt[size:]
    return grouped(n_experts, groups, choose)
