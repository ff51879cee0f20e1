"""Clusters from weights alone find planted copies whatever the order and signs of their neurons."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moescope.compression.weights_clustering import (
    candidate_pairs,
    fingerprint_similarity,
    matched_distances,
    weights_clusters,
)
from moescope.geometry.distances import distance
from moescope.geometry.matching import match_neurons
from moescope.types import ExpertWeights


def random_experts(count: int, seed: int, d_ff: int = 20, d_model: int = 12) -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        ExpertWeights(draw(d_ff, d_model), draw(d_model, d_ff), draw(d_ff, d_model)) for _ in range(count)
    ]


def disguised(expert: ExpertWeights, seed: int, noise: float = 0.05) -> ExpertWeights:
    """The same function but for noise: neurons in another order, some with up and down turned around."""
    generator = torch.Generator().manual_seed(seed)
    neurons = len(expert.gate_FD)
    order = torch.randperm(neurons, generator=generator)
    sign = torch.where(torch.rand(neurons, generator=generator) < 0.5, -1.0, 1.0)
    assert expert.up_FD is not None

    def noisy(matrix: torch.Tensor) -> torch.Tensor:
        return matrix + noise * torch.randn(matrix.shape, generator=generator)

    up, down = noisy(expert.up_FD)[order] * sign[:, None], noisy(expert.down_DF)[:, order] * sign
    return ExpertWeights(noisy(expert.gate_FD)[order], down, up)


def planted(seed: int, experts: int = 8) -> list[ExpertWeights]:
    """So many experts, the last three copies of the first three."""
    own = random_experts(experts - 3, seed)
    return own + [disguised(own[e], seed * 100 + e) for e in range(3)]


def test_disguised_copies_are_grouped_with_what_they_copy():
    grouping = weights_clusters(planted(1), keep=5)
    assert grouping.groups == ((0, 5), (1, 6), (2, 7), (3,), (4,))
    assert matched_distances(planted(1))[1].all()


def test_l2_is_the_distance_of_the_matched_matrices_over_all_projections():
    experts = random_experts(3, 4)
    ours, _ = matched_distances(experts)
    moved = match_neurons(experts[0], experts[2]).apply(experts[2])
    each = [
        distance(getattr(experts[0], name), getattr(moved, name)).relative_l2
        for name in ("gate_FD", "up_FD", "down_DF")
    ]
    assert ours[0, 2] == pytest.approx(np.sqrt(np.mean(np.square(each))), rel=1e-5)


def test_a_few_matched_pairs_among_many_experts_still_find_the_copies():
    experts = planted(3, experts=24)
    grouping = weights_clusters(experts, keep=21, most_pairs=40)
    assert {(0, 21), (1, 22), (2, 23)} <= set(grouping.groups)
    _, matched = matched_distances(experts, most_pairs=40)
    assert not matched.all()
    assert int(np.triu(matched, 1).sum()) == 40


def test_pairs_that_were_not_matched_stand_at_the_largest_distance_found():
    distances, matched = matched_distances(planted(3, experts=12), most_pairs=20)
    assert np.unique(distances[~matched]) == pytest.approx([distances[matched].max()])


def test_all_pairs_are_matched_where_they_are_few():
    assert len(candidate_pairs(random_experts(5, 0), most_pairs=10)) == 10
    assert len(candidate_pairs(random_experts(6, 0), most_pairs=14)) == 14


def test_fingerprints_do_not_change_with_order_and_signs():
    experts = random_experts(4, 6)
    turned = [disguised(expert, seed, noise=0.0) for seed, expert in enumerate(experts)]
    assert fingerprint_similarity(turned) == pytest.approx(fingerprint_similarity(experts), abs=1e-5)


def test_what_all_experts_share_does_not_hide_which_two_are_alike():
    experts = planted(9, experts=12)
    common = torch.randn(20, 12, generator=torch.Generator().manual_seed(5)) * 6
    shared = [ExpertWeights(e.gate_FD + common, e.down_DF + common.T, e.up_FD + common) for e in experts[:9]]
    shared += [disguised(shared[e], 50 + e) for e in range(3)]
    likeness = fingerprint_similarity(shared)
    np.fill_diagonal(likeness, -1)
    assert [int(likeness[9 + e].argmax()) for e in range(3)] == [0, 1, 2]
    assert likeness[[0, 1, 2], [9, 10, 11]].min() > 0.5 > likeness[:9, :9].max()


def test_experts_without_a_gate_are_clustered_by_two_projections():
    experts = [ExpertWeights(expert.gate_FD, expert.down_DF) for expert in random_experts(3, 7)]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    experts.append(ExpertWeights(experts[1].gate_FD[order], experts[1].down_DF[:, order]))
    assert (1, 3) in weights_clusters(experts, keep=3).groups
    assert matched_distances(experts)[0][1, 3] == pytest.approx(0, abs=1e-3)
