"""Count the parameters and floating-point operations per token of a model, without building it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moescope.decoder.config import ModelConfig
from moescope.decoder.model import ParameterCounts, parameter_counts
from moescope.decoder.routers import RouterInput, TokenContext, router_class
from moescope.errors import BadInput

PROBED = 256  # tokens for which a router's operations are counted
LAYER_BYTES = 50_000  # of a layer's Python objects, about
MOST_COUNTED = 10**14  # parameters; more are not counted exactly
# Operations over all elements that are not tagged as pointwise.
REDUCTIONS = {
    "_softmax", "_log_softmax", "logsumexp", "sum", "mean", "var", "std", "amax", "amin",
    "linalg_vector_norm", "cumsum", "native_layer_norm", "_thnn_fused_gru_cell",
}  # fmt: skip
# Tagged as pointwise, but they only move numbers.
MOVES = {
    "where", "masked_fill", "masked_fill_", "copy_", "fill_", "clone", "_to_copy", "zero_", "scalar_tensor",
}  # fmt: skip


def slots_per_token(config: ModelConfig) -> float:
    """Return how many experts a token meets on average."""
    return router_class(config.router).slots_per_token(config)


def expert_parameters(config: ModelConfig) -> int:
    """Count one expert in one layer: three matrices in block `modern`, two with biases in `some`."""
    width = router_class(config.router).expert_shape(config)[1]
    matrices = 3 if config.block == "modern" else 2
    biases = 0 if config.block == "modern" else width + config.d_model
    return matrices * config.d_model * width + biases


def active_parameters(config: ModelConfig) -> int:
    """Count all parameters minus those of experts that a token does not meet."""
    experts = router_class(config.router).expert_shape(config)[0]
    unmet = (experts - slots_per_token(config)) * expert_parameters(config) * config.layers
    return round(parameter_counts(config).total - unmet)


def training_bytes(config: ModelConfig, tokens: int) -> int:
    """Return a lower bound of the memory of a training whose forward pass has so many tokens.

    Trained weights with gradient and AdamW's two moments in float32, frozen weights, tables of positions, and
    per token two bytes of each logit and of each layer's input.
    """
    counts = checked_counts(config)
    frozen = (counts.total - counts.trainable) * (2 if config.frozen_dtype == "bfloat16" else 4)
    weights = 16 * counts.trainable + frozen + LAYER_BYTES * config.layers
    positions = 4 * config.max_positions * config.d_model // (config.heads if config.modern else 1)
    return weights + positions + 2 * tokens * (config.vocabulary + config.layers * config.d_model)


def checked_counts(config: ModelConfig) -> ParameterCounts:
    """Return the parameters; of a model that torch cannot describe at least so many."""
    experts = router_class(config.router).expert_shape(config)[0]
    least = config.vocabulary * config.d_model + config.layers * experts * expert_parameters(config)
    trainable = config.vocabulary * config.d_model if config.frozen_experts else least
    if least > MOST_COUNTED:
        return ParameterCounts(least, trainable)
    try:
        return parameter_counts(config)
    except (RuntimeError, OverflowError, TypeError):  # such as a router option beyond 64 bits
        return ParameterCounts(MOST_COUNTED, MOST_COUNTED)


def memory_of(device: str) -> int:
    """Return the bytes of a device: of a GPU all of its memory, else all of the machine's."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Count floating-point operations per token of a forward pass in training, with rows of that length.

    Two per matrix weight that the token meets, attention over half the row on average, and everything a
    router does, elementwise arithmetic included; other norms, activations and rotations are excluded. A
    training step takes about three times as much.
    """
    D = config.d_model
    attention = 8 * D * D + 4 * D * (length + 1) / 2
    width = router_class(config.router).expert_shape(config)[1]
    matrices = 3 if config.block == "modern" else 2
    experts = slots_per_token(config) * 2 * matrices * D * width
    return config.layers * (attention + experts + router_flops(config)) + 2 * D * config.vocabulary


def router_flops(config: ModelConfig) -> float:
    """Count one layer's router operations per token, on random tokens."""
    kind = router_class(config.router)
    probed = min(PROBED, max(2**24 // config.experts, 1))  # tokens x experts in little memory
    config = replace(config, vocabulary=min(config.vocabulary, 8))  # operations do not depend on it
    with torch.device("meta"):
        tensors = kind(config, 0, kind.shared_parts(config)).state_dict().values()
    needed = sum(tensor.nbytes for tensor in tensors)
    if needed > memory_of("cpu") // 2:
        raise BadInput(
            f"the {config.router} router of one layer needs {needed / 1e9:,.1f} GB; lower [model] d_model "
            "or experts"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        router = kind(config, 0, kind.shared_parts(config)).train()
        x_TD, ids_T = torch.randn(probed, config.d_model), torch.randint(config.vocabulary, (probed,))
        context = TokenContext(ids_T, torch.zeros_like(ids_T), x_TD)
        inputs = RouterInput(x_TD, ids_T, torch.ones_like(ids_T, dtype=torch.bool), 0, context=context)
        with torch.no_grad(), FlopCount() as counted:
            router(inputs)
    return counted.flops / probed


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count 2 m n k per matrix product and 1 per element of other float arithmetic, in `flops`.

    One per element is a convention: a logarithm costs more than a sum. Sorting, comparing and moving numbers
    count nothing, so a component may take time without any operation here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    name = packet.__name__
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if name == "_grouped_mm":  # each row meets one expert's matrix
        return 2 * args[0].shape[0] * args[0].shape[1] * out.shape[1]
    if name in MOVES or not (torch.Tag.pointwise in func.tags or name in REDUCTIONS):
        return 0
    outputs = out if isinstance(out, tuple | list) else (out,)
    if not any(isinstance(one, Tensor) and one.is_floating_point() for one in outputs):
        return 0  # a comparison
    return max(one.numel() for one in (*args, *outputs) if isinstance(one, Tensor))
