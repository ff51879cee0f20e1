"""Calibration: one pass over text through the model's own blocks, and its results as a file.

Sums of two texts can be added; a sample of states is bounded, and the same tokens are sampled in every layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moescope.compression.plan import file_of
from moescope.errors import BadInput
from moescope.execution.adapters import Block, RouterReads, adapter_of, find_blocks
from moescope.execution.collect import Collected, Collector, collect, collect_batches
from moescope.execution.documents import Document, batches, windows
from moescope.execution.evaluation import SplitText
from moescope.execution.models import TracedModel
from moescope.execution.scoring import Scoring, find_scoring
from moescope.execution.workers import ModelRequest, Part, PartWork, Workers, in_order
from moescope.families import MoeCheckpoint
from moescope.run import Run
from moescope.statistics import BUCKETS, FEWEST_DOCUMENTS
from moescope.types import Routing, Tokens

Sums = dict[str, Tensor]  # layer.N.NAME -> sums and counts: those of two texts can be added
SUMS_VERSION = "1"
SUM_NAMES = ("tokens_BE", "gate_sums_BE", "norm_BE", "gated_norm_BE")  # per bucket of documents and expert
CALIBRATION_FILE = "calibration.safetensors"
MOST_STATES = 4096  # tokens per layer
FEWEST_STATES = 256
MOST_BYTES = 2**30  # of all layers together
GATES_FIT = 0.02  # relative error up to which gates count as reproduced: half precision stays below
# odd constants of splitmix64, as int64
SPREAD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


class ScoringFinder:
    """Collector that finds the scoring of blocks that hand out their routing themselves."""

    def consume(self, routing: Routing, block: Block) -> None:
        if block.scoring is None and routing.logits_TE is not None:
            parts, real_T = (routing.logits_TE, routing.chosen_TK, routing.gates_TK), real_tokens(routing)
            logits_TE, chosen_TK, gates_TK = (part[real_T] for part in parts)
            known = (block.correction_bias_E, block.groups, block.expected_scoring)
            block.scoring = find_scoring(logits_TE, chosen_TK, gates_TK, *known)


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
    """Mask of all tokens but padding."""
    if routing.tokens is None:
        return torch.ones(len(routing.chosen_TK), dtype=torch.bool, device=routing.chosen_TK.device)
    return routing.tokens.real_T


# --- sums


class SumCollector:
    """Collector of sums and counts over tokens, by layer and name; those of two texts can be added."""

    def __init__(self) -> None:
        self.layers: dict[int, Sums] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        raise NotImplementedError

    def add(self, layer: int, **amounts: Tensor) -> None:
        totals = self.layers.setdefault(layer, {})
        for name, amount in amounts.items():
            totals[name] = totals[name] + amount if name in totals else amount

    def sums(self) -> Sums:
        return {
            f"layer.{layer}.{name}": tensor.cpu()
            for layer, totals in self.layers.items()
            for name, tensor in totals.items()
        }


Makers = tuple[Callable[[], SumCollector], ...]


class RoutedSums(SumCollector):
    """Sums over the tokens X_j routed to expert j of 1, g, ||f|| and g ||f||, per bucket of documents.

    A document belongs to one of 256 buckets by its content. g is j's gate weight on a token, f its output
    without the gate.

    f comes from the block's own experts, called with a gate of 1. Llama 4 multiplies a token by its gate
    before the expert: there f is the output for the unscaled token, and g ||f|| only approximates what the
    expert adds.
    """

    def consume(self, routing: Routing, block: Block) -> None:
        if routing.layer not in self.layers:
            zeros = torch.zeros(BUCKETS, routing.n_experts, device=routing.chosen_TK.device)
            self.layers[routing.layer] = {
                name: zeros.to(torch.int64 if name == "tokens_BE" else torch.float64, copy=True)
                for name in SUM_NAMES
            }
        for expert_N, token_N, gates_N, out_ND in outputs_of_chosen(routing, block):
            norm_N, gate_N = out_ND.float().norm(dim=-1).double(), gates_N.double()
            bucket_N = 0 if routing.tokens is None else routing.tokens.bucket_T[token_N]
            cell_N = bucket_N * routing.n_experts + expert_N
            values = (torch.ones_like(cell_N), gate_N, norm_N, gate_N * norm_N)
            for name, value in zip(SUM_NAMES, values, strict=True):
                self.layers[routing.layer][name].view(-1).index_add_(0, cell_N, value)


def outputs_of_chosen(routing: Routing, block: Block) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The outputs of every real token's chosen experts, whole experts at a time, about T rows per part.

    A part is expert_N, token_N (index among the T tokens), the gate weight g_N, and the expert's output
    without gate f_ND. Neither [E, T, D] nor [T, K, D] is ever made: a part holds one expert's tokens, or
    those of several small ones together, so that 128 experts with a few tokens each are not 128 calls.
    """
    assert routing.x_TD is not None
    chosen_TK = torch.where(real_tokens(routing)[:, None], routing.chosen_TK, -1)
    token_N, slot_N = torch.where(chosen_TK >= 0)
    expert_N = chosen_TK[token_N, slot_N]
    order = expert_N.argsort(stable=True)
    token_N, slot_N, expert_N = token_N[order], slot_N[order], expert_N[order]
    counts = torch.bincount(expert_N, minlength=routing.n_experts).tolist()
    for start, stop in split_by_expert(counts, len(chosen_TK)):
        experts, tokens, slots = expert_N[start:stop], token_N[start:stop], slot_N[start:stop]
        out_ND = adapter_of(block).output(block, routing.x_TD[tokens], experts)
        yield experts, tokens, routing.gates_TK[tokens, slots], out_ND


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


def load_sums(path: Path) -> tuple[Sums, dict[str, Any]]:
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
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> LayerStates:
        return replace(self, **{name: change(name, tensor) for name, tensor in self.parts().items()})

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
        assert routing.tokens is not None
        if self.limit is None:
            row = routing.x_TD.shape[1] * routing.x_TD.element_size() + 4 * routing.n_experts
            self.limit = min(self.most, max(FEWEST_STATES, MOST_BYTES // (row * self.layers)))
        draw_T = draws(routing.tokens, self.seed)
        wanted_T = routing.tokens.real_T
        held = self.states.get(routing.layer)
        if held is not None and len(held) == self.limit:
            wanted_T = wanted_T & (draw_T < held.draw_T.max().to(draw_T.device))
        tokens = torch.where(wanted_T)[0]
        tokens = tokens[smallest_draws(draw_T[tokens], self.limit)]
        decision = (routing.logits_TE, routing.chosen_TK, routing.gates_TK)
        states = LayerStates(routing.x_TD, *decision, draw_T, routing.tokens.ids_T, routing.carried_TR)
        self.add(routing.layer, states.map(lambda name, tensor: tensor[tokens].cpu()))

    def add(self, layer: int, states: LayerStates) -> None:
        if layer in self.states:
            held = self.states[layer].parts()
            states = states.map(lambda name, tensor: torch.cat([held[name], tensor]))
        tokens = smallest_draws(states.draw_T, self.limit or self.most)
        self.states[layer] = states.map(lambda name, tensor: tensor[tokens])

    def join(self, other: StateSample) -> None:
        """Add the sample of the text that follows: the sample of both texts together."""
        self.limit = other.limit
        for layer, states in other.states.items():
            self.add(layer, states)

    def state(self, layer: int) -> dict[str, Tensor]:
        return self.states[layer].parts() if layer in self.states else {}

    def restore(self, layer: int, state: dict[str, Tensor]) -> None:
        if state:
            self.states[layer] = LayerStates(**{"logits_TE": None, **state})  # type: ignore[arg-type]


def smallest_draws(draw_T: Tensor, most: int) -> Tensor:
    """Return the tokens with the smallest draws in their order; of equal draws the first ones."""
    return draw_T.argsort(stable=True)[:most].sort().values


def draws(tokens: Tokens, seed: int) -> Tensor:
    """A number per token from its text so far and the seed, the same in every layer, batch and order.

    Overflow is intended.
    """
    each_RL = mix(tokens.ids_T * SPREAD[0] + tokens.position_T).view(tokens.rows, -1)
    return mix(each_RL.cumsum(-1).view(-1) + tokens.position_T + seed * SPREAD[2])


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


# what a part of the text gives: states, sums, and layer -> how its router scores (none of one without logits)
CalibratedPart = tuple[StateSample, Sums, dict[int, Scoring]]

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
        bias_E = None if self.scoring.bias_E is None else bias_K
        return replace(self, scoring=replace(self.scoring, bias_E=bias_E))

    def words(self) -> str:
        scale = f", times {self.scale:.4g}" if abs(self.scale - 1) > 1e-3 else ""
        return f"{self.scoring.words()}; gates {'' if self.normalised else 'not '}renormalised{scale}"


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

    def fit(normalised: bool) -> tuple[float, bool, float]:
        raw_TK = renormalise(scoring.raw(logits_TE).gather(1, chosen_TK), normalised)
        scale = float((raw_TK * gates_TK).sum() / raw_TK.square().sum().clamp(min=1e-20))
        error = float((scale * raw_TK - gates_TK).norm() / gates_TK.norm().clamp(min=1e-20))
        return error, normalised, scale

    error, normalised, scale = min(fit(True), fit(False))
    explains = scoring.explains and len(logits_TE) > 0 and error <= GATES_FIT and not by_threshold
    return Gating(scoring, chosen_TK.shape[1], normalised, scale, explains)


# --- the results as a file


@dataclass(frozen=True)
class Calibration:
    """The results of one pass over a calibration text; of an earlier run on another text the sums alone."""

    sums: Sums = field(repr=False)
    documents: int
    tokens: int
    held_out: str
    states: dict[int, LayerStates] = field(default_factory=dict)
    gating: dict[int, Gating] = field(default_factory=dict)
    callable_routers: tuple[int, ...] = ()  # layers whose own router can be called with other tensors

    def facts(self) -> dict[str, Any]:
        return {
            "calibration_documents": self.documents,
            "calibration_tokens": self.tokens,
            "held_out": self.held_out,
        }

    def warnings(self, documents: int) -> list[str]:
        """Warnings, given the number of calibration documents including those of added runs."""
        unknown = [
            str(layer)
            for layer, gating in self.gating.items()
            if not gating.explains and layer not in self.callable_routers
        ]
        tails = "a domain has too few documents to hold some out; instead, the last fifth of each is held out"
        few = f"no rank intervals: they need {FEWEST_DOCUMENTS} calibration documents, not {documents}"
        blind = f"no predicted damage in layers {', '.join(unknown)}: gating was not recognised"
        said = (self.held_out == "tails", tails), (documents < FEWEST_DOCUMENTS, few), (unknown, blind)
        return [warning for applies, warning in said if applies]


def load_earlier_sums(location: str | Path, moe: MoeCheckpoint) -> Calibration:
    """The sums of a run folder or of its calibration.safetensors; raises for those of another checkpoint."""
    file = file_of(location, CALIBRATION_FILE)
    if (file.parent / "run.json").is_file():
        Run.load(file.parent)  # an error if another version of moescope wrote it
    if not file.is_file():
        raise BadInput(
            f"{location}: no {CALIBRATION_FILE}; give the folder of a `moescope compress` run on a text"
        )
    sums, facts = load_sums(file)
    if not isinstance(facts, dict) or facts.get("header_hash") != moe.checkpoint.header_hash():
        raise BadInput(f"{file}: from another checkpoint, or its files changed since; calibrate again")
    counts: Any = [facts.get(name) for name in ("calibration_documents", "calibration_tokens", "held_out")]
    shapes = {
        f"layer.{layer}.{name}": (BUCKETS, weights.n_experts)
        for layer, weights in moe.layers.items()
        for name in SUM_NAMES
    }
    bad = [name for name, shape in shapes.items() if name not in sums or sums[name].shape != shape]
    bad += [name for name, tensor in sums.items() if not bool(tensor.isfinite().all())]
    if bad or [type(count) for count in counts] != [int, int, str]:
        what = f"the sum {bad[0][:60]}" if bad else "its number of documents or tokens"
        raise BadInput(f"{file}: {what} is missing or malformed; calibrate again")
    return Calibration(sums, *counts)


def all_sums(texts: Sequence[Calibration]) -> Sums:
    """The sums of this text and of earlier ones, of the quantities that this run needs."""
    names = texts[0].sums if texts else {}
    parts = [{name: text.sums[name] for name in names if name in text.sums} for text in texts]
    return reduce(add_sums, parts or [{}])


def calibrate_text(
    text: SplitText, moe: MoeCheckpoint, makers: Makers, seed: int, file: Path, advance: Callable[[int], None]
) -> None:
    """Read the calibration text once and save sums, states and scoring to one file."""
    blocks = {block.layer: block for block in find_blocks(text.reader.model)}
    layers = {layer: block.n_experts for layer, block in blocks.items()}
    on_disk = {layer: weights.n_experts for layer, weights in moe.layers.items()}
    if layers != on_disk:
        raise BadInput(
            f"{text.model}: the running model has MoE layers {sorted(layers)}, the checkpoint "
            f"{sorted(on_disk)}; this model cannot be calibrated"
        )
    documents = list(text.calibration_documents())
    if not documents:
        raise BadInput("the text leaves no token to calibrate on; give a longer one")
    work = partial(calibrate_part, (RoutedSums, *makers), seed, len(layers))
    sample = StateSample(seed)
    sums: Sums = {}
    scorings: dict[int, Scoring] = {}
    for of_part, more, scoring in run_parts(text, work, documents, advance):
        sample.join(of_part)
        sums = add_sums(sums, more) if sums else more
        scorings = scoring | scorings
    described = {layer: dict(vars(how)) for layer, how in scorings.items()}
    biases = {
        f"layer.{layer}.choice_bias_E": bias_E
        for layer, how in described.items()
        if (bias_E := how.pop("bias_E")) is not None
    }
    facts = {
        "documents": len(documents),
        "tokens": sum(len(document.ids) for document in documents),
        "held_out": text.held_out(),
        "scoring": described,
        "asked": [layer for layer, block in blocks.items() if block.with_router is not None],
    }
    save_sums(file, sums | states_to_arrays(sample.states) | biases, facts)


def calibrate_part(
    makers: Makers,
    seed: int,
    layers: int,
    traced: TracedModel,
    part: Part,
    advance: Callable[[int], None],
) -> CalibratedPart:
    """Run the model over one part of the batches."""
    summed, sample = [make() for make in makers], StateSample(seed, layers=layers)
    collectors: list[Collector] = [ScoringFinder(), *summed, sample]
    _, blocks = collect_batches(traced, part.batches, collectors, advance=advance)
    scorings = {
        layer: replace(how, bias_E=None if how.bias_E is None else how.bias_E.detach().cpu())
        for layer, block in blocks.items()
        if (how := block.scoring) is not None
    }
    return sample, {name: tensor for each in summed for name, tensor in each.sums().items()}, scorings


def run_parts(
    text: SplitText, work: PartWork, documents: Sequence[Document], advance: Callable[[int], None]
) -> Iterator[CalibratedPart]:
    """Yield what `work` finds in each part of the text, in its order; without workers there is one part."""
    settings = text.settings
    in_batches = list(batches(windows(documents, text.reader.window), settings.batch_size))
    if text.workers is None:
        yield work(text.traced, Part(0, in_batches), advance)
        return
    assert text.execution is not None
    request = ModelRequest(text.model, settings.dtype, settings.trust_remote_code, prefer_transformers=True)
    with text.workers.open() as engine:
        workers = Workers(engine, text.workers.jobs, request, text.execution, advance)
        yield from in_order(workers.run(work, in_batches))


def load_calibration(file: Path) -> Calibration:
    arrays, facts = load_sums(file)
    states = states_from_arrays(arrays)
    gating = {}
    for layer, sample in states.items():
        if (how := facts["scoring"].get(str(layer))) is not None:
            how |= {"bias_E": arrays.get(f"layer.{layer}.choice_bias_E"), "groups": tuple(how["groups"])}
            gating[layer] = find_gating(sample, Scoring(**how))
    sums = {
        name: tensor
        for name, tensor in arrays.items()
        if ".states." not in name and "choice_bias" not in name
    }
    counts = (facts["documents"], facts["tokens"], facts["held_out"])
    return Calibration(sums, *counts, states, gating, tuple(facts["asked"]))
