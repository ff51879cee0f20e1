"""Counts of every layer's routing, summed on the device while the model runs: nothing waits for a number.

A cell is a domain, or one of the jackknife's groups of documents within it. Metrics are made from sums over
cells, so memory does not grow with the text; ratios are made from counts at the end. Counts are exact; the
last digits of other sums depend on the order of batches and workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moescope.routing.decision import first_choice
from moescope.routing.metrics import DECISION
from moescope.types import Array, Integers, Routing

if TYPE_CHECKING:
    from moescope.execution.adapters import Block

MOST_WAITING = 2**23  # tokens x experts counted together: 32 MB, and a few times that while counting
DECISIONS = tuple(metric.name for metric in DECISION)
SUMS = (
    "tokens",
    "gates_squared",
    "token_gates_squared",
    "decided",  # tokens whose router has probabilities, of which the next are sums
    *DECISIONS,
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
    pairs_EE: Array | None = None
    first_ME: Integers | None = None  # tokens with this first choice; None: not counted
    probability_MBE: Array | None = None  # sums of the router's probabilities; None: unknown
    documents_M: list[int] | None = None  # documents with tokens in this phase and layer; None: all documents

    def __add__(self, other: LayerCounts) -> LayerCounts:
        """Return the counts of both texts."""
        sums: dict[str, Any] = {}
        for name, mine in vars(self).items():
            arrays = [part for part in (mine, getattr(other, name)) if isinstance(part, np.ndarray)]
            if arrays:
                sums[name] = reduce(np.add, arrays)
        return replace(self, k=max(self.k, other.k), **sums)

    @property
    def n_experts(self) -> int:
        return self.counts_MBE.shape[-1]

    @property
    def tokens(self) -> int:
        return int(self.sums("tokens").sum())

    @property
    def load_E(self) -> Array:
        """Tokens per expert, of all cells."""
        return self.counts_MBE.sum((0, 1)).astype(float)

    @property
    def mean_k(self) -> float:
        """Experts per token, empty slots not counted."""
        return float(self.counts_MBE.sum() / self.tokens) if self.tokens else float("nan")

    @property
    def mean_pairs(self) -> float:
        """Mean over tokens of k (k - 1), k the token's number of experts."""
        if not self.tokens or self.pairs_EE is None:
            return float("nan")
        return float((self.pairs_EE.sum() - self.pairs_EE.trace()) / self.tokens)

    def sums(self, name: str) -> Array:
        """Return a sum over the tokens of each cell; `slots` are filled (`assigned`) or empty (`dropped`)."""
        if name == "slots":
            return self.sums("tokens") * self.k
        if name == "dropped":
            return self.sums("slots") - self.sums("assigned")
        if name in ("assigned", "gates"):
            return (self.counts_MBE if name == "assigned" else self.gate_weight_MBE).sum(-1).astype(float)
        return self.sums_MBS[..., SUMS.index(name)]


class Totals:
    """Sums on one device over the tokens of one phase: L layers, C cells, E experts of the widest layer.

    The cell after the last takes padding, the expert after the last padding and empty slots.
    """

    def __init__(self, device: torch.device, paired: bool | Sequence[bool]):
        self.device = device
        # domains whose pairs are counted, padding not; None: all
        self.paired_M = None if isinstance(paired, bool) else torch.tensor([*paired, False], device=device)
        self.layers: dict[int, tuple[str, int, int]] = {}  # layer -> name, experts, k; in the order of rows
        self.tensors: dict[str, Tensor] = {}
        self.row_indices: dict[tuple[int, ...], Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # each layer's last column, for rows that continue

    @property
    def n_experts(self) -> int:
        return max((n_experts for _, n_experts, _ in self.layers.values()), default=0)

    def rows(self, layers: tuple[int, ...]) -> Tensor:
        """Return the rows of these layers; cached, since creating it would wait for the device."""
        if layers not in self.row_indices:
            rows = {layer: row for row, layer in enumerate(self.layers)}
            self.row_indices[layers] = torch.tensor([rows[layer] for layer in layers], device=self.device)
        return self.row_indices[layers]


class Counts:
    """Counts of all layers and phases of one model. A `Collector`.

    `cells` are domains and groups of documents in each. `pairs` says whether pairs of experts are counted, or
    of which domains; `decisions` names the metrics of decisions that are summed, `probabilities` says whether
    those of every expert are, `order` whether first choices and neighbouring tokens are counted.
    """

    def __init__(
        self,
        cells: tuple[int, int] = (1, 1),
        pairs: bool | Sequence[bool] = True,
        decisions: Sequence[str] = DECISIONS,
        probabilities: bool = True,
        order: bool = True,
    ):
        self.domains, self.buckets = cells
        self.n_cells = self.domains * self.buckets
        self.pairs, self.decisions, self.order = pairs, decisions, order
        # shapes per layer; "E" is the number of experts and one
        self.shapes: dict[str, tuple[Any, ...]] = {
            "counts": (self.n_cells + 1, "E"),
            "gate_weight": (self.n_cells + 1, "E"),
            "sums": (self.n_cells + 1, len(SUMS)),
        }
        self.shapes |= {"pairs": ("E", "E")} if pairs else {}
        self.shapes |= {"first": (self.domains + 1, "E")} if order else {}
        self.shapes |= {"probability": (self.n_cells + 1, "E")} if probabilities else {}
        self.totals: dict[tuple[str, torch.device], Totals] = {}
        self.merged: dict[tuple[str, int], LayerCounts] = {}  # from elsewhere: workers, an interrupted run
        self.waiting: list[Routing] = []  # of the current pass, to be counted together
        self.n_waiting = 0  # tokens x experts of these

    # --- counting

    def consume(self, routing: Routing, block: Block | None = None) -> None:
        """Take a layer's routing; layers of one pass are counted together, in a few kernels."""
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
            self.add(routings)

    def totals_of(self, phase: str, device: torch.device, layers: dict[int, tuple[str, int, int]]) -> Totals:
        """Return the sums of a phase on a device, with room for these layers: (name, experts, k) of each."""
        totals = self.totals.get((phase, device))
        if totals is None:
            totals = self.totals[phase, device] = Totals(device, self.pairs)
        known = layers.keys() <= totals.layers.keys()
        totals.layers |= layers
        if not known:
            for name, shape in self.shapes.items():
                sides = [totals.n_experts + 1 if side == "E" else side for side in shape]
                dtype = torch.int64 if name in ("counts", "first") else torch.float64
                wider = torch.zeros(len(totals.layers), *sides, dtype=dtype, device=device)
                if name in totals.tensors:
                    wider[tuple(map(slice, totals.tensors[name].shape))] = totals.tensors[name]
                totals.tensors[name] = wider
        return totals

    def add(self, routings: list[Routing]) -> None:
        """Count the decisions of several layers of equal shape about the same tokens."""
        first, stacked = routings[0], concatenate(routings)
        tokens, device = first.tokens, first.chosen_TK.device
        shape = (len(routings), *first.chosen_TK.shape)
        layers = {one.layer: (one.layer_name, one.n_experts, shape[2]) for one in routings}
        totals = self.totals_of(tokens.phase if tokens else "prefill", device, layers)
        rows_L = totals.rows(tuple(layers))
        real_LT = torch.ones(1, shape[1], dtype=torch.bool, device=device)
        cell_LT = torch.zeros_like(real_LT, dtype=torch.int64)
        if tokens is not None:
            real_LT = tokens.real_T[None]
            cell_T = tokens.domain_T * self.buckets + (tokens.bucket_T if self.buckets > 1 else 0)
            cell_LT = torch.where(real_LT, cell_T if self.n_cells > 1 else 0, self.n_cells)
        chosen_LTK = torch.where(real_LT[..., None], stacked.chosen_TK.view(shape), -1)
        choices = chosen_LTK, stacked.gates_TK.view(shape), real_LT, cell_LT
        values = self.add_choices(totals, rows_L, first.n_experts, *choices)
        values += [torch.where(real_LT, one.view(shape[:2]), 0) for one in decided(stacked, self.decisions)]
        if self.order:
            first_LT = torch.where(real_LT, first_choice(stacked).view(shape[:2]), -1)
            domain_LT = torch.where(first_LT >= 0, cell_LT // self.buckets, self.domains)
            flat_LT = rows_L[:, None] * (self.domains + 1) + domain_LT
            flat = (flat_LT * (totals.n_experts + 1) + first_LT.clamp(min=0)).view(-1)
            totals.tensors["first"].view(-1).index_add_(0, flat, torch.ones_like(flat))
            values += neighbours(totals, routings, first_LT, chosen_LTK)
        self.add_sums(totals, rows_L, "tokens", values, cell_LT)
        if "probability" in totals.tensors and stacked.scores_TE is not None:
            flat_LT = rows_L[:, None] * (self.n_cells + 1) + cell_LT
            sums_CE = totals.tensors["probability"].flatten(0, 1)[:, : first.n_experts]
            sums_CE.index_add_(0, flat_LT.view(-1), stacked.scores_TE.double())

    def add_choices(
        self,
        totals: Totals,
        rows_L: Tensor,
        n_experts: int,
        chosen_LTK: Tensor,
        gates_LTK: Tensor,
        real_LT: Tensor | None,
        cell_LT: Tensor | int = 0,
    ) -> list[Tensor]:
        """Count choices of layers with so many experts; others (-1, or of other ranks) are empty slots.

        Returns the first of SUMS per token, 0 for padding.
        """
        n = totals.n_experts
        there_LTK = (chosen_LTK >= 0) & (chosen_LTK < n_experts)
        if real_LT is not None:
            there_LTK &= real_LT[..., None]
        chosen_LTK = torch.where(there_LTK, chosen_LTK, n)
        gates_LTK = torch.where(there_LTK, gates_LTK, 0).double()
        flat = ((rows_L[:, None] * (self.n_cells + 1) + cell_LT)[..., None] * (n + 1) + chosen_LTK).view(-1)
        totals.tensors["counts"].view(-1).index_add_(0, flat, torch.ones_like(flat))
        totals.tensors["gate_weight"].view(-1).index_add_(0, flat, gates_LTK.view(-1))
        if "pairs" in totals.tensors:
            if totals.paired_M is not None and isinstance(cell_LT, Tensor):
                chosen_LTK = torch.where(totals.paired_M[cell_LT // self.buckets][..., None], chosen_LTK, n)
            each = max(MOST_WAITING // (chosen_LTK.shape[1] * (n + 1)), 1)
            for rows, chosen in zip(*(torch.split(part, each) for part in (rows_L, chosen_LTK)), strict=True):
                member_LTE = one_hot_choices(chosen, n)
                with torch.autocast(totals.device.type, enabled=False):
                    pairs_LEE = member_LTE.mT @ member_LTE  # zeros and ones: exact up to 2^24 tokens
                totals.tensors["pairs"][:, :n, :n].index_add_(0, rows, pairs_LEE.double())
        # slot by slot: a sum over so few numbers is slow on CPUs
        gate_LT, squares_LT = (reduce(torch.add, part.unbind(-1)) for part in (gates_LTK, gates_LTK.square()))
        tokens_LT = torch.ones_like(gate_LT) if real_LT is None else real_LT.expand_as(gate_LT)
        return [tokens_LT, squares_LT, gate_LT.square()]

    def add_sums(
        self, totals: Totals, rows_L: Tensor, start: str, values: Sequence[Tensor], cell_LT: Tensor | int = 0
    ) -> None:
        """Add values of tokens, 0 for padding, to the columns of SUMS from `start`."""
        sums_LCS = totals.tensors["sums"][..., (at := SUMS.index(start)) : at + len(values)]
        if self.n_cells > 1:
            flat_LT = rows_L[:, None] * (self.n_cells + 1) + cell_LT
            values_LTS = torch.stack([value.double() for value in values], -1)
            sums_LCS.flatten(0, 1).index_add_(0, flat_LT.view(-1), values_LTS.flatten(0, 1))
        else:
            sums_LS = torch.stack([value.sum(1, dtype=torch.float64) for value in values], -1)
            sums_LCS[:, 0].index_add_(0, rows_L, sums_LS)

    # --- results

    def layers(self, only: int | None = None) -> list[LayerCounts]:
        """Return everything counted so far by phase and layer, or that of one layer."""
        self.count()
        found = {key: counts for key, counts in self.merged.items() if only in (None, key[1])}
        for (phase, _), totals in self.totals.items():
            rows = [row for row, layer in enumerate(totals.layers) if only in (None, layer)]
            parts = {name: tensor[rows].cpu().numpy() for name, tensor in totals.tensors.items()}
            for at, row in enumerate(rows):
                layer, (name, n, k) = list(totals.layers.items())[row]
                cells = {
                    part: parts[part][at, :-1].reshape(self.domains, self.buckets, -1)
                    for part in {"counts", "gate_weight", "sums", "probability"} & parts.keys()
                }
                known = "probability" in cells and cells["probability"].any()
                counts = LayerCounts(
                    layer,
                    name,
                    phase,
                    k,
                    cells["counts"][..., :n],
                    cells["gate_weight"][..., :n],
                    cells["sums"],
                    parts["pairs"][at, :n, :n] if "pairs" in parts else None,
                    parts["first"][at, :-1, :n] if "first" in parts else None,
                    cells["probability"][..., :n] if known else None,
                )
                key = phase, layer
                found[key] = found[key] + counts if key in found else counts
        return [found[key] for key in sorted(found)]

    def merge(self, layers: Iterable[LayerCounts]) -> None:
        """Add counts of other text."""
        for counts in layers:
            key = counts.phase, counts.layer
            self.merged[key] = self.merged[key] + counts if key in self.merged else counts

    def reduce(self) -> None:
        """Add the counts of all ranks, which have the same layers. Collective."""
        if is_distributed():
            for totals in self.totals.values():
                for tensor in totals.tensors.values():
                    torch.distributed.all_reduce(tensor)

    def state(self, layer: int) -> list[dict[str, Any]]:
        """Return one layer's counts as plain data."""
        return [
            {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in vars(counts).items()
            }
            for counts in self.layers(layer)
        ]

    def restore(self, layer: int, state: list[dict[str, Any]]) -> None:
        for entry in state:
            arrays = {name: value.numpy() for name, value in entry.items() if isinstance(value, Tensor)}
            self.merge([LayerCounts(**(entry | arrays))])


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def one_hot_choices(chosen_TK: Tensor, n_experts: int) -> Tensor:
    """Return [..., T, E] with 1 where a token chose the expert; -1 and E are empty slots."""
    member_TE = torch.zeros(*chosen_TK.shape[:-1], n_experts + 1, device=chosen_TK.device)
    return member_TE.scatter_(-1, torch.where(chosen_TK < 0, n_experts, chosen_TK), 1.0)[..., :n_experts]


def neighbours(
    totals: Totals, routings: list[Routing], first_LT: Tensor, chosen_LTK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Per token: is there one before it in its row, have both the same first choice, their Jaccard index.

    R: rows of all layers.
    """
    tokens, (layers, _, k) = routings[0].tokens, chosen_LTK.shape
    first_RL = first_LT.reshape(layers * (tokens.rows if tokens else 1), -1)  # -1 for padding too
    chosen_RLK = chosen_LTK.view(len(first_RL), -1, k)
    previous = torch.full_like(first_RL[:, :1], -1), torch.full_like(chosen_RLK[:, :1], -1)
    known = all(routing.layer in totals.before for routing in routings)
    if known and tokens is not None and tokens.continues:
        firsts, chosens = zip(*(totals.before[routing.layer] for routing in routings), strict=True)
        previous = torch.cat(firsts), torch.cat(chosens)
    last = first_RL[:, -1:].chunk(layers), chosen_RLK[:, -1:].chunk(layers)
    totals.before |= {routing.layer: pair for routing, *pair in zip(routings, *last, strict=True)}  # type: ignore[misc]
    first_before = torch.cat([previous[0], first_RL[:, :-1]], 1)
    chosen_before = torch.cat([previous[1], chosen_RLK[:, :-1]], 1)
    pair_RL = (first_RL >= 0) & (first_before >= 0)
    there_RLK = chosen_RLK >= 0
    both = ((chosen_RLK[..., :, None] == chosen_before[..., None, :]) & there_RLK[..., None]).sum((-2, -1))
    either = there_RLK.sum(-1) + (chosen_before >= 0).sum(-1) - both
    found = pair_RL, pair_RL & (first_RL == first_before), both / either.clamp(min=1) * pair_RL
    return tuple(part.reshape(first_LT.shape) for part in found)  # type: ignore[return-value]


def concatenate(routings: list[Routing]) -> Routing:
    """Join layers of equal shape, as if they were one layer with the tokens of all, layer after layer."""
    if len(routings) == 1:
        return routings[0]
    same = all(routing.selection_TE is routing.scores_TE for routing in routings)
    joined: dict[str, Any] = {}
    for name in ("chosen_TK", "gates_TK", "logits_TE", "scores_TE", *(() if same else ("selection_TE",))):
        parts = [getattr(routing, name) for routing in routings]
        joined[name] = None if parts[0] is None else torch.cat(parts)
    joined = {"selection_TE": joined["scores_TE"], **joined}
    return replace(routings[0], tokens=None, dropped_T=None, x_TD=None, **joined)


def shape_key(routing: Routing) -> tuple[Any, ...]:
    """Return what layers must share to be counted together."""
    known = (part is not None for part in (routing.logits_TE, routing.scores_TE, routing.selection_TE))
    chosen_TK = routing.chosen_TK
    return (routing.n_experts, chosen_TK.shape, chosen_TK.device, routing.gates_TK.dtype, *known)


def decided(routing: Routing, names: Sequence[str]) -> list[Tensor]:
    """Return per token whether the router's probabilities are known, and these metrics of its decision."""
    known = routing.scores_TE is not None and routing.logits_TE is not None
    none_T = torch.zeros(len(routing.chosen_TK), device=routing.chosen_TK.device)
    functions = [metric.function if known and metric.name in names else None for metric in DECISION]
    return [none_T + known, *(none_T if function is None else function(routing) for function in functions)]
