"""Intervals.

Exact for a mean, right in size for cv over documents, and absent where there are too few of them.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from moescope.routing.load_balance import cv
from moescope.statistics import FEWEST_DOCUMENTS, jackknife_interval


def mean_of(parts: np.ndarray) -> np.ndarray:
    return parts[..., 0] / parts[..., 1]


def test_for_a_mean_of_equal_documents_it_is_student_s_interval():
    values = np.random.default_rng(0).standard_normal(30)
    low, high = jackknife_interval(np.stack([values, np.ones(30)], 1), mean_of, 30)
    expected = stats.t.interval(0.95, 29, values.mean(), stats.sem(values))
    assert (low, high) == pytest.approx(expected)


def test_empty_buckets_change_nothing():
    values = np.stack([np.random.default_rng(0).standard_normal(30), np.ones(30)], 1)
    padded = np.concatenate([values, np.zeros((226, 2))])
    assert jackknife_interval(padded, mean_of, 30) == pytest.approx(jackknife_interval(values, mean_of, 30))


@pytest.mark.parametrize("documents", [0, 1, FEWEST_DOCUMENTS - 1])
def test_under_twenty_documents_there_is_none(documents):
    assert np.isnan(jackknife_interval(np.ones((256, 4)), cv, documents)).all()
    assert np.isfinite(jackknife_interval(np.ones((256, 4)), cv, FEWEST_DOCUMENTS)).all()


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
    hits = [low <= true <= high for low, high in (jackknife_interval(draw(60), cv, 60) for _ in range(300))]
    assert 0.89 <= np.mean(hits) <= 0.99


def test_a_corrected_value_is_the_centre_where_given():
    low, high = jackknife_interval(
        np.random.default_rng(0).poisson(9, (40, 5)).astype(float), cv, 40, centre=7.0
    )
    assert (low + high) / 2 == pytest.approx(7.0)
