"""Groups of experts: average linkage against scipy, random groups, and what is rejected."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.cluster.hierarchy import cut_tree, fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from moescope.compression.merging import average_linkage, most_central, most_used, routing_sections
from moescope.compression.random_merge import random_groups
from moescope.errors import BadInput


def distances(n: int, seed: int) -> np.ndarray:
    return squareform(pdist(np.random.default_rng(seed).normal(size=(n, 5))))


def first(group: tuple[int, ...]) -> int:
    return group[0]


def partition(labels: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(int(e) for e in np.flatnonzero(labels == label)) for label in np.unique(labels)}


@pytest.mark.parametrize(("n", "keep", "seed"), [(8, 3, 0), (16, 5, 1), (16, 1, 2), (9, 9, 3), (32, 20, 4)])
def test_groups_are_those_of_scipy_s_average_linkage_cut_to_so_many(n, keep, seed):
    distance = distances(n, seed)
    tree = linkage(squareform(distance), "average")
    ours = average_linkage(distance, keep, first)
    assert set(ours.groups) == partition(cut_tree(tree, keep)[:, 0])
    assert [merge.height for merge in ours.merges] == pytest.approx(tree[:, 2])
    assert [{merge.left, merge.right} for merge in ours.merges] == [{int(a), int(b)} for a, b in tree[:, :2]]
    assert [merge.done for merge in ours.merges] == [True] * (n - keep) + [False] * (keep - 1)


def test_equal_distances_still_leave_exactly_as_many_groups_as_asked_for():
    distance = np.ones((6, 6)) - np.eye(6)
    assert len(fcluster(linkage(squareform(distance), "average"), 4, "maxclust")) == 6
    assert len(average_linkage(distance, 4, first).groups) == 4


def test_experts_are_merged_within_their_routing_group_only():
    distance = distances(8, 5)
    distance[0, 7] = distance[7, 0] = 0.0  # the nearest pair of all stands in two routing groups
    ours = average_linkage(distance, 4, first, n_groups=2)
    assert all(max(group) < 4 or min(group) >= 4 for group in ours.groups)
    assert sum(max(group) < 4 for group in ours.groups) == 2
    for part in ([0, 1, 2, 3], [4, 5, 6, 7]):
        alone = average_linkage(distance[np.ix_(part, part)], 2, first)
        assert {tuple(part[e] for e in group) for group in alone.groups} <= set(ours.groups)


@pytest.mark.parametrize(
    ("keep", "nearest"),
    [
        (3, "nearest possible: 4"),
        (1, "nearest possible: 2"),
        (0, "nearest possible: 2"),
        (9, "nearest possible: 8"),
    ],
)
def test_a_number_that_routing_groups_cannot_share_is_rejected_with_the_nearest_that_can(keep, nearest):
    with pytest.raises(BadInput, match=nearest):
        average_linkage(distances(8, 0), keep, first, n_groups=2)


def test_experts_that_do_not_divide_into_routing_groups_are_rejected():
    with pytest.raises(BadInput, match="7 experts do not divide into 2"):
        routing_sections(7, 2)


def test_the_dominant_is_the_most_used_member_or_the_most_central_one():
    usage = np.array([3.0, 9.0, 9.0, 1.0])
    assert most_used(usage)((0, 1, 2)) == 1
    line = squareform(pdist(np.array([[0.0], [1.0], [5.0]])))
    assert most_central(line)((0, 1, 2)) == 1
    assert most_central(line)((2,)) == 2


def test_random_groups_have_the_sizes_asked_for_and_follow_the_seed():
    deal = lambda seed: random_groups(8, [3, 2, 1, 1, 1], np.random.default_rng(seed), first)  # noqa: E731
    ours = deal(0)
    assert sorted(map(len, ours.groups)) == [1, 1, 1, 2, 3]
    assert sorted(e for group in ours.groups for e in group) == list(range(8))
    assert ours.groups == deal(0).groups
    assert len({deal(seed).groups for seed in range(20)}) > 15


def test_random_groups_stay_within_routing_groups():
    for seed in range(10):
        ours = random_groups(8, [3, 1, 2, 2], np.random.default_rng(seed), first, n_groups=2)
        assert all(max(group) < 4 or min(group) >= 4 for group in ours.groups)


def test_every_pair_is_dealt_together_about_equally_often():
    rng = np.random.default_rng(0)
    together = np.zeros((6, 6))
    for _ in range(3000):
        for group in random_groups(6, [2, 2, 2], rng, first).groups:
            together[group[0], group[1]] += 1
    share = together[np.triu_indices(6, 1)] / 3000
    assert share == pytest.approx(np.full(15, 1 / 5), abs=0.03)
