"""Changes between two runs of one verb, table by table and row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.tables import Table

if TYPE_CHECKING:
    import pandas as pd


def table_changes(table: Table, a: pd.DataFrame, b: pd.DataFrame) -> list[dict[str, Any]]:
    """One record per column: common rows, their means, median and largest change, where, and spread in `a`.

    A table with a metric column gives one record per metric instead, of its value.
    """
    keys = list(table.keys)
    if "step" in keys and a["step"].nunique() == 1 == b["step"].nunique():
        keys.remove("step")  # two single checkpoints: their step numbers need not agree
    if "metric" in keys:
        return [
            change
            for metric, rows in a.groupby("metric", sort=False)
            for change in column_changes(table, keys, ["value"], rows, b[b["metric"] == metric], metric)
        ]
    return column_changes(table, keys, list(table.values), a, b)


def column_changes(
    table: Table,
    keys: list[str],
    columns: list[str],
    a: pd.DataFrame,
    b: pd.DataFrame,
    metric: str | None = None,
) -> list[dict[str, Any]]:
    both = a.merge(b, on=keys, suffixes=("_a", "_b"), how="inner")
    place_keys = [key for key in keys if key != "metric" and both[key].nunique() > 1] or keys[:1]
    records = []
    for column in columns:
        kind = table.column(column).kind
        if kind in ("floats", "ints"):
            continue
        known = both[both[f"{column}_a"].notna() & both[f"{column}_b"].notna()]
        record: dict[str, Any] = {
            "table": table.name,
            "column": metric or column,
            "label": table.label(metric or column),
            "rows": len(known),
            "only_a": len(a) - len(both),
            "only_b": len(b) - len(both),
        }
        records.append(record)
        if known.empty:
            continue
        before, after = known[f"{column}_a"], known[f"{column}_b"]
        if kind in ("bool", "text"):
            sizes = (before != after).to_numpy()
        else:
            change = after.to_numpy(float) - before.to_numpy(float)
            sizes = np.abs(change)
            record["mean_a"], record["mean_b"] = float(before.mean()), float(after.mean())
            record["median"] = float(np.median(sizes))
            record["spread"] = float(np.std(before.to_numpy(float)))
            record["largest"] = 0.0
        record["changed"] = int((sizes != 0).sum())
        if record["changed"]:
            place = int(np.argmax(sizes))
            if "largest" in record:
                record["largest"] = float(change[place])
            record["where"] = {key: to_python(known.iloc[place][key]) for key in place_keys}
            record["a"], record["b"] = to_python(before.iloc[place]), to_python(after.iloc[place])
    return records


def to_python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
