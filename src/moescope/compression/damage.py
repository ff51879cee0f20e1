"""What a plan costs, layer by layer: foretold on calibration states before anything is written, measured on held-out ones after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moescope.compression.applying import merged_expert
from moescope.compression.plan import Fits, LayerFit
from moescope.compression.rerouting import Gating, grouped_probabilities
from moescope.compression.running import RunningExperts
from moescope.compression.states import LayerStates
from moescope.routing.adapters import Block, Decision, adapter_of, relative_error
from moescope.routing.capture import Capture
from moescope.routing.models import TracedModel
from moescope.types import LayerPlan, Plan, Routing

STATES_AT_ONCE = 512
SAME_LOGITS = 0.02  # relative error up to which a router is taken to read what its experts read
SAME_CHOICE = 0.98


@dataclass(frozen=True)
class Predicted:
    """Of one layer; None where the model's way of choosing was not recognised."""

    error: float | None
    router_kl: float | None


def predict(
    traced: TracedModel,
    plan: Plan,
    fits: Fits,
    states: Mapping[int, LayerStates],
    gating: Mapping[int, Gating],
    blocks: Mapping[int, Block],
) -> dict[int, Predicted]:
    """||y' - y|| / ||y|| of every layer's routed output on its sample, y' by the plan's router and experts, each layer by itself.

    Both come out of the model's own experts code, merged ones put in place for as long as it takes. Layers are judged alone:
    errors that travel from layer to layer are not in it.
    """
    experts = RunningExperts(traced.model) if any(len(g) > 1 for layer in plan.layers for g in layer.groups) else None
    return {
        layer.layer: predict_layer(
            blocks[layer.layer], plan, layer, fits.get(layer.layer, LayerFit()), states[layer.layer], gating[layer.layer], experts
        )
        for layer in plan.layers
    }  # fmt: skip


@torch.no_grad()
def predict_layer(
    block: Block,
    plan: Plan,
    layer: LayerPlan,
    fit: LayerFit,
    states: LayerStates,
    gating: Gating,
    experts: RunningExperts | None,
) -> Predicted:
    if plan.router == "tie" and experts is not None and len(states):
        return Predicted(tied_error(block, layer, fit, states, experts), 0.0)
    logits_TK = new_logits(block, plan, layer, fit, states)
    if not gating.explains or logits_TK is None or plan.router == "tie" or not len(states):
        return Predicted(None, None)
    before_TD = routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK)
    chosen_TK, gates_TK = reroute(plan, layer, fit, gating, logits_TK)
    slots = torch.tensor(layer.dominants)  # a merged expert is put where its dominant was
    made = {
        dominant: merged_expert(experts.layers[layer.layer], group, shares, fit)
        for group, dominant, shares in zip(layer.groups, layer.dominants, layer.weights, strict=True)
        if len(group) > 1 and experts is not None
    }
    if experts is not None and made:
        with experts.replaced(layer.layer, made):
            after_TD = routed_output(block, states.x_TD, slots[chosen_TK], gates_TK)
    else:
        after_TD = routed_output(block, states.x_TD, slots[chosen_TK], gates_TK)
    return Predicted(relative_error(after_TD, before_TD), router_kl(layer, gating, states.logits_TE, logits_TK))


def tied_error(block: Block, layer: LayerPlan, fit: LayerFit, states: LayerStates, experts: RunningExperts) -> float:
    """The error with every old router row pointing at the expert its own was merged into: choices and gates are the model's own."""
    before_TD = routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK)
    made = {
        member: merged_expert(experts.layers[layer.layer], group, shares, fit)
        for group, shares in zip(layer.groups, layer.weights, strict=True)
        for member in group
        if len(group) > 1
    }
    with experts.replaced(layer.layer, made):
        return relative_error(routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK), before_TD)


def new_logits(block: Block, plan: Plan, layer: LayerPlan, fit: LayerFit, states: LayerStates) -> Tensor | None:
    """What the plan's router says to the sample; None where fitted rows cannot be tried since the router reads something else."""
    if plan.router == "slice" or fit.router_KD is None:
        return states.logits_TE[:, list(layer.dominants)]
    x_TD = states.x_TD.float()
    bias = getattr(block.router, "bias", None)
    own_TE = x_TD @ block.weight_ED.detach().float().cpu().T
    own_TE = own_TE + bias.detach().float().cpu() if isinstance(bias, Tensor) else own_TE
    if relative_error(own_TE, states.logits_TE) > SAME_LOGITS:
        return None
    logits_TK = x_TD @ fit.router_KD.float().T
    return logits_TK if fit.router_bias_K is None else logits_TK + fit.router_bias_K.float()


def reroute(plan: Plan, layer: LayerPlan, fit: LayerFit, gating: Gating, logits_TK: Tensor) -> tuple[Tensor, Tensor]:
    bias_E = gating.scoring.bias_E
    bias_K = None if bias_E is None else bias_E[list(layer.dominants)]
    if fit.correction_bias_K is not None:
        bias_K = fit.correction_bias_K.float()
    top_k = min(plan.top_k or gating.top_k, len(layer.groups))
    return gating.with_bias(bias_K).route(logits_TK, top_k)


def router_kl(layer: LayerPlan, gating: Gating, logits_TE: Tensor, logits_TK: Tensor) -> float:
    """Mean KL in nats from the grouped probabilities to the new router's, plus -log of the probability that dropped experts took.

    For pruned softmax routers the first is 0 and the second KL(new || old); for merged ones without dropped experts the second is 0.
    """
    p_TK = grouped_probabilities(gating.scoring, logits_TE, layer.groups)
    q_TK = gating.scoring.scores(logits_TK.double())
    apart_T = (p_TK * (p_TK.clamp(min=1e-30).log() - q_TK.clamp(min=1e-30).log())).sum(-1)
    members = [expert for group in layer.groups for expert in group]
    kept_T = gating.scoring.scores(logits_TE.double())[:, members].sum(-1)
    return float((apart_T - kept_T.clamp(min=1e-30, max=1).log()).mean().clamp(min=0))


@torch.no_grad()
def routed_output(block: Block, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """Gates times expert outputs, by the block's own experts; on the CPU, a few hundred tokens at a time."""
    device = block.device
    parts = zip(*(torch.split(part, STATES_AT_ONCE) for part in (x_TD, chosen_TK, gates_TK)), strict=True)
    made = [
        adapter_of(block).mix(block, Decision(x.to(device), c.long().to(device), g.to(device))) for x, c, g in parts
    ]
    return torch.cat([part.cpu() for part in made])


# --- measured


@torch.no_grad()
def block_outputs(traced: TracedModel, inputs: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> routed output and chosen experts of each block for given states, by the block's own router and experts."""
    caught: list[Routing] = []
    found: dict[int, tuple[Tensor, Tensor]] = {}
    with Capture(traced.model, caught.append, check=False, runner=traced.runner) as capture:
        for block in capture.blocks:
            if block.layer not in inputs:
                continue
            outputs, chosen = [], []
            for x_TD in torch.split(inputs[block.layer], STATES_AT_ONCE):
                caught.clear()
                if block.decide_alone is not None:
                    decision = block.decide_alone(x_TD.to(block.device))
                else:
                    block.module(x_TD.to(block.device)[None])
                    assert caught[-1].x_TD is not None
                    decision = Decision(caught[-1].x_TD, caught[-1].chosen_TK, caught[-1].gates_TK)
                capture.busy = True
                outputs.append(adapter_of(block).mix(block, decision).cpu())
                capture.busy = False
                chosen.append(decision.chosen_TK.cpu())
            found[block.layer] = (torch.cat(outputs), torch.cat(chosen))
    return found


@dataclass(frozen=True)
class HeldOutStates:
    """What the original's blocks were given on held-out text, and what their routed experts made of it."""

    x: dict[int, Tensor]
    output: dict[int, Tensor]


def original_outputs(traced: TracedModel, states: Mapping[int, LayerStates]) -> HeldOutStates:
    """Of every block that, given the states alone, chooses as it did in the model; others are left out and not measured."""
    inputs = {layer: own.x_TD for layer, own in states.items()}
    given, gave = {}, {}
    for layer, (output_TD, chosen_TK) in block_outputs(traced, inputs).items():
        same = (chosen_TK.sort(-1).values == states[layer].chosen_TK.sort(-1).values).all(-1).float().mean()
        if same >= SAME_CHOICE:
            given[layer], gave[layer] = inputs[layer], output_TD
    return HeldOutStates(given, gave)


def measured_errors(compressed: TracedModel, held_out: HeldOutStates) -> dict[int, float]:
    """||y' - y|| / ||y|| of every layer's routed output on held-out states, y' by the compressed model's own block."""
    return {
        layer: relative_error(output_TD, held_out.output[layer])
        for layer, (output_TD, _) in block_outputs(compressed, held_out.x).items()
    }
