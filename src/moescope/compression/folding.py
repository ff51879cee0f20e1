"""The router after merging: `fold` gives every group of experts one row, fitted on calibration states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moescope.compression.calibration import Gating, LayerStates
from moescope.errors import BadInput
from moescope.execution.scoring import Scoring
from moescope.routing.counts import one_hot_choices

SAME_LOGITS = 0.02  # relative error up to which logits count as rows times states
STATES_AT_ONCE = 512
BALANCE_STEPS = 300
BALANCE_RATE = 0.5  # first step of the correction bias, per share of all tokens; decays to 0
RIDGES = (1.0, 0.1, 0.01, 1e-3, 0.0)  # tried from stiff to free, each from where the one before ended
WORSE = 2  # ridges in a row with a larger held-out KL end the search
HELD_OUT = 4  # every fourth state judges the ridge
STEPS = 200
GRADIENT = 1e-7  # largest entry of the gradient at which a fit has converged
ROUGH_GRADIENT = 1e-5  # the same while ridges are compared

Groups = Sequence[Sequence[int]]
Weights = Sequence[Sequence[float]]


@dataclass(frozen=True)
class RouterParts:
    """A router as it is stored: rows, and the biases it has."""

    router_ED: Tensor
    router_bias_E: Tensor | None = None
    correction_bias_E: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> RouterParts:
        return replace(self, **{name: change(part) for name, part in vars(self).items() if part is not None})

    def logits(self, x_TD: Tensor) -> Tensor:
        product = x_TD @ self.router_ED.T
        return product if self.router_bias_E is None else product + self.router_bias_E


@dataclass(frozen=True)
class FoldedRouter:
    """A router of one row per group, in float32, and the cost of folding on the calibration states."""

    router: RouterParts
    kl_start: float  # of the usage-weighted mean rows
    kl: float  # of the fitted rows
    kl_held_out: (
        float | None
    )  # of rows fitted on three quarters, on the fourth; None where nothing was fitted
    ridge: float | None  # how strongly rows were held to their start, chosen on that quarter
    gate_scale: float  # mean gate sum of a token, after / before; 1 where gates are renormalised
    load_error: float | None  # half the sum of |share - wanted share| of slots; None without correction bias


def fold_router(
    router: RouterParts,
    groups: Groups,
    weights: Weights,
    states: LayerStates,
    gating: Gating,
    top_k: int,
    layer: int = 0,
    device: str = "cpu",
) -> FoldedRouter:
    """Fit one row per group; softmax: minimise the mean KL from the groups' probabilities to softmax(R x).

    A group's probability is the sum of its members'. Sigmoid scores do not add up: there the row and the
    correction bias are the members' weighted means, and that bias is balanced so that every group is chosen
    by as many tokens as chose one of its members. `weights` define the start (by usage), `top_k` is that
    after merging. Experts in no group are dropped, and the rest is measured against probabilities without
    them.

    The fit is specific to its states; `kl_held_out` says how well it transfers to others.
    """
    scoring = gating.scoring
    assert states.logits_TE is not None
    x_TD, logits_TE = states.x_TD.to(device, torch.float64), states.logits_TE.to(device, torch.float64)
    stored = in_fp64(router, device)
    error = float((stored.logits(x_TD) - logits_TE).norm() / logits_TE.norm().clamp(min=1e-300))
    if not error <= SAME_LOGITS:  # fitted rows would be meaningless
        raise BadInput(
            f"layer {layer}: the router's logits differ from its rows times the experts' input by "
            f"{error:.0%}, so no row can be fitted for merged experts; use a pruning method"
        )
    member_KE = group_matrix(groups, None, len(stored.router_ED), device)
    share_KE = group_matrix(groups, weights, len(stored.router_ED), device)
    folded = start = stored.map(lambda part: share_KE @ part)
    target_TK = scoring.scores(logits_TE) @ member_KE.T
    target_TK = target_TK / target_TK.sum(-1, keepdim=True).clamp(min=1e-300)
    kl_start = mean_kl(target_TK, log_scores(start.logits(x_TD), scoring))
    held_out = ridge = load_error = None
    if scoring.function != "sigmoid":
        fit, held_out, ridge = fit_rows(x_TD, target_TK, start.router_ED, start.router_bias_E)
        folded = replace(fit, correction_bias_E=start.correction_bias_E)
    elif start.correction_bias_E is not None:
        folded, load_error = balance(start, x_TD, states.chosen_TK.to(device), member_KE, gating, top_k)
    after_TK = folded.logits(x_TD)
    kl = mean_kl(target_TK, log_scores(after_TK, scoring))
    scale = gate_scale(states.gates_TK, after_TK.float(), folded.correction_bias_E, gating, top_k)
    return FoldedRouter(in_fp32(folded), kl_start, kl, held_out, ridge, scale, load_error)


def mean_router(router: RouterParts, groups: Groups, weights: Weights) -> RouterParts:
    """The members' weighted mean rows and biases, in float32: the router without text to fit on."""
    share_KE = group_matrix(groups, weights, len(router.router_ED), "cpu")
    return in_fp32(in_fp64(router, "cpu").map(lambda part: share_KE @ part))


def in_fp32(router: RouterParts) -> RouterParts:
    return router.map(lambda part: part.float().cpu())


def in_fp64(router: RouterParts, device: str) -> RouterParts:
    """The router in float64 on the device, its biases flattened."""
    return router.map(
        lambda part: (part if part is router.router_ED else part.flatten()).detach().to(device, torch.float64)
    )


def group_matrix(groups: Groups, weights: Weights | None, n_experts: int, device: str) -> Tensor:
    """[K, E]: the weight of each expert in each group; without weights 1 for every member."""
    matrix_KE = torch.zeros(len(groups), n_experts, dtype=torch.float64, device=device)
    for row, group in enumerate(groups):
        matrix_KE[row, list(group)] = matrix_KE.new_tensor(weights[row] if weights else 1.0)
    return matrix_KE


def log_scores(logits_TK: Tensor, scoring: Scoring) -> Tensor:
    if scoring.function != "sigmoid":
        return logits_TK.log_softmax(-1)
    raw = torch.nn.functional.logsigmoid(logits_TK)
    return raw - raw.logsumexp(-1, keepdim=True)


def gate_scale(
    gates_TK: Tensor, after_TK: Tensor, bias_K: Tensor | None, gating: Gating, top_k: int
) -> float:
    """Mean gate sum of a token with new logits and correction bias over that before; 1 if renormalised.

    Where gates are not renormalised, a group's probability is the sum of its members', so the block's output
    mostly becomes larger.
    """
    if gating.normalised:
        return 1.0
    _, after = gating.with_bias(bias_K).route(after_TK, top_k)
    return float(after.double().sum(-1).mean() / gates_TK.double().sum(-1).mean())


# --- the correction bias, and thresholds


def balance(
    start: RouterParts, x_TD: Tensor, chosen_TK: Tensor, member_KE: Tensor, gating: Gating, top_k: int
) -> tuple[RouterParts, float]:
    """Adjust the correction bias until each group's load is near its members', and return the error left.

    b += rate (wanted - load) / T with decaying rates, the rule by which such biases are trained (Wang et al.
    2024, auxiliary-loss-free balancing); the best step is returned. Wanted is the number of tokens that chose
    any member, scaled to top_k slots per token.
    """
    assert start.correction_bias_E is not None
    logits_TK = start.logits(x_TD)
    wanted_K = wanted_load(chosen_TK, member_KE, top_k)
    bias = start.correction_bias_E
    best, best_error = bias, float("inf")
    for step in range(BALANCE_STEPS):
        chosen = gating.with_bias(bias).route(logits_TK, top_k)[0]
        load_K = torch.bincount(chosen.flatten(), minlength=logits_TK.shape[1]).double()
        error = float((load_K - wanted_K).abs().sum() / (2 * wanted_K.sum()))
        if error < best_error:
            best, best_error = bias, error
        bias = bias + BALANCE_RATE * (1 - step / BALANCE_STEPS) ** 2 * (wanted_K - load_K) / len(x_TD)
    return replace(start, correction_bias_E=best), best_error


def wanted_load(chosen_TK: Tensor, member_KE: Tensor, top_k: int) -> Tensor:
    """Tokens per group: top_k per token in total, and at most one of each token's slots."""
    n_tokens = len(chosen_TK)
    wanted = groups_chosen(chosen_TK, member_KE).double().sum(0).clamp(min=1e-9)
    for _ in range(len(wanted)):  # the excess over one slot per token goes to the others proportionally
        full = wanted >= n_tokens
        rest = top_k * n_tokens - n_tokens * int(full.sum())
        scaled = torch.where(full, float(n_tokens), wanted * rest / wanted[~full].sum().clamp(min=1e-300))
        if bool((scaled <= n_tokens).all()):
            return scaled
        wanted = scaled.clamp(max=n_tokens)
    return wanted


def groups_chosen(chosen_TK: Tensor, member_KE: Tensor) -> Tensor:
    """[T, K]: whether a token chose any member of a group; -1 is an empty slot."""
    return one_hot_choices(chosen_TK.long(), member_KE.shape[1]) @ member_KE.float().T > 0


def load_thresholds(rows_KD: Tensor, groups: Groups, states: LayerStates) -> tuple[Tensor, float]:
    """A threshold per group by which it takes as many states as its members did, and the gate scale.

    With c states it is between the c-th and the next largest probability, as in training; below all where
    every state is taken.
    """
    assert states.logits_TE is not None
    p_TK = (states.x_TD.float() @ rows_KD.T).softmax(-1)
    member_KE = group_matrix(groups, None, states.logits_TE.shape[1], "cpu")
    wanted_K = groups_chosen(states.chosen_TK, member_KE).sum(0)
    ranked = torch.nn.functional.pad(p_TK.sort(0, descending=True).values.T, (1, 1))
    ranked[:, 0] = 1.0
    threshold_K = ranked.gather(1, torch.stack([wanted_K, wanted_K + 1], 1)).mean(1)
    after = (p_TK * (p_TK >= threshold_K)).double().sum()
    return threshold_K, float(after / states.gates_TK.double().sum().clamp(min=1e-30))


# --- rows fitted to probabilities: a convex problem, solved in float64


def fit_rows(
    x_TD: Tensor, target_TK: Tensor, start_KD: Tensor, start_bias_K: Tensor | None = None
) -> tuple[RouterParts, float, float]:
    """Rows R (and a bias, if there is one) that minimise mean KL(target || softmax(R x + b)) plus a ridge.

    The ridge is s l/2 ||R - start||^2 with s the mean square of a state's entry: where states are fewer than
    the rows' entries, rows that fit them exactly fit nothing else. l is the one of `RIDGES` under which rows
    fitted on three quarters of the states have the smallest KL on the fourth; if none beats the start, the
    start is returned. The final rows are fitted on all states. Returned with them: that KL, and l.
    """
    fitted = torch.arange(len(x_TD), device=x_TD.device) % HELD_OUT < HELD_OUT - 1
    judged = fitted if bool(fitted.all()) else ~fitted
    part = Problem(x_TD[fitted], target_TK[fitted], start_KD, start_bias_K)

    def held_out_kl(rows_KD: Tensor, bias_K: Tensor | None) -> float:
        return mean_kl(target_TK[judged], log_probabilities(x_TD[judged], rows_KD, bias_K))

    best_ridge, best_kl = float("inf"), held_out_kl(start_KD, start_bias_K)
    change, worse = part.zero, 0
    for ridge in RIDGES:
        change = part.solve(ridge, change, ROUGH_GRADIENT)
        kl = held_out_kl(*part.rows(change))
        worse = 0 if kl < best_kl else worse + 1
        if kl < best_kl:
            best_ridge, best_kl = ridge, kl
        elif worse == WORSE:
            break
    rows, bias = start_KD, start_bias_K
    if best_ridge != float("inf"):
        full = Problem(x_TD, target_TK, start_KD, start_bias_K)
        rows, bias = full.rows(full.solve(best_ridge, full.zero))
    return RouterParts(rows, bias), best_kl, best_ridge


def log_probabilities(x_TD: Tensor, rows_KD: Tensor, bias_K: Tensor | None) -> Tensor:
    return RouterParts(rows_KD, bias_K).logits(x_TD).log_softmax(-1)


def mean_kl(target_TK: Tensor, log_q_TK: Tensor) -> float:
    """Mean over tokens of sum p log(p / q), in nats."""
    terms = torch.xlogy(target_TK, target_TK) - target_TK * log_q_TK
    return float(terms.sum(-1).mean().clamp(min=0))


class Problem:
    """The fit in the states' scaled principal axes: well conditioned, so that few steps suffice.

    Rows change within the span of the states only; outside of it they stay at the start.
    """

    def __init__(self, x_TD: Tensor, target_TK: Tensor, start_KD: Tensor, start_bias_K: Tensor | None):
        self.start_KD, self.start_bias_K, self.target_TK = start_KD, start_bias_K, target_TK
        # right singular vectors, and squared singular values above 1e-6 of the largest, from the smaller Gram
        wide = x_TD.shape[0] < x_TD.shape[1]
        squares, vectors = torch.linalg.eigh(x_TD @ x_TD.T if wide else x_TD.T @ x_TD)
        large = squares > 1e-12 * squares[-1].clamp(min=1e-300)
        squares, vectors = squares[large], vectors[:, large]
        self.axes_RD = squares.rsqrt()[:, None] * (vectors.T @ x_TD) if wide else vectors.T
        self.variance_R = squares / len(x_TD)
        self.scale = float(x_TD.square().mean())
        self.states_TR = x_TD @ self.axes_RD.T
        self.base_TK = RouterParts(start_KD, start_bias_K).logits(x_TD)
        self.zero = x_TD.new_zeros(len(start_KD), len(squares) + (start_bias_K is not None))  # no change

    def rows(self, change_KR: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows and bias of a change along the axes; the last column is the bias's where there is one."""
        axes = len(self.variance_R)
        bias = None if self.start_bias_K is None else self.start_bias_K + change_KR[:, axes]
        return self.start_KD + change_KR[:, :axes] @ self.axes_RD, bias

    def solve(self, ridge: float, change_KR: Tensor, gradient: float = GRADIENT) -> Tensor:
        """Minimise mean KL + ridge scale / 2 ||change||^2 over changes along the axes, by L-BFGS."""
        axes = len(self.variance_R)
        shrink_R = (self.variance_R + ridge * self.scale).rsqrt()
        if self.start_bias_K is not None:
            shrink_R = torch.cat([shrink_R, shrink_R.new_ones(1)])
        states_TR = self.states_TR * shrink_R[:axes]
        free = (change_KR / shrink_R).clone()
        if not free.numel():
            return free  # states that are all zero
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
            penalty = ridge * self.scale / 2 * change.square().sum()
            loss = -(self.target_TK * log_q_TK).sum(-1).mean() + penalty
            off_TK = (log_q_TK.exp() - self.target_TK) / len(self.target_TK)  # targets sum to 1 per token
            slope = off_TK.T @ states_TR + ridge * self.scale * change * shrink_R[:axes]
            bias_slope = [] if self.start_bias_K is None else [off_TK.sum(0)[:, None]]
            free.grad = torch.cat([slope, *bias_slope], dim=1)
            return loss

        with torch.no_grad():
            search.step(closure)  # type: ignore[no-untyped-call]
        return free * shrink_R
