"""The router after merging: `fold` gives every group of experts one row, fitted on calibration states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moescope.compression.rerouting import Gating
from moescope.compression.row_fitting import fit_rows, mean_kl
from moescope.compression.states import LayerStates
from moescope.errors import BadInput
from moescope.execution.scoring import Scoring

READS_OTHERWISE = 0.02  # relative error up to which logits count as weight times state
BALANCE_STEPS = 300
STATES_AT_ONCE = 512
BALANCE_RATE = 0.5  # first step of the bias, in units of score a share of all tokens; falls to nothing


@dataclass(frozen=True)
class RouterParts:
    """A router as it is stored: rows, and the biases it has."""

    router_ED: Tensor
    router_bias_E: Tensor | None = None
    correction_bias_E: Tensor | None = None


@dataclass(frozen=True)
class FoldedRouter:
    """A router of one row a group, in float32, and what folding cost on the calibration states."""

    router_KD: Tensor
    router_bias_K: Tensor | None
    correction_bias_K: Tensor | None
    kl_start: float  # of the usage-weighted rows
    kl: float  # of the rows taken
    kl_held_out: (
        float | None
    )  # of rows fitted without the quarter they are judged on; None where nothing was fitted
    ridge: float | None  # how strongly rows were held to their start, chosen on that quarter
    gate_scale: float  # mean sum of a token's gates, after / before; 1 where they are renormalised
    load_error: (
        float | None
    )  # half the sum of |share - wanted share| of slots, after balancing; None without a bias for choosing


def fold_router(
    router: RouterParts,
    groups: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    states: LayerStates,
    gating: Gating,
    top_k: int,
    layer: int = 0,
    device: str = "cpu",
) -> FoldedRouter:
    """A row a group. Softmax: minimises the mean KL from the groups' probabilities, sums of their members',
    to softmax(R x).

    Sigmoid scores do not add up over members: the row and the bias for choosing are the members' weighted
    means, and that bias is then
    balanced so that every group is chosen for as many tokens as chose one of its members. `weights` are those
    of the start (tokens chosen),
    `top_k` is that after merging. Experts in no group are dropped, and the rest is measured against
    probabilities without them.

    The fit is no better than the states it was made on; `kl_held_out` tells how far it carries to others.
    """
    scoring = gating.scoring
    assert states.logits_TE is not None
    x_TD, logits_TE = states.x_TD.to(device, torch.float64), states.logits_TE.to(device, torch.float64)
    whole = parts_in_fp64(router, device)
    check_reads_states(whole, x_TD, logits_TE, layer)
    share_KE = share_matrix(groups, weights, len(whole.router_ED), device)
    member_KE = membership(groups, len(whole.router_ED), device)
    start = weighted_rows(whole, share_KE)
    target_TK = scoring.scores(logits_TE) @ member_KE.double().T
    target_TK = target_TK / target_TK.sum(-1, keepdim=True).clamp(min=1e-300)
    kl_start = mean_kl(target_TK, log_scores(logits(start, x_TD), scoring))
    held_out = ridge = load_error = None
    folded = start
    if scoring.function == "sigmoid":
        if start.correction_bias_E is not None:
            folded, load_error = balanced(start, x_TD, states.chosen_TK.to(device), member_KE, gating, top_k)
    else:
        fit = fit_rows(x_TD, target_TK, start.router_ED, start.router_bias_E)
        folded = RouterParts(fit.rows_KD, fit.bias_K, start.correction_bias_E)
        held_out, ridge = fit.kl_held_out, fit.ridge
    after_TK = logits(folded, x_TD)
    kl = mean_kl(target_TK, log_scores(after_TK, scoring))
    scale = gate_scale(states.gates_TK, after_TK.float(), folded.correction_bias_E, gating, top_k)
    rows, bias, correction = in_fp32(folded)
    return FoldedRouter(rows, bias, correction, kl_start, kl, held_out, ridge, scale, load_error)


def mean_router(
    router: RouterParts, groups: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]
) -> RouterParts:
    """The members' weighted mean rows and biases, in float32.

    All that can be done without a text to fit on.
    """
    rows, bias, correction = in_fp32(
        weighted_rows(
            parts_in_fp64(router, "cpu"), share_matrix(groups, weights, len(router.router_ED), "cpu")
        )
    )
    return RouterParts(rows, bias, correction)


def weighted_rows(router: RouterParts, share_KE: Tensor) -> RouterParts:
    return RouterParts(
        share_KE @ router.router_ED,
        None if router.router_bias_E is None else share_KE @ router.router_bias_E,
        None if router.correction_bias_E is None else share_KE @ router.correction_bias_E,
    )


def in_fp32(router: RouterParts) -> tuple[Tensor, Tensor | None, Tensor | None]:
    bias, correction = (
        None if part is None else part.float().cpu()
        for part in (router.router_bias_E, router.correction_bias_E)
    )
    return router.router_ED.float().cpu(), bias, correction


def parts_in_fp64(router: RouterParts, device: str) -> RouterParts:
    given = (router.router_ED, router.router_bias_E, router.correction_bias_E)
    rows, bias, correction = (
        None if part is None else part.detach().to(device, torch.float64) for part in given
    )
    assert rows is not None
    return RouterParts(
        rows, None if bias is None else bias.flatten(), None if correction is None else correction.flatten()
    )


def logits(router: RouterParts, x_TD: Tensor) -> Tensor:
    product = x_TD @ router.router_ED.T
    return product if router.router_bias_E is None else product + router.router_bias_E


def check_reads_states(router: RouterParts, x_TD: Tensor, logits_TE: Tensor, layer: int) -> None:
    """Refuse a router whose logits are not its rows times what the experts are given.

    Rows fitted to that would mean nothing.
    """
    error = (logits(router, x_TD) - logits_TE).norm() / logits_TE.norm().clamp(min=1e-300)
    if not float(error) <= READS_OTHERWISE:
        raise BadInput(
            f"layer {layer}: the router's logits are not its rows times what the experts are "
            f"given (off by {float(error):.0%}), "
            "so no row can be fitted for merged experts; use a method that prunes"
        )


def share_matrix(
    groups: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], n_experts: int, device: str
) -> Tensor:
    """[K, E]: how much of each expert is in each group."""
    found = torch.zeros(len(groups), n_experts, dtype=torch.float64, device=device)
    for place, (group, shares) in enumerate(zip(groups, weights, strict=True)):
        found[place, list(group)] = torch.tensor(list(shares), dtype=torch.float64, device=device)
    return found


def membership(groups: Sequence[Sequence[int]], n_experts: int, device: str) -> Tensor:
    """[K, E]: who is in which group, members of no weight too."""
    found = torch.zeros(len(groups), n_experts, dtype=torch.bool, device=device)
    for place, group in enumerate(groups):
        found[place, list(group)] = True
    return found


def log_scores(logits_TK: Tensor, scoring: Scoring) -> Tensor:
    if scoring.function != "sigmoid":
        return logits_TK.log_softmax(-1)
    raw = torch.nn.functional.logsigmoid(logits_TK)
    return raw - raw.logsumexp(-1, keepdim=True)


# --- the bias for choosing


def balanced(
    start: RouterParts, x_TD: Tensor, chosen_TK: Tensor, member_KE: Tensor, gating: Gating, top_k: int
) -> tuple[RouterParts, float]:
    """The router with its bias for choosing moved until each group's load is near what its members had, and
    the error left.

    b += rate (wanted - load) / T over falling rates, the rule by which such biases are trained (Wang et al.
    2024, auxiliary-loss-free
    balancing); the best of all steps is kept. Wanted is the number of tokens that chose any member, scaled to
    top_k slots a token.
    """
    assert start.correction_bias_E is not None
    logits_TK = logits(start, x_TD)
    wanted_K = wanted_load(chosen_TK, member_KE, top_k)
    bias = start.correction_bias_E.clone()
    best, best_error = bias, float("inf")
    for step in range(BALANCE_STEPS):
        load_K = load_of(logits_TK, bias, gating, top_k)
        error = float((load_K - wanted_K).abs().sum() / (2 * wanted_K.sum()))
        if error < best_error:
            best, best_error = bias.clone(), error
        rate = BALANCE_RATE * (1 - step / BALANCE_STEPS) ** 2
        bias = bias + rate * (wanted_K - load_K) / len(x_TD)
    return RouterParts(start.router_ED, start.router_bias_E, best), best_error


def wanted_load(chosen_TK: Tensor, member_KE: Tensor, top_k: int) -> Tensor:
    """Tokens for each group, top_k a token in all and no more than one of each token's slots."""
    n_tokens, n_experts = len(chosen_TK), member_KE.shape[1]
    chosen_TE = torch.zeros(n_tokens, n_experts + 1, dtype=torch.float64, device=chosen_TK.device)
    chosen_TE.scatter_(1, torch.where(chosen_TK >= 0, chosen_TK, n_experts).long(), 1.0)
    any_TK = (chosen_TE[:, :n_experts] @ member_KE.double().T > 0).double()
    wanted = any_TK.sum(0).clamp(min=1e-9)
    for _ in range(len(wanted)):  # what is cut off at one slot a token goes to the others in their proportion
        full = wanted >= n_tokens
        rest = top_k * n_tokens - n_tokens * int(full.sum())
        scaled = torch.where(full, float(n_tokens), wanted * rest / wanted[~full].sum().clamp(min=1e-300))
        if bool((scaled <= n_tokens).all()):
            return scaled
        wanted = scaled.clamp(max=n_tokens)
    return wanted


def load_of(logits_TK: Tensor, bias_K: Tensor, gating: Gating, top_k: int) -> Tensor:
    chosen = gating.with_bias(bias_K).route(logits_TK, top_k)[0]
    return torch.bincount(chosen.flatten(), minlength=logits_TK.shape[1]).double()


def gate_scale(
    gates_TK: Tensor, after_TK: Tensor, bias_K: Tensor | None, gating: Gating, top_k: int
) -> float:
    """Mean sum of a token's gates with new logits and a new bias for choosing over that before; 1 where gates
    are divided by their sum anyway.

    Where they are not, a group's probability is its members' together, so the block's output mostly becomes
    larger.
    """
    if gating.normalised:
        return 1.0
    _, after = gating.with_bias(bias_K).route(after_TK, top_k)
    return float(after.double().sum(-1).mean() / gates_TK.double().sum(-1).mean())


# --- routers that go by something else than x, or by thresholds


@torch.no_grad()
def through(reads: Callable[[Tensor], Tensor], x_TD: Tensor, device: torch.device) -> Tensor:
    """What a router makes of states, on the CPU, some at a time."""
    return torch.cat(
        [reads(part.to(device, torch.float32)).cpu() for part in torch.split(x_TD, STATES_AT_ONCE)]
    )


def load_thresholds(
    rows_KD: Tensor, groups: Sequence[Sequence[int]], states: LayerStates
) -> tuple[Tensor, float]:
    """A threshold a group, and the gates' sum after over before: each takes as many of the states as took any
    of its members.

    With c of them it lies between the c-th and the next largest probability, as in training; below all where
    everybody is taken.
    """
    assert states.logits_TE is not None
    p_TK = (states.x_TD.float() @ rows_KD.T).softmax(-1)
    n_experts = states.logits_TE.shape[1]
    member_KE = membership(groups, n_experts, "cpu")
    slots_TK = torch.where(states.chosen_TK >= 0, states.chosen_TK, n_experts).long()
    chosen_TE = torch.zeros(len(p_TK), n_experts + 1).scatter_(1, slots_TK, 1.0)[:, :n_experts]
    wanted_K = (chosen_TE @ member_KE.float().T > 0).sum(0)
    ranked = torch.nn.functional.pad(
        p_TK.sort(0, descending=True).values.T, (1, 1)
    )  # nobody comes first, nobody last
    ranked[:, 0] = 1.0
    threshold_K = (
        ranked.gather(1, wanted_K[:, None]) + ranked.gather(1, wanted_K[:, None] + 1)
    ).flatten() / 2
    after = (p_TK * (p_TK >= threshold_K)).double().sum()
    return threshold_K, float(after / states.gates_TK.double().sum().clamp(min=1e-30))
