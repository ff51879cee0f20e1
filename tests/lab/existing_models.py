"""Tiny models of transformers with a byte vocabulary, to be trained further."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from moescope.decoder.vocabulary import Bytes

COMMON: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
SPARSE: dict[str, Any] = {
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**COMMON, num_experts=6, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**COMMON, "num_hidden_layers": 3},
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
DENSE: dict[str, Any] = {
    "llama": LlamaConfig(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=8),
}


def tiny(name: str) -> Any:
    """Return the model with router rows wide enough that choices differ between tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy({**SPARSE, **DENSE}[name])).eval()
    for module in model.modules():
        if hasattr(module, "gate") and isinstance(
            weight := getattr(module.gate, "weight", None), torch.Tensor
        ):
            weight.data.normal_(std=0.3)
    return model


def saved(name: str, folder: Path) -> Path:
    tiny(name).save_pretrained(folder)
    Bytes().save(folder)
    return folder


def ids(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))
