"""Documents become windows of token ids, and windows become batches.

Streamed, so that memory does not grow with the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from moescope.statistics import BUCKETS
from moescope.types import Integers, Tokens

WINDOW = 4096  # tokens a model reads at once, at most; longer documents are cut, and each part starts afresh
TOKENS_A_PASS = 16_384  # rows x length of a batch: bounds activations whatever the batch size
SORTED_AT_ONCE = 16  # batches whose windows are sorted by length together, so that little is padded


@dataclass(frozen=True)
class Document:
    """A document as the model reads it."""

    number: int
    domain: int
    ids: Integers


@dataclass(frozen=True)
class Window:
    """A stretch of a document.

    Bucket and draw depend on the document's content alone, not on where it stood.
    """

    number: int
    domain: int
    start: int
    ids: Integers
    next_id: int  # the token after the last, -1 at the document's end
    document: int  # 63 bits of the whole document's content
    draw: float  # uniform in [0, 1): windows below a threshold are the vocabulary's sample

    @property
    def bucket(self) -> int:
        return self.document % BUCKETS


def fingerprint(ids: Integers, start: int = 0) -> int:
    """64 bits that depend on the ids (and the window's start) and nothing else, alike on every machine."""
    packed = np.ascontiguousarray(ids, dtype="<i8").tobytes() + start.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def windows(documents: Iterable[Document], length: int) -> Iterator[Window]:
    for document in documents:
        whole = fingerprint(document.ids) >> 1
        for start in range(0, len(document.ids), length):
            ids = document.ids[start : start + length]
            after = int(document.ids[start + length]) if start + length < len(document.ids) else -1
            draw = fingerprint(ids, start) / 2**64
            yield Window(document.number, document.domain, start, ids, after, whole, draw)


def batches(parts: Iterable[Window], batch_size: int) -> Iterator[list[Window]]:
    """Windows of like length together, at most `batch_size` of them and 16,384 tokens with padding."""
    waiting: list[Window] = []
    for window in parts:
        waiting.append(window)
        if len(waiting) == batch_size * SORTED_AT_ONCE:
            yield from cut(waiting, batch_size)
            waiting = []
    yield from cut(waiting, batch_size)


def cut(waiting: list[Window], batch_size: int) -> Iterator[list[Window]]:
    rows: list[Window] = []
    for window in sorted(waiting, key=lambda window: -len(window.ids)):
        longest = len(rows[0].ids) if rows else len(window.ids)
        if rows and (len(rows) == batch_size or (len(rows) + 1) * longest > TOKENS_A_PASS):
            yield rows
            rows = []
        rows.append(window)
    if rows:
        yield rows


@dataclass(frozen=True)
class Batch:
    """Windows side by side, padded on the right: causal models then never see the padding."""

    rows: list[Window]
    ids_BL: Integers
    next_BL: Integers  # the token after each, -1 where there is none
    real_BL: np.ndarray

    @classmethod
    def of(cls, rows: list[Window], padding: int) -> Batch:
        length = max(len(row.ids) for row in rows)
        ids = np.full((len(rows), length), padding, dtype=np.int64)
        after = np.full((len(rows), length), -1, dtype=np.int64)
        real = np.zeros((len(rows), length), dtype=bool)
        for index, row in enumerate(rows):
            n = len(row.ids)
            ids[index, :n], real[index, :n] = row.ids, True
            after[index, : n - 1], after[index, n - 1] = row.ids[1:], row.next_id
        return cls(rows, ids, after, real)

    def tokens(self, device: str, phase: str, start: int, stop: int) -> Tokens:
        """The columns from `start` to `stop`, as capture and tally want them."""
        length = stop - start

        def each(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=device).repeat_interleave(length)

        return Tokens(
            len(self.rows),
            torch.from_numpy(self.ids_BL[:, start:stop].reshape(-1)).to(device),
            torch.from_numpy(self.real_BL[:, start:stop].reshape(-1)).to(device),
            each([row.number for row in self.rows]),
            each([row.start for row in self.rows])
            + torch.arange(start, stop, device=device).repeat(len(self.rows)),
            each([row.domain for row in self.rows]),
            each([row.bucket for row in self.rows]),
            phase,
            continues=start > 0,
        )
