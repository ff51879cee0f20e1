"""Coverage: counts by hand, subsamples of documents."""

from __future__ import annotations

import numpy as np

from deployment.deployment_runs import token_trace
from moescope.deployment.coverage import coverage_tables


def tables_of(trace, minimum, seed=0):
    return coverage_tables(trace, minimum, seed, lambda count: None)


def test_tokens_and_documents_are_counted_per_domain():
    chosen_TK = np.array([[0, 1], [0, 2], [0, 1], [0, 1]])
    trace = token_trace([chosen_TK], np.array([0, 0, 1, 2]), 4, domains=("code", "prose"))
    rows = tables_of(trace, 2)["coverage"].set_index(["domain", "expert"])
    assert rows.loc["", "tokens"].tolist() == [4, 3, 1, 0]
    assert rows.loc["", "documents"].tolist() == [3, 3, 1, 0]
    assert rows.loc["", "below"].tolist() == [False, False, True, True]
    assert rows.loc["prose", "tokens"].tolist() == [1, 1, 0, 0]  # document 1
    assert rows.loc[("", 0), "chance"] == 2


def test_documents_without_a_domain_count_in_all_documents_only():
    chosen_TK = np.array([[0], [1], [0]])
    rows = tables_of(token_trace([chosen_TK], np.arange(3), 2, domains=("", "code", "")), 1)["coverage"]
    assert rows.groupby("domain")["tokens"].apply(list).to_dict() == {"": [2, 1], "code": [0, 1]}


def test_the_curve_falls_with_documents_and_agrees_with_the_trace():
    generator = np.random.default_rng(0)
    chosen_TK = generator.choice(32, size=(40 * 25, 1), p=np.arange(1, 33) / 528)
    curve = tables_of(token_trace([chosen_TK], np.repeat(np.arange(40), 25), 32), 20)["coverage_curve"]
    curve = curve.sort_values("documents")
    assert (np.diff(curve["below"]) <= 0).all()
    here = curve[curve["documents"] == 40].iloc[0]
    assert here["below"] == (np.bincount(chosen_TK[:, 0], minlength=32) < 20).sum()
    assert curve["documents"].tolist() == [5, 10, 20, 30, 40], "none is extrapolated"
    fewer = curve.iloc[:-1]
    assert (fewer["low"] <= fewer["below"]).all()
    assert (fewer["high"] >= fewer["below"]).all()
    assert (curve["unused"] == (np.bincount(chosen_TK[:, 0], minlength=32) == 0).sum()).all()
