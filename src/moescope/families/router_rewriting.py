"""A router for other experts.

The rows, biases and whatever else it keeps of each, given or taken from the source's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moescope.types import LayerWeights, LazyTensor, RouterState

if TYPE_CHECKING:
    from torch import Tensor

PER_ROUTER = ("router_ED", "router_bias_E", "correction_bias_E")


@dataclass(frozen=True)
class NewRouter:
    """What stands before the new experts. `groups` are the source's experts behind each of them, `leaders`
    the one of each whose part of
    the router it takes over; what is given counts instead. Experts in no group are gone."""

    groups: Sequence[Sequence[int]]
    leaders: Sequence[int]
    given: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # by LayerWeights' field, or by the end of a state's name


def routers_of(weights: LayerWeights) -> dict[str, LazyTensor]:
    """The router's rows and biases, those that it has."""
    found = {name: getattr(weights, name) for name in PER_ROUTER}
    return {name: lazy for name, lazy in found.items() if lazy is not None}


def short_name(weights: LayerWeights, name: str) -> str:
    """A router tensor's name within the router: `weight`, `expand.bias`."""
    return name.removeprefix(f"{weights.layer_name}.router.")


def changed_router(weights: LayerWeights, new: NewRouter) -> dict[str, Tensor]:
    """Every stored tensor of the new router, in the source's dtypes, by its name within the router."""
    found = {}
    for field_name, lazy in routers_of(weights).items():
        found[short_name(weights, lazy.name)] = new_rows(lazy, new, field_name)
    for state in weights.router_state:
        found[short_name(weights, state.tensor.name)] = new_state(weights, state, new)
    return found


def new_rows(lazy: LazyTensor, new: NewRouter, field_name: str) -> Tensor:
    given = new.given.get(field_name)
    own = lazy.read()
    return own[list(new.leaders)] if given is None else given.detach().to(own.dtype)


def new_state(weights: LayerWeights, state: RouterState, new: NewRouter) -> Tensor:
    own = state.tensor.read()
    given = new.given.get(short_name(weights, state.tensor.name))
    if given is not None:
        return given.detach().to(own.dtype)
    if state.kind == "experts":
        return own.reshape(weights.n_experts, -1, *own.shape[1:])[list(new.leaders)].flatten(0, 1)
    return dealt_anew(own, new.groups, weights.n_experts) if state.kind == "table" else own


def state_shape(weights: LayerWeights, state: RouterState, count: int) -> tuple[int, ...]:
    """The tensor's shape with so many experts."""
    shape = state.tensor.shape
    return (shape[0] // weights.n_experts * count, *shape[1:]) if state.kind == "experts" else shape


def dealt_anew(table_VK: Tensor, groups: Sequence[Sequence[int]], n_experts: int) -> Tensor:
    """A table of experts by token id, in new numbers: a group has the tokens of all its members.

    Tokens of an expert that is gone are dealt to the others in turn, by token id, past those that a token has
    already: as even over the
    vocabulary as the table was, and the same whoever does it.
    """
    import torch

    place_E = torch.full((n_experts,), -1, dtype=table_VK.dtype)
    for place, group in enumerate(groups):
        place_E[list(group)] = place
    table = place_E[table_VK.long()]
    turn, rows = 0, table.tolist()
    for row in rows:
        for slot, expert in enumerate(row):
            if expert >= 0:
                continue
            if len(set(range(len(groups))) - set(row)) == 0:
                raise ValueError(f"{len(groups)} experts cannot fill {len(row)} slots")
            while turn in row:
                turn = (turn + 1) % len(groups)
            row[slot], turn = turn, (turn + 1) % len(groups)
    return torch.tensor(rows, dtype=table_VK.dtype).view(table.shape)
