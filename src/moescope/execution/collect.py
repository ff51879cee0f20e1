"""Run a model over documents; collectors accumulate what they need while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from moescope.errors import reject_if
from moescope.execution.adapters import Block
from moescope.execution.capture import Capture
from moescope.execution.documents import Batch, Document, Window, batches, windows
from moescope.execution.models import TracedModel, named_failures
from moescope.execution.scoring import Scoring
from moescope.execution.streamed import StreamedModel
from moescope.types import Routing


class Pass(NamedTuple):
    """One forward pass: columns `start` to `stop` of a batch."""

    batch: Batch
    phase: str
    start: int
    stop: int
    number: int = 0  # of the batch

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

    def see_batches(self, batches: Sequence[Batch]) -> None:
        """Called before a streamed run, which knows all batches: each then runs once per layer."""

    def begin_pass(self, current: Pass) -> None: ...

    def consume(self, routing: Routing, block: Block) -> None: ...

    def pause_pass(self, current: Pass) -> None:
        """Called in a streamed run when a pass stops after one layer; `begin_pass` continues it."""

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
    n_documents = 0

    def counted() -> Iterator[Document]:
        nonlocal n_documents
        for document in documents:
            n_documents += 1
            for collector in pass_collectors:
                collector.see_document(document)
            yield document

    in_batches = batches(windows(counted(), traced.window), batch_size)
    n_tokens, blocks = collect_batches(traced, in_batches, collectors, phases, advance)
    return Collected(n_documents, n_tokens, blocks)


def collect_batches(
    traced: TracedModel,
    in_batches: Iterable[list[Window]],
    collectors: Sequence[Collector],
    phases: tuple[str, ...] = ("prefill",),
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[int, dict[int, Block]]:
    """Run the model once per phase over batches of windows; return the tokens, and the blocks by layer."""
    pass_collectors = [collector for collector in collectors if isinstance(collector, PassCollector)]
    n_tokens = 0

    def consume(routing: Routing) -> None:
        with capture.uncounted():  # collectors may run experts
            for collector in collectors:
                collector.consume(routing, blocks[routing.layer])

    capture = Capture(traced.model, consume, runner=traced.runner)
    blocks = {block.layer: block for block in capture.blocks}
    padded = (Batch.of(rows, traced.padding) for rows in in_batches)
    with capture:
        if isinstance(traced, StreamedModel):
            return run_streamed(traced, capture, list(padded), phases, collectors, advance), blocks
        for number, batch in enumerate(padded):
            n_tokens += batch.size
            for phase in phases:
                run_batch(traced, capture, batch, phase, pass_collectors, number)
                advance(batch.size)
    return n_tokens, blocks


@torch.no_grad()
def run_streamed(
    traced: StreamedModel,
    capture: Capture,
    all_batches: list[Batch],
    phases: tuple[str, ...],
    collectors: Sequence[Collector],
    advance: Callable[[int], None],
) -> int:
    """Run every batch through one layer after the other; return the number of tokens."""
    reject_if(
        phases != ("prefill",),
        "the decode phase needs the whole model; use --execution resident, or --phase prefill",
    )
    pass_collectors = [collector for collector in collectors if isinstance(collector, PassCollector)]
    for collector in pass_collectors:
        collector.see_batches(all_batches)
    kinds = [type(collector).__name__ for collector in collectors]
    states = traced.open_states([batch.ids_BL for batch in all_batches], kinds)
    for record in states.records():
        restore_part(record, capture.blocks, collectors)
    n_tokens = sum(batch.size for batch in all_batches)
    traced.execution.on_total(n_tokens)
    done = n_tokens * states.part
    advance(done // traced.n_parts)
    in_order = [Pass(batch, "prefill", 0, batch.ids_BL.shape[1], at) for at, batch in enumerate(all_batches)]

    def begin(number: int) -> None:
        current = in_order[number]
        for collector in pass_collectors:
            collector.begin_pass(current)
        capture.tokens = current.batch.tokens(traced.device, "prefill", 0, current.stop)

    def collected(part: int) -> dict[str, Any]:
        names = {block.name for block in traced.weights.layers[part].blocks}
        traced.weights.wait_for_layer()  # records may be copied still
        return part_record([block for block in capture.blocks if block.name in names], collectors)

    inputs = [prefill_inputs(traced, batch) for batch in all_batches]
    for number, output in traced.run_parts(inputs, states, begin=begin, record=collected):
        for collector in pass_collectors:
            if output is None:
                collector.pause_pass(in_order[number])
            else:
                collector.end_pass(in_order[number], output)
        size = all_batches[number].size
        advance((done + size) // traced.n_parts - done // traced.n_parts)
        done += size
    traced.execution.record(traced.name, bytes_read=traced.weights.bytes_read)
    return n_tokens


def part_record(blocks: list[Block], collectors: Sequence[Collector]) -> dict[str, Any]:
    """Return what is known of a part's layers once all batches have passed: plain data for a file."""
    return {
        str(block.layer): (
            None if block.scoring is None else vars(block.scoring),
            block.logits_at,
            {name: tensor.detach().cpu() for name, tensor in block.router.state_dict().items()},
            [state_of(collector, block.layer) for collector in collectors],
        )
        for block in blocks
    }


def restore_part(record: dict[str, Any], blocks: list[Block], collectors: Sequence[Collector]) -> None:
    by_layer = {str(block.layer): block for block in blocks}
    for layer, (scoring, logits_at, rows, states) in record.items():
        block = by_layer[layer]
        block.scoring = None if scoring is None else Scoring(**scoring)
        block.logits_at, block.checked, block.calls = logits_at, True, 1
        block.router.load_state_dict(rows, assign=True)
        for collector, state in zip(collectors, states, strict=True):
            if hasattr(collector, "restore"):
                collector.restore(block.layer, state)
            else:
                for name, value in state.items():
                    getattr(collector, name)[block.layer] = value


def state_of(collector: Any, layer: int) -> Any:
    """Return what a collector holds of one layer: its own answer, or the layer's entries in its dicts."""
    if hasattr(collector, "state"):
        return collector.state(layer)
    held = vars(collector).items()
    return {name: value[layer] for name, value in held if isinstance(value, dict) and layer in value}


def passes(batch: Batch, phase: str) -> Iterator[tuple[int, int]]:
    """Return the columns of each forward pass: all at once (prefill), or one after the other (decode)."""
    length = batch.ids_BL.shape[1]
    width = length if phase == "prefill" else 1
    return ((start, start + width) for start in range(0, length, width))


@torch.no_grad()
def run_batch(
    traced: TracedModel,
    capture: Capture,
    batch: Batch,
    phase: str,
    collectors: Sequence[PassCollector] = (),
    number: int = 0,
) -> None:
    """Run one batch in one phase. During a pass `capture.tokens` holds the pass's tokens."""
    whole = prefill_inputs(traced, batch)
    ids_BL, mask_BL = whole["input_ids"], whole["attention_mask"]
    cache = None
    for start, stop in passes(batch, phase):
        current = Pass(batch, phase, start, stop, number)
        for collector in collectors:
            collector.begin_pass(current)
        capture.tokens = batch.tokens(traced.device, phase, start, stop)
        inputs = whole
        if phase == "decode":
            inputs = {"input_ids": ids_BL[:, start:stop], "attention_mask": mask_BL[:, :stop]}
            inputs |= {"use_cache": True, "past_key_values": cache}
        with named_failures(traced):
            output = traced.runner(**inputs)
        cache = getattr(output, "past_key_values", None) if phase == "decode" else None
        reject_if(
            phase == "decode" and cache is None and not current.is_last,
            f"model type {traced.config.model_type!r} keeps no cache, so it has no decode phase; "
            "use --phase prefill",
        )
        for collector in collectors:
            collector.end_pass(current, output)


def prefill_inputs(traced: TracedModel, batch: Batch) -> dict[str, Any]:
    """Return the arguments of a forward pass over a whole batch."""
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(batch.ids_BL).to(traced.device, non_blocking=True),
        "attention_mask": torch.from_numpy(batch.real_BL).to(traced.device, non_blocking=True).long(),
    }
    if traced.two_stacks:  # both stacks read the document
        inputs |= {f"decoder_{name}": tensor for name, tensor in inputs.items()}
    return {**inputs, "use_cache": False}
