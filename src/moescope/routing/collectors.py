"""What trace accumulates while a model runs: counts, single tokens, mean outputs of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.execution.adapters import Block, adapter_of, find_blocks, selection_alone
from moescope.execution.collect import Pass, PassCollector, collect
from moescope.execution.documents import Batch, Document, Window
from moescope.execution.hidden_states import place
from moescope.execution.models import TracedModel, predicted_tokens
from moescope.execution.streamed import StreamedModel
from moescope.routing.contexts import Contexts, TokenText
from moescope.routing.counts_to_tables import Corpus, Traced
from moescope.routing.decision import routing_entropy, selection_margin
from moescope.routing.share_counts import CountsByShare
from moescope.routing.tables import TABLES
from moescope.routing.token_sample import Sample
from moescope.storage import check_disk
from moescope.tables import arrow_schema
from moescope.types import Array, Integers, Routing

OUTPUT_DOCUMENTS = 16  # whose expert outputs are averaged, all domains together
OUTPUT_TOKENS = 64  # per document, from its beginning: a text of 20,000 tokens then takes about 3 % longer
ROWS_AT_ONCE = 200_000  # rows per row group of the tokens table, about
PROBED = 4  # times k experts that a router names about the state of the layer before
SAME_CHOICE = 0.98  # least share of tokens whose experts are those with the highest scores


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
) -> Traced:
    """Run the model over the documents in each phase; every token also goes to `token_file` where given.

    With `probe_next` every MoE layer's router is also asked about the state that the MoE layer before it got.
    """
    blocks = find_blocks(traced.model)
    names = layer_names or {block.layer: block.name for block in blocks}
    counts, outputs = CountsByShare(len(domains)), OutputMeans(len(domains), phases[0])
    with TokenTable(token_file, step, names, domains) as table:
        tokens = TokenCollector(traced, blocks, phases[0], table, probe_next)
        ran = collect(traced, documents, [counts, tokens, outputs], batch_size, phases, advance)
    routers, scoring = router_facts(ran.blocks)
    return Traced(
        Corpus(domains, outputs.documents),
        counts.to_cpu(),
        phases[0],
        names,
        tokens.sample.probe(),
        routers,
        scoring,
        TokenText(traced.tokenizer),
        tokens.contexts,
        outputs.all_means(),
        table.seen() if table.wanted else None,
        str(traced.config.model_type),
        traced.window,
    )


def router_facts(blocks: dict[int, Block]) -> tuple[dict[int, Array], dict[int, str]]:
    """Return the router's rows by layer, and how it scores, of the layers where they are known."""
    routers, scoring = {}, {}
    for layer, block in blocks.items():
        if block.rows_ED is not None:
            routers[layer] = block.rows_ED.detach().double().cpu().numpy()
        if block.scoring is not None:
            scoring[layer] = block.scoring.words()
    return routers, scoring


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
        batch, columns = current.batch, slice(current.start, current.stop)
        wanted = np.array([row.number in self.wanted for row in batch.rows])
        first = np.array([row.start for row in batch.rows])
        positions_BL = first[:, None] + np.arange(current.start, current.stop)
        real_BL = batch.real_BL[:, columns]
        at = np.flatnonzero(real_BL & wanted[:, None] & (positions_BL < OUTPUT_TOKENS))
        self.at = torch.from_numpy(at) if len(at) and current.phase == self.phase else None

    def consume(self, routing: Routing, block: Block) -> None:
        if self.at is None or routing.x_TD is None or block.hands_out:
            return  # the experts of a model that hands out its routing need not be callable alone
        self.at = at = self.at.to(routing.x_TD.device)
        sums_ED, tokens_E = summed_outputs(block, routing.x_TD[at], routing.chosen_TK[at])
        layer = routing.layer
        # in float64, so that the order of batches and workers does not matter
        self.sums[layer] = self.sums.get(layer, 0) + sums_ED.cpu().double()
        self.tokens[layer] = self.tokens.get(layer, 0) + tokens_E.cpu()

    def add(self, other: OutputMeans) -> None:
        """Add the sums over other batches of the same documents."""
        for layer, sums_ED in other.sums.items():
            self.sums[layer] = self.sums.get(layer, 0) + sums_ED
            self.tokens[layer] = self.tokens.get(layer, 0) + other.tokens[layer]

    def all_means(self) -> dict[int, Array]:
        """Return layer -> E x D, NaN for an expert that none of these tokens chose."""
        means = {}
        for layer in sorted(self.sums):
            tokens_E = self.tokens[layer].double()
            means_ED = self.sums[layer] / torch.where(tokens_E > 0, tokens_E, torch.nan)[:, None]
            means[layer] = np.asarray(means_ED.numpy())
        return means


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
        blocks: list[Block],
        phase: str,
        table: TokenTable | HeldRows,
        probe: bool = False,
    ):
        self.traced, self.phase, self.table, self.probe = traced, phase, table, probe
        if probe and (traced.two_stacks or isinstance(traced, StreamedModel)):
            what = "reads two stacks" if traced.two_stacks else "is run layer by layer"
            raise BadInput(
                f"{traced.name}: {what}, and --probe-next needs the states of two layers at once; "
                "leave it out, or use --execution resident"
            )
        self.before_TD: Tensor | None = None  # router input of the MoE layer before
        layers, n_experts = [block.layer for block in blocks], [block.n_experts for block in blocks]
        self.sample, self.contexts = Sample(layers), Contexts(layers, n_experts)
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
        for batch in batches:
            for window in batch.rows:
                sample.add(window, none.reshape(0, 0, 1), none, none)
        self.below = sample.threshold

    def records(self, window: Window) -> bool:
        """Whether the window's tokens are recorded; the same in all passes of a streamed run."""
        return self.table.wanted or window.draw < min(self.below, self.sample.threshold)

    def begin_pass(self, current: Pass) -> None:
        self.before_TD = None
        if current.phase != self.phase:
            self.at = None
            return
        batch = current.batch
        wanted = np.array([self.records(row) for row in batch.rows])
        real_BL = batch.real_BL[:, current.start : current.stop]
        self.positions, self.shape = np.flatnonzero(real_BL & wanted[:, None]), real_BL.shape
        self.at = torch.from_numpy(self.positions).to(self.traced.device) if len(self.positions) else None

    def consume(self, routing: Routing, block: Block) -> None:
        if self.at is None:
            return
        chosen_TK, gates_TK = routing.chosen_TK[self.at], routing.gates_TK[self.at].float()
        falling = gates_TK.masked_fill(chosen_TK < 0, float("-inf"))
        order = falling.argsort(dim=-1, descending=True, stable=True)
        record: tuple[Tensor, ...] = (chosen_TK.gather(1, order).to(torch.int16),)
        if self.table.wanted:
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
        if self.paused:
            self.layers = {
                layer: held.pop(current.number)
                for layer, held in self.paused.items()
                if current.number in held
            }
        if self.at is not None:
            parts = [self.layers[layer] for layer in sorted(self.layers)]
            stacked = (torch.stack(part).cpu().numpy() for part in zip(*parts, strict=True))
            *record, gate_LBE, column_LBE = stacked
            self.layers = {}
            self.store(current, record, output)
            self.largest = keep_larger(self.largest, gate_LBE, column_LBE + current.start)
        if current.is_last and self.recorded:
            self.finish_batch(current)

    def store(self, current: Pass, record: list[np.ndarray], output: Any) -> None:
        shape = current.batch.ids_BL.shape
        if not self.recorded:
            self.predicted_BL = np.full(shape, -1, dtype=np.int64)
            self.recorded = [
                np.full(
                    (len(part), *shape, *part.shape[2:]),
                    np.nan if part.dtype.kind == "f" else -1,
                    dtype=part.dtype,
                )
                for part in record
            ]
        row, column = self.positions // self.shape[1], self.positions % self.shape[1] + current.start
        for batch_part, part in zip(self.recorded, record, strict=True):
            batch_part[:, row, column] = part
        sampled = np.array([self.sample.wants(window) for window in current.batch.rows])[row]
        predicted = predicted_tokens(self.traced, output, self.positions[sampled])
        self.predicted_BL[row[sampled], column[sampled]] = predicted

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
            if self.table.wanted:
                self.table.add(TokenRows(window, current.phase, chosen_LTK, *more))
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
    cell_TK = (at_T // width)[:, None] * n_experts + chosen_TK
    cell = torch.where(chosen_TK >= 0, cell_TK, discarded).view(-1)
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


class HeldRows:
    """Rows of single tokens in memory, for another process to write."""

    def __init__(self, wanted: bool):
        self.wanted = wanted
        self.rows: list[TokenRows] = []

    def add(self, rows: TokenRows) -> None:
        self.rows.append(rows)


class TokenTable:
    """Writes rows of single tokens to a parquet file as the text is read; nothing without a file."""

    def __init__(self, path: Path | None, step: int, layer_names: dict[int, str], domains: list[str]):
        self.path, self.step, self.layer_names, self.domains = path, step, layer_names, domains
        self.writer: Any = None
        self.waiting: list[TokenRows] = []
        self.n_rows = 0
        self.ids: set[int] = set()

    def seen(self) -> Integers:
        """Return every token id that was written."""
        return np.array(sorted(self.ids), dtype=np.int64)

    @property
    def wanted(self) -> bool:
        return self.path is not None

    def __enter__(self) -> TokenTable:
        if self.path is not None:
            import pyarrow.parquet as pq

            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = pq.ParquetWriter(self.path, arrow_schema(TABLES["tokens"]), compression="zstd")
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

    def flush(self) -> None:
        if self.waiting and self.path is not None:
            table = self.arrow_table()
            check_disk(self.path.parent, table.nbytes)
            self.writer.write_table(table)
        self.waiting, self.n_rows = [], 0

    def copy(self, file: Path) -> None:
        """Append the rows of another such table."""
        import pyarrow.parquet as pq

        assert self.path is not None
        part = pq.ParquetFile(file)
        for group in range(part.num_row_groups):
            rows = part.read_row_group(group)
            check_disk(self.path.parent, rows.nbytes)
            self.writer.write_table(rows)

    def arrow_table(self) -> Any:
        """Return what waits, built column by column, since there may be millions of rows."""
        import pyarrow as pa

        waiting = self.waiting
        layers = np.array(list(self.layer_names))
        names = np.array(list(self.layer_names.values()), dtype=object)

        def per_window(values: list[Any]) -> Any:
            return np.repeat(np.array(values, dtype=object), [part.entropy_LT.size for part in waiting])

        def per_token(values: list[Integers]) -> Integers:
            return np.concatenate([np.tile(part, len(layers)) for part in values])

        def per_layer(values: Any) -> Any:
            return np.concatenate([np.repeat(values, len(part.window.ids)) for part in waiting])

        k = waiting[0].chosen_LTK.shape[-1]
        chosen_RK = np.concatenate([part.chosen_LTK.reshape(-1, k) for part in waiting])
        gates_RK = np.concatenate([part.gates_LTK.reshape(-1, k) for part in waiting])
        entropy_R = np.concatenate([part.entropy_LT.reshape(-1) for part in waiting]).astype(float)
        margin_R = np.concatenate([part.margin_LT.reshape(-1) for part in waiting]).astype(float)
        probed = [part.probed_LTX for part in waiting if part.probed_LTX is not None]
        there_RK = chosen_RK >= 0
        offsets = np.concatenate([[0], np.cumsum(there_RK.sum(1))]).astype(np.int32)
        columns = {
            "step": np.full(len(chosen_RK), self.step),
            "document": per_window([part.window.number for part in waiting]).astype(np.int64),
            "position": per_token([part.window.start + np.arange(len(part.window.ids)) for part in waiting]),
            "layer": per_layer(layers),
            "layer_name": per_layer(names),
            "token_id": per_token([part.window.ids for part in waiting]),
            "domain": per_window([self.domains[part.window.domain] for part in waiting]),
            "phase": per_window([part.phase for part in waiting]),
            "experts": pa.ListArray.from_arrays(offsets, pa.array(chosen_RK[there_RK].astype(np.int32))),
            "gates": pa.ListArray.from_arrays(offsets, pa.array(gates_RK[there_RK].astype(np.float32))),
            "entropy": pa.array(entropy_R, from_pandas=True),  # NaN is null
            "margin": pa.array(margin_R, from_pandas=True),
            "probed": filled_lists(probed) if probed else pa.nulls(len(chosen_RK)),
        }
        schema = arrow_schema(TABLES["tokens"])
        arrays = [
            pa.array(columns[name]) if isinstance(columns[name], np.ndarray) else columns[name]
            for name in schema.names
        ]
        return pa.table(arrays, names=schema.names).cast(schema)


def filled_lists(parts: list[Integers]) -> Any:
    """Return a column of lists without their empty places (-1); null where all are empty."""
    import pyarrow as pa

    rows_RX = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
    there_RX = rows_RX >= 0
    counts_R = there_RX.sum(1)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts_R)]).astype(np.int32))
    values = pa.array(rows_RX[there_RX].astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(counts_R == 0))
