"""Specialisation by domain: exact cases, and information that is zero where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.routing.specialisation import (
    affinity,
    affinity_interval,
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


# --- intervals of the affinity


def drawn_texts(base_ME, documents: int, alike: float, generator) -> np.ndarray:
    """Counts [domains, documents, experts] of texts of 40 to 400 tokens, top 2.

    Documents draw their shares of experts from a Dirichlet distribution around those of their domain.
    """
    lengths = np.exp(generator.uniform(np.log(40), np.log(400), (len(base_ME), documents))).astype(int)
    shares = np.stack([generator.dirichlet(alike * base_E, size=documents) for base_E in base_ME])
    return generator.multinomial(2 * lengths, shares).astype(float)


def uneven_domains(experts: int, generator) -> np.ndarray:
    base_ME = np.exp(generator.standard_normal((3, experts)))
    return base_ME / base_ME.sum(1, keepdims=True)


def test_the_interval_of_an_affinity_is_that_of_resampled_documents():
    """4,000 resamples within domains of 200 documents; Student's quantile hardly differs from the normal."""
    generator = np.random.default_rng(0)
    counts = drawn_texts(uneven_domains(6, generator), 200, 50.0, generator)
    low, high, _ = affinity_interval(counts, [200] * 3)
    places = generator.integers(0, 200, (4000, 3, 200))
    weights = np.zeros((4000, 3, 200))
    np.add.at(weights, (np.arange(4000)[:, None, None], np.arange(3)[None, :, None], places), 1.0)
    resampled = affinity(np.einsum("rmd,mde->rme", weights, counts))
    width = np.diff(np.quantile(np.log(resampled), [0.025, 0.975], axis=0), axis=0)[0]
    np.testing.assert_allclose(np.log(high / low), width, rtol=0.1)
    np.testing.assert_allclose(np.sqrt(low * high), affinity(counts.sum(1)))


def test_few_documents_in_one_domain_and_experts_of_few_documents_have_no_interval():
    generator = np.random.default_rng(1)
    counts = drawn_texts(uneven_domains(4, generator), 40, 50.0, generator)
    assert np.isnan(affinity_interval(counts, [40, 40, 19])[:2]).all()
    assert np.isfinite(affinity_interval(counts, [40, 40, 20])).all()
    counts[1, 7:, 2] = 0  # seven documents of the second domain use expert 2
    counts[2, :, 3] = 0  # no document of the third domain uses expert 3
    low, high, _ = affinity_interval(counts, [40] * 3)
    missing = {tuple(cell) for cell in np.argwhere(np.isnan(low))}
    assert missing == {tuple(cell) for cell in np.argwhere(np.isnan(high))} == {(1, 2), (2, 3)}


@pytest.mark.parametrize(("documents", "alike", "most"), [(6, 50.0, 0.06), (40, 50.0, 0.06), (40, 2.0, 0.07)])
def test_of_domains_that_are_alike_one_affinity_in_twenty_is_outside_its_noise(documents, alike, most):
    generator = np.random.default_rng(4)
    base_ME = np.repeat(uneven_domains(8, generator)[:1], 3, axis=0)
    outside = []
    for _ in range(150):
        counts = drawn_texts(base_ME, documents, alike, generator)
        noise = affinity_interval(counts, [documents] * 3)[2]
        outside.append(np.abs(affinity(counts.sum(1)) - 1) > 1.96 * noise)
    assert np.mean(outside) <= most
    assert np.isnan(affinity_interval(counts[:, :1], [1, 1, 1])[2]).all()


def test_an_affinity_is_at_most_the_number_of_domains_and_so_is_its_interval():
    counts = np.zeros((2, 30, 2))
    counts[0, :, 0], counts[1, :, 1] = 50, 50
    counts[0, 0, 1] = counts[1, :9, 0] = 1
    low, high, _ = affinity_interval(counts, [30, 30])
    assert np.nanmax(high) <= 2
    assert (low[~np.isnan(low)] <= affinity(counts.sum(1))[~np.isnan(low)]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("documents", "experts", "alike"),
    [(20, 8, 50.0), (50, 8, 5.0), (50, 64, 50.0), (200, 8, 5.0), (200, 64, 50.0)],
)
def test_intervals_of_affinities_cover_the_truth(documents, experts, alike):
    """400 texts; cells of one text depend on each other: as if 3 of each text's cells were independent."""
    generator = np.random.default_rng(2)
    base_ME = uneven_domains(experts, generator)
    covered = known = 0
    for _ in range(400):
        low, high, _ = affinity_interval(drawn_texts(base_ME, documents, alike, generator), [documents] * 3)
        truth = base_ME / base_ME.mean(0)
        known += np.isfinite(low).sum()
        covered += ((low <= truth) & (truth <= high)).sum()
    assert abs(covered / known - 0.95) <= 0.005 + 2 * np.sqrt(0.95 * 0.05 / (3 * 400))
