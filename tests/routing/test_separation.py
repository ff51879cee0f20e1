"""Which experts go together.

Counted pair by pair beside numpy, chance by simulation, and the bounds of router rows.
"""

from __future__ import annotations

import numpy as np
import pytest

from moescope.routing.load_balance import Setting
from moescope.routing.metrics import METRICS
from moescope.routing.separation import (
    chance_lift,
    coactivation,
    expected_pairs,
    expert_overlap,
    gram_chance,
    gram_collapse,
    gram_orthogonality,
    overlap_chance,
    pair_p,
    router_similarity,
    router_similarity_abs,
    router_similarity_max,
    similarity_max_chance,
)


def random_choices(tokens: int, n: int, k: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.stack([generator.choice(n, k, replace=False) for _ in range(tokens)])


def pair_counts(chosen_TK: np.ndarray, n_experts: int) -> np.ndarray:
    """Number of tokens that chose both a and b, for all pairs; the diagonal holds how many chose a."""
    pairs_EE = np.zeros((n_experts, n_experts))
    for experts in chosen_TK:
        pairs_EE[np.ix_(experts, experts)] += 1
    return pairs_EE


def test_overlap_is_the_jaccard_index_of_token_sets_weighted_by_use():
    chosen = random_choices(120, 6, 2)
    sets = [{token for token, experts in enumerate(chosen) if expert in experts} for expert in range(6)]
    pairs = [(sets[a], sets[b]) for a in range(6) for b in range(a)]
    jaccard, weights = [len(a & b) / len(a | b) for a, b in pairs], [len(a) * len(b) for a, b in pairs]
    assert expert_overlap(pair_counts(chosen, 6)) == pytest.approx(np.average(jaccard, weights=weights))


@pytest.mark.parametrize(("n", "k"), [(6, 2), (8, 4)])
def test_random_routing_gives_the_stated_chance_of_overlap_and_lift(n, k):
    pairs = pair_counts(random_choices(20_000, n, k), n)
    assert expert_overlap(pairs) == pytest.approx(overlap_chance(20_000, n, k), rel=0.02)
    _, lift = coactivation(pairs, 20_000)
    off = lift[~np.eye(n, dtype=bool)]
    assert off.mean() == pytest.approx(chance_lift(n, k, k * (k - 1)), rel=0.01)
    assert chance_lift(n, k, k * (k - 1)) < 0.9, "so near 1 that 1 would pass too"


@pytest.mark.parametrize(("tokens", "n", "k"), [(28, 128, 6), (10, 8, 2), (100, 16, 4)])
def test_the_chance_of_overlap_holds_for_few_tokens(tokens, n, k):
    """1,000 random texts; the formula of endless text, rho/(2 - rho), is half of it at 28 tokens."""
    drawn = [expert_overlap(pair_counts(random_choices(tokens, n, k, seed), n)) for seed in range(1000)]
    assert overlap_chance(tokens, n, k) == pytest.approx(np.mean(drawn), rel=0.01)
    endless = (k - 1) / (2 * (n - 1) - (k - 1))
    assert overlap_chance(10**9, n, k) == pytest.approx(endless, rel=1e-6)
    assert (tokens, n, k) != (28, 128, 6) or np.mean(drawn) > 1.9 * endless


@pytest.mark.parametrize(("n", "k", "uneven"), [(8, 2, 0.0), (8, 2, 1.5), (64, 8, 1.0)])
def test_independent_choices_of_uneven_experts_are_no_co_activation(n, k, uneven):
    """100 texts of 1,500 tokens; a busy pair is together more often than c_a c_b/N and is expected to be.

    At a true rate of 5 % more than 10 texts have a claimed pair in one case of 90.
    """
    generator, found, above = np.random.default_rng(0), 0, []
    lean = uneven * np.linspace(-1, 1, n)
    a, b = np.triu_indices(n, 1)
    for _ in range(100):
        chosen = (generator.gumbel(size=(1500, n)) + lean).argsort(1)[:, -k:]
        pairs = pair_counts(chosen, n)
        expected, noise = expected_pairs(pairs, 1500)
        enough = expected[a, b] >= 5
        found += (pair_p(pairs, expected, noise)[a, b][enough] * len(a) < 0.05).any()
        above.append(((pairs - expected) / (expected * noise))[a, b][enough])
        assert expected.sum(1) - np.diag(expected) == pytest.approx(pairs.sum(1) - np.diag(pairs), rel=1e-3)
    assert found <= 10
    assert np.concatenate(above).std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("n", "k"), [(8, 3), (64, 2), (64, 8)])
def test_overlap_is_one_at_collapse_and_far_from_that_at_chance(n, k):
    chosen = np.tile(np.arange(k), (50, 1))
    assert expert_overlap(pair_counts(chosen, n)) == pytest.approx(1)
    assert METRICS["expert_overlap"].collapse(Setting(50, n, k)) == 1
    assert METRICS["expert_overlap"].chance(Setting(50, n, k)) < 0.2


def test_overlap_sees_that_nine_tokens_of_ten_go_to_two_of_64_experts():
    chosen = random_choices(5000, 64, 2)
    chosen[np.random.default_rng(1).random(5000) < 0.9] = [7, 40]
    assert expert_overlap(pair_counts(chosen, 64)) == pytest.approx(0.69, abs=0.01)


def test_one_expert_per_token_leaves_overlap_undefined():
    assert np.isnan(expert_overlap(np.diag([5.0, 3, 2])))
    for level in (METRICS["expert_overlap"].chance, METRICS["expert_overlap"].collapse):
        assert np.isnan(level(Setting(50, 8, 1)))


def test_two_blocks_always_choose_within_their_block():
    chosen = np.array([[0, 1], [2, 3]] * 30)
    pairs = pair_counts(chosen, 4)
    share, lift = coactivation(pairs, 60)
    assert share[0].tolist() == [1, 1, 0, 0]
    assert lift[0, 1] == pytest.approx(2)
    assert expert_overlap(pairs) == pytest.approx(2 / 6)  # J is 1 in two of six pairs, loads are equal


# --- router rows


def test_orthogonal_rows_score_one_and_equal_rows_the_collapse_value():
    assert gram_orthogonality(np.eye(5, 9)) == pytest.approx(1)
    for n in (2, 8, 128):
        assert gram_orthogonality(np.ones((n, 7))) == pytest.approx(gram_collapse(n))
    assert gram_collapse(2) == pytest.approx(0.5)
    assert 0.29 < gram_collapse(1000) < 0.294


def test_random_rows_score_the_chance_value_of_0_94():
    rows = np.random.default_rng(0).standard_normal((64, 128))
    assert gram_orthogonality(rows) == pytest.approx(gram_chance(64, 128), abs=0.002)
    assert gram_chance(64, 128) == pytest.approx(0.94, abs=0.003)


def gram_best(n: int, d: int) -> float:
    """1 where rows can be orthogonal, the Welch bound where there are more of them than dimensions."""
    return float(1 - np.sqrt(max(n - d, 0) / (2 * n * d)))


def test_a_tight_frame_reaches_the_welch_bound_and_nothing_beats_it():
    angles = 2 * np.pi * np.arange(3) / 3  # three lines in the plane, 60 degrees apart
    frame = np.stack([np.cos(angles), np.sin(angles)], 1)
    assert gram_orthogonality(frame) == pytest.approx(gram_best(3, 2))
    for seed in range(20):
        assert (
            gram_orthogonality(np.random.default_rng(seed).standard_normal((3, 2))) <= gram_best(3, 2) + 1e-12
        )


def test_cosines_of_rows_are_those_of_a_loop_and_chance_is_that_of_random_rows():
    rows = np.random.default_rng(1).standard_normal((40, 96))
    cosines = [
        rows[a] @ rows[b] / np.linalg.norm(rows[a]) / np.linalg.norm(rows[b])
        for a in range(40)
        for b in range(a)
    ]
    assert router_similarity(rows) == pytest.approx(np.mean(cosines))
    assert router_similarity_abs(rows) == pytest.approx(np.mean(np.abs(cosines)))
    assert router_similarity_max(rows) == pytest.approx(max(cosines))
    assert router_similarity_abs(rows) == pytest.approx(np.sqrt(2 / (np.pi * 96)), rel=0.05)
    assert router_similarity_max(rows) == pytest.approx(similarity_max_chance(40, 96), rel=0.25)
