"""Rows of tables.

Random routing lands on every chance, collapse on every collapse value, and intervals sit around values.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from moescope.routing.counts import Counts, LayerCounts
from moescope.routing.counts_to_tables import (
    Corpus,
    coactivation_columns,
    domain_columns,
    domain_statistics,
    load_columns,
    metric_rows,
    separation_rows,
)
from moescope.routing.load_balance import jaccard_chance
from moescope.statistics import BUCKETS
from moescope.types import Routing, Tokens

CORPUS = Corpus(["a", "b"], [128, 128])
MEANS = ("sequential_consistency", "adjacent_jaccard", "purity")


def rows_of(columns: dict) -> list[dict]:
    return pd.DataFrame(columns).to_dict("records")


def counted(
    chosen: np.ndarray, gates: np.ndarray, n_experts: int, domain: np.ndarray | None = None
) -> LayerCounts:
    """Tokens dealt to 256 documents in turn, one a bucket; every second one is of domain b."""
    n = len(chosen)
    document = np.arange(n) % BUCKETS
    domain = document % 2 if domain is None else domain
    order = np.argsort(document, kind="stable")
    counter = Counts((2, BUCKETS))
    rows = [order[document[order] == number] for number in range(BUCKETS)]
    width = max(len(row) for row in rows)
    at = np.full((BUCKETS, width), -1)
    for number, row in enumerate(rows):
        at[number, : len(row)] = row
    flat = at.reshape(-1)
    real = torch.from_numpy(flat >= 0)
    zeros = torch.zeros(len(flat), dtype=torch.int64)
    tokens = Tokens(
        BUCKETS,
        zeros,
        real,
        zeros,
        zeros,
        torch.from_numpy(domain[flat]),
        torch.from_numpy(document[flat]),
        "prefill",
    )
    counter.consume(
        Routing(0, "mlp", n_experts, torch.from_numpy(chosen[flat]), torch.from_numpy(gates[flat]), tokens)
    )
    return counter.layers()[0]


def random_routing(tokens: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    chosen = generator.random((tokens, n)).argsort(1)[:, :k]
    gates = np.sort(generator.dirichlet([0.7] * k, tokens), 1)[:, ::-1].copy()
    return chosen, gates


def by_metric(counts: LayerCounts, domain: str = "") -> dict[str, dict]:
    rows = [
        *metric_rows(counts, CORPUS, decisions=False),
        *separation_rows(counts, None),
        *domain_statistics([counts], CORPUS, 0)[0].rows,
    ]
    return {row["metric"]: row for row in rows if row["domain"] == domain}


@pytest.mark.parametrize("domain", ["", "b"])
def test_random_routing_lands_on_every_floor(domain):
    values: dict[str, list[float]] = {}
    chances: dict[str, list[float]] = {}
    for seed in range(12):
        for name, row in by_metric(counted(*random_routing(6000, 64, 4, seed), 64), domain).items():
            values.setdefault(name, []).append(row["value"])
            chances.setdefault(name, []).append(row["chance"])
    for name in values:
        # the cv of 64 experts varies by a tenth from draw to draw, the mean of twelve by a fortieth
        assert np.mean(values[name]) == pytest.approx(np.mean(chances[name]), rel=0.12, abs=2e-3), name
    assert len([name for name in values if name.endswith(("cv", "gini", "max_violation"))]) == 6


def test_neighbours_have_the_floors_of_two_random_sets():
    rows = by_metric(counted(*random_routing(2048, 8, 2), 8))
    assert rows["sequential_consistency"]["chance"] == pytest.approx(1 / 8, rel=0.02)
    assert rows["adjacent_jaccard"]["chance"] == jaccard_chance(8, 2)


@pytest.mark.parametrize("domain", ["", "b"])
def test_independent_tokens_of_uneven_experts_repeat_the_expert_as_often_as_chance_says(domain):
    """40,000 independent tokens; tolerance: four binomial standard deviations."""
    generator, tokens = np.random.default_rng(0), 40_000
    score = generator.gumbel(size=(tokens, 8)) + np.log([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.01, 0.01])
    chosen = (-score).argsort(1)[:, :2]
    row = by_metric(counted(chosen, np.tile([0.7, 0.3], (tokens, 1)), 8), domain)["sequential_consistency"]
    assert row["chance"] == pytest.approx(0.3135, abs=0.01)  # the sum of squares of those shares
    assert row["value"] == pytest.approx(row["chance"], abs=4 * np.sqrt(0.3135 * 0.6865 / (tokens / 2)))


def test_gate_weight_has_a_floor_of_its_own_above_that_of_counts():
    rows = by_metric(counted(*random_routing(3000, 8, 2), 8))
    assert rows["gate_weight_cv"]["chance"] > 1.1 * rows["cv"]["chance"]


def routed(logits: torch.Tensor, k: int) -> Routing:
    scores = logits.softmax(-1)
    gates, chosen = scores.topk(k, dim=-1)
    return Routing(0, "mlp", logits.shape[1], chosen, gates, None, logits, scores, scores)


def balancing_loss(routing: Routing) -> dict:
    counter = Counts()
    counter.consume(routing)
    (counts,) = counter.layers()
    rows = list(metric_rows(counts, Corpus(["text"], [1])))
    return next(row for row in rows if row["metric"] == "load_balancing_loss")


@pytest.mark.parametrize(("n", "k"), [(8, 2), (16, 1), (64, 8)])
def test_the_load_balancing_loss_is_that_of_transformers_over_k(n, k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(500, n, generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 2, n)
    row = balancing_loss(routed(logits, k))
    expected = float(load_balancing_loss_func((logits,), n, k)) / k
    assert row["value"] == pytest.approx(expected, rel=1e-5)
    assert row["chance"] == 1 < row["value"] < row["collapse"]


def test_the_load_balancing_loss_is_one_for_a_uniform_router_and_n_over_k_at_collapse():
    even = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    assert balancing_loss(routed(even, 2))["value"] == pytest.approx(1, abs=0.005)
    collapsed = torch.tensor([[50.0, 50, 0, 0, 0, 0, 0, 0]]).expand(100, 8)
    row = balancing_loss(routed(collapsed, 2))
    assert row["value"] == pytest.approx(4)
    assert row["collapse"] == 4


def test_without_probabilities_there_is_no_load_balancing_loss():
    rows = by_metric(counted(*random_routing(2048, 8, 2), 8))
    assert "load_balancing_loss" not in rows
    counts = counted(*random_routing(2048, 8, 2), 8)
    assert "load_balancing_loss" not in {row["metric"] for row in metric_rows(counts, CORPUS)}


def test_total_collapse_lands_on_every_collapse_value():
    tokens = 2048
    rows = by_metric(counted(np.tile([[5, 2]], (tokens, 1)), np.full((tokens, 2), 0.5), 8))
    for name, row in rows.items():
        if np.isfinite(row["collapse"]):
            assert row["value"] == pytest.approx(row["collapse"], abs=1e-9), name
    assert {
        "cv",
        "gate_weight_gini",
        "sequential_consistency",
        "adjacent_jaccard",
        "expert_overlap",
        "purity",
        "domain_information",
    } <= set(rows)


def test_intervals_sit_around_their_values_and_shrink_with_the_text():
    widths = []
    for tokens in (2048, 32_768):
        rows = by_metric(counted(*random_routing(tokens, 8, 2), 8))
        for name, row in rows.items():
            if np.isfinite(row["low"]):
                number = row["value"] if np.isnan(row["corrected"]) else row["corrected"]
                assert row["low"] <= number <= row["high"], name
                assert name not in MEANS or number == pytest.approx((row["low"] + row["high"]) / 2), name
        widths.append(rows["sequential_consistency"]["high"] - rows["sequential_consistency"]["low"])
    assert widths[1] == pytest.approx(widths[0] / 4, rel=0.3)


@pytest.mark.parametrize("repeating", [[0], range(1, BUCKETS)])
def test_intervals_of_shares_stay_between_0_and_1(repeating):
    """Tokens choose expert 0 and 1 in turn, and in some documents expert 0 alone."""
    chosen = np.repeat(np.arange(16) % 2, BUCKETS)[:, None]
    chosen[np.isin(np.arange(len(chosen)) % BUCKETS, repeating)] = 0
    rows = by_metric(counted(chosen, np.ones(chosen.shape), 4))
    for name in MEANS:
        assert 0 <= rows[name]["low"] <= rows[name]["value"] <= rows[name]["high"] <= 1, name


def test_a_domain_s_rows_are_of_its_own_tokens():
    chosen, gates = random_routing(4096, 8, 2)
    domain = (np.arange(4096) % BUCKETS) % 2
    chosen[domain == 1] = [0, 1]
    counts = counted(chosen, gates, 8)
    assert by_metric(counts, "b")["cv"]["value"] == pytest.approx(np.sqrt(3))
    assert by_metric(counts, "a")["cv"]["value"] < 0.1
    load = {(row["domain"], row["expert"]): row for row in rows_of(load_columns(counts, CORPUS))}
    assert [load[("b", expert)]["tokens"] for expert in range(8)] == [2048, 2048, 0, 0, 0, 0, 0, 0]
    assert sum(row["gate_weight"] for row in load.values()) == pytest.approx(4096)
    told = by_metric(counts)["domain_information"]
    assert told["value"] > 0.3
    assert told["low"] > 0
    shares = {(row["expert"], row["domain"]): row["share"] for row in rows_of(domain_columns(counts, CORPUS))}
    assert shares[(5, "a")] == 1
    assert shares[(0, "b")] == pytest.approx(0.5 / (0.5 + load[("a", 0)]["tokens"] / 4096))


def test_slots_left_empty_lower_k_and_are_counted_as_dropped():
    chosen, gates = random_routing(2048, 8, 2)
    chosen[::4, 1] = -1
    gates[::4, 1] = 0
    rows = by_metric(counted(chosen, gates, 8))
    assert rows["dropped"]["value"] == pytest.approx(1 / 8)
    assert rows["cv"]["collapse"] == pytest.approx(np.sqrt(8 / 1.75 - 1))


def drawn_routing(tokens: int, n: int, sizes: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Every token chooses as many experts as `sizes` says, all subsets alike; the other slots are empty."""
    chosen, gates = random_routing(tokens, n, int(sizes.max()), seed)
    empty = np.arange(chosen.shape[1]) >= sizes[:, None]
    return np.where(empty, -1, chosen), np.where(empty, 0, gates)


VARIABLE = {
    "one or eight of 16": (16, np.where(np.arange(40_000) % 4, 1, 8)),
    "experts choose": (8, np.random.default_rng(0).binomial(8, 0.25, 40_000)),
    "dropped": (8, np.where(np.arange(40_000) % 10 < 3, 0, 2)),
}


@pytest.mark.parametrize("case", VARIABLE)
def test_chance_of_pairs_holds_for_tokens_with_different_numbers_of_experts(case):
    """40,000 random tokens, at least 1,000 per pair of experts: means over pairs vary by less than 1 %."""
    n, sizes = VARIABLE[case]
    counts = counted(*drawn_routing(40_000, n, sizes), n)
    row = by_metric(counts)["expert_overlap"]
    assert row["value"] == pytest.approx(row["chance"], rel=0.02)
    columns = coactivation_columns(counts)
    assert np.mean(columns["lift"]) == pytest.approx(columns["chance_lift"], rel=0.02)


def test_experts_that_choose_a_quarter_of_the_tokens_independently_have_the_lift_of_independence():
    n, sizes = VARIABLE["experts choose"]
    counts = counted(*drawn_routing(40_000, n, sizes), n)
    assert coactivation_columns(counts)["chance_lift"] == pytest.approx(1, rel=0.01)
    assert by_metric(counts)["expert_overlap"]["chance"] == pytest.approx(0.25 / 1.75, rel=0.01)


@pytest.mark.parametrize(
    ("share", "least"),
    [(0.75, 1), (0.7, 0)],  # tokens with one expert more than `least`
)
def test_the_chance_of_adjacent_sets_follows_the_number_of_choices_not_of_slots(share, least):
    """At least 19,000 pairs of adjacent tokens; tolerance: four binomial standard deviations, 0.01."""
    sizes = least + (np.random.default_rng(1).random(40_000) < share)
    chosen, gates = drawn_routing(40_000, 8, sizes)
    wide = ((0, 0), (0, 8 - chosen.shape[1]))  # as many slots as experts
    counts = counted(np.pad(chosen, wide, constant_values=-1), np.pad(gates, wide), 8)
    row = by_metric(counts)["adjacent_jaccard"]
    assert row["value"] == pytest.approx(row["chance"], abs=0.01)


def test_the_chance_of_adjacent_sets_is_near_where_experts_choose():
    """The mean cannot tell how sizes vary: chance is 0.192, simulated 0.172."""
    n, sizes = VARIABLE["experts choose"]
    row = by_metric(counted(*drawn_routing(40_000, n, sizes), n))["adjacent_jaccard"]
    assert row["value"] < row["chance"] < 1.15 * row["value"]


def test_collapse_levels_stay_within_the_metrics_bounds_when_tokens_lose_their_only_expert():
    chosen = np.where(np.arange(2048)[:, None] % 10 < 3, -1, 5)
    rows = by_metric(counted(chosen, (chosen >= 0) * 1.0, 8))
    for name, row in rows.items():
        if np.isfinite(row["collapse"]):
            assert row["value"] == pytest.approx(row["collapse"], abs=1e-9), name
    assert rows["load_entropy"]["collapse"] == 0
    assert rows["cv"]["collapse"] == pytest.approx(np.sqrt(7))


def test_few_independent_tokens_repeat_the_first_choice_as_often_as_chance_says():
    """300 texts of 16 documents with two tokens; tolerance: four standard errors of the mean."""
    generator, differences = np.random.default_rng(0), []
    for _ in range(300):
        chosen = np.full((2 * BUCKETS, 1), -1)
        chosen[:16, 0], chosen[BUCKETS : BUCKETS + 16, 0] = generator.integers(0, 4, (2, 16))
        rows = metric_rows(counted(chosen, (chosen >= 0) * 1.0, 4), CORPUS, decisions=False)
        row = next(row for row in rows if row["metric"] == "sequential_consistency")
        differences.append(row["value"] - row["chance"])
    assert abs(np.mean(differences)) < 4 * np.std(differences) / np.sqrt(len(differences))


def test_every_ordered_pair_of_experts_is_listed_with_its_chance():
    chosen, gates = random_routing(3000, 6, 3)
    columns = coactivation_columns(counted(chosen, gates, 6))
    assert len(columns["expert_a"]) == 30
    for a, b, tokens, share in zip(
        columns["expert_a"], columns["expert_b"], columns["tokens"], columns["share_of_a"], strict=True
    ):
        has_a, has_b = (chosen == a).any(1), (chosen == b).any(1)
        assert tokens == (has_a & has_b).sum()
        assert share == pytest.approx(tokens / has_a.sum())
    assert np.mean(columns["lift"]) == pytest.approx(columns["chance_lift"], rel=0.01)


def test_a_domain_without_tokens_has_no_rows():
    chosen, gates = random_routing(512, 8, 2)
    counts = counted(chosen, gates, 8, domain=np.zeros(512, dtype=int))
    corpus = Corpus(["a", "b"], [256, 0])
    assert set(load_columns(counts, corpus)["domain"]) == {"a"}
    assert {row["domain"] for row in metric_rows(counts, corpus, decisions=False)} == {"", "a"}


def test_empty_slots_are_dropped_ones_unless_every_expert_has_a_slot_of_its_own():
    chosen, gates = random_routing(2000, 8, 2)
    chosen[::4, 1] = -1
    assert by_metric(counted(chosen, np.where(chosen < 0, 0, gates), 8))["dropped"]["value"] == pytest.approx(
        1 / 8
    )
    taken = np.random.default_rng(0).random((2000, 8)) < 0.3  # experts that chose their tokens
    rows = by_metric(counted(np.where(taken, np.arange(8), -1), taken * 0.2, 8))
    assert "dropped" not in rows
    assert rows["cv"]["value"] < 0.2
    every = np.broadcast_to(np.arange(8), (2000, 8)).copy()
    assert by_metric(counted(every, np.full((2000, 8), 0.1), 8))["dropped"]["value"] == 0
