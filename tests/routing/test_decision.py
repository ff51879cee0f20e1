"""How sure a router is: exact cases, and loops over tokens with scipy beside the batched functions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from moescope.execution.scoring import Scoring, find_scoring
from moescope.routing.decision import (
    chosen_entropy,
    confidence,
    first_choice,
    routing_entropy,
    selection_margin,
    top_gap,
    z_loss,
)
from moescope.routing.load_balance import Setting
from moescope.routing.metrics import DECISION
from moescope.types import Routing


def routing(logits: torch.Tensor, k: int = 2, scoring: Scoring | None = None) -> Routing:
    scoring = scoring or Scoring("softmax")
    selection = scoring.selection(logits)
    chosen = selection.topk(k).indices
    gates = scoring.raw(logits).gather(1, chosen)
    return Routing(0, "mlp", logits.shape[1], chosen, gates, None, logits, scoring.scores(logits), selection)


def test_each_value_equals_the_one_worked_out_token_by_token_with_scipy():
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = routing(logits, k=3)
    for token, row in enumerate(logits.numpy()):
        p = special.softmax(row)
        ordered = np.sort(p)[::-1]
        assert routing_entropy(seen)[token].item() == pytest.approx(stats.entropy(p))
        assert chosen_entropy(seen)[token].item() == pytest.approx(stats.entropy(ordered[:3]))
        assert confidence(seen)[token].item() == pytest.approx(ordered[0])
        assert top_gap(seen)[token].item() == pytest.approx(ordered[0] - ordered[1])
        assert selection_margin(seen)[token].item() == pytest.approx(ordered[2] - ordered[3])
        assert z_loss(seen)[token].item() == pytest.approx(special.logsumexp(row) ** 2)


def test_a_router_that_knows_nothing_sits_on_every_floor():
    seen = routing(torch.zeros(5, 8, dtype=torch.float64))
    for metric in DECISION:
        value = metric.function(seen).mean().item()
        assert value == pytest.approx(metric.chance(Setting(5, 8, 2)), abs=1e-9), metric.name


def test_a_router_with_one_answer_sits_on_every_collapse_value():
    logits = torch.full((5, 8), -500.0, dtype=torch.float64)
    logits[:, 3] = 500.0
    seen = routing(logits)
    for metric in DECISION[:4]:
        assert metric.function(seen).mean().item() == pytest.approx(
            metric.collapse(Setting(5, 8, 2)), abs=1e-9
        )
    assert all(math.isnan(metric.collapse(Setting(5, 8, 2))) for metric in DECISION[4:])


def test_two_equal_experts_of_many_give_log_two():
    logits = torch.full((4, 8), -500.0, dtype=torch.float64)
    logits[:, [1, 6]] = 0.0
    seen = routing(logits)
    assert routing_entropy(seen).tolist() == pytest.approx([math.log(2)] * 4)
    assert chosen_entropy(seen).tolist() == pytest.approx([math.log(2)] * 4)


def test_the_margin_counts_the_bias():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.9], dtype=torch.float64)
    seen = routing(logits, 2, Scoring("sigmoid", bias))
    scores = special.expit(logits.numpy()[0]) + bias.numpy()
    assert seen.chosen_TK.tolist() == [[3, 0]]
    assert selection_margin(seen).item() == pytest.approx(np.sort(scores)[::-1][1] - np.sort(scores)[::-1][2])
    assert seen.scores_TE.sum().item() == pytest.approx(1)


def test_where_all_experts_are_chosen_there_is_no_margin():
    assert selection_margin(routing(torch.zeros(2, 3), k=3)).isnan().all()


def test_an_empty_slot_is_no_choice():
    seen = routing(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]))
    dropped = Routing(
        0,
        "mlp",
        3,
        torch.tensor([[-1, 1], [-1, -1]]),
        torch.tensor([[0.0, 0.2], [0.0, 0.0]]),
        None,
        seen.logits_TE,
        seen.scores_TE,
    )
    assert first_choice(dropped).tolist() == [1, -1]
    assert chosen_entropy(dropped).tolist() == [0, 0]


def test_the_first_choice_is_the_one_with_the_largest_gate_whatever_its_slot():
    seen = Routing(
        0, "mlp", 4, torch.tensor([[2, 0, 3], [1, 2, 0]]), torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]])
    )
    assert first_choice(seen).tolist() == [0, 1]


# --- how the choice was made, found from what was chosen


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_score", ["two best", "best"])
def test_group_limited_choice_is_recognised_and_its_losers_ruled_out(function, group_score):
    logits = torch.randn(200, 16, generator=torch.Generator().manual_seed(2))
    bias = 0.3 * torch.randn(16, generator=torch.Generator().manual_seed(3))
    true = Scoring(function, bias, (4, 2), group_score)
    seen = routing(logits, 4, true)
    found = find_scoring(logits, seen.chosen_TK, seen.gates_TK, bias, (4, 2))
    assert (found.function, found.group_score, found.explains) == (function, group_score, True)
    assert found.bias_E is not None
    assert (found.selection(logits).isinf().sum(-1) == 8).all()
    assert (selection_margin(seen) >= 0).all()


def test_experts_ruled_out_by_minus_infinity_do_not_hide_the_rule():
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    logits[:, 5] = float("-inf")
    gates, chosen = logits.softmax(-1).topk(2)
    for dtype in (torch.float32, torch.bfloat16):
        assert find_scoring(logits, chosen, gates, None, (1, 1), dtype=dtype).explains


def test_a_choice_nobody_can_explain_says_so():
    logits = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    chosen = torch.stack(
        [torch.randperm(8, generator=torch.Generator().manual_seed(i))[:2] for i in range(100)]
    )
    found = find_scoring(logits, chosen, torch.full((100, 2), 0.5), None, (1, 1))
    assert not found.explains
    assert found.words() == "softmax, choice not reproduced"
