"""Plans as files: what is written comes back, and what cannot be meant is rejected in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from checkpoints import tiny_checkpoint
from moescope.checkpoint import open_checkpoint
from moescope.compression.plan import LayerFit, check_same_checkpoint, checkpoint_mark, read_plan, write_plan
from moescope.errors import BadInput
from moescope.types import LayerPlan, Plan

MERGED = LayerPlan(3, 4, ((0, 2), (1, 3)), (2, 1), ((0.25, 0.75), (0.5, 0.5)))
PRUNED = LayerPlan(0, 4, ((1,), (3,)), (1, 3), ((1.0,), (1.0,)))
MARK: dict[str, str | None] = {"path": "/models/x", "revision": None, "header_hash": "abc"}
FOLD = Plan("m_smoe_permuted", MARK, (MERGED,), "signed", "fold", 2, {"keep": "0.5", "seed": 0})
SLICE = Plan("reap", MARK, (PRUNED, replace(PRUNED, layer=1)), "none", "slice", None, {"keep": "2"})
FIT = LayerFit(
    torch.randn(2, 8), torch.randn(2), None, {0: torch.tensor([2, 0, 1])}, {0: torch.tensor([1, -1, 1])}
)


def test_a_plan_with_fitted_arrays_comes_back_as_it_was_written(tmp_path):
    write_plan(tmp_path, FOLD, {3: FIT})
    plan, fits = read_plan(tmp_path / "plan.json")
    assert plan == FOLD
    assert set(fits) == {3}
    assert torch.equal(fits[3].router_KD, FIT.router_KD)
    assert torch.equal(fits[3].router_bias_K, FIT.router_bias_K)
    assert fits[3].correction_bias_K is None
    assert fits[3].orders[0].tolist() == [2, 0, 1]
    assert fits[3].orders[0].dtype == torch.int32
    assert fits[3].signs[0].tolist() == [1, -1, 1]
    assert fits[3].signs[0].dtype == torch.int8


def test_a_plan_without_arrays_is_one_file_with_one_line_a_layer_and_is_found_by_its_folder(tmp_path):
    write_plan(tmp_path, SLICE, {})
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    assert read_plan(tmp_path) == (SLICE, {})
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert sum('"groups"' in line for line in lines) == 2


def test_experts_in_no_group_are_the_dropped_ones(tmp_path):
    write_plan(tmp_path, SLICE, {})
    assert read_plan(tmp_path)[0].layers[0].dropped == (0, 2)


def changed(layer: dict) -> dict:
    return {"layers": [{"layer": 3, "n_experts": 4, "groups": [[0, 2], [1, 3]], "dominants": [2, 1]} | layer]}


HALF = [0.5, 0.5]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed({"groups": [[0, 2], [2, 3]], "weights": [HALF, HALF]}), "expert 2 is repeated"),
        (changed({"groups": [[0, 2], [1, 9]], "weights": [HALF, HALF]}), "expert 9 of 4"),
        (changed({"groups": [[0, 2, 1, 3], []], "weights": [HALF, HALF]}), "a group without experts"),
        (changed({"dominants": [1, 1], "weights": [HALF, HALF]}), "dominant 1 is not in its group"),
        (changed({"dominants": [2], "weights": [HALF, HALF]}), "2 groups, 1 dominants and 2 lists"),
        (changed({"weights": [[0.5, 0.6], HALF]}), "sum to 1.1, not to 1"),
        (changed({"weights": [[1.0], HALF]}), "are not one non-negative number per member"),
        (
            changed({"groups": [[0], [1], [2, 3]], "dominants": [0, 1, 2], "weights": [[1], [1], HALF]}),
            "router_KD has 2 rows for 3",
        ),
        ({"router": "slice"}, "but a sliced router has no row for it"),
        ({"moescope_plan": 2}, "plan version 2 is not supported"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_rejected_when_it_is_read(tmp_path, change, said):
    write_plan(tmp_path, FOLD, {3: FIT})
    content = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(BadInput, match=r"plan.json: .*plan again") as rejected:
        read_plan(tmp_path)
    assert said in str(rejected.value)


@pytest.mark.parametrize(
    ("fit", "said"),
    [
        (replace(FIT, orders={0: torch.tensor([2, 0, 0])}), "is not a permutation"),
        (replace(FIT, signs={0: torch.tensor([1, 0, 1])}), "are not all 1 or -1"),
        (replace(FIT, router_KD=None), "no fitted router rows"),
        (replace(FIT, correction_bias_K=torch.zeros(3)), "correction_bias_K has 3 rows for 2 experts"),
    ],
)
def test_arrays_that_do_not_fit_the_plan_are_not_even_written(tmp_path, fit, said):
    with pytest.raises(BadInput) as rejected:
        write_plan(tmp_path, FOLD, {3: fit})
    assert said in str(rejected.value)
    assert not list(tmp_path.iterdir())


def test_arrays_of_another_plan_or_none_at_all_are_noticed(tmp_path):
    write_plan(tmp_path, FOLD, {3: FIT})
    (tmp_path / "other").mkdir()
    write_plan(tmp_path / "other", FOLD, {3: replace(FIT, router_KD=torch.zeros(2, 8))})
    (tmp_path / "other" / "plan.safetensors").rename(tmp_path / "plan.safetensors")
    with pytest.raises(BadInput, match="not the arrays of this plan"):
        read_plan(tmp_path)
    (tmp_path / "plan.safetensors").unlink()
    with pytest.raises(BadInput, match="arrays of the plan are missing"):
        read_plan(tmp_path)


def test_a_plan_is_carried_out_on_a_copy_and_on_no_other_checkpoint(tmp_path):
    first, copy = (open_checkpoint(tiny_checkpoint(tmp_path / name)) for name in ("a", "b"))
    second = open_checkpoint(tiny_checkpoint(tmp_path / "c", dtype=torch.bfloat16))
    plan = replace(SLICE, checkpoint=checkpoint_mark(first))
    check_same_checkpoint(plan, first)
    check_same_checkpoint(plan, copy)
    with pytest.raises(BadInput, match="made for another checkpoint"):
        check_same_checkpoint(plan, second)
