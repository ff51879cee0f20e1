"""The tokens table, written as the text is read: it may be far larger than memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from moescope.routing.arrays import Array, Integers
from moescope.routing.documents import Window
from moescope.run import check_disk
from moescope.tables import arrow_schema, conform

ROWS_AT_ONCE = 200_000  # rows of a row group


class TokenTable:
    """Rows of single tokens into a parquet file, some 200,000 at a time; nothing at all where no file is given."""

    def __init__(self, path: Path | None, step: int, layer_names: dict[int, str], domains: list[str]):
        self.path, self.step, self.layer_names, self.domains = path, step, layer_names, domains
        self.writer: Any = None
        self.waiting: list[dict[str, Any]] = []

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
        self,
        window: Window,
        phase: str,
        chosen_LTK: Integers,
        gates_LTK: Array | None = None,
        entropy_LT: Array | None = None,
    ) -> None:
        for index, (layer, name) in enumerate(self.layer_names.items()):
            for token, experts in enumerate(chosen_LTK[index]):
                there = experts >= 0
                entropy = np.nan if entropy_LT is None else float(entropy_LT[index, token])
                self.waiting.append(
                    {
                        "step": self.step, "document": window.number, "position": window.start + token, "layer": layer,
                        "layer_name": name, "token_id": int(window.ids[token]), "domain": self.domains[window.domain], "phase": phase,
                        "experts": experts[there].tolist(), "gates": None if gates_LTK is None else gates_LTK[index, token][there].tolist(),
                        "entropy": None if np.isnan(entropy) else entropy,
                    }
                )  # fmt: skip
        if len(self.waiting) >= ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self.waiting and self.path is not None:
            import pandas as pd

            rows = conform("tokens", pd.DataFrame(self.waiting))
            check_disk(self.path.parent, rows.nbytes)
            self.writer.write_table(rows)
        self.waiting = []
