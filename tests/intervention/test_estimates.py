"""Estimates of interventions: exact cases, coverage of intervals, false claims under planted nulls."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from intervention.intervention_runs import (
    frames,
    lengths,
    planted_sweep,
    projection_tables,
    sweep_tables,
    top_k_tables,
)
from moescope.intervention.estimates import expert_effects, nearest_in_load, summarise
from moescope.intervention.tables import ALL, TABLES
from moescope.statistics import FEWEST_PAIRED


def test_controls_are_the_nearest_in_load():
    load = np.array([0.1, 0.5, 0.12, 0.11, 0.3, 0.52])
    assert nearest_in_load(load, 2)[0].tolist() == [3, 2]
    assert nearest_in_load(load, 2)[1].tolist() == [5, 4]
    assert nearest_in_load(load[:3], 4).shape == (3, 2)


def test_excess_is_paired_by_document():
    """Expert 0 costs 0.5 nats per token more than its controls in every document, however those vary."""
    generator, tokens = np.random.default_rng(1), np.arange(20.0, 40.0)
    shared = generator.normal(0, 9, 20) * tokens
    difference = np.stack([shared + 0.5 * tokens, shared, shared, shared, shared, shared])
    plan = {"layer": 0, "expert": np.arange(6), "calibration_load": 1 / 6}
    found = summarise(*frames(difference, tokens, plan)).set_index("expert")
    assert found.loc[0, "excess"] == pytest.approx(0.5)
    assert found.loc[0, ["excess_low", "excess_high"]].tolist() == pytest.approx([0.5, 0.5])
    assert found.loc[0, "loss_difference_high"] - found.loc[0, "loss_difference_low"] > 1
    assert found.loc[0, "controls"] == 5, "all others of a small layer"
    assert found.loc[0, "p"] < 1e-6
    assert (found.loc[1:, "p"] > 0.5).all(), "experts that hurt less than their controls are no find"


def test_sums_are_divided_once_and_domains_stand_apart():
    tokens, domain = np.array([10.0, 30.0] * 10), ["code", "prose"] * 10
    difference = np.tile([1.0, 6.0], (1, 10))
    found = summarise(*frames(difference, tokens, {}, domain)).set_index("domain")
    assert list(found.index) == [ALL, "code", "prose"]
    assert found["loss_difference"].tolist() == pytest.approx([70 / 400, 0.1, 0.2])
    assert found["documents"].tolist() == [20, 10, 10]
    assert found["loss"].tolist() == pytest.approx([3.0] * 3)
    assert found["predictions_changed"].tolist() == pytest.approx([9 / 40, 0.2, 7 / 30])
    assert found["choices_changed"].tolist() == pytest.approx([0.5] * 3)
    assert found[["excess", "q"]].isna().all(axis=None), "nothing to compare with"
    assert found["load"].notna().tolist() == [True, False, False]


def test_under_ten_documents_there_is_no_interval_and_no_p():
    plan = {"layer": 0, "expert": np.arange(5), "calibration_load": 0.2}
    difference = np.random.default_rng(0).standard_normal((5, FEWEST_PAIRED))
    for documents, known in ((FEWEST_PAIRED, True), (FEWEST_PAIRED - 1, False)):
        tokens = np.full(documents, 9.0)
        found = summarise(*frames(difference[:, :documents], tokens, plan))
        for column in ("loss_difference_low", "loss_difference_std", "excess_high", "excess_std", "p", "q"):
            assert found[column].notna().all() == known, column
        assert found["excess"].notna().all()


def test_a_projection_counts_against_the_kind_of_control_that_explains_it_best():
    """A random subspace costs nothing, a random direction of equal length as much as the projection."""
    tokens, generator = np.full(30, 40.0), np.random.default_rng(2)
    noise = generator.normal(0, 0.1, (9, 30))
    effect = np.array([1.0, 0, 0, 0, 0, 1.1, 0.9, 1.2, 0.8])
    plan = {
        "name": "project_out",
        "role": ["change"] + ["random subspace"] * 4 + ["random direction"] * 4,
        "of": [np.nan] + [0] * 8,
        "draw": [np.nan, 0, 1, 2, 3, 0, 1, 2, 3],
    }
    found = summarise(*frames((effect[:, None] + noise) * tokens, tokens, plan))
    assert abs(found.loc[0, "excess"]) < 0.1
    assert found.loc[0, "p"] > 0.2
    plan["role"] = ["change"] + ["random subspace"] * 8
    alone = summarise(*frames((effect[:, None] + noise) * tokens, tokens, plan))
    assert alone.loc[0, "excess"] == pytest.approx(0.5, abs=0.1)
    plan["of"] = [np.nan, 0] + [np.nan] * 7
    single = summarise(*frames((effect[:, None] + noise) * tokens, tokens, plan))
    assert single.loc[0, "excess"] == pytest.approx(1.0, abs=0.1)
    assert np.isnan(single.loc[0, "p"]), "one draw says nothing about others"


def test_standard_errors_are_those_of_equal_documents():
    generator, tokens = np.random.default_rng(3), np.full(24, 8.0)
    difference = generator.standard_normal((5, 24))
    plan = {"layer": 0, "expert": np.arange(5), "calibration_load": 0.2}
    found = summarise(*frames(difference * 8, tokens, plan))
    assert found["loss_difference_std"].tolist() == pytest.approx(stats.sem(difference, axis=1))
    excess = difference - (difference.sum(0) - difference) / 4
    assert found["excess_std"].tolist() == pytest.approx(stats.sem(excess, axis=1))
    half = (found["excess_high"] - found["excess_low"]) / 2
    assert found["excess_std"].tolist() == pytest.approx(half / stats.t.ppf(0.975, 23))
    assert found["p"].tolist() == pytest.approx(
        stats.ttest_1samp(excess, 0, axis=1, alternative="greater").pvalue
    )


def test_a_projection_s_controls_are_their_mean_and_range():
    found = projection_tables(layers=2)
    rows = found["interventions"]
    for row in found["projections"].itertuples():
        draws = rows[(rows["layer"] == row.layer) & (rows["k"] == row.k) & (rows["role"] == row.role)]
        effect = draws["loss_difference"]
        assert row.loss_difference == pytest.approx(effect.mean())
        own = row.role == "change"
        ends = draws[["loss_difference_low", "loss_difference_high"]].iloc[0].tolist()
        assert [row.loss_difference_low, row.loss_difference_high] == (
            ends if own else [effect.min(), effect.max()]
        )
        assert np.isnan(row.draws) if own else row.draws == 4
    assert len(found["projections"]) == 2 * 3 * 3


def test_changes_are_labelled_and_chosen_for_figures():
    sweep = sweep_tables()["interventions"]
    assert set(sweep.query("layer == 1 and expert == 5")["label"]) == {"L1 E5"}
    assert not sweep["single"].any(), "24 experts are no single changes"
    most = sweep[sweep["domain"] != ALL].groupby("intervention")["excess"].max().nlargest(12)
    shown = sweep[sweep["shown"]]
    assert set(shown["intervention"]) == set(most.index)
    assert ALL not in set(shown["domain"])
    claimed = (sweep["q"] < 0.05) & (sweep["loss_difference_low"] > 0)
    assert sweep["claimed"].tolist() == claimed.tolist()
    assert sweep_tables(layers=2, experts=6)["interventions"]["single"].all(), "12 experts are"
    projected, top = projection_tables()["interventions"], top_k_tables()["interventions"]
    assert not projected["single"].any()
    assert not top["single"].any()
    assert set(top["label"]) == {f"top_k k={k}" for k in (1, 2, 3, 4)}
    alone = summarise(*frames(np.ones((1, 12)), np.full(12, 9.0), {"name": "top_k", "k": 3}))
    assert alone["single"].all(), "one k is no grid"


def test_q_values_are_scipy_s_over_the_sweep():
    generator = np.random.default_rng(5)
    difference = generator.standard_normal((24, 20)) + np.eye(24, 1)
    plan = {"layer": np.repeat([0, 1, 2], 8), "expert": np.tile(np.arange(8), 3)}
    plan["calibration_load"] = generator.random(24)
    found = summarise(*frames(difference, np.full(20, 5.0), plan, ["a", "b"] * 10))
    whole, single = found[found["domain"] == ALL], found[found["domain"] != ALL]
    for rows in (whole, single):
        np.testing.assert_allclose(rows["q"], stats.false_discovery_control(rows["p"]))
    assert len(single) == 48


# --- simulations


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "each"), [(10, 16), (6, 8)])  # 4 controls, and all others
def test_where_all_experts_are_alike_no_more_than_one_in_twenty_stands_out(layers, each):
    """300 sweeps of layers of experts; p values of a sweep are dependent, so sweeps give the error."""
    generator, sweeps, documents = np.random.default_rng(8), 300, 20
    experts, rates, any_find = layers * each, [], []
    plan = {"layer": np.repeat(np.arange(layers), each), "expert": np.tile(np.arange(each), layers)}
    plan["calibration_load"] = generator.random(experts)
    for _ in range(sweeps):
        tokens = lengths(generator, (documents,))
        shared = generator.standard_t(4, documents) * 0.1
        difference = tokens * (0.02 + shared + 0.05 * generator.standard_t(4, (experts, documents)))
        found = summarise(*frames(difference, tokens, plan))
        rates.append((found["p"] < 0.05).mean())
        any_find.append((found["q"] < 0.05).any())
    assert np.mean(rates) < 0.05 + 2 * np.std(rates) / np.sqrt(sweeps)
    assert np.mean(any_find) < 0.05 + 2 * np.sqrt(0.05 * 0.95 / sweeps)


@pytest.mark.slow
def test_a_projection_like_any_random_one_is_claimed_in_at_most_one_case_in_twenty():
    """4,000 cases: effects vary over directions, and the projection's is drawn as those of its controls."""
    generator, draws, documents, cases = np.random.default_rng(9), 8, 20, 100
    each = draws + 1
    roles = ["change"] + ["random subspace"] * draws
    first = np.repeat(np.arange(cases) * each, each)
    of = np.where(np.tile(np.arange(each), cases) == 0, np.nan, first)
    plan = {"name": "project_out", "role": roles * cases, "of": of}
    claims = []
    for _ in range(40):
        tokens = lengths(generator, (documents,))
        effect = 0.1 + 0.05 * generator.standard_normal((cases * each, 1))
        difference = tokens * (effect + 0.05 * generator.standard_normal((cases * each, documents)))
        found = summarise(*frames(difference, tokens, plan))
        claims.append((found.loc[found["role"] == "change", "p"] < 0.05).mean())
    assert np.mean(claims) < 0.05 + 2 * np.std(claims) / np.sqrt(len(claims))


def test_a_planted_expert_is_found_in_its_domain_and_no_other():
    found = summarise(*planted_sweep())
    claimed = found[(found["q"] < 0.05) & (found["domain"] != ALL)]
    assert claimed[["layer", "expert", "domain"]].to_numpy().tolist() == [[1, 5, "code"]]
    whole = found[(found["q"] < 0.05) & (found["domain"] == ALL)]
    assert whole[["layer", "expert"]].to_numpy().tolist() == [[1, 5]]


def test_effects_of_experts_name_the_domain_and_split_documents_in_halves():
    documents, plan, routing = planted_sweep()
    found = summarise(documents, plan, routing)
    effects = expert_effects(found, documents, plan, seed=3)
    assert set(effects.columns) | {"layer_name"} == set(TABLES["intervention_experts"].columns)
    assert effects["load"].tolist() == plan["calibration_load"].tolist()
    best = effects.loc[effects["excess"].idxmax()]
    assert (best["layer"], best["expert"], best["domain_most"]) == (1, 5, "code")
    one = documents[documents["intervention"] == 13]
    total = (one["loss_changed"] - one["loss"]).sum() / one["tokens"].sum()
    assert min(best["half_a"], best["half_b"]) < total < max(best["half_a"], best["half_b"])
    assert best["loss_difference"] == pytest.approx(total)
    pd.testing.assert_frame_equal(effects, expert_effects(found, documents, plan, seed=3))
    assert not expert_effects(found, documents, plan, seed=4)["half_a"].equals(effects["half_a"])


@pytest.mark.parametrize("experts", [8, 16])
def test_in_a_small_layer_excess_ranks_experts_as_their_effects_do(experts):
    """Expert 0 matters and so do those nearest to it in load: in a layer of 8 that must not hide it."""
    generator = np.random.default_rng(2)
    effect = np.full(experts, 0.01)
    effect[:5] = [0.5, 0.4, 0.4, 0.4, 0.4]
    effect[5] = 0.1
    load = np.linspace(0.1, 0.2, experts)
    tokens = lengths(generator, (40,))
    difference = tokens * (effect[:, None] + 0.01 * generator.standard_normal((experts, 40)))
    found = summarise(
        *frames(difference, tokens, {"layer": 0, "expert": np.arange(experts), "calibration_load": load})
    )
    assert (found["controls"] == (7 if experts == 8 else 4)).all()
    assert found["excess"].rank().corr(found["loss_difference"].rank()) > (0.999 if experts == 8 else -1)
    assert (found.loc[0, "excess"] == found["excess"].max()) == (experts == 8)
