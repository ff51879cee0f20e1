"""Lab models as checkpoints.

Transformers computes the same logits from them, families read the same weights, and they load again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moescope.checkpoint import open_checkpoint
from moescope.decoder.config import ModelConfig
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS
from moescope.decoder.saving import is_lab_checkpoint, layout_of, load_model, save_model
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput
from moescope.families import read_moe
from moescope.families.writing import NewLayer, write_moe
from moescope.lab.config import LabConfig, with_router

TINY = ModelConfig(vocabulary=260, d_model=16, layers=2, heads=2, d_ff=24, experts=4, max_positions=64)


def tiny(router: str = "top2", **changes: object) -> LabModel:
    torch.manual_seed(1)
    model = LabModel(with_router(LabConfig(replace(TINY, **changes)), router).model)  # type: ignore[arg-type]
    with torch.no_grad():
        for (
            weight
        ) in model.parameters():  # far from the small values it starts with, so that a swap would show
            weight.copy_(torch.randn_like(weight) * 0.6)
    return model.eval()


@pytest.mark.parametrize(
    ("router", "changes", "layout"),
    [
        ("top2", {}, "mixtral"),
        ("topk", {"top_k": 3, "tie_embeddings": True, "rope_base": 300.0}, "mixtral"),
        ("switch_top1", {"norm_epsilon": 0.1, "rope_base": 300.0}, "qwen3_moe"),
        ("topk", {"top_k": 2, "router_options": {"renormalise": False}}, "qwen3_moe"),
        ("top2", {"qk_norm": True}, "qwen3_moe"),
    ],
)
def test_transformers_loads_plain_top_k_and_gives_the_same_logits(
    router: str, changes: dict[str, object], layout: str, tmp_path: Path
):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = replace(with_router(LabConfig(TINY), router).model, **changes)  # type: ignore[arg-type]
    model = LabModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.6)
    assert layout_of(config) == layout
    save_model(model, Bytes(), tmp_path / "saved")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(0, 258, (2, 20))
    with torch.no_grad():
        ours, other = model(ids).logits_BLV, theirs.eval()(ids).logits
    assert ours.std() > 0.5  # not the near zeros of a fresh model, which anything would match
    torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", ["modern", "some"])
@pytest.mark.parametrize("router", list(ROUTERS))
def test_every_router_is_loaded_as_it_was_saved(router: str, block: str, tmp_path: Path):
    model = tiny(router, block=block)
    for buffer in (part for part in model.buffers() if part.is_floating_point() and part.dim()):
        buffer.add_(0.01 * torch.rand_like(buffer))  # routers' state must come back too
    save_model(model, Bytes(), tmp_path / "saved")
    loaded, vocabulary = load_model(tmp_path / "saved")
    assert isinstance(vocabulary, Bytes)
    assert loaded.config == model.config
    saved, found = model.state_dict(), loaded.state_dict()
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], found[name]) for name in saved)


@pytest.mark.parametrize(
    ("router", "block"),
    [
        ("top2", "modern"),
        ("switch_top1", "modern"),
        ("loss_free", "modern"),
        ("expert_choice", "modern"),
        ("topk", "some"),
        ("loss_free", "some"),
    ],
)
def test_families_read_the_weights_that_the_model_computes_with(router: str, block: str, tmp_path: Path):
    model = tiny(router, block=block)
    save_model(model, Bytes(), tmp_path / "saved")
    moe = read_moe(open_checkpoint(tmp_path / "saved"))
    assert sorted(moe.layers) == [0, 1]
    for number, layer in moe.layers.items():
        mlp = model.blocks[number].mlp
        assert torch.equal(layer.router_ED.read(), mlp.router.weight)
        assert layer.top_k == model.config.top_k
        assert layer.scoring == ("sigmoid" if router == "loss_free" else "softmax")
        x_D, expert = torch.randn(16), layer.expert(2)
        inner = expert.gate_FD @ x_D
        if block == "modern":
            assert expert.up_FD is not None
            y_D = expert.down_DF @ (torch.nn.functional.silu(inner) * (expert.up_FD @ x_D))
        else:
            assert expert.gate_bias_F is not None
            assert expert.down_bias_D is not None
            y_D = expert.down_DF @ torch.nn.functional.gelu(inner + expert.gate_bias_F) + expert.down_bias_D
        theirs = mlp.experts(x_D[None], torch.tensor([[2]]), torch.ones(1, 1))[0]
        torch.testing.assert_close(y_D, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("router", "block"),
    [("top2", "modern"), ("switch_top1", "modern"), ("loss_free", "modern"), ("topk", "some")],
)
def test_a_checkpoint_with_fewer_experts_is_a_lab_model_again(router: str, block: str, tmp_path: Path):
    model = tiny(router, block=block)
    save_model(model, Bytes(), tmp_path / "saved")
    moe = read_moe(open_checkpoint(tmp_path / "saved"))
    write_moe(moe, tmp_path / "fewer", {layer: NewLayer([3, 0, 2]) for layer in moe.layers})
    fewer, _ = load_model(tmp_path / "fewer")
    assert fewer.config.experts == 3
    for old, new in zip(model.blocks, fewer.blocks, strict=True):
        assert torch.equal(new.mlp.router.weight, old.mlp.router.weight[[3, 0, 2]])
        for name, stack in new.mlp.experts.named_parameters():
            assert torch.equal(stack, dict(old.mlp.experts.named_parameters())[name][[3, 0, 2]]), name
    assert fewer(torch.randint(0, 250, (1, 9))).logits_BLV.isfinite().all()


def test_a_saved_checkpoint_replaces_the_one_before_and_is_known_as_the_labs(tmp_path: Path):
    save_model(tiny(), Bytes(), tmp_path / "saved")
    other = tiny("switch_top1")
    save_model(other, Bytes(), tmp_path / "saved")
    assert is_lab_checkpoint(tmp_path / "saved")
    assert torch.equal(load_model(tmp_path / "saved")[0].lm_head.weight, other.lm_head.weight)
    assert not is_lab_checkpoint(tmp_path)


SIZES = ("layers", "d_model", "d_ff", "experts", "vocabulary", "max_positions")


@pytest.mark.parametrize(
    ("key", "size"),
    # a model of 1e6 positions is possible
    [(key, size) for key in SIZES for size in (10**6, 10**15, 10**400)[key == "max_positions" :]],
    ids=lambda value: value if isinstance(value, str) else f"1e{len(str(value)) - 1}",
)
def test_a_config_whose_sizes_are_not_those_of_the_tensors_takes_no_memory(
    key: str, size: int, tmp_path: Path
):
    save_model(tiny(), Bytes(), tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    config = json.loads(path.read_text())
    config["moescope_lab"][key] = size
    config["num_local_experts"] = config["moescope_lab"]["experts"]
    path.write_text(json.dumps(config))
    with pytest.raises(BadInput, match="copy the checkpoint again"):
        load_model(tmp_path / "saved")


def test_other_folders_are_refused_by_name(tmp_path: Path):
    with pytest.raises(BadInput, match="not a lab checkpoint"):
        load_model(tmp_path)
