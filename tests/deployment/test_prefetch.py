"""Recall of predicted experts: hand-worked places, held-out learning, a planted dependence between layers."""

from __future__ import annotations

import numpy as np
import pytest

from deployment.deployment_runs import token_trace
from deployment.plain_caches import random_tokens
from moescope.deployment.prefetch import (
    PREDICTORS,
    count_pairs,
    follow_scores,
    predicted_places,
    prefetch_table,
)
from moescope.deployment.tokens import split_tokens


def table_of(trace, seed=0):
    frame = prefetch_table(trace, split_tokens(trace.document_T, seed), lambda count: None)
    return frame.set_index(["predictor", "budget", "layer"]).sort_index()


def test_the_previous_tokens_name_the_most_recent_experts_of_the_document():
    chosen_TK = np.array([[0, 1], [2, 0], [1, 3], [4, 5], [4, 0]])
    rows = table_of(token_trace([chosen_TK], np.array([0, 0, 0, 1, 1]), 16))
    # token 1 repeats 0; token 2 repeats neither 2 nor 0, but 1 is among the last four; token 4 repeats 4
    assert rows.loc[("previous_token", 2, 0.0), ["tokens", "choices", "recall"]].tolist() == [3, 6, 2 / 6]
    assert rows.loc[("previous_token", 4, 0.0), "recall"] == 3 / 6
    assert rows.loc[("previous_token", 2, 0.0), "chance"] == 2 / 16


def test_the_mean_overlap_of_neighbouring_tokens_is_the_recall_at_k():
    generator = np.random.default_rng(0)
    chosen_TK = random_tokens(generator, 300, 3, 10)
    document_T = np.repeat(np.arange(30), 10)
    rows = table_of(token_trace([chosen_TK], document_T, 10))
    pairs = [
        (a, b)
        for a, b, same in zip(chosen_TK[:-1], chosen_TK[1:], np.diff(document_T) == 0, strict=True)
        if same
    ]
    overlap = np.mean([len(set(a) & set(b)) / 3 for a, b in pairs])
    assert rows.loc[("previous_token", 3, 0.0), "recall"] == pytest.approx(overlap)


def test_a_layer_that_copies_the_one_before_is_predicted_and_a_random_one_is_at_chance():
    generator = np.random.default_rng(1)
    first_TK = random_tokens(generator, 4000, 2, 16)
    order = generator.permutation(16)
    random_TK = random_tokens(generator, 4000, 2, 16)
    trace = token_trace([first_TK, order[first_TK], random_TK], np.repeat(np.arange(40), 100), 16)
    rows = table_of(trace)
    assert rows.loc[("previous_layer", 2, 1.0), "recall"] == 1
    by_chance = rows.loc[("previous_layer", 2, 2.0)]
    assert by_chance["recall"] == pytest.approx(2 / 16, abs=4 * np.sqrt(0.11 / 8000))
    assert by_chance["low"] < 2 / 16 < by_chance["high"]
    assert ("previous_layer", 2, 0.0) not in rows.index


def test_what_follows_in_one_document_only_is_not_learned_from_itself():
    """Each of two documents has its own order of the next layer's experts: learned elsewhere it is chance."""
    generator = np.random.default_rng(2)
    first_LTK = [random_tokens(generator, 120, 2, 16) for _ in range(60)]
    pairs = []
    for first_TK in first_LTK:
        orders = [generator.permutation(16) for _ in range(2)]
        pairs += [first_TK, np.concatenate([orders[0][first_TK[:60]], orders[1][first_TK[60:]]])]
    trace = token_trace(pairs, np.repeat([0, 1], 60), 16)
    recall = table_of(trace).xs(("previous_layer", 2))["recall"].sort_index().iloc[:-1]
    held_out = recall[recall.index % 2 == 1]
    spread = held_out.std() / np.sqrt(len(held_out))
    assert held_out.mean() == pytest.approx(2 / 16, abs=4 * spread)
    assert spread < 0.02


def test_places_follow_from_the_summed_shares():
    before_TK, chosen_TK = np.array([[0, 1], [0, 2], [1, -1]]), np.array([[0, 1], [0, 2], [1, -1]])
    pairs = count_pairs(before_TK, chosen_TK, 3, 3)
    assert pairs.tolist() == [[2, 1, 1], [1, 2, 0], [1, 0, 1]]
    scores = follow_scores(pairs, np.array([2, 2, 1]), np.array([2, 2, 1]))
    # after 0 and 1: 1 + 0.5, 0.5 + 1, 0.5: experts 0 and 1 tie, both are used twice, so 0 goes first
    assert predicted_places(scores, np.array([[0, 1]]), np.array([[1, 2]])).tolist() == [[1, 2]]
    assert predicted_places(scores, np.array([[-1, -1]]), np.array([[2, -1]])).tolist() == [[2, -1]]


def test_budgets_stop_at_the_number_of_experts():
    trace = token_trace([random_tokens(np.random.default_rng(3), 20, 4, 6)], np.arange(20), 6)
    rows = table_of(trace).loc["static_in_sample"]
    assert sorted(set(rows.index.get_level_values("budget"))) == [4, 6]
    assert rows.loc[(6, 0.0), "recall"] == 1


def test_all_predictors_are_scored_on_the_same_layers_and_tokens():
    """Of a single document on its second half; all layers together are those that have one before them."""
    generator = np.random.default_rng(5)
    first_TK = np.tile([[0, 1]], (40, 1))  # easy to name, but nothing comes before it
    later = [random_tokens(generator, 40, 2, 8) for _ in range(2)]
    chosen_LTK = [first_TK, *later]
    trace = token_trace(chosen_LTK, np.zeros(40, int), 8, probed_LTX=np.stack(chosen_LTK).astype(np.int16))
    rows = table_of(trace).xs(2, level="budget")
    together = rows[rows.index.get_level_values("layer").isna()].droplevel("layer")
    assert set(together.index) == set(PREDICTORS)
    assert (together["choices"] == 2 * 2 * 20).all()
    for predictor in PREDICTORS:
        layers = rows.loc[predictor].loc[[1.0, 2.0]]
        assert (layers["choices"] == 2 * 20).all()
        assert together.loc[predictor, "recall"] == pytest.approx(layers["recall"].mean())
    assert rows.loc[("static", 0.0), "recall"] == 1
