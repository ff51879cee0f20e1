"""One pass over text through the model's own blocks: sums by collectors, a sample of states, and the gating.

Sums of two texts can be added; a sample of states is bounded, and the same tokens are sampled in every layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.execution.adapters import Block, RouterReads, adapter_of
from moescope.execution.collect import Collected, Collector, collect
from moescope.execution.documents import Document
from moescope.execution.models import TracedModel
from moescope.execution.scoring import Scoring, find_scoring
from moescope.execution.shares import ByShare
from moescope.types import Routing, Tokens

Sums = dict[str, Tensor]  # layer.N.NAME -> sums and counts: those of two texts can be added
SUMS_VERSION = "1"
MOST_STATES = 4096  # tokens per layer
FEWEST_STATES = 256
MOST_BYTES = 2**30  # of all layers together
GATES_FIT = 0.02  # relative error up to which gates count as reproduced: half precision stays below
# odd constants of splitmix64, as int64
SPREAD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


class SumCollector(Collector, Protocol):
    """A collector of sums and counts over tokens, named layer.N.NAME; those of two texts can be added."""

    def sums(self) -> Sums: ...


class ScoringFinder:
    """Collector that finds the scoring of blocks that hand out their routing themselves."""

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


class SumsByShare(ByShare[SumCollector]):
    """The sums of a collector, added share by share, so that they are the same on any number of workers.

    With `apart`, shares are not added: another process does that.
    """

    def __init__(self, make: Callable[[], SumCollector], apart: bool = False):
        super().__init__(make)
        self.apart = apart
        self.shares: dict[int, Sums] = {}  # one entry unless they are kept apart

    def take(self, share: int, collector: SumCollector) -> None:
        self.add(share, collector.sums())

    def add(self, share: int, sums: Sums) -> None:
        held = self.shares.setdefault(share if self.apart else 0, {})
        for name, tensor in sums.items():
            held[name] = held[name] + tensor.cpu() if name in held else tensor.cpu()

    def sums(self) -> Sums:
        self.close()
        return self.shares[0]

    def layer_state(self, layer: int) -> dict[int, Sums]:
        self.close()
        prefix = f"layer.{layer}."
        return {
            share: {name: tensor for name, tensor in sums.items() if name.startswith(prefix)}
            for share, sums in self.shares.items()
        }

    def restore_layer(self, layer: int, state: dict[int, Sums]) -> None:
        for share, sums in state.items():
            self.add(share, sums)


def real_tokens(routing: Routing) -> Tensor:
    """Mask of all tokens but padding."""
    if routing.tokens is None:
        return torch.ones(len(routing.chosen_TK), dtype=torch.bool, device=routing.chosen_TK.device)
    return routing.tokens.real_T


class RoutedOutputs(NamedTuple):
    """Tokens routed to some experts: expert, token, gate weight g, and the expert's output without gate f."""

    expert_N: Tensor
    token_N: Tensor  # index among the T tokens
    gates_N: Tensor
    out_ND: Tensor


def outputs_of_chosen(routing: Routing, block: Block) -> Iterator[RoutedOutputs]:
    """The outputs of every real token's chosen experts, whole experts at a time, about T rows per part.

    Neither [E, T, D] nor [T, K, D] is ever made: a part holds one expert's tokens, or those of several small
    ones together, so that 128 experts with a few tokens each are not 128 calls.
    """
    assert routing.x_TD is not None
    chosen_TK = torch.where(real_tokens(routing)[:, None], routing.chosen_TK, -1)
    token_N, slot_N = torch.where(chosen_TK >= 0)
    expert_N = chosen_TK[token_N, slot_N]
    order = expert_N.argsort(stable=True)
    token_N, slot_N, expert_N = token_N[order], slot_N[order], expert_N[order]
    gates_N = routing.gates_TK[token_N, slot_N]
    counts = torch.bincount(expert_N, minlength=routing.n_experts).tolist()
    for start, stop in split_by_expert(counts, len(chosen_TK)):
        rows = slice(start, stop)
        out_ND = adapter_of(block).output(block, routing.x_TD[token_N[rows]], expert_N[rows])
        yield RoutedOutputs(expert_N[rows], token_N[rows], gates_N[rows], out_ND)


def split_by_expert(counts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold whole experts: as many as fit `most` rows, a larger one by itself."""
    start = stop = 0
    for count in counts:
        if stop > start and stop + count - start > most:
            yield start, stop
            start = stop
        stop += count
    if stop > start:
        yield start, stop


# --- sums


def add_to_layer(totals: dict[int, Tensor], layer: int, amount: Tensor) -> None:
    totals[layer] = totals[layer] + amount if layer in totals else amount


def named_sums(name: str, totals: dict[int, Tensor]) -> Sums:
    return {f"layer.{layer}.{name}": tensor for layer, tensor in totals.items()}


def add_sums(first: Sums, second: Sums) -> Sums:
    """The sums over both texts."""
    if set(first) != set(second) or any(first[name].shape != second[name].shape for name in first):
        raise BadInput("the sums are of different layers, experts or quantities; calibrate again")
    return {name: first[name] + second[name] for name in first}


def save_sums(path: Path, sums: Sums, facts: dict[str, object]) -> None:
    """Save the sums as one safetensors file with `facts` (checkpoint, documents, tokens) in its header."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sums.items()}
    save_file(tensors, path, metadata={"moescope_sums": SUMS_VERSION, "facts": json.dumps(facts)})


def load_sums(path: Path) -> tuple[Sums, dict[str, object]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("moescope_sums") != SUMS_VERSION:
                raise BadInput(f"{path}: not sums of this version of moescope; calibrate again")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata["facts"])  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, RecursionError):
        raise BadInput(f"{path}: the calibration sums cannot be loaded; calibrate again") from None


# --- a sample of states


@dataclass(frozen=True)
class LayerStates:
    """A sample of the experts' inputs, with the router's logits, choices and gates; on the CPU."""

    x_TD: Tensor  # in the model's dtype
    logits_TE: Tensor | None  # float32; None where the router has none
    chosen_TK: Tensor
    gates_TK: Tensor
    draw_T: Tensor  # int64: the tokens with the smallest draws are the sample
    ids_T: Tensor | None = None  # token ids, where known
    carried_TR: Tensor | None = None  # what the router received from that of the layer before, if it does

    def __len__(self) -> int:
        return len(self.draw_T)

    def parts(self) -> dict[str, Tensor]:
        """The tensors that are present, by name."""
        tensors = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> LayerStates:
        return replace(self, **{name: change(name, tensor) for name, tensor in self.parts().items()})

    def smallest(self, most: int) -> LayerStates:
        if len(self) <= most:
            return self
        tokens = smallest_draws(self.draw_T, most)
        return self.map(lambda name, tensor: tensor[tokens])

    def joined(self, other: LayerStates) -> LayerStates:
        return self.map(lambda name, tensor: torch.cat([tensor, other.parts()[name]]))

    def reads(self) -> RouterReads:
        """The inputs a router decides from."""
        return RouterReads(self.x_TD, self.ids_T, self.carried_TR)


class StateSample:
    """Collector of `LayerStates`: the tokens whose draw, a seeded hash of the text up to them, is smallest.

    Such a sample is uniform and bounded, and that of two texts follows from those of each.
    """

    def __init__(self, seed: int = 0, most: int = MOST_STATES, layers: int = 1):
        self.seed, self.most, self.layers = seed, most, layers
        self.states: dict[int, LayerStates] = {}
        self.limit: int | None = None

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.x_TD is not None
        if self.limit is None:
            row = routing.x_TD.shape[1] * routing.x_TD.element_size() + 4 * routing.n_experts
            self.limit = min(self.most, max(FEWEST_STATES, MOST_BYTES // (row * self.layers)))
        draw_T = draws(routing, self.seed)
        wanted_T = real_tokens(routing)
        held = self.states.get(routing.layer)
        if held is not None and len(held) == self.limit:
            wanted_T = wanted_T & (draw_T < held.draw_T.max().to(draw_T.device))
        tokens = torch.where(wanted_T)[0]
        if len(tokens) > self.limit:
            tokens = tokens[smallest_draws(draw_T[tokens], self.limit)]
        ids_T = None if routing.tokens is None else routing.tokens.ids_T
        new = LayerStates(
            routing.x_TD,
            routing.logits_TE,
            routing.chosen_TK,
            routing.gates_TK,
            draw_T,
            ids_T,
            routing.carried_TR,
        ).map(lambda name, tensor: tensor[tokens].cpu())
        self.states[routing.layer] = (new if held is None else held.joined(new)).smallest(self.limit)

    def join(self, other: StateSample) -> None:
        """Add the sample of the text that follows: the sample of both texts together."""
        self.limit = other.limit
        for layer, states in other.states.items():
            held = self.states.get(layer)
            both = states if held is None else held.joined(states)
            self.states[layer] = both.smallest(self.limit or self.most)

    def sums(self) -> Sums:
        """Nothing: a sample is not a sum; see `states`."""
        return {}

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        return self.states[layer].parts() if layer in self.states else {}

    def restore_layer(self, layer: int, state: dict[str, Tensor]) -> None:
        if state:
            self.states[layer] = LayerStates(**{"logits_TE": None, **state})  # type: ignore[arg-type]


def smallest_draws(draw_T: Tensor, most: int) -> Tensor:
    """Return the tokens with the smallest draws in their order; of equal draws the first ones."""
    return draw_T.argsort(stable=True)[:most].sort().values


def draws(routing: Routing, seed: int) -> Tensor:
    """A number per token from its text so far and the seed, the same in every layer, batch and order."""
    tokens = routing.tokens
    if tokens is None:
        return mix(torch.arange(len(routing.chosen_TK), device=routing.chosen_TK.device) + seed * SPREAD[0])
    return mix(hash_history(tokens) + seed * SPREAD[2])


def hash_history(tokens: Tokens) -> Tensor:
    """A hash of each row's ids and positions up to each token; overflow is intended."""
    each_RL = mix(tokens.ids_T * SPREAD[0] + tokens.position_T).view(tokens.rows, -1)
    return each_RL.cumsum(-1).view(-1) + tokens.position_T


def mix(values: Tensor) -> Tensor:
    """splitmix64's last steps on int64 (Steele, Lea and Flood 2014), shifts made logical by a mask."""
    values = (values ^ ((values >> 30) & (2**34 - 1))) * SPREAD[1]
    values = (values ^ ((values >> 27) & (2**37 - 1))) * SPREAD[2]
    return values ^ ((values >> 31) & (2**33 - 1))


def states_to_arrays(states: Mapping[int, LayerStates]) -> dict[str, Tensor]:
    return {
        f"layer.{layer}.states.{name}": tensor
        for layer, sample in states.items()
        for name, tensor in sample.parts().items()
    }


def states_from_arrays(arrays: Mapping[str, Tensor]) -> dict[int, LayerStates]:
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in arrays.items():
        _, layer, *rest = name.split(".")
        if rest[0] == "states":
            layers.setdefault(int(layer), {"logits_TE": None})[rest[1]] = tensor  # type: ignore[dict-item]
    return {layer: LayerStates(**parts) for layer, parts in sorted(layers.items())}


# --- gating


@dataclass(frozen=True)
class Gating:
    """How logits become experts and gates: gate = scale x score, renormalised over the chosen or not."""

    scoring: Scoring
    top_k: int
    normalised: bool
    scale: float
    explains: bool  # whether it reproduces choices and gates; if not, nothing can be predicted

    def route(self, logits_TE: Tensor, top_k: int | None = None) -> tuple[Tensor, Tensor]:
        """Chosen experts and gates for other logits, over any number of experts."""
        chosen_TK = self.scoring.selection(logits_TE).topk(top_k or self.top_k, dim=-1).indices
        scores_TK = self.scoring.raw(logits_TE).gather(1, chosen_TK)
        return chosen_TK, self.scale * renormalise(scores_TK, self.normalised)

    def with_bias(self, bias_K: Tensor | None) -> Gating:
        """The same gating with another correction bias; routers without one stay as they are."""
        if self.scoring.bias_E is None:
            return self
        return replace(self, scoring=replace(self.scoring, bias_E=bias_K))

    def words(self) -> str:
        how = "gates renormalised" if self.normalised else "gates not renormalised"
        scale = f", times {self.scale:.4g}" if abs(self.scale - 1) > 1e-3 else ""
        return f"{self.scoring.words()}; {how}{scale}"


def renormalise(scores_TK: Tensor, normalised: bool) -> Tensor:
    return scores_TK / scores_TK.sum(-1, keepdim=True).clamp(min=1e-20) if normalised else scores_TK


def find_gating(states: LayerStates, scoring: Scoring) -> Gating:
    """The gating that reproduces a sample's gates best; a single expert with gate 1 counts as renormalised.

    Experts that take tokens by a threshold do not choose the k best: no gating explains them.
    """
    assert states.logits_TE is not None
    empty_T = (states.chosen_TK < 0).any(-1)
    by_threshold = states.chosen_TK.shape[1] == states.logits_TE.shape[1] and bool(empty_T.any())
    logits_TE, chosen_TK = states.logits_TE[~empty_T].float(), states.chosen_TK[~empty_T].long()
    gates_TK = states.gates_TK[~empty_T].float()
    bias_E = None if scoring.bias_E is None else scoring.bias_E.detach().float().cpu()
    scoring = replace(scoring, bias_E=bias_E)
    candidates = []
    for normalised in (True, False):
        raw_TK = renormalise(scoring.raw(logits_TE).gather(1, chosen_TK), normalised)
        scale = float((raw_TK * gates_TK).sum() / raw_TK.square().sum().clamp(min=1e-20))
        error = float((scale * raw_TK - gates_TK).norm() / gates_TK.norm().clamp(min=1e-20))
        candidates.append((error, normalised, scale))
    error, normalised, scale = min(candidates)
    explains = scoring.explains and len(logits_TE) > 0 and error <= GATES_FIT and not by_threshold
    return Gating(scoring, chosen_TK.shape[1], normalised, scale, explains)
