"""What routers say of themselves in training: means over the passes of some steps, added up on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moescope.routing.counts_to_tables import Row, row
from moescope.types import Array, Diagnostic

Cell = tuple[int, str]  # a layer's row, a note's name
Slot = tuple[int, str, int]  # the same, and which part of the note: value, chance, collapse
PARTS = len(Diagnostic._fields)


@dataclass
class DiagnosticSums:
    """Notes over some steps, off the device.

    Cell -> passes, then sums over passes and ranks of value, chance and collapse.
    """

    sums: dict[Cell, Array] = field(default_factory=dict)

    def __iadd__(self, other: DiagnosticSums) -> DiagnosticSums:
        for cell, more in other.sums.items():
            self.sums[cell] = self.sums[cell] + more if cell in self.sums else more
        return self

    def rows(self, layer_row: int) -> Iterator[Row]:
        """A layer's rows of routing_layers: every pass counts alike."""
        for (at, name), sums in self.sums.items():
            if at == layer_row:
                yield {**row(name, *(sums[1:] / sums[0]).tolist())}


class DiagnosticTally:
    """The diagnostics of all layers since they were last moved, on their device.

    Two kernels a pass, whatever there is to note.
    """

    def __init__(self) -> None:
        self.sums: dict[tuple[Slot, ...], Tensor] = {}
        self.passes: dict[tuple[Slot, ...], int] = {}
        self.fixed: dict[
            Slot, float
        ] = {}  # references that are the same in every pass never go to the device

    def add(self, diagnosed: list[tuple[int, dict[str, Diagnostic]]]) -> None:
        """Add what the layers of one pass diagnosed: (a layer's row, its diagnostics)."""
        slots: list[Slot] = []
        numbers: list[Tensor] = []
        for layer_row, diagnostics in diagnosed:
            for name, note in diagnostics.items():
                for part, number in enumerate(note):
                    slot = (layer_row, name, part)
                    if isinstance(number, Tensor):
                        slots.append(slot)
                        numbers.append(number)
                    else:
                        self.fixed[slot] = number
        if not slots:
            return
        key = tuple(slots)
        if key not in self.sums:
            self.sums[key], self.passes[key] = (
                torch.zeros(len(key), dtype=torch.float64, device=numbers[0].device),
                0,
            )
        self.sums[key] += torch.stack(numbers)
        self.passes[key] += 1

    def flat(self, device: torch.device) -> Tensor:
        """Passes and sums in one row, to be added up over ranks: all of them note the same."""
        parts = [
            torch.full((1,), float(self.passes[key]), dtype=torch.float64, device=device) for key in self.sums
        ]
        return torch.cat(
            [*parts, *(sums.to(device) for sums in self.sums.values()), torch.zeros(0, device=device)]
        )

    def moved(self, flat: Array) -> DiagnosticSums:
        """What `flat` gave, added up, with names to it; the device starts again at 0."""
        found = DiagnosticSums()
        passes, values = flat[: len(self.sums)], flat[len(self.sums) :]
        for key, count in zip(self.sums, passes, strict=True):
            mine, values = values[: len(key)], values[len(key) :]
            told = dict(zip(key, mine.tolist(), strict=True))
            for cell in dict.fromkeys(slot[:2] for slot in key):
                parts = [
                    told.get((*cell, part), count * self.fixed.get((*cell, part), np.nan))
                    for part in range(PARTS)
                ]
                found += DiagnosticSums({cell: np.array([count, *parts])})
        self.sums, self.passes = {}, {}
        return found
