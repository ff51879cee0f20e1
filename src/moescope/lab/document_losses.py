"""The loss of every validation document under a finished model.

And how far their choice alone would move the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moescope.decoder.model import LabModel
from moescope.decoder.vocabulary import Vocabulary
from moescope.lab.batches import IGNORED

if TYPE_CHECKING:
    import pandas as pd

DOCUMENTS = 40  # of each domain at most
WINDOWS = 4  # of each document at most, spread evenly over it
RESAMPLES = 2000
FEWEST = 20  # documents below which an interval would say nothing
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """A stretch of one document, the token to be predicted last included."""

    document: int
    tokens: Ids


@dataclass(frozen=True)
class DocumentSample:
    """The same documents for every model.

    The first of each domain, in the corpus's own order, which is that of a hash.
    """

    domains: tuple[str, ...]  # of each document
    pieces: tuple[Piece, ...]
    length: int
    pad: int

    @classmethod
    def of(
        cls, texts: dict[str, list[str]], vocabulary: Vocabulary, length: int, windows: int = WINDOWS
    ) -> DocumentSample:
        domains: list[str] = []
        pieces: list[Piece] = []
        for domain, documents in texts.items():
            for text in documents[:DOCUMENTS]:
                tokens = np.append(vocabulary.encode(text), vocabulary.end)
                if len(tokens) > 1:
                    pieces += [Piece(len(domains), part) for part in spread(tokens, length, windows)]
                    domains.append(domain)
        return cls(tuple(domains), tuple(pieces), length, vocabulary.pad)


def spread(tokens: Ids, length: int, most: int) -> Iterator[Ids]:
    """At most so many stretches of `length` tokens with the one after, at even distances.

    A short document is one stretch.
    """
    whole = max((len(tokens) - 1) // length, 1)
    for at in sorted({round(place) for place in np.linspace(0, whole - 1, min(whole, most))}):
        yield tokens[at * length : (at + 1) * length + 1]


@torch.no_grad()
def document_losses(
    model: LabModel, sample: DocumentSample, batch_size: int, device: str, dtype: str = "float32"
) -> pd.DataFrame:
    """document, domain, tokens, loss.

    The mean over a document's tokens in nats, each stretch read without what came before it.
    """
    import pandas as pd

    before = model.training
    model.eval()
    sums, counts = np.zeros(len(sample.domains)), np.zeros(len(sample.domains), dtype=np.int64)
    for first in range(0, len(sample.pieces), batch_size):
        pieces = sample.pieces[first : first + batch_size]
        ids = np.full((len(pieces), sample.length), sample.pad, dtype=np.int64)
        targets = np.full_like(ids, IGNORED)
        for row, piece in enumerate(pieces):
            size = len(piece.tokens) - 1
            ids[row, :size], targets[row, :size] = piece.tokens[:-1], piece.tokens[1:]
        mask = targets != IGNORED
        moved = (torch.from_numpy(part).to(device) for part in (ids, mask, targets))
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16"):
            ids_BL, mask_BL, targets_BL = moved
            losses = (
                model(ids_BL, mask_BL=mask_BL, targets_BL=targets_BL).token_losses_BL.double().cpu().numpy()
            )
        of_row = np.array([piece.document for piece in pieces])
        np.add.at(sums, of_row, np.where(mask, losses, 0).sum(1))
        np.add.at(counts, of_row, mask.sum(1))
    model.train(before)
    return pd.DataFrame(
        {"document": range(len(counts)), "domain": sample.domains, "tokens": counts, "loss": sums / counts}
    )


def mean_loss(documents: pd.DataFrame) -> float:
    """Over all tokens alike."""
    return float((documents["tokens"] * documents["loss"]).sum() / documents["tokens"].sum())


def evaluation_noise(documents: pd.DataFrame, seed: int = 0) -> tuple[float, float] | None:
    """The middle 95 % of that mean when documents are drawn anew with replacement, as many of each domain as
    there are.

    None below 20 documents. It tells what another choice of text would do to this one model, and nothing of
    other seeds.
    """
    if len(documents) < FEWEST:
        return None
    draw = np.random.default_rng(seed)
    tokens, losses = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for _, own in documents.groupby("domain", sort=True):
        size = own["tokens"].to_numpy(float)
        times = draw.multinomial(len(own), np.full(len(own), 1 / len(own)), RESAMPLES)
        tokens += times @ size
        losses += times @ (size * own["loss"].to_numpy(float))
    low, high = np.quantile(losses / tokens, [0.025, 0.975])
    return float(low), float(high)
