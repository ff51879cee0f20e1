"""A study's statistics: against least squares, scipy and a case by hand; error rates by simulation.

What cannot be said is not said.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moescope.errors import BadInput
from moescope.lab.study_statistics import (
    LEVEL,
    SPREAD_LEVEL,
    compare,
    detectable_errors,
    differences,
    equal_variances_p,
    hedges_factor,
    holm,
    residuals,
)
from moescope.lab.tables import TABLES
from moescope.run import write_table
from moescope.tables import read_parquet


def runs_of(
    losses_RS, arms: list[str] | None = None, question: str | list[str] = "main", **columns
) -> pd.DataFrame:
    """study_runs with those losses; NaN is a training that failed."""
    losses_RS = np.asarray(losses_RS, float)
    arms = arms or ["ref", *(f"arm{index}" for index in range(1, len(losses_RS)))]
    questions = [question] * len(arms) if isinstance(question, str) else question
    return pd.DataFrame(
        [
            {
                "arm": arm,
                "seed": seed,
                "question": asked,
                "status": "done" if np.isfinite(loss) else "failed",
                "validation_loss": loss,
                **columns,
            }
            for arm, asked, row in zip(arms, questions, losses_RS, strict=True)
            for seed, loss in enumerate(row)
        ]
    )


def study(arms: int, seeds: int, generator: np.random.Generator, shift=0.0, spread=1.0, seed_spread=3.0):
    """Losses of arms by seeds: the first arm is the reference, the second differs from it by `shift`."""
    means = np.zeros((arms, 1))
    means[1] = shift
    spreads = np.broadcast_to(np.asarray(spread, float), (arms,))[:, None]
    return (
        means
        + seed_spread * generator.standard_normal((1, seeds))
        + spreads * generator.standard_normal((arms, seeds))
    )


def row_of(frame: pd.DataFrame, arm: str, question: str = "main") -> pd.Series:
    (row,) = frame[(frame["arm"] == arm) & (frame["question"] == question)].to_dict("records")
    return pd.Series(row)


BY_HAND = (
    np.array([[10.0], [12.0], [9.0]])
    + np.array([[0.0, 5.0, -3.0]])
    + np.array([[1, -1, 0], [0, 1, -1], [-1, 0, 1]])
)
"""Arm, seed, residual: Σ residual² = 6 on 4 degrees of freedom, s² = 1.5, standard error √(2 · 1.5/3) = 1."""


# --- the numbers


def test_a_case_by_hand():
    frame = compare(runs_of(BY_HAND), "ref")
    first, second = row_of(frame, "arm1"), row_of(frame, "arm2")
    assert (first["difference"], second["difference"]) == pytest.approx((2, -1))
    assert (first["statistic"], second["statistic"]) == pytest.approx((2, -1))
    assert first["degrees_of_freedom"] == 4
    assert first["test"] == "blocked"
    # t with 4 degrees of freedom has F(t) = 1/2 + 3/8 u (1 − u²/12), u = t/√(1 + t²/4)
    assert first["p_value"] == pytest.approx(0.116117, abs=1e-6)
    assert second["p_value"] == pytest.approx(0.373901, abs=1e-6)
    assert first["p_adjusted"] == pytest.approx(2 * 0.116117, abs=2e-6)
    assert second["p_adjusted"] == pytest.approx(0.373901, abs=1e-6)
    assert first["difference_low"] == pytest.approx(2 - 2.776445, abs=1e-6)
    assert first["difference_high"] == pytest.approx(2 + 2.776445, abs=1e-6)
    # J(4) = Γ(2)/(√2 Γ(3/2)) = √(2/π)
    assert first["hedges_g"] == pytest.approx(np.sqrt(2 / np.pi) * 2 / np.sqrt(1.5))
    assert row_of(frame, "ref")["mean"] == pytest.approx(10 + 2 / 3)


def test_blocked_differences_are_those_of_least_squares_on_dummies():
    losses = study(6, 5, np.random.default_rng(4))
    arms, seeds = losses.shape
    design = np.zeros((arms * seeds, arms + seeds - 1))  # columns: seeds, then arms but the reference
    for arm in range(arms):
        for seed in range(seeds):
            design[arm * seeds + seed, seed] = 1
            if arm:
                design[arm * seeds + seed, seeds + arm - 1] = 1
    fitted, left, rank, _ = np.linalg.lstsq(design, losses.ravel())
    degrees = arms * seeds - rank
    errors = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * left / degrees)
    frame = compare(runs_of(losses), "ref")
    assert set(frame["test"].dropna()) == {"blocked"}
    for arm in range(1, arms):
        row = row_of(frame, f"arm{arm}")
        t = fitted[seeds + arm - 1] / errors[seeds + arm - 1]
        assert row["degrees_of_freedom"] == degrees == 20
        assert row["difference"] == pytest.approx(fitted[seeds + arm - 1])
        assert row["statistic"] == pytest.approx(t)
        assert row["p_value"] == pytest.approx(2 * stats.t.sf(abs(t), degrees))


def test_two_arms_are_scipys_paired_t():
    losses = study(2, 6, np.random.default_rng(0), shift=1.0)
    row = row_of(compare(runs_of(losses), "ref"), "arm1")
    oracle = stats.ttest_rel(losses[1], losses[0])
    assert row["test"] == "paired t"
    assert row["statistic"] == pytest.approx(oracle.statistic)
    assert row["p_value"] == row["p_adjusted"] == pytest.approx(oracle.pvalue)
    assert (row["difference_low"], row["difference_high"]) == pytest.approx(
        tuple(oracle.confidence_interval(0.95))
    )
    assert np.isnan(row["equal_variances_p"])


def test_arms_that_scatter_differently_are_compared_by_scipys_paired_t():
    losses = study(6, 6, np.random.default_rng(1), spread=[1, 1, 1, 30, 1, 1])
    frame = compare(runs_of(losses), "ref")
    assert (frame["equal_variances_p"].dropna() < SPREAD_LEVEL).all()
    for arm in range(1, 6):
        row = row_of(frame, f"arm{arm}")
        assert row["test"] == "paired t"
        assert row["degrees_of_freedom"] == 5
        assert row["p_value"] == pytest.approx(stats.ttest_rel(losses[arm], losses[0]).pvalue)


def test_intervals_of_means_are_scipys_t_intervals_over_seeds():
    losses = study(3, 5, np.random.default_rng(2))
    for arm, own in zip(["ref", "arm1", "arm2"], losses, strict=True):
        row = row_of(compare(runs_of(losses), "ref"), arm)
        low, high = stats.t.interval(0.95, 4, own.mean(), stats.sem(own))
        assert (row["mean"], row["low"], row["high"]) == pytest.approx((own.mean(), low, high))


def test_holm_by_hand():
    assert holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])
    assert holm(np.array([0.5, np.nan, 0.9])) == pytest.approx([1.0, np.nan, 1.0], nan_ok=True)
    assert len(holm(np.array([]))) == 0


def test_each_question_is_a_family_of_its_own():
    losses = study(5, 6, np.random.default_rng(8), shift=1.0)
    asked = ["main", "main", "main", "ablation", "ablation"]
    frame = compare(runs_of(losses, question=asked), "ref")
    alone = compare(runs_of(losses[:3]), "ref")
    assert row_of(frame, "arm1")["p_adjusted"] == row_of(alone, "arm1")["p_adjusted"]
    assert row_of(frame, "arm3", "ablation")["degrees_of_freedom"] == 5 * 2
    assert set(frame.loc[frame["question"] == "ablation", "arm"]) == {"ref", "arm3", "arm4"}


def test_a_question_may_have_a_reference_of_its_own():
    losses = study(4, 6, np.random.default_rng(8))
    runs = runs_of(losses, question=["main", "main", "ablation", "ablation"])
    frame = compare(runs, "ref", {"ablation": "arm2"})
    assert row_of(frame, "arm3", "ablation")["reference"] == "arm2"
    assert row_of(frame, "arm3", "ablation")["difference"] == pytest.approx((losses[3] - losses[2]).mean())
    assert row_of(frame, "arm2", "ablation")["verdict"] == "reference"


def test_rank_tests_are_scipys_from_eight_seeds_on_and_none_below():
    losses = study(3, 9, np.random.default_rng(5), shift=2.0)
    frame = compare(runs_of(losses), "ref")
    raw = [stats.wilcoxon(row - losses[0]).pvalue for row in losses[1:]]
    assert frame["rank_p"].iloc[1:].to_numpy(float) == pytest.approx(holm(np.array(raw)))
    assert compare(runs_of(losses[:, :8]), "ref")["rank_p"].iloc[1:].notna().all()
    assert compare(runs_of(losses[:, :7]), "ref")["rank_p"].isna().all()


def test_with_five_seeds_ranks_could_not_pass_holm():
    assert 2 * stats.wilcoxon([1.0, 2, 3, 4, 5]).pvalue > LEVEL


def test_hedges_factor_makes_the_effect_size_unbiased():
    generator = np.random.default_rng(0)
    spread = np.sqrt(generator.chisquare(4, 400_000) / 4)
    ratio = (1.5 + np.sqrt(2 / 3) * generator.standard_normal(400_000)) / spread
    assert hedges_factor(4) * ratio.mean() == pytest.approx(1.5, abs=0.01)
    assert hedges_factor(40) == pytest.approx(1 - 3 / (4 * 40 - 1), abs=1e-4)
    assert np.isnan(hedges_factor(1))


@pytest.mark.parametrize(("degrees", "tests"), [(32, 8), (4, 1), (12, 3)])
def test_the_detectable_difference_has_the_power_that_the_noncentral_t_gives(degrees, tests):
    bar = stats.t.ppf(1 - LEVEL / tests / 2, degrees)
    shift = detectable_errors(degrees, tests)
    assert stats.nct.sf(bar, degrees, shift) + stats.nct.cdf(-bar, degrees, shift) == pytest.approx(
        0.8, abs=1e-3
    )


def test_the_detectable_difference_is_told_in_the_unit_of_the_loss():
    row = row_of(compare(runs_of(BY_HAND), "ref"), "arm1")  # standard error 1
    assert row["detectable_difference"] == pytest.approx(detectable_errors(4, 2))


# --- properties


losses_of_studies = st.tuples(st.integers(2, 6), st.integers(2, 9), st.integers(0, 10_000)).map(
    lambda drawn: study(drawn[0], drawn[1], np.random.default_rng(drawn[2]))
)
OF_COMPARISONS = [
    "difference",
    "difference_low",
    "difference_high",
    "statistic",
    "p_value",
    "p_adjusted",
    "hedges_g",
    "rank_p",
    "equal_variances_p",
    "detectable_difference",
]


@settings(max_examples=30, deadline=None)
@given(losses_of_studies, st.integers(0, 99))
def test_a_constant_added_to_every_arm_of_a_seed_changes_no_comparison(losses, seed):
    moved = losses + 7 * np.random.default_rng(seed).standard_normal((1, losses.shape[1]))
    before, after = (
        compare(runs_of(each), "ref")[OF_COMPARISONS].to_numpy(float) for each in (losses, moved)
    )
    np.testing.assert_allclose(after, before, rtol=1e-7, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(losses_of_studies, st.randoms(use_true_random=False))
def test_another_order_of_arms_and_seeds_permutes_rows_and_nothing_else(losses, random):
    runs = runs_of(losses)
    shuffled = runs.iloc[random.sample(range(len(runs)), len(runs))]
    columns = ["mean", "low", "high", *OF_COMPARISONS]
    before, after = (
        compare(each, "ref").set_index("arm")[columns].astype(float) for each in (runs, shuffled)
    )
    np.testing.assert_allclose(after.loc[before.index], before, rtol=1e-9, atol=1e-12)


def test_a_change_of_unit_changes_differences_and_no_p():
    losses = study(4, 6, np.random.default_rng(4), shift=1.0)
    before, after = compare(runs_of(losses), "ref"), compare(runs_of(1000 * losses), "ref")
    np.testing.assert_allclose(after["difference"].astype(float), 1000 * before["difference"].astype(float))
    for column in ("p_value", "p_adjusted", "hedges_g", "equal_variances_p"):
        np.testing.assert_allclose(after[column].astype(float), before[column].astype(float), rtol=1e-9)


# --- error rates


def false_claims(studies: int, arms: int, seeds: int, spread=1.0) -> float:
    """The share of studies without any difference in which some arm is called better or worse."""
    generator, claimed = np.random.default_rng(11), 0
    for _ in range(studies):
        found, _ = differences(study(arms, seeds, generator, spread=spread))
        claimed += bool((holm(np.array([one.p_value for one in found])) <= LEVEL).any())
    return claimed / studies


def test_without_a_difference_some_arm_is_called_different_in_no_more_than_one_study_of_twenty():
    assert 0.02 < false_claims(2000, 9, 5) < 0.06  # ± 0.01 by the number of studies


def test_a_noisy_reference_does_not_make_many_false_claims():
    spread = [6.0, *[1.0] * 8]
    claimed = false_claims(400, 9, 5, spread)
    generator, pooled = np.random.default_rng(11), 0
    for _ in range(400):  # what one s² for all would claim
        losses = study(9, 5, generator, spread=spread)
        error = np.sqrt(2 * (residuals(losses) ** 2).sum() / 32 / 5)
        pooled += np.abs((losses[1:] - losses[0]).mean(1) / error).max() > stats.t.ppf(1 - 0.05 / 8 / 2, 32)
    assert claimed < 0.08 < 0.2 < pooled / 400


def test_a_planted_difference_of_the_detectable_size_is_found_in_eight_studies_of_ten():
    generator, found = np.random.default_rng(5), 0
    shift = detectable_errors(4 * 5, 5) * np.sqrt(2 / 5)
    for _ in range(500):
        one, _ = differences(study(6, 5, generator, shift=-shift))
        adjusted = holm(np.array([each.p_value for each in one]))
        found += bool(adjusted[0] <= LEVEL and one[0].value < 0)
    assert (
        0.70 < found / 500 < 0.86
    )  # a little below 0.8: the check of variances sends one study in ten to the paired t


def test_the_check_of_variances_has_its_level_and_sees_a_noisy_arm():
    generator = np.random.default_rng(2)
    level = np.mean([equal_variances_p(study(6, 5, generator)) < 0.1 for _ in range(1500)])
    power = np.mean(
        [equal_variances_p(study(6, 5, generator, spread=[1, 5, 1, 1, 1, 1])) < 0.1 for _ in range(300)]
    )
    assert 0.08 < level < 0.12
    assert power > 0.75


# --- what is missing, and what cannot be said


def test_below_five_seeds_numbers_are_given_and_nothing_is_claimed():
    losses = study(4, 4, np.random.default_rng(0), shift=50.0)
    row = row_of(compare(runs_of(losses), "ref"), "arm1")
    assert row["p_adjusted"] < 0.001
    assert row["verdict"] == "too few seeds to say"


@pytest.mark.parametrize(
    ("shift", "verdict"), [(-9.0, "better"), (9.0, "worse"), (0.0, "not distinguishable")]
)
def test_from_five_seeds_on_there_is_a_verdict(shift, verdict):
    losses = study(4, 5, np.random.default_rng(0), shift=shift)
    assert row_of(compare(runs_of(losses), "ref"), "arm1")["verdict"] == verdict


def test_an_arm_with_a_failed_seed_is_paired_on_the_seeds_it_shares_and_the_others_stay_blocked():
    losses = study(4, 7, np.random.default_rng(6), shift=5.0)
    losses[1, 2] = np.nan
    frame = compare(runs_of(losses), "ref")
    row, shared = row_of(frame, "arm1"), [0, 1, 3, 4, 5, 6]
    assert (row["test"], row["seeds"], row["degrees_of_freedom"]) == ("paired t, shared seeds", 6, 5)
    assert row["p_value"] == pytest.approx(stats.ttest_rel(losses[1, shared], losses[0, shared]).pvalue)
    other = row_of(frame, "arm2")
    assert (other["test"], other["seeds"], other["degrees_of_freedom"]) == ("blocked", 7, 6 * 2)


def test_a_seed_that_the_reference_lacks_is_left_out_of_every_difference_but_not_of_the_means():
    losses = study(3, 7, np.random.default_rng(6))
    losses[0, 3] = np.nan
    frame = compare(runs_of(losses), "ref")
    without = compare(runs_of(np.delete(losses, 3, axis=1)), "ref")
    np.testing.assert_allclose(frame[OF_COMPARISONS].astype(float), without[OF_COMPARISONS].astype(float))
    assert row_of(frame, "arm1")["mean"] == pytest.approx(losses[1].mean())
    assert list(frame["seeds"]) == [6, 6, 6]


def test_an_arm_without_a_result_pays_for_nothing():
    losses = study(4, 5, np.random.default_rng(9), shift=2.0)
    losses[3] = np.nan
    frame = compare(runs_of(losses), "ref")
    row = row_of(frame, "arm3")
    assert row["verdict"] == "failed"
    assert row[["mean", "difference", "p_value", "p_adjusted", "test", "rank_p"]].isna().all()
    assert row["seeds"] == 0
    assert (
        row_of(frame, "arm1")["p_adjusted"]
        == row_of(compare(runs_of(losses[:3]), "ref"), "arm1")["p_adjusted"]
    )


@pytest.mark.parametrize("arm", ["ref", "arm2"])
def test_an_arm_that_was_tried_and_gave_no_result_has_failed(arm: str):
    runs = runs_of(study(3, 5, np.random.default_rng(9)))
    runs.loc[runs["arm"] == arm, ["status", "validation_loss"]] = ["not run", np.nan]
    runs.loc[(runs["arm"] == arm) & (runs["seed"] == 0), "status"] = "failed"
    assert row_of(compare(runs, "ref"), arm)["verdict"] == "failed"
    untried = runs.assign(status=runs["status"].replace("failed", "not run"))
    assert row_of(compare(untried, "ref"), arm)["verdict"] == "not run"
    runs.loc[(runs["arm"] == "arm1") & (runs["seed"] == 0), "status"] = "failed"
    assert row_of(compare(runs, "ref"), "arm1")["verdict"] == "too few seeds to say"


def test_a_loss_that_is_not_finite_counts_as_no_result_even_where_the_training_is_done():
    losses = study(3, 6, np.random.default_rng(9))
    runs = runs_of(losses)
    runs.loc[(runs["arm"] == "arm1") & (runs["seed"] == 0), "validation_loss"] = np.inf
    assert row_of(compare(runs, "ref"), "arm1")["seeds"] == 5


def test_without_a_reference_nothing_is_compared():
    losses = study(3, 5, np.random.default_rng(0))
    losses[0] = np.nan
    frame = compare(runs_of(losses), "ref")
    assert list(frame["verdict"]) == ["failed", "too few seeds to say", "too few seeds to say"]
    assert frame["difference"].isna().all()
    assert row_of(frame, "arm1")["mean"] == pytest.approx(losses[1].mean())


def test_one_seed_gives_a_difference_without_an_interval():
    row = row_of(compare(runs_of([[1.0], [2.0], [3.0]]), "ref"), "arm1")
    assert row["difference"] == 1.0
    assert row[["difference_low", "p_value", "statistic", "test", "low", "degrees_of_freedom"]].isna().all()
    assert row["verdict"] == "too few seeds to say"


def test_arms_that_agree_in_every_seed_are_not_distinguishable():
    losses = np.tile([[0.1, 0.2, 0.3, 0.4, 0.7]], (3, 1))
    row = row_of(compare(runs_of(losses), "ref"), "arm1")
    assert (row["difference"], row["p_value"], row["verdict"]) == (0.0, 1.0, "not distinguishable")


def test_a_difference_that_no_seed_changes_is_no_evidence():
    losses = np.array([[0.1, 0.2, 0.3, 0.4, 0.7]]) + np.array([[0.0], [0.3], [0.1]])
    row = row_of(compare(runs_of(losses), "ref"), "arm1")
    assert row["verdict"] == "no spread over seeds"
    assert np.isnan(row["p_value"])
    assert row["difference_low"] == pytest.approx(0.3)


def test_ties_at_eight_seeds_are_ranked_without_complaint():
    losses = np.array([[0.0] * 8, [0, 0, 1, 1, 1, 2, -1, 3]])
    assert 0 < row_of(compare(runs_of(losses), "ref"), "arm1")["rank_p"] <= 1
    assert row_of(compare(runs_of(np.zeros((2, 8))), "ref"), "arm1")["rank_p"] == 1


def test_an_unknown_reference_is_refused_with_the_arms_there_are():
    runs = runs_of(BY_HAND)
    with pytest.raises(BadInput, match="unknown reference arm 'top3'; known: ref, arm1, arm2"):
        compare(runs, "top3")
    with pytest.raises(BadInput, match="unknown reference arm 'x'"):
        compare(runs, "ref", {"main": "x"})


def test_an_arm_with_two_rows_a_seed_is_refused():
    with pytest.raises(BadInput, match="two rows of one arm and seed"):
        compare(pd.concat([runs_of(BY_HAND)] * 2), "ref")


def test_the_frame_is_the_table_and_survives_the_disk(tmp_path):
    frame = compare(runs_of(BY_HAND), "ref")
    assert set(frame.columns) == set(TABLES["study_comparisons"].columns)
    write_table(TABLES["study_comparisons"], frame, tmp_path / "study_comparisons.parquet")
    back = read_parquet(str(tmp_path / "study_comparisons.parquet"))
    assert list(back["verdict"]) == list(frame["verdict"])
    assert back["degrees_of_freedom"].iloc[1] == 4


def test_statistics_need_no_torch():
    code = "import sys, moescope.lab.study_statistics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
