"""Figures and tables as JSON for the page: arrays as plotly's own typed arrays, numbers to six digits."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moescope.tables import Table
from moescope.verb import Figure

FEW = 16  # numbers from which on arrays are faster than a loop
SMALL = 64  # arrays of up to so many numbers are written out


def typed_array(array: np.ndarray) -> Any:
    """Return an array as plotly.js takes it: a list if it is small, else base64 of float32 or integers."""
    if array.dtype.kind not in "iuf" or array.size <= SMALL:
        return plain(array.tolist())
    from _plotly_utils.utils import to_typed_array_spec

    return to_typed_array_spec(array.astype(np.float32) if array.dtype.kind == "f" else array)


def rounded(values: Sequence[float]) -> list[float | None]:
    """Return numbers to six significant digits, null where there is no number; many are rounded at once."""
    if len(values) < FEW:
        return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
    array = np.asarray(values, float)
    known = np.isfinite(array) & (array != 0)
    digits = 5 - np.floor(np.log10(np.abs(array, where=known, out=np.ones_like(array)))).astype(int)
    usual = known & (digits >= 0) & (digits <= 20)  # powers of ten without a rounding error
    scale = 10.0 ** np.where(usual, digits, 0)
    short = np.where(usual, np.round(array * scale) / scale, array)
    numbers = zip(short.tolist(), usual.tolist(), strict=True)
    return [number if fine else plain(number) for number, fine in numbers]


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it: six significant digits, null where there is no number."""
    if isinstance(value, np.ndarray):
        return typed_array(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        if kinds == {float}:
            return rounded(value)
        return list(value) if kinds <= {int, str} else [plain(item) for item in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if value is None or value is pd.NA:
        return None
    return str(value)


def figure_payload(figure: Figure, wide: bool = False) -> dict[str, Any]:
    """Return the figure's fields, and those of its slider, as plain data."""
    slider = figure.slider and {**vars(figure.slider), "layouts": plain(figure.slider.layouts)}
    drawn = {"data": [plain(trace) for trace in figure.data], "layout": plain(figure.layout)}
    return {**vars(figure), **drawn, "slider": slider, "wide": wide}


def table_payload(table: Table, frame: pd.DataFrame, columns: Sequence[str], title: str) -> dict[str, Any]:
    """Return a table to show and to download; heads and terms link to the glossary, terms are labelled."""
    heads = [
        {
            "name": name,
            "title": table.label(name),
            "kind": table.column(name).kind,
            "entry": table.key(name),
            **({"terms": {term: table.label(term) for term in table.terms}} if name == "metric" else {}),
        }
        for name in columns
    ]
    rows = zip(*(plain(frame[name].tolist()) for name in columns), strict=True)
    return {"name": table.name, "title": title, "columns": heads, "rows": [list(row) for row in rows]}


def plain_table(
    name: str,
    title: str,
    heads: Sequence[tuple[str, str, str]],
    rows: Sequence[Sequence[Any]],
) -> dict[str, Any]:
    """Return a table that stands in no file; heads are (glossary entry, title, kind)."""
    columns = [{"name": entry, "title": head, "kind": kind} for entry, head, kind in heads]
    return {"name": name, "title": title, "columns": columns, "rows": plain(list(rows))}


def packed(value: Any) -> str:
    """Return a payload as base64 of gzipped JSON: the page unpacks it when it is needed."""
    options: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    try:
        text = json.dumps(value, **options)
    except ValueError:  # infinite, as only a changed table holds
        text = json.dumps(plain(value), **options)
    return pack_text(text)


def pack_text(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode("ascii")


def script_json(value: Any) -> str:
    """Return JSON that may stand inside a script element: no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
