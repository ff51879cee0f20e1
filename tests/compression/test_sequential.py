"""A layer merged in a running model.

Tied it is the reference, folded it is what the written checkpoint will do.
"""

from __future__ import annotations

import copy

import pytest
import torch

from compression.tiny_plans import documents, traced
from families.tiny_models import tiny_model
from moescope.compression.applying import RunningExperts
from moescope.compression.calibration import Gating, LayerStates, StateSample, calibrate, find_gating
from moescope.compression.merging import merged_in_place
from moescope.compression.plan import LayerFit
from moescope.execution.adapters import Block, find_blocks
from moescope.geometry.matching import match_neurons
from moescope.types import ExpertWeights, LayerPlan

GROUPS, DOMINANTS, WEIGHTS = ((0, 2), (1,), (3,)), (2, 1, 3), ((0.5, 0.5), (1.0,), (1.0,))


def said(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def looked_at(model: torch.nn.Module) -> tuple[dict[int, Block], dict[int, LayerStates], dict[int, Gating]]:
    sample = StateSample()
    blocks = calibrate(traced(model), documents(), [sample]).blocks
    states = sample.states
    return (
        blocks,
        states,
        {layer: find_gating(states[layer], block.scoring) for layer, block in blocks.items()},
    )


def with_copy(kind: str, disguised: bool) -> tuple[torch.nn.Module, RunningExperts]:
    """A tiny model whose expert 2 is a copy of expert 0 in every layer, router row and all."""
    model = copy.deepcopy(tiny_model(kind).model)
    running = RunningExperts(model)
    for number, weights in running.layers.items():
        own = weights.expert(0)
        if disguised:
            generator = torch.Generator().manual_seed(number)
            order = torch.randperm(weights.d_ff, generator=generator)
            sign = torch.where(torch.rand(weights.d_ff, generator=generator) < 0.5, -1.0, 1.0)
            assert own.up_FD is not None
            own = ExpertWeights(
                own.gate_FD[order], own.down_DF[:, order] * sign, own.up_FD[order] * sign[:, None]
            )
        running.put(number, 2, own)
    return model, running


@pytest.mark.parametrize(
    "kind", ["mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "llama4_text"]
)
def test_merging_identical_experts_under_tie_is_exactly_the_identity(kind):
    model, running = with_copy(kind, disguised=False)
    before = said(model)
    for block in find_blocks(model):
        plan = LayerPlan(block.layer, 4, GROUPS, DOMINANTS, WEIGHTS)
        with merged_in_place(running, block, plan, LayerFit(), None, None):
            assert torch.equal(said(model), before)


def test_so_it_is_up_to_rounding_where_the_copy_s_neurons_are_in_another_order():
    model, running = with_copy("mixtral", disguised=True)
    before = said(model)
    for block in find_blocks(model):
        weights = running.layers[block.layer]
        matching = match_neurons(weights.expert(2), weights.expert(0))
        fit = LayerFit(
            orders={0: torch.from_numpy(matching.order_F)}, signs={0: torch.from_numpy(matching.sign_F)}
        )
        plan = LayerPlan(block.layer, 4, GROUPS, DOMINANTS, WEIGHTS)
        with merged_in_place(running, block, plan, fit, None, None):
            assert said(model).numpy() == pytest.approx(before.numpy(), abs=1e-4)
        with merged_in_place(
            running, block, plan, LayerFit(), None, None
        ):  # unmatched it is another function
            assert float((said(model) - before).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "gpt_oss", "deepseek_v3"])
def test_rows_that_are_the_router_s_own_change_nothing_in_a_folded_layer(kind):
    model, running = with_copy(kind, disguised=False)
    blocks, _, gating = looked_at(model)
    for layer, block in blocks.items():
        rows = block.weight_ED.detach().clone()
        bias = getattr(block.router, "bias", None)
        groups, dominants = ((0,), (1,), (2,), (3,)), (0, 1, 2, 3)
        correction = None if gating[layer].scoring.bias_E is None else gating[layer].scoring.bias_E
        fit = LayerFit(rows, bias if isinstance(bias, torch.Tensor) else None, correction)
        before = said(model)
        # of five experts on paper: of four, nothing would be folded
        plan = LayerPlan(layer, 5, groups, dominants, ((1.0,),) * 4)
        with merged_in_place(running, block, plan, fit, gating[layer], None):
            assert said(model).numpy() == pytest.approx(before.numpy(), rel=1e-3, abs=1e-3)


def test_fitted_rows_choose_in_place_of_the_router_and_groups_stand_where_their_dominants_do():
    model = copy.deepcopy(tiny_model("olmoe").model)
    running = RunningExperts(model)
    blocks, _, gating = looked_at(model)
    layer, block = next(iter(blocks.items()))
    seen: list[tuple[torch.Tensor, ...]] = []
    watch = block.experts.register_forward_hook(lambda _, given, gave: seen.append(given))
    before = said(model)
    plan = LayerPlan(layer, 4, GROUPS, DOMINANTS, WEIGHTS)
    rows = block.weight_ED.detach()[[0, 1, 3]] + 0.5
    with merged_in_place(running, block, plan, LayerFit(rows), gating[layer], 2):
        said(model)
        x, chosen, gates = seen[-1]
        scores = (x.reshape(-1, x.shape[-1]) @ rows.T).softmax(-1)
        best = scores.topk(2, dim=-1)
        assert torch.equal(chosen, torch.tensor(DOMINANTS)[best.indices])
        assert gates.detach().numpy() == pytest.approx(best.values.detach().numpy(), abs=1e-5)
        asked = torch.zeros(len(chosen), 1, dtype=chosen.dtype)
        block.experts(x, asked, torch.ones(len(chosen), 1))  # by somebody else: the given expert is run
        assert torch.equal(seen[-1][1], asked)
    watch.remove()
    assert torch.equal(said(model), before)


def test_a_failure_on_the_way_leaves_the_model_as_it_was():
    model, running = with_copy("mixtral", disguised=True)
    before = said(model)
    block = find_blocks(model)[0]
    plan = LayerPlan(block.layer, 4, GROUPS, DOMINANTS, WEIGHTS)
    with pytest.raises(KeyboardInterrupt), merged_in_place(running, block, plan, LayerFit(), None, None):
        raise KeyboardInterrupt
    assert torch.equal(said(model), before)


def test_the_error_foretold_of_a_tied_layer_is_that_of_running_it_so():
    from moescope.compression.applying import merged_expert
    from moescope.compression.damage import predict_layer, routed_output
    from moescope.types import Plan

    model = copy.deepcopy(tiny_model("olmoe").model)
    running = RunningExperts(model)
    blocks, states, gating = looked_at(model)
    layer, block = next(iter(blocks.items()))
    own = states[layer]
    part = LayerPlan(layer, 4, GROUPS, DOMINANTS, WEIGHTS)
    plan = Plan("m_smoe", {}, (part,), "none", "tie", None, {})
    predicted = predict_layer(block, plan, part, LayerFit(), own, gating[layer], running)
    before = routed_output(block, own.x_TD, own.chosen_TK, own.gates_TK)
    new = merged_expert(running.layers[layer], (0, 2), (0.5, 0.5), LayerFit())
    for member in (0, 2):
        running.put(layer, member, new)
    after = routed_output(block, own.x_TD, own.chosen_TK, own.gates_TK)
    assert predicted.error == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
    assert predicted.error > 0.05
    assert predicted.router_kl == 0
