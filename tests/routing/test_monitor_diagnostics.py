"""What routers say of themselves.

Means over passes, with references that may or may not change, and nothing lost on the way.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
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


def test_a_row_holds_means_over_passes_of_the_value_and_of_references_that_change():
    tally = DiagnosticTally()
    for value, chance in ((1.0, 5.0), (2.0, 6.0), (6.0, 10.0)):
        tally.add([(0, {"a": Diagnostic(number(value), number(chance), 9.0)})])
    assert told(moved(tally)) == {"a": [3.0, 7.0, 9.0]}


def test_a_row_holds_the_spread_by_chance_where_the_router_knows_it():
    tally = DiagnosticTally()
    for value in (1.0, 2.0):
        tally.add([(0, {"a": Diagnostic(number(value), 0.0, 1.0, 0.5), "b": Diagnostic(number(value), 0.0)})])
    spreads = {
        row["metric"]: row["chance_spread"] for row in Window(diagnostics=moved(tally)).diagnostic_rows(0)
    }
    assert spreads["a"] == 0.5
    assert math.isnan(spreads["b"])


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


def test_what_was_moved_is_gone_and_windows_add_up_to_the_mean_over_all_passes():
    tally, whole = DiagnosticTally(), Window()
    for values in ((1.0, 2.0, 3.0), (10.0,)):
        for value in values:
            tally.add([(0, {"a": Diagnostic(number(value), 2.0)})])
        whole.add(Window(diagnostics=moved(tally)))
    assert told(whole.diagnostics)["a"][:2] == [4.0, 2.0]
    assert moved(tally) == {}


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


def test_a_long_sum_loses_no_digits():
    tally = DiagnosticTally()
    for _ in range(3000):
        tally.add([(0, {"a": Diagnostic(number(0.1), 0.0)})])
    assert told(moved(tally))["a"][0] == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_a_value_that_is_no_number_is_shown_as_such():
    tally = DiagnosticTally()
    tally.add([(0, {"a": Diagnostic(number(math.nan), 0.0, 1.0)})])
    assert math.isnan(told(moved(tally))["a"][0])


def test_without_notes_nothing_is_sent():
    assert DiagnosticTally().flat(CPU).numel() == 0
