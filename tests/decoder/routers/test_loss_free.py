"""The update of the bias by hand, and what the bias may and may not touch."""

from __future__ import annotations

import pytest
import torch

from decoder.tiny_lab import tiny
from moescope.decoder.ranks import Ranks
from moescope.decoder.routers import RouterInput
from moescope.decoder.routers.loss_free import LossFree


def router_for(k: int, **options: float) -> LossFree:
    """Three experts whose logits are the inputs."""
    router = LossFree(
        tiny("loss_free", experts=3, d_model=3, heads=1, top_k=k, router_options=options), 0
    ).train()
    router.weight.data = torch.eye(3)
    return router


def given(logits: torch.Tensor, mask: list[bool] | None = None) -> RouterInput:
    real = torch.ones(len(logits), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return RouterInput(logits, torch.zeros(len(logits), dtype=torch.long), real, 0)


def test_the_bias_moves_by_the_sign_of_what_is_missing_from_the_mean():
    router = router_for(1)
    # Expert 0 three times, expert 1 once, expert 2 twice: mean 2, so 0 goes down, 1 up, and 2 stays.
    router(given(torch.eye(3)[[0, 0, 0, 1, 2, 2]]))
    router.after_step()
    assert torch.equal(router.bias_E, torch.tensor([-0.001, 0.001, 0.0]))
    router(given(torch.eye(3)[[0, 0, 1]]))  # mean 1: 2 - 1 - 0
    router.after_step()
    torch.testing.assert_close(router.bias_E, torch.tensor([-0.002, 0.001, 0.001]))


class AnotherRank(Ranks):
    """Beside one that chose expert 1 four times."""

    def sum(self, amount: torch.Tensor) -> torch.Tensor:
        return amount + torch.tensor([0.0, 4.0, 0.0])


def test_counts_of_micro_batches_and_ranks_are_added_before_the_sign_is_taken():
    router = router_for(1)
    router.ranks = AnotherRank()
    router(given(torch.eye(3)[[0, 0]]))
    router(given(torch.eye(3)[[0, 2]]))
    router.after_step()  # 3, 4, 1: mean 8/3
    assert torch.equal(router.bias_E, torch.tensor([-0.001, -0.001, 0.001]))
    router.after_step()  # nothing was read in between, so nothing moves
    assert torch.equal(router.bias_E, torch.tensor([-0.001, -0.001, 0.001]))


def test_the_bias_changes_who_is_chosen_and_no_gate():
    router, logits = router_for(2).eval(), torch.tensor([[2.0, 1.0, 0.9]])
    sigmoids = logits.sigmoid()[0]
    assert router(given(logits)).chosen_TK.tolist() == [[0, 1]]
    router.bias_E[2] = 0.5
    made = router(given(logits))
    assert made.chosen_TK.tolist() == [[2, 0]]
    torch.testing.assert_close(made.gates_TK[0], sigmoids[[2, 0]] / sigmoids[[2, 0]].sum())


def test_at_one_expert_a_token_the_gate_is_the_sigmoid():
    made = router_for(1).eval()(given(torch.tensor([[2.0, 1.0, 0.0]])))
    torch.testing.assert_close(made.gates_TK, torch.tensor([[2.0]]).sigmoid())


def test_it_evens_out_a_router_that_wants_one_expert_only():
    torch.manual_seed(0)
    router = router_for(1, rate=0.01)
    logits = torch.randn(600, 3) * 0.3 + torch.tensor([1.0, 0, 0])
    loads = []
    for _ in range(200):
        loads.append(torch.bincount(router(given(logits)).chosen_TK.flatten(), minlength=3))
        router.after_step()
    assert loads[0].max() > 500
    assert loads[-1].max() < 220


def test_the_spread_of_the_bias_is_noted_beside_that_of_a_token_s_own_scores():
    router, logits = router_for(1), torch.tensor([[2.0, 1.0, 0.9], [0.0, 0.5, -3.0], [9.0, 9.0, 9.0]])
    router.bias_E.copy_(torch.tensor([0.1, -0.2, 0.1]))
    note = router(given(logits, [True, True, False])).diagnostics["bias_spread"]
    assert float(note.value) == pytest.approx(0.02**0.5)
    assert note.chance == 0.0
    scores = logits[:2].double().sigmoid().numpy()
    assert float(note.collapse) == pytest.approx(scores.std(1).mean(), rel=1e-5)
