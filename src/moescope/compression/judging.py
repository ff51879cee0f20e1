"""Perplexity and next-token divergence of compressed models on held-out text, against the original."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moescope.compression.applying import apply_plan
from moescope.compression.calibration import StateSample, calibrate
from moescope.compression.calibration_text import CalibrationText
from moescope.compression.damage import measured_errors, original_outputs
from moescope.compression.plan import Fits
from moescope.errors import BadInput
from moescope.execution.documents import Batch, Document, batches, windows
from moescope.execution.models import TracedModel
from moescope.families import MoeCheckpoint
from moescope.progress import progress
from moescope.types import Plan

COMPARED_TOKENS = 8_192  # positions whose full distributions are compared
COMPARED_BYTES = 2**29
LOGITS_PER_PASS = 2**28  # elements
POSITIONS = 1024  # whose distributions are in float32 at once
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Reference:
    """The original's perplexity, and its logits at the first positions in its own dtype."""

    perplexity: float
    tokens: int  # predicted next tokens
    logits: list[Tensor]  # per batch
    compared: int


@dataclass(frozen=True)
class Judged:
    """A compressed model against the reference. Divergence in nats: 0 if equal, ln 2 at most."""

    perplexity: float
    js_divergence: float


def judge_models(
    text: CalibrationText,
    moe: MoeCheckpoint,
    seed: int,
    compressed: tuple[str, Path],
    controls: Sequence[tuple[str, Plan, Fits]],
    scratch: Path,
    quiet: bool,
) -> dict[str, Any]:
    """Judge the original, the compressed model and the controls, one model in memory at a time.

    A control is written into `scratch`, judged, and removed.
    """
    size = text.settings.batch_size
    documents = text.held_out_documents()
    with progress(None, 0, "tokens", quiet) as advance:
        sample = StateSample(seed, layers=len(moe.layers))
        calibrate(text.traced, documents, [sample], size)
        held_out = original_outputs(text.traced, sample.states)
        reference = judge_original(text.traced, documents, size, partial(advance, "the original"))
        text.release()

        def judge_folder(label: str, folder: Path) -> dict[str, Any]:
            traced = text.load(str(folder))
            judged = judge(traced, documents, reference, size, partial(advance, label))
            errors = measured_errors(traced, held_out)
            return {"perplexity": judged.perplexity, "js_divergence": judged.js_divergence, "errors": errors}

        name, folder = compressed
        results = {name: judge_folder("compressed", folder)}
        for name, plan, fits in controls:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            try:
                apply_plan(moe, plan, fits, scratch / "model")
                results[name] = judge_folder(name, scratch / "model")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    unmeasured = sorted(set(sample.states) - set(held_out.reads))
    warning = (
        f"no measured error in layers {', '.join(map(str, unmeasured))}: their blocks read more than the "
        "experts' input"
    )
    return {
        "models": results,
        "perplexity_original": reference.perplexity,
        "facts": {
            "judged_documents": len(documents),
            "judged_tokens": reference.tokens,
            "compared_tokens": reference.compared,
        },
        "warnings": [warning] if unmeasured else [],
    }


def check_judgeable(traced: TracedModel, documents: Sequence[Document]) -> None:
    """Raise early where the model or the held-out text has no next token to predict."""
    if traced.two_stacks or traced.model.get_output_embeddings() is None:
        raise BadInput(
            f"{traced.name}: does not predict the next token, so it cannot be judged; give --no-judge"
        )
    if not any(len(document.ids) > 1 for document in documents):
        raise BadInput("the held-out text has no token to predict; give a longer text, or --no-judge")


def judge_original(
    traced: TracedModel,
    documents: Sequence[Document],
    batch_size: int = 8,
    advance: Advance = lambda tokens: None,
) -> Reference:
    """The original's perplexity exp(-mean log p(next token)), and its logits at the positions to compare."""
    loss, tokens, logits, compared = 0.0, 0, [], 0
    for logits_NV, next_N in next_token_logits(traced, documents, batch_size):
        loss += negative_log_likelihood(logits_NV, next_N)
        tokens += len(next_N)
        most = min(COMPARED_TOKENS, COMPARED_BYTES // (logits_NV.shape[1] * logits_NV.element_size()))
        logits.append(logits_NV[: max(0, most - compared)].cpu())
        compared += len(logits[-1])
        advance(len(next_N))
    if not tokens:
        raise BadInput("the held-out text has no token to predict; give a longer text, or --no-judge")
    return Reference(math.exp(loss / tokens), tokens, logits, compared)


def judge(
    traced: TracedModel,
    documents: Sequence[Document],
    reference: Reference,
    batch_size: int = 8,
    advance: Advance = lambda tokens: None,
) -> Judged:
    """Perplexity of a compressed model, and mean Jensen-Shannon divergence of next-token distributions.

    JS(p, q) = KL(p || m)/2 + KL(q || m)/2 with m = (p + q)/2 (Lin 1991).
    """
    loss, tokens, divergence = 0.0, 0, 0.0
    for number, (logits_NV, next_N) in enumerate(next_token_logits(traced, documents, batch_size)):
        loss += negative_log_likelihood(logits_NV, next_N)
        tokens += len(next_N)
        before_NV = reference.logits[number]
        divergence += js_divergence(before_NV, logits_NV[: len(before_NV)])
        advance(len(next_N))
    perplexity = math.exp(loss / tokens) if loss / tokens < 700 else math.inf
    return Judged(perplexity, divergence / max(reference.compared, 1))


def next_token_logits(
    traced: TracedModel, documents: Sequence[Document], batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per batch: logits [N, V] at every position that has a next token, and those tokens."""
    size = max(1, min(batch_size, LOGITS_PER_PASS // (traced.vocabulary * traced.window)))
    for rows in batches(windows(documents, traced.window), size):
        batch = Batch.of(rows, traced.padding)
        known = torch.from_numpy(batch.real_BL & (batch.next_BL >= 0))
        inputs = {
            "input_ids": torch.from_numpy(batch.ids_BL).to(traced.device),
            "attention_mask": torch.from_numpy(batch.real_BL.astype(np.int64)).to(traced.device),
        }
        with torch.no_grad():
            logits = traced.model(**inputs, use_cache=False).logits
        yield logits[known.to(logits.device)], torch.from_numpy(batch.next_BL)[known].to(logits.device)


def negative_log_likelihood(logits_NV: Tensor, next_N: Tensor) -> float:
    parts = zip(torch.split(logits_NV, POSITIONS), torch.split(next_N, POSITIONS), strict=True)
    return sum(
        float(torch.nn.functional.cross_entropy(logits.float(), after, reduction="sum").double())
        for logits, after in parts
    )


def js_divergence(before_NV: Tensor, after_NV: Tensor) -> float:
    """The sum over positions of JS between both softmaxes."""
    total = 0.0
    parts = zip(torch.split(before_NV, POSITIONS), torch.split(after_NV, POSITIONS), strict=True)
    for first, second in parts:
        if len(first):
            p, q = (part.to(second.device).double().log_softmax(-1) for part in (first, second))
            m = torch.logaddexp(p, q) - math.log(2)
            total += 0.5 * float((p.exp() * (p - m)).sum() + (q.exp() * (q - m)).sum())
    return total
