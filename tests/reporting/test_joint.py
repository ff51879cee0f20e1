"""The rank correlation over layers: against scipy, its interval against simulation, and its refusals."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from moescope.reporting.joint import FIGURES, answer, correlation_of, rank_correlation


def tables(scores, values, metric="confidence"):
    layers = range(len(scores))
    rows = {
        "layer": layers,
        "metric": metric,
        "domain": "",
        "value": values,
        "chance": 0.25,
        "collapse": 1.0,
        "low": np.nan,
        "high": np.nan,
    }
    return {
        "ambiguity": pd.DataFrame({"layer": layers, "ambiguity_score": scores}),
        "routing_layers": pd.DataFrame(rows),
    }


def test_the_correlation_is_scipys_with_ties_too():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 6, 20).astype(float), generator.normal(size=20)
    assert rank_correlation(x, y).value == pytest.approx(spearmanr(x, y).statistic)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    rho = 0.6
    truth = 6 / np.pi * np.arcsin(rho / 2)  # Spearman's of two normals
    held = 0
    for _ in range(600):
        x, noise = generator.normal(size=(2, 16))
        found = rank_correlation(x, rho * x + np.sqrt(1 - rho**2) * noise)
        held += found.low <= truth <= found.high
    assert 0.91 < held / 600 < 0.985


def test_perfect_order_is_not_certainty():
    up, down = (rank_correlation(np.arange(5.0), sign * np.arange(5.0)) for sign in (1, -1))
    assert (up.value, up.high) == (pytest.approx(1), 1.0)
    assert up.low < 0
    assert not up.excludes_zero
    assert (down.value, down.low) == (pytest.approx(-1), -1.0)
    assert rank_correlation(np.arange(12.0), np.arange(12.0)).excludes_zero


def test_under_five_layers_or_of_a_constant_there_is_none():
    assert rank_correlation(np.arange(4.0), np.arange(4.0)) is None
    assert rank_correlation(np.arange(6.0), np.ones(6)) is None
    assert rank_correlation(np.array([0, 1, 2, 3, 4, np.nan]), np.array([0, 1, 2, 3, np.nan, 5])) is None
    assert "3 layers in both runs, 5 are needed" in answer("cv", None, 3)


@pytest.mark.parametrize(
    ("sign", "metric", "words"),
    [
        (-1, "confidence", "route less confidently"),
        (1, "confidence", "route more confidently"),
        (1, "routing_entropy", "route less decidedly"),
        (1, "cv", "route less evenly"),
        (-1, "cv", "route more evenly"),
    ],
)
def test_the_sentence_says_which_way(sign, metric, words):
    frame = tables(np.arange(12.0), sign * np.arange(12.0), metric)
    assert words in answer(metric, correlation_of(frame, metric), 12)


def test_what_chance_could_give_is_not_called_a_relation():
    frame = tables([1, 2, 3, 4, 5, 6.0], [2, 1, 4, 3, 6, 2.5])
    assert answer("confidence", correlation_of(frame, "confidence"), 6).startswith(
        "Ambiguous layers do not measurably differ"
    )


def test_only_layers_of_both_runs_are_drawn():
    frame = tables(np.arange(8.0), np.arange(8.0))
    frame["ambiguity"] = frame["ambiguity"].iloc[2:]
    figure = FIGURES[0].draw(frame)
    assert figure.data[0]["text"] == ["2", "3", "4", "5", "6", "7"]
    assert "6 layers" in figure.caption
