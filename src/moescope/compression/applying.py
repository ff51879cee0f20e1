"""A plan applied: to a checkpoint on disk, one projection of one expert at a time, or to a running model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path

import torch
from torch import Tensor, nn

from moescope.checkpoint.source import in_memory
from moescope.checkpoint.writing import Written
from moescope.compression.plan import Fits, LayerFit, check_same_checkpoint
from moescope.errors import BadInput
from moescope.execution.models import TracedModel
from moescope.families import MoeCheckpoint, read_moe
from moescope.families.writing import PER_EXPERT, NewExpert, NewLayer, plan_moe, stacks_of, write_moe
from moescope.types import ExpertWeights, LayerPlan, LayerWeights, Plan

PARTS = {stack: stack.replace("_E", "_") for stack in PER_EXPERT}  # gate_EFD: gate_FD, of one expert
SIGNED = ("up_EFD", "down_EDF")  # what a neuron's sign flips


def apply_plan(
    moe: MoeCheckpoint,
    plan: Plan,
    fits: Fits,
    folder: str | Path,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the compressed checkpoint in the source's layout and dtypes; raises before any work."""
    return write_moe(moe, folder, *new_layers(moe, plan, fits), progress=progress)


def planned_bytes(moe: MoeCheckpoint, plan: Plan, fits: Fits) -> tuple[int, int]:
    """Bytes of all tensors after and before, from headers only. Raises what `apply_plan` would."""
    return plan_moe(moe, *new_layers(moe, plan, fits)).total_bytes, plan_moe(moe, {}).total_bytes


def new_layers(moe: MoeCheckpoint, plan: Plan, fits: Fits) -> tuple[dict[int, NewLayer], int | None]:
    """The layers to write, and top_k where it changes, after checking that the plan fits the checkpoint."""
    check_fits(moe, plan, fits)
    if plan.router == "tie":
        raise BadInput(
            "router 'tie' keeps a router row per old expert, which no checkpoint format can hold; "
            "plan with --router fold"
        )
    layers = {layer.layer: new_layer(moe.layers[layer.layer], layer, plan, fits) for layer in plan.layers}
    same_top_k = all(weights.top_k == plan.top_k for weights in moe.layers.values())
    return layers, None if same_top_k else plan.top_k


def check_fits(moe: MoeCheckpoint, plan: Plan, fits: Fits) -> None:
    """Raise where the plan was made for other layers, from headers only."""
    check_same_checkpoint(plan, moe.checkpoint)
    for layer in plan.layers:
        weights = moe.layers.get(layer.layer)
        if weights is None or weights.n_experts != layer.n_experts:
            experts = 0 if weights is None else weights.n_experts
            raise BadInput(
                f"layer {layer.layer} has {experts} experts, but the plan is for {layer.n_experts}; "
                "give the plan's own checkpoint"
            )
        for member, order_F in fits.get(layer.layer, LayerFit()).orders.items():
            if len(order_F) != weights.d_ff:
                raise BadInput(
                    f"layer {layer.layer}: the plan orders {len(order_F)} neurons of expert {member}, "
                    f"which has {weights.d_ff}; plan again"
                )


def new_layer(weights: LayerWeights, layer: LayerPlan, plan: Plan, fits: Fits) -> NewLayer:
    """The new layer: experts that stay are copied bit for bit, merged ones are made on writing."""
    fit = fits.get(layer.layer, LayerFit())

    def merged(group: tuple[int, ...], shares: tuple[float, ...]) -> NewExpert:
        make = partial(merged_part, weights, group=group, shares=shares, fit=fit)
        return NewExpert(**{PARTS[stack]: partial(make, stack) for stack in stacks_of(weights)})

    experts = [
        group[0] if len(group) == 1 else merged(group, shares)
        for group, shares in zip(layer.groups, layer.weights, strict=True)
    ]
    router = LayerFit() if plan.router in ("slice", "join") else fit
    arrays = (router.router_KD, router.router_bias_K, router.correction_bias_K, router.state)
    return NewLayer(experts, *arrays, layer.groups, layer.dominants)


def merged_part(
    weights: LayerWeights, stack: str, group: tuple[int, ...], shares: tuple[float, ...], fit: LayerFit
) -> Tensor:
    """A merged projection or bias: sum of share x member, neurons in the dominant's order; fp32.

    Summed in fp64, so that equal members give exactly what they are, whatever their shares.
    """
    read = getattr(weights, stack).read
    parts = (
        share * reorder(stack, read(member).to(torch.float64), member, fit)
        for member, share in zip(group, shares, strict=True)
    )
    return reduce(Tensor.add_, parts).float()


def reorder(stack: str, part: Tensor, member: int, fit: LayerFit) -> Tensor:
    """A member's projection with its neurons in the dominant's order; down's bias belongs to no neuron."""
    order_F = fit.orders.get(member)
    if order_F is None or stack == "down_bias_ED":
        return part
    order, sign_F = order_F.long(), fit.signs.get(member)
    ordered = part[:, order] if stack == "down_EDF" else part[order]
    if sign_F is None or stack not in SIGNED:
        return ordered
    return ordered * (sign_F if stack == "down_EDF" else sign_F[:, None])


def merged_expert(
    weights: LayerWeights, group: tuple[int, ...], shares: tuple[float, ...], fit: LayerFit
) -> ExpertWeights:
    """A merged expert in memory, in float32: for running a plan without writing it."""
    stacks = stacks_of(weights)
    return ExpertWeights(**{PARTS[name]: merged_part(weights, name, group, shares, fit) for name in stacks})


class RunningExperts:
    """The experts of a running model as its family stores them, replaceable in place."""

    def __init__(self, model: nn.Module):
        self.tensors: dict[str, Tensor] = dict(model.state_dict())
        self.layers: dict[int, LayerWeights] = read_moe(in_memory(model, "the running model")).layers

    def memory_of(self, layer: int, expert: int) -> dict[str, Tensor]:
        """Views of the model's own memory, in [out, in], by the names of `ExpertWeights`."""
        views = {}
        weights = self.layers[layer]
        for name, stack in stacks_of(weights).items():
            parts = stack.stored
            assert parts is not None
            tensor = self.tensors[parts.tensor_name(expert)]
            if parts.whole is not None:
                tensor = tensor.view(weights.n_experts, *parts.shape)[expert]
            views[PARTS[name]] = parts.view(tensor)
        return views

    @torch.no_grad()
    def put(self, layer: int, expert: int, new: ExpertWeights) -> None:
        for name, view in self.memory_of(layer, expert).items():
            view.copy_(getattr(new, name))

    @contextmanager
    def replaced(self, layer: int, new: Mapping[int, ExpertWeights]) -> Iterator[None]:
        """Run with those experts in place; the model's own are restored afterwards."""
        views = {expert: self.memory_of(layer, expert).items() for expert in new}
        originals = {
            expert: ExpertWeights(**{name: view.clone() for name, view in parts})
            for expert, parts in views.items()
        }
        try:
            for expert, weights in new.items():
                self.put(layer, expert, weights)
            yield
        finally:
            for expert, weights in originals.items():
                self.put(layer, expert, weights)


def share_experts(traced: TracedModel, plan: Plan, fits: Fits) -> None:
    """Give every member of a group the merged expert: n router rows then point at K experts (`tie`)."""
    whole = None if traced.by_layer else RunningExperts(traced.model)

    def share(number: int) -> None:
        for layer in (layer for layer in plan.layers if layer.layer == number):
            running = whole or RunningExperts(traced.model)
            for group, shares in zip(layer.groups, layer.weights, strict=True):
                if len(group) > 1:
                    new = merged_expert(running.layers[number], group, shares, fits.get(number, LayerFit()))
                    for member in group:
                        running.put(number, member, new)

    traced.change_layers(share)
