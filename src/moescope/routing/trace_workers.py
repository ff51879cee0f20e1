"""trace on workers: each runs the model over a part of the batches; what they found is joined here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moescope.execution.adapters import find_blocks
from moescope.execution.collect import collect_batches
from moescope.execution.documents import Document, Window, batches, windows
from moescope.execution.models import TracedModel
from moescope.execution.shares import Part
from moescope.execution.workers import PartWork
from moescope.routing.collectors import (
    HeldRows,
    OutputMeans,
    TokenCollector,
    TokenRows,
    TokenTable,
    router_facts,
)
from moescope.routing.contexts import Contexts, TokenText
from moescope.routing.counts_to_tables import Corpus, Traced
from moescope.routing.share_counts import CountsByShare, ShareCounts
from moescope.routing.token_sample import Sample
from moescope.storage import leftover_name
from moescope.types import Array

RunParts = Callable[[PartWork, list[list[Window]]], Iterator[tuple[Part, "TracedPart"]]]


@dataclass(frozen=True)
class PartSettings:
    """What a worker needs to know besides its batches."""

    n_domains: int
    phases: tuple[str, ...]
    save_tokens: bool
    output_documents: frozenset[int]  # whose expert outputs are averaged
    probe_next: bool = False


@dataclass(frozen=True)
class TracedPart:
    """What one worker found in its part of the batches."""

    counts: list[ShareCounts]
    sample: Sample
    contexts: Contexts
    outputs: OutputMeans
    rows: list[TokenRows]
    routers: dict[int, Array]
    scoring: dict[int, str]


def trace_part(
    settings: PartSettings, traced: TracedModel, part: Part, advance: Callable[[int], None]
) -> TracedPart:
    """Run the model over one part of the batches."""
    counts = CountsByShare(settings.n_domains, apart=True)
    outputs = OutputMeans(settings.n_domains, settings.phases[0])
    outputs.wanted = set(settings.output_documents)
    rows = HeldRows(settings.save_tokens)
    tokens = TokenCollector(traced, find_blocks(traced.model), settings.phases[0], rows, settings.probe_next)
    _, blocks = collect_batches(traced, part.batches, [counts, tokens, outputs], settings.phases, advance)
    counts.close()
    outputs.at = None
    return TracedPart(counts.parts, tokens.sample, tokens.contexts, outputs, rows.rows, *router_facts(blocks))


def trace_on_workers(
    skeleton: TracedModel,
    run: RunParts,
    domains: list[str],
    documents: Iterable[Document],
    phases: tuple[str, ...],
    batch_size: int,
    names: dict[int, str],
    step: int = 0,
    token_file: Path | None = None,
    probe_next: bool = False,
) -> Traced:
    """Return what `trace_model` returns, from parts that workers run.

    `run(work, batches)` yields every part of the batches with what `work` found in it, in any order.
    """
    blocks = find_blocks(skeleton.model)
    layers, n_experts = [block.layer for block in blocks], [block.n_experts for block in blocks]
    counts, sample, contexts = CountsByShare(len(domains)), Sample(layers), Contexts(layers, n_experts)
    outputs = OutputMeans(len(domains), phases[0])
    routers: dict[int, Array] = {}
    scoring: dict[int, str] = {}

    def seen_documents() -> Iterator[Document]:
        for document in documents:
            outputs.see_document(document)
            yield document

    in_batches = list(batches(windows(seen_documents(), skeleton.window), batch_size))
    wanted = frozenset(outputs.wanted)
    settings = PartSettings(len(domains), phases, token_file is not None, wanted, probe_next)
    work = partial(trace_part, settings)
    waiting: dict[int, tuple[TracedPart, Path | None]] = {}
    joined = 0
    with TokenTable(token_file, step, names, domains) as table:
        for part, found in run(work, in_batches) if in_batches else ():
            file = None if token_file is None else leftover_name(token_file.parent)
            with TokenTable(file, step, names, domains) as rows:
                while found.rows:
                    rows.add(found.rows.pop(0))
            table.ids |= rows.ids
            waiting[part.number] = found, file
            while joined in waiting:  # sums are added in the order of parts
                found, file = waiting.pop(joined)
                joined += 1
                for share in found.counts:
                    counts.add(share)
                sample.join(found.sample)
                contexts.join(found.contexts)
                contexts.keep_below(sample.threshold)
                outputs.add(found.outputs)
                routers, scoring = found.routers | routers, found.scoring | scoring
                if file is not None:
                    table.copy(file)
                    file.unlink()
    return Traced(
        Corpus(domains, outputs.documents),
        counts.to_cpu(),
        phases[0],
        names,
        sample.probe(),
        dict(sorted(routers.items())),
        dict(sorted(scoring.items())),
        TokenText(skeleton.tokenizer),
        contexts,
        outputs.all_means(),
        table.seen() if table.wanted else None,
        str(skeleton.config.model_type),
        skeleton.window,
    )
