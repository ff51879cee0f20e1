"""Plans as files: what is written comes back, and what cannot be meant is rejected in one line."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import moescope
from checkpoints import tiny_checkpoint
from families.tiny_models import tiny_model
from moescope.checkpoint import open_checkpoint
from moescope.compression.method import PlanSettings
from moescope.compression.plan import LayerFit, check_same_checkpoint, checkpoint_mark, read_plan, write_plan
from moescope.compression.steps import Work, prepare
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
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


# --- plans with bad content: one line each, and nothing left behind

Content = dict[str, Any]
Arrays = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a folded plan with matched neurons, and a pruning plan without arrays."""
    folder = tmp_path_factory.mktemp("plans")
    model = tiny_model("mixtral").save(folder / "model", "saved")
    given = {"keep": 2, "device": "cpu", "quiet": True}
    moescope.compress(model, method="weights", out=folder / "fold", **given)
    moescope.compress(model, method="random", out=folder / "slice", **given)
    return folder


@cache
def model_of(place: Path) -> MoeCheckpoint:
    return read_moe(open_checkpoint(place / "model"))


def prepared(place: Path, plan: Path) -> Work:
    """What the verb does with a plan before anything is written."""
    target = place / "nowhere"
    return prepare(model_of(place), None, None, plan, target, (), PlanSettings(), False, 0, False)


def write(place: Path, kind: str, content: Content, arrays: bytes | None = None) -> Path:
    """A copy of the plan with that content, and with those bytes as its arrays, hash included."""
    copy = place / "copy"
    copy.mkdir(exist_ok=True)
    if arrays is None and (place / kind / "plan.safetensors").exists():
        shutil.copy(place / kind / "plan.safetensors", copy)
    if arrays is not None:
        (copy / "plan.safetensors").write_bytes(arrays)
        content = {**content, "arrays_sha256": hashlib.sha256(arrays).hexdigest()}
    (copy / "plan.json").write_text(json.dumps(content))
    return copy


def content_of(place: Path, kind: str) -> Content:
    content: Content = json.loads((place / kind / "plan.json").read_text())
    return content


def arrays_of(place: Path) -> Arrays:
    return load((place / "fold" / "plan.safetensors").read_bytes())


BAD_VALUES = [
    None,
    True,
    -1,
    10**12,
    10**400,
    1.5,
    1e999,
    float("nan"),
    "",
    "two",
    [],
    {},
    [[]],
    [None],
    {"a": 1},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within nested lists and dicts."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in places(part, (*path, key)))]


def is_free(path: tuple[Any, ...], bad: Any) -> bool:
    """Whether the value is only reported, or nothing follows from it."""
    if path[0] == "checkpoint":
        return path[1:] in (("path",), ("revision",)) and (bad is None or isinstance(bad, str))
    is_seed = path == ("settings", "seed") and type(bad) is int and bad >= 0
    harmless = [("settings",), {}], [("settings",), {"a": 1}]
    return [path, bad] in harmless or path in (("settings", "keep"), ("settings", "router")) or is_seed


@pytest.mark.parametrize("kind", [pytest.param("fold", marks=pytest.mark.slow), "slice"])
def test_a_wrong_value_anywhere_in_plan_json_is_rejected(place, kind):
    """Every value of the file replaced by every bad one."""
    original = content_of(place, kind)
    tried = 0
    for path in places(original)[1:]:
        for bad in BAD_VALUES:
            content = json.loads(json.dumps(original))
            holder = content
            for key in path[:-1]:
                holder = holder[key]
            if is_free(path, bad) or json.dumps(holder[path[-1]]) == json.dumps(bad):
                continue
            holder[path[-1]] = bad
            tried += 1
            with pytest.raises(BadInput):
                prepared(place, write(place, kind, content))
                pytest.fail(f"{path} = {bad!r:.40}")
    assert tried > 500
    assert not (place / "nowhere").exists()


def in_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arrays], Arrays]:
    name = "layer.0.router_KD"
    return lambda arrays: {**arrays, name: change(arrays[name])}


def in_neurons(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arrays], Arrays]:
    def changed(arrays: Arrays) -> Arrays:
        name = next(name for name in arrays if name.endswith(part))
        return {**arrays, name: change(arrays[name])}

    return changed


def renamed(old: str, new: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {name.replace(old, new): part for name, part in arrays.items()}


@pytest.mark.parametrize(
    "change",
    [
        in_rows(lambda rows: rows.double()),
        in_rows(lambda rows: rows.to(torch.int32)),
        in_rows(lambda rows: rows * float("nan")),
        in_rows(lambda rows: rows / 0),
        in_rows(lambda rows: rows[:1]),
        in_rows(lambda rows: rows[:, :-1]),
        in_rows(lambda rows: rows[0]),
        in_rows(lambda rows: rows.sum()),
        in_rows(lambda rows: rows[:0]),
        in_rows(lambda rows: rows[None]),
        in_neurons("order_F", lambda order: order.float()),
        in_neurons("order_F", lambda order: order[:-1]),
        in_neurons("order_F", lambda order: order[None]),
        in_neurons("order_F", lambda order: order + 1),
        in_neurons("order_F", lambda order: order * 0),
        in_neurons("sign_F", lambda sign: sign[:-1]),
        in_neurons("sign_F", lambda sign: sign * 2),
        in_neurons("sign_F", lambda sign: sign.float()),
        renamed("layer.0", "layer.7"),
        renamed("layer.0", "layer.x"),
        renamed("layer.0", "layer.99999999999999999999"),
        renamed("layer.0.router_KD", "layer.0"),
        renamed("layer.0.router_KD", "layer.0.rows"),
        renamed("layer.0.router_KD", "layer.0.router_bias_K"),
        renamed("layer.0.router_KD", "layer.0.state.weight"),
        renamed(".expert.", ".expert.9"),
        renamed(".expert.", ".expert.-"),
        renamed("order_F", "order"),
        lambda arrays: {**arrays, "layer.0.state.more": torch.zeros(2)},
        lambda arrays: {**arrays, "layer.0.correction_bias_K": torch.zeros(2)},
        lambda arrays: {},
    ],
)
def test_wrong_arrays_are_rejected(place, change):
    arrays = save({name: part.contiguous() for name, part in change(arrays_of(place)).items()})
    plan = write(place, "fold", content_of(place, "fold"), arrays)
    with pytest.raises(BadInput):
        prepared(place, plan)


def test_the_undamaged_plans_are_applied(place, tmp_path):
    for kind in ("fold", "slice"):
        given = {"apply": tmp_path / kind, "out": tmp_path / f"run-{kind}", "device": "cpu", "quiet": True}
        moescope.compress(place / "model", plan=write(place, kind, content_of(place, kind)), **given)
        assert (tmp_path / kind / "config.json").exists()
    assert {name.split(".")[-1] for name in arrays_of(place)} == {"router_KD", "order_F", "sign_F"}
