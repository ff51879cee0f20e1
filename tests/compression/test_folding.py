"""The folded router: what it keeps of probabilities, loads and gates; its fit beside scipy's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from moescope.compression.calibration import Gating, LayerStates
from moescope.compression.folding import (
    Problem,
    RouterParts,
    fit_rows,
    fold_router,
    load_thresholds,
    log_probabilities,
    mean_kl,
    mean_router,
    wanted_load,
)
from moescope.errors import BadInput
from moescope.execution.scoring import Scoring

GROUPS = ((0, 3), (1,), (2, 4))
WEIGHTS = ((0.25, 0.75), (1.0,), (0.5, 0.5))


@dataclass
class Case:
    """A router, and the states, choices and gates a block would make with it."""

    router: RouterParts
    states: LayerStates
    gating: Gating


def routed(
    router: RouterParts,
    x_TD: torch.Tensor,
    function: str = "softmax",
    top_k: int = 2,
    normalised: bool = True,
) -> Case:
    logits = x_TD @ router.router_ED.T
    logits = logits if router.router_bias_E is None else logits + router.router_bias_E
    gating = Gating(Scoring(function, router.correction_bias_E), top_k, normalised, 1.0, True)
    return Case(router, LayerStates(x_TD, logits, *gating.route(logits), torch.arange(len(x_TD))), gating)


def drawn(
    seed: int = 0, tokens: int = 600, width: int = 8, experts: int = 5, scale: float = 0.5
) -> tuple[RouterParts, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    return RouterParts(scale * torch.randn(experts, width, generator=generator)), x


def fold(case: Case, top_k: int = 2, groups: Any = GROUPS, weights: Any = WEIGHTS) -> Any:
    return fold_router(case.router, groups, weights, case.states, case.gating, top_k)


def test_groups_of_one_give_back_the_router_itself():
    case = routed(*drawn())
    folded = fold(case, groups=[(e,) for e in range(5)], weights=[(1.0,)] * 5)
    assert folded.router.router_ED == pytest.approx(case.router.router_ED, abs=1e-6)
    assert folded.kl == pytest.approx(0, abs=1e-9)
    assert folded.gate_scale == 1


def test_the_fit_lowers_the_divergence_from_the_grouped_probabilities():
    case = routed(*drawn())
    folded = fold(case)
    assert folded.kl < 0.8 * folded.kl_start
    probabilities = case.states.logits_TE.double().softmax(-1)
    grouped = torch.stack([probabilities[:, list(group)].sum(1) for group in GROUPS], 1)
    q = (case.states.x_TD.double() @ folded.router.router_ED.double().T).log_softmax(-1)
    assert folded.kl == pytest.approx(float((grouped * (grouped.log() - q)).sum(1).mean()), abs=1e-8)


def test_twins_gain_their_joint_probability_where_a_bias_can_hold_it():
    router, x = drawn()
    rows, bias = router.router_ED.clone(), torch.tensor([0.3, -0.2, 0.1, 0.3, 0.1])
    rows[3], rows[4] = rows[0], rows[2]
    folded = fold(routed(RouterParts(rows, bias), x))
    assert folded.kl == pytest.approx(0, abs=1e-8)
    gained = folded.router.router_bias_E - bias[:3]
    assert (gained - gained[1]).tolist() == pytest.approx([np.log(2), 0, np.log(2)], abs=1e-3)


def test_a_router_without_a_bias_gets_none():
    assert fold(routed(*drawn())).router.router_bias_E is None


def test_gates_that_are_not_renormalised_grow_as_much_as_is_said():
    case = routed(*drawn(scale=0.2), normalised=False)
    folded = fold(case)
    after = (case.states.x_TD @ folded.router.router_ED.T).softmax(-1).topk(2, dim=-1).values.sum(-1)
    assert folded.gate_scale == pytest.approx(
        float(after.mean() / case.states.gates_TK.sum(-1).mean()), rel=1e-4
    )
    assert folded.gate_scale > 1.2


def test_fewer_groups_than_top_k_choose_all_of_them():
    case = routed(*drawn(), normalised=False)
    folded = fold(case, top_k=1, groups=[(0, 1, 2, 3, 4)], weights=[(0.2,) * 5])
    assert folded.gate_scale == pytest.approx(1 / float(case.states.gates_TK.sum(-1).mean()), rel=1e-5)


def test_a_router_that_reads_something_else_than_the_experts_is_rejected():
    case = routed(*drawn())
    case.states = replace(case.states, x_TD=torch.nn.functional.normalize(case.states.x_TD, dim=-1))
    with pytest.raises(
        BadInput, match="layer 0: the router's logits differ from its rows times the experts' input"
    ):
        fold(case)


def test_without_a_text_rows_and_biases_are_the_members_weighted_means():
    rows, bias = torch.arange(10.0).view(5, 2), torch.arange(5.0)
    mean = mean_router(RouterParts(rows, None, bias), GROUPS, WEIGHTS)
    assert mean.router_ED.tolist() == [[4.5, 5.5], [2.0, 3.0], [6.0, 7.0]]
    assert mean.correction_bias_E is not None
    assert mean.correction_bias_E.tolist() == [2.25, 1.0, 3.0]
    assert mean.router_bias_E is None


def sigmoid_case(seed: int = 1, with_bias: bool = True) -> Case:
    router, x = drawn(seed, experts=6, scale=0.8)
    bias = torch.tensor([0.2, -0.1, 0.0, 0.1, 0.3, -0.2])
    return routed(RouterParts(router.router_ED, None, bias if with_bias else None), x, "sigmoid", top_k=3)


def test_a_sigmoid_router_keeps_weighted_rows_and_its_loads():
    case = sigmoid_case()
    groups, weights = ((0, 1), (2,), (3,), (4, 5)), ((0.9, 0.1), (1.0,), (1.0,), (0.3, 0.7))
    folded = fold(case, 2, groups, weights)
    rows = case.router.router_ED
    assert folded.router.router_ED[0] == pytest.approx(0.9 * rows[0] + 0.1 * rows[1], abs=1e-6)
    member = torch.zeros(4, 6, dtype=torch.bool)
    for place, group in enumerate(groups):
        member[place, list(group)] = True
    wanted = wanted_load(case.states.chosen_TK, member, 2)
    logits = (case.states.x_TD @ folded.router.router_ED.T).double()
    start = torch.tensor([0.9 * 0.2 - 0.1 * 0.1, 0.0, 0.1, 0.3 * 0.3 - 0.7 * 0.2], dtype=torch.float64)
    before, after = (
        torch.bincount(case.gating.with_bias(bias).route(logits, 2)[0].flatten(), minlength=4).double()
        for bias in (start, folded.router.correction_bias_E.double())
    )
    assert (before - wanted).abs().sum() / (2 * wanted.sum()) > 0.05
    assert folded.load_error == pytest.approx(
        float((after - wanted).abs().sum() / (2 * wanted.sum())), abs=2e-3
    )
    assert folded.load_error < 0.01


def test_wanted_loads_count_a_token_once_a_group_and_fill_all_slots():
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 2]])
    member = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).bool()
    assert wanted_load(chosen, member, 1).tolist() == pytest.approx([2.0, 4 / 3, 2 / 3])
    assert wanted_load(chosen, member, 2).tolist() == pytest.approx([4.0, 8 / 3, 4 / 3])


def test_a_slot_is_empty_where_no_expert_was_chosen():
    member = torch.eye(2).bool()
    assert wanted_load(torch.tensor([[0, -1], [1, -1], [0, -1]]), member, 1).tolist() == pytest.approx(
        [2.0, 1.0]
    )


def test_a_sigmoid_router_without_a_bias_for_choosing_is_not_balanced():
    folded = fold(sigmoid_case(with_bias=False), 2, ((0, 1), (2, 3), (4, 5)), ((0.5, 0.5),) * 3)
    assert folded.load_error is None
    assert folded.router.correction_bias_E is None
    assert folded.kl == folded.kl_start > 0


def test_thresholds_let_each_group_take_as_many_as_took_any_member():
    """Rows that read one state each.

    Probabilities by hand, 3 tokens to the first group, 1 to the second, all to the third.
    """
    x_TD = torch.tensor([[3.0, 0.0, 0.0], [2.0, 0.0, 0.5], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    chosen_TK = torch.tensor(
        [[0, 3, -1], [1, 3, -1], [0, 1, 3], [2, -1, 3]]
    )  # of four experts, 0 and 1 one group
    gates_TK = torch.full((4, 3), 0.1).masked_fill(chosen_TK < 0, 0)
    states = LayerStates(x_TD, torch.zeros(4, 4), chosen_TK, gates_TK, torch.arange(4))
    threshold_K, scale = load_thresholds(torch.eye(3), [(0, 1), (2,), (3,)], states)
    p_TK = x_TD.exp() / x_TD.exp().sum(-1, keepdim=True)
    taken_TK = p_TK >= threshold_K
    assert taken_TK.sum(0).tolist() == [3, 1, 4]
    assert taken_TK[:, 0].tolist() == [True, True, True, False]
    assert threshold_K[0] == pytest.approx(float(p_TK[2, 0] + p_TK[3, 0]) / 2)
    assert scale == pytest.approx(float((p_TK * taken_TK).sum() / gates_TK.sum()))


def test_a_group_nobody_chose_takes_nothing():
    states = LayerStates(
        torch.randn(5, 2),
        torch.zeros(5, 2),
        torch.zeros(5, 1, dtype=torch.long),
        torch.ones(5, 1),
        torch.arange(5),
    )
    threshold_K, _ = load_thresholds(torch.eye(2), [(0,), (1,)], states)
    p_TK = states.x_TD.softmax(-1)
    assert (p_TK >= threshold_K).sum(0).tolist() == [5, 0]


# --- the fit of rows against an independent optimiser


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
