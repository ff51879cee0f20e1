"""Counts of every layer's routing in training, in one tensor on the device, and router diagnostics.

Integer counts are summed over micro-batches, steps and ranks before any ratio is made from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moescope.execution.adapters import Block
from moescope.routing.counts_to_tables import Row, row
from moescope.routing.metrics import DECISION
from moescope.routing.tally import SUMS, LayerCounts
from moescope.types import Array, Diagnostic, Integers

MOST_HELD = 2**21  # expert slots held for counting: 25 MB, and a few times that while they are counted
SQUARES = ("gates_squared", "token_gates_squared")
Cell = tuple[int, str]  # a layer's row, a diagnostic's name
Slot = tuple[int, str, int]  # and its part: value, chance or collapse
PARTS = len(Diagnostic._fields)


class Handed(NamedTuple):
    """Inputs of one layer's experts in one pass; `real_T` is None where no token is padding."""

    row: int
    n_experts: int
    chosen_TK: Tensor
    gates_TK: Tensor
    real_T: Tensor | None


class Held(NamedTuple):
    """Copies of the inputs of layers with equal sizes in one pass, to be counted later."""

    rows: tuple[int, ...]
    n_experts: int
    chosen_LTK: Tensor
    gates_LTK: Tensor
    real_T: Tensor | None


class Place(NamedTuple):
    """A block without its modules, so that a thread that holds it keeps no model alive."""

    layer: int
    name: str
    n_experts: int


@dataclass
class DiagnosticSums:
    """Diagnostics over some steps: cell -> passes, then sums of the fields of Diagnostic."""

    sums: dict[Cell, Array] = field(default_factory=dict)

    def __iadd__(self, other: DiagnosticSums) -> DiagnosticSums:
        for cell, more in other.sums.items():
            self.sums[cell] = self.sums[cell] + more if cell in self.sums else more
        return self

    def rows(self, layer_row: int) -> Iterator[Row]:
        """Rows of routing_layers of one layer: means over passes."""
        for (at, name), sums in self.sums.items():
            if at == layer_row:
                *levels, spread = (sums[1:] / sums[0]).tolist()
                yield {**row(name, *levels), "chance_spread": spread}


class DiagnosticTally:
    """The diagnostics of all layers since the last `take`, on their device: two kernels per pass."""

    def __init__(self) -> None:
        self.sums: dict[tuple[Slot, ...], Tensor] = {}
        self.passes: dict[tuple[Slot, ...], int] = {}
        self.fixed: dict[Slot, float] = {}  # references that are equal in every pass stay off the device

    def add(self, diagnosed: list[tuple[int, dict[str, Diagnostic]]]) -> None:
        """Add the diagnostics of one pass, with the rows of their layers."""
        slots: list[Slot] = []
        numbers: list[Tensor] = []
        for layer_row, diagnostics in diagnosed:
            for name, diagnostic in diagnostics.items():
                for part, number in enumerate(diagnostic):
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
            self.sums[key] = torch.zeros(len(key), dtype=torch.float64, device=numbers[0].device)
            self.passes[key] = 0
        self.sums[key] += torch.stack(numbers)
        self.passes[key] += 1

    def flat(self, device: torch.device) -> Tensor:
        """Passes and sums as one vector, to be summed over ranks: all have the same diagnostics."""
        parts = [
            torch.full((1,), float(self.passes[key]), dtype=torch.float64, device=device) for key in self.sums
        ]
        return torch.cat(
            [*parts, *(sums.to(device) for sums in self.sums.values()), torch.zeros(0, device=device)]
        )

    def take(self, flat: Array) -> DiagnosticSums:
        """Return the summed vector of `flat` by cell, and start again at 0."""
        total = DiagnosticSums()
        passes, values = flat[: len(self.sums)], flat[len(self.sums) :]
        for key, count in zip(self.sums, passes, strict=True):
            mine, values = values[: len(key)], values[len(key) :]
            values_by_slot = dict(zip(key, mine.tolist(), strict=True))
            for cell in dict.fromkeys(slot[:2] for slot in key):
                parts = [
                    values_by_slot.get((*cell, part), count * self.fixed.get((*cell, part), np.nan))
                    for part in range(PARTS)
                ]
                total += DiagnosticSums({cell: np.array([count, *parts])})
        self.sums, self.passes = {}, {}
        return total


@dataclass
class Window:
    """Counts over some steps, off the device: L layers, E most experts per layer, M decision metrics."""

    counts_LE: Integers
    gate_weight_LE: Array
    tokens_L: Integers
    squares_LS: Array
    decided_L: Integers  # tokens with decision metrics
    decisions_LM: Array
    losses: Array  # passes, loss, auxiliary loss: sums over passes
    pairs_LEE: Integers | None = None
    diagnostics: DiagnosticSums = field(default_factory=DiagnosticSums)

    @classmethod
    def empty(cls, n_layers: int, n_experts: int, pairs: bool = False) -> Window:
        def zeros(*sides: int) -> Integers:
            return np.zeros(sides, dtype=np.int64)

        return cls(
            zeros(n_layers, n_experts),
            np.zeros((n_layers, n_experts)),
            zeros(n_layers),
            np.zeros((n_layers, len(SQUARES))),
            zeros(n_layers),
            np.zeros((n_layers, len(DECISION))),
            np.zeros(3),
            zeros(n_layers, n_experts, n_experts) if pairs else None,
        )

    def add(self, other: Window) -> None:
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if mine is not None:
                mine += theirs

    def layer(self, row: int, block: Block | Place, k: int) -> LayerCounts:
        """One layer's counts as tables are made from them: one domain, one bucket.

        Decision sums cover some steps only and are scaled to all tokens, which preserves their means.
        """
        n, tokens = block.n_experts, int(self.tokens_L[row])
        assigned, gates = self.counts_LE[row, :n].sum(), self.gate_weight_LE[row, :n].sum()
        decided = int(self.decided_L[row])
        means_M = self.decisions_LM[row] / decided if decided else np.full(len(DECISION), np.nan)
        values = dict(zip((metric.name for metric in DECISION), means_M * tokens, strict=True))
        values |= {"tokens": tokens, "assigned": assigned, "dropped": k * tokens - assigned, "gates": gates}
        values |= dict(zip(SQUARES, self.squares_LS[row], strict=True))
        sums_S = np.array([float(values.get(name, 0.0)) for name in SUMS])
        pairs_EE = np.zeros((n, n)) if self.pairs_LEE is None else self.pairs_LEE[row, :n, :n].astype(float)
        return LayerCounts(
            block.layer,
            block.name,
            "prefill",
            k,
            self.counts_LE[None, None, row, :n],
            self.gate_weight_LE[None, None, row, :n],
            sums_S[None, None],
            pairs_EE,
        )


class StepTally:
    """The counts of all layers since the last `take`, on the device of the first pass."""

    def __init__(self, blocks: list[Block], pairs: bool = False):
        self.n_layers, self.n_experts = len(blocks), max(block.n_experts for block in blocks)
        self.pairs = pairs
        self.k_L = [0] * len(blocks)
        self.device: torch.device | None = None
        self.rows: dict[tuple[int, ...], Tensor] = {}
        self.losses: list[tuple[Tensor, Tensor | None]] = []
        self.held: list[Held] = []
        self.slots = 0  # that these hold
        self.diagnostics = DiagnosticTally()

    def start(self, device: torch.device) -> None:
        """Allocate zeros on the device; the column past the last expert takes padding and empty slots."""
        self.device = device
        wide = self.n_experts + 1

        def zeros(*sides: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(self.n_layers, *sides, dtype=dtype, device=device)

        self.counts_LE, self.gate_weight_LE = zeros(wide), zeros(wide, dtype=torch.float64)
        self.tokens_L, self.decided_L = zeros(), zeros()
        self.squares_LS = zeros(len(SQUARES), dtype=torch.float64)
        self.decisions_LM = zeros(len(DECISION), dtype=torch.float64)
        self.pairs_LEE = zeros(wide, wide) if self.pairs else None

    def add(self, inputs: list[Handed]) -> None:
        """Copy the inputs of a pass, layers with equal sizes in one; counted when there are enough."""
        for _, group in groupby(
            inputs, lambda one: (one.n_experts, one.chosen_TK.shape, one.chosen_TK.device, id(one.real_T))
        ):
            alike = list(group)
            first = alike[0]
            if self.device is None:
                self.start(first.chosen_TK.device)
            chosen_LTK = torch.stack([one.chosen_TK for one in alike]).to(self.device)
            gates_LTK = torch.stack([one.gates_TK for one in alike]).to(self.device)
            real_T = None if first.real_T is None else (first.real_T.to(self.device) != 0)
            for one in alike:
                self.k_L[one.row] = first.chosen_TK.shape[1]
            rows = tuple(one.row for one in alike)
            self.held.append(Held(rows, first.n_experts, chosen_LTK, gates_LTK, real_T))
            self.slots += chosen_LTK.numel()
        if self.slots > MOST_HELD:
            self.count()

    def count(self) -> None:
        """Count what is held, passes with equal sizes together."""
        groups: dict[tuple[Any, ...], list[Held]] = {}
        for one in self.held:
            key = (one.rows, one.n_experts, one.chosen_LTK.shape, one.gates_LTK.dtype, one.real_T is None)
            groups.setdefault(key, []).append(one)
        self.held, self.slots = [], 0
        for passes in groups.values():
            self.count_alike(passes)

    def count_alike(self, passes: list[Held]) -> None:
        """Count passes with equal sizes; L is the layers of all of them in turn."""
        first = passes[0]
        n_layers, tokens, _ = first.chosen_LTK.shape
        rows = first.rows * len(passes)
        rows_L = self.row_index(rows)
        chosen_LTK = torch.cat([one.chosen_LTK for one in passes])
        gates_LTK = torch.cat([one.gates_LTK for one in passes]).double()
        there = (chosen_LTK >= 0) & (chosen_LTK < first.n_experts)
        count_L = torch.full((len(rows),), tokens, device=self.device)
        if first.real_T is not None:
            real_PT = torch.stack([one.real_T for one in passes if one.real_T is not None])
            real_LT = real_PT[:, None].expand(-1, n_layers, -1).reshape(len(rows), tokens)
            there &= real_LT[..., None]
            count_L = real_LT.sum(1)
        chosen_LTK = torch.where(there, chosen_LTK, self.n_experts)
        gates_LTK = torch.where(there, gates_LTK, 0.0)
        cells = (chosen_LTK + rows_L[:, None, None] * (self.n_experts + 1)).view(-1)
        self.counts_LE.view(-1).index_add_(0, cells, torch.ones_like(cells))
        self.gate_weight_LE.view(-1).index_add_(0, cells, gates_LTK.view(-1))
        squares = torch.stack([gates_LTK.square().sum((1, 2)), gates_LTK.sum(-1).square().sum(1)], -1)
        self.squares_LS.index_add_(0, rows_L, squares)
        self.tokens_L.index_add_(0, rows_L, count_L)
        if self.pairs_LEE is not None:
            for at, row in enumerate(rows):
                self.add_pairs(row, chosen_LTK[at])

    def add_pairs(self, row: int, chosen_TK: Tensor) -> None:
        assert self.pairs_LEE is not None
        member_TE = torch.zeros(len(chosen_TK), self.n_experts + 1, device=self.device).scatter_(
            1, chosen_TK, 1.0
        )
        self.pairs_LEE[row] += (member_TE.T @ member_TE).long()  # exact up to 2^24 tokens per pass

    def decide(self, rows: tuple[int, ...], values_MLT: Tensor, real_T: Tensor | None) -> None:
        """Add the decision metrics of a pass's tokens, of layers with equal sizes."""
        if self.device is None:
            self.start(values_MLT.device)
        values_MLT = values_MLT.to(self.device)
        count = torch.full((), values_MLT.shape[2], device=self.device)
        if real_T is not None:
            real_T = real_T.to(self.device, torch.bool)
            values_MLT = torch.where(real_T, values_MLT, 0.0)
            count = real_T.sum()
        rows_L = self.row_index(rows)
        self.decisions_LM.index_add_(0, rows_L, values_MLT.sum(2, dtype=torch.float64).T)
        self.decided_L.index_add_(0, rows_L, count.expand(len(rows)))

    def row_index(self, rows: tuple[int, ...]) -> Tensor:
        """The rows as a cached tensor: a new one would wait for the device each time."""
        if rows not in self.rows:
            self.rows[rows] = torch.tensor(rows, device=self.device)
        return self.rows[rows]

    def take(self, device: torch.device) -> Window:
        """Return the counts since the last call, summed over ranks, and start again at 0. Collective."""
        if self.device is None:
            self.start(device)
        with torch.no_grad():
            self.count()
        assert self.device is not None
        n, e = self.n_layers, self.n_experts
        parts = [self.counts_LE[:, :e].reshape(-1), self.tokens_L, self.decided_L]
        if self.pairs_LEE is not None:
            parts.append(self.pairs_LEE[:, :e, :e].reshape(-1))
        losses = torch.zeros(3, dtype=torch.float64, device=self.device)
        if self.losses:
            plain = torch.stack([loss.to(self.device) for loss, _ in self.losses]).double().sum()
            auxiliary = [aux.to(self.device) for _, aux in self.losses if aux is not None]
            extra = torch.stack(auxiliary).double().sum() if auxiliary else torch.zeros_like(plain)
            losses = torch.stack([torch.full_like(plain, len(self.losses)), plain, extra])
            self.losses = []
        exact = torch.cat(parts)
        sums = torch.cat(
            [
                self.gate_weight_LE[:, :e].reshape(-1),
                self.squares_LS.view(-1),
                self.decisions_LM.view(-1),
                losses,
                self.diagnostics.flat(self.device),
            ]
        )
        if is_distributed():
            torch.distributed.all_reduce(exact)
            torch.distributed.all_reduce(sums)
        integers, reals = exact.cpu().numpy(), sums.cpu().numpy()
        for tensor in (
            self.counts_LE,
            self.gate_weight_LE,
            self.tokens_L,
            self.decided_L,
            self.squares_LS,
            self.decisions_LM,
        ):
            tensor.zero_()
        if self.pairs_LEE is not None:
            self.pairs_LEE.zero_()
        counts, tokens, decided, pairs = np.split(integers, np.cumsum([n * e, n, n]))
        ends = np.cumsum([n * e, n * len(SQUARES), n * len(DECISION), 3])
        gate_weight, squares, decisions, passes, diagnosed = np.split(reals, ends)
        return Window(
            counts.reshape(n, e),
            gate_weight.reshape(n, e),
            tokens,
            squares.reshape(n, -1),
            decided,
            decisions.reshape(n, -1),
            passes,
            pairs.reshape(n, e, e) if self.pairs else None,
            self.diagnostics.take(diagnosed),
        )


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
