"""Runs on Ray: each worker loads the model and runs a part of the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from moescope.engine import RayEngine, Tick, open_engine
from moescope.execution.documents import Window
from moescope.execution.lab_models import expect_run, load_any_model
from moescope.execution.models import TracedModel
from moescope.execution.shares import Part, split_shares
from moescope.execution.ways import Execution, Expected, Way
from moescope.storage import remove, remove_empty

TOKENS_PER_TICK = 256

PartWork = Callable[[TracedModel, Part, Callable[[int], None]], Any]


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

    @contextmanager
    def open(self) -> Iterator[RayEngine]:
        with open_engine("ray", self.address, self.device) as engine:
            assert isinstance(engine, RayEngine)
            yield engine


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
        parts = split_shares(in_batches, self.jobs or self.engine.slots)
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
            if folder is not None and folder.exists():
                remove(folder)  # what another attempt with other parts has left
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
    waiting = 0

    def advance(tokens: int) -> None:
        nonlocal waiting
        waiting += tokens
        while waiting >= TOKENS_PER_TICK:
            waiting -= TOKENS_PER_TICK
            tick()

    found = work(traced, part, advance)
    return found, sum(entry.get("bytes_read", 0) for entry in how.announced)
