"""Evaluation on held-out text: the split of a text, and losses and divergences summed by document."""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moescope.errors import reject_if
from moescope.execution.collect import prefill_inputs
from moescope.execution.documents import Batch, Document, batches, deal, fingerprint, read_documents, windows
from moescope.execution.lab_models import load_any_model, load_skeleton
from moescope.execution.models import TracedModel
from moescope.execution.texts import ReadSettings, Source
from moescope.execution.ways import Execution
from moescope.execution.workers import OpenWorkers
from moescope.statistics import ratios
from moescope.types import Array, Integers

ONE_IN = 5  # documents: one is held out, the others calibrate
FEWEST_HELD_OUT = 2  # documents per domain, and as many to calibrate: an interval needs two
JUDGED_TOKENS = 32_768  # shared evenly by the domains
COMPARED_TOKENS = 8_192  # positions whose full distributions are compared
COMPARED_BYTES = 2**29
LOGITS_PER_PASS = 2**28  # elements
POSITIONS = 1024  # whose distributions are compared at once
CACHED = 2**16  # logits per core that are compared at once, half a megabyte in float64

# --- the split of a text


@dataclass
class SplitText:
    """A model and the documents it reads, some held out; it is loaded when needed and can be released."""

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
    is_cut: bool = False  # --max-tokens left some of the text unread; known with `judged`
    workers: OpenWorkers | None = None  # that calibrate; None: this process does
    skeleton: TracedModel | None = field(default=None, repr=False)

    @property
    def reader(self) -> TracedModel:
        """What tokenizes documents: the model, or one without weights while workers calibrate."""
        if self.workers is None or self.loaded is not None:
            return self.traced
        if self.skeleton is None:
            dtype, trust = self.settings.dtype, self.settings.trust_remote_code
            self.skeleton = self.with_template(load_skeleton(self.model, dtype, True, trust))
        return self.skeleton

    def with_template(self, model: TracedModel) -> TracedModel:
        reject_if(
            self.settings.chat_template and not getattr(model.tokenizer, "chat_template", None),
            f"{self.model}: its tokenizer has no chat template; omit --chat-template",
        )
        return model

    @property
    def traced(self) -> TracedModel:
        if self.loaded is None:
            self.loaded = self.with_template(self.load(self.model))
        return self.loaded

    def load(self, model: str) -> TracedModel:
        dtype, trust = self.settings.dtype, self.settings.trust_remote_code
        return load_any_model(model, dtype, self.device, True, trust, self.execution)

    def release(self) -> None:
        """Free the model's memory: the compressed one comes next."""
        self.loaded = None
        gc.collect()

    def splits(self) -> dict[int, str]:
        """Domain -> how it is held out: "documents", "tails" where it has too few of them, or "none"."""
        if self.split is None:
            by_hash: dict[int, dict[int, bool]] = {domain: {} for domain in range(len(self.sources))}
            settled: set[int] = set()  # the hash leaves enough documents on both sides
            document: Document | None = None
            for document in self.documents():
                domain = document.domain
                if len(document.ids) > 1 and domain not in settled:
                    by_hash[domain][fingerprint(document.ids)] = is_held_out(document)
                    held = sum(by_hash[domain].values())
                    if FEWEST_HELD_OUT <= held <= len(by_hash[domain]) - FEWEST_HELD_OUT:
                        settled.add(domain)
                # a long text need not be read to its end
                if not self.hold_out or len(settled) == len(self.sources):
                    break
            reject_if(document is None, "the text holds no token; give a longer one")
            self.split = dict.fromkeys(by_hash, "documents" if self.hold_out else "none")
            for domain in set(by_hash) - settled if self.hold_out else ():
                documents = by_hash[domain]
                most = len(documents) - FEWEST_HELD_OUT
                if most < FEWEST_HELD_OUT:
                    self.split[domain] = "tails"
                    continue
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
        most, chat_template = self.settings.max_tokens, self.settings.chat_template
        return read_documents(self.reader, self.sources, most, chat_template)

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
            tokens = 0
            for document in self.documents():
                tokens += len(document.ids)
                split = splits[document.domain]
                if split == "tails":
                    samples[document.domain].add(split_document(document)[int(not self.judge_most)])
                elif split == "none" or self.holds_out(document):
                    samples[document.domain].add(document)
            self.judged = [document for sample in samples.values() for document in sample.documents()]
            self.is_cut = tokens == self.settings.max_tokens
        return self.judged


def is_held_out(document: Document) -> bool:
    """One document in five, by its content: the same ones in every run over the same text."""
    return (fingerprint(document.ids) >> 16) % ONE_IN == 0


def split_document(document: Document) -> tuple[Document, Document]:
    """The first four fifths and the rest of a document, for a domain of few documents.

    The rest has a token to predict; a document of under four tokens has none.
    """
    size = len(document.ids)
    cut = size - (max(2, size // ONE_IN) if size > 3 else 0)
    return replace(document, ids=document.ids[:cut]), replace(document, ids=document.ids[cut:])


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


# --- predictions


@dataclass(frozen=True)
class Predictions:
    """The logits of one batch at every position that has a next token, that token, and its document."""

    logits_NV: Tensor
    next_N: Tensor
    document_N: Integers  # index into the documents

    @cached_property
    def normaliser_N(self) -> Tensor:
        """log Σ exp in float64."""
        return in_parts(
            lambda part: part.double().logsumexp(-1), rows_at_once(self.logits_NV), self.logits_NV
        )

    @cached_property
    def top_N(self) -> Tensor:
        return self.logits_NV.argmax(-1)

    @cached_property
    def loss_N(self) -> Tensor:
        """-log p(next token) in float64."""
        return self.normaliser_N - self.logits_NV.gather(-1, self.next_N[:, None])[:, 0].double()


class EvaluationBatches:
    """Documents in batches, and where these have a next token."""

    def __init__(self, traced: TracedModel, documents: Sequence[Document], batch_size: int = 8):
        self.traced, self.documents = traced, list(documents)
        rows = max(1, min(batch_size, LOGITS_PER_PASS // (traced.vocabulary * traced.window)))
        in_rows = batches(windows(documents, traced.window), rows)
        self.batches = [Batch.of(part, traced.padding) for part in in_rows]
        index = {document.number: place for place, document in enumerate(self.documents)}
        self.document_BL = [
            np.array([index[row.number] for row in batch.rows])[:, None].repeat(batch.ids_BL.shape[1], 1)
            for batch in self.batches
        ]
        self.tokens_D = np.array([max(len(document.ids) - 1, 0) for document in self.documents])
        self.domain_D = np.array([document.domain for document in self.documents], dtype=np.int64)

    def known(self, number: int) -> np.ndarray:
        """Return where a batch has a next token."""
        return self.batches[number].real_BL & (self.batches[number].next_BL >= 0)

    def predictions(self, number: int, logits_BLV: Tensor) -> Predictions:
        """Return the predictions of a batch where it has a next token."""
        known_BL, device = self.known(number), logits_BLV.device
        next_N = torch.from_numpy(self.batches[number].next_BL[known_BL]).to(device)
        logits_NV = logits_BLV[torch.from_numpy(known_BL).to(device)]
        return Predictions(logits_NV, next_N, self.document_BL[number][known_BL])

    def compared(self, number: int, most: int) -> Integers:
        """Positions of a batch whose distributions are compared: at most so many, shared evenly by domains.

        They are spread evenly over a domain's text.
        """
        domain_D = np.unique(self.domain_D, return_inverse=True)[1]
        positions_G = np.bincount(domain_D, self.tokens_D).astype(np.int64)
        shares_G = np.array(deal(positions_G.tolist(), most))
        # positions of the domain's documents before
        first_D = pd.Series(self.tokens_D).groupby(domain_D).cumsum().to_numpy() - self.tokens_D
        known_BL = self.known(number)
        row_N, column_N = np.nonzero(known_BL)
        document_N = self.document_BL[number][known_BL]
        start_N = np.array([row.start for row in self.batches[number].rows], dtype=np.int64)[row_N]
        share_N, size_N = (values_G[domain_D[document_N]] for values_G in (shares_G, positions_G))
        return np.flatnonzero((first_D[document_N] + start_N + column_N) * share_N % size_N < share_N)

    def by_document(self, values: Tensor | Array, document_N: Integers) -> Array:
        weights = values.double().cpu().numpy() if isinstance(values, Tensor) else values
        return np.bincount(document_N, weights, minlength=len(self.documents)).astype(np.float64)


def in_parts(compute: Callable[..., Tensor], rows: int, *values: Tensor) -> Tensor:
    """Return what `compute` gives for so many positions at a time, joined."""
    return torch.cat(
        [compute(*part) for part in zip(*(torch.split(each, rows) for each in values), strict=True)]
    )


def rows_at_once(logits_NV: Tensor) -> int:
    """Positions whose distributions are in float64 at once: on a CPU as many as its caches hold."""
    if logits_NV.device.type != "cpu":
        return POSITIONS
    return max(1, CACHED // max(logits_NV.shape[-1], 1)) * torch.get_num_threads()


def kl_divergence(before: Predictions, after: Predictions) -> Tensor:
    """KL(before || after) = Σ p (a - b) + B - A per position, with logits a and b and normalisers A and B."""

    def differences(a_NV: Tensor, normaliser_N: Tensor, b_NV: Tensor) -> Tensor:
        a_NV = a_NV.to(torch.float64, copy=True)
        p_NV = (a_NV - normaliser_N[:, None]).exp_()
        return torch.linalg.vecdot(p_NV, a_NV.sub_(b_NV))

    values = before.logits_NV, before.normaliser_N, after.logits_NV
    differences_N = in_parts(differences, rows_at_once(before.logits_NV), *values)
    return differences_N + (after.normaliser_N - before.normaliser_N)


def negative_log_likelihood(logits_NV: Tensor, next_N: Tensor) -> Array:
    """-log p(next token) at every position."""

    def losses(part_NV: Tensor, after_N: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(part_NV.float(), after_N, reduction="none").double().cpu()

    return in_parts(losses, POSITIONS, logits_NV, next_N).numpy()


def js_divergence(before_NV: Tensor, after_NV: Tensor) -> Array:
    """JS between both softmaxes at every position."""

    def divergences(first_NV: Tensor, second_NV: Tensor) -> Tensor:
        p, q = (part.to(second_NV.device).double().log_softmax(-1) for part in (first_NV, second_NV))
        m = torch.logaddexp(p, q) - math.log(2)
        return 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)).cpu()

    return in_parts(divergences, POSITIONS, before_NV, after_NV).numpy()


# --- a model against another


@dataclass(frozen=True)
class Evaluation:
    """A model's loss by document, and its divergence from a reference: 0 if equal, ln 2 nats at most."""

    loss_D: Array  # sums over a document's next tokens
    tokens_D: Integers  # predicted next tokens
    divergence_D: Array  # sums over a document's compared positions; 0 of the reference itself
    compared_D: Array  # positions whose distributions are compared
    domain_D: Integers
    logits: list[Tensor] = field(default_factory=list)  # of a reference: per batch, at compared positions

    @property
    def perplexity(self) -> float:
        """exp of the mean over domains of the domain's mean -log p(next token)."""
        loss = float(mean_of_domain_means(self.by_domain([self.loss_D], self.tokens_D).sum(0))[0])
        return math.exp(loss) if not loss >= 700 else math.inf

    @property
    def js_divergence(self) -> float:
        return float(mean_of_domain_means(self.by_domain([self.divergence_D], self.compared_D).sum(0))[0])

    def by_domain(self, values: Sequence[Array], tokens_D: Array | Integers) -> Array:
        """Sums of every document and, last, their number of tokens, in the place of the document's domain."""
        in_domain_DG = self.domain_D[:, None] == np.unique(self.domain_D[tokens_D > 0])
        return in_domain_DG[:, :, None] * np.stack([*values, tokens_D], -1)[:, None]

    def to_tensors(self) -> dict[str, Tensor]:
        arrays = {name: torch.from_numpy(value) for name, value in vars(self).items() if name != "logits"}
        return arrays | {f"logits.{number}": logits for number, logits in enumerate(self.logits)}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> Evaluation:
        arrays: dict[str, Any] = {name: part.numpy() for name, part in tensors.items() if "." not in name}
        logits = [tensors[f"logits.{number}"] for number in range(len(tensors) - len(arrays))]
        return cls(**arrays, logits=logits)


def mean_of_domain_means(sums_GX: Array) -> Array:
    """The mean over domains of sums divided by the number of tokens, which comes last."""
    return ratios(sums_GX).mean(-2)


def per_document(
    traced: TracedModel,
    documents: Sequence[Document],
    reference: Evaluation | None = None,
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Return the model's loss on every document, and its divergence from the reference.

    Without a reference the model is one: its logits at the positions to compare are kept, in its own dtype.
    The divergence is Jensen and Shannon's: JS(p, q) = KL(p || m)/2 + KL(q || m)/2 with m = (p + q)/2 (Lin
    1991).
    """
    text = EvaluationBatches(traced, documents, batch_size)
    reject_if(
        not text.tokens_D.sum(),
        "the held-out text has no token to predict; give a longer text, or --no-judge",
    )
    loss_D, divergence_D, compared_D = (np.zeros(len(documents)) for _ in range(3))
    logits: list[Tensor] = []
    outputs = traced.run_all([prefill_inputs(traced, batch) for batch in text.batches])
    for number, output in enumerate(outputs):
        part = text.predictions(number, output.logits)
        loss_D += text.by_document(negative_log_likelihood(part.logits_NV, part.next_N), part.document_N)
        position_bytes = part.logits_NV.shape[1] * part.logits_NV.element_size()
        most = min(COMPARED_TOKENS, COMPARED_BYTES // position_bytes)
        places = text.compared(number, most if reference is None else int(reference.compared_D.sum()))
        compared_NV = part.logits_NV[torch.from_numpy(places).to(part.logits_NV.device)]
        compared_D += text.by_document(np.ones(len(places)), part.document_N[places])
        if reference is None:
            logits.append(compared_NV.cpu())
        else:
            divergence_N = js_divergence(reference.logits[number], compared_NV)
            divergence_D += text.by_document(divergence_N, part.document_N[places])
        advance(len(part.next_N))
    return Evaluation(loss_D, text.tokens_D, divergence_D, compared_D, text.domain_D, logits)
