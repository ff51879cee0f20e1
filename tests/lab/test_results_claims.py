"""Verdicts on claims against cases worked by hand and scipy's own tests."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lab.shared_results import NOISE, SEEDS, layers, losses_of_five_seeds, study
from moescope.lab import results
from moescope.lab.results import Results
from moescope.lab.results_claims import arm_claims, checks, effect_claims, hypotheses

NO_TABLES = Results({}, {}, {}, {}, {})


# --- hypotheses


def verdicts(found: Results) -> dict[str, str]:
    return {one.name: one.verdict for one in hypotheses(found)}


def test_without_runs_no_hypothesis_is_testable_and_each_says_why():
    found = hypotheses(NO_TABLES)
    assert [one.name for one in found] == [f"H{number}" for number in range(1, 8)]
    assert {one.verdict for one in found} == {"not testable"}
    assert all(one.why for one in found)


@pytest.mark.parametrize(("sign", "verdict"), [(1, "confirmed"), (-1, "refuted")])
def test_h1_to_h3_follow_the_sign_of_a_clear_difference(sign: int, verdict: str):
    base = np.array([2.5, 2.4, 2.6, 2.55, 2.45])
    noise = np.array([0.001, -0.001, 0.002, 0.0, -0.002])
    consistency = {"top2": 0.5 + noise, "spectra": 0.5 + 2 * noise + 0.1 * sign}
    losses = {"top2": base, "spectra": base - 0.1 * sign + noise}
    columns = {"consistency": consistency, "consistency_chance": {arm: [0.1] * 5 for arm in consistency}}
    tables = study({arm: list(values) for arm, values in losses.items()}, **columns)
    tables["study_layers"] = layers(
        [
            (arm, seed, layer, "output_orthogonality", 0.8 + noise[seed] * (1 + layer) + shift, 0.9)
            for arm, shift in (("top2", 0.0), ("spectra", 0.05 * sign + 0.001))
            for seed in SEEDS
            for layer in range(2)
        ]
    )
    # paired noise of orthogonality is equal in both arms: no spread, no test
    tables["study_layers"].loc[lambda frame: frame["arm"] == "spectra", "value"] += np.tile(noise, 2)
    found = verdicts(Results.of([tables]))
    assert (found["H1"], found["H2"], found["H3"]) == (verdict, verdict, verdict)
    # outputs for tokens of few documents decide nothing
    for counts in ({"top2": 1, "spectra": 1}, {"top2": 1, "spectra": 200}, {"top2": 200, "spectra": 1}):
        documents = tables["study_runs"]["arm"].map(counts)
        few = {**tables, "study_runs": tables["study_runs"].assign(output_documents=documents)}
        h2 = hypotheses(Results.of([few]))[1]
        assert (h2.verdict, h2.number.significant) == ("undecided", True)
        assert "1 document" in h2.why


def test_an_estimated_chance_level_decides_nothing_and_the_raw_difference_is_given():
    noise = np.array([0.001, -0.001, 0.002, 0.0, -0.002])
    consistency = {"top2": 0.60 + noise, "spectra": 0.73 + 2 * noise}
    columns = {"consistency": consistency, "consistency_chance": dict.fromkeys(consistency, [0.1] * 5)}
    for estimated in ((), ("spectra",), ("top2",), ("spectra", "top2")):
        marks = {arm: [int(arm in estimated)] * 5 for arm in consistency}
        tables = study(losses_of_five_seeds(), consistency_estimated=marks, **columns)
        h3 = hypotheses(Results.of([tables]))[2]
        assert h3.verdict == ("undecided" if estimated else "confirmed")
        assert ("0.130 ± " in h3.why) == bool(estimated)


def test_h1_stands_beside_the_same_difference_in_the_ablation():
    losses = losses_of_five_seeds()
    again = {"spectra": losses["spectra"], "top2": [value + 0.5 for value in losses["spectra"]]}
    again["spectra-GRU"] = losses["top2"]
    ablation = study(again, "ablation")
    ablation["study_name"] = pd.DataFrame({"name": ["repeat"]})
    assert dict(checks(Results.of([study(losses), ablation])))["repeat"][0].mean == pytest.approx(0.5)


def test_h3_is_undecided_where_uneven_loads_explain_the_consistency():
    noise = np.array([0.001, -0.001, 0.002, 0.0, -0.002])
    consistency = {"top2": 0.70 + noise, "spectra": 0.73 + 2 * noise}
    level = {"top2": [0.10] * 5, "spectra": [0.19] * 5}  # (c - e)/(1 - e) is 2/3 for both
    tables = study(losses_of_five_seeds(), consistency=consistency, consistency_chance=level)
    h3 = hypotheses(Results.of([tables]))[2]
    assert stats.ttest_rel(consistency["spectra"], consistency["top2"]).pvalue < 1e-4
    assert h3.number.mean == pytest.approx(0.0, abs=1e-9)
    assert h3.verdict == "undecided"


def test_a_claim_on_two_arms_is_judged_in_each_study_that_has_them():
    base, noise = np.array([2.5, 2.4, 2.6, 2.55, 2.45]), np.array([0.001, -0.001, 0.002, 0.0, -0.002])
    losses = {"top2": base, "hash": base - 0.1 + noise, "hash_previous": base - 0.2 - noise}
    tables = study({arm: list(values) for arm, values in losses.items()})
    tables["study_name"] = pd.DataFrame({"name": ["bytes"]})
    found = {one.claim: one for one in arm_claims(Results.of([tables]), "Hash routing")}
    better, longer, previous, *_ = found.values()
    assert (better.name, better.verdict) == ("bytes", "confirmed")
    assert better.number.mean == pytest.approx(0.1)
    assert (previous.verdict, previous.number.mean) == ("refuted", pytest.approx(-0.1))
    assert (longer.name, longer.number, longer.verdict) == ("", None, "not testable")
    assert {one.verdict for one in arm_claims(NO_TABLES, "SoME")} == {"not testable"}


def test_what_predicts_the_effect_of_removing_an_expert_is_tested_over_seeds_in_the_same_family():
    tables = study(losses_of_five_seeds())
    values = {
        "effect_load": [0.5, 0.6, 0.55, 0.52, 0.58],
        "effect_alignment_given_load": [0.1, -0.2, 0.05, 0.1, -0.1],
        "effect_ambiguity": [-0.5, -0.6, -0.55, -0.52, -0.58],
    }
    tables["study_layers"] = layers(
        [
            (arm, seed, layer, metric, value + shift + 0.1 * (2 * layer - 1), 0.0)
            for metric, of_seeds in values.items()
            for seed, value in enumerate(of_seeds)
            for layer in range(2)
            for arm, shift in (("top2", 0.03), ("spectra", -0.03))  # one test over both
        ]
    )
    halves = np.array([0.1, 0.4, 0.2, 0.3])  # ranks 1 4 2 3 and 1 4 3 2: r 0.8, ceiling sqrt(1.6/1.8)
    tables["study_effects"] = pd.DataFrame(
        {"arm": "top2", "seed": 0, "layer": 0, "half_a": halves, "half_b": [0.1, 0.4, 0.3, 0.2]}
    )
    found = Results.of([tables])
    beyond, ambiguity = effect_claims(found)
    assert (ambiguity.verdict, beyond.verdict) == ("confirmed", "undecided")  # lower ambiguity, larger effect
    assert "lower ambiguity" in ambiguity.claim
    for one, metric, sign in (
        (ambiguity, "effect_ambiguity", -1),
        (beyond, "effect_alignment_given_load", 1),
    ):
        assert one.number.mean == pytest.approx(sign * np.mean(values[metric]))
        assert one.number.p_value == pytest.approx(stats.ttest_1samp(values[metric], 0).pvalue)
    assert "spectra 0.58, top2 0.52" in ambiguity.why
    assert results.effect_ceiling(tables, "top2") == pytest.approx(math.sqrt(1.6 / 1.8))
    assert math.isnan(results.effect_ceiling(tables, "spectra"))
    tested = [one for one in found.tests.values() if one]
    assert len(tested) == 3 + 2 + 2  # losses against spectra, against top2, and correlations
    assert min(one.p_adjusted for one in tested) == pytest.approx(7 * min(one.p_value for one in tested))
    assert {one.verdict for one in effect_claims(NO_TABLES)} == {"not testable"}


@pytest.mark.parametrize(
    ("flops", "times", "verdict"),
    [
        (1.57, 3.02, "refuted"),
        (1.02, 1.1, "confirmed"),
        (1.02, 1.2, "undecided"),
        (1.2, 1.02, "undecided"),
        (1.57, None, "undecided"),
    ],
)
def test_h4_rests_on_flops_and_the_time_of_a_block_alone(flops: float, times: float | None, verdict: str):
    speeds = {"top2": [1000.0] * 5, "spectra": [900.0, 5000.0, 910.0, 905.0, 890.0]}  # shared device: unused
    counts = {"top2": [1e6] * 5, "spectra": [flops * 1e6] * 5}
    tables = study(losses_of_five_seeds(), tokens_per_second=speeds, flops_per_token=counts)
    if times:
        parts = [("top2", 1.5), ("top2", 0.5), ("spectra", 1.5 * times), ("spectra", 0.5 * times)]
        tables["overhead"] = pd.DataFrame(parts, columns=["router", "milliseconds"])
    found = Results.of([tables])
    h4 = hypotheses(found)[3]
    assert (h4.verdict, h4.number) == (verdict, None)
    assert f"{flops:.2f} times" in h4.counts
    assert times is None or f"{times:.2f} times" in h4.counts
    assert ("H4",) not in found.tests


# --- unfinished studies, failed trainings


def family_size(found: Results) -> int:
    return sum(one is not None and math.isfinite(one.p_adjusted) for one in found.tests.values())


def test_an_unfinished_study_gives_no_verdict_and_costs_no_other_test_anything():
    noise = np.array([0.001, -0.001, 0.002, 0.0, -0.002, 0.001])
    base = np.array([2.5, 2.4, 2.6, 2.55, 2.45, 2.5])
    parts = ("Expression", "GRU", "SpecialityPenalty", "Ortho")
    losses = {"spectra": list(base)}
    losses |= {f"spectra-{part}": list(base + 0.1 + np.roll(noise, at)) for at, part in enumerate(parts)}
    ablation = study(losses, "ablation")
    alone = Results.of([study(losses_of_five_seeds())])
    done = Results.of([study(losses_of_five_seeds()), ablation])
    assert verdicts(done)["H5"] == "confirmed"
    assert family_size(done) == family_size(alone) + len(parts)
    runs = ablation["study_runs"]
    runs.loc[(runs["arm"] == "spectra-GRU") & (runs["seed"] == 5), ["status", "validation_loss"]] = (
        "not run",
        math.nan,
    )
    found = Results.of([study(losses_of_five_seeds()), ablation])
    assert verdicts(found)["H5"] == "unfinished: 29 of 30 trainings"
    gru = found.tests["ablation", "spectra-GRU"]
    assert (gru.seeds, results.stars(gru)) == (5, "unfinished: 5 of 6 seeds")
    ortho = found.tests["ablation", "spectra-Ortho"]  # its sixth seed is one that -GRU lacks
    assert (ortho.seeds, results.stars(ortho)) == (6, "unfinished: 29 of 30 trainings")
    assert results.run_value(found.ablation, "spectra-Ortho", "validation_loss").seeds == 5
    gains = np.array(losses["spectra-Ortho"]) - base
    assert (ortho.mean, ortho.p_value) == pytest.approx((gains.mean(), stats.ttest_1samp(gains, 0).pvalue))
    assert math.isnan(ortho.p_adjusted)
    assert family_size(found) == family_size(alone)
    assert results.completed(found.ablation) == (29, 30)


def test_an_arm_that_is_still_to_come_leaves_the_whole_study_without_verdicts():
    tables = study(losses_of_five_seeds())
    tables["study_runs"].loc[tables["study_runs"]["arm"] == "dense", "status"] = "not run"
    assert verdicts(Results.of([tables]))["H1"] == "unfinished: 15 of 20 trainings"


@pytest.mark.parametrize(("sign", "verdict"), [(1, "undecided"), (-1, "refuted")])
def test_an_arm_with_failed_trainings_confirms_nothing(sign: int, verdict: str):
    base, noise = np.array([2.5, 2.4, 2.6, 2.55, 2.45, 2.5]), np.array([1, -1, 2, 0, -2, 0]) / 1000
    tables = study({"top2": list(base), "spectra": list(base - 0.1 * sign + noise)})
    assert verdicts(Results.of([tables]))["H1"] == ("confirmed" if sign > 0 else "refuted")
    runs = tables["study_runs"]
    runs.loc[(runs["arm"] == "spectra") & (runs["seed"] == 5), "status"] = "failed"
    found = Results.of([tables])
    assert found.tests["main", "top2"].failed == 1
    assert found.tests["main", "top2"].significant
    assert verdicts(found)["H1"] == verdict


def test_an_undecided_claim_gives_its_interval_as_uncorrected():
    losses = losses_of_five_seeds()
    losses["spectra"] = [2.47, 2.40, 2.55, 2.54, 2.46]  # significant alone, not among five tests
    losses["expert_choice"] = [2.50, 2.38, 2.60, 2.50, 2.50]
    tables = study(losses)
    found = Results.of([tables])
    h1 = hypotheses(found)[0]
    low, high = stats.ttest_rel(losses["top2"], losses["spectra"]).confidence_interval()
    assert low > 0
    assert h1.verdict == "undecided"
    assert h1.why == f"95 % interval {low:.3f} to {high:.3f} (not corrected)"


def test_h3_stands_beside_the_difference_at_one_learning_rate_and_by_number_of_experts():
    consistency = {"top2": [0.7, 0.72, 0.69, 0.71, 0.7], "spectra": [0.74, 0.73, 0.75, 0.74, 0.73]}
    level = {arm: [0.0] * 5 for arm in consistency}
    main = study(losses_of_five_seeds(), consistency=consistency, consistency_chance=level)
    rates = [("spectra", "learning_rate", 0.008), ("top2", "learning_rate", 0.004)]
    main["study_settings"] = pd.DataFrame(rates, columns=["arm", "name", "value"])
    slower = "spectra at the rate of top2"
    same = {"top2": [0.7, 0.72, 0.69, 0.71, 0.7], slower: [0.69, 0.70, 0.69, 0.68, 0.69]}
    nothing = {arm: [0.0] * 5 for arm in same}
    losses = losses_of_five_seeds()
    controls = study(
        {"top2": losses["top2"], slower: losses["dense"]}, consistency=same, consistency_chance=nothing
    )
    counts = {f"{arm} {n}": values for n in (4, 8) for arm, values in consistency.items()}
    counts["spectra 8"] = [value - 0.5 for value in counts["spectra 8"]]
    experts = study(
        dict.fromkeys(counts, losses["top2"]),
        "scaling",
        consistency=counts,
        consistency_chance={arm: [0.0] * 5 for arm in counts},
    )
    places = [(arm, "experts", float(arm.split()[1]), arm.split()[1]) for arm in counts]
    experts["study_axes"] = pd.DataFrame(places, columns=["arm", "axis", "value", "label"])
    found = Results.of([main, controls, experts])
    h3 = hypotheses(found)[2]
    assert "spectra 0.008 and top2 0.004" in h3.why
    rows = dict(checks(found))
    loss, distinct, one_rate = rows["both at the learning rate of top2"]
    low, high = stats.ttest_rel(same[slower], same["top2"]).confidence_interval()
    assert (one_rate.low, one_rate.high) == pytest.approx((low, high))
    assert loss.mean == pytest.approx(np.mean(losses["top2"]) - np.mean(losses["dense"]))
    assert distinct is None
    gain = np.mean(consistency["spectra"]) - np.mean(consistency["top2"])
    assert rows["4 experts"][2].mean == pytest.approx(gain)
    assert rows["8 experts"][2].mean == pytest.approx(gain - 0.5)


@pytest.mark.parametrize(("documents", "shown"), [(19, False), (20, True)])
def test_outputs_of_few_documents_are_not_compared_elsewhere_and_layers_are(documents: int, shown: bool):
    arms = {"top2": 0.8, "spectra": 0.9}
    counts = {arm: [documents] * 5 for arm in arms}
    losses = losses_of_five_seeds()
    tables = study({arm: losses[arm] for arm in arms}, output_documents=counts)
    tables["study_layers"] = layers(
        [
            (arm, seed, layer, "output_orthogonality", value + layer * (value - 0.8) + 0.01 * seed, 0.9)
            for arm, value in arms.items()
            for seed in SEEDS
            for layer in (0, 1)
        ]
    )
    tables["study_name"] = pd.DataFrame({"name": ["mine"]})
    rows = dict(checks(Results.of([tables])))
    assert (rows["mine"][1] is not None) == shown
    assert ("layer 1" in rows) == shown
    if shown:  # 0.1 in layer 0, 0.2 in layer 1
        assert rows["mine"][1].mean == pytest.approx(0.15)
        assert rows["layer 1"][1].mean == pytest.approx(0.2)


def test_a_claim_on_two_arms_says_where_rates_differ_and_decides_nothing_where_losses_rise():
    losses = losses_of_five_seeds()
    arms = {"top2 x4": losses["top2"], "hash x4": losses["spectra"]}
    slopes = {"hash x4": [-0.07, -0.05, -0.06, -0.08, -0.04], "top2 x4": [-0.1] * 5}
    rates = [("hash x4", "learning_rate", 0.008), ("top2 x4", "learning_rate", 0.004)]
    settings = pd.DataFrame(rates, columns=["arm", "name", "value"])
    falling = study(arms, loss_slope=slopes) | {"study_settings": settings}
    found = arm_claims(Results.of([falling]), "Hash routing")[1]
    assert found.verdict == "confirmed"
    assert "hash x4 0.008 and top2 x4 0.004" in found.why
    slopes["hash x4"] = [0.4, -0.3, 0.2, -0.1, 0.1]  # above 0, but not beyond its interval
    found = arm_claims(Results.of([study(arms, loss_slope=slopes)]), "Hash routing")[1]
    assert found.verdict == "confirmed"
    slopes["hash x4"] = [0.07, 0.05, 0.06, 0.08, 0.04]
    curves = [
        (arm, seed, step, loss)
        for arm, lowest in (("hash x4", 2.0), ("top2 x4", 1.9))
        for seed in SEEDS
        for step, loss in ((1, 3.0), (2, lowest + 0.1 * seed), (3, 2.9))
    ]
    columns = ["arm", "seed", "step", "validation_loss"]
    rising = study(arms, loss_slope=slopes) | {"study_curves": pd.DataFrame(curves, columns=columns)}
    found = arm_claims(Results.of([rising]), "Hash routing")[1]
    assert found.verdict == "undecided"
    assert "hash x4 by 0.060" in found.why
    assert "top2 x4 by" not in found.why
    assert found.why.endswith("−0.100 ± 0.000")


def test_a_hash_stands_beside_top2_at_its_own_learning_rate():
    losses = losses_of_five_seeds()
    main = study({"top2": losses["top2"], "hash": losses["spectra"], "spectra": losses["top2"]})
    other = "top2 at the rate of spectra"
    controls = study({"spectra at the rate of top2": losses["top2"], other: losses["dense"]})
    rates = [("hash", "learning_rate", 0.008), ("top2", "learning_rate", 0.004)]
    main["study_settings"] = pd.DataFrame(rates, columns=["arm", "name", "value"])
    rates = [(other, "learning_rate", 0.008)]
    controls["study_settings"] = pd.DataFrame(rates, columns=["arm", "name", "value"])
    low, high = stats.ttest_rel(losses["dense"], losses["spectra"]).confidence_interval()
    text = f"{(low + high) / 2:.3f} ± {(high - low) / 2:.3f}, 5 seeds"
    assert text in arm_claims(Results.of([main, controls]), "Hash routing")[0].why
    controls["study_settings"]["value"] = 0.002
    assert text not in arm_claims(Results.of([main, controls]), "Hash routing")[0].why


def test_an_arm_no_better_than_the_unigram_baseline_is_named_as_such():
    losses = {"A4": [2.6, 2.6], "A4 zero experts": [6.6, 6.7]}
    tables = study(losses, unigram_loss={arm: [6.5, 6.5] for arm in losses})
    zero = arm_claims(Results.of([tables]), "SoME")[2]
    assert zero.verdict == "not testable"
    assert "A4 zero experts: no better than the unigram baseline in 2 trainings" in zero.why
    assert zero.counts == "no number"  # it was run


def test_an_arm_of_which_one_training_failed_and_one_is_set_aside_is_not_called_untrained():
    losses = {"A4": [2.6, 2.6], "A4 frozen keys": [2.7, 2.7]}
    tables = study(losses, unigram_loss={arm: [6.5, 6.5] for arm in losses})
    runs = tables["study_runs"]
    frozen = runs["arm"] == "A4 frozen keys"
    runs.loc[frozen & (runs["seed"] == 0), ["status", "validation_loss"]] = ("failed", math.nan)
    runs.loc[~frozen & (runs["seed"] == 1), ["status", "validation_loss"]] = ("not run", math.nan)
    keys = arm_claims(Results.of([tables]), "SoME")[1]
    assert keys.number is None
    assert "unigram" not in keys.why


def test_in_an_existing_moe_spectra_is_compared_with_trained_rows_and_with_new_ones():
    five = losses_of_five_seeds()
    losses = {"existing MoE: top2": five["spectra"], "existing MoE: spectra": five["top2"]}
    found = Results.of([study({**losses, "existing MoE: top2, new rows": five["dense"]})]).tests
    trained = np.mean(five["spectra"]) - np.mean(five["top2"])
    assert found["bases", "existing MoE: top2"].mean == pytest.approx(trained)
    new = np.mean(five["dense"]) - np.mean(five["top2"])
    assert found["bases", "existing MoE: top2, new rows"].mean == pytest.approx(new)


def ablations(gains: dict[str, float]) -> dict[str, pd.DataFrame]:
    base = np.array([2.5, 2.4, 2.6, 2.55, 2.45])
    noise = np.array([0.001, -0.001, 0.002, 0.0, -0.002])
    arms = {"spectra": list(base)}
    for place, (part, gain) in enumerate(gains.items()):
        arms[f"spectra-{part}"] = list(base + gain + np.roll(noise, place))
    return study(arms, "ablation")


def test_h5_needs_every_component_to_help():
    helpful = dict.fromkeys(("Expression", "GRU", "SpecialityPenalty", "Ortho"), 0.05)
    assert verdicts(Results.of([ablations(helpful)]))["H5"] == "confirmed"
    assert verdicts(Results.of([ablations({**helpful, "GRU": -0.05})]))["H5"] == "refuted"
    unclear = hypotheses(Results.of([ablations({**helpful, "GRU": 0.0})]))[4]
    assert unclear.verdict == "undecided"
    assert "3 of 4" in unclear.why
    assert unclear.why.endswith("smallest gain: GRU")
    del helpful["Ortho"]
    assert hypotheses(Results.of([ablations(helpful)]))[4].why == "not run: -OrthoConstraint"


def test_h7_compares_the_gain_in_specialised_and_other_domains():
    noise = [0.001, -0.001, 0.002, 0.0, -0.002]
    tables = study(losses_of_five_seeds())
    gains = {"code": 0.10, "math": 0.06, "stories": 0.02, "foreign": 9.0}
    tables["study_documents"] = pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "document": 0, "domain": domain, "tokens": 10, "loss": loss}
            for seed in SEEDS
            for domain, gain in gains.items()
            for arm, loss in (("top2", 3.0), ("spectra", 3.0 - gain - noise[seed] * (domain == "code")))
        ]
    )
    tables["unseen_domains"] = pd.DataFrame({"domain": ["foreign"]})
    h7 = hypotheses(Results.of([tables]))[6]
    assert h7.number.mean == pytest.approx((0.10 + 0.06) / 2 - 0.02)
    assert h7.verdict == "confirmed"


def test_a_training_that_does_not_beat_the_unigram_baseline_does_not_count():
    losses = losses_of_five_seeds()
    tables = study(losses)
    tables["study_runs"]["unigram_loss"] = 2.60  # below it: all but one seed of top2
    assert len(results.by_seed(tables, "dense", "validation_loss")) == 0
    assert len(results.by_seed(tables, "top2", "validation_loss")) == 4


def test_a_training_no_better_than_the_unigram_baseline_counts_as_failed():
    base = np.array([2.5, 2.4, 2.6, 2.55, 2.45, 2.5])
    for arm, gain, verdict in (
        ("spectra", 0.1, "undecided"),
        ("top2", 0.1, "undecided"),
        ("spectra", -0.1, "refuted"),  # without it the mean could only be better
        ("top2", -0.1, "undecided"),
    ):
        losses = {"top2": list(base), "spectra": list(base - gain + np.array([1, -1, 2, 0, -2, 0]) / 1000)}
        losses[arm][5] = 7.0
        tables = study(losses)
        tables["study_runs"]["unigram_loss"] = 7.0
        h1 = hypotheses(Results.of([tables]))[0]
        assert (h1.verdict, h1.number.seeds) == (verdict, 5)
        assert h1.why == "1 training of these arms failed or did not beat the unigram baseline"


def test_one_training_far_from_the_others_is_named_with_the_median():
    losses = {"A4": list(2.6 + NOISE), "B3": list(2.62 - NOISE)}
    assert arm_claims(Results.of([study(losses)]), "SoME")[0].why == ""
    losses["B3"][2] = 4.6
    claim = arm_claims(Results.of([study(losses)]), "SoME")[0]
    assert claim.why.endswith("median −0.024; seed 2: −1.997")
    assert claim.verdict == "undecided"


def test_a_pair_of_which_nothing_is_left_without_stalled_trainings_has_no_number():
    tables = study({"A4": [2.6, 5.9], "B3": [5.8, 5.9]})
    tables["study_runs"]["unigram_loss"] = 6.0
    claim = arm_claims(Results.of([tables]), "SoME")[0]
    assert (claim.verdict, claim.number, claim.counts) == ("not testable", None, "no number")
    assert claim.why == "3 of 4 trainings of these arms stalled"
    tables["study_runs"].loc[2, "validation_loss"] = 2.5  # seed 0 of B3
    claim = arm_claims(Results.of([tables]), "SoME")[0]
    assert claim.number.seeds == 2
    losses = study(
        {"A4": list(2.6 + NOISE), "B3": list(5.9 + 2 * NOISE)}
    )  # five seeds decide, stalled or not
    losses["study_runs"]["unigram_loss"] = 6.0
    assert arm_claims(Results.of([losses]), "SoME")[0].verdict == "refuted"
