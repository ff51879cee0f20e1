"""A model that exists, as the base of a training: what it is, what it needs, and a dense one upcycled.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055): every feed-forward block becomes n copies and a
router. Gates are renormalised over the chosen experts, so that with noise 0 the new model computes what the
dense one does. Slices of the hidden width are not offered: they equal the dense model only with virtual
groups and scaling (He et al. 2024, arXiv 2410.07524).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moescope.checkpoint import Checkpoint, open_checkpoint
from moescope.checkpoint.files import torch_dtype
from moescope.checkpoint.writing import (
    PlannedTensor,
    StoredBytes,
    Written,
    bytes_of,
    plan_tensor,
    write_checkpoint,
)
from moescope.decoder.replacement import KEY
from moescope.errors import BadInput
from moescope.execution.model_names import checkpoint_identity
from moescope.families import read_moe
from moescope.lab.config import KEPT, BaseConfig, ExistingConfig, reject_first
from moescope.lab.corpus import Corpus
from moescope.run import jsonable

FROZEN_BYTES = 4  # per parameter: a float32 weight
TRAINED_BYTES = 16  # per parameter: a float32 weight, its gradient and AdamW's two moments
ROUTER_STD = 0.02  # of the new router's rows
DENSE_PARTS = ("gate_proj", "up_proj", "down_proj")
FEED_FORWARD = re.compile(r"(model\.layers\.(\d+)\.)mlp\.(\w+)\.weight")
# of a config that has experts already
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", KEY)


@dataclass(frozen=True)
class Target:
    """The family that a dense family becomes: its names of block, expert parts and config keys."""

    block: str
    parts: tuple[str, str, str]  # names of gate, up and down
    keys: dict[str, str]  # our name -> key of config.json
    constants: dict[str, Any]  # of config.json
    refused: tuple[str, ...] = ()  # keys of the dense config that the family lacks, where they are set


MIXTRAL = Target(
    "block_sparse_moe",
    ("w1", "w3", "w2"),
    {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "d_ff": "intermediate_size"},
    {"router_jitter_noise": 0.0, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    ("attention_bias", "mlp_bias"),
)
QWEN3_MOE = Target(
    "mlp",
    DENSE_PARTS,
    {"experts": "num_experts", "top_k": "num_experts_per_tok", "d_ff": "moe_intermediate_size"},
    {
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    },
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


@dataclass(frozen=True)
class BaseSize:
    """Parameters of a model to train, without those of new routers."""

    total: int
    trained: int  # tensors with a gradient

    @property
    def memory(self) -> int:
        return TRAINED_BYTES * self.trained + FROZEN_BYTES * (self.total - self.trained)

    def line(self, device: str, available: int) -> str:
        parts = {
            f"trained at {TRAINED_BYTES}": self.trained,
            f"frozen at {FROZEN_BYTES}": self.total - self.trained,
        }
        counts = ", ".join(f"{count:,} parameters {part} bytes" for part, count in parts.items() if count)
        return (
            f"memory: at least {self.memory / 1e9:,.3g} GB ({counts}; activations and new routers come on "
            f"top); {device} has {available / 1e9:,.1f} GB"
        )


def base_size(checkpoint: Checkpoint, base: BaseConfig) -> BaseSize:
    """Return the parameters of the model that the base becomes, and how many of them are trained."""
    unused: frozenset[str] = frozenset()
    copies = routers = 0
    if is_dense(checkpoint.config):
        blocks = sum(info.parameters for name, info in checkpoint.tensors.items() if ".mlp." in name)
        copies, experts = (base.experts - 1) * blocks, base.experts * blocks
    else:
        moe = read_moe(checkpoint)
        unused, layers = moe.extra_heads, moe.layers.values()
        if base.router == KEPT:
            routers = sum(count([layer.router_ED, layer.router_bias_E]) for layer in layers)
        experts = sum(
            count([*layer.projections.values(), layer.gate_bias_EF, layer.up_bias_EF, layer.down_bias_ED])
            for layer in layers
        )
    total = copies + sum(info.parameters for name, info in checkpoint.tensors.items() if name not in unused)
    trained = {"routers": routers, "routers+experts": routers + experts, "everything": total}
    return BaseSize(total, trained[base.trained])


def count(weights: list[Any]) -> int:
    return sum(math.prod(weight.shape) for weight in weights if weight is not None)


def existing_identity(name: str, config: ExistingConfig, corpus: Corpus) -> dict[str, Any]:
    """Return what makes two such trainings the same."""
    arguments = {**jsonable(asdict(config)), "model": {"base": open_checkpoint(name).name}}
    # not as checkpoints: those of a finished training are its results
    return {"arguments": arguments, "bases": [checkpoint_identity(name)], "corpus": corpus.identity}


def settle_trained(name: str, config: ExistingConfig) -> ExistingConfig:
    """Return the config with what is trained where it does not say: routers, of a dense base experts too."""
    dense = is_dense(open_checkpoint(name).config)
    trained = config.base.trained or ("routers+experts" if dense else "routers")
    return replace(config, base=replace(config.base, trained=trained))


def check_base(name: str, config: ExistingConfig) -> BaseSize:
    """Return the size of the training; raise where the base cannot be trained. Only headers are read."""
    checkpoint, base = open_checkpoint(name), config.base
    dense = is_dense(checkpoint.config)
    if checkpoint.packed:
        raise BadInput(
            f"{checkpoint.shown}: tensor {next(iter(checkpoint.packed))} is quantised; train the unquantised "
            "model"
        )
    if dense:
        target_of(checkpoint, base.experts, base.top_k or 2, base.noise)
    reject_first(
        checkpoint.shown,
        (
            dense and base.trained == "routers" and not base.noise,
            '[base] trained = "routers": all experts of this base are equal copies, so its routers have '
            'nothing to learn; set trained = "routers+experts", or noise',
        ),
        (
            dense and base.trained == "routers" and base.controls,
            '[base] controls = true: a dense base has no routers; set trained = "routers+experts"',
        ),
        (
            not dense and (base.noise > 0 or base.experts != BaseConfig.experts),
            f"[base] experts = {base.experts}, noise = {base.noise}: it has experts already; these are "
            "of a dense base: remove them",
        ),
        (
            not dense and base.controls and base.router == KEPT,
            "[base] controls = true: the control is the kept router; name a new [base] router",
        ),
        (
            not dense and base.top_k > 0 and base.router == KEPT,
            "[base] top_k is of a new router or a dense base; name a router, or remove it",
        ),
    )
    return base_size(checkpoint, base)


# --- upcycling


def target_of(checkpoint: Checkpoint, experts: int, top_k: int, noise: float) -> Target:
    """Return the family to write; raise where there is none, or a number makes no sense."""
    config = checkpoint.config or {}
    target, kind = TARGETS.get(config.get("model_type", "")), config.get("model_type")
    if target is None:
        raise BadInput(
            f"{checkpoint.shown}: model type {kind!r} cannot be upcycled; known: {', '.join(TARGETS)}"
        )
    reject_first(
        checkpoint.shown,
        (experts < 2, f"[base] experts = {experts}: must be at least 2"),
        (not 1 <= top_k <= experts, f"[base] top_k = {top_k}: must be from 1 to the {experts} experts"),
        (not 0 <= noise < math.inf, f"[base] noise = {noise}: must be 0 or more"),
        *(
            (
                bool(config.get(key)),
                f"{key} is {config.get(key)} in config.json, which {target.constants['model_type']} does not "
                "have; upcycle another model",
            )
            for key in target.refused
        ),
        *((True, f"tensor {name} is quantised; upcycle the unquantised model") for name in checkpoint.packed),
    )
    return target


def upcycle(
    checkpoint: Checkpoint, folder: str | Path, experts: int, top_k: int, noise: float = 0.0, seed: int = 0
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
    """
    from transformers import AutoConfig

    target, stored = target_of(checkpoint, experts, top_k, noise), StoredBytes(checkpoint)
    source = Path(next(iter(checkpoint.stored.values())).file).parent
    config = dict(checkpoint.config or {})
    defaults = AutoConfig.for_model(**config).to_dict()  # of the dense family, spelled out for the other
    config |= {key: defaults[key] for key in DEFAULTS if key in defaults} | target.constants
    numbers = {"experts": experts, "top_k": top_k, "d_ff": config["intermediate_size"]}
    config |= {target.keys[name]: value for name, value in numbers.items()}
    tensors = list(planned(checkpoint, stored, target, experts, noise, seed))
    return write_checkpoint(folder, tensors, config, source)


def planned(
    checkpoint: Checkpoint, stored: StoredBytes, target: Target, experts: int, noise: float, seed: int
) -> Iterator[PlannedTensor]:
    """Yield every tensor of the new checkpoint: experts by layer, their router, and the rest as it is."""
    new_names = dict(zip(DENSE_PARTS, target.parts, strict=True))
    for number, (name, info) in enumerate(checkpoint.stored.items()):
        if not (match := FEED_FORWARD.fullmatch(name)):
            yield stored.copy(name)
            continue
        block = f"{match[1]}{target.block}"
        for expert in range(experts):
            new = f"{block}.experts.{expert}.{new_names[match[3]]}.weight"
            if noise:
                draw = partial(noisy, checkpoint, name, noise, [seed, number, expert])
                yield PlannedTensor(new, info.dtype, info.shape, stored.nbytes(name), draw)
            else:
                yield stored.copy(name, new)
        if match[3] == DENSE_PARTS[0]:
            generator = torch.Generator().manual_seed(seed * 10_007 + int(match[2]))
            rows_ED = torch.randn(experts, info.shape[1], generator=generator) * ROUTER_STD
            yield plan_tensor(f"{block}.gate.weight", rows_ED.to(torch_dtype(info.dtype)))


def noisy(checkpoint: Checkpoint, name: str, noise: float, seed: list[int]) -> Iterator[memoryview]:
    """Yield the tensor with its noise."""
    tensor = checkpoint.read(name)
    draws = np.random.default_rng(seed).standard_normal(tuple(tensor.shape), dtype=np.float32)
    yield bytes_of((tensor.float() + noise * tensor.float().std() * torch.from_numpy(draws)).to(tensor.dtype))
