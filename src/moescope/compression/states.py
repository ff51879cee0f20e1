"""A bounded sample of what a layer's experts were given, with the router's own logits.

Choices and gates for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from moescope.compression.calibration import Sums, real_tokens
from moescope.execution.adapters import Block, RouterReads
from moescope.types import Routing, Tokens

MOST_STATES = 4096  # tokens a layer
FEWEST_STATES = 256
MOST_BYTES = 2**30  # of all layers together
SPREAD = (
    -7046029254386353131,
    -4658895280553007687,
    -7723592293110705685,
)  # odd constants of splitmix64, as int64


@dataclass(frozen=True)
class LayerStates:
    """A layer's sample, on the CPU.

    The same tokens are sampled in every layer, whatever order documents come in.
    """

    x_TD: Tensor  # in the model's dtype
    logits_TE: Tensor | None  # float32; None where the router has none
    chosen_TK: Tensor
    gates_TK: Tensor
    draw_T: Tensor  # int64: the tokens with the smallest draws are the sample
    ids_T: Tensor | None = None  # the tokens; None where nobody said which they are
    carried_TR: Tensor | None = (
        None  # what the router was handed by that of the layer before, where it reads that
    )

    def __len__(self) -> int:
        return len(self.draw_T)

    def parts(self) -> dict[str, Tensor]:
        """What there is, by name."""
        found = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def each(self, change: Callable[[str, Tensor], Tensor]) -> LayerStates:
        """The same parts, each changed."""
        return replace(self, **{name: change(name, tensor) for name, tensor in self.parts().items()})

    def smallest(self, most: int) -> LayerStates:
        if len(self) <= most:
            return self
        kept = self.draw_T.topk(most, largest=False).indices.sort().values
        return self.each(lambda name, tensor: tensor[kept])

    def joined(self, other: LayerStates) -> LayerStates:
        return self.each(lambda name, tensor: torch.cat([tensor, other.parts()[name]]))

    def reads(self) -> RouterReads:
        """What a router decides from."""
        return RouterReads(self.x_TD, self.ids_T, self.carried_TR)


class StateSample:
    """Collects `LayerStates` of every layer: the tokens whose draw, a seeded hash of the text up to them, is
    smallest.

    A sample by smallest draws is uniform, bounded, and that of two texts is found from those of each.
    """

    def __init__(self, seed: int = 0, most: int = MOST_STATES, layers: int = 1):
        self.seed, self.most, self.layers = seed, most, layers
        self.found: dict[int, LayerStates] = {}
        self.limit: int | None = None

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.x_TD is not None
        if self.limit is None:
            row = routing.x_TD.shape[1] * routing.x_TD.element_size() + 4 * routing.n_experts
            self.limit = min(self.most, max(FEWEST_STATES, MOST_BYTES // (row * self.layers)))
        draw_T = draws(routing, self.seed)
        wanted_T = real_tokens(routing)
        held = self.found.get(routing.layer)
        if held is not None and len(held) == self.limit:
            wanted_T = wanted_T & (draw_T < held.draw_T.max().to(draw_T.device))
        at = torch.where(wanted_T)[0]
        if len(at) > self.limit:
            at = at[draw_T[at].topk(self.limit, largest=False).indices]
        ids_T = None if routing.tokens is None else routing.tokens.ids_T
        seen = LayerStates(
            routing.x_TD,
            routing.logits_TE,
            routing.chosen_TK,
            routing.gates_TK,
            draw_T,
            ids_T,
            routing.carried_TR,
        )
        new = seen.each(lambda name, tensor: tensor[at].cpu())
        self.found[routing.layer] = (new if held is None else held.joined(new)).smallest(self.limit)

    def sums(self) -> Sums:
        """None: a sample is no sum. `states()` has it."""
        return {}

    def states(self) -> dict[int, LayerStates]:
        return dict(self.found)


def draws(routing: Routing, seed: int) -> Tensor:
    """A number for every token that depends on its text so far and the seed alone.

    Alike in every layer, batch and order.
    """
    tokens = routing.tokens
    if tokens is None:
        return mixed(torch.arange(len(routing.chosen_TK), device=routing.chosen_TK.device) + seed * SPREAD[0])
    return mixed(history(tokens) + seed * SPREAD[2])


def history(tokens: Tokens) -> Tensor:
    """A hash of each row's ids and positions up to each token; overflow is meant."""
    each_RL = mixed(tokens.ids_T * SPREAD[0] + tokens.position_T).view(tokens.rows, -1)
    return each_RL.cumsum(-1).view(-1) + tokens.position_T


def mixed(values: Tensor) -> Tensor:
    """splitmix64's last steps on int64 (Steele, Lea and Flood 2014), shifts made logical by a mask."""
    values = (values ^ ((values >> 30) & (2**34 - 1))) * SPREAD[1]
    values = (values ^ ((values >> 27) & (2**37 - 1))) * SPREAD[2]
    return values ^ ((values >> 31) & (2**33 - 1))


# --- as arrays of a file


def as_arrays(states: Mapping[int, LayerStates]) -> dict[str, Tensor]:
    return {
        f"layer.{layer}.states.{name}": tensor
        for layer, own in states.items()
        for name, tensor in own.parts().items()
    }


def from_arrays(arrays: Mapping[str, Tensor]) -> dict[int, LayerStates]:
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in arrays.items():
        _, layer, *rest = name.split(".")
        if rest[0] == "states":
            found.setdefault(int(layer), {"logits_TE": None})[rest[1]] = tensor  # type: ignore[dict-item]
    return {layer: LayerStates(**parts) for layer, parts in sorted(found.items())}
