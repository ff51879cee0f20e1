"""Changes of experts: no output, a constant output, another place, other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moescope.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from moescope.checkpoint.files import FLOAT_DTYPES
from moescope.checkpoint.source import MemoryFiles
from moescope.errors import BadInput
from moescope.execution.adapters import Block, Decision, adapter_of, ungated_output
from moescope.execution.capture import after, before, tensors_in
from moescope.families import read_moe
from moescope.intervention.editing import Context, Edit, Options
from moescope.types import ExpertStack, LayerWeights

STACKS = ("gate_EFD", "up_EFD", "down_EDF", "gate_bias_EF", "up_bias_EF", "down_bias_ED")


def ablate(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    edit.outputs |= dict.fromkeys(experts)


def mean(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    if context.means is None:
        return
    for expert in experts:
        mean_D = context.means.get((edit.block.layer, expert))
        if mean_D is None:
            raise BadInput(
                f"mean: no output of expert {expert} of layer {edit.block.layer} to average; give "
                "calibration text in which it is chosen"
            )
        edit.outputs[expert] = partial(constant, mean_D)


def constant(mean_D: Tensor, x_TD: Tensor) -> Tensor:
    return mean_D.to(x_TD.device).expand(x_TD.shape)


def swap(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    places = edit.places or list(range(edit.block.n_experts))
    first, second = experts
    places[first], places[second] = places[second], places[first]
    edit.places = places


def transplant(edit: Edit, experts: Sequence[int], options: Options, context: Context) -> None:
    """Put another expert's weights, its router row, or both in an expert's place."""
    block, part = edit.block, options["part"]
    layer = block.layer if options["from_layer"] < 0 else int(options["from_layer"])
    source = source_layer(str(options["checkpoint"]), layer, context.blocks)
    for expert in experts:
        origin = expert if options["from_expert"] < 0 else int(options["from_expert"])
        if origin >= source.n_experts:
            raise BadInput(f"transplant: layer {layer} has experts 0 to {source.n_experts - 1}, not {origin}")
        if part != "row":
            tensors = {name: stack.read(origin) for name, stack in stacks_of(source).items()}
            edit.weights.append(partial(other_weights, block, expert, tensors))
            check_alike(block, expert, tensors)
        if part != "expert":
            rows_ED = block.rows_ED
            if source.router_ED is None or rows_ED is None or source.d_model != rows_ED.shape[1]:
                raise BadInput(
                    f"transplant: a router row of layer {layer} cannot be applied to layer {block.layer}: "
                    "one of them has no rows, or rows of another width; use part=expert"
                )
            edit.rows.append(partial(other_row, expert, source.router_ED.read()[origin]))


def other_row(expert: int, row_D: Tensor, rows_ED: Tensor) -> Tensor:
    return rows_ED.index_copy(0, torch.tensor([expert]), row_D[None].to(rows_ED))


def source_layer(checkpoint: str, layer: int, blocks: Mapping[int, Block]) -> LayerWeights:
    """Return the weights of a layer of a checkpoint, or of the running model where none is named."""
    if checkpoint:
        layers = read_moe(open_checkpoint(checkpoint)).layers
        if layer not in layers:
            known = ", ".join(map(str, layers))
            raise BadInput(f"transplant: {checkpoint} has no MoE layer {layer}; MoE layers: {known}")
        return layers[layer]
    if layer not in blocks:
        known = ", ".join(map(str, blocks))
        raise BadInput(f"transplant: no MoE layer {layer}; MoE layers: {known}")
    weights, tensors = block_weights(blocks[layer])
    if any(tensor.is_meta for tensor in tensors.values()):
        raise BadInput(
            f"transplant: the weights of layer {layer} are not in memory when layers are set up; "
            "give checkpoint=FOLDER"
        )
    return weights


def block_weights(block: Block) -> tuple[LayerWeights, dict[str, Tensor]]:
    """Return a running block's weights as those of a checkpoint, and its tensors by their names there."""
    parts = {"": block.module}
    config: dict[str, Any] | None = None
    if block.hands_out:
        router: Any = block.router
        parts = {"router.": router, "experts.": block.experts}
        if block.rows_ED is None:
            facts, depth = router.facts(router.config), block.layer + 1
            config = {"model_type": "moescope_lab", "moescope_lab": {}, "moescope_router": facts}
            config |= {"num_hidden_layers": depth}
    tensors = {
        f"{block.name}.{prefix}{name}": tensor
        for prefix, module in parts.items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if str(tensor.dtype) in FLOAT_DTYPES
    }
    files = MemoryFiles(tensors, block.name)
    infos = {
        name: TensorInfo(name, header.shape, header.dtype, block.name)
        for name, header in files.headers("").items()
    }
    origin = (block.name, block.name, "model", config)
    layers = read_moe(Checkpoint(*origin, infos, {}, infos, files, None, True)).layers
    return next(iter(layers.values())), tensors


def stacks_of(weights: LayerWeights) -> dict[str, ExpertStack]:
    stacks = {name: getattr(weights, name) for name in STACKS}
    return {name: stack for name, stack in stacks.items() if stack is not None}


def check_alike(block: Block, expert: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise where an expert's projections have other shapes than the tensors that replace them."""
    stacks = stacks_of(block_weights(block)[0])
    here = {name: tuple(stack.shape[1:]) for name, stack in stacks.items()}
    there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if here != there:
        raise BadInput(
            f"transplant: expert {expert} of layer {block.layer} has projections of shapes {here}, the other "
            f"has {there}; use an expert of the same shape"
        )


@contextmanager
def other_weights(block: Block, expert: int, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Write an expert's projections into the running model, and what was there back afterwards."""
    weights, running = block_weights(block)
    views = []
    for name, stack in stacks_of(weights).items():
        if stack.stored is None:
            raise BadInput(
                f"{block.where()}: its experts are quantised, so no other can be put in their place"
            )
        whole = running[stack.stored.tensor_name(expert)].detach()
        shape = stack.stored.shape
        part = whole if stack.stored.whole is None else whole.view(block.n_experts, *shape)[expert]
        views.append((stack.stored.view(part), tensors[name]))
    before_change = [view.clone() for view, _ in views]
    try:
        for view, tensor in views:
            view.copy_(tensor)
        yield
    finally:
        for (view, _), tensor in zip(views, before_change, strict=True):
            view.copy_(tensor)


@contextmanager
def watching(blocks: Sequence[Block], see: Callable[[Block, Decision], None]) -> Iterator[None]:
    """Call `see` with every decision of these blocks until the end of the context; it may run experts."""
    busy = False

    def router_ran(block: Block, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = tensors_in((*args, *kwargs.values()))
        if inputs and not busy:  # the input of a lab router is no tensor, and not needed
            block.router_input, block.router_outputs = inputs[0], tensors_in(output)

    def experts_run(block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal busy
        if not busy:
            busy = True
            try:
                see(block, adapter_of(block).decide(block, tensors_in((*args, *kwargs.values()))))
            finally:
                busy = False

    hooks = []
    for block in map(replace, blocks):  # copies: a capture may use the blocks too
        hooks.append(after(block.router, partial(router_ran, block)))
        hooks.append(before(block.experts, partial(experts_run, block)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def mean_outputs(
    blocks: Mapping[int, Block], wanted: Sequence[tuple[int, int]], run: Callable[[], Any]
) -> dict[tuple[int, int], Tensor]:
    """Return each wanted expert's mean output without gate, over the tokens that choose it while `run` runs.

    `wanted` holds pairs of layer and expert; experts that no token chooses are absent from the result. `run`
    must pass real tokens only, no padding.
    """
    sums: dict[tuple[int, int], Tensor] = {}
    counts: dict[tuple[int, int], int] = {}

    def see(block: Block, decision: Decision) -> None:
        for key in wanted:
            chosen_T = (decision.chosen_TK == key[1]).any(-1)
            if key[0] == block.layer and chosen_T.any():
                total_D = ungated_output(block, decision.x_TD[chosen_T], key[1]).double().sum(0)
                sums[key] = sums[key] + total_D if key in sums else total_D
                counts[key] = counts.get(key, 0) + int(chosen_T.sum())

    with watching([blocks[layer] for layer in {layer for layer, _ in wanted}], see), torch.no_grad():
        run()
    return {key: total_D / counts[key] for key, total_D in sums.items()}
