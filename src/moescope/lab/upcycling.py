"""Turn a dense checkpoint into one with experts: every feed-forward block becomes n copies and a router.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055). Gates are renormalised over the chosen experts,
so that with noise 0 the new model computes what the dense one does. Slices of the hidden width are not
offered: they equal the dense model only with virtual groups and scaling (He et al. 2024, arXiv 2410.07524).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint import Checkpoint
from moescope.checkpoint.writing import (
    PlannedTensor,
    StoredBytes,
    Written,
    bytes_of,
    torch_dtype,
    write_checkpoint,
)
from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

ROUTER_STD = 0.02  # of the new router's rows
DENSE_PARTS = ("gate_proj", "up_proj", "down_proj")
FEED_FORWARD = re.compile(r"(model\.layers\.(\d+)\.)mlp\.(\w+)\.weight")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # of a config that has experts already


@dataclass(frozen=True)
class Target:
    """The family that a dense family becomes: its names of block, expert parts and config keys."""

    model_type: str
    architecture: str
    block: str
    parts: tuple[str, str, str]  # names of gate, up and down
    keys: dict[str, str]  # our name -> key of config.json
    constants: dict[str, Any]
    refused: tuple[str, ...] = ()  # keys of the dense config that the family lacks, where they are set


MIXTRAL = Target(
    "mixtral",
    "MixtralForCausalLM",
    "block_sparse_moe",
    ("w1", "w3", "w2"),
    {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "d_ff": "intermediate_size"},
    {"router_jitter_noise": 0.0},
    ("attention_bias", "mlp_bias"),
)
QWEN3_MOE = Target(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "mlp",
    DENSE_PARTS,
    {"experts": "num_experts", "top_k": "num_experts_per_tok", "d_ff": "moe_intermediate_size"},
    {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ("use_sliding_window",),
)
TARGETS = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen3": QWEN3_MOE}
# What transformers takes where config.json is silent: the families differ in some of these.
DEFAULTS = (
    *("head_dim", "num_key_value_heads", "rms_norm_eps", "bos_token_id", "eos_token_id", "sliding_window"),
    *("rope_parameters", "tie_word_embeddings", "max_position_embeddings", "hidden_act"),
)


def is_dense(config: dict[str, Any] | None) -> bool:
    """Return whether config.json describes a model without experts."""
    config = (config or {}).get("text_config") or config or {}
    return not any(config.get(key) for key in EXPERT_KEYS)


def upcycle(
    checkpoint: Checkpoint,
    folder: str | Path,
    experts: int,
    top_k: int,
    noise: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the upcycled checkpoint: Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE.

    Parameters
    ----------
    experts, top_k : int
        Copies of every feed-forward block, and how many of them a token uses.
    noise : float
        Normal noise added to every copy, as a multiple of the tensor's own standard deviation.
    seed : int
        Seed of the noise and of the router's rows.
    progress : callable
        Receives the bytes written and the total.
    """
    target = target_of(checkpoint, experts, top_k, noise)
    config = upcycled_config(checkpoint, target, experts, top_k)
    stored = StoredBytes(checkpoint)
    tensors = list(planned(checkpoint, stored, target, experts, noise, seed))
    source = Path(next(iter(checkpoint.stored.values())).file).parent
    return write_checkpoint(folder, tensors, config, source, progress=progress)


def target_of(checkpoint: Checkpoint, experts: int, top_k: int, noise: float) -> Target:
    """Return the family to write; raise where there is none, or a number makes no sense."""
    config = checkpoint.config or {}
    kind = config.get("model_type")
    if kind not in TARGETS:
        raise BadInput(
            f"{checkpoint.shown}: model type {kind!r} cannot be upcycled; known: {', '.join(TARGETS)}"
        )
    if experts < 2:
        raise BadInput(f"[base] experts = {experts}: must be at least 2")
    if not 1 <= top_k <= experts:
        raise BadInput(f"[base] top_k = {top_k}: must be from 1 to the {experts} experts")
    if not 0 <= noise < float("inf"):
        raise BadInput(f"[base] noise = {noise}: must be 0 or more")
    target = TARGETS[kind]
    for key in target.refused:
        if config.get(key):
            raise BadInput(
                f"{checkpoint.shown}: {key} is {config[key]} in config.json, which {target.model_type} does "
                "not have; upcycle another model"
            )
    if checkpoint.packed:
        name = next(iter(checkpoint.packed))
        raise BadInput(f"{checkpoint.shown}: tensor {name} is quantised; upcycle the unquantised model")
    return target


def upcycled_config(checkpoint: Checkpoint, target: Target, experts: int, top_k: int) -> dict[str, Any]:
    """Return config.json of the new model, with the dense family's defaults spelled out."""
    from transformers import AutoConfig

    given = dict(checkpoint.config or {})
    known = AutoConfig.for_model(**given).to_dict()
    kept = {**given, **{key: known[key] for key in DEFAULTS if key in known}}
    numbers = {"experts": experts, "top_k": top_k, "d_ff": given["intermediate_size"]}
    return {
        **kept,
        **target.constants,
        **{target.keys[name]: value for name, value in numbers.items()},
        "model_type": target.model_type,
        "architectures": [target.architecture],
    }


def planned(
    checkpoint: Checkpoint, stored: StoredBytes, target: Target, experts: int, noise: float, seed: int
) -> Iterator[PlannedTensor]:
    """Yield every tensor of the new checkpoint: experts by layer, their router, and the rest as it is."""
    import torch

    new_names = dict(zip(DENSE_PARTS, target.parts, strict=True))
    width = int((checkpoint.config or {})["hidden_size"])
    for number, (name, info) in enumerate(checkpoint.stored.items()):
        match = FEED_FORWARD.fullmatch(name)
        if not match:
            yield stored.copy(name)
            continue
        prefix, layer, part = match[1], int(match[2]), match[3]
        block = f"{prefix}{target.block}"
        for expert in range(experts):
            new = f"{block}.experts.{expert}.{new_names[part]}.weight"
            if noise:
                draw = partial(noisy, checkpoint, name, noise, [seed, number, expert])
                yield PlannedTensor(new, info.dtype, info.shape, stored.nbytes(name), draw)
            else:
                yield stored.copy(name, new)
        if part == DENSE_PARTS[0]:
            generator = torch.Generator().manual_seed(seed * 10_007 + layer)
            rows_ED = torch.randn(experts, width, generator=generator) * ROUTER_STD
            rows_ED = rows_ED.to(torch_dtype(info.dtype))
            shape, size = (experts, width), rows_ED.numel() * rows_ED.element_size()
            chunks = partial(whole, rows_ED)
            yield PlannedTensor(f"{block}.gate.weight", info.dtype, shape, size, chunks)


def whole(tensor: Tensor) -> Iterator[memoryview]:
    yield bytes_of(tensor)


def noisy(checkpoint: Checkpoint, name: str, noise: float, seeds: list[int]) -> Iterator[memoryview]:
    """Yield the tensor's bytes with its noise added."""
    import numpy as np
    import torch

    tensor = checkpoint.read(name)
    draws = np.random.default_rng(seeds).standard_normal(tuple(tensor.shape), dtype=np.float32)
    changed = tensor.float() + noise * tensor.float().std() * torch.from_numpy(draws)
    yield bytes_of(changed.to(tensor.dtype))
