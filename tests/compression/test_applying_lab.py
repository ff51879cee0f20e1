"""Experts of the lab's own routers merged.

The written checkpoint against the original in which the same was done by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compression.tiny_plans import calibrated
from decoder.tiny_lab import run, text
from families.test_router_rewriting import KEPT, costs, keys, restricted, saved, thresholds
from moescope.checkpoint import open_checkpoint
from moescope.compression.applying import apply_plan, planned_bytes
from moescope.compression.damage import measured_errors, original_outputs, predict
from moescope.compression.plan import Fits, checkpoint_mark, read_plan
from moescope.compression.verb import compress
from moescope.decoder.model import LabModel
from moescope.decoder.saving import load_model
from moescope.execution.lab_models import load_traced
from moescope.families import MoeCheckpoint, read_moe
from moescope.types import LayerPlan, Plan


def joined_plan(moe: MoeCheckpoint) -> Plan:
    """Every kept expert with one that goes.

    Three quarters of the first, which leads, and a quarter of the second.
    """
    layers = []
    for layer, kept in KEPT.items():
        others = [expert for expert in range(8) if expert not in kept]
        groups = tuple(zip(kept, others, strict=True))
        layers.append(LayerPlan(layer, 8, groups, tuple(kept), ((0.75, 0.25),) * 4))
    return Plan("weights", checkpoint_mark(moe.checkpoint), tuple(layers), "none", "join", None, {})


@torch.no_grad()
def merged_by_hand(model: LabModel, plan: Plan) -> LabModel:
    """Both members hold the weighted sum, in the original model."""
    for layer in plan.layers:
        for part in model.blocks[layer.layer].mlp.experts.parameters():
            for one, other in layer.groups:
                part[one] = part[other] = 0.75 * part[one] + 0.25 * part[other]
    return model


@pytest.mark.parametrize(
    ("router", "rule"), [("expert_choice", thresholds), ("some", keys), ("spectra", costs), ("hash", None)]
)
def test_a_merged_expert_has_its_leader_s_part_of_the_router_and_under_a_table_the_tokens_of_all(
    tmp_path: Path, router: str, rule: Any
):
    source, model = saved(tmp_path / "source", router)
    moe = read_moe(open_checkpoint(source))
    plan = joined_plan(moe)
    after, before = planned_bytes(moe, plan, {})
    assert apply_plan(moe, plan, {}, tmp_path / "small").total_bytes == after < before
    small = load_model(tmp_path / "small")[0]
    assert small.config.experts == 4
    by_hand = merged_by_hand(model, plan)
    if rule is not None:  # hash needs nothing more: its old table points at members that are one now
        by_hand = restricted(by_hand, rule)
    ids = text(5, 20, seed=3)
    torch.testing.assert_close(run(small, ids).logits, run(by_hand, ids).logits, rtol=1e-4, atol=1e-5)


def folded_plan(moe: MoeCheckpoint, folder: Path) -> tuple[Plan, Fits]:
    """The plan of a run whose router rows were fitted on text."""
    ids = folder / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(3, 60, (20, 30)))
    found = compress(
        moe.checkpoint.location,
        method="hc_smoe",
        keep=4,
        token_ids=ids,
        out=folder / "run",
        judge=False,
        controls=0,
        quiet=True,
    )
    plan, fits = read_plan(found.path)
    assert plan.router == "fold"
    return plan, fits


@pytest.mark.parametrize(
    ("router", "fitted"),
    [
        ("expert_choice", False),
        ("some", False),
        ("spectra", False),
        ("hash", False),
        ("expert_choice", True),
        pytest.param("some", True, marks=pytest.mark.slow),
    ],
)
def test_damage_of_merging_is_foretold_as_it_is_measured(tmp_path: Path, router: str, fitted: bool):
    moe = read_moe(open_checkpoint(saved(tmp_path / "source", router)[0]))
    model = load_traced(tmp_path / "source", "auto", "cpu")
    states, gating, blocks = calibrated(model)
    plan, fits = folded_plan(moe, tmp_path) if fitted else (joined_plan(moe), {})
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    predicted = predict(model, plan, fits, states, gating, blocks, moe)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.model.state_dict().items())
    apply_plan(moe, plan, fits, tmp_path / "small")
    measured = measured_errors(
        load_traced(tmp_path / "small", "auto", "cpu"), original_outputs(model, states)
    )
    assert set(measured) == {0, 1, 2}
    for layer, error in measured.items():
        assert predicted[layer].error == pytest.approx(error, rel=1e-4)
        assert error > 0.05
