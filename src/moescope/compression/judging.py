"""Perplexity and next-token divergence of compressed models on held-out text, against the original."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from moescope.compression.applying import apply_plan, share_experts
from moescope.compression.calibration import StateSample, calibrate, load_sums, save_sums
from moescope.compression.calibration_text import CalibrationText
from moescope.compression.damage import HeldOutStates, Tensors, measured_errors, original_outputs
from moescope.compression.plan import Fits
from moescope.errors import BadInput
from moescope.execution.budget import deal
from moescope.execution.collect import prefill_inputs
from moescope.execution.documents import Batch, Document, batches, windows
from moescope.execution.models import TracedModel
from moescope.families import MoeCheckpoint
from moescope.progress import progress
from moescope.run import RunWriter
from moescope.statistics import FEWEST_DOCUMENTS, bootstrap_interval
from moescope.storage import leftover_name
from moescope.types import Array, Integers, Plan

COMPARED_TOKENS = 8_192  # positions whose full distributions are compared
COMPARED_BYTES = 2**29
LOGITS_PER_PASS = 2**28  # elements
FEW_PER_DOMAIN = 8  # documents: with fewer in one of two domains, 95 % intervals cover under 0.92
TASK_FILE = "judged.safetensors"  # what a pass of the judgement has found
POSITIONS = 1024  # whose distributions are in float32 at once
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Reference:
    """The original's loss per document, and its logits at the compared positions in its own dtype."""

    ARRAYS: ClassVar[tuple[str, ...]] = ("loss_D", "tokens_D", "compared_D", "domain_D")
    loss_D: Array  # sums over a document's next tokens
    tokens_D: Array  # predicted next tokens
    compared_D: Array  # positions whose distributions are compared
    domain_D: Integers
    logits: list[Tensor]  # per batch

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss_D, self)

    def to_tensors(self) -> Tensors:
        logits = {f"logits.{number}": logits for number, logits in enumerate(self.logits)}
        return {name: torch.from_numpy(getattr(self, name)) for name in self.ARRAYS} | logits

    @classmethod
    def of_tensors(cls, tensors: Tensors) -> Reference:
        arrays: dict[str, Any] = {name: tensors[name].numpy() for name in cls.ARRAYS}
        logits = [tensors[f"logits.{number}"] for number in range(len(tensors) - len(arrays))]
        return cls(**arrays, logits=logits)

    @property
    def tokens(self) -> int:
        return int(self.tokens_D.sum())

    @property
    def compared(self) -> int:
        return int(self.compared_D.sum())


@dataclass(frozen=True)
class Judged:
    """A compressed model against the reference. Divergence in nats: 0 if equal, ln 2 at most."""

    loss_D: Array
    divergence_D: Array  # sums over a document's compared positions
    reference: Reference

    def to_tensors(self) -> Tensors:
        return {name: torch.from_numpy(getattr(self, name)) for name in ("loss_D", "divergence_D")}

    @classmethod
    def of_tensors(cls, tensors: Tensors, reference: Reference) -> Judged:
        return cls(tensors["loss_D"].numpy(), tensors["divergence_D"].numpy(), reference)

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss_D, self.reference)

    @property
    def js_divergence(self) -> float:
        reference = self.reference
        parts_DGX = parts_by_domain([self.divergence_D], reference.compared_D, reference.domain_D)
        return float(mean_of_domain_means(parts_DGX.sum(0))[0])


def perplexity(loss_D: Array, reference: Reference) -> float:
    """exp of the mean over domains of the domain's mean -log p(next token)."""
    parts_DGX = parts_by_domain([loss_D], reference.tokens_D, reference.domain_D)
    loss = float(mean_of_domain_means(parts_DGX.sum(0))[0])
    return math.exp(loss) if not loss >= 700 else math.inf


def once(writer: RunWriter, task: str, make: Callable[[], Tensors]) -> Tensors:
    """Return what the task has stored; if it is not done, make and store it."""
    if task in writer.done_tasks():
        return load_sums(writer.path / "parts" / task / TASK_FILE)[0]
    made, file = make(), leftover_name(writer.path / "parts")
    save_sums(file, made, {})
    writer.flush_task(task, {}, {}, files={TASK_FILE: file})
    return made


def judge_models(
    writer: RunWriter,
    text: CalibrationText,
    moe: MoeCheckpoint,
    seed: int,
    compressed: tuple[str, Plan, Fits],
    folder: Path | None,
    controls: Sequence[tuple[str, Plan, Fits]],
    quiet: bool,
) -> dict[str, Any]:
    """Judge the original, the compressed model and the controls, one model in memory at a time.

    The compressed model lies in `folder`; a control is written, judged, and removed. A plan that keeps all
    router rows (`tie`) is not written: the original runs with its experts shared. Every pass over the text is
    a task of the run, so a killed judgement continues with the pass that it had reached.
    """
    size = text.settings.batch_size
    documents = text.held_out_documents()
    scratch = leftover_name(writer.path / "parts")
    with progress(None, 0, "tokens", quiet) as advance:

        def run_original() -> Tensors:
            sample = StateSample(seed, layers=len(moe.layers))
            calibrate(text.traced, documents, [sample], size)
            return original_outputs(text.traced, sample.states).to_tensors()

        def judge_reference() -> Tensors:
            return judge_original(text.traced, documents, size, partial(advance, "the original")).to_tensors()

        held_out = HeldOutStates.of_tensors(once(writer, "held_out", run_original))
        reference = Reference.of_tensors(once(writer, "reference", judge_reference))
        text.release()

        def load(plan: Plan, fits: Fits, written: Path | None) -> TracedModel:
            if plan.router == "tie":
                traced = text.load(text.model)
                share_experts(traced, plan, fits)
                return traced
            if written is None:  # a control
                written = scratch / "model"
                scratch.mkdir(parents=True)
                apply_plan(moe, plan, fits, written)
            return text.load(str(written))

        def judge_model(task: str, label: str, model: Callable[[], TracedModel]) -> tuple[Judged, Tensors]:
            def run() -> Tensors:
                return judge(model(), documents, reference, size, partial(advance, label)).to_tensors()

            def measure() -> Tensors:
                errors = measured_errors(model(), held_out)
                return {str(layer): torch.tensor(error).double() for layer, error in errors.items()}

            result = once(writer, f"judged-{task}", run)
            return Judged.of_tensors(result, reference), once(writer, f"errors-{task}", measure)

        judged = {}
        for number, (name, plan, fits) in enumerate([compressed, *controls]):
            model = cache(partial(load, plan, fits, None if number else folder))
            try:
                judged[name] = judge_model(str(number), name if number else "compressed", model)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    differences = judged_differences(reference, [result for result, _ in judged.values()], seed)
    results = {
        name: {**row, "errors": {layer: error.item() for layer, error in errors.items()}}
        for (name, (_, errors)), row in zip(judged.items(), differences, strict=True)
    }
    warnings = []
    if unmeasured := sorted(set(moe.layers) - set(held_out.reads)):
        warnings.append(
            f"no measured error in layers {', '.join(map(str, unmeasured))}: their blocks read more than the "
            "experts' input"
        )
    count = Counter(text.sources[document.domain].domain for document in documents)
    few = [repr(domain) for domain, judged_documents in count.items() if judged_documents < FEW_PER_DOMAIN]
    if differences[0]["loss_increase_low"] is None:
        warnings.append(
            f"no intervals of the judgement: they need {FEWEST_DOCUMENTS} held-out documents and two per "
            f"domain, not {len(documents)}; give about "
            f"{5 * FEWEST_DOCUMENTS} documents: one in five is held out"
        )
    elif few:
        warnings.append(
            f"intervals of the judgement are too short: under {FEW_PER_DOMAIN} held-out documents in "
            f"{', '.join(few)}, and every domain counts alike; give more documents"
        )
    tokens_by_domain = dict.fromkeys((source.domain for source in text.sources), 0)
    for document, tokens in zip(documents, reference.tokens_D, strict=True):
        tokens_by_domain[text.sources[document.domain].domain] += int(tokens)
    return {
        "models": results,
        "perplexity_original": reference.perplexity,
        "facts": {
            "judged_documents": len(documents),
            "judged_tokens": reference.tokens,
            "judged_tokens_by_domain": tokens_by_domain,
            "compared_tokens": reference.compared,
        },
        "warnings": warnings,
    }


def check_judgeable(traced: TracedModel, documents: Sequence[Document]) -> None:
    """Raise early where the model or the held-out text has no next token to predict."""
    if traced.two_stacks or traced.model.get_output_embeddings() is None:
        raise BadInput(
            f"{traced.name}: does not predict the next token, so it cannot be judged; give --no-judge"
        )
    if not any(len(document.ids) > 1 for document in documents):
        raise BadInput("the held-out text has no token to predict; give a longer text, or --no-judge")


def judged_differences(
    reference: Reference, judged: Sequence[Judged], seed: int
) -> list[dict[str, float | None]]:
    """Per model its numbers, differences and their 95 % intervals; the plan comes first, then its controls.

    Differences are of loss in nats per token and of divergence in nats: from the original, and of every
    control from the plan. All are means of domain means. Intervals are paired: models are compared on the
    same documents, resampled within domains.
    """
    plan, *controls = judged
    losses = [model.loss_D - reference.loss_D for model in judged]
    losses += [control.loss_D - plan.loss_D for control in controls]
    divergences = [model.divergence_D for model in judged]
    divergences += [control.divergence_D - plan.divergence_D for control in controls]
    rows: list[dict[str, float | None]] = [
        {"perplexity": model.perplexity, "js_divergence": model.js_divergence} for model in judged
    ]
    for kind, of_model, parts, tokens_D in (
        ("loss", "loss_increase", losses, reference.tokens_D),
        ("js", "js_divergence", divergences, reference.compared_D),
    ):
        parts_DGX = parts_by_domain(parts, tokens_D, reference.domain_D)
        low, high = bootstrap_interval(parts_DGX, mean_of_domain_means, reference.domain_D, seed)
        values = mean_of_domain_means(parts_DGX.sum(0))
        places = [(row, of_model) for row in rows] + [(row, f"{kind}_above_plan") for row in rows[1:]]
        for (row, name), value, lower, upper in zip(places, values, low, high, strict=True):
            row |= {name: value, f"{name}_low": lower, f"{name}_high": upper}
    return [
        {name: None if value is None or math.isnan(value) else float(value) for name, value in row.items()}
        for row in rows
    ]


def parts_by_domain(values: Sequence[Array], tokens_D: Array, domain_D: Integers) -> Array:
    """Sums of every document and, last, their number of tokens, in the place of the document's domain."""
    in_domain_DG = domain_D[:, None] == np.unique(domain_D[tokens_D > 0])
    return in_domain_DG[:, :, None] * np.stack([*values, tokens_D], -1)[:, None]


def mean_of_domain_means(sums_GX: Array) -> Array:
    """The mean over domains of sums divided by the number of tokens, which comes last."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (sums_GX[..., :-1] / sums_GX[..., -1:]).mean(-2)


def judge_original(
    traced: TracedModel,
    documents: Sequence[Document],
    batch_size: int = 8,
    advance: Advance = lambda tokens: None,
) -> Reference:
    """The original's loss on every document, and its logits at the positions to compare."""
    tokens_D = np.array([max(len(document.ids) - 1, 0) for document in documents], dtype=float)
    if not tokens_D.sum():
        raise BadInput("the held-out text has no token to predict; give a longer text, or --no-judge")
    loss_D, compared_D = np.zeros_like(tokens_D), np.zeros_like(tokens_D)
    logits = []
    for part in next_token_logits(traced, documents, batch_size):
        loss_D += part.sum_by_document(negative_log_likelihood(part.logits_NV, part.next_N), part.document_N)
        most = min(
            COMPARED_TOKENS, COMPARED_BYTES // (part.logits_NV.shape[1] * part.logits_NV.element_size())
        )
        places = part.compared(most)
        compared_D += part.sum_by_document(np.ones(len(places)), part.document_N[places])
        logits.append(part.logits_NV[torch.from_numpy(places).to(part.logits_NV.device)].cpu())
        advance(len(part.next_N))
    domain_D = np.array([document.domain for document in documents], dtype=np.int64)
    return Reference(loss_D, tokens_D, compared_D, domain_D, logits)


def judge(
    traced: TracedModel,
    documents: Sequence[Document],
    reference: Reference,
    batch_size: int = 8,
    advance: Advance = lambda tokens: None,
) -> Judged:
    """Loss of a compressed model, and Jensen-Shannon divergence of next-token distributions, per document.

    JS(p, q) = KL(p || m)/2 + KL(q || m)/2 with m = (p + q)/2 (Lin 1991).
    """
    loss_D, divergence_D = np.zeros(len(documents)), np.zeros(len(documents))
    for part, before_NV in zip(
        next_token_logits(traced, documents, batch_size), reference.logits, strict=True
    ):
        loss_D += part.sum_by_document(negative_log_likelihood(part.logits_NV, part.next_N), part.document_N)
        places = part.compared(reference.compared)
        after_NV = part.logits_NV[torch.from_numpy(places).to(part.logits_NV.device)]
        divergence_D += part.sum_by_document(js_divergence(before_NV, after_NV), part.document_N[places])
        advance(len(part.next_N))
    return Judged(loss_D, divergence_D, reference)


@dataclass(frozen=True)
class Predictions:
    """The logits of one batch at every position that has a next token, and where those positions are."""

    logits_NV: Tensor
    next_N: Tensor
    document_N: Integers  # index into the documents
    domain_N: Integers  # index into positions_G
    place_N: Integers  # number of the position among those of its domain
    documents: int
    positions_G: Integers  # of all documents of a domain

    def compared(self, most: int) -> Integers:
        """Positions whose distributions are compared: at most so many, shared evenly by the domains.

        They are spread evenly over a domain's text.
        """
        shares_G = np.array(deal(self.positions_G.tolist(), most))
        share_N = shares_G[self.domain_N]
        return np.flatnonzero(self.place_N * share_N % self.positions_G[self.domain_N] < share_N)

    def sum_by_document(self, values: Array, document: Integers) -> Array:
        return np.bincount(document, values, minlength=self.documents).astype(np.float64)


def next_token_logits(
    traced: TracedModel, documents: Sequence[Document], batch_size: int
) -> Iterator[Predictions]:
    size = max(1, min(batch_size, LOGITS_PER_PASS // (traced.vocabulary * traced.window)))
    index = {document.number: place for place, document in enumerate(documents)}
    domain_D = np.unique([document.domain for document in documents], return_inverse=True)[1]
    positions_G = np.zeros(domain_D.max(initial=0) + 1, dtype=np.int64)
    first_D = np.zeros(len(documents), dtype=np.int64)
    for place, document in enumerate(documents):
        first_D[place] = positions_G[domain_D[place]]
        positions_G[domain_D[place]] += max(len(document.ids) - 1, 0)
    parts = [Batch.of(rows, traced.padding) for rows in batches(windows(documents, traced.window), size)]
    outputs = traced.run_all([prefill_inputs(traced, batch) for batch in parts])
    for batch, output in zip(parts, outputs, strict=True):
        rows, logits = batch.rows, output.logits
        known_BL = batch.real_BL & (batch.next_BL >= 0)
        row_N, column_N = np.nonzero(known_BL)
        document_N = np.array([index[row.number] for row in rows], dtype=np.int64)[row_N]
        start_N = np.array([row.start for row in rows], dtype=np.int64)[row_N]
        known = torch.from_numpy(known_BL)
        yield Predictions(
            logits[known.to(logits.device)],
            torch.from_numpy(batch.next_BL)[known].to(logits.device),
            document_N,
            domain_D[document_N],
            first_D[document_N] + start_N + column_N,
            len(documents),
            positions_G,
        )


def negative_log_likelihood(logits_NV: Tensor, next_N: Tensor) -> Array:
    """-log p(next token) at every position."""
    parts = zip(torch.split(logits_NV, POSITIONS), torch.split(next_N, POSITIONS), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(logits.float(), after, reduction="none").double().cpu()
        for logits, after in parts
    ]
    return torch.cat(losses).numpy() if losses else np.zeros(0)


def js_divergence(before_NV: Tensor, after_NV: Tensor) -> Array:
    """JS between both softmaxes at every position."""
    divergences = [np.zeros(0)]
    parts = zip(torch.split(before_NV, POSITIONS), torch.split(after_NV, POSITIONS), strict=True)
    for first, second in parts:
        if len(first):
            p, q = (part.to(second.device).double().log_softmax(-1) for part in (first, second))
            m = torch.logaddexp(p, q) - math.log(2)
            both = (p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)
            divergences.append(0.5 * both.cpu().numpy())
    return np.concatenate(divergences)
