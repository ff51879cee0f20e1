"""Builders of tiny checkpoints: real safetensors files, small enough to write by the hundred."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NAMES = {
    "mixtral": {
        "router": "block_sparse_moe.gate",
        "expert": "block_sparse_moe.experts",
        "gate": "w1",
        "up": "w3",
        "down": "w2",
    },
    "qwen3_moe": {
        "router": "mlp.gate",
        "expert": "mlp.experts",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    },
}
INDEX = "model.safetensors.index.json"

Tensors = dict[str, torch.Tensor]


def router_name(layer: int, family: str = "mixtral") -> str:
    return f"model.layers.{layer}.{NAMES[family]['router']}.weight"


def expert_name(layer: int, expert: int, matrix: str, family: str = "mixtral") -> str:
    return f"model.layers.{layer}.{NAMES[family]['expert']}.{expert}.{NAMES[family][matrix]}.weight"


def tiny_tensors(
    layers: int = 2,
    experts: int = 4,
    d_model: int = 16,
    d_ff: int = 24,
    seed: int = 0,
    family: str = "mixtral",
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Every tensor of a random model's MoE blocks and norms.

    And an embedding that belongs to none of them.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {"model.embed_tokens.weight": draw(8, d_model)}
    for layer in range(layers):
        tensors[router_name(layer, family)] = draw(experts, d_model)
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = 1 + 0.1 * draw(d_model)
        for expert in range(experts):
            for matrix, shape in {
                "gate": (d_ff, d_model),
                "up": (d_ff, d_model),
                "down": (d_model, d_ff),
            }.items():
                tensors[expert_name(layer, expert, matrix, family)] = draw(*shape)
    return tensors


def tiny_config(layers: int = 2, experts: int = 4, family: str = "mixtral", **more: Any) -> dict[str, Any]:
    count = "num_local_experts" if family == "mixtral" else "num_experts"
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        count: experts,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        **more,
    }


def write_checkpoint(
    folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, shards: int = 1
) -> Path:
    """The tensors as model.safetensors, or dealt in turn into that many shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {name: shard_name(number % shards, shards) for number, name in enumerate(sorted(tensors))}
    for shard in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in weight_map if weight_map[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def shard_name(number: int, shards: int) -> str:
    return f"model-{number + 1:05d}-of-{shards:05d}.safetensors"


def tiny_checkpoint(folder: Path, shards: int = 1, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """A whole tiny checkpoint with its config, on disk."""
    config = {name: value for name, value in sizes.items() if name in {"layers", "experts", "family"}}
    return write_checkpoint(folder, tiny_tensors(dtype=dtype, **sizes), tiny_config(**config), shards)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def saved_model(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, max_shard_size: str = "20KB", **config: Any
) -> Any:
    """A random model of transformers' own, saved by save_pretrained.

    Returned for comparison, in eval mode.
    """
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    common: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**{**common, "num_local_experts": 4, **config}))
    else:
        sizes = {"num_experts": 4, "moe_intermediate_size": 20, "head_dim": 8}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**common, **sizes, **config}))
    with torch.no_grad():
        for parameter in model.parameters():  # the default draws are tiny, and some parameters start as zeros
            parameter.normal_(0, 0.5)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
