"""The fit of router rows against an independent optimiser, and where it must not follow its states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from moescope.compression.folding import Problem, fit_rows, log_probabilities, mean_kl


def a_case(seed: int, tokens: int = 300, width: int = 5, rows: int = 3, bias: bool = False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, width)) * np.array([5.0, 2.0, 1.0, 0.3, 0.1])[:width]
    target = softmax(x @ rng.normal(size=(width, rows + 2)), axis=1)
    target = np.concatenate([target[:, : rows - 1], target[:, rows - 1 :].sum(1, keepdims=True)], axis=1)
    start = rng.normal(size=(rows, width))
    return (torch.tensor(part) for part in (x, target, start, rng.normal(size=rows) if bias else np.zeros(0)))


def by_scipy(
    x: np.ndarray, target: np.ndarray, start: np.ndarray, bias: np.ndarray | None, ridge: float
) -> float:
    """The least value of the same objective by another library's quasi-Newton.

    From finite differences of nothing: exact gradients.
    """
    rows, width = start.shape
    scale = np.square(x).mean()

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        own = flat[: rows * width].reshape(rows, width)
        shift = flat[rows * width :] if bias is not None else np.zeros(rows)
        log_q = log_softmax(x @ own.T + shift, axis=1)
        value = (target * (np.log(target) - log_q)).sum(1).mean() + ridge * scale / 2 * np.square(
            own - start
        ).sum()
        off = (np.exp(log_q) - target) / len(x)
        slope = off.T @ x + ridge * scale * (own - start)
        return value, np.concatenate([slope.ravel(), off.sum(0) if bias is not None else np.zeros(0)])

    begin = np.concatenate([start.ravel(), bias if bias is not None else np.zeros(0)])
    return minimize(objective, begin, jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 5000}).fun


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.01, 1.0])
def test_the_least_value_is_the_one_another_optimiser_finds(ridge, with_bias):
    x, target, start, bias = a_case(0, bias=with_bias)
    problem = Problem(x, target, start, bias if with_bias else None)
    rows, shift = problem.rows(problem.solve(ridge, problem.zero))
    ours = mean_kl(target, log_probabilities(x, rows, shift))
    ours += ridge * float(x.square().mean()) / 2 * float((rows - start).square().sum())
    theirs = by_scipy(x.numpy(), target.numpy(), start.numpy(), bias.numpy() if with_bias else None, ridge)
    assert ours == pytest.approx(theirs, abs=1e-9)
    assert (shift is None) == (not with_bias)


def test_probabilities_that_some_rows_give_exactly_are_found_again():
    rng = np.random.default_rng(1)
    x, rows = torch.tensor(rng.normal(size=(400, 6))), torch.tensor(rng.normal(size=(4, 6)))
    target = (x @ rows.T).softmax(-1)
    fit, _, ridge = fit_rows(x, target, torch.zeros(4, 6, dtype=torch.float64))
    assert mean_kl(target, log_probabilities(x, fit.router_ED, fit.router_bias_E)) < 1e-10
    assert ridge == 0
    assert fit.router_ED - fit.router_ED.mean(0) == pytest.approx(rows - rows.mean(0), abs=1e-4)


def test_rows_move_within_the_span_of_the_states_only():
    rng = np.random.default_rng(2)
    x = torch.tensor(rng.normal(size=(200, 6)))
    x[:, 4:] = 0
    start = torch.tensor(rng.normal(size=(3, 6)))
    target = torch.tensor(softmax(rng.normal(size=(200, 3)) + x.numpy()[:, :3], axis=1))
    fit, *_ = fit_rows(x, target, start)
    assert torch.equal(fit.router_ED[:, 4:], start[:, 4:])
    assert not torch.allclose(fit.router_ED[:, :4], start[:, :4])


def test_fewer_states_than_numbers_are_not_followed_into_their_noise():
    rng = np.random.default_rng(3)
    rows = torch.tensor(rng.normal(size=(3, 60)) / 8)
    x, other = (torch.tensor(rng.normal(size=(size, 60))) for size in (60, 4000))
    noisy = (x @ rows.T + 0.7 * torch.tensor(rng.normal(size=(60, 3)))).softmax(-1)
    free = Problem(x, noisy, rows, None)
    exact, _ = free.rows(free.solve(0.0, free.zero))
    fit, *_ = fit_rows(x, noisy, rows)
    truth = (other @ rows.T).softmax(-1)
    assert (
        mean_kl(truth, log_probabilities(other, fit.router_ED, None))
        < mean_kl(truth, log_probabilities(other, exact, None)) / 2
    )
    assert mean_kl(noisy, log_probabilities(x, exact, None)) < 1e-3


def test_a_start_that_no_fit_beats_on_held_out_states_is_kept():
    rng = np.random.default_rng(4)
    rows, x = torch.tensor(rng.normal(size=(3, 8))), torch.tensor(rng.normal(size=(40, 8)))
    target = (x @ rows.T).softmax(-1)
    fit, _, ridge = fit_rows(x, target, rows)
    assert torch.equal(fit.router_ED, rows)
    assert ridge == float("inf")


def test_kl_is_that_of_the_definition_and_zero_probabilities_cost_nothing():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]], dtype=torch.float64)
    assert mean_kl(p, q.log()) == pytest.approx(0.5 * np.log(2) / 2)


def test_states_that_are_all_zero_leave_the_rows_as_they_are():
    start = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    x, target = torch.zeros(8, 4, dtype=torch.float64), torch.full((8, 3), 1 / 3, dtype=torch.float64)
    fit, *_ = fit_rows(x, target, start)
    assert torch.equal(fit.router_ED, start)
    assert mean_kl(target, log_probabilities(x, fit.router_ED, fit.router_bias_E)) == 0
