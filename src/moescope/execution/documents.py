"""Documents -> windows of token ids -> batches, streamed so that memory does not grow with the text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moescope.errors import BadInput
from moescope.execution.budget import Prefix, spread_tokens
from moescope.execution.model_names import check_ids
from moescope.execution.texts import Content, Source, is_ids
from moescope.statistics import BUCKETS
from moescope.types import Integers, Tokens

if TYPE_CHECKING:
    from moescope.execution.models import TracedModel

WINDOW = 4096  # tokens per window at most; longer documents are cut, and each part starts without context
TOKENS_PER_PASS = 16_384  # rows x length of a batch: bounds activations whatever the batch size
SORTED_BATCHES = 16  # batches whose windows are sorted by length together, so that padding is rare
MARGIN = 64  # tokens after a prefix that are read too, since a cut changes how the text before it is split


@dataclass(frozen=True)
class Document:
    """A document as token ids."""

    number: int
    domain: int
    ids: Integers


@dataclass(frozen=True)
class Window:
    """A part of a document. Bucket and draw depend on its content alone, not on its place in the text."""

    number: int
    domain: int
    start: int
    ids: Integers
    next_id: int  # the token after the last, -1 at the document's end
    document: int  # 63-bit hash of the complete document
    draw: float  # uniform in [0, 1): the sample holds the windows below a threshold

    @property
    def bucket(self) -> int:
        return self.document % BUCKETS


def read_documents(
    traced: TracedModel, reading: list[Source], max_tokens: int | None = None, chat_template: bool = False
) -> Iterator[Document]:
    """Yield every document as token ids, domain by domain; `spread_tokens` says how max_tokens is shared."""

    def prefixes(source: Source) -> Iterator[Prefix]:
        read = source.read if max_tokens is None else source.read_in_turn
        return (partial(tokenize, traced, content, chat_template) for content in read())

    ids: Iterable[tuple[str, Integers]]
    if max_tokens is None:
        ids = ((source.domain, prefix(None)) for source in reading for prefix in prefixes(source))
    else:
        ids = spread_tokens({source.domain: partial(prefixes, source) for source in reading}, max_tokens)
    index = {source.domain: number for number, source in enumerate(reading)}
    found = ((domain, part) for domain, part in ids if len(part))
    for number, (domain, part) in enumerate(found):
        yield Document(number, index[domain], part)


def tokenize(traced: TracedModel, content: Content, chat_template: bool, most: int | None = None) -> Integers:
    """Return the content's token ids, or the first `most`; of a long text only as much as needed is read."""
    if is_ids(content):
        ids = content[:most]
    elif traced.tokenizer is None:
        raise BadInput(f"{traced.name}: {traced.no_tokenizer}")
    elif chat_template:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        ids = traced.chat_template.tokenize(messages)
    else:
        if isinstance(content, list):
            content = "\n".join(
                str(message.get("content", "")) for message in content if isinstance(message, dict)
            )
        length = len(content) if most is None else 8 * (most + MARGIN)
        ids = traced.encode(content[:length])
        while length < len(content) and len(ids) < (most or 0) + MARGIN:
            length *= 4
            ids = traced.encode(content[:length])
    found = np.asarray(ids[:most], dtype=np.int64)
    check_ids(found, traced.name, traced.vocabulary)
    return found


def fingerprint(ids: Integers, start: int = 0) -> int:
    """Return a 64-bit hash of the ids and the window's start, equal on every machine."""
    packed = np.ascontiguousarray(ids, dtype="<i8").tobytes() + start.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def windows(documents: Iterable[Document], length: int) -> Iterator[Window]:
    for document in documents:
        content = fingerprint(document.ids) >> 1
        for start in range(0, len(document.ids), length):
            ids = document.ids[start : start + length]
            after = int(document.ids[start + length]) if start + length < len(document.ids) else -1
            draw = fingerprint(ids, start) / 2**64
            yield Window(document.number, document.domain, start, ids, after, content, draw)


def batches(parts: Iterable[Window], batch_size: int) -> Iterator[list[Window]]:
    """Group windows of similar length: at most `batch_size`, and 16,384 tokens including padding."""
    waiting: list[Window] = []
    for window in parts:
        waiting.append(window)
        if len(waiting) == batch_size * SORTED_BATCHES:
            yield from group_by_length(waiting, batch_size)
            waiting = []
    yield from group_by_length(waiting, batch_size)


def group_by_length(waiting: list[Window], batch_size: int) -> Iterator[list[Window]]:
    rows: list[Window] = []
    for window in sorted(waiting, key=lambda window: -len(window.ids)):
        longest = len(rows[0].ids) if rows else len(window.ids)
        if rows and (len(rows) == batch_size or (len(rows) + 1) * longest > TOKENS_PER_PASS):
            yield rows
            rows = []
        rows.append(window)
    if rows:
        yield rows


@dataclass(frozen=True)
class Batch:
    """Windows padded on the right to one length: causal models then never attend to the padding."""

    rows: list[Window]
    ids_BL: Integers
    next_BL: Integers  # the following token, -1 where there is none
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

    @property
    def size(self) -> int:
        """Tokens without padding."""
        return int(self.real_BL.sum())

    def tokens(self, device: str, phase: str, start: int, stop: int) -> Tokens:
        """Return the tokens of columns `start` to `stop`."""

        def on_device(values: Any) -> torch.Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        of_rows = [(row.number, row.start, row.domain, row.bucket) for row in self.rows]
        facts = np.array(of_rows, dtype=np.int64).reshape(-1, 4).repeat(stop - start, axis=0).T
        facts[1] += np.tile(np.arange(start, stop), len(self.rows))
        ids_T, real_T = (part[:, start:stop].reshape(-1) for part in (self.ids_BL, self.real_BL))
        documents, positions, domains, buckets = on_device(facts)
        return Tokens(
            len(self.rows),
            on_device(ids_T),
            on_device(real_T),
            documents,
            positions,
            domains,
            buckets,
            phase,
            continues=start > 0,
        )
