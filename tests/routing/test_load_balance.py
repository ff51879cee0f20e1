"""Load metrics on loads whose values are known exactly, their chances against simulated routing.

And naive loops beside them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from moescope.routing.load_balance import (
    Setting,
    cv,
    gate_relative_std,
    gini,
    load_entropy,
    load_entropy_bits,
    load_entropy_share,
    max_over_mean,
    max_violation,
    min_max_ratio,
    random_loads,
    unused,
)
from moescope.routing.metrics import LOAD, METRICS


def subsets(tokens: int, n: int, k: int, draws: int, seed: int = 1) -> np.ndarray:
    """Loads of random routing drawn token by token: the slow way, to hold the fast one against."""
    generator = np.random.default_rng(seed)
    loads = np.zeros((draws, n))
    for draw in range(draws):
        for _ in range(tokens):
            loads[draw, generator.choice(n, k, replace=False)] += 1
    return loads


def test_equal_loads_have_no_unevenness_at_all():
    even = np.full(8, 5.0)
    assert [float(metric(even)) for metric in (cv, max_violation, gini, unused)] == [
        0,
        0,
        pytest.approx(0, abs=1e-15),
        0,
    ]
    assert (max_over_mean(even), min_max_ratio(even)) == (1, 1)
    assert load_entropy(even) == pytest.approx(math.log(8))
    assert load_entropy_bits(even) == pytest.approx(3)
    assert load_entropy_share(even) == pytest.approx(1)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (8, 2), (64, 8), (4, 4)])
def test_total_collapse_gives_the_stated_collapse_value(n, k):
    collapsed = np.array([100.0] * k + [0.0] * (n - k))
    setting = Setting(100, n, k)
    for metric in LOAD:
        assert metric.collapse(setting) == pytest.approx(float(metric.function(collapsed)), abs=1e-12), (
            metric.name
        )


def test_two_blocks_of_load_have_the_values_worked_out_by_hand():
    load = np.array([1.0, 1.0, 3.0, 3.0])
    assert cv(load) == pytest.approx(0.5)
    assert max_violation(load) == pytest.approx(0.5)
    assert gini(load) == pytest.approx(0.25)
    assert min_max_ratio(load) == pytest.approx(1 / 3)
    assert load_entropy(load) == pytest.approx(-(2 / 8 * math.log(1 / 8) + 6 / 8 * math.log(3 / 8)))


def test_gini_is_the_mean_absolute_difference_of_pairs_over_twice_the_mean():
    load = np.random.default_rng(0).gamma(1.0, size=17)
    pairs = [abs(a - b) for a in load for b in load]
    assert gini(load) == pytest.approx(np.mean(pairs) / (2 * load.mean()))
    assert load_entropy(load) == pytest.approx(stats.entropy(load))
    assert cv(load) == pytest.approx(stats.variation(load))


def test_every_metric_works_over_leading_axes():
    loads = np.random.default_rng(0).poisson(4, size=(3, 2, 6)).astype(float)
    for metric in LOAD:
        together = metric.function(loads)
        assert together.shape == (3, 2)
        for a in range(3):
            for b in range(2):
                assert together[a, b] == pytest.approx(float(metric.function(loads[a, b])))


def test_without_tokens_nothing_is_said():
    for metric in (cv, max_violation, gini, min_max_ratio):
        assert np.isnan(metric(np.zeros(4)))


# --- chances


@pytest.mark.parametrize(("tokens", "n", "k"), [(60, 8, 2), (200, 16, 4), (50, 6, 1), (40, 5, 5)])
def test_random_loads_are_those_of_tokens_choosing_subsets(tokens, n, k):
    fast, slow = random_loads(tokens, n, k, draws=600), subsets(tokens, n, k, 600)
    assert (fast.sum(1) == tokens * k).all()
    assert fast.max() <= tokens
    variance = tokens * k / n * (1 - k / n)
    for loads in (fast, slow):
        assert loads.mean(0) == pytest.approx(
            np.full(n, tokens * k / n), abs=5 * math.sqrt(variance / 600) + 1e-9
        )
    if k < n:
        assert fast.var() == pytest.approx(variance, rel=0.1)
        assert max_violation(fast).mean() == pytest.approx(max_violation(slow).mean(), rel=0.05)
        assert fast[:, [0, -1]].var(0) == pytest.approx(np.full(2, variance), rel=0.3)


SPARSE = [(10, 64, 1), (10, 64, 8), (3, 8, 2), (1, 16, 4)]


@pytest.mark.parametrize(("tokens", "n", "k"), [(400, 8, 2), (1000, 16, 4), (800, 8, 1), *SPARSE])
@pytest.mark.parametrize("name", [metric.name for metric in LOAD])
def test_the_floor_is_what_simulated_routing_gives_on_average(name, tokens, n, k):
    simulated = METRICS[name].function(random_loads(tokens, n, k, draws=2000, seed=7))
    if name == "cv":  # its chance is the root of the mean square
        simulated = np.sqrt((simulated**2).mean())
    assert METRICS[name].chance(Setting(tokens, n, k)) == pytest.approx(
        float(np.mean(simulated)), rel=0.05, abs=1e-4
    )


@pytest.mark.parametrize(("tokens", "n", "k"), [*SPARSE, (2, 64, 1), (40, 256, 8)])
def test_few_tokens_have_a_chance_level_between_the_best_value_and_collapse(tokens, n, k):
    setting, even = Setting(tokens, n, k), np.ones(n)
    for metric in LOAD:
        best, chance, collapse = (
            float(metric.function(even)),
            metric.chance(setting),
            metric.collapse(setting),
        )
        assert min(best, collapse) - 1e-9 <= chance <= max(best, collapse) + 1e-9, metric.name


def test_the_floor_of_unfilled_slots_is_that_of_tokens_with_fewer_experts():
    """4,000 simulations beside the 200 draws; tolerance: three standard errors of the latter."""
    ranks = np.random.default_rng(4).random((4000, 60, 8)).argsort(-1)
    k_T = 1 + (np.arange(60) % 4 > 0)
    loads = (ranks < k_T[:, None]).sum(1).astype(float)
    for name in ("gini", "load_entropy", "max_violation", "min_max_ratio"):
        found = METRICS[name].function(loads)
        tolerance = 3 * found.std() / math.sqrt(200)
        assert METRICS[name].chance(Setting(60, 8, 1.75)) == pytest.approx(found.mean(), abs=tolerance), name
        if name in ("gini", "load_entropy"):
            assert abs(METRICS[name].chance(Setting(60, 8, 2)) - found.mean()) > tolerance, "not sensitive"


def test_gate_weight_floors_fall_back_to_those_of_counts_when_gates_are_equal():
    tokens, n, k = 500, 8, 2
    std = gate_relative_std(n, tokens * k * 0.5, tokens * k * 0.25, tokens * (k * 0.5) ** 2)
    assert std == pytest.approx(Setting(tokens, n, k).relative_std)


@pytest.mark.parametrize(("tokens", "n"), [(400, 8), (12, 32)])
def test_the_gate_weight_floor_is_what_gates_dealt_at_random_give(tokens, n):
    generator, k = np.random.default_rng(3), 2
    gates = generator.dirichlet([0.5, 1.5], size=tokens)
    masses = np.zeros((500, n))
    for draw in range(500):
        for token in range(tokens):
            masses[draw, generator.permutation(n)[:k]] += gates[token]
    std = gate_relative_std(n, gates.sum(), (gates**2).sum(), (gates.sum(1) ** 2).sum())
    setting = Setting(tokens, n, k, std)
    assert np.sqrt((cv(masses) ** 2).mean()) == pytest.approx(std, rel=0.04)
    assert max_violation(masses).mean() == pytest.approx(METRICS["max_violation"].chance(setting), rel=0.07)
    assert gini(masses).mean() == pytest.approx(METRICS["gini"].chance(setting), rel=0.07)
    rel = 1e-3 if tokens == 400 else 0.03
    assert load_entropy(masses).mean() == pytest.approx(METRICS["load_entropy"].chance(setting), rel=rel)
    assert std > Setting(tokens, n, k).relative_std * 1.1, "gates so even that nothing was tested"


def test_draws_are_seeded():
    assert (random_loads(50, 4, 2, 10, 3) == random_loads.__wrapped__(50, 4, 2, 10, 3)).all()
    assert (Setting(50, 4, 1.5, 0.3).draws == Setting(50, 4, 1.5, 0.3).draws).all()
