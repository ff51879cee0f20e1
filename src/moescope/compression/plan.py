"""A compression plan as files: plan.json, and plan.safetensors for arrays; both are checked when loaded."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from moescope.checkpoint import Checkpoint
from moescope.checkpoint.files import first_line
from moescope.errors import BadInput
from moescope.storage import atomic_file, check_disk, is_anonymous, reason, without_absolute_paths
from moescope.types import LayerPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

MergeWeights = Literal["usage", "uniform", "dominant", "saliency"]
RouterAfter = Literal["fold", "tie"]
PLAN_VERSION = 1
MATCHINGS = ("signed", "unsigned", "none")
ROUTERS = ("slice", "fold", "tie", "join")
PLAN_FILE, ARRAYS_FILE = "plan.json", "plan.safetensors"
WEIGHTS_SUM = 1e-6  # tolerance of the sum of a group's weights
ROUTER_ARRAYS = {"router_KD": 2, "router_bias_K": 1, "correction_bias_K": 1}  # with their dimensions
ARRAY_NAME = re.compile(
    rf"layer\.(?P<layer>\d{{1,9}})\.(?:(?P<router>{'|'.join(ROUTER_ARRAYS)})|state\.(?P<state>.{{1,200}})"
    r"|expert\.(?P<expert>\d{1,9})\.(?P<part>order_F|sign_F))"
)
ARRAY_DTYPES = {"order_F": "int32", "sign_F": "int8"}  # all others: float32
MOST_COUNTED = 10**9
MOST_JSON_BYTES = 2**26
MOST_ARRAY_BYTES = 2**33
Value = TypeVar("Value")


@dataclass(frozen=True)
class LayerFit:
    """The arrays of one layer's plan: a fitted router, and the order of members' neurons.

    Neuron p of the dominant is neuron `orders[member][p]` of the member, with up and down times
    `signs[member][p]`.
    """

    router_KD: Tensor | None = None
    router_bias_K: Tensor | None = None
    correction_bias_K: Tensor | None = None
    orders: Mapping[int, Tensor] = field(default_factory=dict)
    signs: Mapping[int, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)  # other tensors, by name within the router


Fits = dict[int, LayerFit]


def checkpoint_mark(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Address, revision and header hash: what identifies the checkpoint of a plan."""
    return {
        "path": checkpoint.address,
        "revision": checkpoint.revision,
        "header_hash": checkpoint.header_hash(),
    }


def check_same_checkpoint(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise for another checkpoint than the plan's, from headers only."""
    if plan.checkpoint.get("header_hash") != checkpoint.header_hash():
        raise BadInput(
            f"{checkpoint.shown}: the plan was made for another checkpoint ({plan.checkpoint.get('path')}), "
            "or its files changed since; give that checkpoint, or plan again"
        )


def plan_identity(location: str | Path | None) -> list[Any] | None:
    """Path, size and time of a plan file, for resuming."""
    if location is None:
        return None
    path = Path(location)
    path = path / PLAN_FILE if path.is_dir() else path
    return [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]


# --- writing


def write_plan(folder: Path, plan: Plan, fits: Fits) -> Path:
    """Write plan.safetensors where there are arrays, then plan.json, which holds its hash."""
    check_plan(plan, fits, "the plan")
    arrays = arrays_of(fits)
    digest = None
    if arrays:
        from safetensors.torch import save

        content = save(arrays)
        digest = hashlib.sha256(content).hexdigest()
        write_synced(folder / ARRAYS_FILE, content)
    content_json = {"moescope_plan": PLAN_VERSION, **asdict(plan), "arrays_sha256": digest}
    if is_anonymous():
        content_json |= {
            name: without_absolute_paths(content_json[name]) for name in ("checkpoint", "settings")
        }
    write_synced(folder / PLAN_FILE, (to_json(content_json) + "\n").encode())
    return folder / PLAN_FILE


def to_json(content: dict[str, Any]) -> str:
    """JSON with one line per layer: fully indented, 128 experts would be 400 lines per layer."""
    layers = content.pop("layers")
    head = json.dumps({**content, "layers": 0}, indent=2, ensure_ascii=False)
    lines = ",\n".join("    " + json.dumps(layer) for layer in layers)
    return head.replace('"layers": 0', f'"layers": [\n{lines}\n  ]')


def write_synced(path: Path, content: bytes) -> None:
    check_disk(path.parent, len(content))
    with atomic_file(path) as partial:
        partial.write_bytes(content)


def arrays_of(fits: Fits) -> dict[str, Tensor]:
    import torch

    arrays: dict[str, Tensor] = {}

    def add(name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> None:
        arrays[name] = tensor.detach().to("cpu", dtype).contiguous()

    for layer, fit in fits.items():
        for name in ROUTER_ARRAYS:
            if (tensor := getattr(fit, name)) is not None:
                add(f"layer.{layer}.{name}", tensor)
        for name, tensor in fit.state.items():
            add(f"layer.{layer}.state.{name}", tensor)
        for member, order_F in fit.orders.items():
            add(f"layer.{layer}.expert.{member}.order_F", order_F, torch.int32)
        for member, sign_F in fit.signs.items():
            add(f"layer.{layer}.expert.{member}.sign_F", sign_F, torch.int8)
    return arrays


# --- reading


def read_plan(location: str | Path) -> tuple[Plan, Fits]:
    """Load a plan.json, or that of a run folder; raises where it is damaged or incomplete."""
    path = Path(location)
    path = path / PLAN_FILE if path.is_dir() else path
    if not path.is_file():
        raise BadInput(f"{path}: no such plan; give a plan.json, or the run folder of `moescope compress`")
    content = read_json(path)
    if not isinstance(content, dict) or "moescope_plan" not in content:
        raise BadInput(f"{path}: not a plan of moescope; give one that `moescope compress` wrote")
    version = content["moescope_plan"]
    if type(version) is not int or version != PLAN_VERSION:
        shown = repr(version)[:40]
        raise BadInput(f"{path}: plan version {shown} is not supported, only {PLAN_VERSION}; plan again")
    try:
        plan = plan_from_json(content)
        digest = optional(text, content.get("arrays_sha256"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: {str(error)[:80]} is missing or malformed; plan again") from None
    fits = read_arrays(path.with_name(ARRAYS_FILE), digest)
    check_plan(plan, fits, str(path))
    return plan, fits


def read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise BadInput(f"{path}: larger than {MOST_JSON_BYTES:,} bytes, so not a plan; plan again")
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise BadInput(f"{path}: not valid JSON; plan again with `moescope compress`") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({reason(error)}); give another plan") from None


def plan_from_json(content: dict[str, Any]) -> Plan:
    layers = [
        LayerPlan(
            whole(layer["layer"]),
            whole(layer["n_experts"]),
            tuple(tuple(whole(expert) for expert in group) for group in layer["groups"]),
            tuple(whole(expert) for expert in layer["dominants"]),
            tuple(tuple(real(weight) for weight in group) for group in layer["weights"]),
        )
        for layer in content["layers"]
    ]
    checkpoint = {text(key): optional(text, value) for key, value in content["checkpoint"].items()}
    settings = {text(key): scalar(value) for key, value in content["settings"].items()}
    router, matching, top_k = text(content["router"]), text(content["matching"]), content["top_k"]
    return Plan(
        text(content["method"]), checkpoint, tuple(layers), matching, router, optional(whole, top_k), settings
    )


def optional(kind: Callable[[Any], Value], value: Any) -> Value | None:
    return None if value is None else kind(value)


def whole(value: Any) -> int:
    """The value if it is a whole number that can count experts; JSON's true and 1.0 are none."""
    if type(value) is not int or abs(value) > MOST_COUNTED:
        raise ValueError(f"the whole number {value!r:.40}")
    return value


def real(value: Any) -> float:
    if type(value) is float or (type(value) is int and abs(value) <= MOST_COUNTED):
        return float(value)
    raise ValueError(f"the number {value!r:.40}")


def text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"the text {value!r:.40}")
    return value


def scalar(value: Any) -> str | int | float | bool | None:
    if value is not None and type(value) not in (str, bool, int, float):
        raise ValueError(f"the setting {value!r:.40}")
    scalar_value: str | int | float | bool | None = value
    return scalar_value


def read_arrays(path: Path, digest: str | None) -> Fits:
    if digest is None:
        return {}
    if not path.is_file():
        raise BadInput(f"{path}: the arrays of the plan are missing; copy both files, or plan again")
    from safetensors import SafetensorError, safe_open

    try:
        if path.stat().st_size > MOST_ARRAY_BYTES:
            raise BadInput(f"{path}: larger than {MOST_ARRAY_BYTES:,} bytes, so not of a plan; plan again")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            raise BadInput(f"{path}: not the arrays of this plan.json; copy both files, or plan again")
        layers: dict[int, dict[str, Any]] = {}
        with safe_open(path, "pt") as arrays:
            for name in arrays.keys():  # noqa: SIM118 (not a dict)
                add_array(layers, name, arrays.get_tensor(name))
    except (SafetensorError, ValueError) as error:
        why = first_line(error)[:120]
        raise BadInput(f"{path}: not the arrays of a plan ({why}); plan again") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({reason(error)}); plan again") from None
    return {layer: LayerFit(**parts) for layer, parts in layers.items()}


def add_array(layers: dict[int, dict[str, Any]], name: str, tensor: Tensor) -> None:
    """Put an array where `LayerFit` has it; ValueError for a name, type or number that no plan has."""
    if (match := ARRAY_NAME.fullmatch(name)) is None:
        raise ValueError(f"{name[:40]!r} is no array of a plan")
    dtype = ARRAY_DTYPES.get(match["part"] or "", "float32")
    if str(tensor.dtype) != f"torch.{dtype}" or tensor.dim() < 1:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name[:40]} has type {kind} and shape {list(tensor.shape)}, expected {dtype}")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name[:40]} has a number that is not finite")
    parts = layers.setdefault(int(match["layer"]), {"state": {}, "orders": {}, "signs": {}})
    if match["router"]:
        parts[match["router"]] = tensor
    elif match["state"]:
        parts["state"][match["state"]] = tensor
    else:
        parts["orders" if match["part"] == "order_F" else "signs"][int(match["expert"])] = tensor


# --- checks


def check_plan(plan: Plan, fits: Fits, where: str) -> None:
    """Raise for invalid plans: repeated experts, wrong dominants, weights or array shapes."""
    for word, value, known in (("matching", plan.matching, MATCHINGS), ("router", plan.router, ROUTERS)):
        if value not in known:
            raise BadInput(f"{where}: {word} {value!r} is none of {', '.join(known)}; plan again")
    numbers = [layer.layer for layer in plan.layers]
    if not numbers or len(set(numbers)) < len(numbers):
        raise BadInput(f"{where}: {'a layer is repeated' if numbers else 'it has no layer'}; plan again")
    if other := sorted(set(fits) - set(numbers)):
        raise BadInput(f"{where}: it has arrays of layer {other[0]}, but not the layer; plan again")
    if plan.top_k is not None and plan.top_k < 1:
        raise BadInput(f"{where}: top_k {plan.top_k} is not at least 1; plan again")
    for layer in plan.layers:
        if fault := layer_fault(plan, layer, fits.get(layer.layer, LayerFit())):
            raise BadInput(f"{where}: layer {layer.layer}: {fault}; plan again")


def layer_fault(plan: Plan, layer: LayerPlan, fit: LayerFit) -> str | None:
    members = [expert for group in layer.groups for expert in group]
    if not layer.groups or not all(layer.groups):
        return "a group without experts"
    if len(set(members)) < len(members):
        return f"expert {next(e for e in members if members.count(e) > 1)} is repeated"
    if outside := [expert for expert in members if not 0 <= expert < layer.n_experts]:
        return f"expert {outside[0]} of {layer.n_experts}"
    if not len(layer.groups) == len(layer.dominants) == len(layer.weights):
        counts = (len(layer.groups), len(layer.dominants), len(layer.weights))
        return "{} groups, {} dominants and {} lists of weights".format(*counts)
    for group, dominant, weights in zip(layer.groups, layer.dominants, layer.weights, strict=True):
        if dominant not in group:
            return f"dominant {dominant} is not in its group {list(group)}"
        if len(weights) != len(group) or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            return (
                f"weights {list(weights)} of group {list(group)} are not one non-negative number per member"
            )
        if abs(sum(weights) - 1) > WEIGHTS_SUM:
            return f"weights of group {list(group)} sum to {sum(weights):.6g}, not to 1"
        if plan.router == "slice" and len(group) > 1:
            return f"group {list(group)} is merged, but a sliced router has no row for it"
    for name, dimensions in ROUTER_ARRAYS.items():
        tensor = getattr(fit, name)
        if tensor is not None and tensor.dim() != dimensions:
            return f"{name} has shape {list(tensor.shape)}, not {dimensions} dimensions"
        rows = layer.n_experts if plan.router == "tie" else len(layer.groups)
        if tensor is not None and tensor.shape[0] != rows:
            return f"{name} has {tensor.shape[0]} rows for {rows} experts"
    for name, tensor in fit.state.items():
        if tensor.shape[0] != len(layer.groups):
            return f"{name} has {tensor.shape[0]} entries for {len(layer.groups)} experts"
    if plan.router == "fold" and fit.router_KD is None and len(layer.groups) < layer.n_experts:
        return "no fitted router rows in the arrays"
    if strangers := sorted({*fit.orders, *fit.signs} - set(members)):
        return f"neurons of expert {strangers[0]} are ordered, but it is in no group"
    for member, order_F in fit.orders.items():
        if order_F.dim() != 1 or sorted(order_F.tolist()) != list(range(len(order_F))):
            return f"the order of expert {member}'s neurons is not a permutation"
    for member, sign_F in fit.signs.items():
        if member not in fit.orders or sign_F.shape != fit.orders[member].shape:
            return f"the signs of expert {member}'s neurons are not one per neuron of its order"
        if not bool((sign_F.abs() == 1).all()):
            return f"the signs of expert {member}'s neurons are not all 1 or -1"
    return None
