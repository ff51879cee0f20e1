"""Load metrics on loads whose values are known exactly, their chances against simulated routing.

And naive loops beside them.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

from moescope.routing.counts import SUMS, LayerCounts
from moescope.routing.counts_to_tables import Corpus, domain_columns, domain_statistics, metric_rows
from moescope.routing.load_balance import (
    Setting,
    balancing_loss_interval,
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
from moescope.routing.report import summary
from moescope.routing.specialisation import information
from moescope.routing.tables import TABLES
from moescope.routing.trace import trace
from moescope.statistics import BUCKETS
from routing.counted import counted


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


# --- intervals of load metrics: they cover the value of endless text, of even loads too, as often as they say

REPETITIONS = 4000
TOKENS = (40, 80, 200, 400)  # per document
CONCENTRATION = 20  # documents have the load of about 20 independent tokens


def true_shares(n: int, shape: str) -> np.ndarray:
    """Shares of n experts with cv 0, log-normal quantiles with cv of about 0.3, or half at a hundredth."""
    if shape == "half unused":
        return np.repeat([1.0, 0.01], n // 2) / (1.01 * (n // 2))
    sigma = {"even": 0.0, "uneven": 0.3}[shape]
    shares = np.exp(sigma * stats.norm.ppf((np.arange(n) + 0.5) / n))
    return shares / shares.sum()


def draw_documents(generator: np.random.Generator, shares: np.ndarray, *sides: int) -> np.ndarray:
    tokens = generator.choice(TOKENS, sides)
    own = generator.standard_gamma(np.broadcast_to(CONCENTRATION * shares, (*sides, len(shares)))) + 1e-300
    return generator.multinomial(tokens, own / own.sum(-1, keepdims=True)).astype(float)


def rows_of(loads_DE: np.ndarray) -> dict[str, dict]:
    """Rows of the table for documents with these loads, k = 1, one bucket each."""
    documents, n = loads_DE.shape
    counts_MBE = np.zeros((1, BUCKETS, n), dtype=np.int64)
    counts_MBE[0, :documents] = loads_DE
    sums_MBS = np.zeros((1, BUCKETS, len(SUMS)))
    sums_MBS[..., SUMS.index("tokens")] = counts_MBE.sum(-1)
    counts = LayerCounts(0, "mlp", "prefill", 1, counts_MBE, counts_MBE.astype(float), sums_MBS)
    rows = metric_rows(counts, Corpus(["text"], [documents]), gates=False, decisions=False, order=False)
    return {row["metric"]: row for row in rows}


@pytest.mark.parametrize("shape", ["even", "uneven"])
def test_intervals_of_many_experts_and_few_documents_cover_the_truth(shape):
    """100 repetitions; nominal 0.95, three binomial standard deviations are 0.065."""
    shares = true_shares(64, shape)
    drawn = [rows_of(loads_DE) for loads_DE in draw_documents(np.random.default_rng(0), shares, 100, 50)]
    coverage = {}
    for name in ("cv", "gini", "load_entropy", "load_entropy_share", "max_over_mean"):
        true = float(METRICS[name].function(shares))
        limits = [(rows[name]["low"], rows[name]["high"]) for rows in drawn]
        coverage[name] = np.mean([low <= true + 1e-12 and true - 1e-12 <= high for low, high in limits])
    assert min(coverage.values()) >= 0.95 - 0.065, coverage


def test_a_corrected_interval_stands_beside_the_chance_level_of_corrected_values():
    """200 texts of independent tokens and even loads: most intervals exclude that of plain values."""
    generator, excluded = np.random.default_rng(5), Counter[str]()
    for _ in range(200):
        rows = rows_of(generator.multinomial(100, np.full(16, 1 / 16), 40))
        for name in ("cv", "gini", "load_entropy", "load_entropy_share"):
            for level in ("chance", "corrected_chance"):
                excluded[f"{name} {level}"] += (
                    not rows[name]["low"] <= rows[name][level] <= rows[name]["high"]
                )
    assert excluded["load_entropy chance"] > 100
    assert max(excluded[f"{name} corrected_chance"] for name in ("cv", "gini", "load_entropy")) <= 16


@pytest.mark.parametrize("shape", ["even", "uneven"])
def test_the_interval_of_the_load_balancing_loss_covers_the_truth(shape):
    """400 repetitions of 30 documents; nominal 0.95, three binomial standard deviations are 0.033."""
    shares, generator = true_shares(16, shape), np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        own_DE = generator.dirichlet(CONCENTRATION * shares, 30)
        tokens_D = generator.choice(TOKENS, 30)
        low, high, _ = balancing_loss_interval(
            generator.multinomial(tokens_D, own_DE), tokens_D[:, None] * own_DE
        )
        covered += low <= 16 * (shares**2).sum() <= high
    assert covered / 400 >= 0.95 - 0.033


def test_the_interval_belongs_to_the_number_beside_it():
    """The corrected value where there is one, else the value: even where bias is large or loads collapse."""
    collapsed = np.zeros((30, 8))
    collapsed[:, 2] = np.arange(1, 31)
    generator = np.random.default_rng(1)
    for loads in (collapsed, *draw_documents(generator, true_shares(64, "even"), 20, 25)):
        for name, row in rows_of(loads).items():
            if np.isfinite(row["low"]):
                number = row["value"] if np.isnan(row["corrected"]) else row["corrected"]
                assert row["low"] - 1e-12 <= number <= row["high"] + 1e-12, name


def test_the_corrected_cv_counts_pairs_of_choices_in_different_documents():
    """By hand: n times the share of pairs of choices in different documents that agree, less 1."""
    loads = np.array([[3.0, 1, 0], [2, 0, 2], [0, 5, 1]])
    choices = [np.repeat(np.arange(3), row.astype(int)) for row in loads]
    agree = [
        a == b
        for i, one in enumerate(choices)
        for j, two in enumerate(choices)
        if i != j
        for a in one
        for b in two
    ]
    found = METRICS["cv"].interval(np.vstack([loads, np.zeros(3)]))
    assert found.corrected == pytest.approx(np.sqrt(max(3 * np.mean(agree) - 1, 0)))
    opposite = np.tile([[4.0, 0.0], [0.0, 4.0]], (15, 1))  # more even than independent choices: cv^2 < 0
    assert METRICS["cv"].interval(opposite).low == METRICS["cv"].interval(opposite).corrected == 0


def test_bounds_of_the_metric_bound_its_interval():
    generator = np.random.default_rng(2)
    for loads in draw_documents(generator, true_shares(64, "even"), 30, 20):
        rows = rows_of(loads)
        assert rows["cv"]["low"] >= 0
        assert rows["gini"]["low"] >= 0
        assert rows["max_violation"]["low"] >= 0
        assert rows["load_entropy_share"]["high"] <= 1
        assert {name for name, row in rows.items() if np.isnan(row["low"])} == {"unused", "min_max_ratio"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["even", "uneven"])
@pytest.mark.parametrize("n", [8, 64])
def test_coverage_by_simulation(n, shape):
    """20, 50 and 200 documents, 4,000 repetitions: intervals cover the truth in at least 93 % of them.

    Tolerance: three binomial standard deviations, 0.012.
    """
    names, shares = ("cv", "gini", "load_entropy", "max_over_mean"), true_shares(n, shape)
    true = {name: float(METRICS[name].function(shares)) for name in names}
    generator, covered = np.random.default_rng(n), Counter[tuple[str, int]]()
    for _ in range(REPETITIONS // 100):
        for loads_DE in draw_documents(generator, shares, 100, 200):
            for documents in (20, 50, 200):
                for name in names:
                    low, high, _ = METRICS[name].interval(loads_DE[:documents])
                    covered[name, documents] += low <= true[name] + 1e-12 and true[name] - 1e-12 <= high
    coverage = {case: count / REPETITIONS for case, count in covered.items()}
    assert min(coverage.values()) >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / REPETITIONS), coverage


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, 64])
def test_coverage_of_entropy_where_half_of_the_experts_are_hardly_used(n):
    """20, 50 and 200 documents, 2,000 repetitions: 82 to 92 %, not the 93 % of even loads.

    Tolerance: three binomial standard deviations, 0.026.
    """
    shares, generator = true_shares(n, "half unused"), np.random.default_rng(n + 1)
    true, covered = float(METRICS["load_entropy"].function(shares)), Counter[int]()
    for _ in range(20):
        for loads_DE in draw_documents(generator, shares, 100, 200):
            for documents in (20, 50, 200):
                low, high, _ = METRICS["load_entropy"].interval(loads_DE[:documents])
                covered[documents] += low <= true <= high
    coverage = {documents: count / 2000 for documents, count in covered.items()}
    assert 0.82 - 0.026 <= min(coverage.values()) < 0.93 - 0.026, coverage
    assert max(coverage.values()) <= 0.92 + 0.026, coverage


# --- the most extreme of several layers, experts or pairs by chance, and words that follow a value's size

LAYERS = 6


@pytest.mark.parametrize(("tokens", "n", "k"), [(28, 128, 6), (300, 8, 2), (5000, 64, 8)])
@pytest.mark.parametrize("name", ["cv", "max_over_mean", "unused"])
def test_the_worst_of_six_layers_lies_beyond_its_limit_in_five_percent_of_random_routings(name, tokens, n, k):
    """2,000 draws of six layers: three binomial standard deviations of 5 % are 1.5 %, of a half 3.4 %."""
    metric, setting = METRICS[name], Setting(tokens, n, k, layers=LAYERS)
    worst = metric.function(random_loads(tokens, n, k, LAYERS * 2000, seed=7).reshape(-1, LAYERS, n)).max(1)
    row = metric.row(setting, float(worst[0]))
    assert (worst > row["extreme_limit"] + 1e-12).mean() <= 0.065
    assert (worst > row["extreme_chance"] + 1e-12).mean() <= 0.5 + 0.034
    # of few tokens, unused experts vary less than independent ones, of which the level is
    assert name == "unused" or (worst < row["extreme_chance"] - 1e-12).mean() <= 0.5 + 0.034
    assert name == "unused" or (worst > metric.chance(setting)).mean() > 0.9, "one layer's level misleads"


def test_the_level_of_one_layer_is_that_of_a_single_draw():
    alone, many = (METRICS["cv"].row(Setting(500, 16, 2, layers=layers), 0.1) for layers in (1, 48))
    assert alone["extreme_chance"] == pytest.approx(alone["chance"], rel=0.05)
    assert alone["extreme_limit"] < many["extreme_limit"]


# --- domains


def texts(favour: float, seed: int, layers: int = 3) -> list:
    """24 documents of two domains with tastes of their own; domain b favours expert 2 of layer 1."""
    generator, made = np.random.default_rng(seed), []
    for layer in range(layers):
        score_MBE = 0.3 * generator.standard_normal((2, 12, 8))
        score_MBE[1, :, 2] += favour * (layer == 1)
        share_MBE = np.exp(score_MBE) / np.exp(score_MBE).sum(-1, keepdims=True)
        made.append(counted(generator.multinomial(80, share_MBE), tokens=24 * 80, layer=layer))
    return made


def test_an_affinity_is_claimed_where_no_permutation_of_labels_has_one_as_large_anywhere():
    corpus, layers = Corpus(["a", "b"], [12, 12]), texts(favour=0.8, seed=1)
    told = domain_statistics(layers, corpus, seed=0)
    found = [domain_columns(counts, corpus, one.p_ME) for counts, one in zip(layers, told, strict=True)]
    claims = {
        (layer, int(expert), str(domain))
        for layer, columns in enumerate(found)
        for expert, domain, claimed in zip(
            *(columns[name] for name in ("expert", "domain", "claimed")), strict=True
        )
        if claimed
    }
    assert claims == {(1, 2, "a"), (1, 2, "b")}
    assert min(one.p_ME.min() for one in told) == pytest.approx(1 / 201)
    assert told[1].rows[0]["value"] > told[1].rows[0]["extreme_limit"] > told[0].rows[0]["value"]


def test_tastes_of_documents_are_no_claims_about_their_domains():
    """60 texts of three layers: a true rate of 5 % gives more than 7 in one case of 70."""
    corpus = Corpus(["a", "b"], [12, 12])
    told = [domain_statistics(texts(0.0, seed), corpus, 0) for seed in range(60)]
    assert sum(min(one.p_ME.min() for one in layers) < 0.05 for layers in told) <= 7


def test_without_a_second_document_in_any_domain_nothing_is_judged():
    one = texts(0.8, 1, layers=1)[0]
    told = domain_statistics([one], Corpus(["a", "b"], [1, 1]), 0)[0]
    assert told.rows == []
    assert told.p_ME is None
    assert set(domain_columns(one, Corpus(["a", "b"], [1, 1]))["claimed"]) == {None}


# --- words


def between_even_and_collapsed(share: float, n: int = 8, k: int = 2) -> np.ndarray:
    """Loads whose cv, Gini and busiest expert are this share of the way from even loads to collapse."""
    return (1 - share) * np.full(n, 1 / n) + share * np.where(np.arange(n) < k, 1 / k, 0)


@pytest.mark.parametrize("name", ["cv", "gini", "max_over_mean"])
@pytest.mark.parametrize(
    ("share", "word"),
    [(0.04, "even"), (0.06, "slightly uneven"), (0.19, "slightly uneven"), (0.21, "uneven"),
     (0.79, "uneven"), (0.81, "collapsed"), (1.0, "collapsed")],
)  # fmt: skip
def test_loads_are_called_by_their_share_of_collapse(name, share, word):
    metric = METRICS[name]
    value = metric.value(between_even_and_collapsed(share))
    assert metric.column.share(value, metric.collapse(Setting(1000, 8, 2))) == pytest.approx(share)
    assert metric.column.size(value, metric.collapse(Setting(1000, 8, 2))) == word


def test_an_expert_s_load_is_called_by_its_way_from_an_even_share_to_collapse():
    column = TABLES["load_totals"].column("times_even")
    assert [column.size(times, 4.0) for times in (1.0, 1.1, 1.17, 1.7, 3.5)] == [
        *("even", "even", "slightly uneven", "uneven", "collapsed")
    ]


@pytest.mark.parametrize(
    ("share", "word"),
    [(0.0014 / 0.69, "negligible"), (0.019, "negligible"), (0.021, "weak"), (0.099, "weak"),
     (0.101, "clear"), (0.299, "clear"), (0.301, "strong"), (1.0, "strong")],
)  # fmt: skip
def test_dependence_is_called_by_its_share_of_the_largest_possible(share, word):
    """Two domains that each prefer one of two experts, so much that the information is this share."""

    def joint(preference: float) -> np.ndarray:
        return np.array([[1 + preference, 1 - preference], [1 - preference, 1 + preference]]) / 4

    most = np.log(2)
    preference = 1.0 if share == 1 else brentq(lambda t: information(joint(t)) / most - share, 1e-6, 1)
    column = METRICS["domain_information"].column
    assert column.size(float(information(joint(preference))), most) == word
    assert column.size(0.5, float("nan")) == ""


def test_four_tokens_are_too_few_for_any_finding(tmp_path):
    lines = [f"0,{token},{layer},{token} {token + 4}" for token in range(4) for layer in (0, 1)]
    (tmp_path / "t.csv").write_text("\n".join(["document,position,layer,experts", *lines]))
    told = summary(trace(recorded=tmp_path / "t.csv", experts=8, out=tmp_path / "run", quiet=True))
    (finding,) = told.findings
    assert "Too few tokens to judge: layers 0 and 1, with at most 4 tokens" in finding
    assert told.key_numbers == []
