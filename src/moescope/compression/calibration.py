"""One pass over text through the model's own blocks, with whatever is to be summed up handed in.

Sums as files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.execution.adapters import Block, adapter_of
from moescope.execution.collect import Collected, Collector, collect
from moescope.execution.documents import Document
from moescope.execution.scoring import find_scoring
from moescope.types import Routing

if TYPE_CHECKING:
    from moescope.execution.models import TracedModel

Sums = dict[str, Tensor]  # layer.N.NAME -> sums and counts: those of two texts added are those of both
SUMS_VERSION = "1"


class SumCollector(Collector, Protocol):
    """A collector of sums and counts over tokens, named layer.N.NAME; those of two texts can be added."""

    def sums(self) -> Sums: ...


class ScoringFinder:
    """Finds the scoring function of blocks that hand out their routing themselves. A `Collector`."""

    def consume(self, routing: Routing, block: Block) -> None:
        if block.scoring is None and routing.logits_TE is not None:
            real_T = real_tokens(routing)
            block.scoring = find_scoring(
                routing.logits_TE[real_T],
                routing.chosen_TK[real_T],
                routing.gates_TK[real_T],
                block.correction_bias_E,
                block.groups,
                block.expected_scoring,
            )


def calibrate(
    traced: TracedModel,
    documents: Iterable[Document],
    collectors: Sequence[Collector],
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Collected:
    """Read the documents once; every collector sees every layer's routing, and every block has a scoring."""
    return collect(traced, documents, [ScoringFinder(), *collectors], batch_size, advance=advance)


def real_tokens(routing: Routing) -> Tensor:
    """Which tokens count: all but padding."""
    if routing.tokens is None:
        return torch.ones(len(routing.chosen_TK), dtype=torch.bool, device=routing.chosen_TK.device)
    return routing.tokens.real_T


class Handled(NamedTuple):
    """Tokens of some experts, each with the expert it goes to, its gate g.

    And that expert's output without the gate, f.
    """

    expert_N: Tensor
    at_N: Tensor  # the token's place among the T
    gates_N: Tensor
    out_ND: Tensor


def outputs_of_chosen(routing: Routing, block: Block) -> Iterator[Handled]:
    """Every real token's chosen experts and what each made of it, whole experts at a time, in pieces of about
    T rows.

    No [E, T, D] is ever made, nor [T, K, D]: a piece is one expert's tokens, or those of several small ones
    together, so that
    128 experts with a few tokens each are not 128 calls.
    """
    assert routing.x_TD is not None
    chosen_TK = torch.where(real_tokens(routing)[:, None], routing.chosen_TK, -1)
    at_N, slot_N = torch.where(chosen_TK >= 0)
    expert_N = chosen_TK[at_N, slot_N]
    order = expert_N.argsort(stable=True)
    at_N, slot_N, expert_N = at_N[order], slot_N[order], expert_N[order]
    gates_N = routing.gates_TK[at_N, slot_N]
    counts = torch.bincount(expert_N, minlength=routing.n_experts).tolist()
    for start, stop in pieces(counts, len(chosen_TK)):
        own = slice(start, stop)
        out_ND = adapter_of(block).output(block, routing.x_TD[at_N[own]], expert_N[own])
        yield Handled(expert_N[own], at_N[own], gates_N[own], out_ND)


def pieces(counts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Runs of rows that hold whole experts: as many as fit `most` rows, one that is larger by itself."""
    start = stop = 0
    for count in counts:
        if stop > start and stop + count - start > most:
            yield start, stop
            start = stop
        stop += count
    if stop > start:
        yield start, stop


def added(ours: Sums, theirs: Sums) -> Sums:
    """The sums over both texts."""
    if set(ours) != set(theirs) or any(ours[name].shape != theirs[name].shape for name in ours):
        raise BadInput(
            "these sums are of other layers, experts or quantities and cannot be added; calibrate anew"
        )
    return {name: ours[name] + theirs[name] for name in ours}


def save_sums(path: Path, sums: Sums, facts: dict[str, object]) -> None:
    """The sums as one safetensors file; `facts` (checkpoint, documents, tokens) lie in its header."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sums.items()}
    save_file(tensors, path, metadata={"moescope_sums": SUMS_VERSION, "facts": json.dumps(facts)})


def load_sums(path: Path) -> tuple[Sums, dict[str, object]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            if said.get("moescope_sums") != SUMS_VERSION:
                raise BadInput(f"{path}: not sums that this moescope wrote; calibrate anew")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(said["facts"])  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError):
        raise BadInput(f"{path}: the calibration's sums cannot be read; calibrate anew") from None
