"""Groups of experts: average linkage against scipy, M-SMoE's and random groups, and their weights."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.cluster.hierarchy import cut_tree, fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from moescope.compression.hc_smoe import hc_smoe
from moescope.compression.m_smoe import choose_dominants, m_smoe, profile_cosines
from moescope.compression.merging import (
    Grouping,
    average_linkage,
    merge_weights,
    most_central,
    most_used,
    random_groups,
)
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


# --- HC-SMoE: average linkage on mean outputs


def test_groups_are_those_scipy_makes_of_the_mean_outputs():
    features = np.random.default_rng(0).normal(size=(12, 7))
    tree = linkage(features, "average")
    ours = hc_smoe(features, np.ones(12), 5)
    assert set(ours.groups) == partition(fcluster(tree, 5, "maxclust"))
    assert [merge.height for merge in ours.merges] == pytest.approx(tree[:, 2])


def test_the_most_used_member_leads():
    features = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 5.0]])
    assert hc_smoe(features, np.array([1.0, 5.0, 0.0]), 2).dominants == (1, 2)


# --- M-SMoE: the most used lead, the others join by router logits


def gram_of(logits_TE: np.ndarray) -> np.ndarray:
    centred = logits_TE - logits_TE.mean(1, keepdims=True)
    return centred.T @ centred


def test_cosines_are_those_of_the_profiles_themselves():
    logits = np.random.default_rng(0).normal(size=(50, 6))
    centred = logits - logits.mean(1, keepdims=True)
    unit = centred / np.linalg.norm(centred, axis=0)
    assert profile_cosines(gram_of(logits)) == pytest.approx(unit.T @ unit)


def test_unrelated_profiles_lie_at_minus_one_over_n_less_one():
    logits = np.random.default_rng(1).normal(size=(200_000, 5))
    off = profile_cosines(gram_of(logits))[np.triu_indices(5, 1)]
    assert off == pytest.approx(np.full(10, -1 / 4), abs=0.01)


def test_each_other_expert_joins_the_dominant_it_shares_tokens_with():
    rng = np.random.default_rng(2)
    leaders = rng.normal(size=(400, 3)) * 3
    logits = np.concatenate([leaders, leaders[:, [2, 0, 0]] + 0.3 * rng.normal(size=(400, 3))], axis=1)
    grouping = m_smoe(gram_of(logits), np.array([50.0, 40, 60, 3, 2, 1]), keep=3)
    assert grouping.groups == ((0, 4, 5), (1,), (2, 3))
    assert grouping.dominants == (0, 1, 2)
    cosine = profile_cosines(gram_of(logits))
    assert sorted(merge.height for merge in grouping.merges) == pytest.approx(
        sorted(1 - cosine[[3, 4, 5], [2, 0, 0]])
    )
    assert [merge.size for merge in grouping.merges if merge.left == 2] == [2]
    assert max(merge.size for merge in grouping.merges) == 3


def test_the_dominant_is_the_most_used_one_even_where_it_is_not_the_first_member():
    logits = np.random.default_rng(3).normal(size=(300, 4))
    logits[:, 0] = logits[:, 3] + 0.1 * logits[:, 0]
    grouping = m_smoe(gram_of(logits), np.array([1.0, 20, 20, 20]), keep=3)
    assert grouping.groups[0] == (0, 3)
    assert grouping.dominants[0] == 3


def test_equal_usage_is_decided_by_the_expert_s_number():
    assert choose_dominants(np.array([5.0, 9, 5, 9]), 3) == [0, 1, 3]


def test_an_expert_joins_within_its_routing_group():
    logits = np.random.default_rng(4).normal(size=(300, 4))
    logits[:, 3] = logits[:, 0]  # its twin stands in the other routing group
    grouping = m_smoe(gram_of(logits), np.array([9.0, 1, 9, 1]), keep=2, n_groups=2)
    assert grouping.groups == ((0, 1), (2, 3))


# --- the weights of members


GROUPING = Grouping(5, ((0, 3, 4), (1,), (2,)), (3, 1, 2))


def test_usage_weights_are_shares_of_the_group_s_tokens():
    assert merge_weights(GROUPING, np.array([10.0, 0.0, 5.0, 30.0, 0.0])) == (
        (0.25, 0.75, 0.0),
        (1.0,),
        (1.0,),
    )


@pytest.mark.parametrize("usage", [None, np.zeros(5)])
def test_members_of_no_or_unknown_use_count_alike(usage):
    assert merge_weights(GROUPING, usage)[0] == pytest.approx((1 / 3, 1 / 3, 1 / 3))
