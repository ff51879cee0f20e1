"""The numbers of the page "Results" against cases worked by hand and scipy's own tests."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import paper_results as results
import pytest
from paper_cases import mixed_documents, rare_experts, turnover
from scipy import stats

from lab.shared_claims import layers, study

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
