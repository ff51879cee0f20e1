"""Two runs of one kind, table by table and row by row: how much each column changed, and where most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.errors import BadInput
from moescope.run import Run, default_folder, open_run
from moescope.tables import TABLES
from moescope.weights.verb import finished_run

if TYPE_CHECKING:
    import pandas as pd

NOT_COMPARED = ("tokens", "vocabulary")  # rows that are there or not, by rank; as large as the text


def compare_runs(
    a: str | Path | Run, b: str | Path | Run, out: str | Path | None, given: list[str], overwrite: bool
) -> Run:
    """A run whose `changes` say of every column of every table both runs have how much it changed.

    Most of all where.
    """
    for one in (a, b):
        if not isinstance(one, Run) and not (Path(one) / "run.json").is_file():
            raise BadInput(
                f"{one}: not a run folder, while the other is one; give two checkpoints or two runs"
            )
    if given:
        raise BadInput(f"--{given[0]} belongs to comparing checkpoints; leave it out when comparing runs")
    runs = [one if isinstance(one, Run) else Run.load(one) for one in (a, b)]
    verbs = [run.info["verb"] for run in runs]
    if verbs[0] != verbs[1]:
        raise BadInput(
            f"{runs[1].path} is a run of {verbs[1]}, {runs[0].path} of {verbs[0]}; give two runs of one kind"
        )
    common = [name for name in runs[0].tables if name in runs[1].tables and name not in NOT_COMPARED]
    if not common:
        raise BadInput(
            f"{runs[0].path} and {runs[1].path} have no table in common; give two runs of one kind"
        )
    identity = {
        "arguments": {"of": "runs", "verb": verbs[0]},
        "checkpoints": [
            {"role": role, **item}
            for role, run in zip("ab", runs, strict=True)
            for item in run.info.get("checkpoints", [])
        ],
        "runs": [
            {"role": role, "path": str(run.path.resolve()), "finished": run.info.get("finished")}
            for role, run in zip("ab", runs, strict=True)
        ],
    }
    folder = Path(out) if out is not None else default_folder("compare", runs[0].name, identity)
    if folder.resolve() in [run.path.resolve() for run in runs]:
        raise BadInput(f"{folder}: one of the runs to compare; give another --out")
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    with open_run(folder, "compare", identity, overwrite) as writer:
        with writer.timed("compare"):
            changes = [
                change
                for name in common
                for change in table_changes(name, *(run.table(name) for run in runs))
            ]
        if not any(change["rows"] for change in changes):
            raise BadInput(
                f"{runs[0].path} and {runs[1].path} have no row in common: other layers, "
                "matrices or domains; give runs of the same things"
            )
        writer.save_info(changes=changes, warnings=missing(runs, changes))
        return writer.finish({})


def table_changes(name: str, a: pd.DataFrame, b: pd.DataFrame) -> list[dict[str, Any]]:
    """One record a column (of routing_layers: a metric).

    Rows both have, median and largest change and where, the column's own spread in a.
    """
    spec = TABLES[name]
    keys = list(spec.keys)
    if "step" in keys and a["step"].nunique() == 1 == b["step"].nunique():
        keys.remove(
            "step"
        )  # two frozen models, or two single steps: which number each has is nothing to match by
    if name == "routing_layers":
        parts = [(metric, rows, b[b["metric"] == metric]) for metric, rows in a.groupby("metric", sort=False)]
        return [
            change
            for metric, *rows in parts
            for change in column_changes(name, keys, ["value"], metric, *rows)
        ]
    return column_changes(name, keys, list(spec.values), None, a, b)


def column_changes(
    name: str, keys: list[str], columns: list[str], metric: str | None, a: pd.DataFrame, b: pd.DataFrame
) -> list[dict[str, Any]]:
    spec = TABLES[name]
    both = a.merge(b, on=keys, suffixes=("_a", "_b"), how="inner")
    telling = [key for key in keys if key != "metric" and both[key].nunique() > 1] or keys[:1]
    found = []
    for column in columns:
        kind = spec.column(column).kind
        if kind in ("floats", "ints"):
            continue
        known = both[both[f"{column}_a"].notna() & both[f"{column}_b"].notna()]
        record: dict[str, Any] = {
            "table": name,
            "column": metric or column,
            "rows": len(known),
            "only_a": len(a) - len(both),
            "only_b": len(b) - len(both),
        }
        before, after = known[f"{column}_a"], known[f"{column}_b"]
        if not len(known):
            found.append(record)
            continue
        if kind in ("bool", "text"):
            differs = (before != after).to_numpy()
            record["changed"] = int(differs.sum())
            place = int(np.argmax(differs)) if differs.any() else None
        else:
            change = after.to_numpy(float) - before.to_numpy(float)
            record["changed"] = int((change != 0).sum())
            record["median"] = float(np.median(np.abs(change)))
            record["spread"] = float(np.std(before.to_numpy(float)))
            place = int(np.argmax(np.abs(change))) if record["changed"] else None
            record["largest"] = float(change[place]) if place is not None else 0.0
        if place is not None:
            record["where"] = {key: plain(known.iloc[place][key]) for key in telling}
            record["a"], record["b"] = plain(before.iloc[place]), plain(after.iloc[place])
        found.append(record)
    return found


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def missing(runs: list[Run], changes: list[dict[str, Any]]) -> list[str]:
    """What was left out of the comparison."""
    said = []
    for one, other in (runs, runs[::-1]):
        lone = [name for name in one.tables if name not in other.tables]
        said += [f"only {one.path} has {', '.join(lone)}"] if lone else []
    skipped = [name for name in NOT_COMPARED if all(name in run.tables for run in runs)]
    said += [f"not compared row by row: {', '.join(skipped)}"] if skipped else []
    uneven = {change["table"]: change for change in changes if change["only_a"] or change["only_b"]}
    said += [
        f"{name}: {change['only_a']} rows are in the first run only, {change['only_b']} in the second only"
        for name, change in uneven.items()
    ]
    return said
