"""One model over one text: capture, tally and sample put together, and what they found as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.execution.capture import Capture
from moescope.execution.documents import Batch, Document, batches, windows
from moescope.execution.models import TracedModel, predicted_tokens, run_batch
from moescope.routing.contexts import Contexts, LargestGates
from moescope.routing.output_means import OutputMeans
from moescope.routing.rows import (
    Corpus,
    coactivation_columns,
    context_rows,
    domain_metric_rows,
    domain_rows,
    expert_cosine_columns,
    load_rows,
    metric_rows,
    separation_rows,
    vocabulary_columns,
    vocabulary_metric_rows,
)
from moescope.routing.sample import Probe, Recorder, Sample, sampled_positions
from moescope.routing.tally import LayerCounts, Tally
from moescope.routing.token_table import TokenTable
from moescope.routing.words import Words
from moescope.statistics import FEWEST_DOCUMENTS
from moescope.types import Array, Integers, Routing

if TYPE_CHECKING:
    import pandas as pd


TABLES_OF_A_STEP = (
    "load",
    "routing_layers",
    "coactivation",
    "domains",
    "vocabulary",
    "contexts",
    "expert_cosines",
)


@dataclass
class Traced:
    """What tracing one model gave, off the device: everything its tables are made of."""

    corpus: Corpus
    counts: list[LayerCounts]
    main_phase: str  # the one that tables without a phase are of
    layer_names: dict[int, str]
    probe: Probe | None = None
    routers: dict[int, Array] | None = None  # router rows by layer
    scoring: dict[int, str] | None = None
    words: Words = field(default_factory=Words)
    contexts: Contexts | None = None
    outputs: OutputMeans | None = None
    seen: Integers | None = None  # token ids whose words are to be kept, where single tokens are
    model_type: str = "unknown"
    window: int | None = None
    gates: bool = True  # whether gates are known
    decisions: bool = True  # whether logits are

    def main(self) -> list[LayerCounts]:
        return [counts for counts in self.counts if counts.phase == self.main_phase]

    def vectors(self, layer: int) -> dict[str, Array]:
        """What of the layer's experts can be compared as directions: router rows, mean outputs."""
        outputs = None if self.outputs is None else self.outputs.means(layer)
        found = {"router": (self.routers or {}).get(layer), "outputs": outputs}
        return {of: vectors for of, vectors in found.items() if vectors is not None}

    def tables(self, step: int, seed: int) -> dict[str, pd.DataFrame]:
        import pandas as pd

        parts: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES_OF_A_STEP}

        def keep(table: str, counts: LayerCounts, content: Any) -> None:
            frame = pd.DataFrame(content if isinstance(content, dict) else list(content))
            if len(frame):
                frame.insert(0, "step", step)
                frame.insert(1, "layer", counts.layer)
                frame.insert(2, "layer_name", self.layer_names[counts.layer])
                parts[table].append(frame)

        for counts in self.counts:
            keep("load", counts, load_rows(counts, self.corpus, self.gates))
            keep("routing_layers", counts, metric_rows(counts, self.corpus, self.gates, self.decisions))
            keep("routing_layers", counts, separation_rows(counts, (self.routers or {}).get(counts.layer)))
            keep("routing_layers", counts, domain_metric_rows(counts, self.corpus, seed))
        places = context_rows(self.contexts, self.probe, self.corpus, self.words)
        for counts in self.main():
            keep("domains", counts, domain_rows(counts, self.corpus))
            keep("contexts", counts, places.get(counts.layer, []))
            for of, vectors in self.vectors(counts.layer).items():
                keep("expert_cosines", counts, expert_cosine_columns(of, vectors))
            if counts.k > 1:
                keep("coactivation", counts, coactivation_columns(counts))
            if self.probe is not None:
                keep(
                    "routing_layers",
                    counts,
                    vocabulary_metric_rows(self.probe, counts.layer, counts.n_experts, counts.phase, seed),
                )
                keep(
                    "vocabulary",
                    counts,
                    vocabulary_columns(self.probe, counts.layer, counts.n_experts, self.words.of),
                )
        frames = {name: joined(name, found) for name, found in parts.items()}
        if self.seen is not None:
            words = [self.words.of(int(token)) for token in self.seen]
            frames["token_text"] = pd.DataFrame({"token_id": self.seen, "token": words})
        return frames

    def unfilled(self, main: list[LayerCounts]) -> dict[str, float]:
        """`mean_k`, experts a token on average, where tokens have fewer than k.

        Experts choose, or capacity turns some away.
        """
        chosen = sum(int(counts.counts_MBE.sum()) for counts in main)
        tokens = sum(int(counts.sums("tokens").sum()) for counts in main)
        return (
            {"mean_k": chosen / tokens}
            if chosen < tokens * min((counts.k for counts in main), default=0)
            else {}
        )

    def facts(self) -> dict[str, Any]:
        """What run.json says of this step."""
        main = self.main()
        return {
            "coverage": {
                "model_type": self.model_type,
                "layers": len(main),
                "experts_per_layer": sorted({counts.n_experts for counts in main}),
                "k": sorted({counts.k for counts in main}),
                **self.unfilled(main),
                "domains": dict(zip(self.corpus.domains, self.corpus.documents, strict=True)),
                "tokens": {
                    name: int(main[0].sums("tokens")[index].sum()) if main else 0
                    for index, name in enumerate(self.corpus.domains)
                },
            },
            "window": self.window,
            "layers": [counts.layer for counts in main],
            "n_experts": [counts.n_experts for counts in main],
            "scoring": [(self.scoring or {}).get(counts.layer) for counts in main],
            "sample_tokens": 0 if self.probe is None else len(self.probe.ids_T),
            "sample_share": None if self.probe is None else self.probe.share,
        }

    def arrays(self) -> dict[str, Any]:
        """What comparing steps needs: the sample's tokens and every layer's choices for them."""
        if self.probe is None:
            return {}
        return {"chosen": self.probe.chosen_LTK, "ids": self.probe.ids_T, "documents": self.probe.document_T}

    def warnings(self) -> list[str]:
        found = []
        documents = sum(self.corpus.documents)
        if documents < FEWEST_DOCUMENTS:
            found.append(f"no intervals: {FEWEST_DOCUMENTS} documents are needed, {documents} given")
        if len(self.corpus.domains) > 1 and self.corpus.one_a_domain:
            found.append(
                "domain_information and purity not available: one document a domain cannot tell the two apart"
            )
        unknown = [layer for layer, words in (self.scoring or {}).items() if "not reproduced" in words]
        if unknown:
            found.append(
                f"selection_margin not available in layers {', '.join(map(str, unknown))}: the "
                "way of choosing was not recognised"
            )
        if self.probe is not None and self.probe.share < 1:
            found.append(
                f"vocabulary and stability are of a sample: {len(self.probe.ids_T):,} tokens, "
                f"{self.probe.share:.1%} of the text's windows"
            )
        return found


def joined(table: str, frames: list[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    from moescope.tables import TABLES

    return (
        pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(TABLES[table].columns))
    )


def trace_model(
    traced: TracedModel,
    domains: list[str],
    read: Callable[[], Iterable[Document]],
    phases: tuple[str, ...],
    batch_size: int,
    layer_names: dict[int, str] | None = None,
    step: int = 0,
    token_file: Path | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Traced:
    """Run the model over the documents in each phase, counting.

    Every token goes to `token_file` too, where one is given.
    """
    tally, recorder = Tally(len(domains)), Recorder(full=token_file is not None)
    outputs = OutputMeans(len(domains))

    def consume(routing: Routing) -> None:
        tally.add(routing)
        recorder.add(routing)
        largest.add(routing)
        outputs.add(routing, capture)

    main = phases[0]
    corpus = Corpus(domains, [0] * len(domains))

    def counted(documents: Iterable[Document]) -> Iterable[Document]:
        for document in documents:
            corpus.documents[document.domain] += 1
            outputs.see(document)
            yield document

    with Capture(traced.model, consume, runner=traced.runner) as capture:
        layers = [block.layer for block in capture.blocks]
        names = layer_names or {block.layer: block.name for block in capture.blocks}
        sample = Sample(layers)
        contexts = Contexts(layers, [block.n_experts for block in capture.blocks])
        largest = LargestGates(contexts.widest)
        with TokenTable(token_file, step, names, domains) as table:
            parts = windows(counted(read()), traced.window)
            for rows in batches(parts, batch_size):
                batch = Batch.of(rows, traced.padding)
                for phase in phases:
                    keeper = recorder if phase == main else None
                    if keeper is None:
                        recorder.at = largest.at = outputs.at = None
                    run_phase(
                        traced, capture, batch, phase, keeper, sample, (largest, contexts), outputs, table
                    )
                    advance(int(batch.real_BL.sum()))
        router_rows = {block.layer: block.rows_ED for block in capture.blocks}
        routers = {
            layer: rows_ED.detach().double().cpu().numpy()
            for layer, rows_ED in router_rows.items()
            if rows_ED is not None
        }
        scoring = {
            block.layer: block.scoring.words() for block in capture.blocks if block.scoring is not None
        }
    return Traced(
        corpus,
        tally.moved(),
        main,
        names,
        sample.probe(),
        routers,
        scoring,
        Words(traced.tokenizer),
        contexts,
        outputs,
        table.seen() if table.wanted else None,
        str(traced.config.model_type),
        traced.window,
    )


def run_phase(
    traced: TracedModel,
    capture: Capture,
    batch: Batch,
    phase: str,
    recorder: Recorder | None,
    sample: Sample,
    places: tuple[LargestGates, Contexts],
    outputs: OutputMeans,
    table: TokenTable,
) -> None:
    """One batch in one phase. What is recorded of single tokens is put together over the phase's passes."""
    import torch

    from moescope.execution.models import passes

    if recorder is None:
        for _ in run_batch(traced, capture, batch, phase):
            pass
        return
    shape, (largest, contexts) = batch.ids_BL.shape, places
    predicted_BL = np.full(shape, -1, dtype=np.int64)
    kept: list[np.ndarray] = []
    spans = list(passes(batch, phase))

    def aim(span: int) -> np.ndarray:
        start, stop = spans[span]
        outputs.aim(batch, start, stop, traced.device)
        at = sampled_positions(batch, None if table.wanted else sample, start, stop)
        recorder.at = torch.from_numpy(at).to(traced.device) if len(at) else None
        largest.aim(recorder.at, len(batch.rows), stop - start)
        return at

    at = aim(0)
    for span, (start, stop, output) in enumerate(run_batch(traced, capture, batch, phase)):
        width = stop - start
        if len(at):
            moved = recorder.moved()
            largest.collect(start)
            if not kept:
                kept = [
                    np.full(
                        (len(part), *shape, *part.shape[2:]), -1 if index == 0 else np.nan, dtype=part.dtype
                    )
                    for index, part in enumerate(moved)
                ]
            row, column = at // width, at % width + start
            for whole, part in zip(kept, moved, strict=True):
                whole[:, row, column] = part
            wanted = np.array([sample.wants(window) for window in batch.rows])[row]
            predicted_BL[row[wanted], column[wanted]] = predicted_tokens(traced, output, at[wanted])
        if span + 1 < len(spans):
            at = aim(span + 1)
    if not kept:
        return
    gate_LBE, position_LBE = largest.taken()
    for index, window in enumerate(batch.rows):
        n = len(window.ids)
        if sample.wants(window):
            contexts.add(window, gate_LBE[:, index], position_LBE[:, index])
        sample.add(window, kept[0][:, index, :n].copy(), batch.next_BL[index, :n], predicted_BL[index, :n])
        contexts.keep_below(sample.threshold)
        if table.wanted:
            table.add(window, phase, *(part[:, index, :n] for part in kept))
