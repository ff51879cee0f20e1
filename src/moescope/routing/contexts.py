"""Where each expert's gates are largest.

A few places of the text an expert and layer, kept in bounded memory as the text is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moescope.execution.documents import Window
from moescope.types import Array, Integers, Routing

MOST = 5  # places kept an expert
BEFORE, AFTER = 10, 8  # tokens shown around
CORE = slice(BEFORE - 4, BEFORE + 4)  # tokens by which two places are the same phrase
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
        """The largest gates of each, a phrase once.

        Equal ones by the window's draw, so that nothing hangs on the order of reading.
        """
        rows = np.arange(len(self.gate))[:, None]
        order = np.lexsort((self.draw, -self.gate), axis=1)
        core = self.ids[rows, order][..., CORE]
        again = (core[:, :, None] == core[:, None]).all(axis=-1)
        said = np.tril(again, -1).any(axis=2) & np.isfinite(self.gate[rows, order])
        order = order[rows, np.argsort(said, axis=1, kind="stable")]
        found = Places(*(part[rows, order][:, :most] for part in self))
        found.gate[np.sort(said, axis=1)[:, :most]] = -np.inf
        return found

    def joined(self, other: Places) -> Places:
        return Places(*(np.concatenate(pair, axis=1) for pair in zip(self, other, strict=True)))


@dataclass
class LargestGates:
    """The largest gate of every expert in every row of a batch, and where it is.

    Found on the device, pass by pass, so that little is moved.
    """

    widest: int  # experts of a layer, at most
    at: Tensor | None = None  # which of the pass's tokens are looked at; None: none
    rows: int = 0
    width: int = 0
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    gate_LBE: Array | None = None  # over the passes so far; -inf where an expert was not chosen
    position_LBE: Integers | None = None

    def aim(self, at: Tensor | None, rows: int, width: int) -> None:
        self.at, self.rows, self.width = at, rows, width

    def add(self, routing: Routing) -> None:
        if self.at is None:
            return
        chosen_TK, gates_TK = routing.chosen_TK[self.at], routing.gates_TK[self.at].float()
        nowhere = self.rows * self.widest  # the cell of empty slots
        cell_TK = (self.at // self.width)[:, None] * self.widest + chosen_TK
        cell = torch.where(chosen_TK >= 0, cell_TK, nowhere).view(-1)
        place = (self.at % self.width)[:, None].expand_as(chosen_TK).reshape(-1)
        gate_C = gates_TK.new_full((nowhere + 1,), -torch.inf).scatter_reduce_(
            0, cell, gates_TK.reshape(-1), "amax"
        )
        place = torch.where(
            gates_TK.reshape(-1) == gate_C[cell], place, self.width
        )  # of equal ones the first
        place_C = place.new_full((nowhere + 1,), self.width).scatter_reduce_(0, cell, place, "amin")
        self.kept[routing.layer] = (gate_C[:-1].view(self.rows, -1), place_C[:-1].view(self.rows, -1))

    def collect(self, start: int) -> None:
        """Put the pass that began at column `start` together with those before it."""
        parts = [self.kept[layer] for layer in sorted(self.kept)]
        self.kept = {}
        gate_LBE, place_LBE = (torch.stack(part).cpu().numpy() for part in zip(*parts, strict=True))
        if self.gate_LBE is None or self.position_LBE is None:
            self.gate_LBE, self.position_LBE = gate_LBE, place_LBE + start
        else:
            better = gate_LBE > self.gate_LBE
            self.gate_LBE = np.where(better, gate_LBE, self.gate_LBE)
            self.position_LBE = np.where(better, place_LBE + start, self.position_LBE)

    def taken(self) -> tuple[Array, Integers]:
        """(gates, positions) of the whole batch; the next one starts anew."""
        assert self.gate_LBE is not None
        assert self.position_LBE is not None
        found = self.gate_LBE, self.position_LBE
        self.gate_LBE = self.position_LBE = None
        return found


@dataclass
class Contexts:
    """The places of a text where every expert's gate is largest, one a window and one a phrase: five times
    the same tell no more than once.

    They are of the sample's windows. Its threshold may be halved later, so places are kept apart by the
    octave of their window's draw, and
    at the end those of the octaves below the threshold are put together: the same places in whatever order
    the text is read.
    """

    layers: list[int]
    n_experts: list[int]  # of each layer
    octaves: dict[int, Places] = field(default_factory=dict)

    @property
    def widest(self) -> int:
        return max(self.n_experts)

    def add(self, window: Window, gate_LE: Array, position_LE: Integers) -> None:
        """A window with each expert's largest gate in it (-inf: not chosen) and where that is."""
        kept = self.octaves.get(octave(window.draw)) or Places.empty(len(self.layers) * self.widest)
        gate_C, position_C = gate_LE.reshape(-1), position_LE.reshape(-1)
        said_before = (kept.draw == window.draw).any(axis=1)  # the same text over again
        owner = np.flatnonzero((gate_C >= kept.gate[:, -1]) & np.isfinite(gate_C) & ~said_before)
        if not len(owner):
            return
        gate, position = gate_C[owner].astype(np.float32), position_C[owner]
        offered = Places(
            gate[:, None],
            np.full((len(owner), 1), window.draw),
            np.full((len(owner), 1), window.number),
            window.start + position[:, None],
            np.full((len(owner), 1), window.domain, np.int32),
            around(window.ids, position)[:, None],
        )
        for part, better in zip(
            kept, Places(*(part[owner] for part in kept)).joined(offered).best(), strict=True
        ):
            part[owner] = better
        self.octaves[octave(window.draw)] = kept

    def keep_below(self, threshold: float) -> None:
        """Drop what lies in windows the sample has let go."""
        self.octaves = {
            number: places for number, places in self.octaves.items() if 2.0**-number <= threshold
        }

    def rows(self, threshold: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """(layer, its row of the contexts table) with token ids in place of words.

        Of windows below the threshold.
        """
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


def around(ids_T: Integers, position_N: Integers) -> Integers:
    """The tokens around each position, -1 beyond the window's ends."""
    padded = np.concatenate([np.full(BEFORE, NOTHING), ids_T, np.full(AFTER, NOTHING)]).astype(np.int32)
    return padded[position_N[:, None] + np.arange(BEFORE + 1 + AFTER)]
