"""Top-k routing against transformers' own functions, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from decoder.tiny_lab import padding, text, tiny
from moescope.decoder.model import LabModel
from moescope.decoder.routers import RouterInput, router_class
from moescope.decoder.routers.topk import TopK, switch_loss, z_loss


def given(x: torch.Tensor, mask: torch.Tensor | None = None) -> RouterInput:
    mask = torch.ones(len(x), dtype=torch.bool) if mask is None else mask
    return RouterInput(x, torch.zeros(len(x), dtype=torch.long), mask, 0)


def router_with(name: str, logits: torch.Tensor, **options: float | bool) -> tuple[TopK, RouterInput]:
    """A router, and inputs for which its logits are these."""
    n = logits.shape[1]
    router = router_class(name)(tiny(name, experts=n, d_model=n, heads=1, router_options=options), 0)
    assert isinstance(router, TopK)
    router.weight.data = torch.eye(n)
    return router, given(logits)


@pytest.mark.parametrize("router", ["switch_top1", "top2"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_switch_loss_is_transformers_own_over_k_layer_by_layer(router, padded):
    torch.manual_seed(0)
    model = LabModel(tiny(router)).train()
    mask = padding(6, 16) if padded else None
    layers = []
    model(text(6, 16), mask, consume=layers.append)
    k, n = model.config.top_k, model.config.experts
    for routing in layers:
        theirs = load_balancing_loss_func((routing.logits_TE,), n, k, mask)
        real = torch.ones(96, dtype=torch.bool) if mask is None else mask.flatten()
        ours = switch_loss(routing.scores_TE, routing.chosen_TK, real)
        torch.testing.assert_close(ours * k, theirs, rtol=1e-6, atol=0)


def test_the_switch_loss_is_one_when_balanced_and_n_at_collapse():
    even = torch.eye(4).repeat(2, 1)
    everyone = torch.ones(8, dtype=torch.bool)
    assert float(switch_loss(even, even.argmax(-1, keepdim=True), everyone)) == 1
    collapsed = torch.eye(4)[:1].repeat(8, 1)
    assert float(switch_loss(collapsed, collapsed.argmax(-1, keepdim=True), everyone)) == 4


def test_the_z_loss_is_the_mean_square_of_logsumexp_over_real_tokens():
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0], [50.0, 50.0]])
    expected = (math.log(2) ** 2 + (1 + math.log(2)) ** 2) / 2
    assert float(z_loss(logits, torch.tensor([True, True, False]))) == pytest.approx(expected)


def test_losses_are_weighted_and_only_made_in_training():
    router, inputs = router_with("top2", torch.randn(10, 4), balance=0.5, z=0.25)
    with torch.no_grad():
        made = router.train()(inputs)
    losses = made.losses
    assert float(losses["balance"]) == pytest.approx(
        0.5 * float(switch_loss(made.scores_TE, made.chosen_TK, inputs.mask_T))
    )
    assert float(losses["z"]) == pytest.approx(0.25 * float(z_loss(made.logits_TE, inputs.mask_T)))
    assert router.eval()(inputs).losses == {}
    assert router_with("top2", torch.randn(10, 4), balance=0, z=0)[0].train()(inputs).losses == {}


def test_two_gates_sum_to_one_and_one_gate_is_the_probability():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    probabilities = logits.softmax(-1)[0]
    router, inputs = router_with("top2", logits)
    made = router(inputs)
    assert made.chosen_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(made.gates_TK[0], probabilities[:2] / probabilities[:2].sum())
    router, inputs = router_with("switch_top1", logits)
    torch.testing.assert_close(router(inputs).gates_TK[0], probabilities[:1])


def test_gates_that_are_not_renormalised_are_the_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    router, inputs = router_with("top2", logits, renormalise=False)
    torch.testing.assert_close(router(inputs).gates_TK[0], logits.softmax(-1)[0, :2])
    assert not TopK.renormalises(router.config)
    assert TopK.renormalises(tiny("top2"))
    assert not TopK.renormalises(tiny("switch_top1"))


def test_an_expert_over_capacity_keeps_its_surest_tokens_and_counts_the_others():
    # Four tokens, two experts, one choice: capacity ceil(1 x 4 / 2) = 2. Expert 0 is wanted by three.
    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    router, inputs = router_with("switch_top1", logits, capacity_factor=1.0)
    made = router.train()(inputs)
    assert made.chosen_TK.tolist() == [[-1], [0], [0], [1]]
    assert made.dropped_T.tolist() == [1, 0, 0, 0]
    assert made.gates_TK[0] == 0
    assert router.eval()(inputs).chosen_TK.tolist() == [[0], [0], [0], [1]]


def test_dropping_does_not_change_the_gates_of_what_is_kept_nor_the_balance_loss():
    logits = torch.randn(40, 4) + torch.tensor([2.0, 0, 0, 0])
    free, inputs = router_with("top2", logits)
    capped, _ = router_with("top2", logits, capacity_factor=0.5)
    one, other = free.train()(inputs), capped.train()(inputs)
    kept = other.chosen_TK >= 0
    assert 0 < kept.float().mean() < 1
    assert torch.equal(one.gates_TK[kept], other.gates_TK[kept])
    assert torch.equal(one.losses["balance"], other.losses["balance"])
