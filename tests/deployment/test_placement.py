"""Placement: exact cases, brute force on small ones, planted groups, held-out loads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deployment.deployment_runs import token_trace
from deployment.plain_caches import random_tokens
from moescope.deployment.placement import (
    Cluster,
    all_places,
    balancedness,
    check_cluster,
    device_shares,
    place_balanced,
    place_contiguous,
    place_random,
    place_together,
    placement_table,
    remote_parts,
)
from moescope.deployment.tokens import split_tokens
from moescope.errors import BadInput


def table_of(trace, cluster, seed=0):
    splits = split_tokens(trace.document_T, seed)
    frame = placement_table(trace, splits, cluster, seed, lambda count: None)
    return frame.set_index(["method", "layer"]).sort_index(), dict(
        all_places(trace.chosen_LTK[0], trace.n_experts[0], cluster, seed)
    )


def uneven_trace(generator, documents=24, n=8, k=2):
    weights = np.arange(1, n + 1) / np.arange(1, n + 1).sum()
    chosen = [generator.choice(n, size=k, replace=False, p=weights) for _ in range(documents * 20)]
    return token_trace([np.array(chosen)], np.repeat(np.arange(documents), 20), n)


def test_one_expert_per_device_has_mean_over_max_load_and_one_device_is_balanced():
    trace = uneven_trace(np.random.default_rng(0))
    load_E = np.bincount(trace.chosen_LTK.reshape(-1), minlength=8)
    alone, _ = table_of(trace, Cluster(8, 1, 0, 64))
    halves = [
        np.bincount(trace.chosen_LTK[0][split.test_T].reshape(-1))
        for split in split_tokens(trace.document_T, 0)
    ]
    exact = sum(half.mean() for half in halves) / sum(half.max() for half in halves)
    for method in ("contiguous", "balanced", "coactivation"):
        assert alone.loc[(method, 0.0), "balancedness"] == pytest.approx(exact, abs=1e-12)
    assert balancedness(load_E @ device_shares(np.arange(8), 8, 8)) == load_E.mean() / load_E.max()
    one, _ = table_of(trace, Cluster(1, 1, 0, 64))
    assert (one["balancedness"] == 1).all()
    assert (one["batch_balancedness"] == 1).all()
    assert (one["cross_device"] == 0).all()


def test_balanced_packing_is_near_the_best_of_all_packings():
    generator = np.random.default_rng(1)
    cluster = Cluster(2, 1, 0, 1)
    for _ in range(50):
        load_E = generator.exponential(size=8)
        best = min(
            max(load_E[list(half)].sum(), load_E.sum() - load_E[list(half)].sum())
            for half in itertools.combinations(range(8), 4)
        )
        place = place_balanced(load_E, cluster)
        assert sorted(place) == list(range(8))
        load_D = load_E @ device_shares(place, 8, 2)
        assert best <= load_D.max() + 1e-12 <= 4 / 3 * best  # the bound of longest-first scheduling


def test_copies_go_to_the_busiest_experts_and_to_different_devices():
    place = place_balanced(np.array([60.0, 10, 10, 10]), Cluster(2, 1, 2, 1))
    assert sorted(place) == [0, 0, 0, 1, 2, 3]
    place = place_balanced(np.array([40.0, 20, 20, 19, 1, 0.5]), Cluster(2, 1, 2, 1))
    assert 0 in place[:4] and 0 in place[4:]  # noqa: PT018
    shares = device_shares(np.array([0, 1, 0, 2]), 3, 2)
    assert shares.tolist() == [[0.5, 0.5], [1, 0], [0, 1]]


def test_traffic_is_the_expected_number_of_remote_devices():
    generator = np.random.default_rng(2)
    place = np.array([0, 1, 2, 3, 0, 2])  # two places on each of three devices; 0 and 2 have two copies
    shares = device_shares(place, 4, 3)
    chosen_TK = random_tokens(generator, 40, 2, 4)
    devices_of = [np.flatnonzero(place == expert) // 2 for expert in range(4)]
    expected = []
    for token in chosen_TK:  # every combination of copies and every origin
        combinations = list(itertools.product(*(devices_of[expert] for expert in token), range(3)))
        expected.append(np.mean([len(set(parts[:-1]) - {parts[-1]}) for parts in combinations]))
    assert remote_parts(chosen_TK, shares) == pytest.approx(np.mean(expected))
    assert remote_parts(np.array([[0, -1]]), device_shares(np.arange(4), 4, 2)) == 0.5


def test_experts_that_act_together_are_placed_together():
    generator = np.random.default_rng(3)
    order = generator.permutation(16)
    group_T = np.tile(np.arange(4), 288)  # equally often in every document
    chosen_TK = np.array([order[4 * group + generator.permutation(4)[:2]] for group in group_T])
    trace = token_trace([chosen_TK], np.repeat(np.arange(24), 48), 16)
    rows, places = table_of(trace, Cluster(4, 2, 0, 100))
    assert rows.loc[("coactivation", 0.0), "cross_device"] == pytest.approx(0.75)  # one device
    assert rows.loc[("coactivation", 0.0), "cross_device_chance"] > 1.2
    assert rows.loc[("coactivation", 0.0), "cross_device_least"] == 0.75
    found = [set(part) for part in np.split(places["coactivation"], 4)]
    assert sorted(map(sorted, found)) == sorted(
        sorted(order[4 * group : 4 * group + 4]) for group in range(4)
    )
    load_E = np.bincount(chosen_TK.reshape(-1), minlength=16).astype(float)
    loads = load_E @ device_shares(places["coactivation"], 16, 4)
    assert loads.max() <= 1.1 * loads.mean() + 1e-9


def test_swapping_keeps_every_copy():
    generator = np.random.default_rng(4)
    load_E, cluster = generator.exponential(size=12), Cluster(4, 2, 4, 1)
    start = place_balanced(load_E, cluster)
    pairs = generator.random((12, 12))
    place = place_together(start, load_E, pairs + pairs.T, cluster)
    assert sorted(place) == sorted(start)
    limit = max(1.1 * load_E.sum() / 4, (load_E @ device_shares(start, 12, 4)).max())
    assert (load_E @ device_shares(place, 12, 4)).max() <= limit + 1e-9


def test_a_load_that_does_not_repeat_is_balanced_in_sample_only():
    """Two documents that use different experts: what one teaches does not balance the other."""
    first, second = np.tile([[0, 1]], (50, 1)), np.tile([[2, 3]], (50, 1))
    trace = token_trace([np.concatenate([first, second])], np.repeat([0, 1], 50), 4)
    rows, places = table_of(trace, Cluster(2, 1, 0, 10))
    shares = device_shares(places["balanced"], 4, 2)
    assert balancedness(np.array([50.0, 50, 50, 50]) @ shares) == 1
    assert rows.loc[("contiguous", 0.0), "balancedness"] == 0.5
    assert rows.loc[("balanced", 0.0), "batch_balancedness"] in (0.5, 1)


def test_more_random_placements_than_experts_keep_every_expert():
    place = place_random(4, Cluster(5, 1, 6, 1), np.random.default_rng(0))
    assert np.bincount(place).min() >= 2
    assert place_contiguous(4, Cluster(3, 1, 2, 1)).tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("cluster", "words"), [(Cluster(8, 1, 2, 1), "--redundant 4"), (Cluster(6, 4, 0, 1), "nodes 4")]
)
def test_devices_must_be_filled_evenly(cluster, words):
    with pytest.raises(BadInput, match=words):
        check_cluster(cluster, [12])
