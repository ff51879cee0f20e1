"""What a model loses on held-out text, by domain and by document, and how stable its last routings are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

from moescope.decoder.model import LabModel
from moescope.decoder.saving import load_model
from moescope.decoder.vocabulary import Vocabulary
from moescope.lab.batches import IGNORED, Ids, TokenIds, TokenRows
from moescope.routing.stability import layer_stability
from moescope.types import Array, Integers, Routing

if TYPE_CHECKING:
    import pandas as pd

DOCUMENTS = 40  # per domain at most
WINDOWS = 4  # per document at most, evenly spaced
RESAMPLES = 2000
FEWEST = 20  # documents below which there is no interval
CHECKPOINTS = 4  # last ones, compared for stability
STABILITY_TOKENS = 4096  # of text, about


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats over all targets, and over each domain's."""

    step: int
    loss: float
    domains: dict[str, float]
    published: float | None = (
        None  # with padding as targets, as in SoME's published losses; None without pads
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: TokenRows, step: int, batch_size: int, device: str, dtype: str
) -> Evaluation:
    """Return the loss on these rows in evaluation mode; the previous mode is restored."""
    before = model.training
    model.eval()
    sums_D, counts_D = np.zeros(len(rows.domains)), np.zeros(len(rows.domains))
    padded_sum, padded_count = 0.0, 0
    for first in range(0, rows.rows, batch_size):
        batch = rows.batch(np.arange(first, min(first + batch_size, rows.rows)))
        targets_BL = batch.targets_BL
        if not batch.mask_BL.all():
            targets_BL = np.where(targets_BL == IGNORED, rows.pad, targets_BL)
        losses_BL = token_losses(model, batch.ids_BL, batch.mask_BL, targets_BL, device, dtype)
        padded_sum, padded_count = padded_sum + losses_BL.sum(), padded_count + losses_BL.size
        for domain in range(len(rows.domains)):
            counted = (batch.domain_B == domain)[:, None] & batch.mask_BL
            sums_D[domain] += losses_BL[counted].sum()
            counts_D[domain] += counted.sum()
    model.train(before)
    by_domain = {
        name: float(sums_D[at] / counts_D[at]) for at, name in enumerate(rows.domains) if counts_D[at]
    }
    published = float(padded_sum / padded_count) if padded_count > counts_D.sum() else None
    return Evaluation(step, float(sums_D.sum() / counts_D.sum()), by_domain, published)


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


@torch.no_grad()
def document_losses(
    model: nn.Module, sample: DocumentSample, batch_size: int, device: str, dtype: str = "float32"
) -> pd.DataFrame:
    """Return a table of document, domain, tokens, loss: the mean over its tokens, each window on its own."""
    import pandas as pd

    before = model.training
    model.eval()
    sums, counts = np.zeros(len(sample.domains)), np.zeros(len(sample.domains), dtype=np.int64)
    for batch in window_batches(sample, batch_size):
        losses = token_losses(model, batch.ids_BL, batch.mask_BL, batch.targets_BL, device, dtype)
        np.add.at(sums, batch.document_B, np.where(batch.mask_BL, losses, 0).sum(1))
        np.add.at(counts, batch.document_B, batch.mask_BL.sum(1))
    model.train(before)
    return pd.DataFrame(
        {"document": range(len(counts)), "domain": sample.domains, "tokens": counts, "loss": sums / counts}
    )


@dataclass(frozen=True)
class WindowBatch:
    """Padded windows; `targets_BL` is the next token or IGNORED."""

    ids_BL: Ids
    targets_BL: Ids
    mask_BL: NDArray[np.bool_]
    document_B: Ids


def window_batches(sample: DocumentSample, batch_size: int) -> Iterator[WindowBatch]:
    for first in range(0, len(sample.windows), batch_size):
        windows = sample.windows[first : first + batch_size]
        ids = np.full((len(windows), sample.length), sample.pad, dtype=np.int64)
        targets = np.full_like(ids, IGNORED)
        for row, window in enumerate(windows):
            size = len(window.tokens) - 1
            ids[row, :size], targets[row, :size] = window.tokens[:-1], window.tokens[1:]
        document_B = np.array([window.document for window in windows])
        yield WindowBatch(ids, targets, targets != IGNORED, document_B)


def mean_loss(documents: pd.DataFrame) -> float:
    """Return the mean over all tokens."""
    return float((documents["tokens"] * documents["loss"]).sum() / documents["tokens"].sum())


def evaluation_noise(documents: pd.DataFrame, seed: int = 0) -> tuple[float, float, float] | None:
    """Return the 95 % interval and standard deviation of that mean under resampling within domains.

    Documents are drawn with replacement; None below 20 of them. It covers the choice of text for this one
    model, not other seeds.
    """
    if len(documents) < FEWEST:
        return None
    draw = np.random.default_rng(seed)
    tokens, losses = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for _, rows in documents.groupby("domain", sort=True):
        size = rows["tokens"].to_numpy(float)
        times = draw.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), RESAMPLES)
        tokens += times @ size
        losses += times @ (size * rows["loss"].to_numpy(float))
    means = losses / tokens
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high), float(means.std())


# --- stability over checkpoints


@dataclass(frozen=True)
class Stability:
    """Means over layers; `consistency` and `kendall_tau` of consecutive checkpoints, `usage_sigma` of all."""

    consistency: float
    consistency_chance: float  # of independent choices with the same loads
    usage_sigma: float
    kendall_tau: float  # NaN where all usages are equal


def checkpoint_stability(
    checkpoints: Sequence[tuple[int, Path]], rows: TokenRows, device: str
) -> Stability | None:
    """Compare the last few (step, folder); None for a single one, or where nothing is routed."""
    last = sorted(checkpoints)[-CHECKPOINTS:]
    if len(last) < 2:
        return None
    chosen: dict[int, list[Integers]] = {}
    n_experts: list[int] = []
    for step, folder in last:
        layers = chosen_experts(folder, rows, device)
        chosen[step], n_experts = [layer for layer, _ in layers], [number for _, number in layers]
    if max(n_experts) < 2:
        return None
    means = []
    steps = [step for step, _ in last]
    for layer, number in enumerate(n_experts):
        pairs = {
            (row["step_a"], row["step_b"]): row
            for row in layer_stability({step: chosen[step][layer] for step in steps}, number)
        }
        near = [pairs[pair] for pair in pairwise(steps)]
        taus = [row["kendall_tau"] for row in near if np.isfinite(row["kendall_tau"])]
        tau = float(np.mean(taus)) if taus else np.nan
        same, chance = (
            float(np.mean([row[f"routing_consistency{kind}"] for row in near])) for kind in ("", "_chance")
        )
        means.append((same, chance, pairs[steps[0], steps[-1]]["usage_sigma"], tau))
    values = np.array(means)
    tau = float(np.nanmean(values[:, 3])) if np.isfinite(values[:, 3]).any() else np.nan
    same, chance, sigma = (float(value) for value in values[:, :3].mean(0))
    return Stability(same, chance, sigma, tau)


@torch.no_grad()
def chosen_experts(folder: Path, rows: TokenRows, device: str) -> list[tuple[Integers, int]]:
    """Return every layer's chosen experts for real tokens of the rows, and its number of experts."""
    model, _ = load_model(folder, device)
    numbers = np.unique(
        np.linspace(0, rows.rows - 1, min(rows.rows, max(STABILITY_TOKENS // rows.length, 1))).astype(
            np.int64
        )
    )
    batch = rows.batch(numbers)
    layers: list[tuple[Integers, int]] = []
    real_T = torch.from_numpy(batch.mask_BL.reshape(-1)).to(device)

    def consume(routing: Routing) -> None:
        layers.append((routing.chosen_TK[real_T].cpu().numpy().astype(np.int64), routing.n_experts))

    ids_BL, mask_BL = (torch.from_numpy(part).to(device) for part in (batch.ids_BL, batch.mask_BL))
    model(ids_BL, mask_BL, consume=consume)
    return layers
