"""The state to resume a training from, in one file written atomically; weights sharded over ranks (FSDP2).

Blocks are sharded, frozen experts too: nearly all of a mixture of experts. Routers, embedding, last norm and
head are replicated on every rank: they are small, and whoever watches a router finds it unsharded. Saved
weights are unsharded and the same as without FSDP.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moescope.decoder.model import LabModel
from moescope.decoder.ranks import Ranks
from moescope.decoder.saving import load_model
from moescope.errors import BadInput
from moescope.storage import atomic_file, check_disk, sync_folder

FILE = "training_state.pt"
KERNELS = ("fused", "capturable", "foreach")  # options of AdamW that fit a device, not a training
UNREADABLE = (OSError, RuntimeError, TypeError, EOFError, LookupError, ValueError, pickle.UnpicklingError)


@dataclass(frozen=True)
class TrainingState:
    """The state after `step` steps. The step alone determines which data come next."""

    step: int
    model: dict[str, Tensor]  # parameters and buffers (keys, biases and moving averages of routers)
    optimiser: dict[str, Any]
    generators: list[Tensor]  # torch's random state of every rank
    evaluations: list[dict[str, Any]]

    def restore(self, model: LabModel, optimiser: torch.optim.Optimizer, ranks: Ranks) -> None:
        """Restore model, optimiser and random state; the latter only for the same number of ranks."""
        state = model.state_dict()
        model.load_state_dict(
            {name: shard_like(tensor, state.get(name, tensor)) for name, tensor in self.model.items()}
        )
        optimiser.load_state_dict(shard_moments(self.optimiser, optimiser))
        if len(self.generators) == ranks.world:
            set_generator(self.generators[ranks.rank])


def shard_moments(state: dict[str, Any], optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimiser's saved state with moments sharded like weights, for this device's kernels."""
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    moments = {
        number: {
            name: shard_like(value, weights[number]) if value.shape == weights[number].shape else value
            for name, value in held.items()
        }
        for number, held in state["state"].items()
    }
    kernels = [{flag: group[flag] for flag in KERNELS} for group in optimiser.param_groups]
    groups = [{**saved, **own} for saved, own in zip(state["param_groups"], kernels, strict=True)]
    return {**state, "state": moments, "param_groups": groups}


def generator_state() -> Tensor:
    """Return the state of the CPU's and the current GPU's generator as one row of bytes."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_available() else state


def set_generator(state: Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].contiguous())
    if torch.cuda.is_available() and len(state) > size:
        torch.cuda.set_rng_state(state[size:].contiguous())


def save_state(
    folder: Path, step: int, model: LabModel, optimiser: Any, evaluations: list[dict[str, Any]], ranks: Ranks
) -> None:
    """Replace the saved state atomically. Collective: every rank must call it.

    Frozen weights are left to the checkpoint of the same step, where there is one.
    """
    generators = [generator_state()]
    if ranks.world > 1:
        generators = [torch.empty(0)] * ranks.world
        torch.distributed.all_gather_object(generators, generator_state())
    weights, moments = (unshard(part.state_dict(), ranks.first) for part in (model, optimiser))
    if not ranks.first:
        return
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    if not checkpoint_of(folder, step).is_dir():
        frozen = []
    weights = {name: tensor for name, tensor in weights.items() if name not in frozen}
    parts = (*weights.values(), *(part for one in moments["state"].values() for part in one.values()))
    needed = sum(part.nbytes for part in parts if isinstance(part, Tensor))
    folder.mkdir(parents=True, exist_ok=True)
    check_disk(folder, needed)
    content = TrainingState(step, weights, moments, generators, evaluations)
    with atomic_file(folder / FILE) as partial:
        fields = {name: getattr(content, name) for name in TrainingState.__dataclass_fields__}
        torch.save({**fields, "frozen": frozen}, partial)
    sync_folder(folder)


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def load_state(folder: Path) -> TrainingState | None:
    """Return the last saved state; None where there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if frozen := content.pop("frozen", []):
            weights = load_model(checkpoint_of(folder, content["step"]), "cpu")[0].state_dict()
            content["model"] |= {name: weights[name] for name in frozen}
        return TrainingState(**content)
    except BadInput as error:
        raise BadInput(
            f"{path}: its frozen weights are missing ({error}); start over with --overwrite"
        ) from None
    except UNREADABLE as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path}: cannot be read ({line}); start over with --overwrite") from None


# --- sharding


def shard_model(model: LabModel, device: str, ranks: Ranks) -> None:
    """Shard every block's weights over the ranks in place; create the optimiser afterwards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.split(":")[0], (ranks.world,))
    replicated = set(replicated_parameters(model))
    for block in model.blocks:
        fully_shard(block.mlp.experts, mesh=mesh)  # separately: they may be frozen and of another dtype
        fully_shard(block, mesh=mesh, ignored_params=replicated)
    fully_shard(model, mesh=mesh, ignored_params=replicated)


def replicated_parameters(model: LabModel) -> list[nn.Parameter]:
    """Return the unsharded parameters: all but attention, norms and experts of the blocks."""
    sharded = {
        id(weight)
        for block in model.blocks
        for name, weight in block.named_parameters()
        if not name.startswith("mlp.router.")
    }
    return [weight for weight in model.parameters() if id(weight) not in sharded]


def average_replicated(model: LabModel, ranks: Ranks) -> None:
    """Average the gradients of unsharded parameters, which FSDP does not, over ranks in place."""
    gradients = [weight.grad for weight in replicated_parameters(model) if weight.grad is not None]
    mean = ranks.sum(torch.cat([gradient.flatten() for gradient in gradients])) / ranks.world
    parts = torch.split(mean, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard; the tensor itself where it is not sharded."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor, which every rank has in full, as `like` is sharded."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def unshard(state: Any, keep: bool) -> Any:
    """Return the nested dictionary with full tensors, on the CPU where they were sharded.

    Collective: every rank must call it; those with `keep` False get empty tensors.
    """
    if isinstance(state, dict):
        return {name: unshard(value, keep) for name, value in state.items()}
    if isinstance(state, Tensor) and hasattr(state, "full_tensor"):
        full = state.full_tensor()
        return full.cpu() if keep else full.new_empty(0)
    return state


def unsharded_model(model: LabModel, keep: bool) -> LabModel | None:
    """Return the model with full weights where `keep` is set. Collective: every rank must call it."""
    weights = unshard(model.state_dict(), keep)
    if not keep:
        return None
    with torch.device("meta"):
        full = LabModel(model.config)
    full.trained_length = model.trained_length
    full.load_state_dict(weights, assign=True)
    return full
