"""Everything a training needs to go on as if it had never stopped, in one file that is whole or not there."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moescope.decoder.model import LabModel
from moescope.decoder.ranks import Ranks
from moescope.errors import BadInput
from moescope.lab.sharding import part_like, put_together
from moescope.storage import check_disk, replace_synced, sync_folder

FILE = "training_state.pt"


@dataclass(frozen=True)
class TrainingState:
    """After `step` steps. Which data come next is told by the step alone."""

    step: int
    model: dict[
        str, Tensor
    ]  # parameters and buffers: keys, biases and moving averages of routers are buffers
    optimiser: dict[str, Any]
    generators: list[Tensor]  # torch's random numbers on every rank
    evaluations: list[dict[str, Any]]

    def restore(self, model: LabModel, optimiser: torch.optim.Optimizer, ranks: Ranks) -> None:
        """Put everything back in place.

        Another number of ranks than before draws other random numbers, and nothing else.
        """
        own = model.state_dict()
        model.load_state_dict(
            {name: part_like(tensor, own.get(name, tensor)) for name, tensor in self.model.items()}
        )
        optimiser.load_state_dict(parts_of(self.optimiser, optimiser))
        if len(self.generators) == ranks.world:
            set_generator(self.generators[ranks.rank])


def parts_of(state: dict[str, Any], optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's saved state, its moments shared out as their weights are."""
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    moments = {
        number: {
            name: part_like(value, weights[number]) if value.shape == weights[number].shape else value
            for name, value in held.items()
        }
        for number, held in state["state"].items()
    }
    return {**state, "state": moments}


def generator_state() -> Tensor:
    """The CPU's and, where there is one, the current GPU's generator as one row of bytes."""
    own = torch.get_rng_state()
    return torch.cat([own, torch.cuda.get_rng_state()]) if torch.cuda.is_available() else own


def set_generator(state: Tensor) -> None:
    own = len(torch.get_rng_state())
    torch.set_rng_state(state[:own].contiguous())
    if torch.cuda.is_available() and len(state) > own:
        torch.cuda.set_rng_state(state[own:].contiguous())


def save_state(
    folder: Path, step: int, model: LabModel, optimiser: Any, evaluations: list[dict[str, Any]], ranks: Ranks
) -> None:
    """Write the state in place of the one before, which stays until this one is whole on disk.

    Every rank must call it.
    """
    generators = [generator_state()]
    if ranks.world > 1:
        generators = [torch.empty(0)] * ranks.world
        torch.distributed.all_gather_object(generators, generator_state())
    weights, moments = (put_together(part.state_dict(), ranks.first) for part in (model, optimiser))
    if not ranks.first:
        return
    content: dict[str, Any] = {
        "step": step,
        "model": weights,
        "optimiser": moments,
        "generators": generators,
        "evaluations": evaluations,
    }
    moments = [part for one in content["optimiser"]["state"].values() for part in one.values()]
    needed = sum(part.nbytes for part in (*content["model"].values(), *moments) if isinstance(part, Tensor))
    folder.mkdir(parents=True, exist_ok=True)
    check_disk(folder, needed)
    partial = folder / f"{FILE}.tmp"
    torch.save(content, partial)
    replace_synced(partial, folder / FILE)
    sync_folder(folder)


def load_state(folder: Path) -> TrainingState | None:
    """The last state saved there; None where there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return TrainingState(**content)
    except (
        OSError,
        RuntimeError,
        TypeError,
        EOFError,
        LookupError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path}: cannot be read ({line}); begin anew with --overwrite") from None
