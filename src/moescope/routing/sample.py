"""Tokens kept one by one.

A sample bounded in size for vocabulary and stability, or every token where asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moescope.execution.documents import Batch, Window
from moescope.routing.decision import routing_entropy
from moescope.types import Array, Integers, Routing

MOST_TOKENS = 1_000_000
MOST_BYTES = 2**28  # of expert numbers kept, all layers together


@dataclass
class Recorder:
    """What every layer decided for chosen positions of one pass, kept on the device until `moved`."""

    full: bool = False  # gates and entropies too
    at: Tensor | None = None  # which of the pass's tokens; None: none
    kept: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def add(self, routing: Routing) -> None:
        if self.at is None:
            return
        gates_TK = routing.gates_TK[self.at].float()
        order = gates_TK.masked_fill(routing.chosen_TK[self.at] < 0, float("-inf")).argsort(
            dim=-1, descending=True, stable=True
        )
        chosen_TK = routing.chosen_TK[self.at].gather(1, order).to(torch.int16)
        more: tuple[Tensor, ...] = ()
        if self.full:
            known = routing.scores_TE is not None
            entropy = (
                routing_entropy(routing)[self.at] if known else torch.full_like(gates_TK[:, 0], float("nan"))
            )
            more = (gates_TK.gather(1, order), entropy.float())
        self.kept[routing.layer] = (chosen_TK, *more)

    def moved(self) -> tuple[Array, ...]:
        """Layers stacked in their order.

        Expert numbers [L, T, K] by falling gate, and with `full` gates and entropies.
        """
        parts = [self.kept[layer] for layer in sorted(self.kept)]
        self.kept = {}
        return tuple(torch.stack(part).cpu().numpy() for part in zip(*parts, strict=True))


@dataclass(frozen=True)
class Probe:
    """The sampled tokens with every layer's choices, in an order that depends on their content alone."""

    layers: list[int]
    chosen_LTK: Integers  # expert numbers by falling gate, -1 where a slot is empty
    ids_T: Integers
    next_T: Integers
    predicted_T: Integers
    document_T: Integers
    share: float  # of all windows

    @property
    def half_T(self) -> Integers:
        """Which half of the documents a token's is in, by its content."""
        return (self.document_T >> 32) % 2


@dataclass
class Sample:
    """Windows whose draw lies below a threshold that is halved whenever they become too many.

    A fixed choice in any order.
    """

    layers: list[int]
    k: int = 1  # as the first window has it
    threshold: float = 1.0
    windows: list[tuple[Window, dict[str, Integers]]] = field(default_factory=list)
    size: int = 0

    @property
    def most(self) -> int:
        return max(min(MOST_TOKENS, MOST_BYTES // (2 * len(self.layers) * self.k)), 1)

    def wants(self, window: Window) -> bool:
        return window.draw < self.threshold

    def add(self, window: Window, chosen_LTK: Integers, next_T: Integers, predicted_T: Integers) -> None:
        if not self.wants(window):
            return
        self.k = chosen_LTK.shape[-1]
        self.windows.append((window, {"chosen": chosen_LTK, "next": next_T, "predicted": predicted_T}))
        self.size += len(window.ids)
        while self.size > self.most:
            self.threshold /= 2
            self.windows = [kept for kept in self.windows if self.wants(kept[0])]
            self.size = sum(len(kept.ids) for kept, _ in self.windows)

    def probe(self) -> Probe:
        ordered = sorted(self.windows, key=lambda kept: (kept[0].draw, kept[0].document))
        nothing = np.zeros(0, dtype=np.int64)

        def joined(name: str) -> Integers:
            return np.concatenate([nothing, *(parts[name] for _, parts in ordered)])

        empty = np.zeros((len(self.layers), 0, self.k), dtype=np.int16)
        return Probe(
            self.layers,
            np.concatenate([empty, *(parts["chosen"] for _, parts in ordered)], axis=1),
            np.concatenate([nothing, *(window.ids for window, _ in ordered)]),
            joined("next"),
            joined("predicted"),
            np.concatenate([nothing, *(np.full(len(window.ids), window.document) for window, _ in ordered)]),
            self.threshold,
        )


def sampled_positions(batch: Batch, sample: Sample | None, start: int, stop: int) -> Integers:
    """Positions, in a pass over columns `start` to `stop`, of real tokens in rows the sample wants."""
    wanted = np.array([sample is None or sample.wants(row) for row in batch.rows])
    return np.flatnonzero((batch.real_BL[:, start:stop] & wanted[:, None]).reshape(-1))
