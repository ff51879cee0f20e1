"""Calibration, prediction, judgement and plans on a CUDA device are those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import moescope
from compression.tiny_plans import documents, merging_plan, pruning_plan, saved, traced
from families.tiny_models import tiny_model
from moescope.compression.applying import apply_plan
from moescope.compression.calibration import RoutedSums, StateSample, calibrate, find_gating
from moescope.compression.damage import measured_errors, original_outputs, predict
from moescope.compression.plan import read_plan
from moescope.execution.evaluation import per_document
from moescope.execution.models import TracedModel, load_model, runner_of

pytestmark = pytest.mark.gpu


def on(device: str, tmp_path, kind: str, way: str) -> tuple[dict, dict, dict, tuple[float, float]]:
    """Sums, predicted and measured errors, and the judgement of one plan, all made on that device."""
    tiny, moe = saved(tmp_path / device / "source", kind)
    model = (
        traced(tiny.model)
        if device == "cpu"
        else TracedModel(kind, tiny.model.to(device), runner_of(tiny.model), None, device)
    )
    collector, sample = RoutedSums(), StateSample(most=200)
    found = calibrate(model, documents(20), [collector, sample])
    states = sample.states
    gating = {layer: find_gating(own, found.blocks[layer].scoring) for layer, own in states.items()}
    plan, fits = (pruning_plan(moe, 3), {}) if way == "pruned" else merging_plan(moe)
    predicted = {
        layer: damage.error
        for layer, damage in predict(model, plan, fits, states, gating, found.blocks).items()
    }
    held_out, reference = original_outputs(model, states), per_document(model, documents(10, seed=9))
    apply_plan(moe, plan, fits, tmp_path / device / "small")
    small = load_model(str(tmp_path / device / "small"), "float32", device)
    judged = per_document(small, documents(10, seed=9), reference)
    return (
        collector.sums(),
        predicted,
        measured_errors(small, held_out),
        (judged.perplexity, judged.js_divergence),
    )


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("way", ["pruned", "merged"])
def test_a_gpu_gives_the_cpu_s_sums_errors_and_judgement(tmp_path, kind, way):
    ours, theirs = (on(device, tmp_path, kind, way) for device in ("cuda", "cpu"))
    for name, tensor in theirs[0].items():
        torch.testing.assert_close(ours[0][name].double(), tensor.double(), rtol=2e-3, atol=1e-3)
    for place in (1, 2):
        assert ours[place] == pytest.approx(theirs[place], rel=1e-2)
    assert ours[3] == pytest.approx(theirs[3], rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "method", "more"),
    [
        ("mixtral", "hc_smoe_permuted", {}),
        ("olmoe", "m_smoe_permuted", {}),
        ("deepseek_v3", "m_smoe", {}),
        ("gpt_oss", "weights", {}),
        ("mixtral", "m_smoe_permuted", {"router": "tie"}),
    ],
)
def test_a_gpu_makes_the_cpu_s_plan(tmp_path, kind, method, more):
    model = tiny_model(kind).save(tmp_path / "model", "saved")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 60, (30, 20)))
    runs = [
        moescope.compress(
            model,
            method=method,
            keep=3,
            token_ids=tmp_path / "ids.npy",
            out=tmp_path / device,
            quiet=True,
            judge=False,
            controls=1,
            device=device,
            **more,
        )
        for device in ("cpu", "cuda")
    ]
    ours, theirs = (run.table("clusters") for run in runs)
    assert ours["cluster"].tolist() == theirs["cluster"].tolist()
    assert ours["weight"].to_numpy() == pytest.approx(theirs["weight"].to_numpy(), abs=0.02)
    damage, other = (run.table("damage").query("layer.notna()") for run in runs)
    assert damage["predicted_error"].to_numpy() == pytest.approx(
        other["predicted_error"].to_numpy(), rel=0.05
    )
    for layer, fit in read_plan(runs[0].path)[1].items():
        rows = read_plan(runs[1].path)[1][layer].router_KD
        assert (fit.router_KD is None) == (rows is None)
        if rows is not None:
            assert rows.numpy() == pytest.approx(fit.router_KD.numpy(), rel=0.05, abs=0.02)
