"""Pruning on a model whose truth is known.

Of two twins one can go, and every saliency sees that where chance does not.
"""

from __future__ import annotations

import pytest

from compression.planted_pairs import PAIRS
from moescope.compression.plan import read_plan


@pytest.mark.parametrize("method", [pytest.param("gate_weight", marks=pytest.mark.slow), "reap"])
def test_one_of_each_pair_of_twins_goes_and_almost_nothing_is_lost_where_random_pruning_loses_much(
    planted, compressed, method
):
    run, _ = compressed(planted, method, judge=True, controls=3)
    for layer in read_plan(run.path)[0].layers:
        assert sorted(
            PAIRS.index(next(pair for pair in PAIRS if expert in pair)) for expert in layer.dropped
        ) == [0, 1]
    whole = run.table("damage").query("layer.isna()").set_index("method")
    own, controls = whole.loc[method], whole.drop(method)
    assert abs(own["perplexity"] / own["perplexity_original"] - 1) < 0.015
    assert (controls["perplexity"] / own["perplexity_original"] > 1.04).all()
    assert (controls["js_divergence"] > 8 * own["js_divergence"]).all()
    layers = run.table("damage").query("layer.notna()")
    mine = layers[layers["method"] == method]
    others = layers[layers["method"] != method].groupby("layer")
    for column in ("predicted_error", "measured_error"):
        # of a single layer chance may take a twin too, so the mean of three
        assert (mine.set_index("layer")[column] < 0.7 * others[column].mean()).all()


def test_whether_a_twin_or_its_original_goes_is_told_by_its_rank_s_interval(one_planted, compressed):
    """Twins do the same on the tokens they get, so which of them scores lower is close.

    What no twin has is not.
    """
    run, _ = compressed(one_planted, "reap", judge=True, controls=3)
    rows = run.table("saliency").set_index(["layer", "expert"])
    twins = {expert for pair in PAIRS for expert in pair}
    for layer in rows.index.get_level_values("layer").unique():
        alone = rows.loc[layer].drop(index=list(twins))
        assert (alone["rank_high"] <= 6.5).all()
        assert (rows.loc[layer]["rank_low"] <= rows.loc[layer]["rank_high"]).all()
