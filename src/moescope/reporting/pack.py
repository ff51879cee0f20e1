"""Figures and tables as compact JSON: large matrices as uint16, long lines as float32, both in base64.

The page unpacks them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moescope.glossary import COLUMNS
from moescope.plotting.style import Figure
from moescope.tables import table as table_spec

SMALL = 64  # up to so many numbers are written out
MISSING = 65535


def pack_array(array: np.ndarray) -> Any:
    """Lists for small arrays; matrices quantised to 65,535 levels between their ends (65535 = missing).

    Lines as float32.
    """
    if array.dtype.kind in "iub":
        return array.tolist()
    if array.size <= SMALL:
        return plain(array.tolist())
    if array.ndim == 2:
        finite = array[np.isfinite(array)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        scale = (high - low) or 1.0
        levels = np.where(
            np.isfinite(array), np.round((np.nan_to_num(array) - low) / scale * (MISSING - 1)), MISSING
        )
        return {
            "u16": encode(levels.astype("<u2")),
            "low": low,
            "high": low + scale,
            "shape": list(array.shape),
        }
    return {"f32": encode(array.astype("<f4"))}


def encode(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def plain(value: Any) -> Any:
    """The value as JSON can hold it: six significant digits, null where there is no number."""
    if isinstance(value, np.ndarray):
        return pack_array(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
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
    slider = figure.slider
    return {
        "name": figure.name,
        "title": figure.title,
        "caption": figure.caption,
        "columns": figure.columns,
        "height": figure.height,
        "wide": wide,
        "data": [plain(trace) for trace in figure.data],
        "layout": plain(figure.layout),
        "slider": slider
        and {
            "label": slider.label,
            "values": slider.values,
            "start": slider.start,
            "per": slider.per_value,
            "orders": slider.orders,
            "titles": slider.titles,
            "captions": slider.captions,
        },
    }


def table_payload(name: str, frame: pd.DataFrame, columns: list[str], title: str) -> dict[str, Any]:
    """A table to show and to download; column heads link to the glossary."""
    spec = table_spec(name)
    return {
        "name": name,
        "title": title,
        "columns": [
            {
                "name": column,
                "title": spec.column(column).title or column.replace("_", " "),
                "kind": spec.column(column).kind,
                **(
                    {"entry": f"{name}.{column}"} if f"{name}.{column}" in COLUMNS else {}
                ),  # where the glossary has it
            }
            for column in columns
        ],
        "rows": [
            [plain(value) for value in row] for row in frame[columns].itertuples(index=False, name=None)
        ],
    }


def glance_payload(heads: Sequence[tuple[str, str, str]], rows: list[list[Any]]) -> dict[str, Any]:
    """The summary's table, a row a layer that links to it; heads are (name, title, kind)."""
    columns = [{"name": name, "title": title, "kind": kind} for name, title, kind in heads]
    return {
        "name": "layers_at_a_glance",
        "title": "Layers at a glance",
        "columns": columns,
        "rows": plain(rows),
        "links": True,
    }


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
