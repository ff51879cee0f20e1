"""A bounded sample of the text's tokens with every layer's choices: for vocabulary and stability."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moescope.types import Integers

if TYPE_CHECKING:
    from moescope.execution.documents import Window

MOST_TOKENS = 1_000_000
MOST_BYTES = 2**28  # of expert numbers, all layers together


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
        empty = np.zeros(0, dtype=np.int64)
        no_choice = np.zeros((len(self.layers), 0, self.k), dtype=np.int16)
        documents = (np.full(len(window.ids), window.document) for window, *_ in ordered)
        return Probe(
            self.layers,
            np.concatenate([no_choice, *(chosen_LTK for _, chosen_LTK, _, _ in ordered)], axis=1),
            np.concatenate([empty, *(window.ids for window, *_ in ordered)]),
            np.concatenate([empty, *(next_T for _, _, next_T, _ in ordered)]),
            np.concatenate([empty, *(predicted_T for *_, predicted_T in ordered)]),
            np.concatenate([empty, *documents]),
            self.threshold,
        )
