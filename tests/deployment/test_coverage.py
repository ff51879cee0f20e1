"""Coverage: counts by hand, extrapolation against simulated text."""

from __future__ import annotations

import numpy as np
import pytest

from deployment.deployment_runs import token_trace
from moescope.deployment.coverage import coverage_tables, curve_rows


def tables_of(trace, minimum, seed=0):
    return coverage_tables(trace, minimum, seed, lambda count: None)


def test_tokens_documents_and_need_are_counted_per_domain():
    chosen_TK = np.array([[0, 1], [0, 2], [0, 1], [0, 1]])
    trace = token_trace([chosen_TK], np.array([0, 0, 1, 2]), 4, domains=("code", "prose"))
    rows = tables_of(trace, 2)["coverage"].set_index(["domain", "expert"])
    assert rows.loc["", "tokens"].tolist() == [4, 3, 1, 0]
    assert rows.loc["", "documents"].tolist() == [3, 3, 1, 0]
    assert rows.loc["", "below"].tolist() == [False, False, True, True]
    assert rows.loc["", "documents_needed"].tolist()[:3] == [2, 2, 6]
    assert np.isnan(rows.loc[("", 3), "documents_needed"])
    assert rows.loc["prose", "tokens"].tolist() == [1, 1, 0, 0]  # document 1
    assert rows.loc[("", 0), "chance"] == 2


def test_documents_without_a_domain_count_in_all_documents_only():
    chosen_TK = np.array([[0], [1], [0]])
    rows = tables_of(token_trace([chosen_TK], np.arange(3), 2, domains=("", "code", "")), 1)["coverage"]
    assert rows.groupby("domain")["tokens"].apply(list).to_dict() == {"": [2, 1], "code": [0, 1]}


def test_an_expert_without_a_token_leaves_the_need_open():
    chosen_TK = np.tile([[0]], (30, 1))
    curve = tables_of(token_trace([chosen_TK], np.repeat(np.arange(10), 3), 2), 5)["coverage_curve"]
    assert curve["needed"].isna().all()
    assert (curve["unused"] == 1).all()
    assert curve["below"].min() == 1


def test_the_curve_falls_with_documents_and_agrees_with_the_trace():
    generator = np.random.default_rng(0)
    chosen_TK = generator.choice(32, size=(40 * 25, 1), p=np.arange(1, 33) / 528)
    curve = tables_of(token_trace([chosen_TK], np.repeat(np.arange(40), 25), 32), 20)["coverage_curve"]
    curve = curve.sort_values("documents")
    assert (np.diff(curve["below"]) <= 0).all()
    here = curve[curve["documents"] == 40].iloc[0]
    assert here["below"] == (np.bincount(chosen_TK[:, 0], minlength=32) < 20).sum()
    known = curve[curve["low"].notna()]
    assert (known["low"] <= known["below"] + 1e-9).all()
    assert (known["high"] >= known["below"] - 1e-9).all()


def test_the_interval_of_the_documents_needed_covers_the_truth():
    """The rarest of 8 experts has rate 1/36: 64 tokens take 2304 tokens; 300 simulated traces."""
    generator = np.random.default_rng(1)
    covered, runs = 0, 300
    for _ in range(runs):
        counts_DX = generator.multinomial(20, np.arange(1, 9) / 36, size=50)
        row = curve_rows("", counts_DX, 64, 0)[0]
        covered += row["needed_low"] <= 64 * 36 / 20 <= row["needed_high"]
    assert covered / runs == pytest.approx(0.95, abs=3 * np.sqrt(0.95 * 0.05 / runs))
