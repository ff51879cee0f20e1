"""Claims about sizes: growth with the model, learning rates, and the other sign in another study."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lab.shared_results import (
    NOISE,
    SEEDS,
    layers,
    losses_of_five_seeds,
    sized,
    sizes_at_one_rate,
    study,
    with_settings,
)
from moescope.lab.results import Results, worse_than_smaller
from moescope.lab.results_claims import checks, hypotheses
from moescope.lab.results_conditions import wide_and_worse


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


UNFIT = {
    "top2 S": 3.0 + NOISE,
    "top2 L": 2.8 - NOISE,
    "spectra S": 2.9 + 2 * NOISE,
    "spectra L": 3.3 + NOISE,  # its rate is too high
}


def test_h6_decides_nothing_where_a_larger_model_is_worse():
    found = hypotheses(sized(UNFIT))[5]
    assert (found.verdict, found.number.mean) == ("undecided", pytest.approx(-0.6, abs=1e-3))
    assert found.why.endswith(": spectra L")
    fewer = {arm: values[:3] for arm, values in UNFIT.items()}
    assert "too few seeds" in hypotheses(sized(fewer))[5].why  # both reasons stand
    grows = {**UNFIT, "spectra L": 2.5 + NOISE}
    assert hypotheses(sized(grows))[5].verdict == "confirmed"


@pytest.mark.parametrize("order", ["SML", "LMS", "MLS"])
def test_sizes_are_ordered_by_parameters_and_a_router_may_lack_one(order: str):
    arms = {**UNFIT, "dense M": 3.5 + NOISE}
    assert worse_than_smaller(sized(arms, order).sizes) == ["spectra L"]


def test_of_two_rates_the_lower_counts_and_the_other_may_fail():
    both = {**UNFIT, "spectra L half": 2.5 + NOISE}
    found = hypotheses(sized(both, failed="spectra L"))[5]  # the gain grows from 0.1 to 0.3 in one doubling
    assert (found.verdict, found.number.mean) == ("confirmed", pytest.approx(0.2, abs=1e-3))


def wide(spectra: float, topk: float = 2.7, parameters: float = 4000, d_model: float = 512):
    """A study of one wide model: SPECTRA beside top-k."""
    tables = study({"topk": list(topk + NOISE), "spectra": list(spectra - NOISE)})
    tables["study_runs"]["parameters_active"] = parameters
    return with_settings(tables, d_model=d_model)


def test_a_study_is_wide_if_wider_than_the_main_one_and_without_its_baseline():
    main = with_settings(study(losses_of_five_seeds()), d_model=128)
    assert Results.of([main, wide(2.6)]).wide
    assert not Results.of([wide(2.6)]).wide  # it is the main one
    assert not Results.of([main, wide(2.6, d_model=128)]).wide
    planned = wide(2.6)
    failed = study({"top2": [3.0] * 5})["study_runs"].assign(status="failed")
    planned["study_runs"] = pd.concat([planned["study_runs"], failed], ignore_index=True)
    assert not Results.of([main, planned]).wide


@pytest.mark.parametrize("sign", [1, -1])
def test_a_claim_with_the_other_sign_in_another_study_is_undecided_and_says_where(sign: int):
    losses = losses_of_five_seeds()
    if sign < 0:
        losses["top2"], losses["spectra"] = losses["spectra"], losses["top2"]
    main = study(losses)
    verdict = "confirmed" if sign > 0 else "refuted"
    assert hypotheses(Results.of([main, wide(2.7 - 0.1 * sign)]))[0].verdict == verdict
    found = hypotheses(Results.of([main, wide(2.7 + 0.1 * sign)]))[0]
    assert (found.verdict, found.why) == (
        "undecided",
        "other sign elsewhere: width 512 with 8 experts against topk",
    )
    close = hypotheses(Results.of([main, wide(2.7 + 0.001 * sign)]))[0]  # 0.001 is within its interval
    assert (close.verdict, close.why) == (verdict, "")


def test_few_seeds_unfinished_studies_and_numbers_without_a_sign_reverse_nothing():
    main = study(losses_of_five_seeds())
    few, unfinished = wide(2.8), wide(2.8)
    few["study_runs"] = few["study_runs"][few["study_runs"]["seed"] < 4]
    last = unfinished["study_runs"]["seed"] == 4
    unfinished["study_runs"] = pd.concat(
        [unfinished["study_runs"], unfinished["study_runs"][last].assign(seed=5, status="not run")],
        ignore_index=True,
    )
    for other in (few, unfinished):
        assert hypotheses(Results.of([main, other]))[0].verdict == "confirmed"
    losses = losses_of_five_seeds()
    flat = study({"top2": losses["top2"], "spectra": list(np.array(losses["top2"]) + NOISE)})
    h1 = hypotheses(Results.of([flat, wide(2.8)]))[0]
    assert h1.verdict == "undecided"
    assert "other sign" not in h1.why


def test_the_distinctness_elsewhere_is_that_of_h2_not_of_h1():
    def with_outputs(tables: dict[str, pd.DataFrame], gains: dict[str, float]) -> dict[str, pd.DataFrame]:
        rows = [
            (arm, seed, 0, "output_orthogonality", 0.8 + gain + 0.001 * (seed * gain - seed), 0.9)
            for arm, gain in gains.items()
            for seed in SEEDS
        ]
        return {**tables, "study_layers": layers(rows)}

    main = with_outputs(study(losses_of_five_seeds()), {"top2": 0.0, "spectra": 0.1})
    for gain, verdict in ((0.1, "confirmed"), (-0.1, "undecided")):
        other = with_outputs(wide(2.6), {"topk": 0.0, "spectra": gain})
        found = hypotheses(Results.of([main, other]))
        assert (found[0].verdict, found[1].verdict) == ("confirmed", verdict)


def test_a_wide_model_that_is_worse_than_a_smaller_one_is_marked():
    fit = {**UNFIT, "spectra L": 2.75 + NOISE}  # top2 L has 2.8
    for spectra, topk, parameters, worse in (
        (2.8, 2.7, 4000, ["spectra"]),  # 2.75 at 2,000 parameters
        (2.74, 2.9, 4000, ["topk"]),
        (2.74, 2.7, 4000, []),
        (2.8, 2.7, 2000, []),  # as large as L, and better than S
    ):
        sizes = {**sized(fit).sizes, "study_name": pd.DataFrame({"name": ["sizes"]})}
        found = Results.of([study(losses_of_five_seeds()), sizes, wide(spectra, topk, parameters)])
        assert wide_and_worse(found) == worse
        titles = [title for title, _ in checks(found) if title.startswith("width")]
        ending = " (worse than smaller models)" if worse else ""
        assert titles == [f"width 512 with 8 experts against topk{ending}"]


@pytest.mark.parametrize(("spacing", "compared"), [(250, True), (500, False)])
def test_consistency_is_compared_where_checkpoints_are_as_far_apart(spacing: int, compared: bool):
    def routed(*arms: str) -> dict[str, Any]:
        shares = {arm: list(0.7 + NOISE * at) for at, arm in enumerate(arms)}
        return {"consistency": shares, "consistency_chance": {arm: [0.1] * 5 for arm in arms}}

    losses = {arm: losses_of_five_seeds()[arm] for arm in ("top2", "spectra")}
    main = with_settings(study(losses, **routed("top2", "spectra")), d_model=128, checkpoint_every=250)
    other = study({"topk": losses["top2"], "spectra": losses["spectra"]}, **routed("topk", "spectra"))
    found = Results.of([main, with_settings(other, d_model=512, checkpoint_every=spacing)])
    row = dict(checks(found))["width 512 with 8 experts against topk"]
    assert row[0] is not None
    assert (row[2] is not None) == compared


def test_sizes_name_their_rates_and_are_compared_at_one_rate_too():
    arms = {"top2 S": 3.0, "top2 L": 2.9, "top2 L half": 2.8, "spectra S": 2.9, "spectra L half": 2.6}
    found = sized({arm: loss + NOISE * at for at, (arm, loss) in enumerate(arms.items())})
    rates = found.sizes["study_settings"]
    rates.loc[rates["arm"] == "spectra L half", "value"] = 0.002  # that of top2 L, which does not count
    assert "spectra 0.002, 0.002 and top2 0.002, 0.001" in hypotheses(found)[5].why
    rows = dict(checks(found))
    assert list(rows) == ["size S", "size L", "size L, both at rate 0.002"]
    assert rows["size L"][0].mean == pytest.approx(0.2)
    assert rows["size L, both at rate 0.002"][0].mean == pytest.approx(0.3)
    other = sized({"spectra L half": 2.75 + NOISE, "dense L half": 2.0 + NOISE}).sizes
    rows = dict(checks(Results.of([found.sizes, other])))
    assert list(rows)[2:] == ["size L, both at rate 0.002", "size L, both at rate 0.001"]
    assert rows["size L, both at rate 0.001"][0].mean == pytest.approx(2.8 - 2.75)


def test_h6_names_how_many_times_the_active_parameters_of_the_baseline_the_method_has():
    found = sized(
        {"top2 S": 3.0 + NOISE, "top2 L": 2.8 - NOISE, "spectra S": 2.9 + NOISE, "spectra L": 2.7 + NOISE}
    )
    assert "active parameters" not in hypotheses(found)[5].why
    runs = found.sizes["study_runs"]
    runs.loc[runs["arm"] == "spectra S", "parameters_active"] = 1250
    words = "active parameters of spectra over those of top2: 1.25, 1.00"
    assert hypotheses(found)[5].why.endswith(words)


def test_h6_gives_its_number_at_the_rates_of_the_baseline_if_every_size_has_it():
    h6 = hypotheses(Results.of(sizes_at_one_rate()))[5]
    doublings = np.log2([1000, 1400, 2000])
    own = [0.1 + 0 * NOISE, -0.05 - 2 * NOISE, -0.05 - 2 * NOISE]
    expected = np.mean([stats.linregress(doublings, gains).slope for gains in zip(*own, strict=True)])
    assert h6.number.mean == pytest.approx(expected)
    equal = [0.05 + 2 * NOISE, 0.05 - 0.02 * doublings[1] + 0.02 * doublings[0] - 2 * NOISE, 0.03 - 2 * NOISE]
    slopes = [stats.linregress(doublings, gains).slope for gains in zip(*equal, strict=True)]
    limits = stats.ttest_1samp(slopes, 0.0).confidence_interval()
    half = (limits.high - limits.low) / 2
    assert h6.why.endswith(f"both at those of top2: −0.0200 ± {half:.4f}, 5 seeds")


def without_m(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    return {
        name: rows[rows["arm"].str.split().str[1] != "M"] for name, rows in tables.items() if "arm" in rows
    }


@pytest.mark.parametrize("lacking", ["controls", "rates", "size", "steps", "seeds", "trainings"])
def test_h6_at_equal_rates_needs_every_size_as_long_and_five_seeds_of_finished_studies(lacking: str):
    sizes, rates, controls = sizes_at_one_rate()
    if lacking == "controls":
        studies = [sizes, rates]
    elif lacking == "rates":
        studies = [sizes, without_m(rates), controls]
    else:
        studies = [sizes, rates, controls]
        runs = controls["study_runs"]
        if lacking == "size":
            runs["parameters_active"] = 1200
        elif lacking == "steps":
            steps = [(arm, "steps", 10.0) for arm in ("top2", "spectra at the rate of top2")]
            more = pd.DataFrame(steps, columns=["arm", "name", "value"])
            controls["study_settings"] = pd.concat([controls["study_settings"], more])
        elif lacking == "seeds":
            controls["study_runs"] = runs[runs["seed"] < 4]
        else:
            controls["study_runs"] = pd.concat(
                [runs, runs[runs["seed"] == 4].assign(seed=5, status="not run")]
            )
    assert "both at those" not in hypotheses(Results.of(studies))[5].why


@pytest.mark.parametrize(("loss", "mark"), [(2.85, ""), (3.05, " (worse than smaller models)")])
def test_a_reversal_says_what_the_number_is_there_at_one_rate_and_stays(loss: float, mark: str):
    main = study(losses_of_five_seeds())
    h1 = hypotheses(Results.of([main, *sizes_at_one_rate(loss)]))[0]
    assert h1.verdict == "undecided"
    (gain,) = re.findall(
        rf"size L{re.escape(mark)} \(both at rate 0.002: (.*?); both at rate 0.001: (.*?)\)", h1.why
    )
    half = stats.ttest_1samp(NOISE, 0.0).confidence_interval().high - NOISE.mean()
    assert gain[0] == f"{2.95 - loss:.3f} ± 0.000".replace("-", "−")
    assert gain[1] == f"0.030 ± {2 * half:.3f}"
