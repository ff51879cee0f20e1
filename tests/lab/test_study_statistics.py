"""A study's statistics: against scipy and a case by hand; error rates by simulation.

What cannot be said is not said.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moescope.errors import BadInput
from moescope.lab.study_statistics import compare, final_slope
from moescope.lab.tables import TABLES
from moescope.run import write_table
from moescope.statistics import LEVEL, detectable_errors, hedges_factor, holm, paired_t_test
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


BY_HAND = np.array([[10.0, 14.0, 8.0], [11.0, 16.0, 12.0], [9.0, 14.0, 7.0]])
"""Differences 1, 2, 4 and −1, 0, −1: means 7/3 and −2/3, squared deviations 14/3 and 2/3 on 2 df."""


# --- the numbers


def test_a_case_by_hand():
    frame = compare(runs_of(BY_HAND), "ref")
    first, second = row_of(frame, "arm1"), row_of(frame, "arm2")
    assert (first["difference"], second["difference"]) == pytest.approx((7 / 3, -2 / 3))
    assert (first["difference_std"], second["difference_std"]) == pytest.approx(
        (np.sqrt(7 / 3), np.sqrt(1 / 3))
    )
    assert (first["statistic"], second["statistic"]) == pytest.approx((np.sqrt(7), -2))
    assert (first["degrees_of_freedom"], second["degrees_of_freedom"]) == (2, 2)
    # t with 2 degrees of freedom has a two-sided p of 1 − |t|/√(2 + t²)
    p = 1 - np.sqrt(7) / 3, 1 - 2 / np.sqrt(6)
    assert (first["p_value"], second["p_value"]) == pytest.approx(p)
    assert (first["p_adjusted"], second["p_adjusted"]) == pytest.approx((2 * p[0], 2 * p[0]))
    # the quantile q = 0.95 √(2/(1 − 0.95²)) of that t
    half = 0.95 * np.sqrt(2 / (1 - 0.95**2)) * np.sqrt(7) / 3
    assert (first["difference_low"], first["difference_high"]) == pytest.approx((7 / 3 - half, 7 / 3 + half))
    # J(2) = Γ(1)/Γ(1/2) = 1/√π, s = difference_std/√2
    assert first["hedges_g"] == pytest.approx(7 / 3 / np.sqrt(7 / 6) / np.sqrt(np.pi))
    assert row_of(frame, "ref")["mean"] == pytest.approx(32 / 3)


@pytest.mark.parametrize("arms", [2, 6])
def test_every_arm_is_compared_by_scipys_paired_t(arms):
    losses = study(arms, 6, np.random.default_rng(1), shift=1.0, spread=[1, 1, 1, 30, 1, 1][:arms])
    frame = compare(runs_of(losses), "ref")
    oracles = [stats.ttest_rel(row, losses[0]) for row in losses[1:]]
    for arm, oracle in enumerate(oracles, 1):
        row = row_of(frame, f"arm{arm}")
        assert row["degrees_of_freedom"] == 5
        assert row["statistic"] == pytest.approx(oracle.statistic)
        assert row["p_value"] == pytest.approx(oracle.pvalue)
        assert (row["difference_low"], row["difference_high"]) == pytest.approx(
            tuple(oracle.confidence_interval(0.95))
        )
    assert frame["p_adjusted"].min() == pytest.approx((arms - 1) * min(one.pvalue for one in oracles))


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


def test_hedges_factor_makes_the_effect_size_unbiased():
    generator = np.random.default_rng(0)
    spread = np.sqrt(generator.chisquare(4, 400_000) / 4)
    ratio = (1.5 + np.sqrt(2 / 3) * generator.standard_normal(400_000)) / spread
    assert hedges_factor(4) * ratio.mean() == pytest.approx(1.5, abs=0.01)
    assert hedges_factor(40) == pytest.approx(1 - 3 / (4 * 40 - 1), abs=1e-4)
    assert np.isnan(hedges_factor(1))


@pytest.mark.parametrize(("degrees", "tests"), [(4, 8), (4, 1), (11, 3)])
def test_the_detectable_difference_has_the_power_that_the_noncentral_t_gives(degrees, tests):
    bar = stats.t.ppf(1 - LEVEL / tests / 2, degrees)
    shift = detectable_errors(degrees, tests)
    assert stats.nct.sf(bar, degrees, shift) + stats.nct.cdf(-bar, degrees, shift) == pytest.approx(
        0.8, abs=1e-3
    )


def test_the_detectable_difference_is_told_in_the_unit_of_the_loss():
    row = row_of(compare(runs_of(BY_HAND), "ref"), "arm1")  # standard error √7/3, two tests
    assert row["detectable_difference"] == pytest.approx(detectable_errors(2, 2) * np.sqrt(7) / 3)


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
    for column in ("p_value", "p_adjusted", "hedges_g"):
        np.testing.assert_allclose(after[column].astype(float), before[column].astype(float), rtol=1e-9)


# --- error rates


STUDIES = 20_000


def null_studies(arms: int, seeds: int, spread: list[float], t3: bool) -> np.ndarray:
    """Losses of studies without any difference, by study, arm and seed; seeds shift all arms together."""
    generator = np.random.default_rng(11)
    size = (STUDIES, arms, seeds)
    noise = generator.standard_t(3, size) if t3 else generator.standard_normal(size)
    return 3 * generator.standard_normal((STUDIES, 1, seeds)) + np.array(spread)[:, None] * noise


@pytest.mark.parametrize("seeds", [5, 8, 10])
@pytest.mark.parametrize(
    ("spread", "t3"),
    [([1] * 9, False), ([1, 3, *[1] * 7], False), ([2, *[1] * 8], False), ([1] * 9, True)],
    ids=["equal", "one arm 3 x", "reference 2 x", "t3"],
)
def test_without_a_difference_at_most_one_study_in_twenty_calls_some_arm_different(seeds, spread, t3):
    claimed = (holm(paired_t_test(null_studies(9, seeds, spread, t3)).p_value) <= LEVEL).any(-1).mean()
    assert 0.005 < claimed <= LEVEL + 3 * np.sqrt(LEVEL * (1 - LEVEL) / STUDIES)  # 3 binomial σ: 0.0046


def test_a_noisy_arm_makes_no_more_false_claims_than_the_others():
    losses = null_studies(9, 5, [1, 3, *[1] * 7], t3=False)
    p_SR = paired_t_test(losses).p_value
    assert (p_SR <= LEVEL).mean(0) == pytest.approx(np.full(8, LEVEL), abs=4 * 0.00154)  # 4 binomial σ


def test_a_planted_difference_of_the_detectable_size_is_found_in_eight_studies_of_ten():
    losses = null_studies(6, 5, [1] * 6, t3=False)
    losses[:, 1] -= detectable_errors(4, 5) * np.sqrt(2 / 5)
    found = paired_t_test(losses)
    claimed = ((holm(found.p_value)[:, 0] <= LEVEL) & (found.value[:, 0] < 0)).mean()
    assert 0.8 - 3 * 0.0028 < claimed < 0.815  # Holm's later steps find a little more than its first


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


def test_an_arm_with_a_failed_seed_is_compared_on_the_seeds_it_shares():
    losses = study(4, 7, np.random.default_rng(6), shift=5.0)
    losses[1, 2] = np.nan
    frame = compare(runs_of(losses), "ref")
    row, shared = row_of(frame, "arm1"), [0, 1, 3, 4, 5, 6]
    assert (row["seeds"], row["degrees_of_freedom"]) == (6, 5)
    assert row["p_value"] == pytest.approx(stats.ttest_rel(losses[1, shared], losses[0, shared]).pvalue)
    assert row_of(frame, "arm2")["seeds"] == 7


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
    assert row[["mean", "difference", "p_value", "p_adjusted", "rank_p"]].isna().all()
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
    assert row[["difference_low", "p_value", "statistic", "low", "degrees_of_freedom"]].isna().all()
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
    written_later = {"seed_std", "noise_std"}  # from the documents of all trainings
    assert set(frame.columns) == set(TABLES["study_comparisons"].columns) - written_later
    write_table(TABLES["study_comparisons"], frame, tmp_path / "study_comparisons.parquet")
    back = read_parquet(str(tmp_path / "study_comparisons.parquet"))
    assert list(back["verdict"]) == list(frame["verdict"])
    assert back["degrees_of_freedom"].iloc[1] == 2


def test_statistics_need_no_torch():
    code = "import sys, moescope.lab.study_statistics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- trainings that learned nothing


def test_only_trainings_that_beat_the_unigram_baseline_are_compared():
    losses = study(3, 6, np.random.default_rng(3), shift=1.0)
    runs = runs_of(losses).assign(unigram_loss=100.0)
    runs.loc[(runs["arm"] == "arm1") & (runs["seed"] == 4), "unigram_loss"] = -100.0
    runs.loc[runs["arm"] == "arm2", "unigram_loss"] = runs["validation_loss"]
    frame = compare(runs, "ref")
    shared = [0, 1, 2, 3, 5]
    row = row_of(frame, "arm1")
    assert row["seeds"] == 5
    assert row["p_value"] == pytest.approx(stats.ttest_rel(losses[1, shared], losses[0, shared]).pvalue)
    assert row["p_adjusted"] == row["p_value"]  # arm2 pays for nothing
    assert row_of(frame, "arm2")["seeds"] == 0
    assert row_of(frame, "arm2")["verdict"] == "does not beat the unigram baseline"


# --- power, as the documentation states it


def stated_power() -> dict[tuple[int, int], float]:
    """The table of docs/lab.md: (seeds, arms) -> difference in standard deviations of one training."""
    lines = (Path(__file__).parents[2] / "docs" / "lab.md").read_text().splitlines()
    start = lines.index("| seeds | 1 arm | 2 arms | 4 arms | 8 arms |") + 2
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + 5]]
    return {
        (int(row[0]), arms): float(value)
        for row in cells
        for arms, value in zip((1, 2, 4, 8), row[1:], strict=True)
    }


def test_a_difference_of_the_stated_size_is_found_in_eight_of_ten_simulated_studies():
    stated = stated_power()
    assert {seeds for seeds, _ in stated} == {5, 8, 10, 12, 16}
    generator = np.random.default_rng(5)
    for (seeds, arms), size in stated.items():
        losses = 3 * generator.standard_normal((4000, 1, seeds)) + generator.standard_normal(
            (4000, arms + 1, seeds)
        )
        losses[:, 1] -= size
        found = paired_t_test(losses)
        power = ((holm(found.p_value)[:, 0] <= LEVEL) & (found.value[:, 0] < 0)).mean()
        # 3 binomial σ: 0.019; sizes are rounded to 0.1, worth up to 0.03; Holm's later steps find 0.01 more
        assert 0.8 - 0.05 < power < 0.8 + 0.06, (seeds, arms)


@pytest.mark.parametrize(("steps", "expected"), [([90, 95, 100], -2.0), ([25, 50, 75, 100], -1.0)])
def test_the_final_slope_is_that_of_the_last_fifth_or_of_the_last_two_evaluations(steps, expected):
    losses = {90: 3.00, 95: 2.99, 100: 2.98, 25: 9.0, 50: 4.0, 75: 3.005}
    rows = pd.DataFrame([(0, 9.0), (40, math.nan), *((step, losses[step]) for step in steps)])
    rows.columns = ["step", "validation_loss"]
    assert final_slope(rows, 100) == pytest.approx(expected)
    assert final_slope(rows[rows["step"] <= steps[0]], 100) is None
