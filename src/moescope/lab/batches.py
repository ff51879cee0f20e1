"""Token ids in batches, in an order that depends on seed and step alone, so that a training can resume."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moescope.arguments import one_of
from moescope.decoder.vocabulary import Vocabulary
from moescope.errors import BadInput
from moescope.lab.config import LAYOUTS

Ids = NDArray[np.int64]
IGNORED = -100  # a target that does not count, as in torch's cross entropy


@dataclass(frozen=True)
class Batch:
    """Rows of token ids; `targets_BL` is the next token or IGNORED, `mask_BL` False at padding."""

    ids_BL: Ids
    targets_BL: Ids
    mask_BL: NDArray[np.bool_]
    domain_B: Ids


@dataclass(frozen=True)
class TokenIds:
    """The documents of one domain as one stream of token ids, each with its end token."""

    stream: NDArray[np.int32]
    ends: Ids

    @classmethod
    def of(cls, texts: list[str], vocabulary: Vocabulary) -> TokenIds:
        batch = getattr(vocabulary, "encode_all", None)  # on all cores
        encoded = batch(texts) if batch else map(vocabulary.encode, texts)
        parts = [np.append(ids, vocabulary.end) for ids in encoded]
        return cls(np.concatenate(parts).astype(np.int32), np.cumsum([len(part) for part in parts]))

    @property
    def starts(self) -> Ids:
        return np.concatenate([[0], self.ends[:-1]])

    def save(self, folder: Path, name: str) -> None:
        np.save(folder / f"{name}.ids.npy", self.stream)
        np.save(folder / f"{name}.ends.npy", self.ends)

    @classmethod
    def load(cls, folder: Path, name: str) -> TokenIds:
        """Map a saved stream into memory, shared by all processes that do."""
        stream = np.load(folder / f"{name}.ids.npy", mmap_mode="r")
        return cls(np.asarray(stream), np.load(folder / f"{name}.ends.npy"))


@dataclass(frozen=True)
class TokenRows:
    """Every domain's texts as rows of `length` tokens, from which batches are drawn.

    packed: a domain's documents, each with an end token, form one stream that is cut into rows without
    padding. documents: every row is one document, cut or padded to the length. padded: the same, and the
    padding is to be predicted too, as in SoME's published trainings.
    """

    domains: tuple[str, ...]
    streams: tuple[NDArray[np.int32], ...]  # one per domain
    starts: tuple[Ids, ...]  # first position of each row in its stream
    lengths: tuple[Ids, ...]  # tokens per row, including the last target
    length: int
    pad: int
    pad_targets: bool = False

    @classmethod
    def of(
        cls, texts: dict[str, list[str]], vocabulary: Vocabulary, length: int, layout: str = "packed"
    ) -> TokenRows:
        ids = {domain: TokenIds.of(documents, vocabulary) for domain, documents in texts.items()}
        return cls.of_ids(ids, vocabulary.pad, length, layout)

    @classmethod
    def of_ids(cls, ids: dict[str, TokenIds], pad: int, length: int, layout: str = "packed") -> TokenRows:
        one_of("layout", layout, LAYOUTS)
        rows = []
        for domain, documents in ids.items():
            stream = documents.stream
            if len(stream) < 2:
                raise BadInput(f"domain {domain!r}: fewer than two tokens; add text")
            if layout == "packed":
                begin = np.arange(0, len(stream) - 1, length)
                size = np.minimum(length + 1, len(stream) - begin)
                if len(begin) > 1 and size[-1] < length + 1:  # a short rest would need padding
                    begin, size = begin[:-1], size[:-1]
            else:
                begin = documents.starts
                size = np.minimum(documents.ends - begin, length + 1)
            rows.append((stream, begin.astype(np.int64), size.astype(np.int64)))
        streams, starts, lengths = zip(*rows, strict=True)
        return cls(tuple(ids), streams, starts, lengths, length, pad, layout == "padded")

    @property
    def rows(self) -> int:
        return sum(len(begin) for begin in self.starts)

    def batch(self, chosen_B: Ids) -> Batch:
        """Return the rows of these numbers, counted through the domains in order."""
        offsets = np.cumsum([0, *(len(begin) for begin in self.starts)])
        domain_B = np.searchsorted(offsets, chosen_B, side="right") - 1
        ids = np.full((len(chosen_B), self.length), self.pad, dtype=np.int64)
        targets = np.full_like(ids, self.pad if self.pad_targets else IGNORED)
        mask = np.zeros((len(chosen_B), self.length), dtype=np.bool_)
        for row, (number, domain) in enumerate(zip(chosen_B, domain_B, strict=True)):
            at = number - offsets[domain]
            begin, size = self.starts[domain][at], self.lengths[domain][at]
            tokens = self.streams[domain][begin : begin + size]
            ids[row, : size - 1], targets[row, : size - 1] = tokens[:-1], tokens[1:]
            mask[row, : size - 1] = True
        return Batch(ids, targets, mask, domain_B.astype(np.int64))

    def sample(self, rows: int) -> TokenRows:
        """Return a fixed sample of at most `rows` rows, equally many per domain, for evaluation."""
        each = max(rows // len(self.domains), 1)
        chosen = [np.sort(epoch_order(len(begin), 0, 0)[:each]) for begin in self.starts]
        starts, lengths = (
            tuple(part[at] for part, at in zip(parts, chosen, strict=True))
            for parts in (self.starts, self.lengths)
        )
        return replace(self, starts=starts, lengths=lengths)

    def of_step(self, step: int, batch_size: int, seed: int) -> Batch:
        """Return the batch of a step, counted from 0: every row once per epoch, each epoch reordered."""
        places = (divmod(place, self.rows) for place in range(step * batch_size, (step + 1) * batch_size))
        chosen = [epoch_order(self.rows, epoch, seed)[at] for epoch, at in places]
        return self.batch(np.array(chosen, dtype=np.int64))


@lru_cache(maxsize=4)  # consecutive steps use the same order
def epoch_order(rows: int, epoch: int, seed: int) -> Ids:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def unigram_loss(train: TokenRows, validation: TokenRows, size: int) -> dict[str, float]:
    """Return the unigram baseline's loss in nats per token, by validation domain and, under "", overall.

    p = (c + 1)/(N + V) from the training rows of all domains; loss = -mean log p over validation targets.
    """
    log_p = unigram_log_probability(train, size)
    losses = {name: -log_p[targets_of(validation, at)] for at, name in enumerate(validation.domains)}
    together = {"": np.concatenate(list(losses.values())), **losses}
    return {name: float(part.mean()) for name, part in together.items()}


def unigram_log_probability(train: TokenRows, size: int) -> NDArray[np.float64]:
    """Return log (c + 1)/(N + V) of every token, c its count among the targets of the training rows."""
    targets = np.concatenate([targets_of(train, index) for index in range(len(train.domains))])
    counts = np.bincount(targets, minlength=size)
    log_p: NDArray[np.float64] = np.log(counts + 1.0) - np.log(counts.sum() + size)
    return log_p


def targets_of(rows: TokenRows, domain: int) -> NDArray[np.int32]:
    stream, places = rows.streams[domain], zip(rows.starts[domain], rows.lengths[domain], strict=True)
    return np.concatenate([stream[begin + 1 : begin + size] for begin, size in places])
