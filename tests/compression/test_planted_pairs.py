"""A trained model with planted twins: who finds them, and what merging or pruning them costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compression.planted_pairs import PAIRS, Planted, perplexity
from moescope.checkpoint import open_checkpoint
from moescope.compression.plan import read_plan
from moescope.families import read_moe
from moescope.run import Run

GROUPS = ((0, 6), (1, 7), (2,), (3,), (4,), (5,))


def loaded(folder: Path) -> Any:
    """The written checkpoint as transformers loads it.

    A weight that is missing, left over or of another shape fails.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def groups(run: Run, layer: int) -> tuple[tuple[int, ...], ...]:
    rows = run.table("clusters").query("layer == @layer")
    return tuple(sorted(tuple(int(e) for e in group) for _, group in rows.groupby("cluster")["expert"]))


def change(planted: Planted, folder: Path) -> float:
    """Perplexity of the written model on held-out text, relative to the planted one's."""
    return perplexity(loaded(folder), planted.held_out) / planted.perplexity - 1


JUDGED = {"judge": True, "controls": 2}


def keeps_within_one_percent(planted: Planted, run: Run, folder: Path, method: str) -> None:
    for layer in range(2):
        assert groups(run, layer) == GROUPS
    assert abs(change(planted, folder)) < 0.01
    whole = run.table("damage").query("layer.isna()").set_index("method")
    assert whole.loc[method, "perplexity"] == pytest.approx(
        whole.loc[method, "perplexity_original"], rel=0.01
    )
    at_random = whole.drop(index=method)
    assert len(at_random) == 2
    assert (at_random["perplexity"] > 1.05 * at_random["perplexity_original"]).all()
    assert (at_random["js_divergence"] > 10 * whole.loc[method, "js_divergence"]).all()
    layers = run.table("damage").query("layer.notna()")
    own = layers[layers["method"] == method]
    assert own["predicted_error"].to_numpy() == pytest.approx(own["measured_error"].to_numpy(), abs=0.03)
    at_random = layers[layers["method"] != method].groupby("layer")["measured_error"].min()
    assert (own.set_index("layer")["measured_error"] < at_random / 2).all()


def test_m_smoe_permuted_finds_the_twins_and_merging_them_keeps_the_perplexity(planted, compressed):
    keeps_within_one_percent(planted, *compressed(planted, "m_smoe_permuted", **JUDGED), "m_smoe_permuted")


def test_weights_alone_find_the_twins_and_merging_them_keeps_the_perplexity(planted, compressed):
    keeps_within_one_percent(planted, *compressed(planted, "weights", **JUDGED), "weights")


@pytest.mark.slow
def test_mean_outputs_find_the_twins_but_merging_without_matching_costs(one_planted, compressed):
    run, plain = compressed(one_planted, "hc_smoe")
    assert groups(run, 0) == groups(run, 1) == GROUPS
    assert change(one_planted, plain) > 0.03
    _, matched = compressed(one_planted, "hc_smoe_permuted")
    assert abs(change(one_planted, matched)) < 0.01


def test_matching_undoes_the_planted_permutation_and_signs(planted, compressed):
    plan, fits = read_plan(compressed(planted, "m_smoe_permuted", **JUDGED)[0].path)
    for layer in plan.layers:
        for original, copy in PAIRS:
            disguise = planted.disguises[layer.layer, copy]
            fit = fits[layer.layer]
            member = copy if copy in fit.orders else original
            order, sign = fit.orders[member].long(), fit.signs[member].float()
            if member == copy:  # place p of the copy holds neuron disguise.order[p] of the original
                back, flips = disguise.order_F[order], disguise.sign_F[order] * sign
            else:
                back, flips = disguise.order_F.argsort()[order], disguise.sign_F * sign
            assert torch.equal(back, torch.arange(len(order)))
            assert bool((flips == 1).all())


def test_without_a_text_the_twins_are_merged_and_their_rows_averaged(one_planted, compressed):
    run, folder = compressed(one_planted, "weights", text=False)
    assert groups(run, 0) == groups(run, 1) == GROUPS
    assert any("merge weights are uniform" in said for said in run.info["warnings"])
    assert any("no text was given to fit them on" in said for said in run.info["warnings"])
    rows = read_moe(open_checkpoint(one_planted.folder)).layers[0].router_ED.read()
    new = read_moe(open_checkpoint(folder)).layers[0].router_ED.read()
    assert new[0].numpy() == pytest.approx((rows[0] + rows[6]).numpy() / 2, abs=1e-6)
    assert change(one_planted, folder) < 0.05


def test_the_written_experts_are_the_plan_s_weighted_sums(one_planted, compressed):
    run, written = compressed(one_planted, "m_smoe_permuted", **JUDGED)
    plan, fits = read_plan(run.path)
    old, new = (read_moe(open_checkpoint(folder)).layers[1] for folder in (one_planted.folder, written))
    group, shares = plan.layers[1].groups[0], plan.layers[1].weights[0]
    total = 0
    for member, share in zip(group, shares, strict=True):
        down = old.down_EDF.read(member)
        if member in fits[1].orders:
            down = down[:, fits[1].orders[member].long()] * fits[1].signs[member]
        total = total + share * down
    assert new.down_EDF.read(0).numpy() == pytest.approx(total.numpy(), abs=1e-6)
    assert torch.equal(new.down_EDF.read(2), old.down_EDF.read(2))
    assert new.router_ED.read().numpy() == pytest.approx(fits[1].router_KD.numpy(), abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("method", ["m_smoe_permuted", "weights"])
def test_other_seeds_agree(seed, method, planted_of, compressed):
    planted = planted_of(seed)
    keeps_within_one_percent(planted, *compressed(planted, method, **JUDGED), method)


# --- pruning: of two twins one can go, and every saliency sees that where chance does not


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
