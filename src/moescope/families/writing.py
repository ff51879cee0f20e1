"""Write a checkpoint in its own layout with merged, pruned or otherwise changed experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.checkpoint.source import READABLE_DTYPES
from moescope.checkpoint.writing import (
    MAX_SHARD_BYTES,
    PlannedTensor,
    StoredBytes,
    Written,
    bytes_of,
    local_files,
    torch_dtype,
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
        part: Source | None = getattr(self, f"{name}_{sides[1:]}")
        return part


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
    groups: Sequence[Sequence[int]] | None = None  # source experts behind each one; default: itself
    leaders: Sequence[int] | None = None  # source expert whose router part each one inherits; default: itself

    def router(self) -> NewRouter:
        """Return the router to write; new experts need groups and leaders."""
        sources = [expert if isinstance(expert, int) else -1 for expert in self.experts]
        values = {name: rows for name in PER_ROUTER if (rows := getattr(self, name)) is not None}
        groups = self.groups or [(expert,) for expert in sources]
        return NewRouter(groups, self.leaders or sources, {**values, **self.state})


@dataclass(frozen=True)
class NewRouter:
    """The router of the new experts.

    `groups` are the source experts behind each new one, `leaders` those whose router part it inherits unless
    `values` holds a replacement. Experts in no group are removed.
    """

    groups: Sequence[Sequence[int]]
    leaders: Sequence[int]
    values: Mapping[str, Tensor] = field(default_factory=dict)  # by LayerWeights' field or name in the router


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
    plan = plan_moe(moe, layers, top_k)
    source: Path | None = local_files(moe.checkpoint).folder
    config = plan.config
    if moe.checkpoint.one_file:  # other files in its folder may be unrelated
        source, config = None, config or moe.checkpoint.config
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
    counts = {
        layer: len(layers[layer].experts) if layer in layers else moe.layers[layer].n_experts
        for layer in moe.layers
    }
    check_counts(moe, counts, top_k)
    changed = any(count != moe.layers[layer].n_experts for layer, count in counts.items())
    excluded = moe.extra_heads if changed else frozenset()
    config = changed_config(moe, counts, top_k, drop_heads=bool(excluded))
    source = StoredBytes(moe.checkpoint)
    owners = {name: layer for layer in layers for name in layer_names(moe.layers[layer])}
    tensors: list[PlannedTensor] = []
    done: set[int] = set()
    for name in sorted(moe.checkpoint.stored, key=source.place):
        owner = owners.get(name)
        if owner is None and name not in excluded:
            tensors.append(source.copy(name))
        elif owner is not None and owner not in done:
            done.add(owner)
            tensors += layer_tensors(moe, source, owner, layers[owner])
    return MoePlan(tensors, config, tuple(sorted(excluded)))


def stacks_of(weights: LayerWeights) -> dict[str, ExpertStack]:
    return {name: stack for name in PER_EXPERT if (stack := getattr(weights, name)) is not None}


def stored_parts(weights: LayerWeights) -> dict[str, dict[str, StoredParts]]:
    """Return stored tensor -> the stacks in it, such as gate and up in gate_up_proj."""
    parts: dict[str, dict[str, StoredParts]] = {}
    for name, stack in stacks_of(weights).items():
        assert stack.stored is not None
        parts.setdefault(stack.stored.name, {})[name] = stack.stored
    return parts


def layer_names(weights: LayerWeights) -> set[str]:
    """Return the names of all stored tensors of experts and router."""
    parts = [stack.stored for stack in stacks_of(weights).values() if stack.stored]
    names = {part.tensor_name(expert) for part in parts for expert in range(weights.n_experts)}
    return names | {lazy.name for lazy in routers_of(weights).values()} | state_names(weights)


def state_names(weights: LayerWeights) -> set[str]:
    return {state.tensor.name for state in weights.router_state}


def layer_tensors(
    moe: MoeCheckpoint, source: StoredBytes, layer: int, new: NewLayer
) -> Iterator[PlannedTensor]:
    """Yield the tensors of a changed layer: router, fused experts, then separate experts one by one."""
    weights = moe.layers[layer]
    for name, lazy in routers_of(weights).items():
        yield router_tensor(moe, lazy, new, name)
    for state in weights.router_state:
        yield state_tensor(moe, weights, state, new)
    groups = stored_parts(weights)
    for together in groups.values():
        parts = next(iter(together.values()))
        if parts.whole is not None:
            yield fused_tensor(moe, source, layer, new, together, parts)
    for place, expert in enumerate(new.experts):
        for together in groups.values():
            parts = next(iter(together.values()))
            if parts.whole is not None:
                continue
            if isinstance(expert, NewExpert):
                yield expert_tensor(moe, layer, place, expert, together, parts)
            else:
                yield source.copy(parts.tensor_name(expert), parts.tensor_name(place))


def router_tensor(moe: MoeCheckpoint, lazy: LazyTensor, new: NewLayer, field_name: str) -> PlannedTensor:
    """Plan the router's rows or a bias."""
    info = moe.checkpoint.tensors[lazy.name]
    count = len(new.experts)
    # a bias may be [1, E]
    shape = (*info.shape[:-1], count) if len(lazy.shape) == 1 else (count, *info.shape[1:])
    dtype = torch_dtype(info.dtype)

    def chunks() -> Iterator[memoryview]:
        rows = new_rows(lazy, new.router(), field_name)
        moe.checkpoint.release()
        yield bytes_of(finite(rows.to(dtype), lazy.name))

    return PlannedTensor(lazy.name, info.dtype, shape, math.prod(shape) * dtype.itemsize, chunks)


def state_tensor(
    moe: MoeCheckpoint, weights: LayerWeights, state: RouterState, new: NewLayer
) -> PlannedTensor:
    """Plan another tensor of the router."""
    name, dtype = state.tensor.name, state.tensor.dtype
    shape = state_shape(weights, state, len(new.experts))

    def chunks() -> Iterator[memoryview]:
        value = new_state(weights, state, new.router())
        moe.checkpoint.release()
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {list(value.shape)}, planned {list(shape)}")
        yield bytes_of(finite(value, name))

    return PlannedTensor(name, dtype, shape, math.prod(shape) * torch_dtype(dtype).itemsize, chunks)


def fused_tensor(
    moe: MoeCheckpoint,
    source: StoredBytes,
    layer: int,
    new: NewLayer,
    together: dict[str, StoredParts],
    parts: StoredParts,
) -> PlannedTensor:
    """Plan a tensor of all experts: source experts are copied, new ones computed."""
    assert parts.whole is not None
    size = source.nbytes(parts.name) // moe.layers[layer].n_experts

    def chunks() -> Iterator[memoryview]:
        for place, expert in enumerate(new.experts):
            if isinstance(expert, NewExpert):
                yield from expert_tensor(moe, layer, place, expert, together, parts).chunks()
            else:
                yield from source.chunks(parts.name, expert * size, size)

    count = len(new.experts)
    return PlannedTensor(parts.name, parts.dtype, parts.whole(count), count * size, chunks)


def expert_tensor(
    moe: MoeCheckpoint,
    layer: int,
    place: int,
    expert: NewExpert,
    together: dict[str, StoredParts],
    parts: StoredParts,
) -> PlannedTensor:
    """Plan one expert's part of a stored tensor, written through the views that read it."""
    name, dtype = parts.tensor_name(place), torch_dtype(parts.dtype)

    def chunks() -> Iterator[memoryview]:
        import torch

        part = torch.empty(parts.shape, dtype=dtype)
        if sum(stored.view(part).numel() for stored in together.values()) != part.numel():
            raise ValueError(f"{name}: {', '.join(together)} do not cover it")
        for stack, stored in together.items():
            value = expert.part(stack)
            assert value is not None
            tensor = value() if callable(value) else value
            check_expert_shape(moe, layer, place, stack, tensor)
            stored.view(part).copy_(tensor.detach())
            del tensor
        moe.checkpoint.release()
        yield bytes_of(finite(part, f"{name} (expert {place})"))

    return PlannedTensor(name, parts.dtype, parts.shape, math.prod(parts.shape) * dtype.itemsize, chunks)


def finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise BadInput(
            f"tensor {name} to be written has NaN or Inf in dtype {tensor.dtype}; check its source"
        )
    return tensor


def check_layer(moe: MoeCheckpoint, layer: int, new: NewLayer) -> None:
    if layer not in moe.layers:
        known = ", ".join(map(str, moe.layers))
        raise BadInput(f"{moe.checkpoint.shown}: layer {layer} is not an MoE layer; MoE layers: {known}")
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
                verb = "lacks" if value is None else "has"
                raise BadInput(
                    f"layer {layer}: new expert {place} {verb} {stack}, unlike the source; give the same"
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
        expert != place for place, expert in enumerate(new.experts) if not isinstance(expert, NewExpert)
    )
    if weights.router_ED is None and not weights.router_state and changed:
        raise BadInput(
            f"{weights.layer_name}: its router has no row for each expert, so experts cannot be "
            "removed or reordered; keep them all"
        )
    lazies = routers_of(weights)
    has_new = any(isinstance(expert, NewExpert) for expert in new.experts)
    for part in PER_ROUTER:
        value = getattr(new, part)
        if value is not None and part not in lazies:
            raise BadInput(f"layer {weights.layer}: {part} is given, but the source has none; remove it")
        if value is None and part in lazies and has_new and new.leaders is None:
            raise BadInput(
                f"layer {weights.layer}: new experts need {part}, one row or value per expert; give it"
            )
        wanted = (len(new.experts), *lazies[part].shape[1:]) if part in lazies else ()
        if value is not None and tuple(value.shape) != wanted:
            raise BadInput(
                f"layer {weights.layer}: {part} has shape {list(value.shape)}, expected {list(wanted)}; give "
                "one row per expert"
            )
    states = {short_name(weights, state.tensor.name): state for state in weights.router_state}
    for name, value in new.state.items():
        shape = state_shape(weights, states[name], len(new.experts)) if name in states else None
        if shape is None or tuple(value.shape) != shape:
            wanted_shape = "none" if shape is None else list(shape)
            raise BadInput(
                f"layer {weights.layer}: router tensor {name[:80]!r} has shape {list(value.shape)}, expected "
                f"{wanted_shape}; give the source's own"
            )


def check_rewritable(moe: MoeCheckpoint, layer: int, count_changes: bool) -> None:
    """Raise for a quantised layer, or for expert tensors that the layout does not know."""
    weights, checkpoint = moe.layers[layer], moe.checkpoint
    config = checkpoint.config or {}
    quantised = [name for name in ("quantization_config", "compression_config") if config.get(name)]
    unstored = [name for name, stack in stacks_of(weights).items() if stack.stored is None]
    names = layer_names(weights)
    packed = [
        name
        for name in sorted(names - state_names(weights))
        if checkpoint.tensors[name].dtype not in READABLE_DTYPES
    ]
    if quantised or unstored or packed:
        raise BadInput(
            f"{checkpoint.shown}: layer {layer} is quantised ({(packed + quantised + unstored)[0]}) and "
            "cannot be rewritten; give a bf16 checkpoint"
        )
    shared = weights.shared
    known = names | {lazy.name for lazy in (vars(shared).values() if shared else ()) if lazy is not None}
    folders = tuple(expert_folder(stack.stored.name) for stack in stacks_of(weights).values() if stack.stored)
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


def expert_folder(name: str) -> str:
    """Return the common prefix of the names of all expert tensors."""
    return name.split("{e}")[0] if "{e}" in name else name.rsplit(".", 1)[0] + "."


def routers_of(weights: LayerWeights) -> dict[str, LazyTensor]:
    """Return the router's rows and biases that exist."""
    return {name: lazy for name in PER_ROUTER if (lazy := getattr(weights, name)) is not None}


def short_name(weights: LayerWeights, name: str) -> str:
    """Return a router tensor's name within the router: `weight`, `expand.bias`."""
    inside = name.removeprefix(f"{weights.layer_name}.").removeprefix("gate.")  # gate: a replaced router
    return inside.removeprefix("router.")


def changed_router(weights: LayerWeights, new: NewRouter) -> dict[str, Tensor]:
    """Return every tensor of the new router, in the source's dtypes, by its name within the router."""
    rows = {
        short_name(weights, lazy.name): new_rows(lazy, new, name)
        for name, lazy in routers_of(weights).items()
    }
    return rows | {
        short_name(weights, state.tensor.name): new_state(weights, state, new)
        for state in weights.router_state
    }


def new_rows(lazy: LazyTensor, new: NewRouter, field_name: str) -> Tensor:
    value, rows = new.values.get(field_name), lazy.read()
    return rows[list(new.leaders)] if value is None else value.detach().to(rows.dtype)


def new_state(weights: LayerWeights, state: RouterState, new: NewRouter) -> Tensor:
    stored = state.tensor.read()
    value = new.values.get(short_name(weights, state.tensor.name))
    if value is not None:
        return value.detach().to(stored.dtype)
    if state.kind == "experts":
        return stored.reshape(weights.n_experts, -1, *stored.shape[1:])[list(new.leaders)].flatten(0, 1)
    return remap_hash_table(stored, new.groups, weights.n_experts) if state.kind == "table" else stored


def state_shape(weights: LayerWeights, state: RouterState, count: int) -> tuple[int, ...]:
    """Return the tensor's shape with `count` experts."""
    shape = state.tensor.shape
    return (shape[0] // weights.n_experts * count, *shape[1:]) if state.kind == "experts" else shape


def remap_hash_table(table_VK: Tensor, groups: Sequence[Sequence[int]], n_experts: int) -> Tensor:
    """Renumber a table of experts by token id: a group has the tokens of all its members.

    Tokens of removed experts go to the others in turn, by token id, skipping experts that the token already
    has: as even over the vocabulary as before, and deterministic.
    """
    import torch

    place_E = torch.full((n_experts,), -1, dtype=table_VK.dtype)
    for place, group in enumerate(groups):
        place_E[list(group)] = place
    table = place_E[table_VK.long()]
    turn, rows = 0, table.tolist()
    for row in rows:
        for slot, expert in enumerate(row):
            if expert >= 0:
                continue
            if not set(range(len(groups))) - set(row):
                raise ValueError(f"{len(groups)} experts cannot fill {len(row)} slots")
            while turn in row:
                turn = (turn + 1) % len(groups)
            row[slot], turn = turn, (turn + 1) % len(groups)
    return torch.tensor(rows, dtype=table_VK.dtype).view(table.shape)
