"""Agreement of two checkpoints.

Loops over sets, chance by independent routers, ranks by scipy's own definition.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moescope.routing.load_balance import jaccard_chance, random_loads
from moescope.routing.stability import (
    corrected,
    expected_consistency,
    rank_correlation,
    routing_consistency,
    tau_is_noise,
    top1_agreement,
    usage,
    usage_sigma,
)


def skewed_choices(tokens: int, n: int, k: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    weights = np.arange(1, n + 1) / np.arange(1, n + 1).sum()
    return np.stack([generator.choice(n, k, replace=False, p=weights) for _ in range(tokens)])


def test_consistency_is_the_mean_share_of_the_sets_in_common():
    a, b = skewed_choices(100, 8, 3, 0), skewed_choices(100, 8, 3, 1)
    naive = np.mean([len(set(x) & set(y)) / 3 for x, y in zip(a, b, strict=True)])
    assert routing_consistency(a, b) == pytest.approx(naive)
    assert routing_consistency(a, a[:, ::-1]) == 1


def test_routers_that_know_nothing_of_each_other_are_corrected_to_zero():
    a, b = skewed_choices(20_000, 8, 2, 0), skewed_choices(20_000, 8, 2, 1)
    observed, expected = routing_consistency(a, b), expected_consistency(a, b, 8)
    assert observed == pytest.approx(expected, rel=0.02)
    assert expected > 2 / 8 * 1.1, "so even that 1/n would do"
    assert corrected(observed, expected) == pytest.approx(0, abs=0.01)
    assert corrected(1.0, expected) == 1
    assert np.isnan(corrected(1.0, 1.0))


def test_empty_slots_agree_with_nothing():
    a, b = np.array([[0, -1], [-1, -1]]), np.array([[0, -1], [-1, -1]])
    assert routing_consistency(a, b) == 1
    assert top1_agreement(np.array([2, -1, 0]), np.array([2, -1, 1])) == 0.5
    assert usage(a, 3).tolist() == [1, 0, 0]


def test_usage_sigma_is_zero_for_constant_usage_and_exact_for_two_checkpoints():
    assert usage_sigma(np.array([[0.25, 0.75]] * 3)) == 0
    assert usage_sigma(np.array([[0.2, 0.8], [0.4, 0.6]])) == pytest.approx(0.1)


def test_kendall_s_tau_counts_pairs_in_the_same_order():
    a, b = np.array([1.0, 2, 3, 4]), np.array([1.0, 2, 4, 3])
    assert rank_correlation(a, b) == pytest.approx((5 - 1) / 6)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    assert np.isnan(rank_correlation(a, np.ones(4)))


def test_even_loads_are_called_noise_and_uneven_ones_are_not():
    even = random_loads(5000, 8, 2, draws=50)
    assert all(tau_is_noise(load, 5000, 2) for load in even)
    assert not tau_is_noise(np.array([400.0, 800, 1200, 1600, 1000, 1000, 2000, 2000]), 5000, 2)


@pytest.mark.parametrize(("n", "k"), [(8, 2), (6, 4), (5, 1)])
def test_the_chance_of_adjacent_sets_is_that_of_random_ones(n, k):
    generator = np.random.default_rng(0)
    sets = [set(generator.choice(n, k, replace=False)) for _ in range(8000)]
    naive = np.mean([len(a & b) / len(a | b) for a, b in itertools.pairwise(sets)])
    assert jaccard_chance(n, k) == pytest.approx(naive, rel=0.05)
