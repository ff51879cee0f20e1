"""A compression plan as files: plan.json, and plan.safetensors for arrays; both are checked when loaded."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput, reason
from moescope.storage import atomic_file, check_disk
from moescope.types import LayerPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

RouterAfter = Literal["fold", "tie"]
PLAN_VERSION = 1
MATCHINGS = ("signed", "none")
ROUTERS = ("slice", "fold", "tie", "join")
PLAN_FILE, ARRAYS_FILE = "plan.json", "plan.safetensors"
WEIGHTS_SUM = 1e-6  # tolerance of the sum of a group's weights
ROUTER_ARRAYS = {"router_KD": 2, "router_bias_K": 1, "correction_bias_K": 1}  # with their dimensions
ARRAY_NAME = re.compile(
    rf"layer\.(?P<layer>\d{{1,9}})\.(?:(?P<router>{'|'.join(ROUTER_ARRAYS)})|state\.(?P<state>.{{1,200}})"
    r"|expert\.(?P<expert>\d{1,9})\.(?P<part>order_F|sign_F))"
)
ARRAY_DTYPES = {"order_F": "int32", "sign_F": "int8"}  # all others: float32
MOST_JSON_BYTES = 2**26
MOST_ARRAY_BYTES = 2**33


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


def file_of(location: str | Path, name: str) -> Path:
    """The file of that name in a run folder, or the file itself."""
    path = Path(location)
    return path / name if path.is_dir() else path


def file_identity(path: Path) -> list[Any]:
    """Path, size and time, for resuming."""
    return [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]


# --- writing


def write_plan(folder: Path, plan: Plan, fits: Fits) -> None:
    """Write plan.safetensors where there are arrays, then plan.json, which holds its hash."""
    from safetensors.torch import save

    check_plan(plan, fits, "the plan")
    digest = None
    if arrays := arrays_of(fits):
        data = save(arrays)
        digest = hashlib.sha256(data).hexdigest()
        write_synced(folder / ARRAYS_FILE, data)
    content = {"moescope_plan": PLAN_VERSION, **asdict(plan), "arrays_sha256": digest}
    # one line per layer: fully indented, 128 experts would be 400 lines per layer
    lines = ",\n".join("    " + json.dumps(layer) for layer in content.pop("layers"))
    head = json.dumps({**content, "layers": 0}, indent=2, ensure_ascii=False)
    text = head.replace('"layers": 0', f'"layers": [\n{lines}\n  ]') + "\n"
    write_synced(folder / PLAN_FILE, text.encode())


def write_synced(path: Path, content: bytes) -> None:
    check_disk(path.parent, len(content))
    with atomic_file(path) as partial:
        partial.write_bytes(content)


def arrays_of(fits: Fits) -> dict[str, Tensor]:
    arrays: dict[str, Tensor] = {}
    for layer, fit in fits.items():
        router = {name: getattr(fit, name) for name in ROUTER_ARRAYS}
        router |= {f"state.{name}": tensor for name, tensor in fit.state.items()}
        parts = {name: tensor.float() for name, tensor in router.items() if tensor is not None}
        parts |= {f"expert.{member}.order_F": order_F.int() for member, order_F in fit.orders.items()}
        parts |= {f"expert.{member}.sign_F": sign_F.char() for member, sign_F in fit.signs.items()}
        arrays |= {f"layer.{layer}.{name}": part.detach().cpu().contiguous() for name, part in parts.items()}
    return arrays


# --- reading


def read_plan(location: str | Path) -> tuple[Plan, Fits]:
    """Load a plan.json, or that of a run folder; raises where it is damaged or incomplete."""
    path = file_of(location, PLAN_FILE)
    if not path.is_file():
        raise BadInput(f"{path}: no such plan; give a plan.json, or the run folder of `moescope compress`")
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise BadInput(f"{path}: larger than {MOST_JSON_BYTES:,} bytes, so not a plan; plan again")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise BadInput(f"{path}: not valid JSON; plan again with `moescope compress`") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({reason(error)}); give another plan") from None
    if not isinstance(content, dict) or "moescope_plan" not in content:
        raise BadInput(f"{path}: not a plan of moescope; give one that `moescope compress` wrote")
    version = content["moescope_plan"]
    if type(version) is not int or version != PLAN_VERSION:
        raise BadInput(
            f"{path}: plan version {version!r:.40} is not supported, only {PLAN_VERSION}; plan again"
        )
    try:
        plan = conform(content, Plan, "the plan")
        digest = conform(content.get("arrays_sha256"), str | None, "arrays_sha256")
    except (KeyError, ValueError, OverflowError) as error:
        raise BadInput(f"{path}: {str(error)[:80]} is missing or malformed; plan again") from None
    fits = read_arrays(path.with_name(ARRAYS_FILE), digest)
    check_plan(plan, fits, str(path))
    return plan, fits


def conform(value: Any, kind: Any, place: str) -> Any:
    """Return a JSON value as the type annotated for it; KeyError or ValueError names what has another."""
    parts, hints = get_args(kind), get_type_hints(kind) if is_dataclass(kind) else {}
    if hints and type(value) is dict:
        return kind(**{name: conform(value[name], hint, f"{place}.{name}") for name, hint in hints.items()})
    if get_origin(kind) is tuple and type(value) is list:
        return tuple(conform(item, parts[0], f"{place}[{at}]") for at, item in enumerate(value))
    if get_origin(kind) is dict and type(value) is dict:
        return {key: conform(item, parts[1], f"{place}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int:  # JSON's 1 may stand for 1.0, but true for neither
        return float(value)
    if type(value) not in (parts if get_origin(kind) is UnionType else (kind,)):
        raise ValueError(f"{place} {value!r:.40}")
    return value


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
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise BadInput(f"{path}: not the arrays of this plan.json; copy both files, or plan again")
        layers: dict[int, dict[str, Any]] = {}
        with safe_open(path, "pt") as arrays:
            for name in arrays.keys():  # noqa: SIM118 (not a dict)
                add_array(layers, name, arrays.get_tensor(name))
    except (SafetensorError, ValueError) as error:
        raise BadInput(f"{path}: not the arrays of a plan ({reason(error):.120}); plan again") from None
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
    if fault := next(plan_faults(plan, fits), None):
        raise BadInput(f"{where}: {fault}; plan again")


def plan_faults(plan: Plan, fits: Fits) -> Iterator[str]:
    """What is wrong with a plan; ask for the first fault only, the next ones may follow from it."""
    words = (("matching", plan.matching, MATCHINGS), ("router", plan.router, ROUTERS))
    yield from (
        f"{word} {value!r} is none of {', '.join(known)}"
        for word, value, known in words
        if value not in known
    )
    numbers = [layer.layer for layer in plan.layers]
    if not numbers or len(set(numbers)) < len(numbers):
        yield "a layer is repeated" if numbers else "it has no layer"
    yield from (
        f"it has arrays of layer {layer}, but not the layer" for layer in sorted(set(fits) - set(numbers))
    )
    if plan.top_k is not None and plan.top_k < 1:
        yield f"top_k {plan.top_k} is not at least 1"
    for layer in plan.layers:
        faults = layer_faults(plan, layer, fits.get(layer.layer, LayerFit()))
        yield from (f"layer {layer.layer}: {fault}" for fault in faults)


def layer_faults(plan: Plan, layer: LayerPlan, fit: LayerFit) -> Iterator[str]:
    members = Counter(expert for group in layer.groups for expert in group)
    n_experts, n_groups = layer.n_experts, len(layer.groups)
    if not layer.groups or not all(layer.groups):
        yield "a group without experts"
    yield from (f"expert {expert} is repeated" for expert, count in members.items() if count > 1)
    yield from (f"expert {expert} of {n_experts}" for expert in members if not 0 <= expert < n_experts)
    if not n_groups == len(layer.dominants) == len(layer.weights):
        yield f"{n_groups} groups, {len(layer.dominants)} dominants and {len(layer.weights)} lists of weights"
    for group, dominant, weights in zip(layer.groups, layer.dominants, layer.weights, strict=True):
        shown = f"group {list(group)}"
        if dominant not in group:
            yield f"dominant {dominant} is not in its {shown}"
        if len(weights) != len(group) or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            yield f"weights {list(weights)} of {shown} are not one non-negative number per member"
        if abs(sum(weights) - 1) > WEIGHTS_SUM:
            yield f"weights of {shown} sum to {sum(weights):.6g}, not to 1"
        if plan.router == "slice" and len(group) > 1:
            yield f"{shown} is merged, but a sliced router has no row for it"
    rows = n_experts if plan.router == "tie" else n_groups
    for name, dimensions in ROUTER_ARRAYS.items():
        if (tensor := getattr(fit, name)) is not None and tensor.dim() != dimensions:
            yield f"{name} has shape {list(tensor.shape)}, not {dimensions} dimensions"
        if tensor is not None and len(tensor) != rows:
            yield f"{name} has {len(tensor)} rows for {rows} experts"
    yield from (
        f"{name} has {len(tensor)} entries for {n_groups} experts"
        for name, tensor in fit.state.items()
        if len(tensor) != n_groups
    )
    if plan.router == "fold" and fit.router_KD is None and n_groups < n_experts:
        yield "no fitted router rows in the arrays"
    strangers = sorted({*fit.orders, *fit.signs} - set(members))
    yield from (f"neurons of expert {expert} are ordered, but it is in no group" for expert in strangers)
    for member, order_F in fit.orders.items():
        if order_F.dim() != 1 or sorted(order_F.tolist()) != list(range(len(order_F))):
            yield f"the order of expert {member}'s neurons is not a permutation"
    for member, sign_F in fit.signs.items():
        if member not in fit.orders or sign_F.shape != fit.orders[member].shape:
            yield f"the signs of expert {member}'s neurons are not one per neuron of its order"
        if not bool((sign_F.abs() == 1).all()):
            yield f"the signs of expert {member}'s neurons are not all 1 or -1"
