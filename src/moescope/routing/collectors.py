"""What trace accumulates while a model runs: counts, single tokens, mean outputs of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.execution.adapters import Block, adapter_of, find_blocks, selection_alone
from moescope.execution.collect import Pass, PassCollector, collect_batches
from moescope.execution.documents import Batch, Document, Window, batches, windows
from moescope.execution.models import TracedModel, predicted_tokens
from moescope.execution.streamed import StreamedModel, place
from moescope.execution.workers import Part, PartWork, in_order
from moescope.routing.counts import Counts
from moescope.routing.counts_to_tables import Corpus, Traced
from moescope.routing.decision import routing_entropy, selection_margin
from moescope.routing.load_balance import divide
from moescope.routing.tables import TABLES
from moescope.routing.token_sample import Contexts, Sample, TokenText
from moescope.statistics import BUCKETS
from moescope.storage import check_disk, leftover_name, remove
from moescope.tables import arrow_schema
from moescope.types import Array, Integers, Routing

OUTPUT_DOCUMENTS = 16  # whose expert outputs are averaged, all domains together
OUTPUT_TOKENS = 64  # per document, from its beginning: a text of 20,000 tokens then takes about 3 % longer
ROWS_AT_ONCE = 200_000  # rows per row group of the tokens table, about
PROBED = 4  # times k experts that a router names about the state of the layer before
SAME_CHOICE = 0.98  # least share of tokens whose experts are those with the highest scores


RunParts = Callable[[PartWork, list[list[Window]]], Iterator[tuple[Part, Any]]]


class Found:
    """What was found in a text, or in a part of it."""

    def __init__(self, blocks: list[Block], domains: int, phase: str):
        layers, n_experts = [block.layer for block in blocks], [block.n_experts for block in blocks]
        self.counts, self.sample = Counts((domains, BUCKETS)), Sample(layers)
        self.contexts, self.outputs = Contexts(layers, n_experts), OutputMeans(domains, phase)
        self.routers: dict[int, Array] = {}  # router rows by layer, where they are known
        self.scoring: dict[int, str] = {}

    def run(
        self,
        traced: TracedModel,
        batches: Iterable[list[Window]],
        phases: tuple[str, ...],
        advance: Callable[[int], None],
        write: Callable[[TokenRows], None] | None,
        probe_next: bool,
    ) -> None:
        """Run the model over batches; rows of single tokens go to `write`."""
        tokens = TokenCollector(traced, self.sample, self.contexts, phases[0], write, probe_next)
        _, blocks = collect_batches(traced, batches, [self.counts, tokens, self.outputs], phases, advance)
        for layer, block in blocks.items():
            if block.rows_ED is not None:
                self.routers[layer] = block.rows_ED.detach().double().cpu().numpy()
            if block.scoring is not None:
                self.scoring[layer] = block.scoring.words()

    def join(self, other: Found) -> None:
        """Add what was found in another part of the text."""
        self.counts.merge(other.counts.layers())
        self.sample.join(other.sample)
        self.contexts.join(other.contexts)
        self.contexts.keep_below(self.sample.threshold)
        self.outputs.add(other.outputs.sums, other.outputs.tokens)
        self.routers, self.scoring = other.routers | self.routers, other.scoring | self.scoring


def trace_model(
    traced: TracedModel,
    domains: list[str],
    documents: Iterable[Document],
    phases: tuple[str, ...],
    batch_size: int,
    layer_names: dict[int, str] | None = None,
    step: int = 0,
    token_file: Path | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
    probe_next: bool = False,
    run_parts: RunParts | None = None,
) -> Traced:
    """Run the model over the documents in each phase; every token also goes to `token_file` where given.

    With `probe_next` every MoE layer's router is also asked about the state that the MoE layer before it got.
    On workers `run_parts(work, batches)` yields every part of the batches with what `work` found in it, in
    any order; the model then only says what there is to run.
    """
    blocks = find_blocks(traced.model)
    names = layer_names or {block.layer: block.name for block in blocks}
    found = Found(blocks, len(domains), phases[0])

    def seen() -> Iterator[Document]:
        for document in documents:
            found.outputs.see_document(document)
            yield document

    in_batches = batches(windows(seen(), traced.window), batch_size)
    with TokenTable(token_file, step, names, domains) as table:
        if run_parts is None:
            found.run(traced, in_batches, phases, advance, table.add if token_file else None, probe_next)
        elif in_lists := list(in_batches):
            save, wanted = token_file is not None, found.outputs.wanted
            parts = run_parts(partial(trace_part, len(domains), phases, wanted, save, probe_next), in_lists)
            for part, file in in_order(store_rows(parts, table)):
                found.join(part)
                if file is not None:
                    table.copy(file)
                    remove(file, file.parent)
    return Traced(
        Corpus(domains, found.outputs.documents),
        found.counts.layers(),
        phases[0],
        names,
        found.sample.probe(),
        dict(sorted(found.routers.items())),
        dict(sorted(found.scoring.items())),
        TokenText(traced.tokenizer),
        found.contexts,
        found.outputs.all_means(),
        None if token_file is None else np.array(sorted(table.ids), dtype=np.int64),
        str(traced.config.model_type),
        traced.window,
    )


def trace_part(
    domains: int,
    phases: tuple[str, ...],
    wanted: set[int],
    save: bool,
    probe_next: bool,
    traced: TracedModel,
    part: Part,
    advance: Callable[[int], None],
) -> tuple[Found, list[TokenRows]]:
    """Run the model over one part of the batches; expert outputs are averaged over the `wanted` documents."""
    found, rows = Found(find_blocks(traced.model), domains, phases[0]), list[TokenRows]()
    found.outputs.wanted = wanted
    found.run(traced, part.batches, phases, advance, rows.append if save else None, probe_next)
    held, found.counts, found.outputs.at = found.counts, Counts(), None  # nothing sent stays on the device
    found.counts.merge(held.layers())
    return found, rows


def store_rows(
    parts: Iterable[tuple[Part, tuple[Found, list[TokenRows]]]], table: TokenTable
) -> Iterator[tuple[Part, tuple[Found, Path | None]]]:
    """Write the token rows of each part to a file: those before their turn would take much memory."""
    for part, (found, rows) in parts:
        file = None if table.path is None else leftover_name(table.path.parent)
        with TokenTable(file, table.step, table.layer_names, table.domains) as own:
            while rows:
                own.add(rows.pop(0))
        table.ids |= own.ids
        yield part, (found, file)


# --- mean outputs


class OutputMeans(PassCollector):
    """Mean of every expert's output before its gate, over the first documents of each domain.

    A layer only passes on the sum of gates times outputs, so a few tokens (1,024 at most) go through the
    experts once more, slot by slot. Which ones depends on the reading order, not on batches.
    """

    def __init__(self, n_domains: int, phase: str):
        self.phase = phase
        self.documents = [0] * n_domains  # read so far, by domain
        self.wanted: set[int] = set()  # numbers of the documents to look at
        self.at: Tensor | None = None  # positions in the current pass; None: none
        self.sums: dict[int, Tensor] = {}  # by layer: E x D
        self.tokens: dict[int, Tensor] = {}  # by layer: E

    def see_document(self, document: Document) -> None:
        if self.documents[document.domain] < max(OUTPUT_DOCUMENTS // len(self.documents), 1):
            self.wanted.add(document.number)
        self.documents[document.domain] += 1

    def begin_pass(self, current: Pass) -> None:
        rows, columns = current.batch.rows, np.arange(current.start, current.stop)
        ends = [OUTPUT_TOKENS - row.start if row.number in self.wanted else 0 for row in rows]
        at = np.flatnonzero(current.batch.real_BL[:, columns] & (columns < np.array(ends)[:, None]))
        self.at = torch.from_numpy(at) if len(at) and current.phase == self.phase else None

    def consume(self, routing: Routing, block: Block) -> None:
        if self.at is None or routing.x_TD is None or block.hands_out:
            return  # the experts of a model that hands out its routing need not be callable alone
        self.at = at = self.at.to(routing.x_TD.device)
        sums_ED, tokens_E = summed_outputs(block, routing.x_TD[at], routing.chosen_TK[at])
        # in float64, so that the order of batches and workers does not matter
        self.add({routing.layer: sums_ED.cpu().double()}, {routing.layer: tokens_E.cpu()})

    def add(self, sums: dict[int, Tensor], tokens: dict[int, Tensor]) -> None:
        """Add the sums over other batches of the same documents."""
        for layer, sums_ED in sums.items():
            self.sums[layer] = self.sums.get(layer, 0) + sums_ED
            self.tokens[layer] = self.tokens.get(layer, 0) + tokens[layer]

    def all_means(self) -> dict[int, Array]:
        """Return layer -> E x D, NaN for an expert that none of these tokens chose."""
        return {
            layer: divide(sums_ED.numpy(), self.tokens[layer].numpy()[:, None])
            for layer, sums_ED in sorted(self.sums.items())
        }


def summed_outputs(block: Block, x_TD: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum over tokens of each expert's output, number of tokens that chose it)."""
    sums_ED = x_TD.new_zeros(block.n_experts, x_TD.shape[1], dtype=torch.float32)
    tokens_E = torch.zeros(block.n_experts, dtype=torch.int64, device=x_TD.device)
    for slot in range(chosen_TK.shape[1]):
        there = chosen_TK[:, slot] >= 0
        chosen_T, x = chosen_TK[there, slot], x_TD[there]
        if len(x):
            sums_ED.index_add_(0, chosen_T, adapter_of(block).output(block, x, chosen_T).float())
            tokens_E += torch.bincount(chosen_T, minlength=block.n_experts)
    return sums_ED, tokens_E


# --- single tokens


class TokenCollector(PassCollector):
    """Every layer's decision for single tokens of one phase: for the sample, the contexts, the token table.

    A pass is recorded on the device and moved once at its end; a batch is complete after its last pass.
    """

    def __init__(
        self,
        traced: TracedModel,
        sample: Sample,
        contexts: Contexts,
        phase: str,
        write: Callable[[TokenRows], None] | None,
        probe: bool = False,
    ):
        self.traced, self.phase, self.write, self.probe = traced, phase, write, probe
        self.sample, self.contexts = sample, contexts
        if probe and (traced.two_stacks or isinstance(traced, StreamedModel)):
            what = "reads two stacks" if traced.two_stacks else "is run layer by layer"
            raise BadInput(
                f"{traced.name}: {what}, and --probe-next needs the states of two layers at once; "
                "leave it out, or use --execution resident"
            )
        self.before_TD: Tensor | None = None  # router input of the MoE layer before
        self.positions: Integers = np.zeros(0, dtype=np.int64)  # recorded tokens of the current pass
        self.at: Tensor | None = None  # the same on the device; None: none
        self.shape = (0, 0)  # rows and columns of the current pass
        self.layers: dict[int, tuple[Tensor, ...]] = {}  # what the current pass recorded, by layer
        self.recorded: list[np.ndarray] = []  # of the batch: experts, and for the table gates and entropy
        self.largest: tuple[Array, Integers] | None = None  # of the batch: gates and columns, [L, B, E]
        self.predicted_BL: Integers = np.zeros((0, 0), dtype=np.int64)
        self.below = 1.0  # in a streamed run: windows with larger draws do not end up in the sample
        self.paused: dict[int, dict[int, tuple[Tensor, ...]]] = {}  # layer -> batch -> what was recorded

    def see_batches(self, batches: Sequence[Batch]) -> None:
        sample = Sample(self.sample.layers)
        none = np.zeros(0, dtype=np.int64)
        for window in (row for batch in batches for row in batch.rows):
            sample.add(window, none.reshape(0, 0, 1), none, none)
        self.below = sample.threshold

    def begin_pass(self, current: Pass) -> None:
        self.before_TD = self.at = None
        if current.phase != self.phase:
            return
        limit = min(self.below, self.sample.threshold)  # the same windows in all passes of a streamed run
        wanted = np.array([self.write is not None or row.draw < limit for row in current.batch.rows])
        real_BL = current.batch.real_BL[:, current.start : current.stop]
        self.positions, self.shape = np.flatnonzero(real_BL & wanted[:, None]), real_BL.shape
        if len(self.positions):
            self.at = torch.from_numpy(self.positions).to(self.traced.device)

    def consume(self, routing: Routing, block: Block) -> None:
        if self.at is None:
            return
        chosen_TK, gates_TK = routing.chosen_TK[self.at], routing.gates_TK[self.at].float()
        order = gates_TK.masked_fill(chosen_TK < 0, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        record: tuple[Tensor, ...] = (chosen_TK.gather(1, order).to(torch.int16),)
        if self.write is not None:
            entropy = torch.full_like(gates_TK[:, 0], torch.nan)
            if routing.scores_TE is not None:
                entropy = routing_entropy(routing)[self.at].float()
            margin = selection_margin(routing)[self.at].float()
            record += (gates_TK.gather(1, order), entropy, margin.masked_fill(margin.isinf(), torch.nan))
        if self.probe:
            record += (self.probed(routing, block).to(torch.int16),)
        places = largest_gates(chosen_TK, gates_TK, self.at, self.shape, self.contexts.widest)
        self.layers[routing.layer] = (*record, *places)

    def probed(self, routing: Routing, block: Block) -> Tensor:
        """The experts that this layer's router ranks highest about the state that the layer before got."""
        assert self.at is not None
        k = routing.chosen_TK.shape[1]
        named_TX = self.at.new_full((len(self.at), PROBED * k), -1)
        x = routing.x_TD if block.hands_out else block.router_input
        if x is None or routing.carried_TR is not None or not chosen_by_score(routing):
            raise BadInput(
                f"model type {block.model_type!r}: the router of {block.where()} needs more than a token's "
                "state or does not choose the highest scores; leave --probe-next out"
            )
        if self.before_TD is not None:
            selection_TE = selection_alone(block, self.before_TD.to(block.device))
            best = selection_TE.topk(min(PROBED * k, block.n_experts), dim=-1)
            best_TX = best.indices.masked_fill(best.values == -torch.inf, -1).to(self.at.device)
            named_TX[:, : best_TX.shape[1]] = best_TX
        self.before_TD = x.reshape(-1, x.shape[-1])[self.at]
        return named_TX

    def pause_pass(self, current: Pass) -> None:
        for layer, record in self.layers.items():
            self.paused.setdefault(layer, {})[current.number] = place(record, "cpu")
        self.layers = {}

    def end_pass(self, current: Pass, output: Any) -> None:
        for layer, held in self.paused.items():
            if current.number in held:
                self.layers[layer] = held.pop(current.number)
        if self.at is not None:
            by_layer = [self.layers[layer] for layer in sorted(self.layers)]
            parts = (torch.stack(part).cpu().numpy() for part in zip(*by_layer, strict=True))
            *record, gate_LBE, column_LBE = parts
            self.layers = {}
            self.store(current, record, output)
            self.largest = keep_larger(self.largest, gate_LBE, column_LBE + current.start)
        if current.is_last and self.recorded:
            self.finish_batch(current)

    def store(self, current: Pass, record: list[np.ndarray], output: Any) -> None:
        if not self.recorded:
            shape = current.batch.ids_BL.shape
            self.predicted_BL = np.full(shape, -1, dtype=np.int64)
            for part in record:
                unknown = np.nan if part.dtype.kind == "f" else -1
                self.recorded.append(np.full((len(part), *shape, *part.shape[2:]), unknown, part.dtype))
        row, column = self.positions // self.shape[1], self.positions % self.shape[1] + current.start
        for batch_part, part in zip(self.recorded, record, strict=True):
            batch_part[:, row, column] = part
        sampled = np.array([self.sample.wants(window) for window in current.batch.rows])[row]
        tokens = predicted_tokens(self.traced, output, self.positions[sampled])
        self.predicted_BL[row[sampled], column[sampled]] = tokens

    def finish_batch(self, current: Pass) -> None:
        assert self.largest is not None
        gate_LBE, column_LBE = self.largest
        for index, window in enumerate(current.batch.rows):
            n = len(window.ids)
            if self.sample.wants(window):
                self.contexts.add(window, gate_LBE[:, index], column_LBE[:, index])
            chosen_LTK, *more = (part[:, index, :n].copy() for part in self.recorded)
            self.sample.add(
                window, chosen_LTK, current.batch.next_BL[index, :n], self.predicted_BL[index, :n]
            )
            self.contexts.keep_below(self.sample.threshold)
            if self.write is not None:
                self.write(TokenRows(window, current.phase, chosen_LTK, *more))
        self.recorded, self.largest = [], None


def chosen_by_score(routing: Routing) -> bool:
    """Whether the layer's choices are the experts with the highest selection scores."""
    if routing.selection_TE is None:
        return False
    best_TK = routing.selection_TE.topk(routing.chosen_TK.shape[1], dim=-1).indices
    real_T = slice(None) if routing.tokens is None else routing.tokens.real_T.to(best_TK.device)
    same_T = (best_TK.sort(-1).values == routing.chosen_TK.sort(-1).values).all(-1)[real_T]
    return not len(same_T) or same_T.float().mean().item() >= SAME_CHOICE


def largest_gates(
    chosen_TK: Tensor, gates_TK: Tensor, at_T: Tensor, shape: tuple[int, int], n_experts: int
) -> tuple[Tensor, Tensor]:
    """Largest gate of every expert in every row of a pass, and its column; [rows, experts], -inf: not chosen.

    `at_T` are the tokens' positions in a pass of `shape` rows and columns; of equal gates the first counts.
    """
    rows, width = shape
    discarded = rows * n_experts  # the cell of empty slots
    cell = torch.where(chosen_TK >= 0, (at_T // width)[:, None] * n_experts + chosen_TK, discarded).view(-1)
    column = (at_T % width)[:, None].expand_as(chosen_TK).reshape(-1)
    gates = gates_TK.reshape(-1)
    gate_C = gates.new_full((discarded + 1,), -torch.inf).scatter_reduce_(0, cell, gates, "amax")
    column = torch.where(gates == gate_C[cell], column, width)
    column_C = column.new_full((discarded + 1,), width).scatter_reduce_(0, cell, column, "amin")
    return gate_C[:-1].view(rows, -1), column_C[:-1].view(rows, -1)


def keep_larger(
    before: tuple[Array, Integers] | None, gate: Array, column: Integers
) -> tuple[Array, Integers]:
    """Join the largest gates of one more pass with those of the passes before it."""
    if before is None:
        return gate, column
    better = gate > before[0]
    return np.where(better, gate, before[0]), np.where(better, column, before[1])


# --- the tokens table


class TokenRows(NamedTuple):
    """One window's rows, layer after layer."""

    window: Window
    phase: str
    chosen_LTK: Integers
    gates_LTK: Array
    entropy_LT: Array
    margin_LT: Array
    probed_LTX: Integers | None = None


class TokenTable:
    """Writes rows of single tokens to a parquet file as the text is read; nothing without a file."""

    def __init__(self, path: Path | None, step: int, layer_names: dict[int, str], domains: list[str]):
        self.path, self.step, self.layer_names, self.domains = path, step, layer_names, domains
        self.writer: Any = None
        self.waiting: list[TokenRows] = []
        self.n_rows = 0
        self.ids: set[int] = set()

    def __enter__(self) -> TokenTable:
        if self.path is not None:
            import pyarrow.parquet as pq

            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = pq.ParquetWriter(
                self.path.absolute(), arrow_schema(TABLES["tokens"]), compression="zstd"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer is not None:
            if kind is None:
                self.flush()
            self.writer.close()

    def add(self, rows: TokenRows) -> None:
        self.waiting.append(rows)
        self.ids.update(np.unique(rows.window.ids).tolist())
        self.n_rows += rows.entropy_LT.size
        if self.n_rows >= ROWS_AT_ONCE:
            self.flush()

    def write(self, table: Any) -> None:
        assert self.path is not None
        check_disk(self.path.parent, table.nbytes)
        self.writer.write_table(table)

    def flush(self) -> None:
        if self.waiting:
            self.write(self.arrow_table())
        self.waiting, self.n_rows = [], 0

    def copy(self, file: Path) -> None:
        """Append the rows of another such table."""
        import pyarrow.parquet as pq

        part = pq.ParquetFile(file.absolute())
        for group in range(part.num_row_groups):
            self.write(part.read_row_group(group))

    def arrow_table(self) -> Any:
        """Return what waits, built column by column, since there may be millions of rows."""
        import pyarrow as pa

        layers, names = map(list, zip(*self.layer_names.items(), strict=True))
        windows, phases, *parts = zip(*self.waiting, strict=True)
        lengths = [len(window.ids) for window in windows]

        def per_window(values: list[Any]) -> Any:
            return np.repeat(np.array(values, dtype=object), np.array(lengths) * len(layers))

        def per_token(values: list[Integers]) -> Integers:
            return np.concatenate([np.tile(part, len(layers)) for part in values])

        def per_layer(values: list[Any]) -> Any:
            return np.concatenate([np.repeat(np.array(values), length) for length in lengths])

        def per_row(values: Sequence[Any], *width: int) -> Any:
            return np.concatenate([part.reshape(-1, *width) for part in values])

        chosen, gates, entropy, margin, probed = parts
        k = chosen[0].shape[-1]
        columns = {
            "step": np.full(len(chosen_RK := per_row(chosen, k)), self.step),
            "document": per_window([window.number for window in windows]).astype(np.int64),
            "position": per_token([window.start + np.arange(len(window.ids)) for window in windows]),
            "layer": per_layer(layers),
            "layer_name": per_layer(names),
            "token_id": per_token([window.ids for window in windows]),
            "domain": per_window([self.domains[window.domain] for window in windows]),
            "phase": per_window(list(phases)),
            "entropy": pa.array(per_row(entropy).astype(float), from_pandas=True),  # NaN is null
            "margin": pa.array(per_row(margin).astype(float), from_pandas=True),
        }
        if probed[0] is not None:
            columns["probed"] = filled_lists(per_row(probed, probed[0].shape[-1]), null=True)
        return token_rows(columns, chosen_RK, per_row(gates, k))


def token_rows(columns: dict[str, Any], chosen_RK: Integers, gates_RK: Array | None) -> Any:
    """Return rows of the tokens table in arrow's form; columns that are not given are null."""
    import pyarrow as pa

    schema = arrow_schema(TABLES["tokens"])
    columns = dict.fromkeys(schema.names, pa.nulls(len(chosen_RK))) | columns
    columns["experts"] = filled_lists(chosen_RK)
    if gates_RK is not None:
        columns["gates"] = filled_lists(chosen_RK, gates_RK)
    return pa.table(columns, schema=schema)


def filled_lists(chosen_RX: Integers, values_RX: Array | None = None, null: bool = False) -> Any:
    """Return one list per row: its experts, or their values, without empty slots; `null`: no empty lists."""
    import pyarrow as pa

    counts_R = (there_RX := chosen_RX >= 0).sum(1)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts_R)]).astype(np.int32))
    values = (
        chosen_RX[there_RX].astype(np.int32) if values_RX is None else values_RX[there_RX].astype(np.float32)
    )
    return pa.ListArray.from_arrays(offsets, pa.array(values), mask=pa.array(counts_R == 0) if null else None)
