"""Specialisation by domain and by token: exact cases, and information that is zero where there is none."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moescope.routing.specialisation import (
    affinity,
    by_domain,
    domain_information,
    domain_shares,
    expert_shares,
    information,
    permute_within_documents,
    permuted_tables,
    purity,
    token_counts,
    token_information,
    top_tokens,
    vocabulary_specialisation,
)

# --- domains


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


# --- tokens


def text(tokens: int, vocabulary: int, seed: int = 0):
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocabulary + 1)
    ids = generator.choice(vocabulary, tokens, p=weights / weights.sum())
    return ids, np.arange(tokens) // 50, generator


def test_counts_are_those_of_a_loop_and_leave_out_what_is_not_there():
    ids, _, generator = text(300, 20)
    chosen = generator.integers(-1, 4, (300, 2))
    ids[::9] = -1
    naive = Counter(
        (int(v), int(e)) for v, experts in zip(ids, chosen, strict=True) for e in experts if v >= 0 and e >= 0
    )
    found = token_counts(ids, chosen, 20, 4).toarray()
    assert {(v, e): found[v, e] for v in range(20) for e in range(4) if found[v, e]} == naive


def test_top_tokens_carry_count_share_and_lift_and_come_in_order_of_their_information():
    counts = token_counts(
        np.array([0] * 8 + [1] * 8), np.array([[0]] * 6 + [[1]] * 2 + [[0]] * 2 + [[1]] * 6), 2, 2
    )
    (ids, count, share, lift), _ = top_tokens(counts)
    assert ids.tolist() == [0, 1]
    assert count.tolist() == [6, 2]
    assert share.tolist() == [0.75, 0.25]
    assert lift.tolist() == [1.5, 0.5]
    assert len(top_tokens(counts, top=1)[0][0]) == 1


def test_an_expert_never_chosen_has_no_tokens():
    assert [len(part) for part in top_tokens(token_counts(np.array([1]), np.array([[0]]), 3, 2))[1]] == [
        0
    ] * 4


def test_specialisation_is_one_when_the_token_decides_and_counts_frequent_tokens_only():
    ids = np.repeat([3, 5, 9], [40, 30, 7])
    chosen = np.where(ids == 3, 0, 1)[:, None]
    assert vocabulary_specialisation(ids, chosen, 4) == 1
    chosen[ids == 9] = 2  # occurs seven times only
    assert vocabulary_specialisation(ids, chosen, 4) == 1
    chosen[:10] = 3
    assert vocabulary_specialisation(ids, chosen, 4) == pytest.approx(60 / 70)


def test_experts_chosen_without_looking_give_no_information_where_the_plug_in_gives_much():
    ids, documents, generator = text(20_000, 3000)
    chosen = np.stack([generator.permutation(16)[:2] for _ in range(20_000)])
    found = token_information(ids, chosen, documents % 2, 16)
    assert abs(found) < 0.01
    counts = token_counts(ids, chosen, 3000, 16).toarray()
    p = counts / counts.sum()
    ratio = np.where(p > 0, p, 1) / np.where(p > 0, p.sum(1, keepdims=True) * p.sum(0), 1)
    assert (p * np.log(ratio)).sum() > 0.2


def test_experts_decided_by_the_token_give_almost_all_of_their_entropy():
    ids, documents, _ = text(20_000, 200)
    chosen = (ids % 8)[:, None]
    shares = np.bincount(chosen[:, 0]) / len(ids)
    entropy = -(shares * np.log(shares)).sum()
    assert token_information(ids, chosen, documents % 2, 8) == pytest.approx(entropy, rel=0.03)


def test_what_only_the_document_decides_is_left_in_the_null():
    ids, documents, _ = text(20_000, 200)
    ids = ids + 200 * (documents % 4)  # each document's words are of its topic
    chosen = (documents % 4)[:, None]
    halves = (documents // 4) % 2
    observed = token_information(ids, chosen, halves, 4)
    null = token_information(permute_within_documents(ids, documents), chosen, halves, 4)
    assert observed == pytest.approx(null, rel=0.01)
    assert null > 1


def test_one_half_alone_says_nothing():
    ids, _documents, _ = text(100, 10)
    assert np.isnan(token_information(ids, np.zeros((100, 1), dtype=int), np.zeros(100, dtype=int), 2))


def test_shuffling_keeps_each_document_s_tokens():
    ids, documents, _ = text(1000, 50)
    order = np.random.default_rng(0).permutation(1000)
    ids, documents = ids[order], documents[order]
    dealt = permute_within_documents(ids, documents)
    assert (dealt != ids).any()
    for document in range(20):
        assert sorted(dealt[documents == document]) == sorted(ids[documents == document])
