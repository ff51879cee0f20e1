"""Shares of a run over documents: a fixed number of whole batches, whose sums are added in their order.

Floating-point sums depend on the order of addition. A share always holds the same batches, so the sums are
the same in one process and on any number of workers, each of which runs some of the shares.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moescope.execution.adapters import Block
from moescope.execution.collect import Collector, Pass, PassCollector
from moescope.execution.documents import Window
from moescope.types import Routing

SHARE = 8  # batches

Held = TypeVar("Held", bound=Collector)


class ByShare(PassCollector, Generic[Held]):
    """A collector that starts a new one for every share of the batches, and takes what the last one holds.

    In a streamed run that is so for every layer.
    """

    def __init__(self, make: Callable[[], Held]):
        self.make = make
        self.share = 0
        self.collector = make()

    def begin_pass(self, current: Pass) -> None:
        if current.number // SHARE != self.share:
            self.close()
            self.share = current.number // SHARE

    def consume(self, routing: Routing, block: Block) -> None:
        self.collector.consume(routing, block)

    def close(self) -> None:
        """Take what the current share has collected so far."""
        self.take(self.share, self.collector)
        self.collector = self.make()

    @abstractmethod
    def take(self, share: int, collector: Held) -> None: ...


@dataclass(frozen=True)
class Part:
    """Consecutive shares of a run, for one worker."""

    number: int
    batches: list[list[Window]]

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(len(window.ids) for rows in self.batches for window in rows)

    @property
    def padded(self) -> int:
        return sum(padded_tokens(rows) for rows in self.batches)


def padded_tokens(rows: Sequence[Window]) -> int:
    return len(rows) * max(len(window.ids) for window in rows)


def split_shares(batches: list[list[Window]], parts: int) -> list[Part]:
    """Return at most that many parts of whole shares, with about as many tokens each."""
    shares = [batches[start : start + SHARE] for start in range(0, len(batches), SHARE)]
    left = sum(padded_tokens(rows) for rows in batches)
    split: list[Part] = []
    held: list[list[Window]] = []
    for number, share in enumerate(shares):
        held += share
        size = sum(padded_tokens(rows) for rows in held)
        to_come = parts - len(split)
        half = sum(padded_tokens(rows) for rows in shares[number + 1]) / 2 if number + 1 < len(shares) else 0
        if to_come > 1 and (size + half >= left / to_come or len(shares) - number - 1 < to_come):
            split.append(Part(len(split), held))
            left, held = left - size, []
    return [*split, Part(len(split), held)] if held else split
