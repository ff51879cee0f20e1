"""Damage predicted equals damage measured on the same states.

Two ways to the same number, one without writing anything.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compression.tiny_plans import FAMILIES, calibrated, merging_plan, pruning_plan, saved, traced
from families.tiny_models import KINDS as EVERY_KIND
from moescope.compression.applying import RunningExperts, apply_plan
from moescope.compression.damage import measured_errors, original_outputs, predict
from moescope.execution.models import load_model
from moescope.types import ExpertWeights, LayerPlan

KINDS = sorted({kind for kind, _ in FAMILIES})


@pytest.mark.parametrize("kind", [*KINDS, "llama4_text"])
@pytest.mark.parametrize("way", ["pruned", "merged"])
def test_predicted_damage_is_what_the_written_model_s_own_blocks_do_to_the_same_states(tmp_path, kind, way):
    tiny, moe = saved(tmp_path / "source", kind)
    model = traced(tiny.model)
    states, gating, blocks = calibrated(model)
    plan, fits = (pruning_plan(moe, 3), {}) if way == "pruned" else merging_plan(moe)
    predicted = predict(model, plan, fits, states, gating, blocks)
    held_out = original_outputs(model, states)
    assert set(held_out) == set(states)
    apply_plan(moe, plan, fits, tmp_path / "small")
    measured = measured_errors(load_model(str(tmp_path / "small"), "float32", "cpu"), held_out)
    assert set(measured) == set(predicted)
    for layer, error in measured.items():
        assert predicted[layer].error == pytest.approx(error, rel=1e-3)
        assert error > 0.05
        assert predicted[layer].router_kl > 0


OTHERS = sorted(set(EVERY_KIND) - {*KINDS, "llama4_text", "nllb-moe", "phimoe", "switch_transformers"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("way", ["pruned", "merged"])
def test_the_same_holds_for_every_other_model_type(tmp_path, kind, way):
    """But for NLLB, which is rejected, phimoe, whose gates are not explained, and Switch.

    Whose capacity depends on the batch.
    """
    test_predicted_damage_is_what_the_written_model_s_own_blocks_do_to_the_same_states(tmp_path, kind, way)


def test_sparsemixer_s_gates_are_not_explained_and_nothing_is_predicted(tmp_path):
    tiny, moe = saved(tmp_path / "source", "phimoe")
    model = traced(tiny.model)
    found = predict(model, pruning_plan(moe, 3), {}, *calibrated(model))
    assert found
    assert all(damage.error is None and damage.router_kl is None for damage in found.values())


def test_keeping_every_expert_costs_nothing():
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        tiny, moe = saved(Path(folder), "olmoe")
        model = traced(tiny.model)
        for found in predict(model, pruning_plan(moe, 4), {}, *calibrated(model)).values():
            assert found.error == pytest.approx(0, abs=1e-5)
            assert found.router_kl == pytest.approx(0, abs=1e-6)


def test_router_kl_of_pruning_is_the_log_of_the_probability_that_is_left(tmp_path):
    """And KL(new || old) by hand: sum of q log(q/p) over the experts kept."""
    tiny, moe = saved(tmp_path / "source", "mixtral")
    model = traced(tiny.model)
    states, gating, blocks = calibrated(model)
    plan = pruning_plan(moe, 2)
    found = predict(model, plan, {}, states, gating, blocks)
    for layer in plan.layers:
        p = states[layer.layer].logits_TE.double().softmax(-1)[:, list(layer.dominants)]
        q = states[layer.layer].logits_TE.double()[:, list(layer.dominants)].softmax(-1)
        assert found[layer.layer].router_kl == pytest.approx(
            float((q * (q / p).log()).sum(-1).mean()), rel=1e-9
        )


# --- experts replaced in a running model


@pytest.mark.parametrize("kind", [*KINDS, "dbrx", "llama4_text"])
def test_experts_replaced_in_a_running_model_are_run_and_put_back_afterwards(kind):
    from families.tiny_models import output_of, tiny_model

    tiny = tiny_model(kind)
    before = output_of(tiny.model)
    experts = RunningExperts(tiny.model)
    layer = min(experts.layers)
    others = experts.layers[layer]
    swapped = {0: others.expert(3), 3: others.expert(0)}
    with experts.replaced(layer, swapped):
        assert torch.equal(others.expert(0).gate_FD, swapped[0].gate_FD)
        changed = output_of(tiny.model)
    assert not torch.allclose(changed, before, atol=1e-3)
    assert torch.equal(output_of(tiny.model), before)
    twice = ExpertWeights(
        *(None if part is None else part.clone() for part in vars(others.expert(1)).values())
    )
    experts.put(layer, 1, twice)
    assert torch.equal(output_of(tiny.model), before)


def test_merging_an_expert_with_its_own_copy_costs_nothing_in_its_output(tmp_path):
    """Expert 2 made a copy of 0, router row too.

    Merged under grouped rows the layer's choice may change, its experts' sum not.
    """
    tiny, _ = saved(tmp_path / "unused", "mixtral")
    for seen in tiny.blocks:
        with torch.no_grad():
            for part in seen.experts.parameters():
                part[2] = part[0]
    from moescope.checkpoint import open_checkpoint
    from moescope.compression.plan import LayerFit, checkpoint_mark
    from moescope.families import read_moe
    from moescope.types import Plan

    moe = read_moe(open_checkpoint(tiny.save(tmp_path / "source", "saved")))
    model = traced(tiny.model)
    states, gating, blocks = calibrated(model)
    layers = tuple(
        LayerPlan(n, 4, ((0, 2), (1,), (3,)), (0, 1, 3), ((0.5, 0.5), (1.0,), (1.0,))) for n in moe.layers
    )
    fits = {n: LayerFit(weights.router_ED.read()[[0, 1, 3]]) for n, weights in moe.layers.items()}
    plan = Plan("weights", checkpoint_mark(moe.checkpoint), layers, "none", "fold", None, {})
    merged = predict(model, plan, fits, states, gating, blocks)
    alone = tuple(LayerPlan(n, 4, ((0,), (1,), (3,)), (0, 1, 3), ((1.0,),) * 3) for n in moe.layers)
    sliced = predict(model, replace(plan, layers=alone, router="slice"), {}, states, gating, blocks)
    for layer in merged:  # the merged expert is expert 0, so only what the router loses differs
        assert merged[layer].error == pytest.approx(sliced[layer].error, rel=1e-4)
        assert merged[layer].router_kl < sliced[layer].router_kl
