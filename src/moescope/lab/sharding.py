"""Weights of which every rank keeps a part (FSDP2): a block's are put together while it runs, and no longer.

Shared out are the blocks, frozen experts too: nearly all of a mixture of experts. Routers, embedding, last
norm and head stay whole on
every rank: they are small, and whoever watches a router finds it as it always is. What is saved is whole, and
the same as without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moescope.decoder.model import LabModel
from moescope.decoder.ranks import Ranks


def share_out(model: LabModel, device: str, ranks: Ranks) -> None:
    """Leave each rank its part of every block's weights, in place.

    An optimiser must be made afterwards: parameters are new ones.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.split(":")[0], (ranks.world,))
    whole = set(whole_parameters(model))
    for block in model.blocks:
        fully_shard(block.mlp.experts, mesh=mesh)  # by themselves: they may be frozen, and of another dtype
        fully_shard(block, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)


def whole_parameters(model: LabModel) -> list[nn.Parameter]:
    """What every rank keeps all of: everything but attention, norms and experts of the blocks."""
    parts = {
        id(weight)
        for block in model.blocks
        for name, weight in block.named_parameters()
        if not name.startswith("mlp.router.")
    }
    return [weight for weight in model.parameters() if id(weight) not in parts]


def average_whole(model: LabModel, ranks: Ranks) -> None:
    """The mean over ranks of the gradients that nobody else averages, in place."""
    gradients = [weight.grad for weight in whole_parameters(model) if weight.grad is not None]
    mean = ranks.sum(torch.cat([gradient.flatten() for gradient in gradients])) / ranks.world
    for gradient, part in zip(
        gradients, torch.split(mean, [gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


def is_shared(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def part_like(whole: Tensor, like: Tensor) -> Tensor:
    """The tensor shared out as `like` is; every rank must have all of it."""
    if not is_shared(like):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def put_together(state: Any, keep: bool) -> Any:
    """The same dictionaries with whole tensors, on the CPU where they were shared out.

    Every rank must call it; those that do not keep them get empty ones.
    """
    if isinstance(state, dict):
        return {name: put_together(value, keep) for name, value in state.items()}
    if isinstance(state, Tensor) and hasattr(state, "full_tensor"):
        whole = state.full_tensor()
        return whole.cpu() if keep else whole.new_empty(0)
    return state


def whole_model(model: LabModel, keep: bool) -> LabModel | None:
    """The model with whole weights, on ranks that keep it. Every rank must call it."""
    weights = put_together(model.state_dict(), keep)
    if not keep:
        return None
    with torch.device("meta"):
        found = LabModel(model.config)
    found.load_state_dict(weights, assign=True)
    return found
