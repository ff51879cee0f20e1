"""Ambiguity against routing over layers: the coefficient against scipy, both views together, no claim."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from moescope.reporting.joint import FIGURES, rank_correlation


def tables(values, metric="confidence", **scores):
    """`scores`: router variant -> absolute ambiguity of each layer."""
    layers = range(len(values))
    rows = {"layer": layers, "metric": metric, "domain": "", "value": values, "chance": 0.25}
    ambiguity = [
        pd.DataFrame({"router": router, "layer": layers, "absolute_score": score, "ambiguity_score": 0.5})
        for router, score in scores.items()
    ]
    return {"ambiguity": pd.concat(ambiguity), "routing_layers": pd.DataFrame(rows)}


def test_the_correlation_is_scipys_with_ties_too():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 6, 20).astype(float), generator.normal(size=20)
    assert rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic)


def test_under_five_layers_or_of_a_constant_there_is_none():
    assert np.isnan(rank_correlation(np.arange(4.0), np.arange(4.0)))
    assert np.isnan(rank_correlation(np.arange(6.0), np.ones(6)))


def test_both_views_are_drawn_with_their_coefficients():
    """Layers in perfect order in the raw view, in another order in the centered one."""
    values, centered = np.arange(6.0), np.array([0.1, 0.3, 0.2, 0.6, 0.4, 0.5])
    figure = FIGURES[0].draw(tables(values, raw=-values, centered=centered))
    raw, other = figure.data[:2]
    assert [trace["name"] for trace in (raw, other)] == ["raw router", "centered router"]
    np.testing.assert_array_equal(other["x"], centered)
    found = re.findall(r"([−\d.]+) \((raw|centered)\)", figure.caption)
    assert [name for _, name in found] == ["raw", "centered"]
    expected = [-1, spearmanr(values, centered).statistic]
    assert [float(text.replace("−", "-")) for text, _ in found] == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("layers", [6, 24, 60])
def test_no_order_of_layers_however_perfect_is_called_significant(layers):
    """No interval, no p-value and no direction in words."""
    for figure in FIGURES:
        values = np.arange(float(layers))
        caption = figure.draw(tables(values, figure.metrics[0], raw=values)).caption
        assert f"over {layers} layers: 1 (raw)" in caption
        assert not re.search(r"\[|p =|p ≤|significant|more ambiguous|less", caption)


def test_only_layers_of_both_runs_are_drawn():
    frame = tables(np.arange(8.0), raw=np.arange(8.0))
    frame["ambiguity"] = frame["ambiguity"].iloc[2:]
    figure = FIGURES[0].draw(frame)
    assert figure.data[0]["text"] == ["2", "3", "4", "5", "6", "7"]
    assert "6 layers" in figure.caption
