"""A token budget shared fairly: an equal quota per domain, dealt round robin to the domain's documents."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice

import numpy as np

from moescope.statistics import BUCKETS, FEWEST_DOCUMENTS
from moescope.types import Integers

SHORTEST_PREFIX = 128  # tokens: a quota is not spread over so many documents that each gives fewer
IN_MEMORY = 2**24  # bytes of ids per domain; more go to a temporary file
Prefix = Callable[[int | None], Integers]  # the ids of a document, at most that many


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
