"""Plans with bad content: one line each, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import moescope
from families.tiny_models import tiny_model
from moescope.checkpoint import open_checkpoint
from moescope.compression.method import PlanSettings
from moescope.compression.steps import Work, prepare
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe

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
