"""What is stored of the text in bounded memory: a sample of tokens with every layer's choices, and contexts.

The sample is for vocabulary and stability. Contexts of an expert are the few places of the text where its
gate is largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moescope.types import Array, Integers

if TYPE_CHECKING:
    from moescope.execution.documents import Window

MOST_TOKENS = 1_000_000
MOST_BYTES = 2**28  # of expert numbers, all layers together
MOST = 5  # places per expert
BEFORE, AFTER = 10, 8  # tokens shown around a place
CORE = slice(BEFORE - 4, BEFORE + 4)  # places that agree in these tokens are the same phrase
NO_TOKEN = -1  # beyond the window
WORD_START = "▁"  # SentencePiece's blank before a word, which decoding a single token removes


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
        """Which half of the documents each token belongs to, by the document's content."""
        return (self.document_T >> 32) % 2

    def chosen_TK(self, layer: int) -> Integers:
        return self.chosen_LTK[self.layers.index(layer)]


@dataclass
class Sample:
    """Windows whose draw lies below a threshold, which is halved whenever they become too many.

    The same windows are chosen in any reading order.
    """

    layers: list[int]
    k: int = 1  # set by the first window
    threshold: float = 1.0
    windows: list[tuple[Window, Integers, Integers, Integers]] = field(default_factory=list)
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
        self.windows.append((window, chosen_LTK, next_T, predicted_T))
        self.size += len(window.ids)
        while self.size > self.most:
            self.threshold /= 2
            self.windows = [entry for entry in self.windows if self.wants(entry[0])]
            self.size = sum(len(entry[0].ids) for entry in self.windows)

    def join(self, other: Sample) -> None:
        """Add the sample of another part of the text: the sample of both parts together."""
        self.threshold = min(self.threshold, other.threshold)
        entries = [entry for entry in (*self.windows, *other.windows) if self.wants(entry[0])]
        self.windows, self.size = [], 0
        for entry in entries:
            self.add(*entry)

    def probe(self) -> Probe:
        ordered = sorted(self.windows, key=lambda entry: (entry[0].draw, entry[0].document))
        no_choice = np.zeros((len(self.layers), 0, self.k), dtype=np.int16)
        per_token = [
            (window.ids, next_T, predicted_T, np.full(len(window.ids), window.document))
            for window, _, next_T, predicted_T in ordered
        ]
        none = (np.zeros(0, dtype=np.int64),) * 4
        ids_T, next_T, predicted_T, document_T = map(np.concatenate, zip(none, *per_token, strict=True))
        chosen_LTK = np.concatenate([no_choice, *(chosen_LTK for _, chosen_LTK, *_ in ordered)], axis=1)
        return Probe(self.layers, chosen_LTK, ids_T, next_T, predicted_T, document_T, self.threshold)


# --- contexts


class Places(NamedTuple):
    """Some places of each of C experts (of all layers), best first; a gate of -inf: no place."""

    gate: NDArray[Any]
    draw: NDArray[Any]  # the window's: windows of different content differ in it
    document: NDArray[Any]
    position: NDArray[Any]
    domain: NDArray[Any]
    ids: NDArray[Any]  # tokens around; the place's token is at BEFORE

    @classmethod
    def empty(cls, experts: int, most: int = MOST) -> Places:
        shape = (experts, most)
        return cls(
            np.full(shape, -np.inf, np.float32),
            np.full(shape, np.inf),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
            np.full((*shape, BEFORE + 1 + AFTER), NO_TOKEN, np.int32),
        )

    def best(self, most: int = MOST) -> Places:
        """Return each expert's largest gates, each phrase once; ties are broken by the window's draw."""
        rows = np.arange(len(self.gate))[:, None]
        order = np.lexsort((self.draw, -self.gate), axis=1)
        core = self.ids[rows, order][..., CORE]
        same = (core[:, :, None] == core[:, None]).all(axis=-1)
        repeated = np.tril(same, -1).any(axis=2) & np.isfinite(self.gate[rows, order])
        order = order[rows, np.argsort(repeated, axis=1, kind="stable")]
        places = Places(*(part[rows, order][:, :most] for part in self))
        places.gate[np.sort(repeated, axis=1)[:, :most]] = -np.inf
        return places

    def joined(self, other: Places) -> Places:
        return Places(*(np.concatenate(pair, axis=1) for pair in zip(self, other, strict=True)))


@dataclass
class Contexts:
    """The places where every expert's gate is largest, at most one per window and one per phrase.

    Only the sample's windows count. Its threshold may be halved later, so places are stored by the octave of
    their window's draw, and the octaves below the threshold are joined at the end: the result does not depend
    on the reading order.
    """

    layers: list[int]
    n_experts: list[int]  # per layer
    octaves: dict[int, Places] = field(default_factory=dict)

    @property
    def widest(self) -> int:
        return max(self.n_experts)

    def add(self, window: Window, gate_LE: Array, position_LE: Integers) -> None:
        """Add a window with each expert's largest gate in it (-inf: not chosen) and its position."""
        places = self.octaves.get(octave(window.draw)) or Places.empty(len(self.layers) * self.widest)
        gate_C, position_C = gate_LE.reshape(-1), position_LE.reshape(-1)
        again = (places.draw == window.draw).any(axis=1)
        owner = np.flatnonzero((gate_C >= places.gate[:, -1]) & np.isfinite(gate_C) & ~again)
        if not len(owner):
            return
        position, one = position_C[owner], (len(owner), 1)
        offered = Places(
            gate_C[owner, None].astype(np.float32),
            np.full(one, window.draw),
            np.full(one, window.number),
            window.start + position[:, None],
            np.full(one, window.domain, np.int32),
            around(window.ids, position)[:, None],
        )
        best = Places(*(part[owner] for part in places)).joined(offered).best()
        for part, better in zip(places, best, strict=True):
            part[owner] = better
        self.octaves[octave(window.draw)] = places

    def join(self, other: Contexts) -> None:
        """Add the places of another part of the text."""
        for number, places in other.octaves.items():
            held = self.octaves.get(number)
            self.octaves[number] = places if held is None else held.joined(places).best()

    def keep_below(self, threshold: float) -> None:
        """Drop the places in windows that the sample has dropped."""
        self.octaves = {
            number: places for number, places in self.octaves.items() if 2.0**-number <= threshold
        }

    def rows(self, threshold: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (layer, row of the contexts table with ids for text), of windows below the threshold."""
        self.keep_below(threshold)
        places = Places.empty(len(self.layers) * self.widest)
        for part in self.octaves.values():
            places = places.joined(part).best()
        for owner, rank in zip(*np.nonzero(np.isfinite(places.gate)), strict=True):
            ids = places.ids[owner, rank]
            row = {
                "expert": int(owner % self.widest),
                "rank": int(rank) + 1,
                "document": int(places.document[owner, rank]),
                "position": int(places.position[owner, rank]),
                "domain": int(places.domain[owner, rank]),
                "token_id": int(ids[BEFORE]),
                "before": [int(token) for token in ids[:BEFORE] if token != NO_TOKEN],
                "after": [int(token) for token in ids[BEFORE + 1 :] if token != NO_TOKEN],
                "gate": float(places.gate[owner, rank]),
            }
            yield self.layers[owner // self.widest], row


def octave(draw: float) -> int:
    """Return j for a draw in [2^-(j+1), 2^-j)."""
    return -math.frexp(draw)[1] if draw > 0 else 64


def around(ids_T: Integers, position_N: Integers) -> Integers:
    """Return the tokens around each position, -1 beyond the window."""
    padded = np.concatenate([np.full(BEFORE, NO_TOKEN), ids_T, np.full(AFTER, NO_TOKEN)]).astype(np.int32)
    return padded[position_N[:, None] + np.arange(BEFORE + 1 + AFTER)]


@dataclass
class TokenText:
    """Token ids as text, each looked up once; None for all of them without a tokenizer."""

    tokenizer: Any = None
    known: dict[int, str | None] = field(default_factory=dict)

    def of(self, token: int) -> str | None:
        """Return one token's text, with the blank before it where it begins a word."""
        if token not in self.known:
            self.known[token] = None if self.tokenizer is None else self.decode(token)
        return self.known[token]

    def decode(self, token: int) -> str:
        text = str(self.tokenizer.decode([token]))
        stored = self.tokenizer.convert_ids_to_tokens(token)
        begins_word = isinstance(stored, str) and stored.startswith(WORD_START) and not text.startswith(" ")
        return f" {text}" if begins_word else text

    def around(
        self, before: Sequence[int], token: int, after: Sequence[int]
    ) -> tuple[str | None, str | None, str | None]:
        """Return the text before, of and after the token, decoded together.

        Where a token is part of a character, decoding together gives other characters; then each of the
        three is decoded alone.
        """
        if self.tokenizer is None:
            return None, None, None
        start, middle, complete = (
            str(self.tokenizer.decode(ids)) if ids else ""
            for ids in ([*before], [*before, token], [*before, token, *after])
        )
        if middle.startswith(start) and complete.startswith(middle):
            return start, middle[len(start) :], complete[len(middle) :]
        return start, self.of(token), str(self.tokenizer.decode([*after])) if after else ""
