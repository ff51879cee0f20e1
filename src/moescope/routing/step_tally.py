"""Counts of every layer's routing in training: all layers in one tensor on the device, moved only when
somebody looks.

Counts are integers and are summed over micro-batches, steps and ranks before any ratio is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moescope.execution.adapters import Block
from moescope.routing.diagnostics import DiagnosticSums, DiagnosticTally
from moescope.routing.metrics import DECISION
from moescope.routing.tally import SUMS, LayerCounts
from moescope.types import Array, Integers

MOST_HELD = 2**21  # expert slots kept for counting: 25 MB, and a few times that while they are counted
SQUARES = ("gates_squared", "token_gates_squared")


class Handed(NamedTuple):
    """What the experts of one layer were handed in one pass; `real_T` is None where no token is padding."""

    row: int
    n_experts: int
    chosen_TK: Tensor
    gates_TK: Tensor
    real_T: Tensor | None


class Held(NamedTuple):
    """Copies of what layers that are alike were handed in one pass, to be counted later."""

    rows: tuple[int, ...]
    n_experts: int
    chosen_LTK: Tensor
    gates_LTK: Tensor
    real_T: Tensor | None


class Place(NamedTuple):
    """A block without its modules: what tables say of where it is.

    A thread may hold it and keep no model alive.
    """

    layer: int
    name: str
    n_experts: int


@dataclass
class Window:
    """Counts over some steps, off the device.

    L layers, E the most experts a layer has, M decision metrics.
    """

    counts_LE: Integers
    mass_LE: Array
    tokens_L: Integers
    squares_LS: Array
    decided_L: Integers  # tokens whose logits were looked at
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
        """One layer in the shape that rows of tables are made from: one domain, one bucket.

        Decision sums are of some steps only, so they are scaled to all tokens: what is made of them is their
        mean.
        """
        n, tokens = block.n_experts, int(self.tokens_L[row])
        assigned, gates = self.counts_LE[row, :n].sum(), self.mass_LE[row, :n].sum()
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
            self.mass_LE[None, None, row, :n],
            sums_S[None, None],
            pairs_EE,
        )


class StepTally:
    """The counts of all layers since they were last moved, on the device of the first pass."""

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
        """Zeros on the device.

        The column past the last expert takes padding and empty slots, and is thrown away.
        """
        self.device = device
        wide = self.n_experts + 1

        def zeros(*sides: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(self.n_layers, *sides, dtype=dtype, device=device)

        self.counts_LE, self.mass_LE = zeros(wide), zeros(wide, dtype=torch.float64)
        self.tokens_L, self.decided_L = zeros(), zeros()
        self.squares_LS = zeros(len(SQUARES), dtype=torch.float64)
        self.decisions_LM = zeros(len(DECISION), dtype=torch.float64)
        self.pairs_LEE = zeros(wide, wide) if self.pairs else None

    def add(self, handed: list[Handed]) -> None:
        """Take copies of what was handed out in a pass, layers that are alike in one.

        Counted when enough of them are there.
        """
        for _, group in groupby(
            handed, lambda one: (one.n_experts, one.chosen_TK.shape, one.chosen_TK.device, id(one.real_T))
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
        """Count what is held, passes that are alike together."""
        groups: dict[tuple[Any, ...], list[Held]] = {}
        for one in self.held:
            key = (one.rows, one.n_experts, one.chosen_LTK.shape, one.gates_LTK.dtype, one.real_T is None)
            groups.setdefault(key, []).append(one)
        self.held, self.slots = [], 0
        for passes in groups.values():
            self.count_alike(passes)

    def count_alike(self, passes: list[Held]) -> None:
        """The layers of several passes stand one behind the other: L is all of them."""
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
        self.mass_LE.view(-1).index_add_(0, cells, gates_LTK.view(-1))
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
        self.pairs_LEE[row] += (
            member_TE.T @ member_TE
        ).long()  # of zeros and ones: exact up to 2^24 tokens a pass

    def decide(self, rows: tuple[int, ...], values_MLT: Tensor, real_T: Tensor | None) -> None:
        """Add decision metrics of the pass's tokens, for layers that share them."""
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
        """The rows as a tensor, kept: making it anew would wait for the device each time."""
        if rows not in self.rows:
            self.rows[rows] = torch.tensor(rows, device=self.device)
        return self.rows[rows]

    def moved(self, device: torch.device) -> Window:
        """Everything since the last move, summed over ranks, off the device; the device starts again at 0."""
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
                self.mass_LE[:, :e].reshape(-1),
                self.squares_LS.view(-1),
                self.decisions_LM.view(-1),
                losses,
                self.diagnostics.flat(self.device),
            ]
        )
        if distributed():
            torch.distributed.all_reduce(exact)
            torch.distributed.all_reduce(sums)
        whole, real = exact.cpu().numpy(), sums.cpu().numpy()
        for tensor in (
            self.counts_LE,
            self.mass_LE,
            self.tokens_L,
            self.decided_L,
            self.squares_LS,
            self.decisions_LM,
        ):
            tensor.zero_()
        if self.pairs_LEE is not None:
            self.pairs_LEE.zero_()
        counts, tokens, decided, pairs = np.split(whole, np.cumsum([n * e, n, n]))
        ends = np.cumsum([n * e, n * len(SQUARES), n * len(DECISION), 3])
        mass, squares, decisions, passes, diagnosed = np.split(real, ends)
        return Window(
            counts.reshape(n, e),
            mass.reshape(n, e),
            tokens,
            squares.reshape(n, -1),
            decided,
            decisions.reshape(n, -1),
            passes,
            pairs.reshape(n, e, e) if self.pairs else None,
            self.diagnostics.moved(diagnosed),
        )


def distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
