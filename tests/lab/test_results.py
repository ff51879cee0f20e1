"""The numbers of the page "Results" against cases worked by hand and scipy's own tests."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lab.shared_results import layers, losses_of_five_seeds, study
from moescope.lab import results
from moescope.lab.report_cases import mixed_documents, rare_experts, turnover
from moescope.lab.results import Results
from moescope.lab.results_claims import hypotheses
from moescope.lab.results_conditions import settings
from moescope.lab.study_statistics import holm

EFFECTS = ("effect_load", "effect_alignment", "effect_ambiguity")


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
    share, lost, kept = mixed_documents({"study_mixed": frame.assign(arm="spectra")}, "spectra")
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
    moved = turnover({"study_usage": frame}, "spectra")
    assert moved.loc[0, "early"] == pytest.approx(0.4)  # up to step 10
    assert moved.loc[0, "late"] == pytest.approx((0.0 + 0.05 + 0.05) / 3)


def test_rare_experts_by_hand():
    tokens = [100, 100, 190, 9, 1]  # mean 80: below a tenth of it is the last alone
    frame = pd.DataFrame({"expert": range(5), "tokens": tokens, "arm": "spectra", "seed": 0, "layer": 0})
    tables = study({"spectra": [2.0]})
    tables["study_loads"] = frame.assign(domain="code")
    experts, choices = rare_experts(tables, "spectra")
    assert (experts.mean, choices.mean) == (0.2, 1 / 400)


def test_micro_batches_share_the_rows_of_a_step():
    train = {"steps": 10, "batch_size": 32, "micro_batches": 4, "sequence_length": 256, "learning_rate": 0.1}
    found = settings({"base": {"train": train}, "arms": [{"name": "top2", "overrides": {}}]})
    assert found.set_index("name")["value"].to_dict()["tokens_per_step"] == 8192
