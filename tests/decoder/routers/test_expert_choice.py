"""Experts that choose: who is taken by hand, and thresholds that keep the share in evaluation."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binom

from decoder.tiny_lab import tiny
from moescope.decoder.routers import RouterInput
from moescope.decoder.routers.expert_choice import ExpertChoice


def router_for(n: int = 2, k: int = 1, **options: float) -> ExpertChoice:
    router = ExpertChoice(
        tiny("expert_choice", experts=n, d_model=n, heads=1, top_k=k, router_options=options), 0
    )
    router.weight.data = torch.eye(n)
    return router.train()


def given(logits: torch.Tensor, mask: torch.Tensor | None = None) -> RouterInput:
    real = torch.ones(len(logits), dtype=torch.bool) if mask is None else mask
    return RouterInput(logits, torch.zeros(len(logits), dtype=torch.long), real, 0)


def test_each_expert_takes_its_surest_tokens_and_who_is_left_is_counted():
    # Six tokens, two experts, factor 2/3: ceil(2/3 x 6 x 1 / 2) = 2 places each.
    logits = torch.tensor([[3.0, 0], [2, 0], [1, 0], [0, 1], [0, 2], [0, 3]])
    made = router_for(capacity_factor=2 / 3)(given(logits))
    assert made.chosen_TK.tolist() == [[0, -1], [0, -1], [-1, -1], [-1, -1], [-1, 1], [-1, 1]]
    torch.testing.assert_close(made.gates_TK[0], torch.tensor([3.0, 0]).softmax(-1) * torch.tensor([1.0, 0]))
    assert float(made.diagnostics["tokens_without_expert"].value) == pytest.approx(2 / 6)


def test_how_many_experts_a_token_has_is_noted_beside_experts_that_choose_independently():
    mask = torch.arange(90) % 9 > 0  # 80 real tokens, of which each of the four experts takes 20
    made = router_for(4, k=1, capacity_factor=1.0)(given(torch.randn(90, 4), mask))
    count_T = (made.chosen_TK >= 0).sum(-1)[mask].double().numpy()
    assert count_T.mean() == 1.0
    diagnostics, law = made.diagnostics, binom(4, 1 / 4)
    assert float(diagnostics["experts_per_token"].value) == 1.0
    assert float(diagnostics["experts_per_token_spread"].value) == pytest.approx(count_T.std(), rel=1e-5)
    assert float(diagnostics["tokens_without_expert"].value) == pytest.approx((count_T == 0).mean())
    assert diagnostics["experts_per_token"].chance == pytest.approx(law.mean())
    assert diagnostics["experts_per_token_spread"].chance == pytest.approx(law.std())
    assert diagnostics["tokens_without_expert"].chance == pytest.approx(law.pmf(0))


def test_at_the_worst_all_experts_take_the_same_tokens():
    taken = (torch.arange(12) < 3)[:, None].expand(-1, 4)
    diagnostics = router_for(4, k=1, capacity_factor=1.0).experts_by_token(
        taken, torch.ones(12, dtype=torch.bool)
    )
    for name in ("tokens_without_expert", "experts_per_token_spread"):
        assert float(diagnostics[name].value) == pytest.approx(diagnostics[name].collapse), name


def test_every_expert_is_exactly_full_whatever_the_router_wants():
    logits = torch.randn(80, 4) + torch.tensor([5.0, 0, 0, 0])
    mask = torch.arange(80) < 64
    made = router_for(4, k=2)(given(logits, mask))
    assert (
        torch.bincount(made.chosen_TK[made.chosen_TK >= 0], minlength=4).tolist() == [40] * 4
    )  # 1.25 x 64 x 2 / 4


def test_an_expert_with_a_place_for_everybody_takes_everybody():
    made = router_for(2, k=2)(given(torch.randn(5, 2)))
    assert (made.chosen_TK >= 0).all()


def test_the_threshold_is_the_moving_average_of_midpoints_corrected_for_its_start():
    router = router_for(capacity_factor=2 / 3, decay=0.9)
    logits = torch.tensor([[3.0, 0], [2, 0], [1, 0], [0, 1], [0, 2], [0, 3]])
    first = logits.softmax(-1).sort(dim=0, descending=True).values[1:3].mean(0)
    assert router.threshold_E.tolist() == [0.5, 0.5]  # before any training
    router(given(logits))
    router.after_step()
    torch.testing.assert_close(router.threshold_E, first)
    second = (2 * logits).softmax(-1).sort(dim=0, descending=True).values[1:3].mean(0)
    router(given(2 * logits))
    router(given(logits))  # a micro-batch more: their mean counts
    router.after_step()
    average = (0.9 * 0.1 * first + 0.1 * (first + second) / 2) / (1 - 0.9**2)
    torch.testing.assert_close(router.threshold_E, average)


def test_thresholds_let_the_same_share_in_on_text_like_the_training_s():
    torch.manual_seed(0)
    router = router_for(8, k=2)
    for _ in range(60):
        router(given(torch.randn(512, 8)))
        router.after_step()
    made = router.eval()(given(torch.randn(4000, 8)))
    shares = (made.chosen_TK >= 0).float().mean(0)
    torch.testing.assert_close(shares, torch.full((8,), 1.25 * 2 / 8), atol=0.03, rtol=0)


def test_thresholds_keep_up_with_a_router_that_is_still_learning():
    torch.manual_seed(0)
    router = router_for(8, k=2)
    for step in range(80):
        router(given(torch.randn(512, 8) * (1 if step < 40 else 4)))  # surer of itself in the second half
        router.after_step()
    made = router.eval()(given(torch.randn(4000, 8) * 4))
    shares = (made.chosen_TK >= 0).float().mean(0)
    torch.testing.assert_close(shares, torch.full((8,), 1.25 * 2 / 8), atol=0.03, rtol=0)
