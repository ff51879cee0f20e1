"""Layers written back in the layout they came in, with other experts.

What merging and pruning do to a checkpoint.
"""

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
    torch_dtypes,
    write_checkpoint,
)
from moescope.errors import BadInput
from moescope.families.counts import changed_config, check_counts
from moescope.families.layout import Config
from moescope.families.reading import MoeCheckpoint
from moescope.families.router_rewriting import (
    PER_ROUTER,
    NewRouter,
    new_rows,
    new_state,
    routers_of,
    state_shape,
)
from moescope.types import ExpertStack, LayerWeights, LazyTensor, RouterState, StoredParts

if TYPE_CHECKING:
    from torch import Tensor

    Given = Tensor | Callable[[], Tensor]
PER_EXPERT = ("gate_EFD", "up_EFD", "down_EDF", "gate_bias_EF", "up_bias_EF", "down_bias_ED")


@dataclass(frozen=True)
class NewExpert:
    """An expert made of given tensors, in [out, in].

    One given as a function is called once, when it is written.
    """

    gate_FD: Given
    down_DF: Given
    up_FD: Given | None = None
    gate_bias_F: Given | None = None
    up_bias_F: Given | None = None
    down_bias_D: Given | None = None

    def part(self, stack: str) -> Given | None:
        """The tensor that belongs in LayerWeights' stack of that name."""
        own = {
            "gate_EFD": self.gate_FD,
            "up_EFD": self.up_FD,
            "down_EDF": self.down_DF,
            "gate_bias_EF": self.gate_bias_F,
            "up_bias_EF": self.up_bias_F,
            "down_bias_ED": self.down_bias_D,
        }
        return own[stack]


@dataclass(frozen=True)
class NewLayer:
    """The experts a layer is to have, each one of the source's by its number, or a new one; and the router
    before them.

    Router rows and biases that are not given are those of the source's experts, so they must be given for new
    ones.
    """

    experts: Sequence[int | NewExpert]
    router_ED: Tensor | None = None
    router_bias_E: Tensor | None = None
    correction_bias_E: Tensor | None = None
    state: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # what else the router keeps, by name within the router
    groups: Sequence[Sequence[int]] | None = (
        None  # the source's experts behind each one; None: those kept are alone
    )
    leaders: Sequence[int] | None = None  # whose part of the router each one takes over; None: its own

    def router(self) -> NewRouter:
        """What `changed_router` makes the router of; for new experts groups and leaders must be known."""
        kept = [expert if isinstance(expert, int) else -1 for expert in self.experts]
        given = {name: rows for name in PER_ROUTER if (rows := getattr(self, name)) is not None}
        return NewRouter(
            self.groups or [(expert,) for expert in kept], self.leaders or kept, {**given, **self.state}
        )


@dataclass(frozen=True)
class MoePlan:
    """What would be written, from headers alone: its size is known before any data are read."""

    tensors: list[PlannedTensor]
    config: Config | None  # None where the source's own is copied
    left_out: tuple[
        str, ...
    ]  # tensors of multi-token prediction, whose experts no longer have the number config.json says

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
    """Write the checkpoint with those layers changed, in its own layout and dtypes; all else is copied bit
    for bit.

    Refuses before any work what transformers could not load. The folder must be empty or not exist; it
    appears whole.
    `progress` is told the bytes written and the bytes in all.
    """
    plan = plan_moe(moe, layers, top_k)
    source, config = local_files(moe.checkpoint).folder, plan.config
    if moe.checkpoint.one_file:  # what else lies in its folder may have nothing to do with it
        return write_checkpoint(
            folder, plan.tensors, config or moe.checkpoint.config, None, max_shard_bytes, progress
        )
    return write_checkpoint(folder, plan.tensors, config, source, max_shard_bytes, progress)


def plan_moe(moe: MoeCheckpoint, layers: dict[int, NewLayer], top_k: int | None = None) -> MoePlan:
    """What `write_moe` would write. Everything that can be refused is refused here."""
    expected = moe.coverage.layers_expected
    if expected is not None and moe.coverage.layers_found < expected:
        raise BadInput(
            f"{moe.checkpoint.shown}: {moe.coverage.layers_found} of {expected} MoE layers are in it; "
            "give the folder of the whole checkpoint"
        )
    for layer, new in layers.items():
        check_layer(moe, layer, new)
    counts = {
        layer: len(layers[layer].experts) if layer in layers else moe.layers[layer].n_experts
        for layer in moe.layers
    }
    check_counts(moe, counts, top_k)
    changed = any(count != moe.layers[layer].n_experts for layer, count in counts.items())
    left_out = moe.extra_heads if changed else frozenset()
    config = changed_config(moe, counts, top_k, heads_dropped=bool(left_out))
    source = StoredBytes(moe.checkpoint)
    owners = {name: layer for layer in layers for name in own_names(moe.layers[layer])}
    tensors: list[PlannedTensor] = []
    begun: set[int] = set()
    for name in sorted(moe.checkpoint.stored, key=source.place):
        owner = owners.get(name)
        if owner is None and name not in left_out:
            tensors.append(source.copy(name))
        elif owner is not None and owner not in begun:
            begun.add(owner)
            tensors += layer_tensors(moe, source, owner, layers[owner])
    return MoePlan(tensors, config, tuple(sorted(left_out)))


# --- one layer


def stacks_of(weights: LayerWeights) -> dict[str, ExpertStack]:
    found = {name: getattr(weights, name) for name in PER_EXPERT}
    return {name: stack for name, stack in found.items() if stack is not None}


def stored_parts(weights: LayerWeights) -> dict[str, dict[str, StoredParts]]:
    """Stored tensor (or one for each expert) -> the stacks that lie in it.

    Such as gate and up in gate_up_proj.
    """
    found: dict[str, dict[str, StoredParts]] = {}
    for name, stack in stacks_of(weights).items():
        assert stack.stored is not None
        found.setdefault(stack.stored.name, {})[name] = stack.stored
    return found


def own_names(weights: LayerWeights) -> set[str]:
    """Names of all stored tensors that hold something of each expert."""
    parts = [stack.stored for stack in stacks_of(weights).values() if stack.stored]
    names = {part.tensor_name(expert) for part in parts for expert in range(weights.n_experts)}
    return names | {lazy.name for lazy in routers_of(weights).values()} | state_names(weights)


def state_names(weights: LayerWeights) -> set[str]:
    return {state.tensor.name for state in weights.router_state}


def layer_tensors(
    moe: MoeCheckpoint, source: StoredBytes, layer: int, new: NewLayer
) -> Iterator[PlannedTensor]:
    """The stored tensors of a changed layer.

    Its router's, then its experts', expert by expert where they lie so.
    """
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
                yield given_tensor(moe, layer, place, expert, together, parts)
            else:
                yield source.copy(parts.tensor_name(expert), parts.tensor_name(place))


def router_tensor(moe: MoeCheckpoint, lazy: LazyTensor, new: NewLayer, field_name: str) -> PlannedTensor:
    """Rows of the router, or values of a bias: given, or picked from the source's."""
    info = moe.checkpoint.tensors[lazy.name]
    count = len(new.experts)
    shape = (
        (*info.shape[:-1], count) if len(lazy.shape) == 1 else (count, *info.shape[1:])
    )  # a bias may be [1, E]
    dtype = torch_dtypes()[info.dtype]

    def pieces() -> Iterator[memoryview]:
        rows = new_rows(lazy, new.router(), field_name)
        moe.checkpoint.release()
        yield bytes_of(finite(rows.to(dtype), lazy.name))

    return PlannedTensor(lazy.name, info.dtype, shape, math.prod(shape) * dtype.itemsize, pieces)


def state_tensor(
    moe: MoeCheckpoint, weights: LayerWeights, state: RouterState, new: NewLayer
) -> PlannedTensor:
    """What else the router keeps, for the new experts."""
    name, dtype = state.tensor.name, state.tensor.dtype
    shape = state_shape(weights, state, len(new.experts))

    def pieces() -> Iterator[memoryview]:
        made = new_state(weights, state, new.router())
        moe.checkpoint.release()
        if tuple(made.shape) != shape:
            raise ValueError(f"{name}: made in shape {list(made.shape)}, planned in {list(shape)}")
        yield bytes_of(finite(made, name))

    return PlannedTensor(name, dtype, shape, math.prod(shape) * torch_dtypes()[dtype].itemsize, pieces)


def fused_tensor(
    moe: MoeCheckpoint,
    source: StoredBytes,
    layer: int,
    new: NewLayer,
    together: dict[str, StoredParts],
    parts: StoredParts,
) -> PlannedTensor:
    """One tensor with a part of every expert, one after the other.

    A source's part is copied, a new one's is made.
    """
    assert parts.whole is not None
    size = source.nbytes(parts.name) // moe.layers[layer].n_experts

    def pieces() -> Iterator[memoryview]:
        for place, expert in enumerate(new.experts):
            if isinstance(expert, NewExpert):
                yield from given_tensor(moe, layer, place, expert, together, parts).pieces()
            else:
                yield from source.pieces(parts.name, expert * size, size)

    count = len(new.experts)
    return PlannedTensor(parts.name, parts.dtype, parts.whole(count), count * size, pieces)


def given_tensor(
    moe: MoeCheckpoint,
    layer: int,
    place: int,
    expert: NewExpert,
    together: dict[str, StoredParts],
    parts: StoredParts,
) -> PlannedTensor:
    """One expert's part of a stored tensor, its projections written through the views that read them."""
    name, dtype = parts.tensor_name(place), torch_dtypes()[parts.dtype]

    def pieces() -> Iterator[memoryview]:
        import torch

        part = torch.empty(parts.shape, dtype=dtype)
        if sum(own.view(part).numel() for own in together.values()) != part.numel():
            raise ValueError(f"{name}: {', '.join(together)} are not all that lies in it")
        for stack, own in together.items():
            given = expert.part(stack)
            assert given is not None
            tensor = given() if callable(given) else given
            check_given(moe, layer, place, stack, tensor)
            own.view(part).copy_(tensor.detach())
            del tensor
        moe.checkpoint.release()
        yield bytes_of(finite(part, f"{name} (expert {place})"))

    return PlannedTensor(name, parts.dtype, parts.shape, math.prod(parts.shape) * dtype.itemsize, pieces)


def finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise BadInput(
            f"tensor {name} to be written holds NaN or Inf in its dtype {tensor.dtype}; check "
            "what it was made of"
        )
    return tensor


# --- what is refused


def check_layer(moe: MoeCheckpoint, layer: int, new: NewLayer) -> None:
    if layer not in moe.layers:
        raise BadInput(
            f"{moe.checkpoint.shown}: layer {layer} is not an MoE layer; MoE layers: {listed(moe.layers)}"
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
            given = expert.part(stack)
            if (given is None) != (stack not in stacks):
                wrong = "lacks" if given is None else "has"
                raise BadInput(
                    f"layer {layer}: new expert {place} {wrong} {stack}, unlike those of the "
                    "source; give it like theirs"
                )
            if given is not None and not callable(given):
                check_given(moe, layer, place, stack, given)
    check_router(weights, new)


def check_given(moe: MoeCheckpoint, layer: int, place: int, stack: str, tensor: Tensor) -> None:
    wanted = stacks_of(moe.layers[layer])[stack].shape[1:]
    if tuple(tensor.shape) != tuple(wanted):
        raise BadInput(
            f"layer {layer}: {stack} of new expert {place} has shape {list(tensor.shape)}, "
            f"expected {list(wanted)}; "
            "give it as LayerWeights has it"
        )


def check_router(weights: LayerWeights, new: NewLayer) -> None:
    """Rows and biases given where there are new experts, in the right shape.

    And none that the source has no place for.
    """
    moved = len(new.experts) != weights.n_experts or any(
        expert != place for place, expert in enumerate(new.experts) if not isinstance(expert, NewExpert)
    )
    if weights.router_ED is None and not weights.router_state and moved:
        raise BadInput(
            f"{weights.layer_name}: its router has no row for each expert, so it cannot be told "
            "that they are others; "
            "keep each where it is"
        )
    lazies = routers_of(weights)
    made = any(isinstance(expert, NewExpert) for expert in new.experts)
    for part in PER_ROUTER:
        given = getattr(new, part)
        if given is not None and part not in lazies:
            raise BadInput(f"layer {weights.layer}: {part} is given, but the source has none; leave it out")
        if given is None and part in lazies and made and new.leaders is None:
            raise BadInput(
                f"layer {weights.layer}: new experts need {part}, one row or value an expert; give it"
            )
        wanted = (len(new.experts), *lazies[part].shape[1:]) if part in lazies else ()
        if given is not None and tuple(given.shape) != wanted:
            raise BadInput(
                f"layer {weights.layer}: {part} has shape {list(given.shape)}, expected "
                f"{list(wanted)}; give one row an expert"
            )


def check_rewritable(moe: MoeCheckpoint, layer: int, recounted: bool) -> None:
    """Refuse a layer that is quantised.

    Or that holds tensors of its experts which the layout does not know.
    """
    weights, checkpoint = moe.layers[layer], moe.checkpoint
    config = checkpoint.config or {}
    quantised = [name for name in ("quantization_config", "compression_config") if config.get(name)]
    unstored = [name for name, stack in stacks_of(weights).items() if stack.stored is None]
    own = own_names(weights)
    packed = [
        name
        for name in sorted(own - state_names(weights))
        if checkpoint.tensors[name].dtype not in READABLE_DTYPES
    ]
    if quantised or unstored or packed:
        raise BadInput(
            f"{checkpoint.shown}: layer {layer} is quantised "
            f"({(packed + quantised + unstored)[0]}) and cannot be rewritten; "
            "give a bf16 checkpoint"
        )
    shared = weights.shared
    known = own | {lazy.name for lazy in (vars(shared).values() if shared else ()) if lazy is not None}
    folders = tuple(expert_folder(stack.stored.name) for stack in stacks_of(weights).values() if stack.stored)
    for name, info in checkpoint.tensors.items():
        within = name.startswith(folders)
        counted = recounted and name.startswith(f"{weights.layer_name}.") and weights.n_experts in info.shape
        if name not in known and (within or counted):
            raise BadInput(
                f"{info.file}: tensor {name} {list(info.shape)} lies among the experts of layer "
                f"{layer}, and this layout does not "
                "know what it is, so they cannot be rewritten; remove it if the model does not "
                "need it"
            )


def expert_folder(name: str) -> str:
    """What the names of all that belongs to the experts begin with."""
    return name.split("{e}")[0] if "{e}" in name else name.rsplit(".", 1)[0] + "."


def listed(numbers: dict[int, LayerWeights]) -> str:
    return ", ".join(map(str, numbers))
