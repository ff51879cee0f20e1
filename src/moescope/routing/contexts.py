"""Where each expert's gates are largest: a few places of the text an expert and layer, kept in bounded memory as the text is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moescope.routing.arrays import Array, Integers
from moescope.routing.documents import Window

MOST = 5  # places kept an expert
BEFORE, AFTER = 10, 8  # tokens shown around
NOTHING = -1  # no such token: the window begins or ends here


class Places(NamedTuple):
    """C experts (all layers') by some places each, best first; a gate of -inf where there is no place."""

    gate: NDArray[Any]
    draw: NDArray[Any]  # the window's, which tells windows of different content apart
    document: NDArray[Any]
    position: NDArray[Any]
    domain: NDArray[Any]
    ids: NDArray[Any]  # tokens around, the place's own at BEFORE

    @classmethod
    def empty(cls, experts: int, most: int = MOST) -> Places:
        shape = (experts, most)
        return cls(
            np.full(shape, -np.inf, np.float32),
            np.full(shape, np.inf),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
            np.full((*shape, BEFORE + 1 + AFTER), NOTHING, np.int32),
        )

    def best(self, most: int = MOST) -> Places:
        """The largest gates of each; equal ones by the window's draw, so that nothing hangs on the order of reading."""
        order = np.lexsort((self.draw, -self.gate), axis=1)[:, :most]
        rows = np.arange(len(order))[:, None]
        return Places(*(part[rows, order] for part in self))

    def joined(self, other: Places) -> Places:
        return Places(*(np.concatenate(pair, axis=1) for pair in zip(self, other, strict=True)))


@dataclass
class Contexts:
    """The places of a text where every expert's gate is largest, one a window at most: five times the same phrase tell no more than once.

    They are of the sample's windows. Its threshold may be halved later, so places are kept apart by the octave of their window's draw, and
    at the end those of the octaves below the threshold are put together: the same places in whatever order the text is read.
    """

    layers: list[int]
    n_experts: list[int]  # of each layer
    octaves: dict[int, Places] = field(default_factory=dict)

    @property
    def widest(self) -> int:
        return max(self.n_experts)

    def add(self, window: Window, chosen_LTK: Integers, gates_LTK: Array) -> None:
        kept = self.octaves.get(octave(window.draw)) or Places.empty(len(self.layers) * self.widest)
        owner, gate, position = largest(chosen_LTK, gates_LTK, self.widest, kept.gate[:, -1])
        new = ~(kept.draw[owner] == window.draw).any(axis=1)  # not the same text over again
        owner, gate, position = owner[new], gate[new], position[new]
        offered = Places(
            gate[:, None],
            np.full((len(owner), 1), window.draw),
            np.full((len(owner), 1), window.number),
            window.start + position[:, None],
            np.full((len(owner), 1), window.domain, np.int32),
            around(window.ids, position)[:, None],
        )
        for part, better in zip(kept, Places(*(part[owner] for part in kept)).joined(offered).best(), strict=True):
            part[owner] = better
        self.octaves[octave(window.draw)] = kept

    def keep_below(self, threshold: float) -> None:
        """Drop what lies in windows the sample has let go."""
        self.octaves = {number: places for number, places in self.octaves.items() if 2.0**-number <= threshold}

    def rows(self, threshold: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """(layer, its row of the contexts table) with token ids in place of words, of windows below the threshold."""
        self.keep_below(threshold)
        places = Places.empty(len(self.layers) * self.widest)
        for found in self.octaves.values():
            places = places.joined(found).best()
        for owner, rank in zip(*np.nonzero(np.isfinite(places.gate)), strict=True):
            ids = places.ids[owner, rank]
            row = {
                "expert": int(owner % self.widest),
                "rank": int(rank) + 1,
                "document": int(places.document[owner, rank]),
                "position": int(places.position[owner, rank]),
                "domain": int(places.domain[owner, rank]),
                "token_id": int(ids[BEFORE]),
                "before": [int(token) for token in ids[:BEFORE] if token != NOTHING],
                "after": [int(token) for token in ids[BEFORE + 1 :] if token != NOTHING],
                "gate": float(places.gate[owner, rank]),
            }
            yield self.layers[owner // self.widest], row


def octave(draw: float) -> int:
    """j for a draw in [2^-(j+1), 2^-j)."""
    return -math.frexp(draw)[1] if draw > 0 else 64


def largest(chosen_LTK: Integers, gates_LTK: Array, widest: int, floor_C: Array) -> tuple[Integers, Array, Integers]:
    """Of every expert whose largest gate in this window is no less than its floor: its number among all layers', gate, position."""
    layers, tokens, k = chosen_LTK.shape
    owner_LTK = chosen_LTK.astype(np.int64) + widest * np.arange(layers)[:, None, None]
    there_LTK = chosen_LTK >= 0
    # few tokens pass once the shelves are full, so the sort below is of few
    at = np.flatnonzero(there_LTK & (gates_LTK >= floor_C[np.where(there_LTK, owner_LTK, 0)]))
    owner, gate, position = owner_LTK.reshape(-1)[at], gates_LTK.reshape(-1)[at], at // k % tokens
    order = np.lexsort((position, -gate, owner))
    owner, gate, position = owner[order], gate[order], position[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    return owner[first], gate[first].astype(np.float32), position[first]


def around(ids_T: Integers, position_N: Integers) -> Integers:
    """The tokens around each position, -1 beyond the window's ends."""
    padded = np.concatenate([np.full(BEFORE, NOTHING), ids_T, np.full(AFTER, NOTHING)]).astype(np.int32)
    return padded[position_N[:, None] + np.arange(BEFORE + 1 + AFTER)]
