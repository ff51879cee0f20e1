"""The tokens of a trace in reading order, as arrays, and how documents are split for learning and testing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from moescope.engine import LocalEngine, ProcessEngine
from moescope.errors import BadInput, reject_if
from moescope.run import Run
from moescope.statistics import BUCKETS
from moescope.tables import opened_parquet, wrong_column
from moescope.types import Array, Integers

Mask = NDArray[np.bool_]
MOST_EXPERTS = 4096
AGAIN = "repeat its trace with --overwrite"


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

    def starts(self) -> Integers:
        """Index of each document's first token."""
        return np.flatnonzero(np.diff(self.document_T, prepend=-1))

    def place(self, at: int) -> dict[str, Any]:
        """What a row says of the layer at this place; after the last one, of all layers together."""
        if at == len(self.layers):
            return {"layer": None, "n_experts": max(self.n_experts)}
        names = {"layer": self.layers[at], "layer_name": self.layer_names[at]}
        return names | {"n_experts": self.n_experts[at]}

    def part(self, begin: int, end: int) -> TokenTrace:
        """Some of its layers."""
        by_layer = ("layers", "layer_names", "n_experts", "chosen_LTK", "probed_LTX")
        known = {name: values for name in by_layer if (values := getattr(self, name)) is not None}
        return replace(self, **{name: values[begin:end] for name, values in known.items()})


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
    half_T = np.isin(document_T, order[: documents // 2])
    return [Split(half_T, ~half_T), Split(~half_T, half_T)]


def usage(chosen_TK: NDArray[np.integer], n_experts: int) -> Integers:
    """Tokens per expert."""
    return np.bincount(chosen_TK[chosen_TK >= 0], minlength=n_experts)


def counts_by(chosen_TK: NDArray[np.integer], part_T: Integers, parts: int, n: int) -> Integers:
    """Tokens per part of the text and expert."""
    flat = (part_T[:, None] * n + chosen_TK)[chosen_TK >= 0]
    return np.bincount(flat, minlength=parts * n).reshape(parts, n)


def hottest_first(counts_E: Array | Integers) -> Integers:
    """Return the experts by falling count; ties by ascending number."""
    return np.argsort(-counts_E, kind="stable")


Result = TypeVar("Result")


def map_parts(
    work: Callable[[TokenTrace], Result], parts: list[TokenTrace], jobs: int, advance: Callable[[int], None]
) -> list[Result]:
    """Return the work's result for every part of a trace, in order; in processes where there are jobs."""
    engine = LocalEngine("cpu") if jobs == 1 else ProcessEngine("cpu", jobs)
    by_number: dict[int, Result] = {}
    for (number, _), result in engine.run(partial(numbered, work), list(enumerate(parts)), lambda task: None):
        by_number[number] = result
        advance(1)
    return [by_number[number] for number in range(len(parts))]


def numbered(
    work: Callable[[TokenTrace], Result], task: tuple[int, TokenTrace], tick: Callable[[], None]
) -> Result:
    return work(task[1])


# --- reading


class TokenReader:
    """Reads the tokens table of a trace, row group by row group: of its last step, and one phase.

    A table of a million tokens and 48 layers takes its experts' size in memory. Phase None: decode where the
    trace has it.
    """

    def __init__(self, run: Run, phase: str | None) -> None:
        if run.verb.name != "trace" or "tokens" not in run.tables:
            inner = run.parts.get("trace")
            remedy: Any = "a run of moescope trace MODEL --text FILE --save-tokens"
            if inner is not None and "tokens" in inner.tables:
                remedy = inner.path
            raise BadInput(f"{run.path}: holds no tokens table; give {remedy}")
        self.run, self.path = run, run.intact_files("tokens")[0]
        with self.opened():
            if wrong := wrong_column(self.table.schema_arrow, run.verb.tables["tokens"]):
                raise ValueError(f"column {wrong}")
            kinds = set()
            for part in self.row_groups(["step", "phase"]):
                kinds.update(distinct(part, "step", "phase"))
            if not kinds:
                raise BadInput(f"{self.path}: no token in it; trace a longer text")
            self.step = max(number for number, _ in kinds)
        phases = {name for number, name in kinds if number == self.step}
        self.phase = phase or ("decode" if "decode" in phases else "prefill")
        if self.phase not in phases:
            raise BadInput(f"{run.path}: no tokens of {self.phase} in it; leave --phase out")
        self.keys_T, self.width = np.zeros(0, dtype=np.int64), 1
        names = {"layer": "layer_name", "document": "domain"}
        found: dict[str, dict[int, str]] = {key: {} for key in names}
        with self.opened():
            for part in self.selected([*names, *names.values(), "position", "experts"]):
                self.keys_T = np.union1d(self.keys_T, token_keys(part))
                for key, name in names.items():
                    found[key] |= dict(distinct(part, key, name))
                self.width = max(self.width, longest(part["experts"]))
        self.layers, self.domains = dict(sorted(found["layer"].items())), found["document"]
        stated = run.table("routing_layers").groupby("layer")["n_experts"].max().fillna(0)
        self.n_experts = [int(stated.get(layer, 0)) for layer in self.layers]

    @contextmanager
    def opened(self) -> Iterator[None]:
        with opened_parquet(self.path) as self.table:
            yield

    def row_groups(self, columns: list[str]) -> Iterator[pa.Table]:
        return (self.table.read_row_group(at, columns) for at in range(self.table.num_row_groups))

    def selected(self, columns: list[str]) -> Iterator[pa.Table]:
        for part in self.row_groups(["step", "phase", *columns]):
            same = pc.and_(pc.equal(part["step"], self.step), pc.equal(part["phase"], self.phase))
            yield part.filter(same)

    def longest_list(self, column: str) -> int:
        """Length of a column's longest list; 0 where the trace has none."""
        parts = self.selected([column]) if column in self.table.schema_arrow.names else ()
        with self.opened():
            return max((longest(part[column]) for part in parts), default=0)

    def scatter(
        self, column: str, values_LTX: NDArray[Any], read: Callable[[Any, Integers], Any]
    ) -> NDArray[Any]:
        """Write a column's values, read of their rows and the rows' layers, at their layer and token."""
        layers, n_rows = np.array(list(self.layers)), 0
        there_LT = np.zeros(values_LTX.shape[:2], dtype=bool)
        with self.opened():
            for part in self.selected(["document", "position", "layer", column]):
                rows = np.searchsorted(layers, part["layer"].to_numpy())
                place = rows, np.searchsorted(self.keys_T, token_keys(part))
                values_LTX[place] = read(part[column], rows)
                there_LT[place], n_rows = True, n_rows + len(rows)
            reject_if(n_rows > there_LT.sum(), f"{self.path}: a token has two rows in one layer; {AGAIN}")
        return values_LTX

    def lists(self, column: str, filler: float, dtype: Any, width: int | None = None) -> NDArray[Any]:
        """Return a column of lists as [layers, tokens, slots]."""
        width = width or self.width
        empty_LTK = np.full((len(self.layers), len(self.keys_T), width), filler, dtype=dtype)
        return self.scatter(column, empty_LTK, lambda lists, _: padded_lists(lists, width, filler, dtype))

    def choices(self, column: str, width: int | None = None) -> NDArray[np.int16]:
        """Return a column of experts as [layers, tokens, slots].

        Experts that a layer does not have, and one that a token names twice in a layer, are errors.
        """
        slots = width or self.longest_list(column)

        def read(lists: Any, layer_R: Integers) -> Integers:
            chosen_RK = padded_lists(lists, slots, -1, np.int64)
            ordered_RK = np.sort(chosen_RK)
            stated_R = np.array(self.n_experts)[layer_R]
            twice_RK = (ordered_RK[:, 1:] == ordered_RK[:, :-1]) & (ordered_RK[:, 1:] >= 0)
            unknown_R = (ordered_RK[:, 0] < -1) | (ordered_RK[:, -1] >= stated_R) | (stated_R > MOST_EXPERTS)
            wrong_R = unknown_R | twice_RK.any(1)
            if wrong_R.any():
                at = int(wrong_R.argmax())
                layer, names = list(self.layers)[layer_R[at]], chosen_RK[at].tolist()
                wrong = f"layer {layer} has {stated_R[at]} experts, and a token names {names}"
                raise BadInput(f"{self.path}: {wrong}; {AGAIN}")
            return chosen_RK

        shape = len(self.layers), len(self.keys_T), slots
        return self.scatter(column, np.full(shape, -1, dtype=np.int16), read)

    def numbers(self, column: str) -> Array:
        """Return a column of numbers as [layers, tokens]; NaN where there is none."""
        empty_LT = np.full((len(self.layers), len(self.keys_T)), np.nan)
        known = column in self.table.schema_arrow.names
        return self.scatter(column, empty_LT, lambda values, _: values.to_numpy()) if known else empty_LT

    def token_ids(self) -> Integers:
        """Return the id of every token, -1 where unknown."""
        ids_T = np.full(len(self.keys_T), -1, dtype=np.int64)
        with self.opened():
            for part in self.selected(["document", "position", "token_id"]):
                tokens = np.searchsorted(self.keys_T, token_keys(part))
                ids_T[tokens] = part["token_id"].fill_null(-1).to_numpy()
        return ids_T


def read_tokens(run: Run, phase: str | None) -> TokenTrace:
    """Read the experts of every token of a trace."""
    reader = TokenReader(run, phase)
    chosen_LTK = reader.choices("experts", reader.width)
    if (chosen_LTK < 0).all():
        raise BadInput(f"{reader.path}: no token chose an expert; {AGAIN}")
    probed_LTX = reader.choices("probed") if reader.longest_list("probed") else None
    documents, document_T = np.unique(reader.keys_T >> 32, return_inverse=True)
    domain_D = [reader.domains[int(number)] or "" for number in documents]
    names = [name or f"layer {number}" for number, name in reader.layers.items()]
    text = chosen_LTK, document_T, domain_D, reader.phase, reader.step
    return TokenTrace(list(reader.layers), names, reader.n_experts, *text, probed_LTX)


def distinct(part: pa.Table, *columns: str) -> list[tuple[Any, ...]]:
    """Return the combinations of values in some columns."""
    rows = part.group_by(list(columns)).aggregate([])
    return list(zip(*(rows[name].to_pylist() for name in columns), strict=True))


def token_keys(part: pa.Table) -> Integers:
    """One number per row that sorts by document, then position."""
    document, position = (part[name].to_numpy().astype(np.int64) for name in ("document", "position"))
    if len(document) and (
        min(document.min(), position.min()) < 0 or max(document.max(), position.max()) >= 2**31
    ):
        raise ValueError("document or position out of range")
    return (document << 32) | position


def longest(lists: Any) -> int:
    length = pc.max(pc.list_value_length(lists)).as_py() or 0
    if length > MOST_EXPERTS:
        raise ValueError(f"a list of {length:,} values")
    return length


def padded_lists(lists: Any, width: int, filler: float, dtype: Any) -> NDArray[Any]:
    """Return lists of numbers as rows of equal width."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    values = pc.list_flatten(lists).to_numpy().astype(dtype)
    if (lengths == width).all():
        return values.reshape(-1, width)
    rows = np.full((len(lengths), width), filler, dtype=dtype)
    rows[np.arange(width) < lengths[:, None]] = values
    return rows
