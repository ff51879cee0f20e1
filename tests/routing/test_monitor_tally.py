"""Counts of all layers in one tensor.

Padding, empty slots and layers of unequal shape go where they belong.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moescope.routing import monitor_tally
from moescope.routing.monitor_tally import Handed, StepTally, Window

CPU = torch.device("cpu")


def blocks(*n_experts: int) -> list[Any]:
    return [
        SimpleNamespace(layer=2 * at, name=f"layer{2 * at}", n_experts=n) for at, n in enumerate(n_experts)
    ]


def handed(row: int, n: int, chosen: list[list[int]], real: list[int] | None = None) -> Handed:
    chosen_TK = torch.tensor(chosen)
    mask = None if real is None else torch.tensor(real)
    return Handed(row, n, chosen_TK, torch.full(chosen_TK.shape, 0.25), mask)


def test_layers_of_unequal_numbers_of_experts_and_choices_are_counted_apart():
    tally = StepTally(blocks(2, 4, 4))
    tally.add([handed(0, 2, [[0], [1], [1]]), handed(1, 4, [[3, 0], [3, 1]]), handed(2, 4, [[2, 0], [2, 1]])])
    window = tally.take(CPU)
    assert window.counts_LE.tolist() == [[1, 2, 0, 0], [1, 1, 0, 2], [1, 1, 2, 0]]
    assert window.tokens_L.tolist() == [3, 2, 2]
    assert tally.k_L == [1, 2, 2]
    np.testing.assert_array_equal(window.gate_weight_LE, 0.25 * window.counts_LE)


def test_padding_empty_slots_and_experts_of_other_ranks_count_nowhere():
    tally = StepTally(blocks(4, 4), pairs=True)
    mask = [1, 1, 0]
    tally.add([handed(0, 4, [[0, -1], [1, 4], [2, 3]], mask), handed(1, 4, [[0, 1], [0, 1], [2, 3]], mask)])
    window = tally.take(CPU)
    assert window.counts_LE.tolist() == [[1, 1, 0, 0], [2, 2, 0, 0]]
    assert window.tokens_L.tolist() == [2, 2]
    assert window.pairs_LEE is not None
    assert window.pairs_LEE[1].tolist() == [[2, 2, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert window.layer(0, blocks(4)[0], 2).sums("dropped").item() == 2


def test_what_was_moved_is_gone_from_the_device_and_windows_add_up():
    tally = StepTally(blocks(2))
    total = Window.empty(1, 2)
    for _ in range(3):
        tally.add([handed(0, 2, [[0], [1], [1]])])
        total.add(tally.take(CPU))
    assert total.counts_LE.tolist() == [[3, 6]]
    assert tally.take(CPU).counts_LE.sum() == 0


def test_nan_gates_of_padding_are_left_out_and_those_of_tokens_are_kept():
    tally = StepTally(blocks(2))
    chosen, gates = torch.tensor([[0], [1]]), torch.tensor([[0.5], [float("nan")]])
    tally.add([Handed(0, 2, chosen, gates, torch.tensor([1, 0]))])
    assert tally.take(CPU).gate_weight_LE.tolist() == [[0.5, 0.0]]
    tally.add([Handed(0, 2, chosen, gates, None)])
    assert np.isnan(tally.take(CPU).gate_weight_LE).tolist() == [[False, True]]


def test_decisions_of_some_steps_give_their_mean_whatever_the_number_of_tokens():
    tally = StepTally(blocks(2))
    tally.add([handed(0, 2, [[0], [1], [1]])] * 4)
    tally.decide((0,), torch.arange(18.0, dtype=torch.float64).reshape(6, 1, 3), torch.tensor([1, 1, 0]))
    window = tally.take(CPU)
    counts = window.layer(0, blocks(2)[0], 1)
    assert window.decided_L.tolist() == [2]
    assert counts.sums("routing_entropy").item() / counts.sums("tokens").item() == pytest.approx(
        0.5
    )  # of 0 and 1
    assert counts.sums("z_loss").item() / counts.sums("tokens").item() == pytest.approx(15.5)


@pytest.mark.parametrize("most", [2**21, 0])
def test_passes_counted_together_have_the_totals_of_each_counted_alone(monkeypatch, most):
    monkeypatch.setattr(monitor_tally, "MOST_HELD", most)
    generator = torch.Generator().manual_seed(0)
    together, expected = StepTally(blocks(4, 4, 3), pairs=True), Window.empty(3, 4, pairs=True)
    for number in range(5):
        tokens = 6 if number < 3 else 5 + number
        mask = None if number == 2 else (torch.rand(tokens, generator=generator) > 0.3).long()
        given = []
        for row, n in enumerate((4, 4, 3)):
            chosen = torch.rand(tokens, n, generator=generator).topk(2, dim=-1).indices
            given.append(Handed(row, n, chosen, torch.rand(tokens, 2, generator=generator), mask))
        together.add(given)
        for one in given:
            alone = StepTally(blocks(4, 4, 3), pairs=True)
            alone.add([one])
            expected.add(alone.take(CPU))
    found = together.take(CPU)
    for name in ("counts_LE", "tokens_L", "pairs_LEE"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.gate_weight_LE, expected.gate_weight_LE, rtol=1e-12)
    np.testing.assert_allclose(found.squares_LS, expected.squares_LS, rtol=1e-12)


def test_tensors_that_a_loop_fills_again_before_they_are_counted_do_no_harm():
    tally = StepTally(blocks(4))
    chosen, gates, mask = (
        torch.tensor([[0], [1], [2]]),
        torch.full((3, 1), 0.5),
        torch.tensor([True, True, False]),
    )
    tally.add([Handed(0, 4, chosen, gates, mask)])
    for tensor in (chosen, gates, mask):
        tensor.fill_(3)
    window = tally.take(CPU)
    assert window.counts_LE.tolist() == [[1, 1, 0, 0]]
    assert window.gate_weight_LE.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    assert window.tokens_L.tolist() == [2]
