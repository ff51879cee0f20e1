"""Checkpoints that cannot be read.

Each refused in one line that names the file, the tensor and the remedy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import (
    Tensors,
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


# --- tensors that do not fit together


def fused(gate_up: tuple[int, ...], down: tuple[int, ...]) -> Tensors:
    """Tiny Qwen tensors whose experts are two tensors of these shapes per layer."""
    tensors = {
        name: part for name, part in tiny_tensors(family="qwen3_moe").items() if ".experts." not in name
    }
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.ones(gate_up)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.ones(down)
    return tensors


def with_bias(shape: tuple[int, ...]) -> Tensors:
    block = "model.layers.0.mlp"
    return {
        f"{block}.router.weight": torch.ones(4, 16),
        f"{block}.experts.gate_up_proj": torch.ones(4, 16, 32),
        f"{block}.experts.gate_up_proj_bias": torch.ones(shape),
        f"{block}.experts.down_proj": torch.ones(4, 16, 16),
        f"{block}.experts.down_proj_bias": torch.ones(4, 16),
    }


DBRX = "transformer.blocks.0.ffn"
QWEN, MIXTRAL = tiny_config(family="qwen3_moe"), tiny_config()
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
BOTH = (GATE_UP, "model.layers.0.mlp.experts.down_proj")
WIDE = {expert_name(0, expert, "gate"): torch.ones(24, 20) for expert in range(4)}
OTHER = router_name(0).replace("model.", "other.")
FAR = "model.layers." + "9" * 5000 + ".block_sparse_moe.gate.weight"
UNFIT: dict[str, tuple[Tensors, Any, tuple[str, ...]]] = {
    "experts of another width": (
        {**tiny_tensors(), **WIDE},
        MIXTRAL,
        (expert_name(0, 0, "gate"), "[24, 20]", "[d_ff, 16]"),
    ),
    "two stacks of layers": (
        tiny_tensors() | {name.replace("model.", "other."): part for name, part in tiny_tensors().items()},
        MIXTRAL,
        (router_name(0), OTHER),
    ),
    "a layer number beyond reason": (
        {**tiny_tensors(), FAR: torch.ones(4, 16)},
        MIXTRAL,
        ("9999", "5000 digits", "download"),
    ),
    "fused, d_ff of both": (fused((4, 48, 16), (4, 24, 16)), QWEN, BOTH),
    "fused, an odd width": (fused((4, 47, 16), (4, 16, 24)), QWEN, BOTH),
    "fused, five experts": (
        fused((5, 48, 16), (5, 16, 24)),
        QWEN,
        (GATE_UP, "[5, 48, 16]", "[4, 48, 16]"),
    ),
    **{
        f"biases of {list(shape)}": (
            with_bias(shape),
            None,
            ("experts.gate_up_proj_bias", str(list(shape)), "[4, 2 * d_ff]"),
        )
        for shape in ((), (4,), (3, 32), (4, 32, 1))
    },
}


@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_do_not_fit_together_are_refused_by_name(tmp_path, name):
    tensors, config, parts = UNFIT[name]
    refusal(write_checkpoint(tmp_path, tensors, config), FILE, *parts)
