"""How many experts stay, which, and what is rejected from headers alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpoints import edit_json
from compression.tiny_plans import saved
from families.tiny_models import tiny_model
from moescope.checkpoint import open_checkpoint
from moescope.compression.calibration import Gating, LayerStates
from moescope.compression.method import Evidence, PlanSettings
from moescope.compression.methods import METHODS, method_named
from moescope.compression.plan import check_plan, checkpoint_mark
from moescope.compression.pruning import (
    ean,
    frequency,
    gate_scales,
    gate_weight,
    keep_best,
    keep_counts,
    random_scores,
    read_keep,
    reap,
)
from moescope.errors import BadInput
from moescope.execution.scoring import Scoring
from moescope.families import read_moe
from moescope.types import LayerPlan, Plan


@pytest.mark.parametrize(
    ("keep", "share", "count"),
    [
        ("0.5", 0.5, None),
        (0.25, 0.25, None),
        ("4", None, 4),
        (4, None, 4),
        ("50%", 0.5, None),
        ("1", None, 1),
        (1.0, 1.0, None),
        ("1e-1", 0.1, None),
    ],
)
def test_keep_is_a_share_where_it_has_a_point_and_a_number_where_it_has_none(keep, share, count):
    assert read_keep(keep) == (share, count)


@pytest.mark.parametrize("keep", ["half", "", "0.0", "1.5", "-0.5", "nan"])
def test_what_is_neither_a_share_nor_a_number_is_rejected(keep):
    with pytest.raises(BadInput, match=r"^keep"):
        read_keep(keep)


def test_a_share_is_rounded_to_whole_experts_of_every_layer(tmp_path):
    _, moe = saved(tmp_path / "model", "mixtral")
    assert set(keep_counts(moe, 0.5, merges=False).values()) == {2}
    assert set(keep_counts(moe, "0.7", merges=False).values()) == {3}
    assert keep_counts(moe, 4, merges=False) == dict.fromkeys(moe.layers, 4)
    assert set(keep_counts(moe, 1, merges=True).values()) == {1}, "merging may lower top_k"


def test_keeping_fewer_than_a_token_goes_to_is_rejected_with_the_nearest_possible_number(tmp_path):
    _, moe = saved(tmp_path / "model", "mixtral")
    with pytest.raises(
        BadInput,
        match="keep 1: leaves 1 of 4 experts in layer 0, but a token is routed to 2; nearest possible: 2",
    ):
        keep_counts(moe, 1, merges=False)
    with pytest.raises(BadInput, match="layer 0 has 4 experts; give a number from 2 to 4"):
        keep_counts(moe, 5, merges=False)
    with pytest.raises(BadInput, match="give a number from 1 to 4"):
        keep_counts(moe, 0, merges=True)


def test_groups_that_do_not_divide_are_rejected_with_the_nearest_possible_numbers(tmp_path):
    folder = tiny_model("deepseek_v3").save(tmp_path / "model", "saved")
    edit_json(folder / "config.json", n_group=2, topk_group=1)
    moe = read_moe(open_checkpoint(folder))
    with pytest.raises(
        BadInput, match=r"3 experts in layer 2 cannot be routed in 2 groups .*; nearest possible: 4"
    ):
        keep_counts(moe, 3, merges=False)
    with pytest.raises(BadInput, match="nearest possible: 4"):
        keep_counts(moe, 3, merges=True)
    assert set(keep_counts(moe, 4, merges=False).values()) == {4}


def test_the_lowest_go_ties_keep_the_first_and_the_rest_stay_in_order(tmp_path):
    _, moe = saved(tmp_path / "model", "mixtral")
    scores = {layer: np.array([0.2, 0.9, 0.2, 0.5]) for layer in moe.layers}
    plans = keep_best(dict.fromkeys(moe.layers, 3), scores, moe)
    assert {plan.groups for plan in plans} == {((0,), (1,), (3,))}
    assert {plan.dropped for plan in plans} == {(2,)}
    check_plan(Plan("reap", checkpoint_mark(moe.checkpoint), plans, "none", "slice", None, {}), {}, "it")


def test_random_pruning_is_nested_differs_by_seed_and_by_layer_and_needs_no_text(tmp_path):
    _, moe = saved(tmp_path / "model", "mixtral")

    def kept(count: int, seed: int) -> list[set[int]]:
        given = Evidence(moe, dict.fromkeys(moe.layers, count), PlanSettings(seed))
        return [set(layer.dominants) for layer in method_named("random").propose(given).layers]

    assert kept(2, 0) == kept(2, 0)
    assert all(two <= three for two, three in zip(kept(2, 0), kept(3, 0), strict=True))
    assert len({tuple(map(tuple, kept(2, seed))) for seed in range(8)}) > 4
    assert not method_named("random").needs_text
    many = [random_scores(moe, seed)[min(moe.layers)].argmax() for seed in range(400)]
    np.testing.assert_allclose(np.bincount(many, minlength=4) / 400, 0.25, atol=0.08)


def test_every_method_is_named_once_and_an_unknown_one_is_rejected_with_the_list():
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names)
    assert [method.score for method in METHODS[:4]] == [frequency, gate_weight, ean, reap]
    controls = {method.name: method.control for method in METHODS}
    assert {name for name in names if controls[name] == "random_merge"} == {*names[5:]}
    assert {method_named(control).needs_text for control in controls.values()} == {False}
    with pytest.raises(
        BadInput,
        match=r"unknown method 'reep'; did you mean 'reap'\? known: frequency, gate_weight, ean",
    ):
        method_named("reep")


def test_gates_that_are_not_renormalised_grow_by_the_probability_that_was_dropped():
    p_TE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.5, 0.3]])
    states = {
        0: LayerStates(
            torch.zeros(2, 1),
            p_TE.log(),
            torch.tensor([[0], [2]]),
            torch.tensor([[0.4], [0.5]]),
            torch.arange(2),
        )
    }
    layers = (LayerPlan(0, 4, ((0,), (1,), (2,)), (0, 1, 2), ((1.0,),) * 3),)
    as_they_are = Gating(Scoring("softmax"), 1, False, 1.0, True)
    after = (0.4 / 0.9 + 0.5 / 0.7) / 2  # expert 3 is gone: its 0.1 and 0.3 go to the others
    assert gate_scales(layers, states, {0: as_they_are}) == pytest.approx([after / 0.45])
    assert gate_scales(layers, states, {0: replace(as_they_are, normalised=True)}) == [1.0]
    assert gate_scales(layers, states, {0: replace(as_they_are, explains=False)}) == []
    assert gate_scales(layers, {}, {}) == []


@pytest.mark.parametrize(("kind", "said"), [("olmoe", True), ("mixtral", False)])
def test_a_pruned_family_that_does_not_renormalise_gates_says_by_how_much_they_grow(tmp_path, kind, said):
    import moescope
    from moescope.compression.plan import read_plan

    saved(tmp_path / "model", kind)
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 60, (20, 16)))
    run = moescope.compress(
        tmp_path / "model",
        method="reap",
        keep=2,
        token_ids=tmp_path / "ids.npy",
        out=tmp_path / "run",
        judge=False,
        controls=0,
        quiet=True,
    )
    words = [warning for warning in run.info["warnings"] if "not renormalised" in warning]
    assert len(words) == said
    grown = read_plan(run.path)[0].settings["gate_scale"]
    assert grown > 1.05 if said else grown == 1
