"""What routers say of themselves.

Means over passes, with references that may or may not change, and nothing lost on the way.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from moescope.routing.monitor_capture import Cell, DiagnosticTally, Window
from moescope.types import Diagnostic

CPU = torch.device("cpu")


def number(value: float) -> torch.Tensor:
    return torch.tensor(value)


def moved(tally: DiagnosticTally) -> dict[Cell, np.ndarray]:
    return tally.take(tally.flat(CPU).numpy())


def told(sums: dict[Cell, np.ndarray], layer_row: int = 0) -> dict[str, list[float]]:
    return {
        row["metric"]: [row["value"], row["chance"], row["collapse"]]
        for row in Window(diagnostics=sums).diagnostic_rows(layer_row)
    }


def test_layers_and_names_are_kept_apart_and_a_reference_nobody_gives_is_absent():
    tally = DiagnosticTally()
    tally.add(
        [
            (0, {"a": Diagnostic(number(1.0), 0.0), "b": Diagnostic(number(2.0), 0.5, number(4.0))}),
            (2, {"a": Diagnostic(number(3.0), 0.0, 1.0)}),
        ]
    )
    sums = moved(tally)
    assert told(sums)["b"] == [2.0, 0.5, 4.0]
    assert math.isnan(told(sums)["a"][2])
    assert told(sums, 1) == {}
    assert told(sums, 2) == {"a": [3.0, 0.0, 1.0]}


def test_notes_that_not_every_pass_has_are_means_over_those_that_do():
    tally = DiagnosticTally()
    tally.add([(0, {"a": Diagnostic(number(1.0), 0.0, 1.0)})])
    tally.add([(0, {"a": Diagnostic(number(3.0), 0.0, 1.0), "b": Diagnostic(number(5.0), 0.0, 1.0)})])
    assert told(moved(tally)) == {"a": [2.0, 0.0, 1.0], "b": [5.0, 0.0, 1.0]}


def test_ranks_are_added_before_the_mean_is_taken():
    ranks = [DiagnosticTally(), DiagnosticTally()]
    for tally, values in zip(ranks, ((1.0, 3.0), (5.0, 11.0)), strict=True):
        for value in values:
            tally.add([(0, {"a": Diagnostic(number(value), 1.0, number(value))})])
    total = sum(tally.flat(CPU).numpy() for tally in ranks)
    assert isinstance(total, np.ndarray)
    assert told(ranks[0].take(total)) == {"a": [5.0, 1.0, 5.0]}
