"""Turn a dense checkpoint into one with experts: every feed-forward block becomes n copies and a router.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055). Gates are renormalised over the chosen experts,
so that with noise 0 the new model computes what the dense one does. Slices of the hidden width are not
offered: they equal the dense model only with virtual groups and scaling (He et al. 2024, arXiv 2410.07524).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint import Checkpoint
from moescope.checkpoint.writing import (
    PlannedTensor,
    StoredBytes,
    Written,
    bytes_of,
    plan_tensor,
    torch_dtype,
    write_checkpoint,
)
from moescope.decoder.config import ModelConfig
from moescope.decoder.replacement import KEY, Replaced
from moescope.errors import BadInput
from moescope.storage import whole_folder

if TYPE_CHECKING:
    from torch import Tensor

ROUTER_STD = 0.02  # of the new router's rows
DENSE_PARTS = ("gate_proj", "up_proj", "down_proj")
GPT2 = "gpt2"  # becomes a model with a modelling file of its own: transformers has none with its experts
GPT2_PART = re.compile(r"transformer\.h\.(\d+)\.mlp\.(c_fc|c_proj)\.(weight|bias)")
GPT2_NAMES = {"c_fc": "up", "c_proj": "down"}
GPT2_MASKS = re.compile(r"\.attn\.(bias|masked_bias)$")  # of old checkpoints; transformers computes them
FEED_FORWARD = re.compile(r"(model\.layers\.(\d+)\.)mlp\.(\w+)\.weight")
# of a config that has experts already
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", KEY)


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

    GPT-2 becomes a model that transformers loads with `trust_remote_code`.

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
    stored = StoredBytes(checkpoint)
    source = Path(next(iter(checkpoint.stored.values())).file).parent
    if target is None:
        return upcycle_gpt2(checkpoint, stored, source, Path(folder), experts, top_k, noise, seed, progress)
    config = upcycled_config(checkpoint, target, experts, top_k)
    tensors = list(planned(checkpoint, stored, target, experts, noise, seed))
    return write_checkpoint(folder, tensors, config, source, progress=progress)


def target_of(checkpoint: Checkpoint, experts: int, top_k: int, noise: float) -> Target | None:
    """Return the family to write, None for GPT-2; raise where there is none, or a number makes no sense."""
    config = checkpoint.config or {}
    kind = config.get("model_type")
    known = (*TARGETS, GPT2)
    if kind not in known:
        raise BadInput(
            f"{checkpoint.shown}: model type {kind!r} cannot be upcycled; known: {', '.join(known)}"
        )
    if experts < 2:
        raise BadInput(f"[base] experts = {experts}: must be at least 2")
    if not 1 <= top_k <= experts:
        raise BadInput(f"[base] top_k = {top_k}: must be from 1 to the {experts} experts")
    if not 0 <= noise < float("inf"):
        raise BadInput(f"[base] noise = {noise}: must be 0 or more")
    target = TARGETS.get(kind)
    if target is None and top_k < 2:
        raise BadInput(f"[base] top_k = {top_k}: must be at least 2 for GPT-2, whose gates sum to 1")
    for key in target.refused if target else ():
        if config.get(key):
            assert target is not None
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
            rows_ED = router_rows(experts, width, seed, layer).to(torch_dtype(info.dtype))
            yield plan_tensor(f"{block}.gate.weight", rows_ED)


def router_rows(experts: int, width: int, seed: int, layer: int) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed * 10_007 + layer)
    return torch.randn(experts, width, generator=generator) * ROUTER_STD


def noisy(checkpoint: Checkpoint, name: str, noise: float, seeds: list[int]) -> Iterator[memoryview]:
    """Yield the tensor's bytes with its noise added."""
    yield bytes_of(with_noise(checkpoint.read(name), noise, seeds))


def with_noise(tensor: Tensor, noise: float, seeds: list[int]) -> Tensor:
    import numpy as np
    import torch

    if not noise:
        return tensor
    draws = np.random.default_rng(seeds).standard_normal(tuple(tensor.shape), dtype=np.float32)
    changed = tensor.float() + noise * tensor.float().std() * torch.from_numpy(draws)
    return changed.to(tensor.dtype)


# --- GPT-2


def upcycle_gpt2(
    checkpoint: Checkpoint,
    stored: StoredBytes,
    source: Path,
    folder: Path,
    experts: int,
    top_k: int,
    noise: float,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> Written:
    """Write GPT-2 with experts: linear top-k routers of the lab, and the modelling file."""
    from transformers import AutoConfig

    from moescope.execution.replaced import config_with_code, write_sources

    config = dict(checkpoint.config or {})
    known = AutoConfig.for_model(**config)
    model = ModelConfig(
        router="topk",
        router_options={"z": 0.0},
        experts=experts,
        top_k=top_k,
        d_model=known.hidden_size,
        vocabulary=known.vocab_size,
    )
    places = tuple((layer, f"transformer.h.{layer}.mlp") for layer in range(known.num_hidden_layers))
    replaced = Replaced(GPT2, model, places)
    tensors = list(planned_gpt2(checkpoint, stored, replaced, noise, seed))
    with whole_folder(folder) as partial_folder:
        written = write_checkpoint(
            partial_folder, tensors, config_with_code(config, replaced), source, progress=progress
        )
        write_sources(replaced, partial_folder)
    return replace(written, path=folder)


def planned_gpt2(
    checkpoint: Checkpoint, stored: StoredBytes, replaced: Replaced, noise: float, seed: int
) -> Iterator[PlannedTensor]:
    """Yield every tensor: copies stacked and transposed to [expert, out, in], routers, the rest as it is."""
    experts = replaced.model.experts
    for number, (name, info) in enumerate(checkpoint.stored.items()):
        full = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if GPT2_MASKS.search(full):
            continue
        match = GPT2_PART.fullmatch(full)
        if not match:
            yield stored.copy(name, full)
            continue
        place = f"transformer.h.{match[1]}.mlp."
        new = f"{place}experts.{GPT2_NAMES[match[2]]}{'_bias' if match[3] == 'bias' else ''}"
        shape = (experts, *reversed(info.shape))
        copies = partial(stacked, checkpoint, name, experts, noise, [seed, number])
        yield PlannedTensor(new, info.dtype, shape, experts * stored.nbytes(name), copies)
    for layer, block in replaced.blocks:
        rows_ED = router_rows(experts, replaced.model.d_model, seed, layer)
        yield plan_tensor(f"{block}.gate.router.weight", rows_ED)


def stacked(
    checkpoint: Checkpoint, name: str, experts: int, noise: float, seeds: list[int]
) -> Iterator[memoryview]:
    """Yield one transposed copy per expert, with its noise."""
    tensor = checkpoint.read(name).movedim(0, -1).contiguous()
    for expert in range(experts):
        yield bytes_of(with_noise(tensor, noise, [*seeds, expert]))
