"""Documents -> windows of token ids -> batches, streamed so that memory does not grow with the text."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moescope.errors import BadInput
from moescope.execution.model_names import check_ids
from moescope.execution.texts import Content, Source, is_ids
from moescope.statistics import BUCKETS, FEWEST_DOCUMENTS
from moescope.types import Integers, Tokens

if TYPE_CHECKING:
    from moescope.execution.models import TracedModel

WINDOW = 4096  # tokens per window at most; longer documents are cut, and each part starts without context
TOKENS_PER_PASS = 16_384  # rows x length of a batch: bounds activations whatever the batch size
SORTED_BATCHES = 16  # batches whose windows are sorted by length together, so that padding is rare
SHORTEST_PREFIX = 128  # tokens: a quota is not spread over so many documents that each gives fewer
IN_MEMORY = 2**24  # bytes of ids per domain; more go to a temporary file
Prefix = Callable[[int | None], Integers]  # the ids of a document, at most that many
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
    filled = ((index[domain], part) for domain, part in ids if len(part))
    yield from (Document(number, *each) for number, each in enumerate(filled))


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
    ids_T = np.asarray(ids[:most], dtype=np.int64)
    check_ids(ids_T, traced.name, traced.vocabulary)
    return ids_T


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
    parts = iter(parts)
    while waiting := list(islice(parts, batch_size * SORTED_BATCHES)):
        rows: list[Window] = []
        for window in sorted(waiting, key=lambda window: -len(window.ids)):
            if len(rows) == batch_size or (rows and (len(rows) + 1) * len(rows[0].ids) > TOKENS_PER_PASS):
                yield rows
                rows = []
            rows.append(window)
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
        facts_T = *on_device(facts), phase, start > 0  # document, position, domain, bucket
        return Tokens(len(self.rows), on_device(ids_T), on_device(real_T), *facts_T)


# --- a token budget shared fairly: an equal quota per domain, dealt round robin to its documents


def deal(sizes: Sequence[int], budget: int) -> list[int]:
    """Return what each gets when the budget is dealt one by one to those who can still take some.

    Everyone gets min(size, level); the remainder goes to the first. deal([1, 9, 5], 10) is [1, 5, 4].
    """
    shares = list(sizes)
    for place, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        level, remainder = divmod(budget, len(sizes) - place)
        if sizes[index] > level:
            shares = [min(size, level) for size in sizes]
            for taller in islice((i for i, size in enumerate(sizes) if size > level), remainder):
                shares[taller] += 1
            break
        budget -= sizes[index]
    return shares


class Quota:
    """The prefixes of a domain's documents that its quota can use, held while the domain is read."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        documents = min(BUCKETS, max(FEWEST_DOCUMENTS, tokens // SHORTEST_PREFIX))
        self.enough = max(1, tokens // documents)  # per document: with more, documents are too few
        self.sizes = array("q")
        self.short = 0  # tokens in documents of at most `enough`
        self.long: list[int] = []  # sizes of the others
        self.file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 (closed by spread_tokens)

    @property
    def is_full(self) -> bool:
        """Whether further documents would only shorten the prefixes."""
        return self.short + self.enough * len(self.long) >= self.tokens

    @property
    def next_limit(self) -> int:
        """The most tokens of the next document that can be used."""
        return deal([*self.long, self.tokens], max(0, self.tokens - self.short))[-1]

    def add(self, prefix: Prefix) -> None:
        ids = prefix(self.next_limit)
        if len(ids):
            self.sizes.append(len(ids))
            self.file.write(np.ascontiguousarray(ids, dtype=np.int64).tobytes())
            if len(ids) > self.enough:
                self.long.append(len(ids))
            else:
                self.short += len(ids)

    @property
    def total(self) -> int:
        return min(self.tokens, sum(self.sizes))

    def read(self, tokens: int) -> Iterator[Integers]:
        """Yield the documents' prefixes, `tokens` in total."""
        self.file.seek(0)
        for size, share in zip(self.sizes, deal(self.sizes, tokens), strict=True):
            ids = np.frombuffer(self.file.read(8 * size), dtype=np.int64)
            if share:
                yield ids[:share]


def spread_tokens(
    domains: dict[str, Callable[[], Iterable[Prefix]]], budget: int
) -> Iterator[tuple[str, Integers]]:
    """Yield (domain, ids of a prefix of a document): together `budget` tokens, or all that there are.

    Every domain gets the same number of tokens; what a small domain cannot use goes to the others. Within a
    domain, every document read gives the same number of tokens, or all it has. A domain is read until at
    least 20 to 256 documents fill its quota, so a large one is not read to its end. The tokens do not depend
    on the order of the domains. Memory holds no more than some megabytes of ids.

    Parameters
    ----------
    domains : dict
        Domain -> function that starts reading it; it may be called more than once. A document is a function
        from a number of tokens to at most that many ids, so that only what is used is tokenized.
    budget : int
        Tokens in total.
    """
    names = sorted(domains)
    wanted = dict(zip(names, deal([budget] * len(names), budget), strict=True))
    held: dict[str, Quota] = {}
    with ExitStack() as files:
        while True:
            for name in names:
                if name not in held or held[name].tokens < wanted[name]:
                    held[name] = Quota(wanted[name])
                    files.callback(held[name].file.close)
                    for prefix in domains[name]():
                        held[name].add(prefix)
                        if held[name].is_full:
                            break
            exhausted = {name: held[name].total for name in names if held[name].total < held[name].tokens}
            sizes = [exhausted.get(name, budget) for name in names]
            wanted = dict(zip(names, deal(sizes, budget), strict=True))
            if all(name in exhausted or wanted[name] <= held[name].tokens for name in names):
                break
        for name in domains:
            for ids in held[name].read(wanted[name]):
                yield name, ids
