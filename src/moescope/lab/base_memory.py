"""The memory that train --base needs at least, from the headers of its base, before anything is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.errors import BadInput
from moescope.families import read_moe
from moescope.lab.upcycling import is_dense

if TYPE_CHECKING:
    from moescope.checkpoint import Checkpoint
    from moescope.lab.existing import BaseConfig
    from moescope.types import LayerWeights

FROZEN_BYTES = 4  # per parameter: a float32 weight
TRAINED_BYTES = 16  # per parameter: a float32 weight, its gradient and AdamW's two moments


@dataclass(frozen=True)
class BaseSize:
    """Parameters of a model to train, without those of new routers and of adapters."""

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
            f"memory: at least {self.memory / 1e9:,.3g} GB ({counts}; activations, new routers and adapters "
            f"come on top); {device} has {available / 1e9:,.1f} GB"
        )


def base_size(checkpoint: Checkpoint, base: BaseConfig) -> BaseSize:
    """Return the parameters of the model that the base becomes, and how many of them are trained."""
    unused: frozenset[str] = frozenset()
    if is_dense(checkpoint.config):
        blocks = sum(info.parameters for name, info in checkpoint.tensors.items() if ".mlp." in name)
        copies, routers, experts = (base.experts - 1) * blocks, 0, base.experts * blocks
    else:
        moe = read_moe(checkpoint)
        unused, copies = moe.extra_heads, 0
        routers = sum(map(router_parameters, moe.layers.values())) if base.router == "kept" else 0
        sizes = {layer: weights.n_experts for layer, weights in moe.layers.items()}
        chosen = read_expert_list(base.expert_list, sizes) if base.expert_list else sizes
        # of single experts in a fused tensor, too: its gradient and moments have the shape of all
        experts = sum(expert_parameters(moe.layers[layer]) for layer, some in chosen.items() if some)
    total = copies + sum(info.parameters for name, info in checkpoint.tensors.items() if name not in unused)
    trained = {
        "routers": routers,
        "routers+experts": routers + experts,
        "experts": experts,
        "everything": total,
    }[base.trained]
    return BaseSize(total, 0 if base.lora else trained)


def router_parameters(layer: LayerWeights) -> int:
    weights = (layer.router_ED, layer.router_bias_E)
    return sum(math.prod(weight.shape) for weight in weights if weight is not None)


def expert_parameters(layer: LayerWeights) -> int:
    """Count the routed experts of one layer."""
    biases = (layer.gate_bias_EF, layer.up_bias_EF, layer.down_bias_ED)
    stacks = (*layer.projections.values(), *biases)
    return sum(math.prod(stack.shape) for stack in stacks if stack is not None)


def check_memory(size: BaseSize, device: str, processes: int = 1) -> str:
    """Return the line that tells the memory; raise where the device has less. Processes share a CPU's."""
    from moescope.lab.cost import memory_of

    available = memory_of(device) // (processes if device == "cpu" else 1)
    if size.memory > available:
        raise BadInput(
            f"this training needs at least {size.memory / 1e9:,.1f} GB of memory per process, {device} has "
            f"{available / 1e9:,.1f}; train less of the model, or use a larger device"
        )
    return size.line(device, available)


def read_expert_list(path: str, layers: dict[int, int]) -> dict[int, list[int]]:
    """Return layer -> experts to train, of a JSON file with {"experts": {layer: [expert, ...]}}.

    `layers` are the model's MoE layers with their numbers of experts.
    """
    try:
        lists = json.loads(Path(path).read_text(encoding="utf-8"))["experts"]
        chosen = {int(layer): [int(expert) for expert in experts] for layer, experts in lists.items()}
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}; give [base] expert_list") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f'{path}: not a list of experts; it must hold {{"experts": {{"0": [1, 2]}}}}, as moescope deploy '
            "writes it"
        ) from None
    for layer, experts in chosen.items():
        if layer not in layers:
            raise BadInput(
                f"{path}: layer {layer} has no experts in this model; its MoE layers: {list(layers)}"
            )
        for expert in experts:
            if not 0 <= expert < layers[layer]:
                raise BadInput(f"{path}: layer {layer} has {layers[layer]} experts, no expert {expert}")
    if not any(chosen.values()):
        raise BadInput(f"{path}: names no expert; give at least one")
    return chosen
