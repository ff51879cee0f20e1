"""A plan carried out.

The source's layers with fewer experts, made one projection of one expert at a time while it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.checkpoint.writing import Written
from moescope.compression.plan import Fits, LayerFit, check_same_checkpoint
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint
from moescope.families.writing import PER_EXPERT, NewExpert, NewLayer, plan_moe, stacks_of, write_moe
from moescope.types import ExpertWeights, LayerPlan, LayerWeights, Plan

if TYPE_CHECKING:
    from torch import Tensor

PARTS = {
    "gate_EFD": "gate_FD",
    "up_EFD": "up_FD",
    "down_EDF": "down_DF",
    "gate_bias_EF": "gate_bias_F",
    "up_bias_EF": "up_bias_F",
    "down_bias_ED": "down_bias_D",
}
SIGNED = ("up_EFD", "down_EDF")  # what a neuron's sign turns


def apply_plan(
    moe: MoeCheckpoint,
    plan: Plan,
    fits: Fits,
    folder: str | Path,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the compressed checkpoint in the source's own layout and dtypes.

    Refuses what cannot be written before any work.
    """
    return write_moe(moe, folder, checked_layers(moe, plan, fits), new_top_k(moe, plan), progress=progress)


def planned_bytes(moe: MoeCheckpoint, plan: Plan, fits: Fits) -> tuple[int, int]:
    """Bytes of all tensors after and before, from headers alone. Refuses what `apply_plan` would."""
    after = plan_moe(moe, checked_layers(moe, plan, fits), new_top_k(moe, plan)).total_bytes
    return after, plan_moe(moe, {}).total_bytes


def new_top_k(moe: MoeCheckpoint, plan: Plan) -> int | None:
    """The number of experts a token goes to, where the plan changes it."""
    before = {weights.top_k for weights in moe.layers.values()}
    return None if before == {plan.top_k} else plan.top_k


def checked_layers(moe: MoeCheckpoint, plan: Plan, fits: Fits) -> dict[int, NewLayer]:
    check_same_checkpoint(plan, moe.checkpoint)
    if plan.router == "tie":
        raise BadInput(
            "a plan with router 'tie' keeps a router row for every old expert, and no checkpoint "
            "format has room for that; "
            "plan with 'fold' to write it"
        )
    for layer in plan.layers:
        weights = moe.layers.get(layer.layer)
        if weights is None or weights.n_experts != layer.n_experts:
            has = "no experts" if weights is None else f"{weights.n_experts} experts"
            raise BadInput(
                f"layer {layer.layer} has {has}, and the plan is for {layer.n_experts}; give the "
                "plan's own checkpoint"
            )
        for member, order_F in fits.get(layer.layer, LayerFit()).orders.items():
            if len(order_F) != weights.d_ff:
                raise BadInput(
                    f"layer {layer.layer}: the plan orders {len(order_F)} neurons of expert "
                    f"{member}, which has "
                    f"{weights.d_ff}; plan anew"
                )
    return {layer.layer: new_layer(moe.layers[layer.layer], layer, plan, fits) for layer in plan.layers}


def new_layer(weights: LayerWeights, layer: LayerPlan, plan: Plan, fits: Fits) -> NewLayer:
    """Experts that stay are named by their number, so that they are copied bit for bit.

    Merged ones are made when written.
    """
    fit = fits.get(layer.layer, LayerFit())
    experts = [
        group[0] if len(group) == 1 else merged_lazily(weights, group, shares, fit)
        for group, shares in zip(layer.groups, layer.weights, strict=True)
    ]
    alike = NewLayer(experts, groups=layer.groups, leaders=layer.dominants)
    if plan.router in ("slice", "join"):
        return alike
    return replace(
        alike,
        router_ED=fit.router_KD,
        router_bias_E=fit.router_bias_K,
        correction_bias_E=fit.correction_bias_K,
        state=fit.state,
    )


def merged_lazily(
    weights: LayerWeights, group: tuple[int, ...], shares: tuple[float, ...], fit: LayerFit
) -> NewExpert:
    def later(stack: str) -> Callable[[], Tensor] | None:
        return (
            None
            if getattr(weights, stack) is None
            else lambda: merged_part(weights, stack, group, shares, fit)
        )

    made = {part: later(stack) for stack, part in PARTS.items()}
    gate, down = made.pop("gate_FD"), made.pop("down_DF")
    assert gate is not None
    assert down is not None
    return NewExpert(gate, down, **made)


def merged_part(
    weights: LayerWeights, stack: str, group: tuple[int, ...], shares: tuple[float, ...], fit: LayerFit
) -> Tensor:
    """One projection (or bias) of a merged expert.

    The sum of share x the member's, its neurons in the dominant's order; float32.
    """
    import torch

    read = getattr(weights, stack).read
    total: Tensor | None = None
    for member, share in zip(group, shares, strict=True):
        part = share * in_order(stack, read(member).to(torch.float32), member, fit)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def in_order(stack: str, part: Tensor, member: int, fit: LayerFit) -> Tensor:
    """A member's projection with its neurons where the dominant has them.

    Down's bias belongs to no neuron.
    """
    order_F = fit.orders.get(member)
    if order_F is None or stack == "down_bias_ED":
        return part
    order = order_F.long()
    turned = part[:, order] if stack == "down_EDF" else part[order]
    sign_F = fit.signs.get(member)
    if sign_F is None or stack not in SIGNED:
        return turned
    return turned * (sign_F if stack == "down_EDF" else sign_F[:, None])


def merged_expert(
    weights: LayerWeights, group: tuple[int, ...], shares: tuple[float, ...], fit: LayerFit
) -> ExpertWeights:
    """A whole merged expert in memory, in float32: what running a plan without writing it needs."""
    made = {
        PARTS[stack]: merged_part(weights, stack, group, shares, fit)
        for stack in PER_EXPERT
        if stack in stacks_of(weights)
    }
    return ExpertWeights(**made)
