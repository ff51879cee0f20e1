"""Specialisation by domain: exact cases, and information that is zero where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.routing.specialisation import (
    affinity,
    by_domain,
    domain_information,
    domain_shares,
    expert_shares,
    information,
    permuted_tables,
    purity,
)


def documents(n_documents: int, tokens: int, experts: int, spread: float, seed: int, shift: float = 0.0):
    """Documents that each have their own taste for experts; a domain may shift it. Counts and labels."""
    generator = np.random.default_rng(seed)
    labels = np.arange(n_documents) % 2
    counts = []
    for label in labels:
        taste = np.exp(spread * generator.standard_normal(experts) + shift * label * np.arange(experts))
        counts.append(generator.multinomial(tokens, taste / taste.sum()))
    return np.array(counts, dtype=float), labels


def test_experts_used_alike_by_all_domains_have_affinity_one_and_no_information():
    counts = np.array([[10.0, 20, 30], [100, 200, 300]])
    assert affinity(counts) == pytest.approx(np.ones((2, 3)))
    assert domain_shares(counts) == pytest.approx(np.full((2, 3), 0.5))
    assert purity(counts) == pytest.approx(0.5)
    assert information(counts) == pytest.approx(0, abs=1e-12)


def test_two_blocks_have_affinity_two_purity_one_and_one_bit():
    counts = np.array([[5.0, 5, 0, 0], [0, 0, 500, 500]])
    assert affinity(counts) == pytest.approx(np.array([[2.0, 2, 0, 0], [0, 0, 2, 2]]))
    assert purity(counts) == 1
    balanced = np.array([[5.0, 5, 0, 0], [0, 0, 5, 5]])
    assert information(balanced) == pytest.approx(np.log(2))


def test_the_amount_of_text_a_domain_brought_changes_no_share():
    counts = np.random.default_rng(0).poisson(20, (3, 5)).astype(float)
    much = counts * np.array([[1.0], [10.0], [100.0]])
    for function in (affinity, domain_shares, purity, expert_shares):
        assert function(much) == pytest.approx(function(counts))


def test_information_is_the_sum_over_cells_of_p_log_p_over_independent():
    joint = np.random.default_rng(1).poisson(5, (3, 4)).astype(float)
    joint[0, 0] = 0
    p = joint / joint.sum()
    naive = sum(
        p[d, e] * np.log(p[d, e] / p[d].sum() / p[:, e].sum())
        for d in range(3)
        for e in range(4)
        if p[d, e] > 0
    )
    assert information(joint) == pytest.approx(naive)


def test_an_expert_nobody_used_has_no_share_and_does_not_count_for_purity():
    counts = np.array([[4.0, 0, 4], [4, 0, 4]])
    assert np.isnan(domain_shares(counts)[:, 1]).all()
    assert purity(counts) == 0.5


def test_permutations_keep_documents_whole_and_every_token():
    counts, labels = documents(12, 50, 4, 1.0, 0)
    tables = permuted_tables(counts, labels, 2, seed=0, draws=30)
    assert tables.sum((1, 2)) == pytest.approx(np.full(30, counts.sum()))
    assert tables.sum(1) == pytest.approx(np.tile(counts.sum(0), (30, 1)))


def test_documents_with_tastes_of_their_own_carry_no_information_about_a_domain_that_does_not_matter():
    found = [domain_information(*documents(60, 300, 8, 0.7, seed), 2) for seed in range(30)]
    plug_in = [information(by_domain(*documents(60, 300, 8, 0.7, seed), 2)) for seed in range(30)]
    assert abs(np.mean(found)) < 0.15 * np.mean(plug_in)


def test_a_domain_that_matters_is_seen_at_about_its_true_size():
    counts, labels = documents(400, 300, 4, 0.1, 0, shift=0.5)
    weights = np.exp(0.5 * np.outer([0, 1], np.arange(4)))
    true = information(weights / weights.sum(1, keepdims=True) / 2)
    assert domain_information(counts, labels, 2) == pytest.approx(float(true), rel=0.15)


def test_purity_of_a_table_with_an_empty_domain_is_undefined_and_says_nothing():
    assert np.isnan(purity(np.array([[3.0, 1.0], [0.0, 0.0]])))
