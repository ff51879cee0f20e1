"""Claims against hand-worked cases and scipy: numbers, verdicts, guards, the file, the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from lab.shared_claims import NOISE, SEEDS, layers, losses_of_five_seeds, study
from lab.study_runs import router_arms, study_run
from moescope.cli import app
from moescope.errors import BadInput
from moescope.lab.claims import Quantity, estimate, judge, read_claims, values_by_seed
from moescope.lab.config import load_function
from moescope.lab.study_statistics import long_rows, probe_tables
from moescope.lab.study_task import probe_model
from moescope.reporting.verb import judged_claims
from moescope.run import Run
from moescope.statistics import holm

BASE = np.array([2.5, 2.4, 2.6, 2.55, 2.45])
Studies = dict[str, dict[str, pd.DataFrame]]


def claims_file(
    folder: Path, *claims: dict[str, Any], checks: tuple[dict[str, Any], ...] = (), top: str = ""
) -> Path:
    lines = [top]
    for kind, entries in (("claim", claims), ("check", checks)):
        for entry in entries:
            lines += [f"[[{kind}]]", *(f"{key} = {inline(value)}" for key, value in entry.items())]
    path = folder / "results.toml"
    path.write_text("\n".join(lines))
    return path


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)


def judged(folder: Path, studies: Studies, *claims: dict[str, Any], checks=()) -> pd.DataFrame:
    found = judge([read_claims(claims_file(folder, *claims, checks=checks))], studies)
    return found.set_index(["claim", "check"]) if checks else found.set_index("claim")


def claim(name: str = "better", arm: str = "spectra", than: Any = "top2", **more: Any) -> dict[str, Any]:
    return {"id": name, "text": name, "study": "main", "arm": arm, "than": than, **more}


def of_arms(**losses: np.ndarray) -> Studies:
    return {"main": study({arm: list(values) for arm, values in losses.items()})}


# --- numbers


def test_a_difference_is_new_minus_reference_with_scipys_interval_and_p(tmp_path: Path):
    losses = losses_of_five_seeds()
    row = judged(tmp_path, {"main": study(losses)}, claim()).loc["better"]
    oracle = stats.ttest_rel(losses["spectra"], losses["top2"])
    assert row["estimate"] == pytest.approx(np.mean(losses["spectra"]) - np.mean(losses["top2"]))
    assert (row["low"], row["high"]) == pytest.approx(tuple(oracle.confidence_interval()))
    assert row["p"] == row["p_holm"] == pytest.approx(oracle.pvalue)
    assert (row["seeds"], row["of_seeds"], row["table"]) == (5, [0, 1, 2, 3, 4], "study_runs")
    assert (row["verdict"], row["column"]) == ("confirmed", "validation_loss")


def test_one_seed_has_no_interval_and_none_has_no_number(tmp_path: Path):
    one = {"main": study({arm: values[:1] for arm, values in losses_of_five_seeds().items()})}
    row = judged(tmp_path, one, claim()).loc["better"]
    assert row["estimate"] == pytest.approx(-0.1)
    assert math.isnan(row["low"])
    assert row["verdict"] == "not testable"
    for studies, why in (({}, "needs the study main"), (of_arms(top2=BASE), "finished trainings of spectra")):
        row = judged(tmp_path, studies, claim()).loc["better"]
        assert row["verdict"] == "not testable"
        assert math.isnan(row["estimate"])
        assert why in row["why"]


def test_all_claims_are_one_family_and_a_number_that_two_claims_test_is_one_test(tmp_path: Path):
    losses = losses_of_five_seeds()
    others = ("top2", "expert_choice", "dense")
    claims = [claim("twice"), claim("all", than=list(others))]
    found = judged(tmp_path, {"main": study(losses)}, *claims)
    p = {arm: stats.ttest_rel(losses["spectra"], losses[arm]).pvalue for arm in others}
    running = 0.0
    for place, arm in enumerate(sorted(p, key=lambda arm: p[arm])):
        running = max(running, (3 - place) * p[arm])
        assert found.loc[f"all: {arm}", "p_holm"] == pytest.approx(min(running, 1.0))
    assert found.loc["twice", "p_holm"] == found.loc["all: top2", "p_holm"]


def test_claims_of_several_files_are_one_family(tmp_path: Path):
    losses = losses_of_five_seeds()
    files = []
    for name, than in (("one", "top2"), ("two", "dense")):
        (tmp_path / name).mkdir()
        files.append(read_claims(claims_file(tmp_path / name, claim(than=than))))
    found = judge(files, {"main": study(losses)}).set_index("than")["p_holm"]
    p = [stats.ttest_rel(losses["spectra"], losses[arm]).pvalue for arm in ("top2", "dense")]
    assert min(found) == pytest.approx(2 * min(p))


def test_a_metric_of_layers_is_a_mean_over_layers_or_one_layer_or_the_worst(tmp_path: Path):
    tables = study({"top2": list(BASE), "spectra": list(BASE)})
    rows = [
        (arm, seed, layer, "cv", 0.1 * (layer + 1) + shift + NOISE[seed], 0.05)
        for arm, shift in (("top2", 0.0), ("spectra", 0.3))
        for seed in SEEDS
        for layer in range(2)
    ]
    tables["study_layers"] = layers(rows)
    more = {"column": "cv", "expect": "higher"}
    found = judged(tmp_path, {"main": tables}, claim(**more), claim("first", layer=0, **more))
    assert found["estimate"].to_list() == pytest.approx([0.3, 0.3])
    assert set(found["table"]) == {"study_layers"}
    worst = estimate({"main": tables}, Quantity(("main",), ("top2",), "cv", worst_layer=True))
    assert (worst.value, worst.chance) == pytest.approx((0.2 + NOISE.mean(), 0.05))


def test_a_ratio_is_compared_with_a_limit_and_counts_need_no_test(tmp_path: Path):
    tables = study(
        {"top2": list(BASE), "spectra": list(BASE)}, flops={"top2": [100] * 5, "spectra": [157] * 5}
    )
    parts = [("top2", "rest", 2.0), ("spectra", "rest", 5.0), ("spectra", "gates", 1.0)]
    tables["overhead"] = pd.DataFrame(parts, columns=["router", "component", "milliseconds"])
    ratio = {"estimand": "ratio", "at_most": 1.1}
    claims = [claim("flops", column="flops", **ratio), claim("time", column="milliseconds", **ratio)]
    claims += [
        claim("loss", **ratio),
        {"id": "cost", "text": "", "estimand": "least", "claims": ["flops", "time"]},
    ]
    found = judged(tmp_path, {"main": tables}, *claims)
    assert found["estimate"].to_list() == pytest.approx([1.57, 3.0, 1.0, 3.0])
    assert found["verdict"].to_list() == ["refuted", "refuted", "confirmed", "refuted"]
    assert found["p_holm"].isna().all()


def test_a_slope_is_per_doubling_of_the_references_parameters(tmp_path: Path):
    gains = {"S": 0.01, "M": 0.03, "L": 0.05}  # at 1000, 2000 and 4000 parameters: 0.02 per doubling
    arms = {}
    for place, (size, gain) in enumerate(gains.items()):
        arms[f"top2 {size}"] = [2.5 - 0.1 * place] * 5
        arms[f"spectra {size}"] = list(2.5 - 0.1 * place - gain - place * NOISE)
    tables = study(arms, "scaling")
    sizes = tables["study_runs"]["arm"].str[-1].map({"S": 1000, "M": 2000, "L": 4000})
    tables["study_runs"]["parameters_active"] = sizes
    names = {router: [f"{router} {size}" for size in gains] for router in ("spectra", "top2")}
    slope = claim("grows", names["spectra"], names["top2"], estimand="slope_per_doubling")
    row = judged(tmp_path, {"main": tables}, slope).loc["grows"]
    assert row["estimate"] == pytest.approx(-0.02 - NOISE.mean())
    assert (row["seeds"], row["verdict"]) == (5, "confirmed")
    worse = tables["study_runs"]["arm"] == "spectra L"
    tables["study_runs"].loc[worse, "validation_loss"] += 0.5
    row = judged(tmp_path, {"main": tables}, slope).loc["grows"]
    assert row["verdict"] == "undecided"
    assert "worse than a smaller model: spectra L" in row["why"]


def test_a_contrast_compares_named_domains_with_the_other_trained_ones(tmp_path: Path):
    tables = study(losses_of_five_seeds())
    gains = {"code": 0.10, "math": 0.06, "stories": 0.02, "foreign": 9.0}
    tables["study_documents"] = pd.DataFrame(
        [
            {
                "arm": arm,
                "seed": seed,
                "document": 0,
                "domain": domain,
                "tokens": 10,
                "bytes": 40,
                "loss": loss,
            }
            for seed in SEEDS
            for domain, gain in gains.items()
            for arm, loss in (("top2", 3.0), ("spectra", 3.0 - gain - NOISE[seed] * (domain == "code")))
        ]
    )
    tables["unseen_domains"] = pd.DataFrame({"domain": ["foreign"]})
    contrast = claim(estimand="contrast", domains=["code", "math", "law"])
    row = judged(tmp_path, {"main": tables}, contrast).loc["better"]
    assert row["estimate"] == pytest.approx(0.02 - (0.10 + 0.06) / 2)
    assert (row["verdict"], row["table"]) == ("confirmed", "study_documents")
    one = estimate({"main": tables}, Quantity(("main",), ("top2",), "bits_per_byte", domain="code"))
    assert one.value == pytest.approx(3.0 / math.log(2) / 4)


def test_the_weakest_of_several_claims_decides_least(tmp_path: Path):
    def verdict(**shifts: float) -> pd.Series:
        arms = {
            f"-{name}": BASE + shift + np.roll(NOISE, at) for at, (name, shift) in enumerate(shifts.items())
        }
        parts = [claim(arm, arm, "full", expect="higher") for arm in arms]
        every = {"id": "each", "text": "", "estimand": "least", "expect": "higher", "claims": [*arms]}
        return judged(tmp_path, of_arms(full=BASE, **arms), *parts, every).loc["each"]

    assert verdict(gru=0.05, quota=0.06)["verdict"] == "confirmed"
    assert verdict(gru=0.05, quota=-0.06)["verdict"] == "refuted"
    unclear = verdict(gru=0.0, quota=0.06)
    assert unclear["verdict"] == "undecided"
    assert "1 of 2 confirmed; weakest: -gru" in unclear["why"]
    assert unclear["estimate"] == pytest.approx(NOISE.mean())


def test_chance_is_taken_off_where_it_is_asked_for(tmp_path: Path):
    consistency = {"top2": 0.70 + NOISE, "spectra": 0.73 + 2 * NOISE}
    level = {"top2": [0.10] * 5, "spectra": [0.19] * 5}  # (c - e)/(1 - e) is 2/3 for both
    tables = study(losses_of_five_seeds(), consistency=consistency, consistency_chance=level)
    more = {"column": "consistency", "expect": "higher"}
    claims = [claim("raw", **more), claim("beyond", beyond_chance=True, **more)]
    found = judged(tmp_path, {"main": tables}, *claims)
    assert found["verdict"].to_list() == ["confirmed", "undecided"]
    assert found.loc["beyond", "estimate"] == pytest.approx(0.0, abs=1e-3)


# --- verdicts and guards


@pytest.mark.slow
def test_of_four_thousand_results_without_an_effect_at_most_a_twentieth_claims_one(tmp_path: Path):
    """Twelve arms share a seed's effect and are compared with two references; arms differ by noise alone."""
    generator, count, seeds = np.random.default_rng(6), 4000, 10
    arms = [f"arm{number}" for number in range(12)]
    shared = 3 * generator.standard_normal(count * seeds)
    losses = {arm: 9 + 0.1 * (shared + generator.standard_normal(count * seeds)) for arm in arms}
    claims = [claim(f"{arm} {than}", arm, than) for than in arms[:2] for arm in arms[2:]]
    file = read_claims(claims_file(tmp_path, *claims))
    studies = of_arms(**losses)
    family = [values_by_seed(studies, one.quantity) for one in file.claims]
    p = [
        stats.ttest_1samp((new - old).to_numpy().reshape(count, seeds), 0, axis=-1).pvalue
        for new, old in family
    ]
    claimed = (holm(np.stack(p, -1)) <= 0.05).any(-1).mean()
    # Holm under dependence is below its level; 3 binomial deviations above it: 0.0603
    assert 0.01 < claimed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)


@pytest.mark.slow
def test_planted_differences_are_found_at_the_power_that_the_t_test_has(tmp_path: Path):
    generator, seeds, effect = np.random.default_rng(1), 8, 1.5  # of the differences' deviation
    file = read_claims(claims_file(tmp_path, claim()))
    found = []
    for _ in range(100):
        base = generator.standard_normal(seeds)
        losses = {
            "top2": list(9 + base),
            "spectra": list(9 + base + generator.standard_normal(seeds) - effect),
        }
        found.append(judge([file], {"main": study(losses)})["verdict"].iloc[0])
    bound = stats.t.ppf(0.975, seeds - 1)
    power = stats.nct.sf(bound, seeds - 1, effect * math.sqrt(seeds))
    deviation = math.sqrt(power * (1 - power) / 100)
    assert found.count("confirmed") / 100 == pytest.approx(power, abs=3 * deviation)
    assert "refuted" not in found


@pytest.mark.parametrize(("shift", "verdict"), [(-0.1, "confirmed"), (0.1, "refuted"), (0.0, "undecided")])
def test_a_verdict_follows_the_expected_sign(tmp_path: Path, shift: float, verdict: str):
    studies = of_arms(top2=BASE, spectra=BASE + shift + NOISE)
    found = judged(tmp_path, studies, claim(), claim("worse", expect="higher"))
    opposite = {"confirmed": "refuted", "refuted": "confirmed", "undecided": "undecided"}[verdict]
    assert found["verdict"].to_list() == [verdict, opposite]
    assert ("not corrected" in found.loc["better", "why"]) == (verdict == "undecided")


def test_four_seeds_claim_nothing_and_cost_nothing(tmp_path: Path):
    losses = {**losses_of_five_seeds(), "dense": losses_of_five_seeds()["dense"]}
    tables = study(losses)
    runs = tables["study_runs"]
    tables["study_runs"] = runs[(runs["arm"] != "dense") | (runs["seed"] < 4)]
    found = judged(tmp_path, {"main": tables}, claim(), claim("few", than="dense"))
    assert found.loc["few", "verdict"] == "not testable"
    assert found.loc["better", "p_holm"] == found.loc["better", "p"]


def test_an_unfinished_study_gives_no_verdict_and_costs_no_other_test_anything(tmp_path: Path):
    studies = of_arms(top2=BASE, spectra=BASE - 0.1 + NOISE)
    studies["other"] = studies["main"]
    runs = studies["main"]["study_runs"].copy()
    runs.loc[len(runs)] = {
        **runs.iloc[0].to_dict(),
        "seed": 5,
        "status": "not run",
        "validation_loss": math.nan,
    }
    studies["main"] = {**studies["main"], "study_runs": runs}
    found = judged(tmp_path, studies, claim(), {**claim("done"), "study": "other"})
    assert found["verdict"].to_list() == ["unfinished: 10 of 11 trainings", "confirmed"]
    assert found.loc["done", "p_holm"] == found.loc["done", "p"]
    assert math.isnan(found.loc["better", "p_holm"])


@pytest.mark.parametrize("failure", ["failed", "unigram"])
@pytest.mark.parametrize(
    ("arm", "shift", "verdict"),
    [
        ("spectra", -0.1, "undecided"),
        ("top2", -0.1, "undecided"),
        ("spectra", 0.1, "refuted"),  # without it the mean could only be better
        ("top2", 0.1, "undecided"),
    ],
)
def test_an_arm_with_failed_trainings_confirms_nothing(
    tmp_path: Path, arm: str, shift: float, verdict: str, failure: str
):
    base = np.append(BASE, 2.5)
    studies = of_arms(top2=base, spectra=base + shift + np.append(NOISE, 0.0))
    runs = studies["main"]["study_runs"]
    last = (runs["arm"] == arm) & (runs["seed"] == 5)
    if failure == "failed":
        runs.loc[last, ["status", "validation_loss"]] = ("failed", math.nan)
    else:
        runs["unigram_loss"] = 7.0
        runs.loc[last, "validation_loss"] = 7.0
    row = judged(tmp_path, studies, claim()).loc["better"]
    assert (row["verdict"], row["seeds"], row["failed"]) == (verdict, 5, 1)
    assert "1 training of these arms failed or did not beat the unigram baseline" in row["why"]


def test_a_claim_says_where_rates_differ_and_decides_nothing_where_losses_rise(tmp_path: Path):
    losses = {"top2": list(BASE), "spectra": list(BASE - 0.1 + NOISE)}
    slopes = {"spectra": [-0.07, -0.05, -0.06, -0.08, -0.04], "top2": [-0.1] * 5}
    rates = [("spectra", "learning_rate", 0.008), ("top2", "learning_rate", 0.004)]
    settings = pd.DataFrame(rates, columns=["arm", "name", "value"])
    falling = study(losses, loss_slope=slopes) | {"study_settings": settings}
    row = judged(tmp_path, {"main": falling}, claim()).loc["better"]
    assert row["verdict"] == "confirmed"
    assert "learning rates: spectra 0.008 and top2 0.004" in row["why"]
    slopes["spectra"] = [0.4, -0.3, 0.2, -0.1, 0.1]  # above 0, but not beyond its interval
    assert (
        judged(tmp_path, {"main": study(losses, loss_slope=slopes)}, claim())["verdict"].iloc[0]
        == "confirmed"
    )
    slopes["spectra"] = [0.07, 0.05, 0.06, 0.08, 0.04]
    curves = [
        (arm, seed, step, loss)
        for arm, lowest in (("spectra", 2.0), ("top2", 1.9))
        for seed in SEEDS
        for step, loss in ((1, 3.0), (2, lowest + 0.1 * seed), (3, 2.9))
    ]
    rising = study(losses, loss_slope=slopes)
    rising["study_curves"] = pd.DataFrame(curves, columns=["arm", "seed", "step", "validation_loss"])
    row = judged(tmp_path, {"main": rising}, claim()).loc["better"]
    assert row["verdict"] == "undecided"
    assert "spectra by 0.060" in row["why"]
    assert "top2 by" not in row["why"]
    assert row["why"].endswith("difference of the lowest losses: 0.100 ± 0.000")


def test_one_training_far_from_the_others_is_named_with_the_median(tmp_path: Path):
    losses = {"top2": BASE, "spectra": BASE + 0.02 - NOISE}
    assert judged(tmp_path, of_arms(**losses), claim())["why"].iloc[0] == ""
    losses["spectra"] = losses["spectra"] + np.array([0.0, 0.0, 2.0, 0.0, 0.0])
    row = judged(tmp_path, of_arms(**losses), claim()).loc["better"]
    assert "median 0.022; seed 2: 2.017" in row["why"]


def test_a_pair_of_which_nothing_is_left_without_stalled_trainings_has_no_number(tmp_path: Path):
    studies = of_arms(top2=np.array([2.6, 5.9]), spectra=np.array([5.8, 5.9]))
    runs = studies["main"]["study_runs"]
    runs["unigram_loss"] = 6.0
    row = judged(tmp_path, studies, claim()).loc["better"]
    assert math.isnan(row["estimate"])
    assert "stalled" in row["why"]
    runs.loc[(runs["arm"] == "spectra") & (runs["seed"] == 0), "validation_loss"] = 2.5
    assert judged(tmp_path, studies, claim())["seeds"].iloc[0] == 2


def test_a_requirement_that_a_training_does_not_meet_leaves_a_claim_undecided(tmp_path: Path):
    documents = {"top2": [200] * 5, "spectra": [200, 200, 200, 200, 12]}
    losses = {"top2": list(BASE), "spectra": list(BASE - 0.1 + NOISE)}
    tables = {"main": study(losses, output_documents=documents)}
    require = {"output_documents": ">=20", "seeds": ">=5", "finished": True}
    row = judged(tmp_path, tables, claim(require=require)).loc["better"]
    assert row["verdict"] == "undecided"
    assert "requires output documents >=20, found 12" in row["why"]
    assert (
        judged(tmp_path, tables, claim(require={"output_documents": ">=12"}))["verdict"].iloc[0]
        == "confirmed"
    )
    row = judged(tmp_path, tables, claim(require={"output_document": ">=20"})).loc["better"]  # misspelt
    assert row["verdict"] == "undecided"
    assert "requires output document >=20, not measured for" in row["why"]
    row = judged(tmp_path, tables, claim(require={"seeds": ">=6"})).loc["better"]
    assert row["verdict"] == "undecided"


@pytest.mark.parametrize("limit", [{}, {"at_most": 0.0}])
def test_a_claim_chosen_after_a_look_at_the_data_has_a_number_and_no_verdict(tmp_path: Path, limit: dict):
    studies = of_arms(top2=BASE, spectra=BASE - 0.1 + NOISE)
    later = claim("later", registered=False, note="seen in a plot", **limit)
    found = judged(tmp_path, studies, claim(**limit), later)
    assert found["verdict"].to_list() == ["confirmed", "undecided"]
    assert found.loc["later", "why"].startswith("chosen after a look at the data: seen in a plot")
    for column in ("estimate", "low", "high"):
        assert found.loc["later", column] == found.loc["better", column]


@pytest.mark.parametrize("veto", [True, False])
@pytest.mark.parametrize(("elsewhere", "reverses"), [(0.1, True), (0.0, False), (-0.1, False)])
def test_the_other_sign_elsewhere_takes_a_verdict_away(
    tmp_path: Path, veto: bool, elsewhere: float, reverses: bool
):
    studies = of_arms(top2=BASE, spectra=BASE - 0.1 + NOISE)
    studies["large"] = of_arms(topk=BASE, spectra=BASE + elsewhere + NOISE)["main"]
    check = {"of": ["better"], "title": "wide", "study": "large", "than": "topk", "veto": veto}
    found = judged(tmp_path, studies, claim(), checks=(check,))
    row, other = found.loc[("better", "")], found.loc[("better", "wide")]
    assert row["verdict"] == ("undecided" if reverses and veto else "confirmed")
    assert ("other sign elsewhere: wide" in row["why"]) == (reverses and veto)
    assert other["estimate"] == pytest.approx(elsewhere + NOISE.mean())
    assert (other["verdict"], other["study"]) == ("", "large")
    assert math.isnan(other["p_holm"])


def test_arms_of_two_studies_are_paired_by_seed(tmp_path: Path):
    studies = of_arms(spectra=BASE - 0.1 + NOISE)
    studies["controls"] = of_arms(top2=BASE)["main"]
    row = judged(tmp_path, studies, claim(than_study="controls")).loc["better"]
    assert row["estimate"] == pytest.approx(-0.1 + NOISE.mean())
    assert row["study"] == "main and controls"


# --- the file


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"estimand": "differnce"}, "difference"),
        ({"expect": "less"}, "lower"),
        ({"study": ""}, "study"),
        ({"require": {"seeds": "five"}}, "five"),
        ({"estimand": "slope_per_doubling", "arm": ["a", "b"]}, "pair them"),
        ({"estimand": "least", "claims": ["nothing"]}, "nothing"),
        ({"id": ""}, "no id"),
        ({"id": "", "estimand": "slope_per_doubling"}, "no id"),
        ({"estimand": "ratio", "than": ""}, "name the reference"),
        ({"estimand": "contrast"}, "name them"),
        ({"estimand": "least", "claims": ["better"]}, "better"),
    ],
)
def test_a_file_that_cannot_be_meant_is_rejected(tmp_path: Path, change: dict[str, Any], said: str):
    with pytest.raises(BadInput, match=said):
        read_claims(claims_file(tmp_path, {**claim(), **change}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('claim = "x"', "claim must be a list, not 'x'"),
        ("table = [3]", "table, item 0 must be a table, not 3"),
        ("defaults = 3", "defaults must be a table, not 3"),
        ("[defaults]\ncolour = 3", "colour"),
        ("[[check]]\nstudy = 'large'", "name the one it checks"),
    ],
)
def test_a_file_of_other_types_is_rejected(tmp_path: Path, text: str, said: str):
    (tmp_path / "results.toml").write_text(text)
    with pytest.raises(BadInput, match=re.escape(said)):
        read_claims(tmp_path / "results.toml")


def test_a_slope_needs_no_text(tmp_path: Path):
    slope = {"id": "H6", "study": "main", "arm": ["a"], "than": ["b"], "estimand": "slope_per_doubling"}
    assert read_claims(claims_file(tmp_path, slope)).claims[0].text == ""


def test_braces_in_a_claims_text_stay(tmp_path: Path):
    file = read_claims(claims_file(tmp_path, {**claim(), "text": "{than} {0} {"}))
    assert file.claims[0].text == "top2 {0} {"


def test_columns_without_numbers_are_rejected(tmp_path: Path):
    studies = of_arms(top2=BASE, spectra=BASE)
    for change, said in (({"column": "status"}, "no numbers"), ({"beyond_chance": True}, "_chance")):
        with pytest.raises(BadInput, match=said):
            judged(tmp_path, studies, {**claim(), **change})


def test_a_limit_shares_no_test_with_a_claim_of_the_same_number_and_keeps_its_requirements(tmp_path: Path):
    studies = of_arms(top2=BASE, spectra=BASE - 0.1 + NOISE)
    limits = claim("limit", at_most=0.0), claim("strict", at_most=0.0, require={"seeds": ">=6"})
    found = judged(tmp_path, studies, claim(), *limits)
    assert list(found["verdict"]) == ["confirmed", "confirmed", "undecided"]
    assert list(found["p_holm"].notna()) == [True, False, False]


def test_two_claims_of_one_id_and_a_check_of_no_claim_are_rejected(tmp_path: Path):
    with pytest.raises(BadInput, match="better"):
        read_claims(claims_file(tmp_path, claim(), claim()))
    with pytest.raises(BadInput, match="H9"):
        read_claims(claims_file(tmp_path, claim(), checks=({"of": "H9", "title": "x"},)))


# --- the page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study_run(tmp_path_factory.mktemp("study") / "routers", router_arms(["top2", "spectra", "hash"]))


FILE = """
title = "Ours"
sections = "more.py:sections"
[[claim]]
id = "H1"
group = "Main"
text = "loss_free predicts better"
study = "routers"
arm = "spectra"
than = ["top2", "hash"]
[[table]]
title = "Losses"
study = "routers"
rows = { "Switch" = "top2", "Ours" = "spectra" }
columns = ["validation_loss", { title = "gap", column = "validation_loss", than = "top2", decimals = 3 }]
[[figure]]
title = "Loss by step"
study = "routers"
name = "arms_validation_loss_by_step"
question = "main"
"""
MORE = """
from moescope.verb import Section

def sections(studies, judged):
    return [Section("mine", f"{len(studies)} study, {len(judged)} claims", tab="results")]
"""


def test_a_page_has_the_claims_tables_figures_and_sections_of_any_users_file(run: Run, tmp_path: Path):
    (tmp_path / "results.toml").write_text(FILE)
    (tmp_path / "more.py").write_text(MORE)
    file, out = str(tmp_path / "results.toml"), str(tmp_path / "page.html")
    arguments = ["report", str(run.path), "--results", file, "--out", out, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    claims = json.loads(result.output)["claims"]
    assert [one["claim"] for one in claims] == ["H1: top2", "H1: hash"]
    assert (claims[0]["table"], claims[0]["column"]) == ("study_runs", "validation_loss")
    assert claims[0]["of_seeds"] == [0, 1, 2, 3, 4]
    _, sections = judged_claims([file], [run])
    titles = [one.title for one in sections]
    assert titles == ["Ours", "Main", "Losses", "Loss by step", "1 study, 2 claims"]
    forest = sections[1].figures[0][0].draw(sections[1].figures[0][1])
    found = {
        name: x
        for trace in forest.data
        if trace.get("marker")
        for name, x in zip(trace["y"], trace["x"], strict=True)
    }
    assert found == pytest.approx({one["name"]: one["estimate"] for one in claims})
    rows = pd.DataFrame(claims).assign(
        measure=["validation loss", "flops per token, ratio"], no_effect=[0, 1]
    )
    both = (
        sections[1].figures[0][0].draw({"study_claims": rows})
    )  # one page per measure, each with its own axis
    assert (both.slider.values[both.slider.start], len(both.slider.values)) == ("validation loss", 2)
    rows = sections[2].tables[0]["rows"]
    runs = run.table("study_runs").pivot(index="seed", columns="arm", values="validation_loss")
    gap = runs["spectra"] - runs["top2"]
    assert [row[0] for row in rows] == ["Switch", "Ours"]
    assert rows[1][2].startswith(f"{gap.mean():.3f} ± ".replace("-", "−"))
    assert len(sections[3].figures) == 1


OWN = """
[[figure]]
title = "Overlap"
study = "routers"
mark = "Lines"
table = "study_layers"
y = "value"
x = "layer"
by = "arm"
where = "metric == 'expert_overlap' and domain == '' and seed == 0"
[[figure]]
title = "Probed"
study = "routers"
mark = "Scatter"
table = "map"
x = "x"
y = "y"
by = "arm"
"""


def own_figures(run: Run, folder: Path, text: str) -> list[Any]:
    from moescope.lab.report_claims import claims_page
    from moescope.lab.report_study import described, study_tables

    (folder / "results.toml").write_text(text)
    frames = {"map": pd.DataFrame({"expert": [0, 1], "x": [0.5, 0.25], "y": [1.0, 2.0]})}
    probed = pd.concat([long_rows(frames).assign(arm=arm, seed=0) for arm in ("top2", "hash")])
    tables = described({**study_tables(run), "study_probes": probed}, run)
    return [
        one
        for part in claims_page([folder / "results.toml"], [run], {"routers": tables})[1]
        for one in part.figures
    ]


def test_a_file_draws_marks_of_its_own_over_tables_of_the_study_and_of_its_probe(run: Run, tmp_path: Path):
    lines, scatter = (spec.draw(tables) for spec, tables in own_figures(run, tmp_path, OWN))
    found = {trace["name"]: list(trace["y"]) for trace in lines.data}
    assert found == {arm: [0.09, 0.09] for arm in ("top2", "spectra", "hash")}
    assert [trace["name"] for trace in scatter.data] == ["hash", "top2"]
    assert list(scatter.data[0]["x"]) == [0.5, 0.25]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('y = "value"', 'y = "values"', "y: unknown column of study_layers 'values'; did you mean 'value'"),
        ('x = "layer"', 'x = ["layer"]', "x must be text, not ['layer']"),
        ('by = "arm"', 'bye = "arm"', "unknown key 'bye'; did you mean 'by'"),
        ('y = "value"\n', "", "no y; a Lines needs it"),
        ("metric ==", "metrics ==", "cannot be drawn (UndefinedVariableError"),
        ('x = "x"', 'x = "z"', "x: unknown column of map 'z'"),
    ],
)
def test_a_mark_that_cannot_be_meant_is_one_line(run: Run, tmp_path: Path, old: str, new: str, said: str):
    assert old in OWN
    with pytest.raises(BadInput, match=re.escape(said)):
        own_figures(run, tmp_path, OWN.replace(old, new, 1))


BROKEN = "def sections(studies, judged):\n    return 1 / 0\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('{ "Switch" = "top2", "Ours" = "spectra" }', "3", "rows must be a table, not 3"),
        ('"Switch" = "top2"', '"Switch" = 3', "rows must be a table, not 3"),
        ('"Switch" = "top2"', '"Switch" = { arms = "top2" }', "did you mean 'arm'"),
        ('["validation_loss", {', '["validation_loss", { title = "none" }, {', "a column without name"),
        ("decimals = 3", 'decimals = "three"', "decimals must be an integer"),
        ('study = "routers"\nname', 'study = ["routers"]\nname', "study must be text, not ['routers']"),
        ("more.py", "broken.py", "failed (ZeroDivisionError"),
    ],
)
def test_tables_figures_and_sections_that_cannot_be_meant_are_named(
    run: Run, tmp_path: Path, old: str, new: str, said: str
):
    assert old in FILE
    (tmp_path / "results.toml").write_text(FILE.replace(old, new))
    (tmp_path / "more.py").write_text(MORE)
    (tmp_path / "broken.py").write_text(BROKEN)
    with pytest.raises(BadInput, match=re.escape(said)):
        judged_claims([tmp_path / "results.toml"], [run])


def test_a_page_needs_no_claim_and_no_number_of_one(run: Run, tmp_path: Path):
    file = tmp_path / "results.toml"
    table = '[[table]]\nstudy = "routers"\nrows = { "Switch" = "top2" }\ncolumns = ["validation_loss"]\n'
    file.write_text(table)
    assert [one.title for one in judged_claims([file], [run])[1]] == [tmp_path.name, "Table 1"]
    elsewhere = claim(study="larger") | {"id": "H1"}
    claims_file(tmp_path, elsewhere, checks=({"of": "H1", "study": "routers", "title": "here"},))
    spec, tables = judged_claims([file], [run])[1][1].figures[0]
    assert spec.draw(tables).data[0]["y"] == ["H1, here"]
    with pytest.raises(BadInput, match="title"):
        judged_claims([file, file], [run])


def test_claims_need_a_study(tmp_path: Path):
    with pytest.raises(BadInput, match="--results"):
        judged_claims(["results.toml"], [])


# --- functions of the user


def test_a_file_may_have_the_name_of_a_library(tmp_path: Path):
    (tmp_path / "numpy.py").write_text("import numpy\ndef total():\n    return numpy.ones(2).sum()\n")
    assert load_function("numpy.py:total", tmp_path, "probe")() == 2


def test_a_probes_tables_survive_as_rows():
    frames = {
        "map": pd.DataFrame({"expert": [0, 1], "x": [0.5, math.nan]}),
        "spans": pd.DataFrame({"text": ["a", "b"], "first": [1, 2]}),
    }
    rows = pd.concat([long_rows(frames).assign(arm="top2", seed=seed) for seed in (3, 5)])
    found = probe_tables(rows)
    for name, frame in frames.items():
        mine = found[name][found[name]["seed"] == 5].drop(columns=["arm", "seed"]).reset_index(drop=True)
        pd.testing.assert_frame_equal(mine[frame.columns.to_list()], frame, check_dtype=False)


def test_a_probe_that_fails_is_one_line(tmp_path: Path):
    (tmp_path / "probe.py").write_text("def probe(*given):\n    return 1 / 0\n")
    text = SimpleNamespace(data=SimpleNamespace(validation=None), vocabulary=None)
    where = f"{tmp_path}/probe.py:probe"
    config = SimpleNamespace(train=None)
    task = SimpleNamespace(tasks="", probe=where, config=config, folder=tmp_path / "top2-seed-3")
    with pytest.raises(BadInput, match="failed on top2-seed-3"):
        probe_model(None, task, text, 2, "cpu")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("more.py", "FILE.py:FUNCTION"),
        ("no.py:f", "no such file"),
        ("more.py:f", "no function f"),
        ("bad.py:f", "boom"),
    ],
)
def test_a_function_that_is_not_there_is_named(tmp_path: Path, place: str, said: str):
    (tmp_path / "more.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_text("raise ValueError('boom')\n")
    with pytest.raises(BadInput, match=said):
        load_function(place, tmp_path, "sections")
