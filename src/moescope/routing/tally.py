"""Counts of every layer's routing, accumulated on the device while the model runs.

A cell is one domain within one of the jackknife's 256 groups of documents. Load, decision and domain metrics
are made from sums over cells, so memory does not grow with the text; ratios are made from counts at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moescope.routing.decision import first_choice
from moescope.routing.metrics import DECISION
from moescope.statistics import BUCKETS
from moescope.types import Array, Integers, Routing, Tokens

if TYPE_CHECKING:
    from moescope.execution.adapters import Block

MOST_WAITING = (
    2**23
)  # tokens x experts held to be counted together: 32 MB, and a few times that while counting
SUMS = (
    "tokens",
    "assigned",
    "dropped",
    "gates",
    "gates_squared",
    "token_gates_squared",
    *(metric.name for metric in DECISION),
    "neighbours",
    "same_first",
    "jaccard",
)


@dataclass(frozen=True)
class LayerCounts:
    """One layer's counts in one phase, on the CPU. M domains, B buckets, E experts, S sums."""

    layer: int
    layer_name: str
    phase: str
    k: int
    counts_MBE: Integers
    gate_weight_MBE: Array
    sums_MBS: Array
    pairs_EE: Array
    first_ME: Integers | None = None  # tokens with this first choice; None: not counted
    probability_MBE: Array | None = None  # sums of the router's probabilities; None: unknown
    documents_M: list[int] | None = None  # documents with tokens in this phase and layer; None: all documents

    @property
    def n_experts(self) -> int:
        return self.counts_MBE.shape[-1]

    @property
    def tokens(self) -> int:
        return int(self.sums("tokens").sum())

    @property
    def mean_k(self) -> float:
        """Experts per token, empty slots not counted."""
        return float(self.sums("assigned").sum() / self.tokens) if self.tokens else float("nan")

    @property
    def mean_pairs(self) -> float:
        """Mean over tokens of k (k - 1), k the token's number of experts."""
        return (
            float((self.pairs_EE.sum() - self.pairs_EE.trace()) / self.tokens)
            if self.tokens
            else float("nan")
        )

    def sums(self, name: str) -> Array:
        return self.sums_MBS[..., SUMS.index(name)]


class Accumulated:
    """Device counts, in one phase, of the layers that have the same number of experts and slots.

    Many layers are counted together: on a GPU, launching one layer's kernels takes longer than running all.
    """

    def __init__(self, routing: Routing, n_domains: int):
        self.n_experts, self.n_domains, self.k = routing.n_experts, n_domains, routing.chosen_TK.shape[1]
        self.device = routing.chosen_TK.device
        self.discarded = n_domains * BUCKETS  # the cell of padding and empty slots
        self.names: dict[int, str] = {}  # layer -> name, in the order of rows
        self.counts_LCE = self.zeros(self.discarded + 1, self.n_experts, dtype=torch.int64)
        self.gate_weight_LCE = self.zeros(self.discarded + 1, self.n_experts)
        self.sums_LCS = self.zeros(self.discarded + 1, len(SUMS))
        self.pairs_LEE = self.zeros(self.n_experts, self.n_experts)
        self.probability_LCE = self.zeros(self.discarded + 1, self.n_experts)
        self.first_LME = self.zeros(n_domains + 1, self.n_experts, dtype=torch.int64)
        self.row_indices: dict[tuple[int, ...], Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # each layer's last column, for rows that continue

    def zeros(self, *sides: int, layers: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(layers, *sides, dtype=dtype, device=self.device)

    def rows_of(self, routings: list[Routing]) -> Tensor:
        """Return the rows of these layers, new ones appended; cached, since creating it would sync."""
        layers = tuple(routing.layer for routing in routings)
        if layers not in self.row_indices:
            new = {
                routing.layer: routing.layer_name for routing in routings if routing.layer not in self.names
            }
            self.names |= new
            for name in (
                "counts_LCE",
                "gate_weight_LCE",
                "sums_LCS",
                "pairs_LEE",
                "first_LME",
                "probability_LCE",
            ):
                old = getattr(self, name)
                more = self.zeros(*old.shape[1:], layers=len(new), dtype=old.dtype)
                setattr(self, name, torch.cat([old, more]))
            order = list(self.names)
            rows = [order.index(layer) for layer in layers]
            self.row_indices[layers] = torch.tensor(rows, device=self.device)
        return self.row_indices[layers]

    def add(self, routings: list[Routing]) -> None:
        """Count the decisions of several layers about the same tokens."""
        rows_L = self.rows_of(routings)
        stacked, tokens = concatenate(routings), routings[0].tokens
        real_T, cell_T = self.cells(routings[0])
        shape = (len(routings), len(real_T), self.k)
        chosen_LTK = torch.where(real_T[:, None], stacked.chosen_TK.view(shape), -1)
        there_LTK = chosen_LTK >= 0
        gates_LTK = torch.where(there_LTK, stacked.gates_TK.view(shape), 0).double()
        cell_LT = rows_L[:, None] * (self.discarded + 1) + cell_T
        discarded_L11 = rows_L[:, None, None] * (self.discarded + 1) + self.discarded
        flat = (
            torch.where(there_LTK, cell_LT[..., None], discarded_L11) * self.n_experts
            + chosen_LTK.clamp(min=0)
        ).view(-1)
        self.counts_LCE.view(-1).index_add_(0, flat, there_LTK.view(-1).long())
        self.gate_weight_LCE.view(-1).index_add_(0, flat, gates_LTK.view(-1))
        member_LTE = torch.zeros(*shape[:2], self.n_experts + 1, device=self.device)
        member_LTE.scatter_(2, torch.where(there_LTK, chosen_LTK, self.n_experts), 1.0)
        # A product of zeros and ones: exact up to 2^24 tokens per pass.
        pairs_LEE = (member_LTE.mT @ member_LTE)[:, :-1, :-1]
        self.pairs_LEE.index_add_(0, rows_L, pairs_LEE.double())
        assigned_LT, gate_LT = there_LTK.sum(-1).double(), gates_LTK.sum(-1)
        first_LT = torch.where(real_T, first_choice(stacked).view(shape[:2]), -1)
        self.add_first(rows_L, first_LT, cell_T // BUCKETS)
        neighbours = self.neighbours(routings, first_LT, chosen_LTK, tokens)
        values = [
            torch.ones_like(gate_LT),
            assigned_LT,
            self.k - assigned_LT,
            gate_LT,
            gates_LTK.square().sum(-1),
            gate_LT.square(),
            *decisions(stacked),
            *neighbours,
        ]
        sums = torch.stack([value.reshape(-1).double() for value in values], -1)
        self.sums_LCS.view(-1, len(SUMS)).index_add_(0, cell_LT.view(-1), sums)
        if stacked.scores_TE is not None:
            sums_CE = self.probability_LCE.view(-1, self.n_experts)
            sums_CE.index_add_(0, cell_LT.view(-1), stacked.scores_TE.double())

    def add_first(self, rows_L: Tensor, first_LT: Tensor, domain_T: Tensor) -> None:
        domain_LT = torch.where(first_LT >= 0, domain_T, self.n_domains)
        flat_LT = (rows_L[:, None] * (self.n_domains + 1) + domain_LT) * self.n_experts + first_LT.clamp(
            min=0
        )
        self.first_LME.view(-1).index_add_(0, flat_LT.view(-1), torch.ones_like(flat_LT.view(-1)))

    def cells(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return which tokens are real, and the cell of each."""
        tokens = routing.tokens
        if tokens is None:
            real_T = torch.ones(len(routing.chosen_TK), dtype=torch.bool, device=self.device)
            return real_T, torch.zeros_like(real_T, dtype=torch.int64)
        cell_T = tokens.domain_T * BUCKETS + tokens.bucket_T
        return tokens.real_T, torch.where(tokens.real_T, cell_T, self.discarded)

    def neighbours(
        self,
        routings: list[Routing],
        first_LT: Tensor,
        chosen_LTK: Tensor,
        tokens: Tokens | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Per token: is there one before it in its row, have both the same first choice, their Jaccard index.

        R: rows of all layers.
        """
        rows = len(routings) * (tokens.rows if tokens else 1)
        first_RL = first_LT.view(rows, -1)  # -1 for padding too
        chosen_RLK = chosen_LTK.view(rows, -1, self.k)
        previous = torch.full_like(first_RL[:, :1], -1), torch.full_like(chosen_RLK[:, :1], -1)
        continues = tokens is not None and tokens.continues
        if continues and all(routing.layer in self.before for routing in routings):
            firsts, chosens = zip(*(self.before[routing.layer] for routing in routings), strict=True)
            previous = torch.cat(firsts), torch.cat(chosens)
        last = first_RL[:, -1:].chunk(len(routings)), chosen_RLK[:, -1:].chunk(len(routings))
        self.before |= {routing.layer: pair for routing, *pair in zip(routings, *last, strict=True)}  # type: ignore[misc]
        first_before = torch.cat([previous[0], first_RL[:, :-1]], 1)
        chosen_before = torch.cat([previous[1], chosen_RLK[:, :-1]], 1)
        pair_RL = (first_RL >= 0) & (first_before >= 0)
        equal = (chosen_RLK[..., :, None] == chosen_before[..., None, :]) & (chosen_RLK >= 0)[..., None]
        both = equal.sum((-2, -1))
        either = (chosen_RLK >= 0).sum(-1) + (chosen_before >= 0).sum(-1) - both
        same = pair_RL & (first_RL == first_before)
        return pair_RL, same, both / either.clamp(min=1) * pair_RL

    def to_cpu(self, phase: str) -> list[LayerCounts]:
        counts, gate_weight, sums, probability = (
            part[:, :-1].cpu().numpy().reshape(len(self.names), self.n_domains, BUCKETS, -1)
            for part in (self.counts_LCE, self.gate_weight_LCE, self.sums_LCS, self.probability_LCE)
        )
        pairs, first = self.pairs_LEE.cpu().numpy(), self.first_LME[:, :-1].cpu().numpy()
        return [
            LayerCounts(
                layer,
                name,
                phase,
                self.k,
                counts[row],
                gate_weight[row],
                sums[row],
                pairs[row],
                first[row],
                probability[row] if probability[row].any() else None,
            )
            for row, (layer, name) in enumerate(self.names.items())
        ]


def concatenate(routings: list[Routing]) -> Routing:
    """Join layers of equal shape, as if they were one layer with the tokens of all, layer after layer."""
    if len(routings) == 1:
        return routings[0]

    def joined(*parts: Tensor | None) -> Tensor | None:
        return None if parts[0] is None else torch.cat(parts)  # type: ignore[arg-type]

    same = all(routing.selection_TE is routing.scores_TE for routing in routings)
    scores_TE = joined(*(routing.scores_TE for routing in routings))
    return replace(
        routings[0],
        chosen_TK=torch.cat([routing.chosen_TK for routing in routings]),
        gates_TK=torch.cat([routing.gates_TK for routing in routings]),
        logits_TE=joined(*(routing.logits_TE for routing in routings)),
        scores_TE=scores_TE,
        selection_TE=scores_TE if same else joined(*(routing.selection_TE for routing in routings)),
        tokens=None,
        dropped_T=None,
        x_TD=None,
    )


def shape_key(routing: Routing) -> tuple[Any, ...]:
    """Return what layers must share to be counted together."""
    known = (part is not None for part in (routing.logits_TE, routing.scores_TE, routing.selection_TE))
    chosen_TK = routing.chosen_TK
    return (routing.n_experts, chosen_TK.shape, chosen_TK.device, routing.gates_TK.dtype, *known)


def decisions(routing: Routing) -> list[Tensor]:
    """Return every decision metric per token; NaN where the router's logits are unknown."""
    if routing.scores_TE is None or routing.logits_TE is None:
        unknown_T = torch.full(routing.chosen_TK.shape[:1], float("nan"), device=routing.chosen_TK.device)
        return [unknown_T] * len(DECISION)
    return [metric.function(routing) for metric in DECISION if metric.function]


@dataclass
class Tally:
    """Counts of all layers and phases of one model. A `Collector`."""

    n_domains: int = 1
    accumulated: dict[tuple[Any, ...], Accumulated] = field(default_factory=dict)
    waiting: list[Routing] = field(default_factory=list)  # of the current pass, to be counted together
    n_waiting: int = 0  # tokens x experts of these

    def consume(self, routing: Routing, block: Block | None = None) -> None:
        first = self.waiting[0] if self.waiting else routing
        if routing.tokens is not first.tokens or routing.layer in [one.layer for one in self.waiting]:
            self.count()  # a new pass
        self.waiting.append(replace(routing, x_TD=None, dropped_T=None))  # frees what is not counted
        self.n_waiting += len(routing.chosen_TK) * routing.n_experts
        if self.n_waiting > MOST_WAITING:
            self.count()

    def count(self) -> None:
        waiting, self.waiting, self.n_waiting = self.waiting, [], 0
        groups: dict[tuple[Any, ...], list[Routing]] = {}
        for routing in waiting:
            groups.setdefault(shape_key(routing), []).append(routing)
        for routings in groups.values():
            first = routings[0]
            phase = first.tokens.phase if first.tokens else "prefill"
            key = (phase, first.n_experts, first.chosen_TK.shape[1], first.chosen_TK.device)
            if key not in self.accumulated:
                self.accumulated[key] = Accumulated(first, self.n_domains)
            self.accumulated[key].add(routings)

    def to_cpu(self) -> list[LayerCounts]:
        """Return everything counted so far, by phase and layer."""
        self.count()
        layers = [counts for key, part in self.accumulated.items() for counts in part.to_cpu(key[0])]
        return sorted(layers, key=lambda counts: (counts.phase, counts.layer))
