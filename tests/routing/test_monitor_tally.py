"""Counts of all layers in one tensor.

Padding, empty slots and layers of unequal shape go where they belong.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moescope.routing import monitor_capture
from moescope.routing.monitor import window_tables
from moescope.routing.monitor_capture import Cell, DiagnosticTally, Handed, StepCounts, Window
from moescope.types import Diagnostic

CPU = torch.device("cpu")


def blocks(*n_experts: int) -> list[Any]:
    return [
        SimpleNamespace(layer=2 * at, name=f"layer{2 * at}", n_experts=n) for at, n in enumerate(n_experts)
    ]


def loads(window: Window) -> list[list[float]]:
    return [counts.load_E.tolist() for counts in window.layers]


def gate_weight(window: Window) -> list[list[float]]:
    return [counts.gate_weight_MBE[0, 0].tolist() for counts in window.layers]


def handed(layer: int, n: int, chosen: list[list[int]], real: list[int] | None = None) -> Handed:
    chosen_TK = torch.tensor(chosen)
    mask = None if real is None else torch.tensor(real)
    return Handed(layer, n, chosen_TK, torch.full(chosen_TK.shape, 0.25), mask)


def test_layers_without_tokens_have_no_rows():
    tally = StepCounts(blocks(4, 4))
    tally.hold([handed(2, 4, [[0, 1], [0, 2]])])
    for layers in ([2] * 4, []):
        (load,) = window_tables(tally.take(CPU), {0: None, 2: None}, 1)["load"]
        assert load["layer"].tolist() == layers


def test_padding_empty_slots_and_experts_of_other_ranks_count_nowhere():
    tally = StepCounts(blocks(4, 4), pairs=True)
    mask = [1, 1, 0]
    tally.hold([handed(0, 4, [[0, -1], [1, 4], [2, 3]], mask), handed(2, 4, [[0, 1], [0, 1], [2, 3]], mask)])
    window = tally.take(CPU)
    assert loads(window) == [[1, 1, 0, 0], [2, 2, 0, 0]]
    assert [counts.tokens for counts in window.layers] == [2, 2]
    assert window.layers[1].pairs_EE is not None
    assert window.layers[1].pairs_EE.tolist() == [[2, 2, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert window.layers[0].sums("dropped").item() == 2


def test_nan_gates_of_padding_are_left_out_and_those_of_tokens_are_kept():
    tally = StepCounts(blocks(2))
    chosen, gates = torch.tensor([[0], [1]]), torch.tensor([[0.5], [float("nan")]])
    tally.hold([Handed(0, 2, chosen, gates, torch.tensor([1, 0]))])
    assert gate_weight(tally.take(CPU)) == [[0.5, 0.0]]
    tally.hold([Handed(0, 2, chosen, gates, None)])
    assert np.isnan(gate_weight(tally.take(CPU))).tolist() == [[False, True]]


@pytest.mark.parametrize("most", [2**21, 0])
def test_passes_counted_together_have_the_totals_of_each_counted_alone(monkeypatch, most):
    monkeypatch.setattr(monitor_capture, "MOST_HELD", most)
    generator = torch.Generator().manual_seed(0)
    together, expected = StepCounts(blocks(4, 4, 3), pairs=True), Window()
    for number in range(5):
        tokens = 6 if number < 3 else 5 + number
        mask = None if number == 2 else (torch.rand(tokens, generator=generator) > 0.3).long()
        given = []
        for row, n in enumerate((4, 4, 3)):
            chosen = torch.rand(tokens, n, generator=generator).topk(2, dim=-1).indices
            given.append(Handed(2 * row, n, chosen, torch.rand(tokens, 2, generator=generator), mask))
        together.hold(given)
        for one in given:
            alone = StepCounts(blocks(4, 4, 3), pairs=True)
            alone.hold([one])
            expected.add(alone.take(CPU))
    found = together.take(CPU)
    for counts, alone in zip(found.layers, expected.layers, strict=True):
        for name in ("counts_MBE", "pairs_EE", "tokens"):
            np.testing.assert_array_equal(getattr(counts, name), getattr(alone, name), err_msg=name)
        np.testing.assert_allclose(counts.gate_weight_MBE, alone.gate_weight_MBE, rtol=1e-12)
        np.testing.assert_allclose(counts.sums_MBS, alone.sums_MBS, rtol=1e-12)


def test_tensors_that_a_loop_fills_again_before_they_are_counted_do_no_harm():
    tally = StepCounts(blocks(4))
    chosen, gates, mask = (
        torch.tensor([[0], [1], [2]]),
        torch.full((3, 1), 0.5),
        torch.tensor([True, True, False]),
    )
    tally.hold([Handed(0, 4, chosen, gates, mask)])
    for tensor in (chosen, gates, mask):
        tensor.fill_(3)
    window = tally.take(CPU)
    assert loads(window) == [[1, 1, 0, 0]]
    assert gate_weight(window) == [[0.5, 0.5, 0.0, 0.0]]
    assert [counts.tokens for counts in window.layers] == [2]


# --- what routers say of themselves


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
