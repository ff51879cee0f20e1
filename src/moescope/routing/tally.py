"""Counts of every layer's routing, kept on the device while the model runs and moved once at the end.

A cell is a domain's share of one of the jackknife's 256 groups of documents. Everything a run says of load, decisions and domains
is made from sums over cells, so memory does not grow with the text, and ratios are made from counts at the very end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moescope.routing.arrays import Array, Integers
from moescope.routing.decision import DECISION, first_choice
from moescope.routing.jackknife import BUCKETS
from moescope.types import Routing

SUMS = (
    "tokens", "assigned", "dropped", "gates", "gates_squared", "token_gates_squared",
    *(metric.name for metric in DECISION), "neighbours", "same_first", "jaccard",
)  # fmt: skip


@dataclass(frozen=True)
class LayerCounts:
    """One layer's counts in one phase, off the device. M domains, B buckets, E experts, S sums."""

    layer: int
    layer_name: str
    phase: str
    k: int
    counts_MBE: Integers
    mass_MBE: Array
    sums_MBS: Array
    pairs_EE: Array

    @property
    def n_experts(self) -> int:
        return self.counts_MBE.shape[-1]

    def sums(self, name: str) -> Array:
        return self.sums_MBS[..., SUMS.index(name)]


class LayerTally:
    """One layer in one phase, on the device."""

    def __init__(self, routing: Routing, n_domains: int):
        self.layer, self.layer_name = routing.layer, routing.layer_name
        self.n_experts, self.n_domains, self.k = routing.n_experts, n_domains, routing.chosen_TK.shape[1]
        device = routing.chosen_TK.device
        self.nowhere = n_domains * BUCKETS  # the cell of padding and empty slots, thrown away
        self.counts_CE = torch.zeros(self.nowhere + 1, self.n_experts, dtype=torch.int64, device=device)
        self.mass_CE = torch.zeros(self.nowhere + 1, self.n_experts, dtype=torch.float64, device=device)
        self.sums_CS = torch.zeros(self.nowhere + 1, len(SUMS), dtype=torch.float64, device=device)
        self.pairs_EE = torch.zeros(self.n_experts, self.n_experts, dtype=torch.float64, device=device)
        self.before: tuple[Tensor, Tensor] | None = None  # the last column, for rows that go on

    def add(self, routing: Routing) -> None:
        chosen_TK = routing.chosen_TK
        real_T, cell_T = self.cells(routing)
        chosen_TK = torch.where(real_T[:, None], chosen_TK, -1)
        there_TK = chosen_TK >= 0
        gates_TK = torch.where(there_TK, routing.gates_TK, 0).double()
        flat_TK = torch.where(there_TK, cell_T[:, None], self.nowhere) * self.n_experts + chosen_TK.clamp(min=0)
        self.counts_CE.view(-1).index_add_(0, flat_TK.view(-1), there_TK.view(-1).long())
        self.mass_CE.view(-1).index_add_(0, flat_TK.view(-1), gates_TK.view(-1))
        member_TE = torch.zeros(len(chosen_TK), self.n_experts + 1, device=chosen_TK.device)
        member_TE.scatter_(1, torch.where(there_TK, chosen_TK, self.n_experts), 1.0)
        member_TE = member_TE[:, :-1]
        self.pairs_EE += member_TE.T @ member_TE  # of zeros and ones: exact up to 2^24 tokens a pass
        assigned_T, gate_T = there_TK.sum(-1).double(), gates_TK.sum(-1)
        values = [
            torch.ones_like(gate_T), assigned_T, self.k - assigned_T, gate_T, gates_TK.square().sum(-1), gate_T.square(),
            *decisions(routing), *self.neighbours(routing, chosen_TK, real_T),
        ]  # fmt: skip
        self.sums_CS.index_add_(0, cell_T, torch.stack([value.double() for value in values], -1))

    def cells(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Which tokens are real, and the cell of each."""
        tokens = routing.tokens
        if tokens is None:
            real_T = torch.ones(len(routing.chosen_TK), dtype=torch.bool, device=routing.chosen_TK.device)
            return real_T, torch.zeros_like(real_T, dtype=torch.int64)
        cell_T = tokens.domain_T * BUCKETS + tokens.bucket_T
        return tokens.real_T, torch.where(tokens.real_T, cell_T, self.nowhere)

    def neighbours(self, routing: Routing, chosen_TK: Tensor, real_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each token whether there is one before it in its row, whether both have the same first choice, and their Jaccard index."""
        rows = routing.tokens.rows if routing.tokens else 1
        first_RL = torch.where(real_T, first_choice(routing), -1).view(rows, -1)  # -1 for padding too
        chosen_RLK = chosen_TK.view(rows, -1, self.k)
        nothing = torch.full_like(first_RL[:, :1], -1), torch.full_like(chosen_RLK[:, :1], -1)
        goes_on = routing.tokens is not None and routing.tokens.continues
        previous = self.before if goes_on and self.before is not None else nothing
        self.before = (first_RL[:, -1:], chosen_RLK[:, -1:])
        first_before = torch.cat([previous[0], first_RL[:, :-1]], 1)
        chosen_before = torch.cat([previous[1], chosen_RLK[:, :-1]], 1)
        pair_RL = (first_RL >= 0) & (first_before >= 0)
        equal = (chosen_RLK[..., :, None] == chosen_before[..., None, :]) & (chosen_RLK >= 0)[..., None]
        both = equal.sum((-2, -1))
        either = (chosen_RLK >= 0).sum(-1) + (chosen_before >= 0).sum(-1) - both
        same = pair_RL & (first_RL == first_before)
        return pair_RL.view(-1), same.view(-1), (both / either.clamp(min=1) * pair_RL).view(-1)

    def moved(self, phase: str) -> LayerCounts:
        shape = (self.n_domains, BUCKETS, -1)
        counts, mass, sums = (
            part[:-1].cpu().numpy().reshape(shape) for part in (self.counts_CE, self.mass_CE, self.sums_CS)
        )
        return LayerCounts(
            self.layer, self.layer_name, phase, self.k, counts, mass, sums, self.pairs_EE.cpu().numpy()
        )  # fmt: skip


def decisions(routing: Routing) -> list[Tensor]:
    """Every decision metric of every token; NaN where the router's logits are not known."""
    if routing.scores_TE is None or routing.logits_TE is None:
        nothing = torch.full(routing.chosen_TK.shape[:1], float("nan"), device=routing.chosen_TK.device)
        return [nothing] * len(DECISION)
    return [metric.function(routing) for metric in DECISION]


@dataclass
class Tally:
    """All layers and phases of one model. `add` takes a layer's routing as capture hands it on."""

    n_domains: int = 1
    layers: dict[tuple[str, int], LayerTally] = field(default_factory=dict)

    def add(self, routing: Routing) -> None:
        key = (routing.tokens.phase if routing.tokens else "prefill", routing.layer)
        if key not in self.layers:
            self.layers[key] = LayerTally(routing, self.n_domains)
        self.layers[key].add(routing)

    def moved(self) -> list[LayerCounts]:
        """Everything counted so far, off the device, by phase and layer."""
        return [self.layers[key].moved(key[0]) for key in sorted(self.layers)]
