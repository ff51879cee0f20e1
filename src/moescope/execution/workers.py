"""Runs on Ray: each worker loads the model and runs a part of the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from moescope.engine import RayEngine, Tick, open_engine
from moescope.execution.documents import Window
from moescope.execution.lab_models import expect_run, load_any_model
from moescope.execution.models import TracedModel
from moescope.execution.ways import Execution, Expected, Way
from moescope.storage import remove, remove_empty

TOKENS_PER_TICK = 256

Found = TypeVar("Found")


@dataclass(frozen=True)
class Part:
    """Consecutive batches of a run, for one worker."""

    number: int
    batches: list[list[Window]]

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(len(window.ids) for rows in self.batches for window in rows)

    @property
    def padded(self) -> int:
        return sum(padded_tokens(rows) for rows in self.batches)


PartWork = Callable[[TracedModel, Part, Callable[[int], None]], Any]


def padded_tokens(rows: Sequence[Window]) -> int:
    return len(rows) * max(len(window.ids) for window in rows)


def split(batches: list[list[Window]], parts: int) -> list[Part]:
    """Return at most that many parts, none of them empty, with about as many tokens each."""
    parts = min(parts, len(batches))
    ends = np.cumsum([padded_tokens(rows) for rows in batches])
    cuts = [0, *np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts).tolist(), len(batches)]
    for number in range(1, parts):  # a part has a batch at least, and so have those after it
        cuts[number] = min(max(cuts[number], cuts[number - 1] + 1), len(batches) - parts + number)
    return [Part(number, batches[cuts[number] : cuts[number + 1]]) for number in range(parts)]


def in_order(parts: Iterable[tuple[Part, Found]]) -> Iterator[Found]:
    """Yield what was found in each part in the order of the text, as soon as all before it is there."""
    waiting: dict[int, Found] = {}
    joined = 0
    for part, found in parts:
        waiting[part.number] = found
        while joined in waiting:
            yield waiting.pop(joined)
            joined += 1


@dataclass(frozen=True)
class ModelRequest:
    """How a worker loads the model."""

    name: str
    dtype: str
    trust_remote_code: bool
    prefer_transformers: bool
    device: str = "cpu"

    @property
    def location(self) -> str:
        """The full path of a folder, since workers run elsewhere; the id of a model on the hub."""
        folder = Path(self.name).expanduser()
        return str(folder.resolve()) if folder.exists() else self.name


@dataclass(frozen=True)
class OpenWorkers:
    """Workers of a Ray cluster that is joined or started when they are needed."""

    address: str | None
    device: str
    jobs: int | None

    def open(self) -> AbstractContextManager[RayEngine]:
        return cast(AbstractContextManager[RayEngine], open_engine("ray", self.address, self.device))


@dataclass(frozen=True)
class Workers:
    """A model on workers that each run a part of the batches."""

    engine: RayEngine
    jobs: int | None  # parts; None: as many as run at a time
    request: ModelRequest
    execution: Execution
    advance: Callable[[int], None]  # shows progress by tokens
    phases: int = 1

    def run(self, work: PartWork, in_batches: list[list[Window]]) -> Iterator[tuple[Part, Any]]:
        """Yield every part of the batches with what `work` found in it; a lost worker's part runs again.

        One worker first says which way fits it and what that takes; then all run in that way.
        """
        how, name = self.execution, self.request.name
        parts = split(in_batches, self.jobs or self.engine.slots)
        request = replace(self.request, name=self.request.location, device=self.engine.device)
        folder = None if how.folder is None else how.folder.resolve()
        asked = Execution(how.way, how.memory, folder)
        ask = partial(expect_part, request, asked, min(len(parts), self.engine.per_machine))
        ((_, (expected, memory)),) = self.engine.run(ask, parts[:1], lambda part: None)
        how.announce(replace(expected, model=name, workers=len(parts)))
        asked = replace(asked, way=cast(Way, expected.way), memory=memory)
        tokens = {part.number: self.phases * part.tokens for part in parts}
        how.on_total(sum(tokens.values()))

        def show(part: Part, most: int) -> None:
            count = min(most, tokens[part.number])
            tokens[part.number] -= count
            self.advance(count)

        bytes_read = 0
        try:
            job = partial(run_part, work, request, asked)
            for part, (found, count) in self.engine.run(job, parts, lambda part: show(part, TOKENS_PER_TICK)):
                show(part, tokens[part.number])
                bytes_read += count
                yield part, found
            if folder is not None:
                remove(folder, folder.parent)  # what another attempt with other parts has left
        finally:
            remove_empty([] if folder is None else [folder])
        if expected.way == "streamed":
            how.record(name, bytes_read=bytes_read)


def expect_part(
    request: ModelRequest, how: Execution, per_machine: int, part: Part, tick: Tick
) -> tuple[Expected, int]:
    """Return what a worker takes, and the memory that it may use beside others on its machine."""
    memory = how.limit if how.memory is not None else how.limit // per_machine
    return expect_run(**asdict(request), execution=replace(how, memory=memory), tokens=part.padded), memory


def run_part(
    work: PartWork, request: ModelRequest, how: Execution, part: Part, tick: Tick
) -> tuple[Any, int]:
    """Load the model and run a part; return what was found, and the bytes that a streamed run has read."""
    how = replace(how, folder=None if how.folder is None else how.folder / f"part-{part.number}")
    traced = load_any_model(**asdict(request), execution=how)
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        for _ in range((done + tokens) // TOKENS_PER_TICK - done // TOKENS_PER_TICK):
            tick()
        done += tokens

    found = work(traced, part, advance)
    return found, sum(entry.get("bytes_read", 0) for entry in how.announced)
