"""Router rows fitted to given probabilities: a convex problem, solved in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = (1.0, 0.1, 0.01, 1e-3, 0.0)  # tried from stiff to free, each from where the one before ended
WORSE = 2  # ridges in a row that judge worse end the search
HELD_OUT = 4  # every fourth state judges the ridge
STEPS = 200
GRADIENT = 1e-7  # largest entry of the gradient at which a fit counts as done
ROUGHLY = 1e-5  # the same while ridges are tried: choosing among them needs no more


@dataclass(frozen=True)
class FittedRows:
    rows_KD: Tensor
    bias_K: Tensor | None
    kl: float
    kl_held_out: float  # of the fit on three quarters, judged on the fourth
    ridge: float


def fit_rows(
    x_TD: Tensor, target_TK: Tensor, start_KD: Tensor, start_bias_K: Tensor | None = None
) -> FittedRows:
    """Rows R (and a bias, where there is one at the start) with the least mean KL(target || softmax(R x + b))
    plus a ridge.

    The ridge is s l/2 ||R - start||^2 with s the mean square of a state's entry: where states are fewer than
    the rows' numbers, rows
    that fit them exactly fit nothing else. l is the one of `RIDGES` under which rows fitted on three quarters
    of the states do best on the
    fourth; where the start does better than any, it is kept. Rows are then fitted on all states.
    """
    judged = torch.arange(len(x_TD), device=x_TD.device) % HELD_OUT == HELD_OUT - 1
    if int(judged.sum()) == 0:
        judged = torch.ones_like(judged)
    fitted = ~judged if not bool(judged.all()) else judged
    few = Problem(x_TD[fitted], target_TK[fitted], start_KD, start_bias_K)
    start_kl = mean_kl(target_TK[judged], log_probabilities(x_TD[judged], start_KD, start_bias_K))
    best_ridge, best_kl = float("inf"), start_kl
    change, worse = few.zero(), 0
    for ridge in RIDGES:
        change = few.solve(ridge, change, ROUGHLY)
        rows, bias = few.rows(change)
        kl = mean_kl(target_TK[judged], log_probabilities(x_TD[judged], rows, bias))
        worse = 0 if kl < best_kl else worse + 1
        if kl < best_kl:
            best_ridge, best_kl = ridge, kl
        elif worse == WORSE:
            break
    if best_ridge == float("inf"):
        kl = mean_kl(target_TK, log_probabilities(x_TD, start_KD, start_bias_K))
        return FittedRows(start_KD, start_bias_K, kl, start_kl, best_ridge)
    whole = Problem(x_TD, target_TK, start_KD, start_bias_K)
    rows, bias = whole.rows(whole.solve(best_ridge, whole.zero()))
    return FittedRows(
        rows, bias, mean_kl(target_TK, log_probabilities(x_TD, rows, bias)), best_kl, best_ridge
    )


def log_probabilities(x_TD: Tensor, rows_KD: Tensor, bias_K: Tensor | None) -> Tensor:
    product = x_TD @ rows_KD.T
    return (product if bias_K is None else product + bias_K).log_softmax(-1)


def mean_kl(target_TK: Tensor, log_q_TK: Tensor) -> float:
    """Mean over tokens of sum p log(p / q), in nats."""
    terms = torch.xlogy(target_TK, target_TK) - target_TK * log_q_TK
    return float(terms.sum(-1).mean().clamp(min=0))


def principal_axes(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Right singular vectors and squared singular values, from the smaller Gram matrix.

    Those below 1e-6 of the largest are left out.
    """
    wide = x_TD.shape[0] < x_TD.shape[1]
    squares, vectors = torch.linalg.eigh(x_TD @ x_TD.T if wide else x_TD.T @ x_TD)
    kept = squares > 1e-12 * squares[-1].clamp(min=1e-300)
    squares, vectors = squares[kept], vectors[:, kept]
    return (squares.rsqrt()[:, None] * (vectors.T @ x_TD) if wide else vectors.T), squares


class Problem:
    """The fit in coordinates in which it is round: states turned to their principal axes and scaled, so that
    few steps suffice.

    Rows move within the span of the states only; what lies outside changes no logit of theirs and stays at
    the start.
    """

    def __init__(self, x_TD: Tensor, target_TK: Tensor, start_KD: Tensor, start_bias_K: Tensor | None):
        self.start_KD, self.start_bias_K, self.target_TK = start_KD, start_bias_K, target_TK
        self.axes_RD, squares_R = principal_axes(x_TD)
        self.variance_R = squares_R / len(x_TD)
        self.scale = float(x_TD.square().mean())
        self.states_TR = x_TD @ self.axes_RD.T
        product = x_TD @ start_KD.T
        self.base_TK = product if start_bias_K is None else product + start_bias_K

    def zero(self) -> Tensor:
        rows, axes = self.start_KD.shape[0], len(self.variance_R)
        return self.base_TK.new_zeros(rows, axes + (self.start_bias_K is not None))

    def rows(self, change_KR: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows and bias of a change along the axes; the last column moves the bias where there is one."""
        axes = len(self.variance_R)
        bias = None if self.start_bias_K is None else self.start_bias_K + change_KR[:, axes]
        return self.start_KD + change_KR[:, :axes] @ self.axes_RD, bias

    def solve(self, ridge: float, change_KR: Tensor, gradient: float = GRADIENT) -> Tensor:
        """The change along the axes that minimises mean KL + ridge scale / 2 ||change||^2.

        By L-BFGS from the one given.
        """
        axes = len(self.variance_R)
        shrink_R = (self.variance_R + ridge * self.scale).rsqrt()
        if self.start_bias_K is not None:
            shrink_R = torch.cat([shrink_R, shrink_R.new_ones(1)])
        states_TR = self.states_TR * shrink_R[:axes]
        free = (change_KR / shrink_R).clone()
        search = torch.optim.LBFGS(
            [free],
            max_iter=STEPS,
            tolerance_grad=gradient,
            tolerance_change=1e-12,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            logits_TK = self.base_TK + states_TR @ free[:, :axes].T
            if self.start_bias_K is not None:
                logits_TK = logits_TK + free[:, axes]
            log_q_TK = logits_TK.log_softmax(-1)
            change = free[:, :axes] * shrink_R[:axes]
            loss = (
                -(self.target_TK * log_q_TK).sum(-1).mean() + ridge * self.scale / 2 * change.square().sum()
            )
            off_TK = (log_q_TK.exp() - self.target_TK) / len(
                self.target_TK
            )  # targets sum to 1 at every token
            slope = off_TK.T @ states_TR + ridge * self.scale * change * shrink_R[:axes]
            more = [] if self.start_bias_K is None else [off_TK.sum(0)[:, None]]
            free.grad = torch.cat([slope, *more], dim=1)
            return loss

        with torch.no_grad():
            search.step(closure)  # type: ignore[no-untyped-call]
        return free * shrink_R
