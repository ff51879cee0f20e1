"""Write a checkpoint in its own layout with merged, pruned or otherwise changed experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.files import torch_dtype
from moescope.checkpoint.source import READABLE_DTYPES
from moescope.checkpoint.writing import (
    MAX_SHARD_BYTES,
    PlannedTensor,
    StoredBytes,
    Written,
    bytes_of,
    local_files,
    write_checkpoint,
)
from moescope.errors import BadInput
from moescope.families.counts import changed_config, check_counts
from moescope.families.layout import Config
from moescope.families.reading import MoeCheckpoint
from moescope.types import ExpertStack, LayerWeights, LazyTensor, RouterState, StoredParts

if TYPE_CHECKING:
    from torch import Tensor

    Source = Tensor | Callable[[], Tensor]

PER_ROUTER = ("router_ED", "router_bias_E", "correction_bias_E")
PER_EXPERT = ("gate_EFD", "up_EFD", "down_EDF", "gate_bias_EF", "up_bias_EF", "down_bias_ED")


@dataclass(frozen=True)
class NewExpert:
    """An expert of new tensors in [out, in]; one that is a function is called when it is written."""

    gate_FD: Source
    down_DF: Source
    up_FD: Source | None = None
    gate_bias_F: Source | None = None
    up_bias_F: Source | None = None
    down_bias_D: Source | None = None

    def part(self, stack: str) -> Source | None:
        """Return the tensor for LayerWeights' stack of that name: gate_EFD -> gate_FD."""
        name, sides = stack.rsplit("_", 1)
        return getattr(self, f"{name}_{sides[1:]}")


@dataclass(frozen=True)
class NewLayer:
    """The new experts of a layer, each the number of a source expert or a NewExpert, and their router.

    Router rows and biases default to those of the source experts; new experts need them.
    """

    experts: Sequence[int | NewExpert]
    router_ED: Tensor | None = None
    router_bias_E: Tensor | None = None
    correction_bias_E: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)  # other router tensors, by name in the router
    # source experts behind each one, which for new ones must be given; default: itself; others are removed
    groups: Sequence[Sequence[int]] | None = None
    leaders: Sequence[int] | None = None  # source expert whose router part each one inherits; default: itself

    @property
    def sources(self) -> list[int]:
        return [expert if isinstance(expert, int) else -1 for expert in self.experts]


@dataclass(frozen=True)
class MoePlan:
    """What `write_moe` would write, from headers alone."""

    tensors: list[PlannedTensor]
    config: Config | None  # None: copy the source's
    excluded: tuple[str, ...]  # multi-token-prediction tensors, if config.json's expert count changes

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def write_moe(
    moe: MoeCheckpoint,
    folder: str | Path,
    layers: dict[int, NewLayer],
    top_k: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the checkpoint with those layers changed, in its layout and dtypes; copy the rest bit for bit.

    What transformers could not load raises before any work. The folder must be empty or not exist; it appears
    when complete. `progress` receives the bytes written and the total.
    """
    plan, folder_of_source = plan_moe(moe, layers, top_k), local_files(moe.checkpoint).folder
    # of a single file, the other files in its folder may be unrelated
    source = None if moe.checkpoint.one_file else folder_of_source
    config = plan.config or (moe.checkpoint.config if moe.checkpoint.one_file else None)
    return write_checkpoint(folder, plan.tensors, config, source, max_shard_bytes, progress)


def plan_moe(moe: MoeCheckpoint, layers: dict[int, NewLayer], top_k: int | None = None) -> MoePlan:
    """Return what `write_moe` would write. All input checks happen here."""
    expected = moe.coverage.layers_expected
    if expected is not None and moe.coverage.layers_found < expected:
        raise BadInput(
            f"{moe.checkpoint.shown}: {moe.coverage.layers_found} of {expected} MoE layers are in it; give "
            "the folder of the complete checkpoint"
        )
    for layer, new in layers.items():
        check_layer(moe, layer, new)
    before = {layer: weights.n_experts for layer, weights in moe.layers.items()}
    counts = before | {layer: len(new.experts) for layer, new in layers.items()}
    check_counts(moe, counts, top_k)
    excluded = moe.extra_heads if counts != before else frozenset()
    config = changed_config(moe, counts, top_k, drop_heads=bool(excluded))
    source = StoredBytes(moe.checkpoint)
    owners = {name: layer for layer in layers for name in layer_names(moe.layers[layer])}
    tensors: list[PlannedTensor] = []
    left = dict(layers)
    for name in sorted(moe.checkpoint.stored, key=source.place):
        owner = owners.get(name)
        if owner is None and name not in excluded:
            tensors.append(source.copy(name))
        elif owner is not None and owner in left:
            tensors += layer_tensors(moe, source, owner, left.pop(owner))
    return MoePlan(tensors, config, tuple(sorted(excluded)))


def stacks_of(weights: LayerWeights) -> dict[str, ExpertStack]:
    return {name: stack for name in PER_EXPERT if (stack := getattr(weights, name)) is not None}


def layer_names(weights: LayerWeights) -> set[str]:
    """Return the names of all stored tensors of experts and router."""
    parts = [stack.stored for stack in stacks_of(weights).values() if stack.stored]
    routers = (*routers_of(weights).values(), *(state.tensor for state in weights.router_state))
    names = {part.tensor_name(expert) for part in parts for expert in range(weights.n_experts)}
    return names.union(lazy.name for lazy in routers)


def layer_tensors(
    moe: MoeCheckpoint, source: StoredBytes, layer: int, new: NewLayer
) -> Iterator[PlannedTensor]:
    """Yield the tensors of a changed layer: router, fused experts, then separate experts one by one."""
    weights, count = moe.layers[layer], len(new.experts)
    for name, lazy in routers_of(weights).items():
        info = moe.checkpoint.tensors[lazy.name]
        # a bias may be [1, E]
        shape = (*info.shape[:-1], count) if len(lazy.shape) == 1 else (count, *info.shape[1:])
        yield computed(moe, info.name, info.dtype, shape, partial(new_rows, lazy, new, name))
    for state in weights.router_state:
        lazy, shape = state.tensor, state_shape(weights, state, count)
        yield computed(moe, lazy.name, lazy.dtype, shape, partial(new_state, weights, state, new))
    stored: dict[str, dict[str, StoredParts]] = {}  # tensor -> the stacks in it, such as gate and up
    for stack, projection in stacks_of(weights).items():
        assert projection.stored is not None
        stored.setdefault(projection.stored.name, {})[stack] = projection.stored
    fused = [together for together in stored.values() if next(iter(together.values())).whole]
    separate = [together for together in stored.values() if together not in fused]
    for together in fused:
        yield fused_tensor(moe, source, layer, new, together)
    for place, expert in enumerate(new.experts):
        for together in separate:
            parts = next(iter(together.values()))
            if isinstance(expert, NewExpert):
                yield expert_tensor(moe, layer, place, expert, together)
            else:
                yield source.copy(parts.tensor_name(expert), parts.tensor_name(place))


def computed(
    moe: MoeCheckpoint,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    compute: Callable[[], Tensor],
    which: str = "",
) -> PlannedTensor:
    """Plan a tensor that is computed when it is written."""
    kind = torch_dtype(dtype)

    def chunks() -> Iterator[memoryview]:
        tensor = compute().to(kind)
        moe.checkpoint.release()
        if tensor.numel() != math.prod(shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, planned {list(shape)}")
        if not bool(tensor.isfinite().all()):
            raise BadInput(
                f"tensor {name}{which} to be written has NaN or Inf in dtype {kind}; check its source"
            )
        yield bytes_of(tensor)

    return PlannedTensor(name, dtype, shape, math.prod(shape) * kind.itemsize, chunks)


def fused_tensor(
    moe: MoeCheckpoint, source: StoredBytes, layer: int, new: NewLayer, together: dict[str, StoredParts]
) -> PlannedTensor:
    """Plan a tensor of all experts: source experts are copied, new ones computed."""
    parts, count = next(iter(together.values())), len(new.experts)
    assert parts.whole is not None
    size = source.nbytes(parts.name) // moe.layers[layer].n_experts

    def chunks() -> Iterator[memoryview]:
        for place, expert in enumerate(new.experts):
            if isinstance(expert, NewExpert):
                yield from expert_tensor(moe, layer, place, expert, together).chunks()
            else:
                yield from source.chunks(parts.name, expert * size, size)

    return PlannedTensor(parts.name, parts.dtype, parts.whole(count), count * size, chunks)


def expert_tensor(
    moe: MoeCheckpoint, layer: int, place: int, expert: NewExpert, together: dict[str, StoredParts]
) -> PlannedTensor:
    """Plan one expert's part of a stored tensor, written through the views that read it."""
    parts = next(iter(together.values()))
    name = parts.tensor_name(place)

    def compute() -> Tensor:
        import torch

        part = torch.empty(parts.shape, dtype=torch_dtype(parts.dtype))
        if sum(stored.view(part).numel() for stored in together.values()) != part.numel():
            raise ValueError(f"{name}: {', '.join(together)} do not cover it")
        for stack, stored in together.items():
            value: Any = expert.part(stack)
            tensor = value() if callable(value) else value
            check_expert_shape(moe, layer, place, stack, tensor)
            stored.view(part).copy_(tensor.detach())
            del tensor
        return part

    return computed(moe, name, parts.dtype, parts.shape, compute, f" (expert {place})")


def check_layer(moe: MoeCheckpoint, layer: int, new: NewLayer) -> None:
    if layer not in moe.layers:
        raise BadInput(
            f"{moe.checkpoint.shown}: layer {layer} is not an MoE layer; MoE layers: "
            f"{', '.join(map(str, moe.layers))}"
        )
    check_rewritable(moe, layer, len(new.experts) != moe.layers[layer].n_experts)
    weights = moe.layers[layer]
    stacks = stacks_of(weights)
    for place, expert in enumerate(new.experts):
        if not isinstance(expert, NewExpert):
            if not 0 <= expert < weights.n_experts:
                raise BadInput(
                    f"layer {layer} has no expert {expert} to keep; it has 0 to {weights.n_experts - 1}"
                )
            continue
        for stack in PER_EXPERT:
            value = expert.part(stack)
            if (value is None) != (stack not in stacks):
                raise BadInput(
                    f"layer {layer}: new expert {place} {'lacks' if value is None else 'has'} {stack}, "
                    "unlike the source; give the same"
                )
            if value is not None and not callable(value):
                check_expert_shape(moe, layer, place, stack, value)
    check_router(weights, new)


def check_expert_shape(moe: MoeCheckpoint, layer: int, place: int, stack: str, tensor: Tensor) -> None:
    wanted = stacks_of(moe.layers[layer])[stack].shape[1:]
    if tuple(tensor.shape) != tuple(wanted):
        raise BadInput(
            f"layer {layer}: {stack} of new expert {place} has shape {list(tensor.shape)}, expected "
            f"{list(wanted)}; give it as LayerWeights has it"
        )


def check_router(weights: LayerWeights, new: NewLayer) -> None:
    """Raise unless new experts have rows and biases of the right shape, and only those the source has."""
    changed = len(new.experts) != weights.n_experts or any(
        expert not in (place, -1) for place, expert in enumerate(new.sources)
    )
    if weights.router_ED is None and not weights.router_state and changed:
        raise BadInput(
            f"{weights.layer_name}: its router has no row for each expert, so experts cannot be "
            "removed or reordered; keep them all"
        )
    for part in PER_ROUTER:
        value, lazy, where = getattr(new, part), getattr(weights, part), f"layer {weights.layer}"
        if value is not None and lazy is None:
            raise BadInput(f"{where}: {part} is given, but the source has none; remove it")
        if value is None and lazy is not None and -1 in new.sources and new.leaders is None:
            raise BadInput(f"{where}: new experts need {part}, one row or value per expert; give it")
        if value is not None and tuple(value.shape) != (len(new.experts), *lazy.shape[1:]):
            raise BadInput(
                f"{where}: {part} has shape {list(value.shape)}, expected "
                f"{[len(new.experts), *lazy.shape[1:]]}; give one row per expert"
            )
    states = {short_name(weights, state.tensor.name): state for state in weights.router_state}
    for name, value in new.state.items():
        shape = state_shape(weights, states[name], len(new.experts)) if name in states else None
        if tuple(value.shape) != shape:
            raise BadInput(
                f"layer {weights.layer}: router tensor {name[:80]!r} has shape {list(value.shape)}, expected "
                f"{'none' if shape is None else list(shape)}; give the source's own"
            )


def check_rewritable(moe: MoeCheckpoint, layer: int, count_changes: bool) -> None:
    """Raise for a quantised layer, or for expert tensors that the layout does not know."""
    weights, checkpoint = moe.layers[layer], moe.checkpoint
    config = checkpoint.config or {}
    quantised = [name for name in ("quantization_config", "compression_config") if config.get(name)]
    unstored = [name for name, stack in stacks_of(weights).items() if stack.stored is None]
    names, states = layer_names(weights), {state.tensor.name for state in weights.router_state}
    packed = [
        name for name in sorted(names - states) if checkpoint.tensors[name].dtype not in READABLE_DTYPES
    ]
    if quantised or unstored or packed:
        raise BadInput(
            f"{checkpoint.shown}: layer {layer} is quantised ({(packed + quantised + unstored)[0]}) and "
            "cannot be rewritten; give a bf16 checkpoint"
        )
    shared = vars(weights.shared).values() if weights.shared else ()
    known = names | {lazy.name for lazy in shared if lazy is not None}
    stored = [stack.stored.name for stack in stacks_of(weights).values() if stack.stored]
    # the common prefixes of the names of all expert tensors
    folders = tuple(
        name.split("{e}")[0] if "{e}" in name else f"{name.rsplit('.', 1)[0]}." for name in stored
    )
    for name, info in checkpoint.tensors.items():
        inside = name.startswith(folders)
        counted = (
            count_changes and name.startswith(f"{weights.layer_name}.") and weights.n_experts in info.shape
        )
        if name not in known and (inside or counted):
            raise BadInput(
                f"{info.file}: tensor {name} {list(info.shape)} is among the experts of layer {layer} and "
                "not part of this layout, so they cannot be rewritten; remove it if it is not needed"
            )


def routers_of(weights: LayerWeights) -> dict[str, LazyTensor]:
    """Return the router's rows and biases that exist."""
    return {name: lazy for name in PER_ROUTER if (lazy := getattr(weights, name)) is not None}


def short_name(weights: LayerWeights, name: str) -> str:
    """Return a router tensor's name within the router: `weight`, `expand.bias`."""
    # gate: a replaced router
    return name.removeprefix(f"{weights.layer_name}.").removeprefix("gate.").removeprefix("router.")


def changed_router(weights: LayerWeights, new: NewLayer) -> dict[str, Tensor]:
    """Return every tensor of the new router, in the source's dtypes, by its name within the router."""
    values = {lazy.name: new_rows(lazy, new, name) for name, lazy in routers_of(weights).items()}
    values |= {state.tensor.name: new_state(weights, state, new) for state in weights.router_state}
    return {short_name(weights, name): value for name, value in values.items()}


def new_rows(lazy: LazyTensor, new: NewLayer, field_name: str) -> Tensor:
    value, rows = getattr(new, field_name), lazy.read()
    return rows[list(new.leaders or new.sources)] if value is None else value.detach().to(rows.dtype)


def new_state(weights: LayerWeights, state: RouterState, new: NewLayer) -> Tensor:
    stored = state.tensor.read()
    value = new.state.get(short_name(weights, state.tensor.name))
    if value is not None:
        return value.detach().to(stored.dtype)
    if state.kind == "experts":
        parts = stored.reshape(weights.n_experts, -1, *stored.shape[1:])
        return parts[list(new.leaders or new.sources)].flatten(0, 1)
    groups = new.groups or [(expert,) for expert in new.sources]
    return remap_hash_table(stored, groups) if state.kind == "table" else stored


def state_shape(weights: LayerWeights, state: RouterState, count: int) -> tuple[int, ...]:
    """Return the tensor's shape with `count` experts."""
    shape = state.tensor.shape
    return (shape[0] // weights.n_experts * count, *shape[1:]) if state.kind == "experts" else shape


def remap_hash_table(table_VK: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Renumber a table of experts by token id: a group has the tokens of all its members.

    Tokens of removed experts go to the others in turn, by token id, skipping experts that the token already
    has: as even over the vocabulary as before, and deterministic.
    """
    import torch

    place_of = {expert: place for place, group in enumerate(groups) for expert in group}
    turn, rows = 0, [[place_of.get(expert, -1) for expert in row] for row in table_VK.tolist()]
    for row in rows:
        for slot in [slot for slot, place in enumerate(row) if place < 0]:
            if not set(range(len(groups))) - set(row):
                raise ValueError(f"{len(groups)} experts cannot fill {len(row)} slots")
            while turn in row:
                turn = (turn + 1) % len(groups)
            row[slot], turn = turn, (turn + 1) % len(groups)
    return torch.tensor(rows, dtype=table_VK.dtype).view(table_VK.shape)
