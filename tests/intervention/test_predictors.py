"""What predicts the effect of an expert: correlations against scipy, planted causes, chance, intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from intervention.intervention_runs import sweep_tables, write_run
from moescope.intervention.figures import PREDICTORS
from moescope.intervention.predictors import (
    FEWEST_CLAIMED,
    correlate,
    correlations,
    expert_scores,
    predictor_tables,
)
from moescope.intervention.report import PREDICTED, at_k_star
from moescope.intervention.tables import TABLES
from moescope.reporting.findings import say_all
from moescope.statistics import bootstrap_mean


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


def as_tables(scores: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The scores as the tables of an intervention, a scan at k* and a compression."""
    known = {"intervention_experts": scores}
    if "alignment" in scores:
        known["alignment"] = scores.assign(align=scores["alignment"], margin=np.nan)
    return {**known, "saliency": scores} if "reap" in scores else known


def written(scores: pd.DataFrame) -> pd.DataFrame:
    return predictor_tables(as_tables(scores))["predictors"]


def test_given_load_there_is_a_correlation_and_no_test():
    found = correlations(planted())
    assert found["alignment", False].low > 0.3
    assert found["alignment", False].p < 0.01
    assert abs(found["alignment", True].value) < 0.1
    assert found["reap", True].value > found["reap", False].high, "load is no longer noise"
    assert ("load", True) not in found
    rows = written(planted()).set_index(["predictor", "given"])
    assert rows.index[rows["claimed"]].tolist() == [("load", ""), ("alignment", ""), ("reap", "")]
    tests = rows[["p", "q", "permuted", "correlation_low", "correlation_high"]]
    assert tests.xs("load", level="given").isna().all(axis=None)
    plain = tests.xs("", level="given")
    np.testing.assert_allclose(plain["q"], stats.false_discovery_control(plain["p"]))
    plain, partial = say_all(PREDICTED, predictor_tables(as_tables(planted())), TABLES)
    assert "3 of 3 scores" in plain
    assert f"REAP saliency {found['reap', True].value:.3g}" in partial


def test_given_load_a_score_that_follows_load_keeps_a_correlation():
    """Score and effect follow load alone, the effect by its square: what is left is no finding."""
    generator = np.random.default_rng(7)
    load, *noise = generator.standard_normal((3, 24, 64))
    load = np.exp(0.8 * load)
    found = correlate(scores_of(load**2 + noise[0], load=load, reap=load + 0.3 * noise[1]), "reap", "load")
    assert found.value > 3 / np.sqrt(24 * 64)
    assert np.isnan([found.low, found.high, found.p, found.chance]).all()


def test_differences_between_layers_are_no_correlation():
    generator = np.random.default_rng(3)
    level = 10.0 * np.arange(20)[:, None]
    effect, score = level + generator.standard_normal((20, 8)), level + generator.standard_normal((20, 8))
    found = correlate(scores_of(effect, load=score), "load")
    assert abs(found.value) < 2 * found.chance
    assert stats.spearmanr(effect.ravel(), score.ravel()).statistic > 0.95


def test_nothing_is_claimed_below_twelve_layers():
    few, enough = planted(FEWEST_CLAIMED - 1), planted(FEWEST_CLAIMED)
    for (_, partial), found in correlations(few).items():
        assert np.isnan([found.low, found.high, found.p]).all()
        assert np.isfinite([found.value, found.ceiling]).all()
        assert np.isnan(found.chance) == partial
    tables = predictor_tables(as_tables(few))
    assert tables["predictors"][["p", "q", "correlation_low"]].isna().all(axis=None)
    assert not tables["predictors"]["claimed"].any()
    assert say_all(PREDICTED, tables, TABLES) == ["No claim about predictors: 11 layers, 12 are needed."]
    assert all(np.isnan(found.p) == partial for (_, partial), found in correlations(enough).items())


def test_the_tables_are_the_correlations_and_the_ranks_of_every_score():
    scores = planted()
    tables = predictor_tables(as_tables(scores))
    rows = tables["predictors"].set_index(["predictor", "given"])
    assert set(rows.reset_index()) == set(TABLES["predictors"].columns)
    for (name, partial), found in correlations(scores).items():
        row = rows.loc[(name, "load" if partial else "")]
        ends = found.low, found.high, found.p, found.chance, 1.96 * row["permuted_std"]
        columns = ["correlation_low", "correlation_high", "p", "permuted", "permuted"]
        assert row[columns].tolist() == pytest.approx(ends, nan_ok=True)
        assert (row["correlation"], row["ceiling"]) == (found.value, found.ceiling)
        assert row["layers"] == 24
    layer = tables["expert_scores"].query("predictor == 'reap' and layer == 3").sort_values("expert")
    own = scores[scores["layer"] == 3].sort_values("expert")
    assert layer["rank_share"].tolist() == pytest.approx(stats.rankdata(own["reap"]) / 16)
    size = np.abs(own["loss_difference"]).mean()
    assert layer["effect_times"].tolist() == pytest.approx(own["loss_difference"] / size)


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


def test_figures_show_every_score_with_its_chance_level_and_ceiling():
    tables = predictor_tables(as_tables(planted()))
    correlations_, scatter = (spec.draw(tables) for spec in PREDICTORS)
    rows = tables["predictors"]
    plain, given, permuted, ceiling = correlations_.data[:4]
    assert (len(plain["x"]), len(given["x"])) == (3, 2)
    chance = rows["permuted"].dropna()  # not of the scores given load
    assert sorted(permuted["x"]) == pytest.approx(sorted([*chance, *-chance]))
    assert sorted(ceiling["x"]) == pytest.approx(sorted(rows["ceiling"]))
    assert scatter.slider.values == ["alignment", "load", "reap"]
    assert scatter.slider.values[scatter.slider.start] == "load"
    assert sum("colorbar" in trace["marker"] for trace in scatter.data if "marker" in trace) == 3
    for spec in PREDICTORS:
        assert spec.can_draw(tables)
        assert set(spec.was) <= {
            f"effect_against_{name}" for name in ("load", "alignment", "ambiguity", "reap")
        }


# --- beside other runs of the page


class Other:
    """A run as the page has it: tables and checkpoints."""

    def __init__(self, tables: dict[str, pd.DataFrame], checkpoints: list[dict]):
        self.tables, self.info = tables, {"checkpoints": checkpoints}

    def table(self, name: str) -> pd.DataFrame:
        return self.tables[name]


def test_a_scan_and_a_compression_of_the_same_checkpoint_add_their_scores(tmp_path):
    tables = sweep_tables(layers=13)
    run = write_run(tmp_path / "run", tables)
    run.info["checkpoints"] = [{"step": 0, "path": "m", "header_hash": "a"}]
    effects, generator = tables["intervention_experts"], np.random.default_rng(0)
    keys = effects[["layer", "expert"]]
    view = {"step": 7, "matrix": "gate", "fold_norm": False}
    parts, ambiguity = [], []
    for router in ("centered", "raw"):
        for k in (1, 2):
            scores = {"k": k, "align": generator.random(len(keys)), "margin": generator.random(len(keys))}
            parts.append(keys.assign(router=router, **view, **scores))
        k_star = pd.array([1 + layer % 2 for layer in range(13)], "Int64")
        ambiguity.append(pd.DataFrame({"layer": range(13), "router": router, **view, "k_star": k_star}))
    step = {"step": 7, "path": "elsewhere", "header_hash": "a"}
    scan = Other({"alignment": pd.concat(parts), "ambiguity": pd.concat(ambiguity)}, [step])
    other = Other(scan.tables, [{**step, "header_hash": "b"}])
    half = Other({"saliency": keys.assign(reap=generator.random(len(keys)))}, [{"step": 0, "path": "m"}])
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}

    def shown(*more: Other) -> set[str]:
        (section,) = run.verb.joint([run, *more])
        return set(section.figures[0][1]["predictors"]["predictor"])

    assert shown() == shown(other) == {"load"}
    assert shown(scan) == {"load", "alignment", "ambiguity"}
    (section,) = run.verb.joint([run, scan, half])
    (_, joint), _ = section.figures
    aligned = parts[2].where(parts[2]["layer"] % 2 == 0, parts[3])
    expected = correlate(effects.assign(alignment=aligned["align"].to_numpy()), "alignment", "load")
    rows = joint["predictors"].set_index(["predictor", "given"])
    assert rows.loc[("alignment", "load"), "correlation"] == pytest.approx(expected.value)
    assert len(rows) == 7
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before, "nothing is written"
