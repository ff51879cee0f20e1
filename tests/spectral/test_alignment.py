from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moescope.spectral.alignment import (
    TIE,
    argmax_accuracy,
    assignment_accuracy,
    cumulate,
    cumulative_energy,
    diagonal,
    hit_shares,
    margins,
    random_expectation,
    shuffle_null,
    z_ceiling,
    z_scores,
)
from spectral.builders import matrix_of

square_matrices = st.integers(2, 9).flatmap(
    lambda n: arrays(np.float64, (1, n, n), elements=st.floats(0, 1, width=16))
)


def closed_form_z(M_KEE: np.ndarray) -> np.ndarray:
    mean, std = shuffle_null(M_KEE)
    return z_scores(diagonal(M_KEE) - mean[:, None], std)


# --- from energies to M(k)


def test_energies_are_cumulated_up_to_each_k_and_in_total():
    energy = np.array([[0.5, 0.25, 0.125], [0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(cumulative_energy(energy, [1, 2]), [[0.5, 0.75, 0.875], [0, 0, 1]])


def test_a_k_above_an_experts_rank_holds_its_total():
    energy = np.array([[0.5, 0.25]])
    np.testing.assert_array_equal(cumulative_energy(energy, [1, 2, 4, 8]), [[0.5, 0.75, 0.75, 0.75, 0.75]])


def test_a_rank_one_expert_aligns_fully_at_k_one():
    """Router i is the one right singular vector of expert i, and orthogonal to the others'."""
    energies = [cumulative_energy(np.eye(3)[:, [expert]], [1]) for expert in range(3)]
    M = cumulate(energies, [1, 1, 1], d_model=3, k_grid=[1])
    assert M.ks == [1]
    np.testing.assert_array_equal(M.align_KEE, [np.eye(3)])
    assert not M.degenerate_K.any()


def test_m_is_indexed_by_k_then_router_then_expert():
    first = np.array([[0.1, 0.2], [0.3, 0.4], [0.0, 0.6]])  # routers x singular values of expert 0
    k_grid = [1, 2]
    M = cumulate(
        [cumulative_energy(energy, k_grid) for energy in (first, first / 2, first / 4)], [2, 2, 2], 8, k_grid
    )
    assert M.align_KEE.shape == (2, 3, 3)
    np.testing.assert_allclose(M.align_KEE[0], np.outer([0.1, 0.3, 0.0], [1, 0.5, 0.25]))
    np.testing.assert_allclose(M.align_KEE[1], np.outer([0.3, 0.7, 0.6], [1, 0.5, 0.25]))


def test_the_layers_largest_rank_replaces_larger_ks():
    k_grid = [1, 2, 4, 8]
    energies = [cumulative_energy(np.full((2, rank), 0.1), k_grid) for rank in (2, 3)]
    M = cumulate(energies, [2, 3], 8, k_grid)
    assert M.ks == [1, 2, 3]
    np.testing.assert_allclose(M.align_KEE[:, 0], [[0.1, 0.1], [0.2, 0.2], [0.2, 0.3]])


def test_k_equal_to_a_rank_below_the_width_is_not_degenerate_and_k_equal_to_the_width_is():
    tables = [np.eye(2)] * 3
    assert matrix_of(*tables, ks=[1, 4, 6], d_model=8).degenerate_K.tolist() == [False, False, False]
    assert matrix_of(*tables, ks=[1, 4, 8], d_model=8).degenerate_K.tolist() == [False, False, True]


def test_random_expectation_stops_growing_at_each_experts_rank():
    np.testing.assert_array_equal(
        random_expectation([1, 4, 8], np.array([8.0, 3.0]), 16), np.array([[1, 1], [4, 3], [8, 3]]) / 16
    )


# --- accuracies and margins


def test_ties_at_full_rank_are_worth_one_in_n():
    everything_tied = np.ones((1, 8, 8))
    assert argmax_accuracy(everything_tied) == pytest.approx([1 / 8])
    assert assignment_accuracy(everything_tied) == pytest.approx([1 / 8])


def test_a_tie_of_two_is_worth_one_half_and_only_within_the_tolerance():
    M = np.array([[[0.9, 0.9 - TIE / 2, 0.1], [0.1, 0.9, 0.2], [0.9 + 2 * TIE, 0.3, 0.9]]])
    np.testing.assert_array_equal(hit_shares(M)[0], [[0.5, 0.5, 0], [0, 1, 0], [1, 0, 0]])
    assert argmax_accuracy(M) == pytest.approx([(0.5 + 1 + 0) / 3])


@settings(deadline=None)
@given(square_matrices)
def test_each_routers_hits_sum_to_one(M_KEE):
    np.testing.assert_allclose(hit_shares(M_KEE).sum(axis=2), 1)


def test_argmax_accuracy_reads_rows_not_columns():
    M = np.array([[[0.9, 0.1, 0.1], [0.95, 0.5, 0.1], [0.95, 0.1, 0.5]]])  # routers 1 and 2 prefer expert 0
    assert argmax_accuracy(M) == pytest.approx([1 / 3])
    assert argmax_accuracy(M.transpose(0, 2, 1)) == pytest.approx([2 / 3])


def test_assignment_accuracy_is_not_fooled_by_an_expert_that_attracts_every_router():
    n = 6
    M = np.full((1, n, n), 0.1)
    M[:, range(n), range(n)] = 0.5
    M[:, :, 0] = 0.9
    assert argmax_accuracy(M) == pytest.approx([1 / n])
    assert assignment_accuracy(M) == pytest.approx([1])


def test_assignment_accuracy_is_the_diagonal_share_of_the_best_assignment():
    swapped = np.eye(5)[[1, 0, 2, 3, 4]]
    assert assignment_accuracy(
        np.stack([np.eye(5), swapped, np.roll(np.eye(5), 1, axis=0)])
    ) == pytest.approx([1, 0.6, 0])


@pytest.mark.parametrize("n", [2, 6, 8])
def test_assignment_accuracy_is_chance_where_every_assignment_is_as_good(n):
    strengths = np.random.default_rng(n).uniform(0.1, 0.5, n)
    experts_alike = np.tile(strengths[:, None], (1, n))
    assert assignment_accuracy(np.stack([experts_alike, experts_alike.T])) == pytest.approx([1 / n, 1 / n])


def test_margins_worked_by_hand():
    M = np.array([[[0.5, 0.2, 0.4], [0.6, 0.3, 0.1], [0.0, 0.7, 0.7]], np.eye(3)])
    np.testing.assert_allclose(margins(M), [[0.1, -0.3, 0.0], [1, 1, 1]])
    np.testing.assert_array_equal(M[1], np.eye(3))  # what was given is left as it was


# --- the shuffle null and z


def test_the_shuffle_null_is_the_mean_and_population_deviation_of_all_entries():
    mean, std = shuffle_null(np.array([[[1.0, 2.0], [3.0, 6.0]]]))
    assert mean == pytest.approx([3])
    assert std == pytest.approx([np.sqrt((4 + 1 + 0 + 9) / 4)])


def test_the_shuffle_null_is_that_of_all_re_pairings_together():
    M_KEE = np.random.default_rng(0).random((2, 5, 5))
    pooled = M_KEE[:, np.arange(5), list(permutations(range(5)))].reshape(2, -1)
    np.testing.assert_allclose(shuffle_null(M_KEE), (pooled.mean(1), pooled.std(1)), rtol=1e-12)


def test_z_is_zero_where_every_entry_is_equal():
    assert closed_form_z(np.ones((1, 4, 4))).tolist() == [[0, 0, 0, 0]]


@settings(max_examples=300, deadline=None)
@given(square_matrices)
def test_no_layers_mean_z_exceeds_the_ceiling(M_KEE):
    assert abs(closed_form_z(M_KEE).mean()) <= z_ceiling(M_KEE.shape[1]) + 1e-6


@pytest.mark.parametrize("n", [2, 3, 8, 128])
def test_the_ceiling_is_reached_by_an_equal_diagonal_above_equal_others(n):
    M = np.full((1, n, n), 0.2) + 0.5 * np.eye(n)
    assert closed_form_z(M).mean() == pytest.approx(np.sqrt(n - 1)) == z_ceiling(n)
