"""A reading: one step, matrix and router of one run.

A report shows one reading at a time, or several side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moescope.errors import BadInput
from moescope.plotting.style import FigureSpec
from moescope.reporting.untrusted import plot_words
from moescope.run import Run
from moescope.tables import SCAN_TABLES, VIEW

KEYS = ("step", *VIEW)


@dataclass(frozen=True)
class Reading:
    """The tables of one reading of one run, and the words that tell it from the others of the report."""

    run: Run
    keys: dict[str, Any]
    label: str
    tables: dict[str, pd.DataFrame]

    def setup(self, layer: int) -> dict[str, Any]:
        """What run.json says about how this layer was analysed."""
        for setup in self.run.info["setup"]:
            if setup["step"] == self.keys["step"] and setup["layer"] == layer:
                return dict(setup)
        raise BadInput(
            f"{self.run.path}: run.json has no setup of layer {layer}; scan again with --overwrite"
        )

    def n_experts(self, layer: int) -> int:
        """How many experts of the layer took part: all but those marked as unusable."""
        setup = self.setup(layer)
        return int(setup["n_experts"]) - len(setup["matrices"][self.keys["matrix"]]["experts_left_out"])

    def facts(self, layer: int) -> dict[str, Any]:
        """What the scan noted of this reading of a layer beside the tables.

        Chance accuracy, another order if one was found.
        """
        found: dict[str, Any] = self.setup(layer)["matrices"][self.keys["matrix"]]["readings"][
            self.keys["router"]
        ]
        return found

    @property
    def has_rows(self) -> bool:
        """Whether there were router rows to hold against the experts."""
        return "alignment_tests" in self.tables

    @property
    def layers(self) -> list[int]:
        return sorted(int(layer) for layer in self.tables["spectra"]["layer"].unique())

    def drawable(self, specs: Iterable[FigureSpec]) -> list[FigureSpec]:
        """Those figures whose tables this reading has."""
        return [spec for spec in specs if set(spec.needs) <= set(self.tables)]

    def one_layer(self, layer: int) -> dict[str, pd.DataFrame]:
        return {name: frame[frame["layer"] == layer] for name, frame in self.tables.items()}

    def by_layer(self) -> Iterator[tuple[int, dict[str, pd.DataFrame]]]:
        """Each layer with its rows of every table.

        Grouped once, since filtering 48 times is slow on large runs.
        """
        groups = {name: dict(tuple(frame.groupby("layer"))) for name, frame in self.tables.items()}
        for layer in self.layers:
            yield layer, {name: rows.get(layer, self.tables[name].iloc[:0]) for name, rows in groups.items()}


def readings(runs: list[Run], named: bool | None = None) -> list[Reading]:
    """Every reading of every run, in the order given, each named by what tells it from the others.

    `named` puts the run's name before each; where several runs are given that is the case by itself.
    """
    several = len(runs) > 1 if named is None else named
    found: list[tuple[Run, dict[str, Any], dict[str, pd.DataFrame]]] = []
    for run in runs:
        tables = {name: run.table(name) for name in run.tables}
        if run.info["verb"] != "scan":
            raise BadInput(f"{run.path}: this run holds no scan; give a folder written by moescope scan")
        if missing := [name for name in expected_tables(run) if name not in tables]:
            raise BadInput(f"{run.path}: table {', '.join(missing)} is missing; scan again with --overwrite")
        order = run.info["arguments"]
        if "alignment_tests" in tables:
            keys = tables["alignment_tests"][list(KEYS)].drop_duplicates().to_dict("records")
            keys.sort(
                key=lambda k: (
                    k["step"],
                    order["matrix"].index(k["matrix"]),
                    order["router"].index(k["router"]),
                )
            )
        else:
            keys = tables["spectra"][["step", "matrix"]].drop_duplicates().to_dict("records")
            keys = [{**key, "router": None, "fold_norm": order["fold_norm"]} for key in keys]
            keys.sort(key=lambda k: (k["step"], order["matrix"].index(k["matrix"])))
        found += [(run, key, {name: select(frame, key) for name, frame in tables.items()}) for key in keys]
    names = run_names(runs)
    several_steps = len({(run.path, keys["step"]) for run, keys, _ in found}) > len(runs)
    return [
        Reading(run, keys, label(names[run.path], keys, several, several_steps), tables)
        for run, keys, tables in found
    ]


def expected_tables(run: Run) -> list[str]:
    """What a scan must have.

    Less where routers have no rows, and of one expert a layer its spectrum alone.
    """
    coverage = run.info.get("coverage", [])
    if not any(item.get("rowless_router") for item in coverage):
        return list(SCAN_TABLES)
    alone = all(item["experts_per_layer"] == [1] for item in coverage)
    return ["spectra"] if alone else ["similarity", "orthogonality", "spectra"]


def run_names(runs: list[Run]) -> dict[Any, str]:
    """Path -> short name: the folder's, with its parent where two runs share it."""
    plain = [run.name for run in runs]
    if len(set(plain)) < len(plain):
        return {run.path: f"{run.path.resolve().parent.name}/{run.name}" for run in runs}
    return {run.path: run.name for run in runs}


def select(frame: pd.DataFrame, keys: dict[str, Any]) -> pd.DataFrame:
    """The rows of those keys; tables without a router (spectra, similarity) serve every router's reading."""
    mask = pd.Series(True, index=frame.index)
    for key, value in keys.items():
        if key in frame.columns:
            mask &= frame[key] == value
    return frame[mask]


def label(run_name: str, keys: dict[str, Any], several_runs: bool, several_steps: bool) -> str:
    parts = [plot_words(run_name)] if several_runs else []
    parts += [f"step {keys['step']}"] if several_steps else []
    return " · ".join([*parts, reading_words(keys)])


def reading_words(keys: dict[str, Any]) -> str:
    """Matrix and router; of a router without rows the matrix alone."""
    words = f"{keys['matrix']}, {keys['router']} router" if keys["router"] else f"{keys['matrix']} matrices"
    return words + (", norm folded in" if keys["fold_norm"] else "")
