"""The tokens of a trace in reading order, as arrays, and how documents are split for learning and testing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moescope.engine import ProcessEngine
from moescope.errors import BadInput
from moescope.run import Run
from moescope.statistics import BUCKETS, FEWEST_DOCUMENTS
from moescope.tables import wrong_column
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pyarrow as pa

Mask = NDArray[np.bool_]
MOST_EXPERTS = 4096


@dataclass(frozen=True)
class TokenTrace:
    """Every token's experts in every MoE layer; tokens are in reading order, document after document."""

    layers: list[int]
    layer_names: list[str]
    n_experts: list[int]
    chosen_LTK: NDArray[np.int16]  # -1 where a slot is empty, or a layer did not see the token
    document_T: Integers  # from 0, without gaps
    domain_D: list[str]
    phase: str
    step: int
    # experts that each layer's router names about the state of the layer before, best first; None: not probed
    probed_LTX: NDArray[np.int16] | None = None

    @property
    def n_documents(self) -> int:
        return len(self.domain_D)

    @property
    def k(self) -> int:
        return self.chosen_LTK.shape[2]

    @property
    def group_T(self) -> Integers:
        """Group of documents for the jackknife: one document each, as long as there are few."""
        return self.document_T % self.n_groups

    @property
    def n_groups(self) -> int:
        return min(self.n_documents, BUCKETS)

    @property
    def has_intervals(self) -> bool:
        return self.n_documents >= FEWEST_DOCUMENTS

    def starts(self) -> Integers:
        """Index of each document's first token."""
        return np.flatnonzero(np.diff(self.document_T, prepend=-1))

    def part(self, begin: int, end: int) -> TokenTrace:
        """Some of its layers."""
        own = slice(begin, end)
        return replace(
            self,
            layers=self.layers[own],
            layer_names=self.layer_names[own],
            n_experts=self.n_experts[own],
            chosen_LTK=self.chosen_LTK[own],
            probed_LTX=None if self.probed_LTX is None else self.probed_LTX[own],
        )


class Split(NamedTuple):
    """Tokens to learn from, and other tokens to test on."""

    learn_T: Mask
    test_T: Mask


def split_tokens(document_T: Integers, seed: int) -> list[Split]:
    """Return two splits, each half of the documents once learned from and once tested on.

    A single document is split by time: learned from its first half, tested on its second.
    """
    documents = int(document_T.max(initial=0)) + 1
    if documents == 1:
        first_T = np.arange(len(document_T)) < len(document_T) // 2
        return [Split(first_T, ~first_T)]
    order = np.random.default_rng(seed).permutation(documents)
    half_D = np.zeros(documents, dtype=bool)
    half_D[order[: documents // 2]] = True
    half_T = half_D[document_T]
    return [Split(half_T, ~half_T), Split(~half_T, half_T)]


def usage(chosen_TK: NDArray[np.integer], n_experts: int) -> Integers:
    """Tokens per expert."""
    return np.bincount(chosen_TK[chosen_TK >= 0], minlength=n_experts)


def hottest_first(counts_E: Array | Integers) -> Integers:
    """Return the experts by falling count; ties by ascending number."""
    return np.argsort(-counts_E, kind="stable")


Result = TypeVar("Result")


def map_parts(
    work: Callable[[TokenTrace], Result], parts: list[TokenTrace], jobs: int, advance: Callable[[int], None]
) -> list[Result]:
    """Return the work's result for every part of a trace, in order; in processes where there are jobs."""
    if jobs == 1:
        results = []
        for part in parts:
            results.append(work(part))
            advance(1)
        return results
    found: dict[int, Result] = {}
    tasks = list(enumerate(parts))
    for (number, _), result in ProcessEngine("cpu", jobs).run(partial(numbered, work), tasks, ignore):
        found[number] = result
        advance(1)
    return [found[number] for number in range(len(parts))]


def numbered(
    work: Callable[[TokenTrace], Result], task: tuple[int, TokenTrace], tick: Callable[[], None]
) -> Result:
    return work(task[1])


def ignore(task: tuple[int, TokenTrace]) -> None:
    """No progress within a task."""


# --- reading


class TokenReader:
    """Reads the tokens table of a trace, row group by row group: of its last step, and one phase.

    A table of a million tokens and 48 layers takes its experts' size in memory. Phase None: decode where the
    trace has it.
    """

    def __init__(self, run: Run, phase: str | None) -> None:
        import pyarrow.parquet as pq

        if run.verb.name != "trace" or "tokens" not in run.tables:
            inner = run.parts.get("trace")
            remedy = (
                f"give {inner.path}"
                if inner is not None and "tokens" in inner.tables
                else "give a run of moescope trace MODEL --text FILE --save-tokens"
            )
            raise BadInput(f"{run.path}: holds no tokens table; {remedy}")
        self.run, self.path = run, run.files("tokens")[0]
        with self.named_errors():
            self.table = pq.ParquetFile(self.path)
            if wrong := wrong_column(self.table.schema_arrow, run.verb.tables["tokens"]):
                raise ValueError(f"column {wrong}")
            kinds = set()
            for part in row_groups(self.table, ["step", "phase"]):
                pairs = part.group_by(["step", "phase"]).aggregate([])
                kinds |= set(zip(pairs["step"].to_pylist(), pairs["phase"].to_pylist(), strict=True))
            if not kinds:
                raise BadInput(f"{self.path}: no token in it; trace a longer text")
            self.step = max(number for number, _ in kinds)
        phases = {name for number, name in kinds if number == self.step}
        self.phase = phase or ("decode" if "decode" in phases else "prefill")
        if self.phase not in phases:
            raise BadInput(f"{run.path}: no tokens of {self.phase} in it; leave --phase out")
        with self.named_errors():
            self.read_keys()

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(
                f"{self.path}: cannot be read ({why}); repeat its trace with --overwrite"
            ) from None

    def selected(self, columns: list[str]) -> Iterator[pa.Table]:
        import pyarrow.compute as pc

        for part in row_groups(self.table, ["step", "phase", *columns]):
            same = pc.and_(pc.equal(part["step"], self.step), pc.equal(part["phase"], self.phase))
            yield part.filter(same)

    def read_keys(self) -> None:
        """Find tokens, layers, domains and the largest number of experts per token."""
        import pyarrow.compute as pc

        self.keys_T, self.width = np.zeros(0, dtype=np.int64), 1
        layers: dict[int, str] = {}
        self.domains: dict[int, str] = {}
        for part in self.selected(["document", "position", "layer", "layer_name", "domain", "experts"]):
            self.keys_T = np.union1d(self.keys_T, token_keys(part))
            for found, names in ((layers, ("layer", "layer_name")), (self.domains, ("document", "domain"))):
                pairs = part.group_by(list(names)).aggregate([])
                found |= dict(zip(*(pairs[name].to_pylist() for name in names), strict=True))
            self.width = max(self.width, pc.max(pc.list_value_length(part["experts"])).as_py() or 1)
        self.layers = dict(sorted(layers.items()))

    def longest_list(self, column: str) -> int:
        """Length of a column's longest list; 0 where the trace has none."""
        import pyarrow.compute as pc

        if column not in self.table.schema_arrow.names:
            return 0
        with self.named_errors():
            parts = self.selected([column])
            return max([pc.max(pc.list_value_length(part[column])).as_py() or 0 for part in parts], default=0)

    def lists(self, column: str, filler: float, dtype: Any, width: int | None = None) -> NDArray[Any]:
        """Return a column of lists as [layers, tokens, slots]."""
        width = width or self.width
        found_LTK = np.full((len(self.layers), len(self.keys_T), width), filler, dtype=dtype)
        numbers = np.array(list(self.layers))
        with self.named_errors():
            for part in self.selected(["document", "position", "layer", column]):
                rows = np.searchsorted(numbers, part["layer"].to_numpy())
                tokens = np.searchsorted(self.keys_T, token_keys(part))
                found_LTK[rows, tokens] = padded_lists(part[column], width, filler, dtype)
        return found_LTK

    def numbers(self, column: str) -> Array:
        """Return a column of numbers as [layers, tokens]; NaN where there is none."""
        found_LT = np.full((len(self.layers), len(self.keys_T)), np.nan)
        layers = np.array(list(self.layers))
        with self.named_errors():
            if column in self.table.schema_arrow.names:
                for part in self.selected(["document", "position", "layer", column]):
                    rows = np.searchsorted(layers, part["layer"].to_numpy())
                    tokens = np.searchsorted(self.keys_T, token_keys(part))
                    found_LT[rows, tokens] = part[column].to_numpy()
        return found_LT

    def token_ids(self) -> Integers:
        """Return the id of every token, -1 where unknown."""
        ids_T = np.full(len(self.keys_T), -1, dtype=np.int64)
        with self.named_errors():
            for part in self.selected(["document", "position", "token_id"]):
                tokens = np.searchsorted(self.keys_T, token_keys(part))
                ids_T[tokens] = part["token_id"].fill_null(-1).to_numpy()
        return ids_T


def read_tokens(run: Run, phase: str | None) -> TokenTrace:
    """Read the experts of every token of a trace."""
    reader = TokenReader(run, phase)
    chosen_LTK = reader.lists("experts", -1, np.int16)
    if (chosen_LTK < 0).all():
        raise BadInput(f"{reader.path}: no token chose an expert; repeat its trace with --overwrite")
    documents, document_T = np.unique(reader.keys_T >> 32, return_inverse=True)
    layers = list(reader.layers)
    experts = experts_of(run, layers, reader.path, chosen_LTK)
    domain_D = [reader.domains[int(number)] or "" for number in documents]
    names = [name or f"layer {number}" for number, name in reader.layers.items()]
    width = reader.longest_list("probed")
    probed_LTX = reader.lists("probed", -1, np.int16, width) if width else None
    if probed_LTX is not None:
        experts_of(run, layers, reader.path, probed_LTX)
    kind = reader.phase, reader.step
    return TokenTrace(layers, names, experts, chosen_LTK, document_T, domain_D, *kind, probed_LTX)


def row_groups(table: Any, columns: list[str]) -> Iterator[pa.Table]:
    for number in range(table.num_row_groups):
        yield table.read_row_group(number, columns)


def token_keys(part: pa.Table) -> Integers:
    """One number per row that sorts by document, then position."""
    document, position = (part[name].to_numpy().astype(np.int64) for name in ("document", "position"))
    if len(document) and (
        min(document.min(), position.min()) < 0 or max(document.max(), position.max()) >= 2**31
    ):
        raise ValueError("document or position out of range")
    return (document << 32) | position


def padded_lists(lists: Any, width: int, filler: float, dtype: Any) -> NDArray[Any]:
    """Return lists of numbers as rows of equal width."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    values = pc.list_flatten(lists).to_numpy().astype(dtype)
    if (lengths == width).all():
        return values.reshape(-1, width)
    rows = np.full((len(lengths), width), filler, dtype=dtype)
    rows[np.arange(width) < lengths[:, None]] = values
    return rows


def experts_of(run: Run, layers: list[int], path: Path, chosen_LTK: NDArray[np.int16]) -> list[int]:
    """Return the experts per layer that the trace states; a higher expert number is an error."""
    rows = run.table("routing_layers").groupby("layer")["n_experts"].max()
    found = []
    for layer, chosen_TK in zip(layers, chosen_LTK, strict=True):
        stated, highest = int(rows.get(layer, 0)), int(chosen_TK.max(initial=-1))
        if highest >= stated or chosen_TK.min(initial=-1) < -1 or stated > MOST_EXPERTS:
            raise BadInput(
                f"{path}: layer {layer} names expert {highest} of {stated}; repeat its trace with --overwrite"
            )
        found.append(stated)
    return found
