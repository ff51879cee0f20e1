"""Sinkhorn's iteration against two others that share no code with it.

Numpy run to convergence, and the convex dual minimised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

from moescope.decoder.routers import spectra
from moescope.decoder.routers.spectra import column_error


class Balanced(NamedTuple):
    log_plan_TE: torch.Tensor
    potential_E: torch.Tensor
    column_error: torch.Tensor


def balance(*given) -> Balanced:
    return Balanced(*spectra.balance(*given))


N, E = 40, 5
EVERYONE = torch.ones(N, dtype=torch.bool)
FLAT = torch.zeros(E)


@pytest.fixture
def logits_TE() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(N, E) * 2 + torch.tensor(
        [4.0, 2, 0, 0, -3]
    )  # everybody wants expert 0, nobody expert 4


def converged(logits: np.ndarray) -> np.ndarray:
    """The log plan whose rows sum to 1 and columns to N/n.

    Alternating normalisation in float64 until nothing moves.
    """
    rows, columns = np.zeros(len(logits)), np.zeros(logits.shape[1])
    for _ in range(20_000):
        before = columns
        rows = -logsumexp(logits + columns, axis=1)
        columns = np.log(len(logits) / logits.shape[1]) - logsumexp(logits + rows[:, None], axis=0)
        if np.abs(columns - before).max() < 1e-14:
            break
    return logits + rows[:, None] + columns


def test_many_iterations_reach_the_plan_that_numpy_converges_to(logits_TE):
    found = balance(logits_TE, EVERYONE, FLAT, 300)
    np.testing.assert_allclose(
        found.log_plan_TE.exp(), np.exp(converged(logits_TE.double().numpy())), atol=1e-5
    )
    assert found.column_error < 1e-5


def test_three_iterations_are_three_of_rows_and_columns_and_rows_once_more(logits_TE):
    plan = np.exp(logits_TE.double().numpy())
    for _ in range(3):
        plan /= plan.sum(1, keepdims=True)
        plan *= N / E / plan.sum(0)
    plan /= plan.sum(1, keepdims=True)
    np.testing.assert_allclose(balance(logits_TE, EVERYONE, FLAT, 3).log_plan_TE.exp(), plan, atol=1e-5)


def test_its_potentials_minimise_the_dual(logits_TE):
    logits = logits_TE.double().numpy()

    def dual(g):  # sum_t logsumexp(L_t + g) - N/n sum g, whose gradient is what columns have too much
        return logsumexp(logits + g, axis=1).sum() - N / E * g.sum(), softmax(logits + g, axis=1).sum(
            0
        ) - N / E

    best = minimize(dual, np.zeros(E), jac=True, method="BFGS", options={"gtol": 1e-9}).x
    np.testing.assert_allclose(
        balance(logits_TE, EVERYONE, FLAT, 300).potential_E, best - best.mean(), atol=1e-4
    )


def test_after_three_iterations_rows_are_exact_and_the_column_error_is_what_is_left(logits_TE):
    found = balance(logits_TE, EVERYONE, FLAT, 3)
    plan = found.log_plan_TE.exp()
    torch.testing.assert_close(plan.sum(1), torch.ones(N))
    left = (plan.sum(0) / (N / E) - 1).abs().max()
    torch.testing.assert_close(found.column_error, left)
    assert (
        0.01 < left < (logits_TE.softmax(-1).sum(0) / (N / E) - 1).abs().max()
    )  # not there yet, but nearer than the start


def test_starting_from_the_potentials_it_had_found_three_iterations_are_enough(logits_TE):
    start = balance(logits_TE, EVERYONE, FLAT, 300).potential_E
    assert balance(logits_TE, EVERYONE, start, 3).column_error < 1e-5


def test_potentials_have_mean_zero_and_a_constant_in_the_start_changes_nothing(logits_TE):
    found = balance(logits_TE, EVERYONE, FLAT, 3)
    lifted = balance(logits_TE, EVERYONE, FLAT + 7, 3)
    assert found.potential_E.mean().abs() < 1e-6
    torch.testing.assert_close(found.log_plan_TE, lifted.log_plan_TE)


def test_pads_change_nothing_for_the_others(logits_TE):
    mask = torch.arange(N) % 3 > 0
    alone = balance(logits_TE[mask], EVERYONE[mask], FLAT, 3)
    among = balance(logits_TE, mask, FLAT, 3)
    torch.testing.assert_close(among.log_plan_TE[mask], alone.log_plan_TE)
    torch.testing.assert_close(among.potential_E, alone.potential_E)
    torch.testing.assert_close(among.column_error, alone.column_error)


def test_a_batch_of_pads_keeps_the_start_and_makes_no_nan(logits_TE):
    start = torch.tensor([1.0, -1, 0, 0, 0])
    found = balance(logits_TE, ~EVERYONE, start, 3)
    torch.testing.assert_close(found.potential_E, start)
    assert found.log_plan_TE.isfinite().all()


def test_one_token_alone_is_spread_evenly_which_is_why_evaluation_cannot_use_it():
    found = balance(torch.tensor([[5.0, 1, 0, -2]]), torch.ones(1, dtype=torch.bool), torch.zeros(4), 3)
    torch.testing.assert_close(found.log_plan_TE.exp(), torch.full((1, 4), 0.25))


def test_columns_of_one_expert_alone_are_off_by_all_the_others_and_even_ones_by_nothing():
    mask = torch.arange(N) % 3 > 0
    alone = torch.zeros(N, E)
    alone[:, 2] = 1
    assert float(column_error(alone, mask)) == pytest.approx(E - 1)
    assert float(column_error(torch.full((N, E), 1 / E), mask)) == pytest.approx(0, abs=1e-6)
