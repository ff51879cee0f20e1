"""Specialisation by token: exact cases, and information that is zero where there is none."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moescope.routing.vocabulary import (
    STRENGTHS,
    Tokens,
    permutation_within_documents,
    token_information,
    top_tokens,
    vocabulary_specialisation,
)


def specialisation(ids, chosen, n_experts):
    tokens = Tokens.of(ids)
    return vocabulary_specialisation(tokens.counts_VE(chosen, n_experts), tokens.occurrences_V())


def gain(ids, chosen, half, n_experts):
    tokens = Tokens.of(ids)
    first, second = (tokens.counts_VE(chosen, n_experts, half == h) for h in (0, 1))
    return token_information((first, second))


def text(tokens: int, vocabulary: int, seed: int = 0):
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocabulary + 1)
    ids = generator.choice(vocabulary, tokens, p=weights / weights.sum())
    return ids, np.arange(tokens) // 50, generator


@pytest.mark.parametrize("cells", [1, 30, 2**22])
def test_counts_are_those_of_a_loop_and_leave_out_what_is_not_there(monkeypatch, cells):
    monkeypatch.setattr("moescope.routing.vocabulary.CELLS", cells)
    ids, _, generator = text(300, 20)
    chosen = generator.integers(-1, 4, (300, 2))
    ids[::9] = -1
    naive = Counter(
        (int(v), int(e)) for v, experts in zip(ids, chosen, strict=True) for e in experts if v >= 0 and e >= 0
    )
    tokens = Tokens.of(ids)
    found = tokens.counts_VE(chosen, 4).toarray()
    assert {
        (int(v), e): n for v, row in zip(tokens.ids_V, found, strict=True) for e, n in enumerate(row) if n
    } == naive
    some = generator.random(300) < 0.4
    assert (
        tokens.counts_VE(chosen, 4, some).toarray() + tokens.counts_VE(chosen, 4, ~some).toarray() == found
    ).all()


def test_top_tokens_carry_count_share_and_lift_and_come_in_order_of_their_information():
    ids = np.array([0] * 8 + [1] * 8)
    counts = Tokens.of(ids).counts_VE(np.array([[0]] * 6 + [[1]] * 2 + [[0]] * 2 + [[1]] * 6), 2)
    (ids, count, share, lift), _ = top_tokens(counts)
    assert ids.tolist() == [0, 1]
    assert count.tolist() == [6, 2]
    assert share.tolist() == [0.75, 0.25]
    assert lift.tolist() == [1.5, 0.5]
    assert len(top_tokens(counts, top=1)[0][0]) == 1


def test_tied_tokens_come_in_order_of_their_ids_and_the_list_is_not_longer_for_it():
    ids = np.array([9, 7, 5, 3, 2])
    counts = Tokens.of(ids).counts_VE(np.array([[0], [0], [0], [0], [1]]), 2)
    assert Tokens.of(ids).ids_V[top_tokens(counts, top=3)[0][0]].tolist() == [3, 5, 7]


def test_held_out_gain_is_that_of_the_formula_written_as_a_loop():
    ids, documents, generator = text(400, 12)
    chosen, half = generator.integers(0, 4, (400, 2)), documents % 2
    chosen[:, 0] = ids % 4
    totals = [0.0, 0]
    for fitted in (0, 1):
        counts, held_out = np.zeros((2, 12, 4))
        for v, experts, part in zip(ids, chosen, half, strict=True):
            for e in experts:
                (counts if part == fitted else held_out)[v, e] += 1
        prior = (counts.sum(0) + 0.5) / (counts.sum() + 2)

        def mean(weights, seen, total, a, prior=prior):
            filled = weights > 0
            gains = np.log((seen + a * prior) / (total + a) / prior, where=filled, out=np.zeros((12, 4)))
            return (weights * gains).sum() / weights.sum()

        alone = {a: mean(counts, counts - 1, counts.sum(1, keepdims=True) - 1, a) for a in STRENGTHS}
        best = max(STRENGTHS, key=alone.get)
        totals[0] += held_out.sum() * mean(held_out, counts, counts.sum(1, keepdims=True), best)
        totals[1] += held_out.sum()
    assert gain(ids, chosen, half, 4) == pytest.approx(totals[0] / totals[1], rel=1e-12)


def test_an_expert_never_chosen_has_no_tokens():
    counts = Tokens.of(np.array([1])).counts_VE(np.array([[0]]), 2)
    assert [len(part) for part in top_tokens(counts)[1]] == [0] * 4


def test_specialisation_is_one_when_the_token_decides_and_counts_frequent_tokens_only():
    ids = np.repeat([3, 5, 9], [40, 30, 7])
    chosen = np.where(ids == 3, 0, 1)[:, None]
    assert specialisation(ids, chosen, 4) == 1
    chosen[ids == 9] = 2  # occurs seven times only
    assert specialisation(ids, chosen, 4) == 1
    chosen[:10] = 3
    assert specialisation(ids, chosen, 4) == pytest.approx(60 / 70)


def test_experts_chosen_without_looking_give_no_information_where_the_plug_in_gives_much():
    ids, documents, generator = text(20_000, 3000)
    chosen = np.stack([generator.permutation(16)[:2] for _ in range(20_000)])
    found = gain(ids, chosen, documents % 2, 16)
    assert abs(found) < 0.01
    counts = Tokens.of(ids).counts_VE(chosen, 16).toarray()
    p = counts / counts.sum()
    ratio = np.where(p > 0, p, 1) / np.where(p > 0, p.sum(1, keepdims=True) * p.sum(0), 1)
    assert (p * np.log(ratio)).sum() > 0.2


def test_experts_decided_by_the_token_give_almost_all_of_their_entropy():
    ids, documents, _ = text(20_000, 200)
    chosen = (ids % 8)[:, None]
    shares = np.bincount(chosen[:, 0]) / len(ids)
    entropy = -(shares * np.log(shares)).sum()
    assert gain(ids, chosen, documents % 2, 8) == pytest.approx(entropy, rel=0.03)


def test_what_only_the_document_decides_is_left_in_the_null():
    ids, documents, _ = text(20_000, 200)
    ids = ids + 200 * (documents % 4)  # each document's words are of its topic
    chosen = (documents % 4)[:, None]
    halves = (documents // 4) % 2
    observed = gain(ids, chosen, halves, 4)
    null = gain(ids[permutation_within_documents(documents)], chosen, halves, 4)
    assert observed == pytest.approx(null, rel=0.01)
    assert null > 1


def test_one_half_alone_says_nothing():
    ids, _documents, _ = text(100, 10)
    assert np.isnan(gain(ids, np.zeros((100, 1), dtype=int), np.zeros(100, dtype=int), 2))


def test_shuffling_keeps_each_document_s_tokens():
    ids, documents, _ = text(1000, 50)
    order = np.random.default_rng(0).permutation(1000)
    ids, documents = ids[order], documents[order]
    dealt = ids[permutation_within_documents(documents)]
    assert (dealt != ids).any()
    for document in range(20):
        assert sorted(dealt[documents == document]) == sorted(ids[documents == document])
