"""Intervals.

Exact for a mean, right in size for cv over documents, and absent where there are too few of them.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from moescope.routing.load_balance import cv
from moescope.statistics import (
    FEWEST_DOCUMENTS,
    bootstrap_interval,
    false_discovery_rates,
    jackknife_interval,
    jackknife_ratio,
)


def mean_of(parts: np.ndarray) -> np.ndarray:
    return parts[..., 0] / parts[..., 1]


def test_for_a_mean_of_equal_documents_it_is_student_s_interval():
    values = np.random.default_rng(0).standard_normal(30)
    low, high, _ = jackknife_interval(np.stack([values, np.ones(30)], 1), mean_of, 30)
    expected = stats.t.interval(0.95, 29, values.mean(), stats.sem(values))
    assert (low, high) == pytest.approx(expected)


def test_empty_buckets_change_nothing():
    values = np.stack([np.random.default_rng(0).standard_normal(30), np.ones(30)], 1)
    padded = np.concatenate([values, np.zeros((226, 2))])
    assert jackknife_interval(padded, mean_of, 30)[:2] == pytest.approx(
        jackknife_interval(values, mean_of, 30)[:2]
    )


@pytest.mark.parametrize("documents", [0, 1, FEWEST_DOCUMENTS - 1])
def test_under_twenty_documents_there_is_none(documents):
    assert np.isnan(jackknife_interval(np.ones((256, 4)), cv, documents)).all()
    assert np.isfinite(jackknife_interval(np.ones((256, 4)), cv, FEWEST_DOCUMENTS)[:2]).all()


def test_the_interval_of_cv_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    base = np.array([1.0, 2, 3, 4, 5, 6])
    draw = lambda count: np.stack(  # noqa: E731
        [
            generator.multinomial(200, p / p.sum())
            for p in base * np.exp(0.5 * generator.standard_normal((count, 6)))
        ]
    ).astype(float)
    true = float(cv(draw(40_000).sum(0)))
    hits = [
        low <= true <= high for low, high, _ in (jackknife_interval(draw(60), cv, 60) for _ in range(300))
    ]
    assert 0.89 <= np.mean(hits) <= 0.99


def test_a_corrected_value_is_the_centre_where_given():
    low, high, _ = jackknife_interval(
        np.random.default_rng(0).poisson(9, (40, 5)).astype(float), cv, 40, centre=7.0
    )
    assert (low + high) / 2 == pytest.approx(7.0)


# --- ratios paired by document


def test_for_documents_of_equal_length_the_interval_is_student_s():
    values = np.random.default_rng(0).standard_normal((3, 30))
    ratio = jackknife_ratio(values * 50, np.full(30, 50.0))
    low, high = ratio.interval()
    for row in range(3):
        expected = stats.t.interval(0.95, 29, values[row].mean(), stats.sem(values[row]))
        assert (low[row], high[row]) == pytest.approx(expected)


def test_a_hand_worked_ratio():
    """Two documents: 1 nat over 1 token and 0 over 3. Left out in turn: 0 and 1, so the error is 1/2."""
    ratio = jackknife_ratio(np.array([[1.0, 0.0]]), np.array([1.0, 3.0]))
    assert ratio.value[0] == pytest.approx(0.25)
    assert ratio.error[0] == pytest.approx(0.5)
    assert ratio.degrees == pytest.approx(1.0)  # 16/10 - 1 is below one
    assert np.isnan(ratio.interval()).all()


def test_documents_without_predicted_tokens_do_not_count():
    values, tokens = np.random.default_rng(0).standard_normal((2, 12)), np.arange(5.0, 17.0)
    padded = jackknife_ratio(np.hstack([values, np.zeros((2, 4))]), np.append(tokens, np.zeros(4)))
    plain = jackknife_ratio(values, tokens)
    assert padded.documents == 12
    np.testing.assert_allclose(padded.interval(), plain.interval())


def test_only_differences_within_domains_are_chance():
    """Domains differ and their documents do not: nothing is left to chance."""
    tokens, domain = np.full(20, 7.0), np.tile([0, 1], 10)
    values = np.tile([[7.0, 35.0]], 10)
    np.testing.assert_allclose(jackknife_ratio(values, tokens, domain).interval(), [[3.0], [3.0]])
    low, high = jackknife_ratio(values, tokens).interval()
    assert high - low > 1
    lone = jackknife_ratio(values, tokens, np.eye(1, 20, dtype=int)[0])  # a domain of one document
    assert lone.error[0] > 0.9 * jackknife_ratio(values, tokens).error[0]
    alone = jackknife_ratio(values, tokens, np.arange(20))  # domains of one document are one domain
    assert (alone.error, alone.degrees) == (jackknife_ratio(values, tokens).error, 19)


def test_the_error_within_domains_is_the_stratified_one():
    """Documents of equal length: the variance is the sum over domains of m s² / n²."""
    generator, domain = np.random.default_rng(0), np.repeat([0, 1, 2], [2, 3, 7])
    values = generator.standard_normal(12)
    ratio = jackknife_ratio(values[None] * 50, np.full(12, 50.0), domain)
    parts = [values[domain == label] for label in range(3)]
    variance = sum(len(part) * part.var(ddof=1) for part in parts) / 12**2
    assert ratio.error[0] == pytest.approx(np.sqrt(variance))
    assert ratio.degrees == pytest.approx(12 - 3)


DIFFERENCES = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "t4": lambda generator, shape: generator.standard_t(4, shape),
    "exponential": lambda generator, shape: 1 - generator.exponential(1, shape),
    "lognormal": lambda generator, shape: np.exp(0.5) - np.exp(generator.standard_normal(shape)),
}
SIZES = [(10, 2), (5, 2), (5, 4), (2, 10), (5, 20), (1, 10), (1, 50)]  # domains, documents of each


def simulated(differences, domains, each, varied):
    """Share of 95 % intervals that cover no effect, and of p < 0.05: 4,000 repetitions, 100 draws of lengths.

    The standard error is 0.0034 at 0.95.
    """
    generator, documents = np.random.default_rng(0), domains * each
    domain, covered, claimed = np.repeat(np.arange(domains), each), [], []
    for _ in range(100):
        tokens = np.full(documents, 60.0)
        if varied:
            tokens = np.clip(np.exp(generator.normal(4, 1, documents)), 2, 700)
        sums = tokens * DIFFERENCES[differences](generator, (40, documents))
        ratio = jackknife_ratio(sums, tokens, domain)
        low, high = ratio.interval()
        covered.append((low <= 0) & (high >= 0))
        claimed.append(ratio.one_sided_p() < 0.05)
    return np.mean(covered), np.mean(claimed)


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize(("domains", "each"), SIZES)
def test_the_interval_of_a_ratio_covers_with_any_number_of_domains(domains, each, varied):
    for differences in ("normal", "t4"):
        covered, claimed = simulated(differences, domains, each, varied)
        assert 0.94 - 3 * 0.0034 < covered < 0.96 + 3 * 0.0034
        assert 0.04 < claimed < 0.06 + 3 * 0.0034


@pytest.mark.slow
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize(("domains", "each"), SIZES)
def test_of_skewed_differences_the_interval_covers_as_stated(domains, each, varied):
    for differences, least, most, highest in (
        ("exponential", 0.89, 0.94, 0.15),
        ("lognormal", 0.84, 0.92, 0.21),
    ):
        covered, claimed = simulated(differences, domains, each, varied)
        assert least - 3 * 0.006 < covered < most + 3 * 0.006
        assert 0.05 < claimed < highest + 3 * 0.006


# --- bootstrap


def one_stratum(documents: int) -> np.ndarray:
    return np.zeros(documents, dtype=np.int64)


def test_a_bootstrap_of_a_mean_agrees_with_student_s_interval():
    values = np.random.default_rng(0).standard_normal(40)
    low, high = bootstrap_interval(np.stack([values, np.ones(40)], 1), mean_of, one_stratum(40))
    expected = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    assert (low, high) == pytest.approx(expected, abs=0.05 * (expected[1] - expected[0]))


def test_a_bootstrap_of_two_kinds_of_documents_has_the_limits_of_the_binomial():
    """Ten documents lose 1, ten gain 1: the mean is 2 Bin(19, 1/2) / 19 - 1."""
    values = np.repeat([-1.0, 1.0], 10)
    low, high = bootstrap_interval(np.stack([values, np.ones(20)], 1), mean_of, one_stratum(20))
    tail = stats.norm.cdf(stats.t.ppf(0.025, 19))
    expected = 2 * stats.binom.ppf([tail, 1 - tail], 19, 0.5) / 19 - 1
    assert (low, high) == pytest.approx(tuple(expected))


def test_documents_are_resampled_within_strata_only():
    """The mean differs between strata and not within: nothing is left to chance."""
    values, strata = np.tile([1.0, 5.0], 15), np.tile([0, 1], 15)
    parts = np.stack([values, np.ones(30)], 1)
    assert bootstrap_interval(parts, mean_of, strata) == pytest.approx((3.0, 3.0))
    low, high = bootstrap_interval(parts, mean_of, one_stratum(30))
    assert high - low > 1


def test_a_bootstrap_of_too_few_documents_has_no_interval():
    parts = np.ones((FEWEST_DOCUMENTS, 2))
    assert np.isfinite(bootstrap_interval(parts, mean_of, one_stratum(len(parts)))).all()
    assert np.isnan(bootstrap_interval(parts[1:], mean_of, one_stratum(len(parts) - 1))).all()
    alone = np.eye(1, len(parts), dtype=np.int64)[0]
    assert np.isnan(bootstrap_interval(parts, mean_of, alone)).all()


@pytest.mark.slow
@pytest.mark.parametrize("documents", [20, 50, 200])
def test_the_paired_bootstrap_covers(documents):
    """4,000 repetitions: the share that covers has a standard error of 0.0034 at 0.95.

    Two domains of documents with lengths over two orders of magnitude; the difference per token of two models
    varies over documents, more in the second domain. Both models share a large effect of the document, which
    pairing removes. The estimate is a ratio of sums, and under 50 documents its interval is a little short.
    """
    repetitions, generator = 4000, np.random.default_rng(3)
    strata = np.arange(documents) % 2
    tokens = np.clip(np.exp(generator.normal(4, 1, (documents, repetitions))), 2, 700)
    shift, spread = np.array([0.05, 0.15])[strata, None], np.array([0.1, 0.3])[strata, None]
    shared = generator.normal(3, 1, tokens.shape)
    first = tokens * (shared + generator.normal(0, 0.05, tokens.shape))
    second = tokens * (shared + shift + spread * generator.standard_normal(tokens.shape))
    parts = np.stack([second - first, tokens], 1)
    low, high = bootstrap_interval(parts, lambda sums: sums[:, 0] / sums[:, 1], strata)
    covered = float(((low <= 0.1) & (high >= 0.1)).mean())
    least = {20: 0.92, 50: 0.93, 200: 0.94}[documents]
    assert least - 3 * 0.0034 < covered < 0.95 + 3 * 0.0034
    unpaired = second.sum(0) / tokens.sum(0)
    assert np.mean(high - low) < 0.3 * 4 * unpaired.std()


def test_false_discovery_rates_equal_those_of_scipy():
    generator = np.random.default_rng(0)
    for p in (generator.random(50) ** 3, np.array([0.04, 0.01, 0.01, 1.0]), np.array([0.2]), np.zeros(3)):
        np.testing.assert_array_equal(false_discovery_rates(p), stats.false_discovery_control(p))
