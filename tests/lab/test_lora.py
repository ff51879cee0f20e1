"""train --base with [base] lora: adapters of peft on what is trained, merged into an ordinary checkpoint."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import moescope
from lab.existing_models import SPARSE, ids, saved, tiny
from lab.test_existing import changed_names, settings, tensors
from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.execution.capture import Capture
from moescope.lab import tuning
from moescope.lab.lora import add_adapters


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_some(model, steps=3):
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        model(ids(), labels=ids()).loss.backward()
        optimiser.step()


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("trained", ["routers", "routers+experts", "everything"])
def test_only_adapters_learn_and_the_merged_model_gives_their_logits(family, trained, tmp_path):
    model = tiny(family)
    before = values(model)
    tuning.choose_trained(model, trained, {})
    full = {name for name, weight in model.named_parameters() if weight.requires_grad}
    adapted = add_adapters(model, 2, [])
    first = model(ids()).logits
    train_some(model)
    after = {name.replace(".base_layer", ""): value for name, value in values(model).items()}
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    logits = model(ids()).logits
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    adapted.merge_and_unload()
    assert (model(ids()).logits - logits).abs().max() < 1e-5
    assert (logits - first).abs().max() > 1e-3
    changed = changed_names(before, values(model))
    assert changed
    assert changed <= full
    for name in changed:
        rank = torch.linalg.matrix_rank((model.state_dict()[name] - before[name]).double(), atol=1e-5)
        assert int(rank.max()) <= 2
    again = PeftModel.from_pretrained(tiny(family), tmp_path / "adapter").eval()
    assert (again(ids()).logits - logits).abs().max() < 1e-5


def test_the_trace_of_an_adapted_router_has_the_adapted_logits():
    model = tiny("mixtral")
    tuning.choose_trained(model, "routers+experts", {})
    adapted = add_adapters(model, 2, [])
    train_some(model, 5)
    seen = []

    def look():
        seen.clear()
        with Capture(model, seen.append), torch.no_grad():
            model(ids(), attention_mask=torch.ones_like(ids()))
        return [one.logits_TE.clone() for one in seen], [block.weight_ED for block in find_blocks(model)]

    with_adapters = look()
    adapted.merge_and_unload()
    for ours, merged in zip(with_adapters, look(), strict=True):
        for one, other in zip(ours, merged, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    plain = [block.weight_ED for block in find_blocks(tiny("mixtral"))]
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(plain, with_adapters[1], strict=True))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_training_with_adapters_ends_in_an_ordinary_checkpoint_and_an_adapter(family, here):
    base = saved(family, here / "base")
    run = moescope.train(settings(trained="routers+experts", lora=2), base=base, out=here / "run", quiet=True)
    assert run.info["warnings"] == []
    changed = changed_names(tensors(base), tensors(here / "run" / "model"))
    assert changed
    assert all("gate" in name or "experts" in name for name in changed)
    config = SPARSE[family]
    layers = len(find_blocks(tiny(family)))
    width, inside = config.hidden_size, getattr(config, "moe_intermediate_size", config.intermediate_size)
    experts = 4 if family == "mixtral" else 8
    per_expert = (width + 2 * inside) + (inside + width)  # gate and up in one matrix, and down
    assert run.info["parameters_trainable"] == layers * 2 * (experts * per_expert + experts + width)
    assert run.info["parameters_total"] == sum(one.numel() for one in tiny(family).parameters())
    merged = AutoModelForCausalLM.from_pretrained(here / "run" / "model")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), here / "run" / "adapter")
    assert (merged(ids()).logits - adapted(ids()).logits).abs().max() < 1e-5
    assert run.table("base_losses").set_index(["model", "domain"]).loc[("trained", ""), "difference"] != 0


def test_only_listed_experts_get_a_change_through_adapters(here):
    base = saved("mixtral", here / "base")
    (here / "list.json").write_text(json.dumps({"experts": {"0": [1, 3], "1": []}}))
    config = settings(trained="experts", expert_list="list.json", lora=3)
    moescope.train(config, base=base, out=here / "run", quiet=True)
    changed = changed_names(tensors(base), tensors(here / "run" / "model"))
    parts = ("w1", "w2", "w3")
    wanted = {f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight" for e in (1, 3) for w in parts}
    assert changed == wanted


def test_a_dense_control_is_trained_through_adapters_too(here, monkeypatch):
    given = []
    monkeypatch.setattr(tuning, "make_trainer", partial(remember, given, tuning.make_trainer))
    base = saved("llama", here / "base")
    config = settings(trained="routers+experts", experts=3, controls=True, lora=2)
    run = moescope.train(config, base=base, out=here / "run", quiet=True)
    assert len(given) == 2
    for names in given:
        assert names
        assert all("lora_" in name and ".mlp." in name for name in names)
    rows = run.table("base_losses").set_index(["model", "domain"])["difference"]
    assert abs(rows[("upcycled", "")]) < 1e-5
    assert rows[("trained", "")] != 0
    assert rows[("dense, trained on", "")] != 0


def remember(given, make, model, *more):
    given.append([name for name, weight in model.named_parameters() if weight.requires_grad])
    return make(model, *more)


def test_a_new_router_is_trained_in_full_beside_adapters_of_experts(here):
    base = saved("mixtral", here / "base")
    config = settings(trained="routers+experts", lora=2, router="loss_free")
    run = moescope.train(config, base=base, out=here / "run", quiet=True)
    before, after = tensors(base), tensors(here / "run" / "model")
    old = before["model.layers.0.block_sparse_moe.gate.weight"]
    new = after["model.layers.0.mlp.gate.router.weight"]
    assert not torch.allclose(old, new, atol=1e-4)
    assert not (run.path / "adapter").exists()  # of no use without the router


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora": -1}, "lora is a rank, 1 or more"),
        ({"lora": 4}, "at most rank 4; lower it"),  # a router of 4 experts
        ({"lora": 2, "router": "loss_free"}, "trained in full"),
    ],
)
def test_a_bad_rank_is_one_line_and_leaves_nothing(change, said, here):
    base = saved("mixtral", here / "base")
    with pytest.raises(BadInput, match=said) as caught:
        moescope.train(settings(**change), base=base, out=here / "run", quiet=True)
    assert "\n" not in str(caught.value)
    assert not (here / "run").exists()


def test_without_peft_one_line_names_the_extra(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    base = saved("mixtral", here / "base")
    with pytest.raises(BadInput, match=r"moescope\[tune\]"):
        moescope.train(settings(lora=2), base=base, out=here / "run", quiet=True)
    assert not (here / "run").exists()
