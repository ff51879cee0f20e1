"""A plan of compression as files: plan.json for people, plan.safetensors beside it for arrays.

Checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput
from moescope.storage import check_disk, replace_synced
from moescope.types import LayerPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

PLAN_VERSION = 1
MATCHINGS = ("signed", "unsigned", "none")
ROUTERS = ("slice", "fold", "tie", "join")
PLAN_FILE, ARRAYS_FILE = "plan.json", "plan.safetensors"
WEIGHTS_SUM = 1e-6  # how far a group's weights may be from 1
ROUTER_ARRAYS = ("router_KD", "router_bias_K", "correction_bias_K")


@dataclass(frozen=True)
class LayerFit:
    """The arrays that belong to one layer's plan: a fitted router, and how members' neurons are put into the
    dominant's order.

    Neuron p of the dominant is neuron `orders[member][p]` of the member, its up and down times
    `signs[member][p]`.
    """

    router_KD: Tensor | None = None
    router_bias_K: Tensor | None = None
    correction_bias_K: Tensor | None = None
    orders: Mapping[int, Tensor] = field(default_factory=dict)
    signs: Mapping[int, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)  # what else the router keeps, by name within it


Fits = dict[int, LayerFit]


def checkpoint_mark(checkpoint: Checkpoint) -> dict[str, str | None]:
    """What a plan keeps of the checkpoint it was made for."""
    return {
        "path": checkpoint.address,
        "revision": checkpoint.revision,
        "header_hash": checkpoint.header_hash(),
    }


def check_same_checkpoint(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse another checkpoint than the plan's, from headers alone."""
    if plan.checkpoint.get("header_hash") != checkpoint.header_hash():
        raise BadInput(
            f"{checkpoint.shown}: the plan was made for another checkpoint "
            f"({plan.checkpoint.get('path')}), or its files were "
            "changed since; give that one, or plan anew"
        )


# --- writing


def write_plan(folder: Path, plan: Plan, fits: Fits) -> Path:
    """plan.json, and plan.safetensors where there are arrays.

    The JSON, which names the other's hash, comes last.
    """
    check_plan(plan, fits, "the plan")
    arrays = arrays_of(fits)
    digest = None
    if arrays:
        from safetensors.torch import save

        content = save(arrays)
        digest = hashlib.sha256(content).hexdigest()
        write_synced(folder / ARRAYS_FILE, content)
    said = {"moescope_plan": PLAN_VERSION, **asdict(plan), "arrays_sha256": digest}
    write_synced(folder / PLAN_FILE, (laid_out(said) + "\n").encode())
    return folder / PLAN_FILE


def laid_out(said: dict[str, Any]) -> str:
    """JSON with one line a layer: indented all the way, 128 experts would be 400 lines a layer."""
    layers = said.pop("layers")
    head = json.dumps({**said, "layers": 0}, indent=2, ensure_ascii=False)
    lines = ",\n".join("    " + json.dumps(layer) for layer in layers)
    return head.replace('"layers": 0', f'"layers": [\n{lines}\n  ]')


def write_synced(path: Path, content: bytes) -> None:
    check_disk(path.parent, len(content))
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    replace_synced(partial, path)


def arrays_of(fits: Fits) -> dict[str, Tensor]:
    import torch

    found: dict[str, Tensor] = {}
    for layer, fit in fits.items():
        for name in ROUTER_ARRAYS:
            if (tensor := getattr(fit, name)) is not None:
                found[f"layer.{layer}.{name}"] = tensor.detach().to("cpu", torch.float32).contiguous()
        for name, tensor in fit.state.items():
            found[f"layer.{layer}.state.{name}"] = tensor.detach().to("cpu", torch.float32).contiguous()
        for member, order_F in fit.orders.items():
            found[f"layer.{layer}.expert.{member}.order_F"] = (
                order_F.detach().to("cpu", torch.int32).contiguous()
            )
        for member, sign_F in fit.signs.items():
            found[f"layer.{layer}.expert.{member}.sign_F"] = (
                sign_F.detach().to("cpu", torch.int8).contiguous()
            )
    return found


# --- reading


def read_plan(place: str | Path) -> tuple[Plan, Fits]:
    """The plan of a plan.json, or of the run folder it lies in; refuses one that is damaged or not whole."""
    path = Path(place)
    path = path / PLAN_FILE if path.is_dir() else path
    if not path.is_file():
        raise BadInput(
            f"{path}: no such plan; give a plan.json, or the run folder that `moescope compress` wrote"
        )
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        raise BadInput(f"{path}: not valid JSON; make the plan anew with `moescope compress`") from None
    if not isinstance(said, dict) or "moescope_plan" not in said:
        raise BadInput(f"{path}: not a plan of moescope; give one that `moescope compress` wrote")
    if said["moescope_plan"] != PLAN_VERSION:
        raise BadInput(
            f"{path}: a plan of version {said['moescope_plan']}, this moescope reads "
            f"{PLAN_VERSION}; plan anew"
        )
    try:
        plan = plan_from(said)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: {str(error)[:80]} is missing or malformed; make the plan anew") from None
    fits = read_arrays(path.with_name(ARRAYS_FILE), said.get("arrays_sha256"))
    check_plan(plan, fits, str(path))
    return plan, fits


def plan_from(said: dict[str, Any]) -> Plan:
    layers = [
        LayerPlan(
            int(layer["layer"]),
            int(layer["n_experts"]),
            tuple(tuple(int(e) for e in group) for group in layer["groups"]),
            tuple(int(e) for e in layer["dominants"]),
            tuple(tuple(float(w) for w in group) for group in layer["weights"]),
        )
        for layer in said["layers"]
    ]
    top_k = said["top_k"]
    return Plan(
        str(said["method"]),
        dict(said["checkpoint"]),
        tuple(layers),
        str(said["matching"]),
        str(said["router"]),
        None if top_k is None else int(top_k),
        dict(said["settings"]),
    )


def read_arrays(path: Path, digest: str | None) -> Fits:
    if digest is None:
        return {}
    if not path.is_file():
        raise BadInput(f"{path}: the plan's arrays are not beside it; copy both files, or plan anew")
    from safetensors.torch import load

    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise BadInput(f"{path}: not the arrays that belong to this plan.json; copy both files, or plan anew")
    found: dict[int, dict[str, Any]] = {}
    for name, tensor in load(content).items():
        _, layer, *rest = name.split(".")
        own = found.setdefault(int(layer), {"state": {}, "orders": {}, "signs": {}})
        if rest[0] == "state":
            own["state"][".".join(rest[1:])] = tensor
        elif rest[0] == "expert":
            own["orders" if rest[2] == "order_F" else "signs"][int(rest[1])] = tensor
        else:
            own[rest[0]] = tensor
    return {layer: LayerFit(**own) for layer, own in found.items()}


# --- checks


def check_plan(plan: Plan, fits: Fits, where: str) -> None:
    """Refuse a plan that cannot be meant: experts twice, dominants outside their group, weights that do not
    sum to 1, arrays that
    do not fit."""
    for word, value, known in (("matching", plan.matching, MATCHINGS), ("router", plan.router, ROUTERS)):
        if value not in known:
            raise BadInput(f"{where}: {word} {value!r} is none of {', '.join(known)}; make the plan anew")
    numbers = [layer.layer for layer in plan.layers]
    if not numbers or len(set(numbers)) < len(numbers):
        raise BadInput(
            f"{where}: {'a layer stands in it twice' if numbers else 'no layer in it'}; make the plan anew"
        )
    for layer in plan.layers:
        if said := layer_fault(plan, layer, fits.get(layer.layer, LayerFit())):
            raise BadInput(f"{where}: layer {layer.layer}: {said}; make the plan anew")


def layer_fault(plan: Plan, layer: LayerPlan, fit: LayerFit) -> str | None:
    members = [expert for group in layer.groups for expert in group]
    if not layer.groups or not all(layer.groups):
        return "a group without experts"
    if len(set(members)) < len(members):
        return f"expert {next(e for e in members if members.count(e) > 1)} stands in it twice"
    if outside := [expert for expert in members if not 0 <= expert < layer.n_experts]:
        return f"expert {outside[0]} of {layer.n_experts}"
    if not len(layer.groups) == len(layer.dominants) == len(layer.weights):
        return (
            f"{len(layer.groups)} groups, {len(layer.dominants)} dominants and {len(layer.weights)} "
            "lists of weights"
        )
    for group, dominant, weights in zip(layer.groups, layer.dominants, layer.weights, strict=True):
        if dominant not in group:
            return f"dominant {dominant} is no member of its group {list(group)}"
        if len(weights) != len(group) or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            return f"weights {list(weights)} of group {list(group)} are not one number from 0 up a member"
        if abs(sum(weights) - 1) > WEIGHTS_SUM:
            return f"weights of group {list(group)} sum to {sum(weights):.6g}, not to 1"
        if plan.router == "slice" and len(group) > 1:
            return f"group {list(group)} is merged, which a sliced router has no row for"
    for name in ROUTER_ARRAYS:
        tensor = getattr(fit, name)
        rows = layer.n_experts if plan.router == "tie" else len(layer.groups)
        if tensor is not None and tensor.shape[0] != rows:
            return f"{name} has {tensor.shape[0]} rows for {rows} experts"
    for name, tensor in fit.state.items():
        if tensor.shape[0] != len(layer.groups):
            return f"{name} is of {tensor.shape[0]} experts for {len(layer.groups)}"
    if plan.router == "fold" and fit.router_KD is None and len(layer.groups) < layer.n_experts:
        return "no fitted router rows in the arrays"
    for member, order_F in fit.orders.items():
        if sorted(order_F.tolist()) != list(range(len(order_F))):
            return f"the order of expert {member}'s neurons is not a permutation"
    for member, sign_F in fit.signs.items():
        if not bool((sign_F.abs() == 1).all()):
            return f"the signs of expert {member}'s neurons are not all 1 or -1"
    return None
