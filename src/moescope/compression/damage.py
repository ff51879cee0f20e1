"""Damage per layer: predicted on calibration states, measured on held-out states after writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moescope.compression.applying import RunningExperts, merged_expert, new_layer
from moescope.compression.calibration import Gating, LayerStates
from moescope.compression.folding import SAME_LOGITS, STATES_AT_ONCE, RouterParts
from moescope.compression.plan import Fits, LayerFit
from moescope.execution.adapters import Ask, Asked, Block, Decision, RouterReads, adapter_of, relative_error
from moescope.execution.capture import Capture
from moescope.execution.models import TracedModel
from moescope.families import MoeCheckpoint
from moescope.families.writing import changed_router
from moescope.types import LayerPlan, Plan, Routing

Tensors = dict[str, Tensor]
SAME_CHOICE = 0.98  # share of tokens with equal choices from which a router depends on single tokens only


@dataclass(frozen=True)
class Predicted:
    """Damage of one layer; None where gating was not recognised, or the router has no probabilities."""

    error: float | None
    router_kl: float | None
    gate_scale: float | None = None  # gate sum after over before, where the model's own router was called


def predict(
    traced: TracedModel,
    plan: Plan,
    fits: Fits,
    states: Mapping[int, LayerStates],
    gating: Mapping[int, Gating],
    blocks: Mapping[int, Block],
    moe: MoeCheckpoint | None = None,
) -> dict[int, Predicted]:
    """||y' - y|| / ||y|| of every layer's routed output on its sample, y' by the plan's router and experts.

    Both come from the model's own experts code, merged experts put in place temporarily. Each layer gets the
    original's input, so errors do not accumulate over layers. A router that can be called with other tensors
    is called with those that would be written into `moe`; for others the recognised gating is applied to the
    plan's logits.
    """
    merges = any(len(group) > 1 for layer in plan.layers for group in layer.groups)
    experts = RunningExperts(traced.model) if merges and not traced.by_layer else None
    damage = {}
    for layer in plan.layers:
        number, fit = layer.layer, fits.get(layer.layer, LayerFit())
        block, sample, how = blocks[number], states[number], gating.get(number)
        with traced.layer_loaded(number):
            if merges and traced.by_layer:
                experts = RunningExperts(traced.model)
            if block.with_router is not None and moe is not None and plan.router != "tie":
                damage[number] = predict_by_router(block, moe, plan, layer, fits, sample, how, experts)
            else:
                damage[number] = predict_layer(block, plan, layer, fit, sample, how, experts)
    return damage


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
    """The damage by the recognised gating."""
    if plan.router == "tie" and experts is not None and len(states):
        return Predicted(tied_error(block, layer, fit, states, experts), 0.0)
    logits_TK = new_logits(block, plan, layer, fit, states)
    if gating is None or not gating.explains or logits_TK is None or plan.router == "tie" or not len(states):
        return Predicted(None, None)
    assert states.logits_TE is not None
    chosen_TK, gates_TK = reroute(plan, layer, fit, gating, logits_TK)
    error = output_error(block, layer, fit, states, experts, chosen_TK, gates_TK)
    return Predicted(error, router_kl(layer, gating, states.logits_TE, logits_TK))


@torch.no_grad()
def predict_by_router(
    block: Block,
    moe: MoeCheckpoint,
    plan: Plan,
    layer: LayerPlan,
    fits: Fits,
    states: LayerStates,
    gating: Gating | None,
    experts: RunningExperts | None,
) -> Predicted:
    """The damage by the model's own router; None where it looks at more than single tokens."""
    assert block.with_router is not None
    assert block.decide_alone is not None
    if not len(states):
        return Predicted(None, None)
    if not same_choice(call_router(block, block.decide_alone, states.reads()).decision.chosen_TK, states):
        return Predicted(None, None)
    weights = moe.layers[layer.layer]
    tensors = changed_router(weights, new_layer(weights, layer, plan, fits).router())
    answer = call_router(block, block.with_router(tensors, len(layer.groups), plan.top_k), states.reads())
    _, chosen_TK, gates_TK = answer.decision
    fit = fits.get(layer.layer, LayerFit())
    error = output_error(block, layer, fit, states, experts, chosen_TK, gates_TK)
    scale = float(gates_TK.double().sum() / states.gates_TK.double().sum().clamp(min=1e-30))
    if gating is None or states.logits_TE is None or answer.logits_TE is None:
        return Predicted(error, None, scale)
    return Predicted(error, router_kl(layer, gating, states.logits_TE, answer.logits_TE), scale)


def call_router(block: Block, router: Ask, reads: RouterReads) -> Asked:
    """A router's answer on the CPU, a few hundred tokens at a time."""
    parts = [router(part) for part in split_reads(reads, block.device)]
    decision = Decision(*(torch.cat([part.decision[field] for part in parts]).cpu() for field in range(3)))
    logits = [part.logits_TE for part in parts if part.logits_TE is not None]
    return Asked(decision, torch.cat(logits).cpu() if logits else None)


def split_reads(reads: RouterReads, device: torch.device) -> Iterator[RouterReads]:
    for start in range(0, len(reads.x_TD), STATES_AT_ONCE):
        rows = slice(start, start + STATES_AT_ONCE)
        tensors = (reads.x_TD, reads.ids_T, reads.carried_TR)
        x_TD, ids_T, carried_TR = (None if part is None else part[rows].to(device) for part in tensors)
        assert x_TD is not None
        yield RouterReads(x_TD, ids_T, carried_TR)


def same_choice(chosen_TK: Tensor, states: LayerStates) -> bool:
    """Whether a router that sees single tokens chooses as it did in the text."""
    same_T = (chosen_TK.sort(-1).values == states.chosen_TK.sort(-1).values).all(-1)
    return float(same_T.float().mean()) >= SAME_CHOICE


def output_error(
    block: Block,
    layer: LayerPlan,
    fit: LayerFit,
    states: LayerStates,
    experts: RunningExperts | None,
    chosen_TK: Tensor,
    gates_TK: Tensor,
) -> float:
    """The error of the plan's experts under new choices, which are numbers of groups (-1: empty slot)."""
    before_TD = routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK)
    positions = torch.tensor([*layer.dominants, -1])  # a merged expert is put in its dominant's place
    merged = {
        dominant: merged_expert(experts.layers[layer.layer], group, shares, fit)
        for group, dominant, shares in zip(layer.groups, layer.dominants, layer.weights, strict=True)
        if len(group) > 1 and experts is not None
    }
    with experts.replaced(layer.layer, merged) if experts is not None else nullcontext():
        after_TD = routed_output(block, states.x_TD, positions[chosen_TK], gates_TK)
    return relative_error(after_TD, before_TD)


def tied_error(
    block: Block, layer: LayerPlan, fit: LayerFit, states: LayerStates, experts: RunningExperts
) -> float:
    """The error with every old router row pointing at its merged expert, and the model's own choices."""
    before_TD = routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK)
    merged = {
        member: merged_expert(experts.layers[layer.layer], group, shares, fit)
        for group, shares in zip(layer.groups, layer.weights, strict=True)
        for member in group
        if len(group) > 1
    }
    with experts.replaced(layer.layer, merged):
        return relative_error(routed_output(block, states.x_TD, states.chosen_TK, states.gates_TK), before_TD)


def new_logits(
    block: Block, plan: Plan, layer: LayerPlan, fit: LayerFit, states: LayerStates
) -> Tensor | None:
    """The plan's router logits for the sample; None where the router reads something other than x."""
    if states.logits_TE is None or plan.router == "slice" or fit.router_KD is None:
        return None if states.logits_TE is None else states.logits_TE[:, list(layer.dominants)]
    x_TD = states.x_TD.float()
    bias = getattr(block.router, "bias", None)
    old_TE = x_TD @ block.weight_ED.detach().float().cpu().T
    old_TE = old_TE + bias.detach().float().cpu() if isinstance(bias, Tensor) else old_TE
    if relative_error(old_TE, states.logits_TE) > SAME_LOGITS:
        return None
    fitted = RouterParts(
        fit.router_KD.float(), None if fit.router_bias_K is None else fit.router_bias_K.float()
    )
    return fitted.logits(x_TD)


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
    """Mean KL in nats from the groups' probabilities to the new router's, plus -log of the kept probability.

    A group's probability is the sum of its members', over that of all groups. For pruned softmax routers the
    first term is 0 and the second KL(new || old); for merged ones without dropped experts the second is 0.
    """
    p_TE = gating.scoring.scores(logits_TE.double())
    p_TK = torch.stack([p_TE[:, list(group)].sum(-1) for group in layer.groups], -1)
    p_TK = p_TK / p_TK.sum(-1, keepdim=True).clamp(min=1e-30)
    q_TK = gating.scoring.scores(logits_TK.double())
    kl_T = (p_TK * (p_TK.clamp(min=1e-30).log() - q_TK.clamp(min=1e-30).log())).sum(-1)
    members = [expert for group in layer.groups for expert in group]
    kept_T = p_TE[:, members].sum(-1)
    return float((kl_T - kept_T.clamp(min=1e-30, max=1).log()).mean().clamp(min=0))


@torch.no_grad()
def routed_output(block: Block, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """Gates times expert outputs, by the block's own experts; on the CPU, a few hundred tokens at a time."""
    parts = zip(*(torch.split(part, STATES_AT_ONCE) for part in (x_TD, chosen_TK, gates_TK)), strict=True)
    outputs = []
    for x, chosen, gates in parts:
        decision = Decision(x.to(block.device), chosen.long().to(block.device), gates.to(block.device))
        outputs.append(adapter_of(block).mix(block, decision).cpu())
    return torch.cat(outputs)


# --- measured


@torch.no_grad()
def block_outputs(traced: TracedModel, inputs: Mapping[int, RouterReads]) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> routed output and chosen experts for given states, by the block's own router and experts."""
    captured: list[Routing] = []
    results: dict[int, tuple[Tensor, Tensor]] = {}
    with Capture(traced.model, captured.append, check=False, runner=traced.runner) as capture:
        for block in capture.blocks:
            if block.layer not in inputs:
                continue
            with traced.layer_loaded(block.layer):
                results[block.layer] = block_output(capture, captured, block, inputs[block.layer])
    return results


def block_output(
    capture: Capture, captured: list[Routing], block: Block, inputs: RouterReads
) -> tuple[Tensor, Tensor]:
    outputs, chosen = [], []
    for reads in split_reads(inputs, block.device):
        captured.clear()
        if block.decide_alone is not None:
            decision = block.decide_alone(reads).decision
        else:
            block.module(reads.x_TD[None])
            routing = captured[-1]
            assert routing.x_TD is not None
            decision = Decision(routing.x_TD, routing.chosen_TK, routing.gates_TK)
        capture.busy = True
        outputs.append(adapter_of(block).mix(block, decision).cpu())
        capture.busy = False
        chosen.append(decision.chosen_TK.cpu())
    return torch.cat(outputs), torch.cat(chosen)


@dataclass(frozen=True)
class HeldOutStates:
    """The inputs of the original's blocks on held-out text, and the outputs of their routed experts."""

    reads: dict[int, RouterReads]
    output: dict[int, Tensor]

    def to_tensors(self) -> Tensors:
        parts = {layer: {**vars(reads), "output": self.output[layer]} for layer, reads in self.reads.items()}
        return {
            f"{layer}.{name}": tensor
            for layer, tensors in parts.items()
            for name, tensor in tensors.items()
            if tensor is not None
        }

    @classmethod
    def of_tensors(cls, tensors: Tensors) -> HeldOutStates:
        layers: dict[int, Tensors] = {}
        for name, tensor in tensors.items():
            layer, _, part = name.partition(".")
            layers.setdefault(int(layer), {})[part] = tensor
        output = {layer: parts.pop("output") for layer, parts in layers.items()}
        return cls({layer: RouterReads(**parts) for layer, parts in layers.items()}, output)


def original_outputs(traced: TracedModel, states: Mapping[int, LayerStates]) -> HeldOutStates:
    """Of every block that chooses the same from the states alone; others are skipped and not measured."""
    inputs = {layer: sample.reads() for layer, sample in states.items()}
    reads, outputs = {}, {}
    for layer, (output_TD, chosen_TK) in block_outputs(traced, inputs).items():
        if same_choice(chosen_TK, states[layer]):
            reads[layer], outputs[layer] = inputs[layer], output_TD
    return HeldOutStates(reads, outputs)


def measured_errors(compressed: TracedModel, held_out: HeldOutStates) -> dict[int, float]:
    """||y' - y|| / ||y|| of every layer's routed output on held-out states, y' by the compressed block."""
    return {
        layer: relative_error(output_TD, held_out.output[layer])
        for layer, (output_TD, _) in block_outputs(compressed, held_out.reads).items()
    }
