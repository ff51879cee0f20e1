"""Routers of the lab in models of transformers: equal where they must be, and runnable without moescope."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.existing_models import SPARSE, ids, tiny
from moescope.checkpoint import open_checkpoint
from moescope.comparison.verb import compare
from moescope.decoder.config import ModelConfig
from moescope.decoder.routers import ROUTERS
from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.execution.capture import Capture
from moescope.execution.models import load_model
from moescope.execution.replaced import is_plain, replace_routers, save_replaced
from moescope.families import read_moe

ROUTED = [name for name, kind in ROUTERS.items() if kind.routes]
SAME = {"mixtral": "topk", "olmoe": "topk", "qwen3_moe": "topk", "deepseek_v3": "loss_free"}

OTHERS = [
    (family, router)
    for family in SPARSE
    for router in ROUTED
    if router != SAME[family] and not (router == "top2" and SAME[family] == "topk")
]


def replaced_model(family, router, **options):
    model = tiny(family)
    own = [block.module.gate for block in find_blocks(model)]
    replaced = replace_routers(model, ModelConfig(router=router, top_k=0, router_options=options))
    return model.eval(), replaced, own


@pytest.mark.parametrize("family", SPARSE)
def test_a_router_replaced_by_itself_changes_no_logit(family):
    model, _, _ = replaced_model(family, SAME[family])
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, tiny(family)(ids()).logits)


@pytest.mark.parametrize(("family", "router"), OTHERS)
def test_another_router_changes_the_logits_and_generates_as_the_full_pass_predicts(family, router):
    model, _, _ = replaced_model(family, router)
    real = torch.ones(2, 8, dtype=torch.long)
    with torch.no_grad():
        assert not torch.equal(model(ids()).logits, tiny(family)(ids()).logits)
        made = model.generate(ids()[:, :8], attention_mask=real, max_new_tokens=5, do_sample=False)
        full = model(made).logits
    assert torch.equal(full[:, 7:-1].argmax(-1), made[:, 8:])


@pytest.mark.parametrize("router", ["spectra", "hash"])
def test_padding_and_batches_do_not_change_a_token_s_logits(router):
    model, _, _ = replaced_model("mixtral", router)
    alone = ids(1, 10)
    padded = torch.cat([alone, torch.full((1, 6), 257)], 1)
    mask = (padded != 257).long()
    with torch.no_grad():
        both = model(torch.cat([padded, ids(1, 16)]), attention_mask=torch.cat([mask, mask | 1])).logits
        assert torch.allclose(both[:1, :10], model(alone).logits, atol=1e-5)


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize(
    "router", ["topk", "switch_top1", "loss_free", "hash", "spectra", "some", "expert_choice"]
)
def test_a_saved_model_has_the_same_logits_and_its_experts_are_read(family, router, tmp_path):
    model, replaced, own = replaced_model(family, router)
    save_replaced(model, replaced, own, tmp_path / "model")
    plain = not (tmp_path / "model" / "modeling_moescope.py").exists()
    assert plain == is_plain(replaced)
    assert plain == (family != "deepseek_v3" and (router == "topk" or (router, family) in TOP1_PLAIN))
    with torch.no_grad():
        wanted = model(ids()).logits
        assert torch.allclose(
            load_model(str(tmp_path / "model"), "auto", "cpu").model(ids()).logits, wanted, atol=1e-6
        )
    layers = read_moe(open_checkpoint(tmp_path / "model")).layers
    assert sorted(layers) == [block.layer for block in find_blocks(tiny(family))]
    for block in find_blocks(tiny(family)):
        stored = layers[block.layer]
        assert torch.equal(stored.down_EDF.read(1), block.experts.down_proj[1])
        assert (stored.router_ED is None) == (not ROUTERS[router].has_rows)


TOP1_PLAIN = {("switch_top1", "olmoe"), ("switch_top1", "qwen3_moe")}


def test_routing_is_handed_out_as_it_is_carried_out():
    model, _, _ = replaced_model("mixtral", "loss_free")
    handed, used = {}, {}

    def keep(layer):
        def hook(module, args):
            used[layer] = args[1:]

        return hook

    for block in find_blocks(model):
        block.experts.register_forward_pre_hook(keep(block.layer))
    with Capture(model, lambda routing: handed.setdefault(routing.layer, routing)), torch.no_grad():
        model(input_ids=ids(), attention_mask=torch.ones_like(ids()))
    assert sorted(handed) == sorted(used) == [0, 1]
    for layer, (chosen, gates) in used.items():
        assert torch.equal(handed[layer].chosen_TK, chosen)
        assert torch.equal(handed[layer].gates_TK, gates)


def test_a_family_with_another_router_is_refused():
    from transformers import GptOssConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    config = GptOssConfig(**sizes, **heads)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(BadInput, match=r"its router is not mlp\.gate"):
        replace_routers(model, ModelConfig(router="hash", top_k=0))


def test_a_damaged_description_of_the_routers_is_one_line(tmp_path):
    model, replaced, own = replaced_model("mixtral", "hash")
    save_replaced(model, replaced, own, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    del config["moescope_replaced"]["scale"]
    path.write_text(json.dumps(config))
    with pytest.raises(BadInput, match="moescope_replaced is damaged"):
        load_model(str(tmp_path / "model"), "auto", "cpu")


def test_the_copy_of_the_source_is_never_run_by_moescope(tmp_path):
    model, replaced, own = replaced_model("mixtral", "hash")
    save_replaced(model, replaced, own, tmp_path / "model")
    (tmp_path / "model" / "modeling_moescope.py").write_text("raise SystemExit('it ran')")
    load_model(str(tmp_path / "model"), "auto", "cpu", trust_remote_code=True)


def test_a_comparison_does_not_call_a_replaced_router_unchanged(tmp_path):
    tiny("mixtral").save_pretrained(tmp_path / "base")
    model, replaced, own = replaced_model("mixtral", "hash")
    save_replaced(model, replaced, own, tmp_path / "model")
    run = compare(tmp_path / "base", tmp_path / "model", out=tmp_path / "run", quiet=True)
    (finding,) = run.verb.summary(run).findings
    assert "Nothing" not in finding
    assert "0 for all 8 experts" in finding


WITHOUT = """
import sys
sys.modules["moescope"] = None
import torch
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    real = torch.ones(2, 8, dtype=torch.long)
    made = model.generate(ids[:, :8], attention_mask=real, max_new_tokens=4, do_sample=False)
    full = model(made).logits[:, 7:-1].argmax(-1)
    assert torch.equal(full, made[:, 8:]), folder
    torch.save(model(ids).logits.detach(), folder + "/logits.pt")
"""


@pytest.mark.slow
def test_transformers_alone_runs_every_router(tmp_path):
    wanted = {}
    for family in ("mixtral", "deepseek_v3"):
        for router in ROUTED:
            model, replaced, own = replaced_model(family, router)
            folder = tmp_path / f"{family}-{router}"
            save_replaced(model, replaced, own, folder)
            with torch.no_grad():
                wanted[folder] = copy.copy(model(ids()).logits)
    torch.save(ids(), tmp_path / "ids.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "ids.pt"), *map(str, wanted)]
    environment["HF_HOME"] = str(tmp_path / "home")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for folder, logits in wanted.items():
        assert torch.allclose(torch.load(folder / "logits.pt"), logits, atol=1e-5), folder
