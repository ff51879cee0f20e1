"""Merging methods through the verb: other families, routing groups, budgets, weights, rejected options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moescope
from families.test_writing import on_disk, same_bits
from families.tiny_models import tiny_model
from moescope.checkpoint import open_checkpoint
from moescope.compression.plan import read_plan
from moescope.errors import BadInput
from moescope.families import read_moe

FAMILIES = [
    ("mixtral", "saved"),
    pytest.param("qwen3_moe", "memory", marks=pytest.mark.slow),
    ("olmoe", "saved"),
    ("deepseek_v3", "saved"),
    ("gpt_oss", "saved"),
    pytest.param("granitemoe", "saved", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "ids.npy"
    np.save(file, np.random.default_rng(0).integers(3, 60, (30, 20)))
    return file


def model_of(folder: Path, kind: str = "mixtral", form: str = "saved") -> Path:
    return tiny_model(kind).save(folder / "model", form)


def planned(model: Path, text: Path | None, out: Path, method: str, keep: int = 3, **more: Any) -> Any:
    given = {"token_ids": text} if text else {}
    more.setdefault("device", "cpu")
    return moescope.compress(
        model, method=method, keep=keep, out=out, quiet=True, judge=False, controls=0, **given, **more
    )


@pytest.mark.parametrize(("kind", "form"), FAMILIES)
def test_merged_models_of_other_families_load_without_a_word_and_generate(tmp_path, text, kind, form):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = model_of(tmp_path, kind, form)
    run = planned(model, text, tmp_path / "run", "m_smoe_permuted", apply=tmp_path / "small")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not any(info.values()), info
    made = loaded.eval().generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert made.shape == (1, 7)
    plan, fits = read_plan(run.path)
    layers = read_moe(open_checkpoint(tmp_path / "small")).layers
    for layer in plan.layers:
        new = layers[layer.layer]
        assert new.n_experts == 3
        assert new.router_ED.read().float().numpy() == pytest.approx(
            fits[layer.layer].router_KD.numpy(), rel=1e-2
        )
        assert (new.router_bias_E is None) == (fits[layer.layer].router_bias_K is None)
        assert (new.correction_bias_E is None) == (fits[layer.layer].correction_bias_K is None)
    rescales = any("not renormalised" in said for said in run.info["warnings"])
    assert rescales == (kind == "olmoe")
    damage = run.table("damage").query("layer.notna()")
    assert damage["router_kl"].notna().all()


def test_merging_to_all_experts_changes_no_bit_of_a_tensor(tmp_path, text):
    model = model_of(tmp_path)
    planned(model, text, tmp_path / "run", "hc_smoe_permuted", keep=4, apply=tmp_path / "same")
    same_bits(on_disk(tmp_path / "same"), on_disk(model))


def test_top_k_becomes_the_number_of_groups_where_those_are_fewer(tmp_path, text):
    run = planned(model_of(tmp_path), text, tmp_path / "run", "m_smoe", keep=1, apply=tmp_path / "one")
    assert read_plan(run.path)[0].top_k == 1
    assert read_moe(open_checkpoint(tmp_path / "one")).layers[0].top_k == 1


def test_tied_routers_lose_nothing_of_the_router_and_less_of_the_output_than_folded_ones(tmp_path, text):
    model = model_of(tmp_path)
    tied, folded = (
        planned(model, text, tmp_path / router, "m_smoe_permuted", router=router)
        .table("damage")
        .query("layer.notna()")
        for router in ("tie", "fold")
    )
    assert (tied["router_kl"] == 0).all()
    assert (tied["predicted_error"] > 0).all()
    assert tied["predicted_error"].mean() < folded["predicted_error"].mean()
    with pytest.raises(BadInput, match="use --router fold"):
        planned(model, text, tmp_path / "other", "m_smoe", router="tie", apply=tmp_path / "small")


def test_random_groups_of_a_control_have_the_plan_s_sizes(tmp_path, text):
    from moescope.compression.merging import group_at_random, layer_evidence
    from moescope.compression.method import Evidence, PlanSettings
    from moescope.compression.plan import checkpoint_mark
    from moescope.types import LayerPlan, Plan

    moe = read_moe(open_checkpoint(model_of(tmp_path)))
    layer = LayerPlan(0, 4, ((0, 1, 3), (2,)), (0, 2), ((0.2, 0.4, 0.4), (1.0,)))
    control_of = Plan("hc_smoe", checkpoint_mark(moe.checkpoint), (layer,), "none", "fold", None, {})
    groupings = set()
    for seed in range(12):
        evidence = Evidence(moe, {0: 2}, PlanSettings(seed=seed), control_of=control_of)
        grouping = group_at_random(layer_evidence(evidence, 0))
        assert sorted(map(len, grouping.groups)) == [1, 3]
        groupings.add(grouping.groups)
    assert len(groupings) == 4


def test_groups_stay_within_deepseek_s_routing_groups(tmp_path, text):
    from checkpoints import edit_json

    model = model_of(tmp_path, "deepseek_v3")
    edit_json(model / "config.json", n_group=2, topk_group=2)
    with pytest.raises(BadInput, match="nearest possible: 4"):
        planned(model, text, tmp_path / "run", "m_smoe", keep=3)
    assert not (tmp_path / "run").exists()
    run = planned(model, None, tmp_path / "weights", "weights", keep=4)
    assert run.table("clusters")["kept"].all()


def test_controls_match_neurons_just_where_their_plan_does(tmp_path, text):
    from moescope.compression.method import Evidence, PlanSettings
    from moescope.compression.methods import method_named
    from moescope.types import Plan

    model = model_of(tmp_path)
    moe = read_moe(open_checkpoint(model))
    for matching, matched in (("none", False), ("signed", True), (None, True)):
        plan = Plan("hc_smoe", {}, (), matching, "fold", None, {}) if matching else None
        evidence = Evidence(moe, dict.fromkeys(moe.layers, 3), PlanSettings(), control_of=plan)
        decided = method_named("random_merge").propose(evidence)
        assert (decided.matching != "none") == matched
        assert any(fit.orders for fit in decided.fits.values()) == matched
    errors = []
    for method in ("hc_smoe", "hc_smoe_permuted"):
        run = moescope.compress(
            model,
            method=method,
            keep=3,
            token_ids=text,
            out=tmp_path / method,
            controls=1,
            quiet=True,
            device="cpu",
        )
        damage = run.table("damage")
        errors.append(damage[damage["method"] == "random (seed 1)"]["predicted_error"].dropna().to_numpy())
    assert len(errors[0]) == len(moe.layers)
    assert (errors[0] != errors[1]).all(), "the same groups, once as experts lie and once matched"


@pytest.mark.parametrize(
    ("method", "more", "line"),
    [
        ("m_smoe", {"router": "slice"}, "unknown router 'slice'; known: fold, tie"),
        ("reap", {"router": "tie"}, "method reap drops experts and merges none; omit --router"),
    ],
)
def test_what_does_not_go_together_is_rejected_before_any_work(tmp_path, text, method, more, line):
    with pytest.raises(BadInput, match=line):
        planned(model_of(tmp_path), text, tmp_path / "run", method, **more)
    assert not (tmp_path / "run").exists()


def test_weights_alone_and_random_pruning_need_neither_text_nor_transformers(tmp_path):
    model = model_of(tmp_path)
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import moescope\n"
        f"run = moescope.compress({str(model)!r}, method='weights', keep=3, "
        f"out={str(tmp_path / 'run')!r}, apply={str(tmp_path / 'small')!r}, quiet=True)\n"
        f"moescope.compress({str(model)!r}, method='random', keep=2, out={str(tmp_path / 'random')!r}, "
        "quiet=True)\n"
        "assert run.table('clusters').groupby('layer')['cluster'].nunique().eq(3).all()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
