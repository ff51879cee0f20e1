"""M-SMoE's groups: the most used lead, the others join by router logits."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.compression.m_smoe import choose_dominants, m_smoe, profile_cosines


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
