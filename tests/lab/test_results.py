"""The numbers of the page "Results" against cases worked by hand and scipy's own tests."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moescope.lab import results
from moescope.lab.results import Results
from moescope.lab.results_claims import arm_claims, effect_claims, hypotheses
from moescope.lab.results_conditions import settings
from moescope.lab.study_statistics import compare, holm

SEEDS = range(5)
EFFECTS = ("effect_load", "effect_alignment", "effect_ambiguity")
NO_TABLES = Results({}, {}, {}, {}, {})


def study(losses: dict[str, list[float]], question: str = "main", **columns) -> dict[str, pd.DataFrame]:
    """study_runs and study_comparisons of these losses per seed; 8 experts, 2 per token."""
    rows = [
        {
            "arm": arm,
            "seed": seed,
            "question": question,
            "status": "done",
            "validation_loss": loss,
            "n_experts": 8,
            "top_k": 2,
            "parameters_active": 1000,
            **{name: values[arm][seed] for name, values in columns.items() if arm in values},
        }
        for arm, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    runs = pd.DataFrame(rows)
    tables = {"study_runs": runs}
    return tables if len(losses) == 1 else {**tables, "study_comparisons": compare(runs, next(iter(losses)))}


def layers(rows: list[tuple[str, int, int, str, float, float]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["arm", "seed", "layer", "metric", "value", "chance"])
    return frame.assign(domain="")


# --- estimates


def test_an_interval_over_seeds_is_scipys_and_p_that_of_its_t_test():
    values = [0.3, 0.1, 0.25, 0.4]
    found = results.over_seeds(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p_value == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_one_seed_has_no_interval_and_none_has_no_number():
    assert math.isnan(results.over_seeds([2.0]).half)
    assert results.over_seeds([math.nan]) is None


# --- gap closure


def test_gap_closure_by_hand():
    # means: active 3.0, total 2.0, x 2.25: three quarters of the gap of 1 are closed
    tables = study(
        {
            "dense": [3.1, 2.9, 3.0],
            "dense_total": [2.1, 1.9, 2.0],
            "spectra": [2.35, 2.10, 2.30],
            "hash": [3.6, 3.4, 3.5],
        }
    )
    found = results.gap_closure(tables, "spectra")
    assert found.mean == pytest.approx(0.75)
    # without one seed, the gap stays 1 and x is 0.80, 0.70 and 0.75 below active: jackknife by hand
    left_out = np.array([(2.95 - 2.20), (3.05 - 2.325), (3.0 - 2.225)])
    error = math.sqrt(2 / 3 * ((left_out - left_out.mean()) ** 2).sum())
    assert found.half == pytest.approx(stats.t.ppf(0.975, 2) * error)
    assert results.gap_closure(tables, "hash").mean == pytest.approx(-0.5)  # worse than the dense model
    assert results.gap_closure(tables, "dense_total").mean == pytest.approx(1)


def test_there_is_no_gap_closure_without_a_gap():
    losses = {"dense": [3.0, 3.1, 2.9], "dense_total": [3.05, 2.95, 3.0], "spectra": [2.9, 2.9, 2.8]}
    assert results.gap_closure(study(losses), "spectra") is None
    assert results.gap_closure(study({"dense": [3.0], "spectra": [2.0]}), "spectra") is None


# --- collapse


@pytest.mark.parametrize(
    ("least", "violation", "collapsed"),
    [
        (0.5, 1.5, False),  # 1.5/(8/2 − 1) = 0.5: at the limit
        (0.5, 1.53, True),
        (0.01, 0.1, False),
        (0.0099, 0.1, True),
        (0.0, 3.0, True),
    ],
)
def test_a_layer_collapses_by_either_rule(least: float, violation: float, collapsed: bool):
    tables = study({"spectra": [2.0]})
    tables["study_layers"] = layers(
        [("spectra", 0, 0, "min_over_mean", least, 0.9), ("spectra", 0, 0, "max_violation", violation, 0.1)]
    )
    assert results.collapse_rate(tables, "spectra").rate == float(collapsed)


def test_the_collapse_rate_counts_seeds_and_layers():
    tables = study({"spectra": [2.0, 2.0], "top2": [2.0, 2.0]})
    least = {(0, 0): 0.5, (0, 1): 0.001, (1, 0): 0.5, (1, 1): 0.5}
    rows = [("spectra", *place, "min_over_mean", value, 0.9) for place, value in least.items()]
    rows += [("spectra", *place, "max_violation", 0.2, 0.1) for place in least]
    tables["study_layers"] = layers(rows)
    found = results.collapse_rate(tables, "spectra")
    assert (found.collapsed, found.layers, found.rate) == (1, 4, 0.25)
    assert results.collapse_rate(tables, "top2") is None


# --- significance


def losses_of_five_seeds() -> dict[str, list[float]]:
    return {
        "top2": [2.50, 2.42, 2.61, 2.55, 2.47],
        "spectra": [2.40, 2.30, 2.52, 2.44, 2.38],
        "expert_choice": [2.41, 2.33, 2.50, 2.47, 2.36],
        "dense": [2.70, 2.63, 2.80, 2.76, 2.69],
    }


def test_comparisons_are_paired_t_tests_with_holm_over_all_tests():
    losses = losses_of_five_seeds()
    consistency = {"top2": [0.7, 0.72, 0.69, 0.71, 0.7], "spectra": [0.74, 0.73, 0.75, 0.74, 0.73]}
    chance = {"top2": [0.2, 0.21, 0.19, 0.2, 0.2], "spectra": [0.25, 0.26, 0.24, 0.25, 0.27]}
    found = Results.of([study(losses, consistency=consistency, consistency_chance=chance)]).tests
    p = {
        ("main", arm): stats.ttest_rel(losses[arm], losses["spectra"]).pvalue
        for arm in losses
        if arm != "spectra"
    }
    p |= {
        ("routers", arm): stats.ttest_rel(losses[arm], losses["top2"]).pvalue
        for arm in ("expert_choice", "dense")
    }
    beyond = {
        arm: [(same - level) / (1 - level) for same, level in zip(consistency[arm], chance[arm], strict=True)]
        for arm in chance
    }
    p["H3",] = stats.ttest_rel(beyond["spectra"], beyond["top2"]).pvalue
    running = 0.0
    for place, key in enumerate(sorted(p, key=p.get)):
        running = max(running, (6 - place) * p[key])
        assert found[key].p_value == pytest.approx(p[key])
        assert found[key].p_adjusted == pytest.approx(min(running, 1.0))
        stars = "***" if running < 0.001 else "**" if running < 0.01 else "*"
        assert results.stars(found[key]) == (f"yes ({stars})" if running < 0.05 else "no")
    gain = np.mean(losses["dense"]) - np.mean(losses["spectra"])
    assert found["main", "dense"].mean == pytest.approx(gain)
    assert {key for key, one in found.items() if one} == set(p)
    assert results.stars(found["ablation", "spectra-GRU"]) == "not run"


def test_four_seeds_claim_nothing_and_cost_nothing():
    losses = losses_of_five_seeds()
    few = {arm: values[:4] if arm == "dense" else values for arm, values in losses.items()}
    runs = study({arm: values for arm, values in few.items() if arm != "dense"})["study_runs"]
    more = study({"dense": few["dense"]})["study_runs"]
    found = Results.of([{"study_runs": pd.concat([runs, more], ignore_index=True)}]).tests
    assert results.stars(found["main", "dense"]) == "too few seeds"
    pairs = (("top2", "spectra"), ("expert_choice", "spectra"), ("expert_choice", "top2"))
    p = [stats.ttest_rel(losses[arm], losses[other]).pvalue for arm, other in pairs]
    assert found["main", "top2"].p_adjusted == pytest.approx(3 * min(p))
    losses = {arm: values[:4] for arm, values in losses.items()}
    assert {one.verdict for one in hypotheses(Results.of([study(losses)]))} == {"not testable"}


def null_results(generator: np.random.Generator, seeds: int) -> Results:
    """All arms of all parts; arms differ by noise alone, and all share the effect of the seed."""

    def drawn(arms: list[str]) -> pd.DataFrame:
        shared = 3 * generator.standard_normal(seeds)
        found = {arm: 9 + 0.1 * (shared + generator.standard_normal(seeds)) for arm in arms}
        return pd.DataFrame(found).rename_axis(index="seed", columns="arm")

    def runs(arms: list[str], **columns: pd.DataFrame) -> pd.DataFrame:
        columns = {"validation_loss": drawn(arms), **columns}
        found = pd.DataFrame({name: frame.stack() for name, frame in columns.items()}).reset_index()
        return found.assign(status="done", question="main")

    both = ["top2", "spectra"]
    routers = ["spectra", *(arm for _, arm in results.ROUTERS if arm != "spectra"), "dense"]
    variants = [*(arm for _, arm, _ in results.VARIANTS), "top2_flops"]
    level = drawn(routers) * 0 + 0.1
    main = {"study_runs": runs(routers, consistency=drawn(routers), consistency_chance=level)}
    place = [drawn(both).stack().rename("value").reset_index().assign(layer=layer) for layer in range(2)]
    main["study_layers"] = pd.concat(place).assign(metric="output_orthogonality", domain="", chance=0.9)
    removed = [drawn(["top2"]).stack().rename("value").reset_index().assign(metric=name) for name in EFFECTS]
    effects = {"study_layers": pd.concat(removed).assign(layer=0, domain="", chance=0.0)}
    effects["study_layers"]["value"] -= 9
    domains = ("code", "math", "drama", "stories")
    texts = [drawn(both).stack().rename("loss").reset_index().assign(domain=domain) for domain in domains]
    main["study_documents"] = pd.concat(texts).assign(tokens=10)
    sized = [f"{arm} {size}" for arm in both for size in "SML"]
    sizes = {"study_runs": runs(sized)}
    active = sizes["study_runs"]["arm"].str[-1].map({"S": 1000, "M": 2000, "L": 4000})
    sizes["study_runs"]["parameters_active"] = active
    axes = [{"arm": arm, "axis": "size", "value": None, "label": arm[-1]} for arm in sized]
    sizes["study_axes"] = pd.DataFrame(axes)
    hashed = list(dict.fromkeys(arm for pair in results.PAIRS for arm in pair))
    ablation, hashes = {"study_runs": runs(variants)}, {"study_runs": runs(hashed)}
    return Results(main, ablation, {}, sizes, {}, {}, (hashes,), effects)


def test_of_four_thousand_results_without_an_effect_at_most_a_twentieth_claims_one():
    """Every test of the page: routers, ablations, layers, consistency, sizes, domains."""
    studies, seeds = 4000, 10
    everything = results.tested_numbers(null_results(np.random.default_rng(6), studies * seeds))
    assert len(everything) == 5 + 3 + 8 + 4 + 10 + len(EFFECTS) - 1  # load is no claim
    found = [one.values.sort_index().to_numpy().reshape(studies, seeds) for one in everything.values()]
    adjusted = holm(stats.ttest_1samp(np.stack(found, 1), 0.0, axis=-1).pvalue)
    # Holm under dependence is below its level; 3 binomial σ above it: 0.0603
    claimed = (adjusted <= 0.05).any(-1).mean()
    assert 0.01 < claimed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


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
    few = {**tables, "study_runs": tables["study_runs"].assign(output_documents=1)}
    h2 = hypotheses(Results.of([few]))[1]
    assert (h2.verdict, h2.number.significant) == ("undecided", True)
    assert "1 document" in h2.why


def test_an_estimated_chance_level_decides_nothing_and_the_raw_difference_is_given():
    noise = np.array([0.001, -0.001, 0.002, 0.0, -0.002])
    consistency = {"top2": 0.60 + noise, "spectra": 0.73 + 2 * noise}
    columns = {"consistency": consistency, "consistency_chance": dict.fromkeys(consistency, [0.1] * 5)}
    for estimated, verdict in ((0, "confirmed"), (1, "undecided")):
        marks = {arm: [estimated] * 5 for arm in consistency}
        tables = study(losses_of_five_seeds(), consistency_estimated=marks, **columns)
        h3 = hypotheses(Results.of([tables]))[2]
        assert h3.verdict == verdict
        assert ("0.130 ± " in h3.why) == bool(estimated)


def test_h1_stands_beside_the_same_difference_in_the_ablation():
    losses = losses_of_five_seeds()
    again = {"spectra": losses["spectra"], "top2": [value + 0.5 for value in losses["spectra"]]}
    again["spectra-GRU"] = losses["top2"]
    ablation = study(again, "ablation")
    ablation["study_name"] = pd.DataFrame({"name": ["repeat"]})
    h1 = hypotheses(Results.of([study(losses), ablation]))[0]
    assert "trained again in repeat: 0.500 ± 0.000" in h1.why


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
    assert verdicts(found)["H5"] == "unfinished: 5 of 6 seeds"
    ortho = found.tests["ablation", "spectra-Ortho"]  # its sixth seed is one that -GRU lacks
    assert (ortho.seeds, results.stars(ortho)) == (5, "unfinished: 5 of 6 seeds")
    gains = np.array(losses["spectra-Ortho"][:5]) - base[:5]
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
        {"top2": losses["top2"], slower: losses["spectra"]}, consistency=same, consistency_chance=nothing
    )
    low, high = stats.ttest_rel(same[slower], same["top2"]).confidence_interval()
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
    h3 = hypotheses(Results.of([main, controls, experts]))[2]
    assert "spectra 0.008 and top2 0.004" in h3.why
    half = (high - low) / 2
    assert f"both at that of top2: −{-(low + high) / 2:.3f} ± {half:.3f}, 5 seeds" in h3.why
    gain = np.mean(consistency["spectra"]) - np.mean(consistency["top2"])
    assert f"by experts: 4: {gain:.3f}, 8: −{0.5 - gain:.3f}" in h3.why


def test_a_claim_on_two_arms_says_where_rates_differ_and_where_losses_rise():
    losses = losses_of_five_seeds()
    slopes = {"hash x4": [0.07, 0.05, 0.06, 0.08, 0.04], "top2 x4": [-0.1] * 5}
    tables = study({"top2 x4": losses["top2"], "hash x4": losses["spectra"]}, loss_slope=slopes)
    rates = [("hash x4", "learning_rate", 0.008), ("top2 x4", "learning_rate", 0.004)]
    tables["study_settings"] = pd.DataFrame(rates, columns=["arm", "name", "value"])
    longer = arm_claims(Results.of([tables]), "Hash routing")[1]
    assert "hash x4 0.008 and top2 x4 0.004" in longer.why
    assert longer.why.endswith("losses rise per 1,000 steps: hash x4 by 0.06")


def test_an_arm_no_better_than_the_unigram_baseline_is_named_as_such():
    losses = {"A4": [2.6, 2.6], "A4 zero experts": [6.6, 6.7]}
    tables = study(losses, unigram_loss={arm: [6.5, 6.5] for arm in losses})
    zero = arm_claims(Results.of([tables]), "SoME")[2]
    assert zero.verdict == "not testable"
    assert "A4 zero experts" in zero.why
    assert "unigram" in zero.why


def test_in_an_existing_moe_spectra_is_compared_with_rows_as_new_as_its_own():
    five = losses_of_five_seeds()
    losses = {"existing MoE: top2": five["spectra"], "existing MoE: spectra": five["top2"]}
    kept = Results.of([study(losses)])
    assert kept.tests["bases", "existing MoE"].mean < 0
    fresh = Results.of([study({**losses, "existing MoE: top2, new rows": five["dense"]})])
    gain = np.mean(five["dense"]) - np.mean(five["top2"])
    assert fresh.tests["bases", "existing MoE"].mean == pytest.approx(gain)


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
    assert "-GRU" in unclear.why
    del helpful["Ortho"]
    assert hypotheses(Results.of([ablations(helpful)]))[4].why == "not run: -OrthoConstraint"


def test_h6_is_the_slope_of_the_gain_per_doubling():
    gains = {"S": 0.01, "M": 0.03, "L": 0.05}  # at 1000, 2000 and 4000 parameters: 0.02 per doubling
    noise = np.array([0.001, -0.001, 0.002, 0.0, -0.002])
    arms = {}
    for place, (size, gain) in enumerate(gains.items()):
        arms[f"top2 {size}"] = [2.5 - 0.1 * place] * 5
        arms[f"spectra {size}"] = list(2.5 - 0.1 * place - gain - place * noise)
    tables = study(arms, "scaling")
    sizes = tables["study_runs"]["arm"].str[-1].map({"S": 1000, "M": 2000, "L": 4000})
    tables["study_runs"]["parameters_active"] = sizes
    tables["study_axes"] = pd.DataFrame(
        [
            {"arm": arm, "axis": axis, "value": None, "label": label}
            for arm in arms
            for axis, label in (("router", arm[:-2]), ("size", arm[-1]))
        ]
    )
    h6 = hypotheses(Results.of([tables]))[5]
    assert h6.number.mean == pytest.approx(0.02 + noise.mean())
    assert h6.number.seeds == 5
    assert h6.verdict == "confirmed"


def test_h6_decides_nothing_where_a_larger_model_is_worse_and_takes_the_better_of_two_rates():
    noise = np.array([0.001, -0.002, 0.003, 0.0, -0.002])
    arms = {
        "top2 S": 3.0 + noise,
        "top2 L": 2.8 - noise,
        "spectra S": 2.9 + 2 * noise,
        "spectra L": 3.3 + noise,  # its rate is too high
    }
    better = {**arms, "spectra L at half": 2.5 + noise}

    def h6(arms: dict[str, np.ndarray]):
        tables = study({arm: list(values) for arm, values in arms.items()}, "scaling")
        active = tables["study_runs"]["arm"].str.split().str[1].map({"S": 1000, "L": 2000})
        tables["study_runs"]["parameters_active"] = active
        places = [(arm, "size", None, arm.split()[1]) for arm in arms]
        tables["study_axes"] = pd.DataFrame(places, columns=["arm", "axis", "value", "label"])
        return hypotheses(Results.of([tables]))[5]

    found = h6(arms)
    assert (found.verdict, found.number.mean) == ("undecided", pytest.approx(-0.6, abs=1e-3))
    assert found.why.startswith("spectra L predicts worse")
    found = h6(better)  # the gain grows from 0.1 to 0.3 in one doubling
    assert (found.verdict, found.number.mean) == ("confirmed", pytest.approx(0.2, abs=1e-3))


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


# --- domains and failure modes


def test_a_domains_loss_is_weighted_by_tokens():
    tables = study({"top2": [2.0]})
    rows = [("code", 100, 1.0), ("code", 300, 2.0), ("prose", 50, 4.0)]
    documents = pd.DataFrame(rows, columns=["domain", "tokens", "loss"])
    tables["study_documents"] = documents.assign(arm="top2", seed=0, document=range(3))
    assert results.domain_losses(tables, "top2").loc[0].to_dict() == {"code": 1.75, "prose": 4.0}


def test_an_unseen_domain_is_compared_in_bits_per_byte():
    tables = study({"dense": [2.0, 2.0], "top2": [2.0, 2.0]})
    rows = [
        (arm, seed, document, tokens, size, loss + 0.1 * seed * (arm == "top2"))
        for arm, loss in (("dense", 1.0), ("top2", 1.2))
        for seed in range(2)
        for document, (tokens, size) in enumerate([(100, 150), (300, 350)])
    ]
    documents = pd.DataFrame(rows, columns=["arm", "seed", "document", "tokens", "bytes", "loss"])
    tables["study_documents"] = documents.assign(domain="foreign")
    tables["unseen_domains"] = pd.DataFrame({"domain": ["foreign"]})
    # 400 tokens in 500 bytes; 0.2 and 0.3 nats per token more than dense
    found = results.unseen_bits(tables, "top2")["foreign"]
    assert found.mean == pytest.approx(0.25 * 400 / 500 / math.log(2))
    keys = {"study": "main", "question": "main", "status": "done", "chance": math.nan, "layer": None}
    values = {"validation_loss": 1.2, "bits_per_byte": 4.5}
    long = [
        {**keys, "arm": "top2", "seed": 0, "domain": domain, "metric": metric, "value": value}
        for domain in ("", "foreign")
        for metric, value in values.items()
    ]
    stored = results.from_long(pd.DataFrame(long))
    assert results.domain_bits(stored, "top2").loc[0, "foreign"] == pytest.approx(4.5)
    assert results.domain_losses(stored, "top2").loc[0, "foreign"] == pytest.approx(1.2)


def test_mixed_documents_by_hand():
    rows = [
        (0, 2.0, 2.5, 0.9, 0.6),
        (0, 2.0, 1.9, 0.9, 0.8),
        (1, 2.0, 2.2, 0.8, 0.5),
        (1, 2.0, 2.4, 1.0, 0.9),
    ]
    frame = pd.DataFrame(rows, columns=["seed", "loss_same", "loss_other", "kept_same", "kept_other"])
    share, lost, kept = results.mixed_documents({"study_mixed": frame.assign(arm="spectra")}, "spectra")
    assert share.mean == 0.75  # 1 of 2 and 2 of 2
    assert lost.mean == pytest.approx((0.2 + 0.3) / 2)
    assert kept.mean == pytest.approx((-0.2 + -0.2) / 2)


def test_turnover_is_half_the_sum_of_changes():
    shares = {
        0: [0.5, 0.5],
        10: [0.9, 0.1],
        20: [0.6, 0.4],
        60: [0.6, 0.4],
        80: [0.65, 0.35],
        100: [0.6, 0.4],
    }
    frame = pd.DataFrame(
        [
            {"arm": "spectra", "seed": 0, "step": step, "layer": 0, "expert": expert, "share": share}
            for step, of_experts in shares.items()
            for expert, share in enumerate(of_experts)
        ]
    )
    moved = results.turnover({"study_usage": frame}, "spectra")
    assert moved.loc[0, "early"] == pytest.approx(0.4)  # up to step 10
    assert moved.loc[0, "late"] == pytest.approx((0.0 + 0.05 + 0.05) / 3)


def test_rare_experts_by_hand():
    tokens = [100, 100, 190, 9, 1]  # mean 80: below a tenth of it is the last alone
    frame = pd.DataFrame({"expert": range(5), "tokens": tokens, "arm": "spectra", "seed": 0, "layer": 0})
    tables = study({"spectra": [2.0]})
    tables["study_loads"] = frame.assign(domain="code")
    experts, choices = results.rare_experts(tables, "spectra")
    assert (experts.mean, choices.mean) == (0.2, 1 / 400)


def test_micro_batches_share_the_rows_of_a_step():
    train = {"steps": 10, "batch_size": 32, "micro_batches": 4, "sequence_length": 256, "learning_rate": 0.1}
    found = settings({"base": {"train": train}, "arms": [{"name": "top2", "overrides": {}}]})
    assert found.set_index("name")["value"].to_dict()["tokens_per_step"] == 8192
