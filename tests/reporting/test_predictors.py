"""What predicts the effect of an expert: correlations against scipy, planted causes, chance, intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moescope.reporting.predictors import (
    FEWEST_CLAIMED,
    FIGURES,
    at_k_star,
    bootstrap_mean,
    correlate,
    correlations,
    expert_scores,
    findings,
)


def scores_of(
    effect_LE: np.ndarray, noise: float = 0.0, seed: int = 0, **predictors: np.ndarray
) -> pd.DataFrame:
    """One row per layer and expert; halves of the effect have independent noise, the effect their mean."""
    layers, experts = effect_LE.shape
    halves = effect_LE + noise * np.random.default_rng(seed).standard_normal((2, layers, experts))
    columns = {name: values.ravel() for name, values in predictors.items()}
    return pd.DataFrame(
        {
            "layer": np.repeat(np.arange(layers), experts),
            "expert": np.tile(np.arange(experts), layers),
            "loss_difference": halves.mean(0).ravel(),
            "half_a": halves[0].ravel(),
            "half_b": halves[1].ravel(),
            **columns,
        }
    )


def test_the_value_is_the_mean_of_scipy_s_correlations_over_layers():
    generator = np.random.default_rng(0)
    effect, score = generator.standard_normal((14, 8)), generator.integers(0, 5, (14, 8)).astype(float)
    found = correlate(scores_of(effect + np.arange(14)[:, None], alignment=score), "alignment")
    expected = [stats.spearmanr(*pair).statistic for pair in zip(score, effect, strict=True)]
    np.testing.assert_allclose(found.by_layer, expected)
    assert found.value == pytest.approx(np.mean(expected))


def test_the_partial_correlation_is_the_textbook_s():
    generator = np.random.default_rng(1)
    effect, score, load = generator.standard_normal((3, 1, 20))
    found = correlate(scores_of(effect, alignment=score, load=load), "alignment", "load")
    xy, xz, yz = (
        stats.spearmanr(a[0], b[0]).statistic for a, b in ((score, effect), (score, load), (effect, load))
    )
    assert found.value == pytest.approx((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)))


def planted(layers: int = 24) -> pd.DataFrame:
    """Load causes the effect; alignment follows load and nothing else; REAP knows what load does not."""
    generator = np.random.default_rng(2)
    load, own, noise = generator.standard_normal((3, layers, 16))
    return scores_of(load + own, 0.3, load=load, alignment=load + 0.5 * noise, reap=own)


def test_a_score_that_follows_load_predicts_nothing_given_load():
    found = correlations(planted())
    assert found["alignment", False].low > 0.3
    assert found["alignment", False].p < 0.01
    assert found["alignment", True].low < 0 < found["alignment", True].high
    assert found["alignment", True].p > 0.05
    assert found["reap", True].low > found["reap", False].high, "load is no longer noise"
    assert ("load", True) not in found
    sentences = findings(planted())
    assert len(sentences) == 3
    assert "not beyond chance" in next(line for line in sentences if line.startswith("Alignment"))


def test_differences_between_layers_are_no_correlation():
    generator = np.random.default_rng(3)
    level = 10.0 * np.arange(20)[:, None]
    effect, score = level + generator.standard_normal((20, 8)), level + generator.standard_normal((20, 8))
    found = correlate(scores_of(effect, load=score), "load")
    assert abs(found.value) < 2 * found.chance
    assert stats.spearmanr(effect.ravel(), score.ravel()).statistic > 0.95


def test_nothing_is_claimed_below_twelve_layers():
    few, enough = planted(FEWEST_CLAIMED - 1), planted(FEWEST_CLAIMED)
    for found in correlations(few).values():
        assert np.isnan([found.low, found.high, found.p]).all()
        assert np.isfinite([found.value, found.chance, found.ceiling]).all()
    assert findings(few) == ["No claim about predictors: 11 layers, 12 are needed."]
    assert all(np.isfinite(found.p) for found in correlations(enough).values())
    tables = {"intervention_experts": few}
    for spec in FIGURES[:3]:
        caption = spec.draw(tables).caption
        assert "[" not in caption
        assert "No claim" in caption or "varies" in caption


def test_a_perfect_predictor_reaches_the_ceiling():
    """The truth itself against effects measured with noise; halves have twice the variance of the whole."""
    effect = np.random.default_rng(4).standard_normal((200, 60))
    found = correlate(scores_of(effect, noise=1.2, load=effect), "load")
    assert found.ceiling == pytest.approx(found.value, abs=0.02)
    assert found.value < 0.85


@pytest.mark.slow
def test_permuted_experts_are_called_beyond_chance_one_time_in_twenty():
    """300 cases without a relation: the share with p < 0.05 has a standard error of 0.0126."""
    generator = np.random.default_rng(5)
    p = [
        correlate(
            scores_of(*generator.standard_normal((1, 12, 5)), load=generator.standard_normal((12, 5))), "load"
        ).p
        for _ in range(300)
    ]
    assert abs(np.mean(np.array(p) < 0.05) - 0.05) < 3 * 0.0126


def test_the_interval_over_layers_covers():
    """2,000 cases of 12 layers whose correlations scatter around 0.2."""
    generator = np.random.default_rng(6)
    values = 0.2 + 0.3 * generator.uniform(-1, 1, (2000, 12))
    ends = np.array([bootstrap_mean(row, generator) for row in values])
    covered = float(((ends[:, 0] <= 0.2) & (ends[:, 1] >= 0.2)).mean())
    assert 0.93 < covered < 0.97


def test_layers_that_lack_a_score_are_left_out():
    scores = planted(16)
    scores.loc[scores["layer"] < 4, "reap"] = np.nan
    scores.loc[scores["layer"] == 15, "reap"] = 1.0
    assert correlate(scores, "reap").layers == tuple(range(4, 15))


def test_ambiguity_is_the_negative_margin_at_the_layer_s_k_star():
    keys = pd.MultiIndex.from_product([[0, 1], [1, 16], [0, 1]], names=["layer", "k", "expert"])
    alignment = pd.DataFrame(
        {"align": np.arange(8.0), "margin": np.arange(8.0) / 10}, index=keys
    ).reset_index()
    ambiguity = pd.DataFrame({"layer": [0, 1], "k_star": pd.array([16, 1], "Int64")})
    effects = scores_of(np.zeros((2, 2)))
    found = expert_scores(
        {"intervention_experts": effects.assign(load=0.5), "alignment": at_k_star(alignment, ambiguity)}
    )
    assert found["alignment"].tolist() == [2, 3, 4, 5]
    assert found["ambiguity"].tolist() == [-0.2, -0.3, -0.4, -0.5]
    assert "reap" not in found


def test_every_figure_is_drawn_with_all_scores():
    scores = planted().assign(align=lambda rows: rows["alignment"], margin=lambda rows: -rows["alignment"])
    tables = {"intervention_experts": scores, "alignment": scores, "saliency": scores}
    for spec in FIGURES:
        assert spec.can_draw(tables), spec.name
        figure = spec.draw(tables)
        figure.to_plotly()
        assert len(figure.title.split()) <= 8, figure.title
        assert len(figure.data) <= 12
        assert all(figure.layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
