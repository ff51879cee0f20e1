"""Functions that a study or a results.toml names in a Python file of its own: "FILE.py:FUNCTION"."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from moescope.errors import BadInput


def split_place(place: Any, folder: Path, where: str) -> tuple[Path, str]:
    """Return the file and the function of "FILE.py:FUNCTION"; a relative file lies in the folder."""
    file, _, function = place.rpartition(":") if isinstance(place, str) else ("", "", "")
    if not file.endswith(".py") or not function.isidentifier():
        raise BadInput(f'{where}: {place!r} names no function; write "FILE.py:FUNCTION"')
    return (folder / file).resolve(), function


def load_function(place: str, folder: Path, where: str) -> Callable[..., Any]:
    """Return the function; its file is run once per process and may import files that lie beside it."""
    path, name = split_place(place, folder, where)
    if not path.is_file():
        raise BadInput(f"{where}: {path}: no such file")
    module_name = f"moescope_user_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    module = sys.modules.get(module_name)
    if module is None:
        spec: Any = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses look their module up
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise BadInput(f"{where}: {path} cannot be run ({type(error).__name__}: {error})") from error
        finally:
            sys.path.remove(str(path.parent))
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput(f"{where}: {path} has no function {name}")
    return function


def long_rows(frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the tables of a probe as rows of study_probes, one per value."""
    parts = []
    for name, frame in frames.items():
        frame = frame.reset_index(drop=True)
        for column in frame:
            numeric = pd.api.types.is_numeric_dtype(frame[column])
            values = {"value" if numeric else "text": frame[column].astype(float if numeric else str)}
            parts.append(pd.DataFrame({"table": name, "row": frame.index, "column": column, **values}))
    empty = pd.DataFrame(columns=["table", "row", "column", "value", "text"])
    return pd.concat(parts, ignore_index=True).reindex(columns=empty.columns) if parts else empty


def probe_tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the tables of a probe again from study_probes, with arm and seed; whole numbers as integers."""
    found = {}
    for name, of_table in rows.groupby("table", sort=False):
        columns = {}
        for column, cells in of_table.groupby("column", sort=False):
            cells = cells.set_index(["arm", "seed", "row"])
            values = cells["value"] if cells["text"].isna().all() else cells["text"]
            whole = values.dtype == float and values.notna().all() and (values % 1 == 0).all()
            columns[column] = values.astype("int64") if whole else values
        found[str(name)] = pd.DataFrame(columns).reset_index().drop(columns="row")
    return found
