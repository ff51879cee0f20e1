"""What a plan costs, layer by layer.

Foretold on calibration states before anything is written, measured on held-out ones after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moescope.compression.applying import merged_expert, new_layer
from moescope.compression.plan import Fits, LayerFit
from moescope.compression.rerouting import Gating, grouped_probabilities
from moescope.compression.running import RunningExperts
from moescope.compression.states import LayerStates
from moescope.execution.adapters import Ask, Asked, Block, Decision, RouterReads, adapter_of, relative_error
from moescope.execution.capture import Capture
from moescope.execution.models import TracedModel
from moescope.families import MoeCheckpoint
from moescope.families.writing import changed_router
from moescope.types import LayerPlan, Plan, Routing

STATES_AT_ONCE = 512
SAME_LOGITS = 0.02  # relative error up to which a router is taken to read what its experts read
SAME_CHOICE = 0.98


@dataclass(frozen=True)
class Predicted:
    """Of one layer.

    None where the model's way of choosing was not recognised, or its router has no probabilities.
    """

    error: float | None
    router_kl: float | None
    gate_scale: float | None = (
        None  # the gates' sum after over before, where the model's own router was asked
    )


def predict(
    traced: TracedModel,
    plan: Plan,
    fits: Fits,
    states: Mapping[int, LayerStates],
    gating: Mapping[int, Gating],
    blocks: Mapping[int, Block],
    moe: MoeCheckpoint | None = None,
) -> dict[int, Predicted]:
    """||y' - y|| / ||y|| of every layer's routed output on its sample, y' by the plan's router and experts,
    each layer by itself.

    Both come out of the model's own experts code, merged ones put in place for as long as it takes. Layers
    are judged alone:
    errors that travel from layer to layer are not in it. A model whose routers can be asked with other
    tensors is asked, with those that
    would be written into `moe`; of others the way of choosing, as it was found, is applied to the plan's
    logits.
    """
    experts = (
        RunningExperts(traced.model)
        if any(len(g) > 1 for layer in plan.layers for g in layer.groups)
        else None
    )
    found = {}
    for layer in plan.layers:
        number, fit = layer.layer, fits.get(layer.layer, LayerFit())
        block, own, how = blocks[number], states[number], gating.get(number)
        if block.with_router is not None and moe is not None and plan.router != "tie":
            found[number] = asked_layer(block, moe, plan, layer, fits, own, how, experts)
        else:
            found[number] = predict_layer(block, plan, layer, fit, own, how, experts)
    return found


@torch.no_grad()
def predict_layer(
    block: Block,
    plan: Plan,
    layer: LayerPlan,
    fit: LayerFit,
    states: LayerStates,
    gating: Gating | None,
    experts: RunningExperts | None,
) -> Predicted:
    if plan.router == "tie" and experts is not None and len(states):
        return Predicted(tied_error(block, layer, fit, states, experts), 0.0)
    logits_TK = new_logits(block, plan, layer, fit, states)
    if gating is None or not gating.explains or logits_TK is None or plan.router == "tie" or not len(states):
        return Predicted(None, None)
    assert states.logits_TE is not None
    chosen_TK, gates_TK = reroute(plan, layer, fit, gating, logits_TK)
    error = error_of(block, layer, fit, states, experts, chosen_TK, gates_TK)
    return Predicted(error, router_kl(layer, gating, states.logits_TE, logits_TK))


@torch.no_grad()
def asked_layer(
    block: Block,
    moe: MoeCheckpoint,
    plan: Plan,
    layer: LayerPlan,
    fits: Fits,
    states: LayerStates,
    gating: Gating | None,
    experts: RunningExperts | None,
) -> Predicted:
    """The same by the model's own router, built with the tensors that the plan would write.

    None where it looks at more than single tokens.
    """
    assert block.with_router is not None
    assert block.decide_alone is not None
    if not len(states) or not same_choice(
        ask(block, block.decide_alone, states.reads()).decision.chosen_TK, states
    ):
        return Predicted(None, None)
    weights = moe.layers[layer.layer]
    tensors = changed_router(weights, new_layer(weights, layer, plan, fits).router())
    answer = ask(block, block.with_router(tensors, len(layer.groups), plan.top_k), states.reads())
    _, chosen_TK, gates_TK = answer.decision
    error = error_of(block, layer, fits.get(layer.layer, LayerFit()), states, experts, chosen_TK, gates_TK)
    scale = float(gates_TK.double().sum() / states.gates_TK.double().sum().clamp(min=1e-30))
    if (
        gating is None or states.logits_TE is None or answer.logits_TE is None
    ):  # a router without probabilities
        return Predicted(error, None, scale)
    return Predicted(error, router_kl(layer, gating, states.logits_TE, answer.logits_TE), scale)


def ask(block: Block, router: Ask, reads: RouterReads) -> Asked:
    """A router's answer on the CPU, a few hundred tokens at a time."""
    parts = [router(part) for part in split_reads(reads, block.device)]
    decision = Decision(*(torch.cat([part.decision[at] for part in parts]).cpu() for at in range(3)))
    logits = [part.logits_TE for part in parts if part.logits_TE is not None]
    return Asked(decision, torch.cat(logits).cpu() if logits else None)


def split_reads(reads: RouterReads, device: torch.device) -> Iterator[RouterReads]:
    for start in range(0, len(reads.x_TD), STATES_AT_ONCE):
        few = slice(start, start + STATES_AT_ONCE)
        given = (reads.x_TD, reads.ids_T, reads.carried_TR)
        x_TD, ids_T, carried_TR = (None if part is None else part[few].to(device) for part in given)
        assert x_TD is not None
        yield RouterReads(x_TD, ids_T, carried_TR)


def same_choice(chosen_TK: Tensor, states: LayerStates) -> bool:
    """Whether a router that is given single tokens chooses as it did in the text."""
    same_T = (chosen_TK.sort(-1).values == states.chosen_TK.sort(-1).values).all(-1)
    return float(same_T.float().mean()) >= SAME_CHOICE


def error_of(
    block: Block,
    layer: LayerPlan,
    fit: LayerFit,
    states: LayerStates,
    experts: RunningExperts | None,
    chosen_TK: Tensor,
    gates_TK: Tensor,
) -> float:
    """The error of the plan's experts under new choices, which are numbers of groups.

    -1 where a slot is empty.
    """
    before_TD = routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK)
    slots = torch.tensor([*layer.dominants, -1])  # a merged expert is put where its dominant was
    made = {
        dominant: merged_expert(experts.layers[layer.layer], group, shares, fit)
        for group, dominant, shares in zip(layer.groups, layer.dominants, layer.weights, strict=True)
        if len(group) > 1 and experts is not None
    }
    with experts.replaced(layer.layer, made) if experts is not None else nullcontext():
        after_TD = routed_output(block, states.x_TD, slots[chosen_TK], gates_TK)
    return relative_error(after_TD, before_TD)


def tied_error(
    block: Block, layer: LayerPlan, fit: LayerFit, states: LayerStates, experts: RunningExperts
) -> float:
    """The error with every old router row pointing at the expert its own was merged into.

    Choices and gates are the model's own.
    """
    before_TD = routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK)
    made = {
        member: merged_expert(experts.layers[layer.layer], group, shares, fit)
        for group, shares in zip(layer.groups, layer.weights, strict=True)
        for member in group
        if len(group) > 1
    }
    with experts.replaced(layer.layer, made):
        return relative_error(routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK), before_TD)


def new_logits(
    block: Block, plan: Plan, layer: LayerPlan, fit: LayerFit, states: LayerStates
) -> Tensor | None:
    """What the plan's router says to the sample.

    None where fitted rows cannot be tried since the router reads something else.
    """
    if states.logits_TE is None or plan.router == "slice" or fit.router_KD is None:
        return None if states.logits_TE is None else states.logits_TE[:, list(layer.dominants)]
    x_TD = states.x_TD.float()
    bias = getattr(block.router, "bias", None)
    own_TE = x_TD @ block.weight_ED.detach().float().cpu().T
    own_TE = own_TE + bias.detach().float().cpu() if isinstance(bias, Tensor) else own_TE
    if relative_error(own_TE, states.logits_TE) > SAME_LOGITS:
        return None
    logits_TK = x_TD @ fit.router_KD.float().T
    return logits_TK if fit.router_bias_K is None else logits_TK + fit.router_bias_K.float()


def reroute(
    plan: Plan, layer: LayerPlan, fit: LayerFit, gating: Gating, logits_TK: Tensor
) -> tuple[Tensor, Tensor]:
    bias_E = gating.scoring.bias_E
    bias_K = None if bias_E is None else bias_E[list(layer.dominants)]
    if fit.correction_bias_K is not None:
        bias_K = fit.correction_bias_K.float()
    top_k = min(plan.top_k or gating.top_k, len(layer.groups))
    return gating.with_bias(bias_K).route(logits_TK, top_k)


def router_kl(layer: LayerPlan, gating: Gating, logits_TE: Tensor, logits_TK: Tensor) -> float:
    """Mean KL in nats from the grouped probabilities to the new router's, plus -log of the probability that
    dropped experts took.

    For pruned softmax routers the first is 0 and the second KL(new || old); for merged ones without dropped
    experts the second is 0.
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
        adapter_of(block).mix(block, Decision(x.to(device), c.long().to(device), g.to(device)))
        for x, c, g in parts
    ]
    return torch.cat([part.cpu() for part in made])


# --- measured


@torch.no_grad()
def block_outputs(traced: TracedModel, inputs: Mapping[int, RouterReads]) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> routed output and chosen experts of each block for given states.

    By the block's own router and experts.
    """
    caught: list[Routing] = []
    found: dict[int, tuple[Tensor, Tensor]] = {}
    with Capture(traced.model, caught.append, check=False, runner=traced.runner) as capture:
        for block in capture.blocks:
            if block.layer not in inputs:
                continue
            outputs, chosen = [], []
            for reads in split_reads(inputs[block.layer], block.device):
                caught.clear()
                if block.decide_alone is not None:
                    decision = block.decide_alone(reads).decision
                else:
                    block.module(reads.x_TD[None])
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

    reads: dict[int, RouterReads]
    output: dict[int, Tensor]


def original_outputs(traced: TracedModel, states: Mapping[int, LayerStates]) -> HeldOutStates:
    """Of every block that, given the states alone, chooses as it did in the model.

    Others are left out and not measured.
    """
    inputs = {layer: own.reads() for layer, own in states.items()}
    given, gave = {}, {}
    for layer, (output_TD, chosen_TK) in block_outputs(traced, inputs).items():
        if same_choice(chosen_TK, states[layer]):
            given[layer], gave[layer] = inputs[layer], output_TD
    return HeldOutStates(given, gave)


def measured_errors(compressed: TracedModel, held_out: HeldOutStates) -> dict[int, float]:
    """||y' - y|| / ||y|| of every layer's routed output on held-out states.

    Y' by the compressed model's own block.
    """
    return {
        layer: relative_error(output_TD, held_out.output[layer])
        for layer, (output_TD, _) in block_outputs(compressed, held_out.reads).items()
    }
