"""Checkpoints that cannot be read.

Each refused in one line that names the file, the tensor and the remedy.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoints import (
    edit_json,
    expert_name,
    router_name,
    tiny_checkpoint,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import FAMILIES, MoeCheckpoint, read_moe


def read(folder: Path) -> MoeCheckpoint:
    return read_moe(open_checkpoint(folder))


def refusal(folder: Path, *parts: str) -> None:
    """The checkpoint is refused in one line that holds all the parts, a remedy among them."""
    with pytest.raises(BadInput) as caught:
        read(folder)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in (str(folder), *parts):
        assert part in message
    assert any(word in message for word in ("download", "check", "give", "mend")), f"no remedy in: {message}"


FILE = "model.safetensors"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_missing_expert_is_named(tmp_path, family, matrix, expert):
    tensors = tiny_tensors(family=family)
    name = expert_name(1, expert, matrix, family)
    del tensors[name]
    refusal(
        write_checkpoint(tmp_path, tensors, tiny_config(family=family)),
        name,
        "is missing; download the shard",
    )


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (expert_name(1, 2, "gate"), (24, 15), "[24, 16]"),
        (expert_name(1, 2, "gate"), (16, 24), "[24, 16]"),
        (expert_name(1, 2, "up"), (16, 24), "[24, 16]"),
        (expert_name(1, 2, "down"), (24, 16), "[16, 24]"),
        (expert_name(1, 2, "down"), (16, 24, 1), "[16, 24]"),
        (expert_name(1, 0, "gate"), (384,), "[d_ff, 16]"),
        (router_name(1), (64,), "[experts, d_model]"),
        (router_name(1), (0, 16), "[experts, d_model]"),
        ("model.layers.1.post_attention_layernorm.weight", (17,), "[16]"),
    ],
)
def test_a_wrong_shape_is_refused_with_what_was_expected(tmp_path, name, shape, expected):
    tensors = {**tiny_tensors(), name: torch.ones(shape)}
    refusal(write_checkpoint(tmp_path, tensors, tiny_config()), FILE, name, str(list(shape)), expected)


def test_experts_that_all_have_another_width_than_the_router_are_refused(tmp_path):
    tensors = tiny_tensors()
    for expert in range(4):
        tensors[expert_name(0, expert, "gate")] = torch.ones(24, 20)
    refusal(
        write_checkpoint(tmp_path, tensors, tiny_config()),
        FILE,
        expert_name(0, 0, "gate"),
        "[24, 20]",
        "[d_ff, 16]",
    )


def test_more_experts_on_disk_than_router_rows_are_refused(tmp_path):
    tensors = tiny_tensors()
    tensors[router_name(1)] = tensors[router_name(1)][:3].clone()
    refusal(write_checkpoint(tmp_path, tensors), FILE, router_name(1), "3 rows", "more experts exist")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_config_that_counts_other_experts_is_refused(tmp_path, family):
    folder = tiny_checkpoint(tmp_path, family=family)
    (folder / "config.json").write_text(json.dumps(tiny_config(experts=8, family=family)))
    refusal(folder, FILE, router_name(0, family), "4 rows", "8 experts")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_expected_layer_that_is_missing_is_an_error_not_a_smaller_report(tmp_path, family):
    folder = tiny_checkpoint(tmp_path, family=family)
    (folder / "config.json").write_text(json.dumps(tiny_config(layers=4, family=family)))
    refusal(folder, "config.json says layers [2, 3] are MoE", "download the missing shards")


def test_a_dense_layer_that_the_config_names_is_not_missed(tmp_path):
    folder = tiny_checkpoint(tmp_path, family="qwen3_moe")
    (folder / "config.json").write_text(
        json.dumps(tiny_config(layers=4, family="qwen3_moe", mlp_only_layers=[2, 3]))
    )
    assert set(read(folder).layers) == {0, 1}


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": None},
        {"num_hidden_layers": "many"},
        {"num_hidden_layers": 2.5},
        {"num_hidden_layers": 10**12},
        {"decoder_sparse_step": 0},
        {"decoder_sparse_step": None},
        {"mlp_only_layers": 3},
        {"mlp_only_layers": [[0]]},
    ],
    ids=str,
)
def test_a_config_whose_layers_make_no_sense_is_refused(tmp_path, config):
    folder = tiny_checkpoint(tmp_path, family="qwen3_moe")
    edit_json(folder / "config.json", **config)
    refusal(folder, "config.json")


def test_a_dense_model_is_refused_with_what_was_looked_for(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(BadInput) as caught:
        read(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: no MoE layer found (model_type llama); it may be a dense model")
    for family in FAMILIES:
        assert (f"{family.router} ({family.name})" in message) == (family.router is not None)


def test_two_stacks_of_layers_are_refused_with_both_names(tmp_path):
    tensors = tiny_tensors()
    second = {name.replace("model.", "other."): tensor.clone() for name, tensor in tensors.items()}
    refusal(
        write_checkpoint(tmp_path, {**tensors, **second}),
        FILE,
        router_name(0),
        router_name(0).replace("model.", "other."),
    )


def test_a_layer_number_beyond_reason_is_refused_like_any_other_damage(tmp_path):
    tensors = {
        **tiny_tensors(),
        "model.layers." + "9" * 5000 + ".block_sparse_moe.gate.weight": torch.ones(4, 16),
    }
    refusal(write_checkpoint(tmp_path, tensors, tiny_config()), FILE, "9999", "5000 digits", "download")


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        ((4, 48, 16), (4, 24, 16)),
        ((4, 48, 16), (4, 16, 12)),
        ((4, 47, 16), (4, 16, 24)),
        ((48, 16), (4, 16, 24)),
    ],
    ids=str,
)
def test_fused_experts_that_do_not_fit_together_are_refused_not_misread(tmp_path, gate_up, down):
    tensors = {
        name: tensor for name, tensor in tiny_tensors(family="qwen3_moe").items() if ".experts." not in name
    }
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.ones(gate_up)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.ones(down)
    refusal(
        write_checkpoint(tmp_path, tensors, tiny_config(family="qwen3_moe")),
        FILE,
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    )


def test_fused_experts_of_another_number_than_the_router_s_rows_are_refused(tmp_path):
    tensors = {
        name: tensor for name, tensor in tiny_tensors(family="qwen3_moe").items() if ".experts." not in name
    }
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.ones(5, 48, 16)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.ones(5, 16, 24)
    folder = write_checkpoint(tmp_path, tensors, tiny_config(family="qwen3_moe"))
    refusal(folder, FILE, "model.layers.0.mlp.experts.gate_up_proj", "[5, 48, 16]", "[4, 48, 16]")


@pytest.mark.parametrize("shape", [(), (4,), (3, 32), (4, 32, 1)], ids=str)
def test_biases_of_a_wrong_shape_are_refused(tmp_path, shape):
    tensors = {
        "model.layers.0.mlp.router.weight": torch.ones(4, 16),
        "model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 16, 32),
        "model.layers.0.mlp.experts.gate_up_proj_bias": torch.ones(shape),
        "model.layers.0.mlp.experts.down_proj": torch.ones(4, 16, 16),
        "model.layers.0.mlp.experts.down_proj_bias": torch.ones(4, 16),
    }
    folder = write_checkpoint(tmp_path, tensors)
    refusal(folder, FILE, "experts.gate_up_proj_bias", str(list(shape)), "[4, 2 * d_ff]")


def test_stacked_experts_that_cannot_be_shared_out_are_refused(tmp_path):
    tensors = {"transformer.blocks.0.ffn.router.layer.weight": torch.ones(4, 16)}
    tensors |= {
        f"transformer.blocks.0.ffn.experts.mlp.{name}": torch.ones(98, 16) for name in ("w1", "v1", "w2")
    }
    refusal(
        write_checkpoint(tmp_path, tensors),
        FILE,
        "transformer.blocks.0.ffn.experts.mlp.w1",
        "98 rows",
        "4 experts",
    )
