import itertools
import math
import statistics
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moescope.spectral.alignment import AlignmentMatrix
from moescope.spectral.pairing import (
    CHANCE,
    IDENTIFYING,
    NON_RANDOM,
    PERMUTED,
    PairingTest,
    best_index,
    false_call_rate,
    mutual_best_bound,
    null_moments,
    other_order,
    paired_means,
    pairing_test,
    pairings,
)
from planted import planted_layer
from spectral.builders import matrix_of, random_layer

ALPHAS = (0.01, 0.05, 0.2)


def random_tables(seed: int, n: int, ks: int) -> np.ndarray:
    return np.random.default_rng(seed).random((ks, n, n))


def diagonal_layer(n: int, shift: int = 0, ks: int = 1, d_model: int = 1000) -> AlignmentMatrix:
    """Router i fits expert (i + shift) mod n and no other."""
    table = 0.1 + 0.5 * np.roll(np.eye(n), shift, axis=1) + 0.01 * np.random.default_rng(n).random((n, n))
    return matrix_of(*[table] * ks, d_model=d_model)


# --- the null of the mean diagonal


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_null_moments_equal_those_over_every_pairing(n):
    M_KEE = random_tables(n, n, ks=3)
    mean, sd = null_moments(M_KEE)
    for index, table in enumerate(M_KEE):
        every = [sum(table[i, p[i]] for i in range(n)) / n for p in itertools.permutations(range(n))]
        assert mean[index] == pytest.approx(statistics.fmean(every))
        assert sd[index] == pytest.approx(statistics.pstdev(every))


def test_every_pairing_is_looked_at_up_to_eight_experts_and_drawn_ones_beyond():
    for n in range(2, 9):
        columns, exact = pairings(n, 0)
        assert exact
        assert {tuple(column) for column in columns.T.tolist()} == set(itertools.permutations(range(n)))
    columns, exact = pairings(9, 0)
    assert not exact
    assert columns.shape == (9, 20_000)
    assert (np.sort(columns, axis=0) == np.arange(9)[:, None]).all()


def test_drawn_pairings_are_uniform():
    columns, _ = pairings(9, 1)
    counts = np.stack([np.bincount(row, minlength=9) for row in columns])  # router x expert
    assert np.abs(counts - 20_000 / 9).max() < 5 * np.sqrt(20_000 / 9)


def test_paired_means_give_router_i_the_expert_the_pairing_names():
    table = np.arange(9.0).reshape(3, 3)
    found = paired_means(np.stack([table, 10 * table]), np.array([[0, 1], [1, 2], [2, 0]]))
    expected = np.array([(0 + 4 + 8) / 3, (1 + 5 + 6) / 3])
    np.testing.assert_allclose(found, [expected, 10 * expected])


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 7).flatmap(lambda n: arrays(np.float64, (1, n, n), elements=st.floats(0, 1, width=16))))
def test_perm_z_is_at_most_n_less_one(M_KEE):
    test = pairing_test(matrix_of(*M_KEE))
    assert abs(test.perm_z_K).max() <= M_KEE.shape[1] - 1 + 1e-6


@pytest.mark.parametrize("n", [2, 5, 12])
def test_perm_z_reaches_n_less_one_on_a_perfect_diagonal(n):
    assert pairing_test(matrix_of(0.2 + 0.3 * np.eye(n))).perm_z_K == pytest.approx([n - 1])


# --- p-values


def recomputed(layer: AlignmentMatrix, every_pairing: list[tuple[int, ...]]) -> dict[str, object]:
    """The same p-values by plain loops over all pairings, with the moments taken from those pairings."""
    n = layer.n_experts
    usable = [index for index, k in enumerate(layer.ks) if k < layer.d_model]
    z: dict[int, list[float]] = {}
    hits: dict[int, list[float]] = {}
    for index in usable:
        table = layer.align_KEE[index]
        means = [sum(table[i, p[i]] for i in range(n)) / n for p in every_pairing]
        center, spread = statistics.fmean(means), statistics.pstdev(means)
        z[index] = [(mean - center) / spread for mean in means]
        best = [set(np.flatnonzero(row > row.max() - 1e-6)) for row in table]
        hits[index] = [sum((p[i] in best[i]) / len(best[i]) for i in range(n)) / n for p in every_pairing]
    stored = every_pairing.index(tuple(range(n)))
    highest = [max(z[index][p] for index in usable) for p in range(len(every_pairing))]
    lowest = [min(z[index][p] for index in usable) for p in range(len(every_pairing))]
    most_hits = [max(hits[index][p] for index in usable) for p in range(len(every_pairing))]

    def share(values: list[float], reached: float) -> float:
        return sum(value >= reached - 1e-9 for value in values) / len(values)

    return {
        "p_value": share(highest, highest[stored]),
        "p_lower": share([-value for value in lowest], -lowest[stored]),
        "p_accuracy": share(most_hits, most_hits[stored]),
        "p_adjusted": [
            share(highest, z[index][stored]) if index in usable else 1.0 for index in range(len(layer.ks))
        ],
    }


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [3, 4, 5])
def test_exact_p_values_equal_an_independent_recount(n, seed):
    tables = random_tables(seed, n, ks=4)
    tables[1] = tables[1].round(1)  # ties
    tables[:, range(n), range(n)] += 0.1 * seed  # from chance to clearly aligned
    layer = matrix_of(*tables, ks=[1, 2, 4, 8], d_model=8)
    test, expected = pairing_test(layer), recomputed(layer, list(itertools.permutations(range(n))))
    assert test.exact
    assert test.n_pairings == math.factorial(n)
    for name in ("p_value", "p_lower", "p_accuracy"):
        assert getattr(test, name) == pytest.approx(expected[name], abs=1e-12), name
    assert test.p_adjusted_K == pytest.approx(expected["p_adjusted"])


def test_the_best_possible_layer_has_the_smallest_exact_p():
    test = pairing_test(diagonal_layer(5))
    assert test.p_value == test.p_accuracy == pytest.approx(1 / math.factorial(5))


def test_a_degenerate_k_takes_no_part_in_the_test():
    tables = random_tables(0, 5, ks=2)
    alone, beside = (
        pairing_test(matrix_of(*tables)),
        pairing_test(matrix_of(*tables, np.eye(5), ks=[1, 2, 8], d_model=8)),
    )
    assert (beside.p_value, beside.p_lower, beside.p_accuracy) == (
        alone.p_value,
        alone.p_lower,
        alone.p_accuracy,
    )
    assert beside.best_k == alone.best_k
    assert beside.p_adjusted_K[2] == 1
    assert beside.perm_z_K[2] == 0


def test_a_layer_of_degenerate_ks_only_says_nothing():
    test = pairing_test(matrix_of(np.ones((4, 4)), ks=[8], d_model=8))
    assert (test.p_value, test.p_lower, test.p_accuracy, test.best_k, test.verdict) == (1, 1, 1, None, CHANCE)


def test_a_layer_of_equal_experts_says_nothing():
    alike = np.tile(np.random.default_rng(0).random((6, 1)), (1, 6))
    test = pairing_test(matrix_of(alike, alike.T))
    assert (test.p_value, test.p_lower, test.p_accuracy, test.verdict) == (1, 1, 1, CHANCE)


def test_sampled_p_values_count_the_observed_pairing_itself():
    layer = matrix_of(*random_tables(3, 9, ks=2))
    test = pairing_test(layer, seed=5)
    drawn = [tuple(column) for column in pairings(9, 5)[0].T.tolist()]
    mean, sd = null_moments(layer.align_KEE)

    def highest(pairing: tuple[int, ...]) -> float:
        means = [statistics.fmean(table[i, pairing[i]] for i in range(9)) for table in layer.align_KEE]
        return max((means[index] - mean[index]) / sd[index] for index in range(2))

    observed = highest(tuple(range(9)))
    reached = sum(highest(pairing) >= observed - 1e-9 for pairing in drawn)
    assert not test.exact
    assert 0 < reached < 20_000
    assert test.p_value == pytest.approx((reached + 1) / 20_001)


def test_a_sampled_p_value_is_never_zero():
    test = pairing_test(diagonal_layer(12))
    assert test.p_value == test.p_accuracy == pytest.approx(1 / 20_001)


def test_per_k_p_values_pay_for_the_choice_of_k():
    """The best k's adjusted p is the layer's p: both come from the same maxima."""
    test = pairing_test(matrix_of(*random_tables(1, 6, ks=5)))
    assert test.p_adjusted_K.min() == test.p_value
    assert test.p_adjusted_K[np.argmax(test.perm_z_K)] == test.p_value


# --- validity: on layers where routers know nothing of experts


@cache
def chance_layers(n: int) -> list[PairingTest]:
    """Tests of independent random layers of that many experts."""
    generator = np.random.default_rng((20, n))
    return [pairing_test(random_layer(generator, n, 32)) for _ in range(250 if n > 8 else 500)]


EIGHT = pytest.param(8, marks=pytest.mark.slow)  # all 40,320 pairings of 500 layers


def sampling_error(alpha: float, count: int) -> float:
    return 3 * math.sqrt(alpha * (1 - alpha) / count)


@pytest.mark.parametrize("n", [EIGHT, 12])
@pytest.mark.parametrize("name", ["p_value", "p_lower", "p_accuracy"])
def test_chance_layers_have_a_small_p_no_oftener_than_they_should(name, n):
    p_values = np.array([getattr(test, name) for test in chance_layers(n)])
    for alpha in ALPHAS:
        assert (p_values <= alpha).mean() <= alpha + sampling_error(alpha, len(p_values))


@pytest.mark.parametrize("n", [EIGHT, 12])
@pytest.mark.parametrize("name", ["p_value", "p_lower"])
def test_the_test_of_the_mean_diagonal_is_not_conservative(name, n):
    p_values = np.array([getattr(test, name) for test in chance_layers(n)])
    for alpha in (0.2, 0.5):
        assert (p_values <= alpha).mean() >= alpha - sampling_error(alpha, len(p_values))


@pytest.mark.parametrize("n", [5, EIGHT, 12])
def test_one_chance_layer_in_twenty_is_called_anything_else(n):
    """500, 500 and 250 layers; three binomial deviations."""
    called = [test.verdict != CHANCE for test in chance_layers(n)]
    assert np.mean(called) <= 0.05 + sampling_error(0.05, len(called))


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 6, 7])
def test_verdicts_of_chance_layers_hold_five_per_cent(n):
    """4,000 layers: within three binomial deviations, 0.0103, above 5 %; six experts, four of whose ks are
    searched for another order, have 1 % more."""
    generator = np.random.default_rng(n)
    called = [
        pairing_test(random_layer(generator, n, 16 if n == 6 else 64)).verdict != CHANCE for _ in range(4_000)
    ]
    assert np.mean(called) <= (0.06 if n == 6 else 0.05) + sampling_error(0.05, 4_000)


def weakly_aligned_layer(generator: np.random.Generator, n: int, d: int) -> AlignmentMatrix:
    """M(k) of routers with an excess of 0.4 rms in the eight leading directions of their own expert."""
    bases = np.linalg.qr(generator.standard_normal((n, d, d)))[0]
    own = np.einsum("edm,em->ed", bases[:, :, :8], generator.standard_normal((n, 8)) / math.sqrt(8))
    rows = generator.standard_normal((n, d)) / math.sqrt(d) + 0.4 * own
    energy = (rows[None] @ bases) ** 2 / (rows**2).sum(1)[None, :, None]
    ks = [2**power for power in range(d.bit_length())]
    align = np.cumsum(energy, axis=2)[:, :, [k - 1 for k in ks]].transpose(2, 1, 0)
    return AlignmentMatrix(ks, np.clip(align, 0, 1), np.full(n, float(d)), d)


@pytest.mark.slow
def test_weak_alignment_is_found_by_the_mean_twice_as_often_as_by_accuracy():
    """300 layers of eight experts. The share called is within three binomial deviations of 0.533, that of the
    mean alignment's test in 4,000 layers; accuracy found 0.284 of those."""
    generator = np.random.default_rng(3)
    tests = [pairing_test(weakly_aligned_layer(generator, 8, 32)) for _ in range(300)]
    called = np.mean([test.verdict != CHANCE for test in tests])
    by_accuracy = np.mean([test.p_accuracy <= 0.05 for test in tests])
    assert called == pytest.approx(0.533, abs=sampling_error(0.533, 300))
    assert by_accuracy < 0.65 * called


def test_a_layer_found_by_its_mean_alone_beats_chance_without_identifying():
    """Every row fits expert 0 best, and its own expert second."""
    table = 0.1 + 0.2 * np.eye(8)
    table[:, 0] += 0.3
    test = pairing_test(matrix_of(table + 0.001 * random_tables(0, 8, 1)[0]))
    assert test.best_accuracy == pytest.approx(1 / 8)
    assert test.p_accuracy > 0.05
    assert (test.verdict, test.p_value) == (NON_RANDOM, pytest.approx(1 / math.factorial(8)))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_few_experts_cannot_be_called_permuted(n):
    """A perfect other order at every k of a small grid."""
    for ks in (1, 2, 6, 12):
        assert pairing_test(diagonal_layer(n, 1, ks)).verdict == CHANCE
        assert false_call_rate(n, ks) == (0.05 if n == 4 else 0)


@pytest.mark.parametrize(("n", "most_ks"), [(5, 1), (6, 4), (7, 17), (8, 64)])
def test_a_permuted_layer_of_five_or_more_experts_is_found_up_to_a_number_of_ks(n, most_ks):
    for ks, found, rate in ((most_ks, PERMUTED, 0.06), (most_ks + 1, CHANCE, 0.05)):
        assert pairing_test(diagonal_layer(n, 1, ks)).verdict == found
        assert false_call_rate(n, ks) == pytest.approx(rate)


# --- verdicts


def test_an_aligned_layer_is_called_identifying():
    test = pairing_test(diagonal_layer(8))
    assert (test.verdict, test.best_accuracy) == (IDENTIFYING, 1)
    assert test.p_lower > 0.9


def test_an_anti_aligned_layer_has_a_small_lower_p_and_a_large_upper_one():
    test = pairing_test(matrix_of(0.5 - 0.3 * np.eye(8) + 0.01 * random_tables(0, 8, 1)[0]))
    assert test.p_lower == pytest.approx(1 / math.factorial(8))
    assert test.p_value == 1
    assert test.verdict == CHANCE


def test_a_layer_that_beats_chance_short_of_nine_in_ten_is_called_non_random():
    table = 0.1 + 0.5 * np.eye(8)
    table[[5, 6, 7], [5, 6, 7]] = 0.0  # three routers fit other experts better
    test = pairing_test(matrix_of(table + 0.01 * random_tables(0, 8, 1)[0]))
    assert test.best_accuracy == pytest.approx(5 / 8)
    assert test.verdict == NON_RANDOM


def test_right_hits_with_a_negative_mean_margin_do_not_identify():
    """29 of 30 routers win by a little, the last loses by much, which one random pairing in 30 gains from."""
    table = 0.5 + 0.01 * np.eye(30)
    table[29, 0] = 0.9
    test = pairing_test(matrix_of(table))
    assert test.best_accuracy == pytest.approx(29 / 30)
    assert test.verdict == NON_RANDOM


@pytest.mark.parametrize("shift", [1, 3])
def test_a_permuted_layer_is_called_permuted_and_its_order_is_found(shift):
    layer = diagonal_layer(8, shift, ks=2)
    assert pairing_test(layer).verdict == PERMUTED
    assert (other_order(layer).k, other_order(layer).experts) == (
        1,
        [(router + shift) % 8 for router in range(8)],
    )


def test_the_hidden_order_is_that_of_the_planted_layer():
    router, gates = planted_layer("permuted", np.random.default_rng(0))
    rows = router / np.linalg.norm(router, axis=1, keepdims=True)
    energy = np.stack([np.cumsum((rows @ np.linalg.svd(gate)[2].T) ** 2, axis=1) for gate in gates], axis=-1)
    layer = matrix_of(*(energy[:, k - 1] for k in (1, 4, 16, 64)), ks=[1, 4, 16, 64], d_model=256)
    assert pairing_test(layer).verdict == PERMUTED
    assert other_order(layer).experts == [(expert + 3) % 8 for expert in range(8)]


def test_a_router_without_a_mutual_best_is_left_open_in_the_other_order():
    table = 0.1 + 0.5 * np.roll(np.eye(12), 1, axis=1)
    table[4] = 0.1  # fits nothing
    assert other_order(matrix_of(table)).experts == [*range(1, 5), -1, *range(6, 12), 0]


def test_the_p_of_another_order_is_its_bound_times_the_ks_looked_at():
    layer = diagonal_layer(8, 3, ks=2)
    assert pairing_test(layer).other_order.p == pytest.approx(2 * mutual_best_bound(8, 8))
    assert pairing_test(diagonal_layer(8)).other_order is None


def test_the_chance_of_the_best_accuracy_pays_for_the_choice_of_k():
    """Two ks whose winners differ in every row: a random pairing's better one hits more than 1/n."""
    one, other = np.eye(4), np.roll(np.eye(4), 1, axis=1)
    assert pairing_test(matrix_of(one)).chance_accuracy == pytest.approx(1 / 4)
    both = [max((p == np.arange(4)).mean(), (p == np.roll(np.arange(4), -1)).mean()) for p in permutations(4)]
    assert pairing_test(matrix_of(one, other)).chance_accuracy == pytest.approx(np.mean(both))


def test_a_degenerate_k_shows_no_other_order():
    permuted = np.roll(np.eye(8), 1, axis=1)
    assert other_order(matrix_of(permuted, ks=[16], d_model=16)) is None


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_two_or_three_experts_are_never_called_anything_but_chance(n, shift):
    assert pairing_test(diagonal_layer(n, shift)).verdict == CHANCE


def test_the_best_k_is_the_smallest_of_the_most_accurate_and_never_degenerate():
    accuracy, degenerate = np.array([0.25, 0.75, 0.75, 1.0]), np.array([False, False, False, True])
    assert best_index(accuracy, degenerate) == 1
    assert best_index(accuracy, ~degenerate) == 3
    assert best_index(accuracy, np.ones(4, bool)) is None


def permutations(n: int) -> list[np.ndarray]:
    return [np.array(order) for order in itertools.permutations(range(n))]


# --- chance of mutual-best pairs


def simulated_mutual_pairs(n: int, draws: int) -> np.ndarray:
    tables = np.random.default_rng(n).random((draws, n, n))
    best = (tables == tables.max(axis=2, keepdims=True)) & (tables == tables.max(axis=1, keepdims=True))
    return best.sum(axis=(1, 2))


@pytest.mark.parametrize(("n", "exact"), [(2, 1 / 3), (3, 1 / 10), (4, 1 / 35)])
def test_the_chance_that_all_are_mutual_best_is_exact(n, exact):
    assert mutual_best_bound(n, n) == pytest.approx(exact)
    draws = 40_000
    share = (simulated_mutual_pairs(n, draws) == n).mean()
    assert share == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / draws))


@pytest.mark.parametrize("n", [3, 4, 6])
def test_the_chance_that_some_are_mutual_best_is_bounded(n):
    pairs = simulated_mutual_pairs(n, 20_000)
    for count in range(n):
        share = (pairs >= count).mean()
        assert share <= mutual_best_bound(n, count) + 4 * math.sqrt(share * (1 - share) / 20_000)
    assert mutual_best_bound(n, n - 1) < 0.95  # a bound that says something
