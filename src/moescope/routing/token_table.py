"""The tokens table, written as the text is read: it may be far larger than memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from moescope.execution.documents import Window
from moescope.storage import check_disk
from moescope.tables import arrow_schema
from moescope.types import Array, Integers

ROWS_AT_ONCE = 200_000  # rows of a row group, about


class Part(NamedTuple):
    """One window's rows, layer after layer."""

    window: Window
    phase: str
    chosen_LTK: Integers
    gates_LTK: Array
    entropy_LT: Array


class TokenTable:
    """Rows of single tokens into a parquet file, some 200,000 at a time.

    Nothing at all where no file is given.
    """

    def __init__(self, path: Path | None, step: int, layer_names: dict[int, str], domains: list[str]):
        self.path, self.step, self.layer_names, self.domains = path, step, layer_names, domains
        self.writer: Any = None
        self.waiting: list[Part] = []
        self.rows = 0
        self.ids: set[int] = set()

    def seen(self) -> Integers:
        """Every token id that was written."""
        return np.array(sorted(self.ids), dtype=np.int64)

    @property
    def wanted(self) -> bool:
        return self.path is not None

    def __enter__(self) -> TokenTable:
        if self.path is not None:
            import pyarrow.parquet as pq

            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = pq.ParquetWriter(self.path, arrow_schema("tokens"), compression="zstd")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer is not None:
            if kind is None:
                self.flush()
            self.writer.close()

    def add(
        self, window: Window, phase: str, chosen_LTK: Integers, gates_LTK: Array, entropy_LT: Array
    ) -> None:
        self.waiting.append(Part(window, phase, chosen_LTK.copy(), gates_LTK.copy(), entropy_LT.copy()))
        self.ids.update(np.unique(window.ids).tolist())
        self.rows += entropy_LT.size
        if self.rows >= ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self.waiting and self.path is not None:
            table = self.table()
            check_disk(self.path.parent, table.nbytes)
            self.writer.write_table(table)
        self.waiting, self.rows = [], 0

    def table(self) -> Any:
        """What waits, as an arrow table; built column by column, since there may be millions of rows."""
        import pyarrow as pa

        layers = np.array(list(self.layer_names))
        names = np.array(list(self.layer_names.values()), dtype=object)

        def each(values: list[Any]) -> Any:
            """One value a window, for all of its rows."""
            return np.repeat(np.array(values, dtype=object), [part.entropy_LT.size for part in self.waiting])

        def by_token(values: list[Integers]) -> Integers:
            return np.concatenate([np.tile(part, len(layers)) for part in values])

        def by_layer(values: Any) -> Any:
            return np.concatenate([np.repeat(values, len(part.window.ids)) for part in self.waiting])

        chosen_RK = np.concatenate(
            [part.chosen_LTK.reshape(-1, part.chosen_LTK.shape[-1]) for part in self.waiting]
        )
        gates_RK = np.concatenate([part.gates_LTK.reshape(-1, chosen_RK.shape[1]) for part in self.waiting])
        entropy_R = np.concatenate([part.entropy_LT.reshape(-1) for part in self.waiting]).astype(float)
        there_RK = chosen_RK >= 0
        offsets = np.concatenate([[0], np.cumsum(there_RK.sum(1))]).astype(np.int32)
        columns = {
            "step": np.full(len(chosen_RK), self.step),
            "document": each([part.window.number for part in self.waiting]).astype(np.int64),
            "position": by_token(
                [part.window.start + np.arange(len(part.window.ids)) for part in self.waiting]
            ),
            "layer": by_layer(layers),
            "layer_name": by_layer(names),
            "token_id": by_token([part.window.ids for part in self.waiting]),
            "domain": each([self.domains[part.window.domain] for part in self.waiting]),
            "phase": each([part.phase for part in self.waiting]),
            "experts": pa.ListArray.from_arrays(offsets, pa.array(chosen_RK[there_RK].astype(np.int32))),
            "gates": pa.ListArray.from_arrays(offsets, pa.array(gates_RK[there_RK].astype(np.float32))),
            "entropy": pa.array(entropy_R, from_pandas=True),  # NaN is null
        }
        schema = arrow_schema("tokens")
        return pa.table(
            [
                pa.array(columns[name]) if isinstance(columns[name], np.ndarray) else columns[name]
                for name in schema.names
            ],
            names=schema.names,
        ).cast(schema)
