"""Tiny quantised checkpoints.

Transformers' models, packed by transformers and compressed-tensors themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import saved_model

Tensors = dict[str, Tensor]
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32}


def repack(
    folder: Path, change: Callable[[str, Tensor], Tensors], quantization_config: dict[str, Any] | None
) -> Tensors:
    """Put `change(name, tensor)` in the place of each expert tensor and say so in the config.

    Returns what is stored.
    """
    file = folder / "model.safetensors"
    stored: Tensors = {}
    for name, tensor in load_file(file).items():
        quantised = ".experts." in name and not name.endswith("_bias")
        stored |= change(name, tensor) if quantised else {name: tensor}
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
    return stored


def qwen(folder: Path, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Path:
    saved_model(folder, "qwen3_moe", dtype=dtype, max_shard_size="1GB", **{**SIZES, **sizes})
    return folder


# --- FP8


def fp8_checkpoint(folder: Path, block: tuple[int, int] = (16, 16), **sizes: int) -> Tensors:
    """One e4m3 tensor an expert and its scales, by transformers' own quantising."""
    return repack(
        qwen(folder, **sizes),
        lambda name, tensor: quantise_fp8(name, tensor, block),
        {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"},
    )


def quantise_fp8(name: str, tensor: Tensor, block: tuple[int, int] | None) -> Tensors:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=block)

    quantised = Fp8Quantize(Quantizer).convert({name: tensor})
    assert quantised[name].dtype == torch.float8_e4m3fn, (
        "transformers leaves tensors alone that its blocks do not divide"
    )
    return quantised


# --- MXFP4


def gpt_oss_checkpoint(folder: Path, d_model: int = 64, d_ff: int = 64, experts: int = 3) -> Tensors:
    """GPT-OSS with random codes and exponents in the place of its experts."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=d_model,
        intermediate_size=d_ff,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=experts,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)

    def packed(name: str, tensor: Tensor) -> Tensors:
        count, columns, rows = tensor.shape  # the model holds them transposed
        groups = (count, rows, columns // 32)
        return {
            f"{name}_blocks": torch.randint(0, 256, (*groups, 16), dtype=torch.uint8),
            f"{name}_scales": torch.randint(118, 128, groups, dtype=torch.uint8),
        }

    return repack(folder, packed, {"quant_method": "mxfp4"})


# --- compressed-tensors


def scheme_of(
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = True,
    kind: str = "int",
    form: str = "pack-quantized",
    strategy: str | None = None,
    **more: Any,
) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = strategy or ("group" if group_size else "channel")
    args = QuantizationArgs(
        num_bits=bits, type=kind, symmetric=symmetric, strategy=strategy, group_size=group_size, **more
    )
    return QuantizationScheme(targets=["Linear"], weights=args, format=form)


def compressor(scheme: Any) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(scheme.format)


def compress(name: str, tensor: Tensor, scheme: Any) -> Tensors:
    """The tensors that the library stores in the place of `X.weight`, under their names."""
    from compressed_tensors.quantization.utils import calculate_qparams

    args = scheme.weights
    if args.strategy == "tensor":
        groups = tensor.reshape(1, -1)
    else:
        groups = tensor.unflatten(-1, (-1, args.group_size or tensor.shape[-1]))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    state = {"weight": tensor, "weight_scale": scale.to(tensor.dtype), "weight_zero_point": zero_point}
    return {
        name.removesuffix("weight") + part: stored
        for part, stored in compressor(scheme).compress(state, scheme).items()
    }


def decompress(name: str, stored: Tensors, scheme: Any) -> Tensor:
    """What the library makes of them again."""
    module = name.removesuffix("weight")
    state = {part.removeprefix(module): tensor for part, tensor in stored.items() if part.startswith(module)}
    return compressor(scheme).decompress(state, scheme)["weight"]


def compressed_config(*schemes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": schemes[0].format,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "config_groups": {
            f"group_{n}": json.loads(scheme.model_dump_json()) for n, scheme in enumerate(schemes)
        },
    }


def compressed_checkpoint(folder: Path, scheme: Any, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return repack(
        qwen(folder, dtype), lambda name, tensor: compress(name, tensor, scheme), compressed_config(scheme)
    )
