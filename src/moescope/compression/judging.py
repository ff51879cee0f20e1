"""What a compressed model says to text it was not fitted to, beside what the original says.

Perplexity and next-token divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.execution.documents import Batch, Document, batches, fingerprint, windows
from moescope.execution.models import TracedModel

ONE_IN = 5  # documents: one is held out, the others calibrate
JUDGED_TOKENS = 32_768
COMPARED_TOKENS = 8_192  # whose whole distributions are compared
COMPARED_BYTES = 2**29
LOGITS_A_PASS = 2**28  # elements
POSITIONS = 1024  # whose distributions are in float32 at once


def is_held_out(document: Document) -> bool:
    """One document in five, by its content alone: the same ones in every run over the same text."""
    return (fingerprint(document.ids) >> 16) % ONE_IN == 0


def halves(document: Document) -> tuple[Document, Document]:
    """A document's first four fifths and its rest: for a text of one document."""
    at = len(document.ids) - max(1, len(document.ids) // ONE_IN)
    return (
        Document(document.number, document.domain, document.ids[:at]),
        Document(document.number, document.domain, document.ids[at:]),
    )


def judged_part(documents: Iterable[Document], most: int = JUDGED_TOKENS) -> list[Document]:
    """The first documents that together have so many tokens; the last is cut."""
    found: list[Document] = []
    for document in documents:
        if most <= 0:
            break
        found.append(Document(document.number, document.domain, document.ids[:most]))
        most -= len(document.ids)
    return found


@dataclass(frozen=True)
class Reference:
    """What the original said.

    Its perplexity, and its logits at the first positions, in the dtype it gave them in.
    """

    perplexity: float
    tokens: int  # next tokens that were predicted
    logits: list[Tensor]  # a batch's, one after the other
    compared: int


@dataclass(frozen=True)
class Judged:
    """A compressed model beside the reference. Divergence in nats: 0 for the same words, ln 2 at most."""

    perplexity: float
    js_divergence: float


def next_token_logits(
    traced: TracedModel, documents: Sequence[Document], batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch by batch: logits [N, V] at every position that has a next token, and those tokens."""
    size = max(1, min(batch_size, LOGITS_A_PASS // (traced.vocabulary * traced.window)))
    for rows in batches(windows(documents, traced.window), size):
        batch = Batch.of(rows, traced.padding)
        known = torch.from_numpy(batch.real_BL & (batch.next_BL >= 0))
        given = {
            "input_ids": torch.from_numpy(batch.ids_BL).to(traced.device),
            "attention_mask": torch.from_numpy(batch.real_BL.astype(np.int64)).to(traced.device),
        }
        with torch.no_grad():
            logits = traced.model(**given, use_cache=False).logits
        yield logits[known.to(logits.device)], torch.from_numpy(batch.next_BL)[known].to(logits.device)


def check_judgeable(traced: TracedModel) -> None:
    if traced.two_stacks or traced.model.get_output_embeddings() is None:
        raise BadInput(
            f"{traced.name}: not a model that predicts the next token, so it cannot be judged; "
            "give --no-judge"
        )


def judge_original(
    traced: TracedModel,
    documents: Sequence[Document],
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Reference:
    """The original's perplexity exp(-mean log p(next token)).

    And its logits for as many positions as may be compared.
    """
    lost, tokens, kept, compared = 0.0, 0, [], 0
    for logits_NV, after_N in next_token_logits(traced, documents, batch_size):
        lost += negative_log(logits_NV, after_N)
        tokens += len(after_N)
        most = min(COMPARED_TOKENS, COMPARED_BYTES // (logits_NV.shape[1] * logits_NV.element_size()))
        kept.append(logits_NV[: max(0, most - compared)].cpu())
        compared += len(kept[-1])
        advance(len(after_N))
    if not tokens:
        raise BadInput("the held-out text has no token to predict; give a longer text, or --no-judge")
    return Reference(math.exp(lost / tokens), tokens, kept, compared)


def judge(
    traced: TracedModel,
    documents: Sequence[Document],
    reference: Reference,
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Judged:
    """The same documents through a compressed model: perplexity, and the mean Jensen-Shannon divergence of
    next-token distributions

    JS(p, q) = KL(p || m)/2 + KL(q || m)/2 with m = (p + q)/2 (Lin 1991).
    """
    lost, tokens, apart = 0.0, 0, 0.0
    for number, (logits_NV, after_N) in enumerate(next_token_logits(traced, documents, batch_size)):
        lost += negative_log(logits_NV, after_N)
        tokens += len(after_N)
        before_NV = reference.logits[number]
        apart += divergence(before_NV, logits_NV[: len(before_NV)])
        advance(len(after_N))
    return Judged(
        math.exp(lost / tokens) if lost / tokens < 700 else math.inf, apart / max(reference.compared, 1)
    )


def negative_log(logits_NV: Tensor, after_N: Tensor) -> float:
    parts = zip(torch.split(logits_NV, POSITIONS), torch.split(after_N, POSITIONS), strict=True)
    return sum(
        float(torch.nn.functional.cross_entropy(logits.float(), after, reduction="sum").double())
        for logits, after in parts
    )


def divergence(before_NV: Tensor, after_NV: Tensor) -> float:
    """The sum over positions of JS between both softmaxes."""
    total = 0.0
    for first, second in zip(
        torch.split(before_NV, POSITIONS), torch.split(after_NV, POSITIONS), strict=True
    ):
        if not len(first):
            continue
        p, q = (part.to(second.device).double().log_softmax(-1) for part in (first, second))
        m = torch.logaddexp(p, q) - math.log(2)
        total += 0.5 * float((p.exp() * (p - m)).sum() + (q.exp() * (q - m)).sum())
    return total
