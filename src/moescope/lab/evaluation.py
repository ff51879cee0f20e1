"""What a model loses on held-out text, by domain and by document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from moescope.decoder.model import LabModel
from moescope.decoder.vocabulary import Vocabulary
from moescope.lab.batches import IGNORED, Batch, Ids, TokenIds, TokenRows
from moescope.statistics import TAILS, resampled_sums
from moescope.tables import FEWEST_DOCUMENTS
from moescope.types import Array, Integers

DOCUMENTS = 40  # per domain at most
WINDOWS = 4  # per document at most, evenly spaced


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats over all targets, and over each domain's."""

    step: int
    loss: float
    domains: dict[str, float]
    published: float | None = None  # padding counts as targets, as in SoME's published losses; None without


def evaluate(
    model: nn.Module, rows: TokenRows, step: int, batch_size: int, device: str, dtype: str
) -> Evaluation:
    """Return the loss on these rows in evaluation mode; the previous mode is restored."""
    starts = range(0, rows.rows, batch_size)
    batches = (rows.batch(np.arange(first, min(first + batch_size, rows.rows))) for first in starts)
    padded = (
        batch
        if batch.mask_BL.all()
        else replace(batch, targets_BL=np.where(batch.mask_BL, batch.targets_BL, rows.pad))
        for batch in batches
    )
    sums_D, counts_D, total, places = summed_losses(model, padded, len(rows.domains), device, dtype)
    means = zip(rows.domains, sums_D, counts_D, strict=True)
    by_domain = {name: float(loss / targets) for name, loss, targets in means if targets}
    published = total / places if places > counts_D.sum() else None
    return Evaluation(step, float(sums_D.sum() / counts_D.sum()), by_domain, published)


@torch.no_grad()
def summed_losses(
    model: nn.Module, batches: Iterable[Batch], groups: int, device: str, dtype: str
) -> tuple[Array, Integers, float, int]:
    """Return losses and targets summed by `domain_B`, and over all places, padding included.

    In evaluation mode; the previous mode is restored.
    """
    before = model.training
    model.eval()
    sums_G, counts_G, total, places = np.zeros(groups), np.zeros(groups, dtype=np.int64), 0.0, 0
    for batch in batches:
        losses_BL = token_losses(model, batch.ids_BL, batch.mask_BL, batch.targets_BL, device, dtype)
        np.add.at(sums_G, batch.domain_B, np.where(batch.mask_BL, losses_BL, 0).sum(1))
        np.add.at(counts_G, batch.domain_B, batch.mask_BL.sum(1))
        total, places = total + losses_BL.sum(), places + losses_BL.size
    model.train(before)
    return sums_G, counts_G, float(total), places


def token_losses(model: nn.Module, ids: Ids, mask: Any, targets: Ids, device: str, dtype: str) -> Array:
    """Return the loss of every target in nats, [B, L], of a lab model or one of transformers."""
    ids_BL, mask_BL, targets_BL = (torch.from_numpy(part).to(device) for part in (ids, mask, targets))
    with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16"):
        if isinstance(model, LabModel):
            losses = model(ids_BL, mask_BL=mask_BL, targets_BL=targets_BL).token_losses_BL
        else:
            logits = model(input_ids=ids_BL, attention_mask=mask_BL.long(), use_cache=False).logits
            flat = cross_entropy(logits.float().flatten(0, 1), targets_BL.flatten(), reduction="none")
            losses = flat.view_as(targets_BL)
    losses_BL: Array = losses.double().cpu().numpy()
    return losses_BL


# --- documents


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of one document, including the last target."""

    document: int
    tokens: Ids


@dataclass(frozen=True)
class DocumentSample:
    """The first documents of each domain in the corpus's order, which is by hash: alike for every model."""

    domains: tuple[str, ...]  # of each document
    windows: tuple[Window, ...]
    length: int
    pad: int

    @classmethod
    def of(
        cls, texts: dict[str, list[str]], vocabulary: Vocabulary, length: int, per_document: int = WINDOWS
    ) -> DocumentSample:
        ids = {domain: TokenIds.of(documents[:DOCUMENTS], vocabulary) for domain, documents in texts.items()}
        return cls.of_ids(ids, vocabulary.pad, length, per_document)

    @classmethod
    def of_ids(
        cls, ids: dict[str, TokenIds], pad: int, length: int, per_document: int = WINDOWS
    ) -> DocumentSample:
        domains: list[str] = []
        windows: list[Window] = []
        for domain, documents in ids.items():
            for begin, end in list(zip(documents.starts, documents.ends, strict=True))[:DOCUMENTS]:
                tokens = documents.stream[begin:end].astype(np.int64)
                if len(tokens) > 1:
                    windows += [Window(len(domains), part) for part in spread(tokens, length, per_document)]
                    domains.append(domain)
        return cls(tuple(domains), tuple(windows), length, pad)


def spread(tokens: Ids, length: int, most: int) -> Iterator[Ids]:
    """Yield at most `most` evenly spaced windows of `length` tokens plus the next token; at least one."""
    available = max((len(tokens) - 1) // length, 1)
    for at in sorted({round(place) for place in np.linspace(0, available - 1, min(available, most))}):
        yield tokens[at * length : (at + 1) * length + 1]


def document_losses(
    model: nn.Module, sample: DocumentSample, batch_size: int, device: str, dtype: str = "float32"
) -> pd.DataFrame:
    """Return a table of document, domain, tokens, loss: the mean over its tokens, each window on its own."""
    batches, number = window_batches(sample, batch_size), len(sample.domains)
    sums, counts, *_ = summed_losses(model, batches, number, device, dtype)
    columns = {"document": range(number), "domain": sample.domains, "tokens": counts, "loss": sums / counts}
    return pd.DataFrame(columns)


def window_batches(sample: DocumentSample, batch_size: int) -> Iterator[Batch]:
    """Yield padded windows; `domain_B` is the document of each."""
    for first in range(0, len(sample.windows), batch_size):
        windows = sample.windows[first : first + batch_size]
        ids = np.full((len(windows), sample.length), sample.pad, dtype=np.int64)
        targets = np.full_like(ids, IGNORED)
        for row, window in enumerate(windows):
            size = len(window.tokens) - 1
            ids[row, :size], targets[row, :size] = window.tokens[:-1], window.tokens[1:]
        yield Batch(ids, targets, targets != IGNORED, np.array([window.document for window in windows]))


def mean_loss(documents: pd.DataFrame) -> float:
    """Return the mean over all tokens."""
    return float((documents["tokens"] * documents["loss"]).sum() / documents["tokens"].sum())


def evaluation_noise(documents: pd.DataFrame, seed: int = 0) -> tuple[float, float, float] | None:
    """Return the 95 % interval and standard deviation of that mean under resampling within domains.

    Documents are drawn with replacement; None below 20 of them. It covers the choice of text for this one
    model, not other seeds.
    """
    if len(documents) < FEWEST_DOCUMENTS:
        return None
    size = documents["tokens"].to_numpy(float)
    strata = np.unique(documents["domain"].to_numpy(str), return_inverse=True)[1]
    parts = [size * documents["loss"].to_numpy(float), size]
    losses, tokens = resampled_sums(parts, np.random.default_rng(seed), strata=strata)
    low, high = np.quantile(losses / tokens, TAILS)
    return float(low), float(high), float((losses / tokens).std())
