"""Calibration text, of which a part is held out, and the results of calibration as a file."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from moescope.compression.calibration import (
    Gating,
    LayerStates,
    ScoringFinder,
    StateSample,
    SumCollector,
    Sums,
    SumsByShare,
    add_sums,
    calibrate,
    find_gating,
    load_sums,
    save_sums,
    states_from_arrays,
    states_to_arrays,
)
from moescope.compression.saliency import SUM_NAMES, RoutedSums
from moescope.errors import BadInput
from moescope.execution.adapters import Block, find_blocks
from moescope.execution.budget import deal
from moescope.execution.collect import Collected, Collector, collect_batches
from moescope.execution.documents import Document, batches, fingerprint, read_documents, windows
from moescope.execution.lab_models import load_any_model, load_skeleton
from moescope.execution.models import TracedModel
from moescope.execution.scoring import Scoring
from moescope.execution.shares import Part
from moescope.execution.texts import ReadSettings, Source
from moescope.execution.ways import Execution
from moescope.execution.workers import ModelRequest, OpenWorkers, Workers
from moescope.families import MoeCheckpoint
from moescope.run import Run
from moescope.statistics import BUCKETS, FEWEST_DOCUMENTS

ONE_IN = 5  # documents: one is held out, the others calibrate
FEWEST_HELD_OUT = 2  # documents per domain, and as many to calibrate: an interval needs two
JUDGED_TOKENS = 32_768  # shared evenly by the domains
CALIBRATION_FILE = "calibration.safetensors"


@dataclass
class CalibrationText:
    """A model and the documents it reads; the model is loaded when first needed and can be released."""

    model: str
    sources: list[Source]
    device: str
    hold_out: bool
    settings: ReadSettings
    execution: Execution | None = None
    judge_most: bool = False  # judge on the four parts in five that otherwise calibrate
    loaded: TracedModel | None = field(default=None, repr=False)
    split: dict[int, str] | None = None
    chosen: dict[int, frozenset[int]] = field(default_factory=dict)  # domain -> hashes of those held out
    judged: list[Document] | None = field(default=None, repr=False)
    workers: OpenWorkers | None = None  # that calibrate; None: this process does
    skeleton: TracedModel | None = field(default=None, repr=False)

    @property
    def reader(self) -> TracedModel:
        """What tokenizes documents: the model, or one without weights while workers calibrate."""
        if self.workers is None or self.loaded is not None:
            return self.traced
        if self.skeleton is None:
            settings = self.settings
            self.skeleton = load_skeleton(self.model, settings.dtype, True, settings.trust_remote_code)
            self.check_template(self.skeleton)
        return self.skeleton

    def check_template(self, model: TracedModel) -> None:
        if self.settings.chat_template and not getattr(model.tokenizer, "chat_template", None):
            raise BadInput(f"{self.model}: its tokenizer has no chat template; omit --chat-template")

    @property
    def traced(self) -> TracedModel:
        if self.loaded is None:
            self.loaded = self.load(self.model)
            self.check_template(self.loaded)
        return self.loaded

    def load(self, model: str) -> TracedModel:
        settings = self.settings
        return load_any_model(
            model, settings.dtype, self.device, True, settings.trust_remote_code, self.execution
        )

    def release(self) -> None:
        """Free the model's memory: the compressed one comes next."""
        self.loaded = None
        gc.collect()

    def splits(self) -> dict[int, str]:
        """Domain -> how it is held out: "documents", "tails" where it has too few of them, or "none"."""
        if self.split is None:
            by_hash: dict[int, dict[int, bool]] = {domain: {} for domain in range(len(self.sources))}
            settled: set[int] = set()  # the hash leaves enough documents on both sides
            empty = True
            for document in self.documents():
                empty, domain = False, document.domain
                if len(document.ids) > 1 and domain not in settled:
                    by_hash[domain][fingerprint(document.ids)] = is_held_out(document)
                    held = sum(by_hash[domain].values())
                    if FEWEST_HELD_OUT <= held <= len(by_hash[domain]) - FEWEST_HELD_OUT:
                        settled.add(domain)
                # a long text need not be read to its end
                if not self.hold_out or len(settled) == len(self.sources):
                    break
            if empty:
                raise BadInput("the text holds no token; give a longer one")
            self.split = dict.fromkeys(by_hash, "documents" if self.hold_out else "none")
            for domain in set(by_hash) - settled if self.hold_out else ():
                documents = by_hash[domain]
                if len(documents) < 2 * FEWEST_HELD_OUT:
                    self.split[domain] = "tails"
                    continue
                most = len(documents) - FEWEST_HELD_OUT
                count = min(max(FEWEST_HELD_OUT, sum(documents.values())), most)
                ordered = sorted(documents, key=lambda hashed: (not documents[hashed], hashed))
                self.chosen[domain] = frozenset(ordered[:count])
        return self.split

    def holds_out(self, document: Document) -> bool:
        """Whether a document of a domain whose documents are held out is one of those."""
        chosen = self.chosen.get(document.domain)
        held = is_held_out(document) if chosen is None else fingerprint(document.ids) in chosen
        return held != self.judge_most

    def held_out(self) -> str:
        """How the text is held out: "documents" where that is so in every domain."""
        kinds = set(self.splits().values())
        return kinds.pop() if len(kinds) == 1 else "tails"

    def documents(self) -> Iterator[Document]:
        settings = self.settings
        return read_documents(self.reader, self.sources, settings.max_tokens, settings.chat_template)

    def calibration_documents(self) -> Iterator[Document]:
        splits = self.splits()
        for document in self.documents():
            split = splits[document.domain]
            part = split_document(document)[int(self.judge_most)] if split == "tails" else document
            if len(part.ids) and not (split == "documents" and self.holds_out(document)):
                yield part

    def held_out_documents(self) -> list[Document]:
        """The documents to judge on: every domain has at most the same number of tokens."""
        if self.judged is None:
            splits = self.splits()
            samples = {domain: JudgedSample(JUDGED_TOKENS // len(splits)) for domain in splits}
            for document in self.documents():
                split = splits[document.domain]
                if split == "tails":
                    samples[document.domain].add(split_document(document)[int(not self.judge_most)])
                elif split == "none" or self.holds_out(document):
                    samples[document.domain].add(document)
            self.judged = [document for sample in samples.values() for document in sample.documents()]
        return self.judged

    def calibrate(
        self, collectors: Sequence[SumCollector], advance: Callable[[int], None] = lambda tokens: None
    ) -> Collected:
        return calibrate(
            self.traced, self.calibration_documents(), collectors, self.settings.batch_size, advance
        )


def is_held_out(document: Document) -> bool:
    """One document in five, by its content: the same ones in every run over the same text."""
    return (fingerprint(document.ids) >> 16) % ONE_IN == 0


def split_document(document: Document) -> tuple[Document, Document]:
    """The first four fifths and the rest of a document, for a domain of few documents.

    The rest has a token to predict; a document of under four tokens has none.
    """
    size = len(document.ids)
    cut = size - (max(2, size // ONE_IN) if size > 3 else 0)
    return (
        Document(document.number, document.domain, document.ids[:cut]),
        Document(document.number, document.domain, document.ids[cut:]),
    )


class JudgedSample:
    """One domain's documents to judge on: those with the smallest hashes, up to a quota of tokens.

    The sample depends on the content of the documents and not on their order. No document takes more than a
    32nd of the quota while others are left, since intervals need documents.
    """

    def __init__(self, quota: int):
        self.quota = quota
        self.share = max(2, quota // 32)
        self.tokens = 0  # of all documents in the sample, each counted up to its share
        self.heap: list[tuple[int, int, Document]] = []  # the largest hash first

    def add(self, document: Document) -> None:
        """Consider a document; one without a next token is skipped."""
        if len(document.ids) < 2:
            return
        cut = replace(document, ids=document.ids[: self.quota])
        heapq.heappush(self.heap, (-fingerprint(document.ids), -document.number, cut))
        self.tokens += min(len(cut.ids), self.share)
        while self.tokens - (largest := min(len(self.heap[0][2].ids), self.share)) >= self.quota:
            heapq.heappop(self.heap)
            self.tokens -= largest

    def documents(self) -> list[Document]:
        """The documents in the order of their hashes, the quota dealt to them."""
        ordered = [document for *_, document in sorted(self.heap, reverse=True)]
        shares = deal([len(document.ids) for document in ordered], self.quota)
        return [
            replace(document, ids=document.ids[:share])
            for document, share in zip(ordered, shares, strict=True)
            if share > 1
        ]


@dataclass(frozen=True)
class Calibration:
    """The results of one pass over the calibration text."""

    sums: Sums
    states: dict[int, LayerStates]
    gating: dict[int, Gating]
    documents: int
    tokens: int
    held_out: str
    callable_routers: tuple[int, ...] = ()  # layers whose own router can be called with other tensors

    def facts(self) -> dict[str, Any]:
        return {
            "calibration_documents": self.documents,
            "calibration_tokens": self.tokens,
            "held_out": self.held_out,
        }

    def warnings(self, documents: int) -> list[str]:
        """Warnings, given the number of calibration documents including those of added runs."""
        warnings = []
        if self.held_out == "tails":
            warnings.append(
                "a domain has too few documents to hold some out; instead, the last fifth of each is held out"
            )
        if documents < FEWEST_DOCUMENTS:
            warnings.append(
                f"no rank intervals: they need {FEWEST_DOCUMENTS} calibration documents, not {documents}"
            )
        unknown = [
            str(layer)
            for layer, gating in self.gating.items()
            if not gating.explains and layer not in self.callable_routers
        ]
        if unknown:
            warnings.append(f"no predicted damage in layers {', '.join(unknown)}: gating was not recognised")
        return warnings


@dataclass(frozen=True)
class EarlierSums:
    """The sums of an earlier run on another text."""

    file_identity: list[Any]
    sums: Sums = field(repr=False)
    documents: int
    tokens: int
    held_out: str


def load_earlier_sums(location: Path, moe: MoeCheckpoint) -> EarlierSums:
    """The sums of a run folder or of its calibration.safetensors; raises for those of another checkpoint."""
    file = location / CALIBRATION_FILE if location.is_dir() else location
    if (file.parent / "run.json").is_file():
        Run.load(file.parent)  # an error if another version of moescope wrote it
    if not file.is_file():
        raise BadInput(
            f"{location}: no {CALIBRATION_FILE}; give the folder of a `moescope compress` run on a text"
        )
    sums, facts = load_sums(file)
    if not isinstance(facts, dict) or facts.get("header_hash") != moe.checkpoint.header_hash():
        raise BadInput(f"{file}: from another checkpoint, or its files changed since; calibrate again")
    status = file.stat()
    identity = [str(file.resolve()), status.st_size, status.st_mtime_ns]
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
    return EarlierSums(identity, sums, *counts)


def all_sums(calibration: Calibration | None, earlier: Sequence[EarlierSums]) -> Sums:
    """The sums of this text and of earlier ones, of the quantities that this run needs."""
    parts = [*([] if calibration is None else [calibration.sums]), *(run.sums for run in earlier)]
    if not parts:
        return {}
    total = parts[0]
    for part in parts[1:]:
        total = add_sums(total, {name: part[name] for name in total if name in part})
    return total


def calibrate_text(
    text: CalibrationText,
    moe: MoeCheckpoint,
    makers: Sequence[Callable[[], SumCollector]],
    seed: int,
    file: Path,
    advance: Callable[[int], None],
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
    sample = StateSample(seed, layers=len(layers))
    summed = [SumsByShare(make) for make in (RoutedSums, *makers)]
    if text.workers is None:
        calibrated = text.calibrate([*summed, sample], advance)
        documents, tokens = calibrated.documents, calibrated.tokens
        scorings = block_scorings(calibrated.blocks)
    else:
        documents, tokens, scorings = calibrate_on_workers(text, summed, sample, advance)
    if not tokens:
        raise BadInput("the text leaves no token to calibrate on; give a longer one")
    sums = {name: tensor for collector in summed for name, tensor in collector.sums().items()}
    scoring, biases = {}, {}
    for layer, how in scorings.items():
        scoring[layer] = {
            "function": how.function,
            "groups": how.groups,
            "group_score": how.group_score,
            "explains": how.explains,
        }
        if how.bias_E is not None:
            biases[f"layer.{layer}.choice_bias_E"] = how.bias_E
    facts = {
        "documents": documents,
        "tokens": tokens,
        "held_out": text.held_out(),
        "scoring": scoring,
        "asked": [layer for layer, block in blocks.items() if block.with_router is not None],
    }
    save_sums(file, sums | states_to_arrays(sample.states) | biases, facts)


def block_scorings(blocks: dict[int, Block]) -> dict[int, Scoring]:
    """Return layer -> how its router scores; none for routers without logits, such as tables of token ids."""
    return {
        layer: replace(how, bias_E=None if how.bias_E is None else how.bias_E.detach().cpu())
        for layer, block in blocks.items()
        if (how := block.scoring) is not None
    }


# --- on workers


@dataclass(frozen=True)
class CalibratedPart:
    """What one worker found in its part of the batches."""

    shares: list[dict[int, Sums]]  # per collector
    sample: StateSample
    scorings: dict[int, Scoring]


def calibrate_part(
    makers: Sequence[Callable[[], SumCollector]],
    sample: StateSample,
    traced: TracedModel,
    part: Part,
    advance: Callable[[int], None],
) -> CalibratedPart:
    """Run the model over one part of the batches."""
    summed = [SumsByShare(make, apart=True) for make in makers]
    collectors: list[Collector] = [ScoringFinder(), *summed, sample]
    _, blocks = collect_batches(traced, part.batches, collectors, advance=advance)
    for collector in summed:
        collector.close()
    return CalibratedPart([collector.shares for collector in summed], sample, block_scorings(blocks))


def calibrate_on_workers(
    text: CalibrationText,
    summed: Sequence[SumsByShare],
    sample: StateSample,
    advance: Callable[[int], None],
) -> tuple[int, int, dict[int, Scoring]]:
    """Let workers run parts of the text and add what they found in the order of the text.

    Returns the number of documents and of tokens, and how each layer scores.
    """
    assert text.workers is not None
    assert text.execution is not None
    settings = text.settings
    documents = list(text.calibration_documents())
    in_batches = list(batches(windows(documents, text.reader.window), settings.batch_size))
    request = ModelRequest(text.model, settings.dtype, settings.trust_remote_code, prefer_transformers=True)
    work = partial(calibrate_part, [collector.make for collector in summed], sample)
    waiting: dict[int, CalibratedPart] = {}
    scorings: dict[int, Scoring] = {}
    joined = 0
    with text.workers.open() as engine:
        workers = Workers(engine, text.workers.jobs, request, text.execution, advance)
        for part, found in workers.run(work, in_batches) if in_batches else ():
            waiting[part.number] = found
            while joined in waiting:
                found = waiting.pop(joined)
                joined += 1
                for total, shares in zip(summed, found.shares, strict=True):
                    for share in sorted(shares):
                        total.add(share, shares[share])
                sample.join(found.sample)
                scorings = found.scorings | scorings
    return len(documents), sum(len(document.ids) for document in documents), scorings


def load_calibration(file: Path) -> Calibration:
    arrays, contents = load_sums(file)
    facts: Any = contents
    states = states_from_arrays(arrays)
    gating = {}
    for layer, sample in states.items():
        how = facts["scoring"].get(str(layer))
        if how is not None:
            bias_E = arrays.get(f"layer.{layer}.choice_bias_E")
            groups = tuple(how["groups"])
            scoring = Scoring(how["function"], bias_E, groups, how["group_score"], how["explains"])
            gating[layer] = find_gating(sample, scoring)
    sums = {
        name: tensor
        for name, tensor in arrays.items()
        if ".states." not in name and "choice_bias" not in name
    }
    counts = (facts["documents"], facts["tokens"], facts["held_out"])
    return Calibration(sums, states, gating, *counts, tuple(facts["asked"]))
