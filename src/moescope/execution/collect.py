"""Run a model over documents; collectors accumulate what they need while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from moescope.errors import BadInput
from moescope.execution.adapters import Block
from moescope.execution.capture import Capture
from moescope.execution.documents import Batch, Document, batches, windows
from moescope.execution.models import TracedModel, named_failures
from moescope.types import Routing


class Pass(NamedTuple):
    """One forward pass: columns `start` to `stop` of a batch."""

    batch: Batch
    phase: str
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.batch.ids_BL.shape[1]


class Collector(Protocol):
    """Accumulates over tokens: `consume` is called with each layer's routing as it happens, under no_grad.

    It may run the block's experts (`adapter_of(block).output`); capture ignores those calls.
    """

    def consume(self, routing: Routing, block: Block) -> None: ...


class PassCollector:
    """A collector that also needs to know which documents are read and where each pass begins and ends."""

    def see_document(self, document: Document) -> None:
        """Called when a document is read, before any of its tokens runs."""

    def begin_pass(self, current: Pass) -> None: ...

    def consume(self, routing: Routing, block: Block) -> None: ...

    def end_pass(self, current: Pass, output: Any) -> None: ...


@dataclass(frozen=True)
class Collected:
    """What was run, besides what the collectors hold."""

    documents: int
    tokens: int
    blocks: dict[int, Block]  # by layer


def collect(
    traced: TracedModel,
    documents: Iterable[Document],
    collectors: Sequence[Collector],
    batch_size: int = 8,
    phases: tuple[str, ...] = ("prefill",),
    advance: Callable[[int], None] = lambda tokens: None,
) -> Collected:
    """Run the model once per phase over the documents; every collector sees every layer's routing."""
    pass_collectors = [collector for collector in collectors if isinstance(collector, PassCollector)]
    n_documents = n_tokens = 0

    def counted() -> Iterator[Document]:
        nonlocal n_documents
        for document in documents:
            n_documents += 1
            for collector in pass_collectors:
                collector.see_document(document)
            yield document

    def consume(routing: Routing) -> None:
        capture.busy = True  # experts that collectors run are not the model's own pass
        try:
            for collector in collectors:
                collector.consume(routing, blocks[routing.layer])
        finally:
            capture.busy = False

    capture = Capture(traced.model, consume, runner=traced.runner)
    blocks = {block.layer: block for block in capture.blocks}
    with capture:
        for rows in batches(windows(counted(), traced.window), batch_size):
            batch = Batch.of(rows, traced.padding)
            size = int(batch.real_BL.sum())
            n_tokens += size
            for phase in phases:
                run_batch(traced, capture, batch, phase, pass_collectors)
                advance(size)
    return Collected(n_documents, n_tokens, blocks)


def passes(batch: Batch, phase: str) -> Iterator[tuple[int, int]]:
    """Yield the columns of each forward pass: all at once (prefill), or one after the other (decode)."""
    length = batch.ids_BL.shape[1]
    if phase == "prefill":
        yield 0, length
    else:
        yield from ((column, column + 1) for column in range(length))


@torch.no_grad()
def run_batch(
    traced: TracedModel,
    capture: Capture,
    batch: Batch,
    phase: str,
    collectors: Sequence[PassCollector] = (),
) -> None:
    """Run one batch in one phase. During a pass `capture.tokens` holds the pass's tokens."""
    ids_BL = torch.from_numpy(batch.ids_BL).to(traced.device)
    mask_BL = torch.from_numpy(batch.real_BL).to(traced.device).long()
    cache = None
    for start, stop in passes(batch, phase):
        current = Pass(batch, phase, start, stop)
        for collector in collectors:
            collector.begin_pass(current)
        capture.tokens = batch.tokens(traced.device, phase, start, stop)
        inputs: dict[str, Any] = {"input_ids": ids_BL[:, start:stop], "attention_mask": mask_BL[:, :stop]}
        if traced.two_stacks:  # both stacks read the document
            inputs |= {f"decoder_{name}": tensor for name, tensor in inputs.items()}
        inputs |= {"use_cache": True, "past_key_values": cache} if phase == "decode" else {"use_cache": False}
        with named_failures(traced):
            output = traced.runner(**inputs)
        cache = getattr(output, "past_key_values", None) if phase == "decode" else None
        if phase == "decode" and cache is None and not current.is_last:
            raise BadInput(
                f"model type {traced.config.model_type!r} keeps no cache, so it has no decode phase; "
                "use --phase prefill"
            )
        for collector in collectors:
            collector.end_pass(current, output)
