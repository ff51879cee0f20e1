"""The same for the lab's routers, which are asked themselves what they would do.

Predicted equals measured, written file or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compression.tiny_plans import calibrated, pruning_plan
from families.test_router_rewriting import saved
from moescope.checkpoint import open_checkpoint
from moescope.compression.applying import apply_plan
from moescope.compression.calibration import (
    LayerStates,
    find_gating,
    states_from_arrays,
    states_to_arrays,
)
from moescope.compression.damage import Predicted, measured_errors, original_outputs, predict
from moescope.execution.lab_models import load_traced
from moescope.execution.models import TracedModel
from moescope.execution.scoring import Scoring
from moescope.families import MoeCheckpoint, read_moe
from moescope.types import Plan

ROUTERS: list[tuple[str, dict[str, Any]]] = [
    ("loss_free", {}),
    ("expert_choice", {}),
    ("some", {}),
    ("hash", {}),
    ("spectra", {}),
    ("spectra", {"router_options": {"plain": True}}),
]


def predict_pruning(folder: Path, router: str, changes: dict[str, Any], keep: int = 4) -> tuple[Any, ...]:
    moe = read_moe(open_checkpoint(saved(folder / "source", router, **changes)[0]))
    model = load_traced(folder / "source", "auto", "cpu")
    states, gating, blocks = calibrated(model)
    plan = pruning_plan(moe, keep)
    return predict(model, plan, {}, states, gating, blocks, moe), model, states, moe, plan


@pytest.mark.parametrize(("router", "changes"), ROUTERS)
def test_damage_predicted_by_the_router_is_what_the_written_checkpoint_does(
    tmp_path: Path, router: str, changes: dict[str, Any]
):
    predicted: dict[int, Predicted]
    model: TracedModel
    moe: MoeCheckpoint
    plan: Plan
    predicted, model, states, moe, plan = predict_pruning(tmp_path, router, changes)
    held_out = original_outputs(model, states)
    assert set(held_out) == set(states) == {0, 1, 2}
    apply_plan(moe, plan, {}, tmp_path / "small")
    measured = measured_errors(load_traced(tmp_path / "small", "auto", "cpu"), held_out)
    for layer, error in measured.items():
        assert predicted[layer].error == pytest.approx(error, rel=1e-4)
        kl = predicted[layer].router_kl
        assert kl is None if router == "hash" else kl > 0
    assert max(measured.values()) > 0.05


@pytest.mark.parametrize(("router", "changes"), ROUTERS)
def test_keeping_every_expert_costs_nothing(tmp_path: Path, router: str, changes: dict[str, Any]):
    for found in predict_pruning(tmp_path, router, changes, keep=8)[0].values():
        assert found.error == pytest.approx(0, abs=1e-6)
        assert found.router_kl is None or found.router_kl == pytest.approx(0, abs=1e-6)
        assert found.gate_scale == pytest.approx(1, abs=1e-6)


def test_gates_that_are_probabilities_grow_by_what_the_kept_experts_take_over(tmp_path: Path):
    """Expert choice: the new gates' sum by hand, from the router's rows and thresholds alone."""
    found, model, states, _, plan = predict_pruning(tmp_path, "expert_choice", {})
    for layer in plan.layers:
        router, own = model.model.model.blocks[layer.layer].mlp.router, states[layer.layer]
        kept = list(layer.dominants)
        p_TK = (own.x_TD @ router.weight.detach()[kept].T).softmax(-1)
        new = (p_TK * (p_TK >= router.threshold_E[kept])).sum()
        assert found[layer.layer].gate_scale == pytest.approx(float(new / own.gates_TK.sum()), rel=1e-4)
        assert found[layer.layer].gate_scale > 1.02


def test_a_router_that_looks_at_the_whole_batch_is_neither_predicted_nor_measured(tmp_path: Path):
    """SPECTRA's published evaluation runs Sinkhorn over whatever is evaluated together.

    Single tokens tell nothing of it.
    """
    changes = {"router_options": {"evaluation": "published"}}
    found, model, states, _, _ = predict_pruning(tmp_path, "spectra", changes)
    assert all(damage == Predicted(None, None) for damage in found.values())
    assert original_outputs(model, states) == {}


@pytest.mark.parametrize("router", ["expert_choice", "spectra", "hash"])
def test_states_survive_their_file_whatever_they_hold(tmp_path: Path, router: str):
    states = predict_pruning(tmp_path, router, {})[2]
    again = states_from_arrays(states_to_arrays(states))
    assert again.keys() == states.keys()
    for layer, own in states.items():
        assert own.ids_T is not None
        assert (own.logits_TE is None) == (again[layer].logits_TE is None) == (router == "hash")
        assert (
            (own.carried_TR is None)
            == (again[layer].carried_TR is None)
            == (router != "spectra" or layer == 0)
        )
        assert again[layer].parts().keys() == own.parts().keys()
        assert all(torch.equal(again[layer].parts()[name], tensor) for name, tensor in own.parts().items())


def test_experts_that_take_tokens_by_a_threshold_are_no_choice_of_the_k_best():
    """Even where the few tokens whose slots are all filled would look like one."""
    logits_TE = torch.tensor([[0.1, 0.2, 0.3], [2.0, 0.0, 0.0]])
    p_TE = logits_TE.softmax(-1)
    chosen_TK = torch.tensor([[0, 1, 2], [0, -1, -1]])
    states = LayerStates(
        torch.zeros(2, 1), logits_TE, chosen_TK, p_TE.masked_fill(chosen_TK < 0, 0), torch.arange(2)
    )
    assert not find_gating(states, Scoring("softmax")).explains
    whole = LayerStates(torch.zeros(2, 1), logits_TE, torch.tensor([[0, 1, 2]] * 2), p_TE, torch.arange(2))
    assert find_gating(whole, Scoring("softmax")).explains
