"""Counts of choices.

Sums by hand for a few tokens, cells by domain and bucket, and state that does not grow with the text.
"""

from __future__ import annotations

import numpy as np
import torch

from moescope.routing import counts as counts_module
from moescope.routing.counts import SUMS, Counts
from moescope.statistics import BUCKETS
from moescope.types import Routing, Tokens


def tokens(
    rows: int, real: list[bool], domain: list[int], bucket: list[int], continues: bool = False
) -> Tokens:
    n = len(real)
    zeros = torch.zeros(n, dtype=torch.int64)
    return Tokens(
        rows,
        zeros,
        torch.tensor(real),
        zeros,
        zeros,
        torch.tensor(domain),
        torch.tensor(bucket),
        "prefill",
        continues,
    )


def routing(chosen: list[list[int]], gates: list[list[float]], at: Tokens | None = None) -> Routing:
    return Routing(3, "mlp", 4, torch.tensor(chosen), torch.tensor(gates), at)


def test_counts_mass_and_pairs_of_three_tokens_are_those_on_paper():
    counter = Counts((2, BUCKETS))
    at = tokens(1, [True, True, True, False], [0, 1, 1, 1], [5, 7, 7, 7])
    counter.consume(
        routing([[0, 1], [1, -1], [3, 1], [2, 2]], [[0.75, 0.25], [0.5, 0.0], [0.5, 0.5], [9.0, 9.0]], at)
    )
    (counts,) = counter.layers()
    assert (counts.layer, counts.layer_name, counts.k) == (3, "mlp", 2)
    assert counts.counts_MBE.sum() == 5
    assert counts.counts_MBE[0, 5].tolist() == [1, 1, 0, 0]
    assert counts.counts_MBE[1, 7].tolist() == [0, 2, 0, 1]
    assert counts.gate_weight_MBE[1, 7].tolist() == [0, 1.0, 0, 0.5]
    assert counts.pairs_EE.tolist() == [[1, 1, 0, 0], [1, 3, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1]]
    assert counts.first_ME is not None
    assert counts.first_ME.tolist() == [[1, 0, 0, 0], [0, 1, 0, 1]]
    cell = {
        name: counts.sums(name)[1, 7]
        for name in ("tokens", "assigned", "dropped", "gates", "gates_squared", "token_gates_squared")
    }
    assert cell == {
        "tokens": 2,
        "assigned": 3,
        "dropped": 1,
        "gates": 1.5,
        "gates_squared": 0.75,
        "token_gates_squared": 1.25,
    }


def test_neighbours_are_within_a_row_and_never_across_rows_or_padding():
    counter = Counts((1, BUCKETS))
    at = tokens(2, [True, True, True, True, True, False], [0] * 6, [0] * 6)
    chosen = [[0, 1], [0, 2], [3, 1], [3, 1], [1, 3], [1, 3]]
    counter.consume(routing(chosen, [[0.9, 0.1]] * 6, at))
    (counts,) = counter.layers()
    found = {name: float(counts.sums(name).sum()) for name in ("neighbours", "same_first", "jaccard")}
    assert found["neighbours"] == 3  # two in the first row, one in the second
    assert found["same_first"] == 1  # tokens 0 and 1
    assert abs(found["jaccard"] - (1 / 3 + 0 / 4 + 1)) < 1e-6


def test_a_row_that_goes_on_has_its_last_token_as_neighbour_and_one_that_does_not_has_none():
    for continues, expected in ((True, 2), (False, 1)):
        counter = Counts((1, BUCKETS))
        counter.consume(routing([[0, 1], [2, 1]], [[0.9, 0.1]] * 2, tokens(1, [True, True], [0, 0], [0, 0])))
        counter.consume(routing([[2, 0]], [[0.9, 0.1]], tokens(1, [True], [0], [0], continues)))
        assert float(counter.layers()[0].sums("neighbours").sum()) == expected


def test_decisions_of_padding_do_not_reach_the_sums_even_when_they_are_not_numbers():
    logits = torch.tensor([[1.0, 2.0], [float("nan"), float("nan")]])
    at = tokens(1, [True, False], [0, 0], [0, 0])
    counter = Counts((1, BUCKETS))
    counter.consume(
        Routing(
            0, "mlp", 2, torch.tensor([[1], [0]]), torch.ones(2, 1), at, logits, logits.softmax(-1), logits
        )
    )
    (counts,) = counter.layers()
    p = np.exp([1, 2]) / np.exp([1, 2]).sum()
    assert abs(counts.sums("routing_entropy").sum() + (p * np.log(p)).sum()) < 1e-6
    assert np.isfinite(counts.sums_MBS[..., [SUMS.index("confidence"), SUMS.index("z_loss")]]).all()


def test_without_tokens_named_every_token_counts():
    counter = Counts((1, BUCKETS))
    counter.consume(routing([[0, 1], [0, 2]], [[0.9, 0.1]] * 2))
    assert counter.layers()[0].counts_MBE.sum((0, 1)).tolist() == [2, 1, 1, 0]


def decided(
    layer: int, n_experts: int, at: Tokens, generator: torch.Generator, explained: bool = True
) -> Routing:
    T = len(at.real_T)
    logits = torch.randn(T, n_experts, generator=generator)
    scores = logits.softmax(-1)
    gates, chosen = scores.topk(2, dim=-1)
    chosen[0, 1] = -1
    return Routing(
        layer, f"layer{layer}", n_experts, chosen, gates, at, logits, scores, scores if explained else None
    )


def test_layers_counted_together_have_the_counts_of_each_counted_alone(monkeypatch):
    """Layers of one pass are counted at once, in any mixture.

    Sizes, unexplained choices, rows that go on, a limit in between.
    """
    for limit in (counts_module.MOST_WAITING, 100):
        monkeypatch.setattr(counts_module, "MOST_WAITING", limit)
        generator = torch.Generator().manual_seed(0)
        together, alone = Counts((2, BUCKETS)), {layer: Counts((2, BUCKETS)) for layer in (1, 4, 2, 7)}
        for number, continues in enumerate((False, True, True)):
            real = [True] * 5 + [number != 1]
            at = tokens(2, real, [0, 0, 0, 1, 1, 1], [3, 3, 3, 9, 9, 9], continues)
            for layer, n_experts, explained in ((1, 4, True), (4, 4, True), (2, 6, True), (7, 4, False)):
                one = decided(layer, n_experts, at, generator, explained)
                together.consume(one)
                alone[layer].consume(one)
        found = together.layers()
        assert [counts.layer for counts in found] == [1, 2, 4, 7]
        for counts in found:
            (expected,) = alone[counts.layer].layers()
            assert counts.layer_name == expected.layer_name == f"layer{counts.layer}"
            for name in ("counts_MBE", "gate_weight_MBE", "sums_MBS", "pairs_EE", "first_ME"):
                np.testing.assert_array_equal(getattr(counts, name), getattr(expected, name), err_msg=name)
        assert (
            found[0].sums("neighbours").sum() == 2 * (2 + 3 + 3) - 2
        )  # two rows of three; one token of padding in the second pass


def test_two_passes_about_unnamed_tokens_are_told_apart():
    counter = Counts((1, BUCKETS))
    for _ in range(2):
        for layer in (3, 4):
            counter.consume(Routing(layer, "mlp", 4, torch.tensor([[0, 1]]), torch.ones(1, 2)))
    assert [int(counts.counts_MBE.sum()) for counts in counter.layers()] == [4, 4]
