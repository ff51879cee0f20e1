"""Merging: experts grouped by a method, each group made one expert, and the router fitted to the groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moescope.compression.applying import RunningExperts, merged_expert
from moescope.compression.calibration import (
    Gating,
    LayerStates,
    StateSample,
    SumCollector,
    Sums,
    find_gating,
)
from moescope.compression.folding import (
    FoldedRouter,
    RouterParts,
    apply_in_chunks,
    fold_router,
    load_thresholds,
    mean_router,
)
from moescope.compression.grouping import (
    Grouping,
    adaptive_dominants,
    merge_weights,
    ordered_grouping,
)
from moescope.compression.method import Evidence, Method, PlanSettings, Proposal, rescaling_warnings
from moescope.compression.plan import LayerFit
from moescope.compression.reap import reap
from moescope.compression.saliency import RoutedSums
from moescope.errors import BadInput
from moescope.execution.adapters import CONTRACT, Block, adapter_of, find_blocks
from moescope.execution.streamed import StreamedModel
from moescope.families import MoeCheckpoint
from moescope.families.counts import GROUPS
from moescope.families.reading import config_value, text_config
from moescope.geometry.matching import can_flip, match_neurons
from moescope.types import Array, LayerPlan, LayerWeights, LinearView, Routing


@dataclass(frozen=True)
class LayerEvidence:
    """One layer's part of the evidence; without text, weights only."""

    weights: LayerWeights
    keep: int
    n_groups: int  # routing groups, within which experts are merged
    settings: PlanSettings
    top_k: int | None  # after merging, the same in every layer
    sums: Mapping[str, Tensor]  # by their names in the layer
    states: LayerStates | None
    gating: Gating | None
    control_of: LayerPlan | None
    device: str = "cpu"  # where routers are fitted and neurons matched
    linear: LinearView | None = None  # of a router with more state than rows, whose rows can still be fitted

    @property
    def number(self) -> int:
        return self.weights.layer

    @property
    def joins(self) -> bool:
        """Whether a group takes its dominant's part of a router that has more state than rows to fit."""
        return self.linear is None and (self.weights.router_ED is None or bool(self.weights.router_state))

    @property
    def usage_E(self) -> Array | None:
        """Tokens routed to each expert."""
        tokens = self.sums.get("tokens_BE")
        return None if tokens is None else tokens.sum(0).double().numpy()

    @property
    def reap_E(self) -> Array | None:
        if self.usage_E is None:
            return None
        return reap({name: self.sums[name].numpy().sum(0) for name in ("tokens_BE", "gated_norm_BE")})

    def measure(self, measures: tuple[str, ...]) -> str:
        return measures[0] if self.settings.distance == "default" else self.settings.distance


@dataclass(frozen=True)
class MergedLayer:
    """One merged layer, and the cost of fitting its router."""

    plan: LayerPlan
    fit: LayerFit
    grouping: Grouping
    folded: FoldedRouter | None


Group = Callable[[Evidence, LayerEvidence], Grouping]


def merge_by(
    group: Group,
    name: str,
    summary: str,
    *,
    matched: bool,
    needs_text: bool = True,
    collectors: tuple[Callable[[], SumCollector], ...] = (),
    distances: tuple[str, ...] = (),
    dominants: tuple[str, ...] = (),
    needs_logits: bool = False,
    adapts: bool = False,
    caveats: Callable[[int], list[str]] = lambda n_experts: [],
) -> Method:
    """The method that merges the groups found by `group`, after matching neurons where `matched`."""

    def propose(evidence: Evidence) -> Proposal:
        control_of = evidence.control_of
        match = matched if control_of is None else control_of.matching != "none"
        if evidence.settings.sequential and evidence.recalibrate is not None:
            layers = merge_in_sequence(evidence, group, match, collectors)
        else:
            layers = [
                merge_layer(evidence, layer_evidence(evidence, layer), group, match)
                for layer in evidence.keep
            ]
        return merging_proposal(evidence, layers, match, caveats)

    return Method(
        name,
        summary,
        propose,
        needs_text,
        merges=True,
        control="random_merge",
        collectors=collectors,
        distances=distances,
        dominants=dominants,
        needs_logits=needs_logits,
        adapts=adapts,
    )


def merging_proposal(
    evidence: Evidence, layers: list[MergedLayer], matched: bool, caveats: Callable[[int], list[str]]
) -> Proposal:
    settings, top_k = evidence.settings, top_k_after(evidence)
    before = {weights.top_k for weights in evidence.moe.layers.values()}
    tied = settings.router == "tie"
    joined = any(layer_evidence(evidence, layer).joins for layer in evidence.keep)
    matching = ("signed" if settings.signed else "unsigned") if matched else "none"
    return Proposal(
        tuple(layer.plan for layer in layers),
        {layer.plan.layer: layer.fit for layer in layers},
        matching,
        "tie" if tied else "join" if joined else "fold",
        None if tied or {top_k} == before else top_k,
        fitting_facts(layers),
        tuple(merging_warnings(evidence, layers, caveats)),
        {layer.plan.layer: layer.grouping for layer in layers},
    )


def fitting_facts(layers: list[MergedLayer]) -> dict[str, str | int | float | bool | None]:
    """The mean cost of fitting routers over layers, for plan.json."""
    folded = [layer.folded for layer in layers if layer.folded is not None]
    if not folded:
        return {}
    held_out = [fold.kl_held_out for fold in folded if fold.kl_held_out is not None]
    return {
        "router_kl_of_mean_rows": float(np.mean([fold.kl_start for fold in folded])),
        "router_kl": float(np.mean([fold.kl for fold in folded])),
        "router_kl_held_out": float(np.mean(held_out)) if held_out else None,
        "gate_scale": float(np.mean([fold.gate_scale for fold in folded])),
    }


def merging_warnings(
    evidence: Evidence, layers: list[MergedLayer], caveats: Callable[[int], list[str]]
) -> list[str]:
    warnings = []
    usage = any(name.endswith("tokens_BE") for name in evidence.sums)
    if not usage and evidence.settings.merge_weights == "usage":
        warnings.append("merge weights are uniform: without text the usage of experts is unknown")
    warnings += caveats(max(layer.plan.n_experts for layer in layers))
    merged = [layer for layer in layers if len(layer.plan.groups) < layer.plan.n_experts]
    unfitted = [layer.plan.layer for layer in merged if layer.folded is None]
    if unfitted and evidence.settings.router == "fold" and not layer_evidence(evidence, unfitted[0]).joins:
        why = "gating was not recognised" if usage else "no text was given to fit them on"
        where = f"layers {', '.join(map(str, unfitted))}" if len(unfitted) < len(merged) else "all layers"
        warnings.append(f"router rows of merged experts are their members' means in {where}: {why}")
    scales = [layer.folded.gate_scale for layer in layers if layer.folded is not None]
    return warnings + rescaling_warnings("merging", scales)


# --- evidence per layer


def layer_evidence(evidence: Evidence, layer: int) -> LayerEvidence:
    prefix = f"layer.{layer}."
    control_of = evidence.control_of.layers if evidence.control_of else ()
    return LayerEvidence(
        evidence.moe.layers[layer],
        evidence.keep[layer],
        routing_groups(evidence.moe, layer),
        evidence.settings,
        top_k_after(evidence),
        {name.removeprefix(prefix): part for name, part in evidence.sums.items() if name.startswith(prefix)},
        evidence.states.get(layer),
        evidence.gating.get(layer),
        next((plan for plan in control_of if plan.layer == layer), None),
        evidence.traced().device if evidence.traced is not None and evidence.states else "cpu",
        linear_view(evidence, layer),
    )


def linear_view(evidence: Evidence, layer: int) -> LinearView | None:
    if evidence.traced is None or layer not in evidence.states or not evidence.moe.layers[layer].router_state:
        return None
    return next(block.linear for block in find_blocks(evidence.traced().model) if block.layer == layer)


def routing_groups(moe: MoeCheckpoint, layer: int) -> int:
    """DeepSeek's n_group, 1 where there are none."""
    groups = config_value(text_config(moe.checkpoint.config), GROUPS, layer)
    return groups if isinstance(groups, int) and groups > 1 else 1


def check_adaptive(moe: MoeCheckpoint) -> None:
    """Raise where tokens choose routing groups first, each of which must keep as many experts."""
    for layer in moe.layers:
        if (groups := routing_groups(moe, layer)) > 1:
            raise BadInput(
                f"an adaptive budget cannot keep the same number of experts in each of the {groups} routing "
                f"groups of layer {layer}; omit --adaptive"
            )


def top_k_after(evidence: Evidence) -> int | None:
    """min(top_k, K), K of the narrowest layer: a config holds one number for all layers."""
    before = [weights.top_k for weights in evidence.moe.layers.values() if weights.top_k is not None]
    if not before:
        return None
    widths = list(evidence.keep.values())
    if evidence.settings.adaptive:
        widths = [len(dominants) for dominants in adaptive_layer_dominants(evidence).values()]
    return min(max(before), min(widths))


def adaptive_layer_dominants(evidence: Evidence) -> dict[int, list[int]]:
    """Layer -> its dominants under one budget for all layers; a control copies its plan's."""
    if evidence.control_of:
        return {plan.layer: list(plan.dominants) for plan in evidence.control_of.layers}
    usage = [evidence.sums[f"layer.{layer}.tokens_BE"].sum(0).double().numpy() for layer in evidence.keep]
    return dict(zip(evidence.keep, adaptive_dominants(usage, max(evidence.keep.values())), strict=True))


# --- one layer


def merge_layer(evidence: Evidence, layer: LayerEvidence, group: Group, matched: bool) -> MergedLayer:
    """The layer's groups, weights, neuron orders and router."""
    n_experts = layer.weights.n_experts
    if layer.keep >= n_experts and not layer.settings.adaptive:
        grouping = ordered_grouping(n_experts, [(expert,) for expert in range(n_experts)], lambda one: one[0])
    else:
        grouping = group(evidence, layer)
    kind = layer.settings.merge_weights
    if layer.usage_E is None and kind == "usage":
        kind = "uniform"  # without text; `merging_warnings` reports it
    weights = merge_weights(grouping, kind, layer.usage_E, layer.reap_E)
    plan = LayerPlan(layer.number, n_experts, grouping.groups, grouping.dominants, weights)
    orders: dict[int, Tensor] = {}
    signs: dict[int, Tensor] = {}
    if matched:
        orders, signs = neuron_orders(layer.weights, grouping, layer.settings.signed, layer.device)
    if layer.settings.router == "tie" or layer.joins:
        return MergedLayer(plan, LayerFit(orders=orders, signs=signs), grouping, None)
    if layer.linear is not None and len(plan.groups) < n_experts:
        fit, folded = fold_linear_view(layer, plan, grouping, layer.linear)
        return MergedLayer(plan, replace(fit, orders=orders, signs=signs), grouping, folded)
    rows, cost = fold_rows(layer, plan, grouping)
    fit = LayerFit(rows.router_ED, rows.router_bias_E, rows.correction_bias_E, orders, signs)
    return MergedLayer(plan, fit, grouping, cost)


def neuron_orders(
    weights: LayerWeights, grouping: Grouping, signed: bool, device: str = "cpu"
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Order and signs of members' neurons; two experts are in memory at a time."""
    orders: dict[int, Tensor] = {}
    signs: dict[int, Tensor] = {}
    for members, dominant in zip(grouping.groups, grouping.dominants, strict=True):
        if len(members) == 1:
            continue
        target = weights.expert(dominant, finite=True)
        for member in members:
            if member == dominant:
                continue
            matching = match_neurons(
                target, weights.expert(member, finite=True), signed=signed, device=device
            )
            orders[member] = torch.from_numpy(matching.order_F)
            if signed and can_flip(target):
                signs[member] = torch.from_numpy(matching.sign_F)
    return orders, signs


def fold_rows(
    layer: LayerEvidence, plan: LayerPlan, grouping: Grouping
) -> tuple[RouterParts, FoldedRouter | None]:
    """Rows fitted on the layer's calibration states; weighted means without states or known gating."""
    stored = (layer.weights.router_ED, layer.weights.router_bias_E, layer.weights.correction_bias_E)
    rows, *biases = (None if lazy is None else lazy.read().float() for lazy in stored)
    if rows is None:
        raise BadInput(
            f"{layer.weights.layer_name}: its router has no row per expert to fit to a group; "
            "prune instead: --method frequency"
        )
    router = RouterParts(rows, *biases)
    if len(plan.groups) == plan.n_experts:
        return router, None
    start = fold_start(layer, plan, grouping)
    if layer.states is None or layer.gating is None or not layer.gating.explains:
        return mean_router(router, plan.groups, start), None
    top_k = min(layer.top_k or layer.gating.top_k, len(plan.groups))
    folded = fold_router(
        router, plan.groups, start, layer.states, layer.gating, top_k, layer.number, layer.device
    )
    return RouterParts(folded.router_KD, folded.router_bias_K, folded.correction_bias_K), folded


def fold_linear_view(
    layer: LayerEvidence, plan: LayerPlan, grouping: Grouping, view: LinearView
) -> tuple[LayerFit, FoldedRouter]:
    """Rows fitted to what the router makes of x; where it uses thresholds, they keep each group's load."""
    assert layer.states is not None
    assert layer.gating is not None
    states = replace(layer.states, x_TD=apply_in_chunks(view.reads, layer.states.x_TD, view.rows_ED.device))
    start = fold_start(layer, plan, grouping)
    top_k = min(layer.top_k or layer.gating.top_k, len(plan.groups))
    # `load_thresholds` measures the gates of a router with thresholds
    gating = replace(layer.gating, normalised=layer.gating.normalised or view.thresholds)
    router = RouterParts(view.rows_ED)
    folded = fold_router(router, plan.groups, start, states, gating, top_k, layer.number, layer.device)
    threshold_K = None
    if view.thresholds:
        threshold_K, scale = load_thresholds(folded.router_KD, plan.groups, states)
        folded = replace(folded, gate_scale=scale)
    stored = view.stored(folded.router_KD, threshold_K)
    rows_KD = stored.pop(view.rows_name)
    return LayerFit(rows_KD, state=stored), folded


def fold_start(layer: LayerEvidence, plan: LayerPlan, grouping: Grouping) -> tuple[tuple[float, ...], ...]:
    """The members' weights in the rows that a fit starts from."""
    return plan.weights if layer.usage_E is None else merge_weights(grouping, "usage", layer.usage_E)


# --- one layer after the other


class OneLayer:
    """SumCollector that shows another collector one layer only."""

    def __init__(self, layer: int, collector: SumCollector):
        self.layer, self.collector = layer, collector

    def consume(self, routing: Routing, block: Block) -> None:
        if routing.layer == self.layer:
            self.collector.consume(routing, block)

    def sums(self) -> Sums:
        return self.collector.sums()


def merge_in_sequence(
    evidence: Evidence, group: Group, matched: bool, collectors: tuple[Callable[[], SumCollector], ...]
) -> list[MergedLayer]:
    """Merge layer by layer, each on states recomputed through the merged layers before it (as in REAM).

    Reads the calibration text once per layer after the first; a streamed run once in all. The running model
    is restored at the end.
    """
    assert evidence.traced is not None
    traced, model = evidence.traced(), evidence.traced().model
    if isinstance(traced, StreamedModel):
        return merge_while_streaming(evidence, traced, group, matched, collectors)
    running = RunningExperts(model)
    blocks = {block.layer: block for block in find_blocks(model)}
    merged: list[MergedLayer] = []
    with ExitStack() as installed:
        for number in evidence.keep:
            layer = layer_evidence(evidence, number)
            if merged:
                layer = recalibrate_layer(evidence, layer, [collector() for collector in collectors])
            merged.append(merge_layer(evidence, layer, group, matched))
            plan, fit = merged[-1].plan, merged[-1].fit
            installed.enter_context(
                merged_in_place(running, blocks[number], plan, fit, layer.gating, layer.top_k)
            )
    return merged


def merge_while_streaming(
    evidence: Evidence,
    traced: StreamedModel,
    group: Group,
    matched: bool,
    collectors: tuple[Callable[[], SumCollector], ...],
) -> list[MergedLayer]:
    """Merge each layer when all text has passed it, and let the text pass it again, merged, to the next."""
    assert evidence.recalibrate is not None
    sample, seen = StateSample(evidence.settings.seed, layers=len(evidence.keep)), SeenBlocks()
    summed = [RoutedSums(), *(collector() for collector in collectors)]
    merged: dict[int, MergedLayer] = {}

    @contextmanager
    def revise(number: int) -> Iterator[None]:
        layer, block = layer_evidence(evidence, number), seen.blocks[number]
        if merged:
            layer = with_evidence(layer, summed, sample, block)
        merged[number] = merge_layer(evidence, layer, group, matched)
        plan, fit = merged[number].plan, merged[number].fit
        running = RunningExperts(traced.model)
        with merged_in_place(running, block, plan, fit, layer.gating, layer.top_k):
            yield

    with traced.revised(revise):
        evidence.recalibrate([*summed, sample, seen])
    return [merged[number] for number in evidence.keep]


class SeenBlocks:
    """SumCollector that holds the blocks whose routing it was shown."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        self.blocks[routing.layer] = block

    def sums(self) -> Sums:
        return {}


def recalibrate_layer(
    evidence: Evidence, layer: LayerEvidence, collectors: list[SumCollector]
) -> LayerEvidence:
    """The layer's evidence from another pass over the text through the model as merged so far."""
    assert evidence.recalibrate is not None
    sample = StateSample(evidence.settings.seed, layers=len(evidence.keep))
    summed = [RoutedSums(), *collectors]
    blocks = evidence.recalibrate(
        [OneLayer(layer.number, collector) for collector in (*summed, sample)]
    ).blocks
    return with_evidence(layer, summed, sample, blocks[layer.number])


def with_evidence(
    layer: LayerEvidence, summed: Sequence[SumCollector], sample: StateSample, block: Block
) -> LayerEvidence:
    """The layer's evidence replaced by what these collectors hold of it."""
    prefix = f"layer.{layer.number}."
    sums = {
        name.removeprefix(prefix): part.cpu()
        for one in summed
        for name, part in one.sums().items()
        if name.startswith(prefix)
    }
    states = sample.states[layer.number]
    gating = layer.gating if block.scoring is None else find_gating(states, block.scoring)
    return replace(layer, sums=sums, states=states, gating=gating)


@contextmanager
def merged_in_place(
    running: RunningExperts,
    block: Block,
    plan: LayerPlan,
    fit: LayerFit,
    gating: Gating | None,
    top_k: int | None,
) -> Iterator[None]:
    """Run the model with one layer merged: every member has the merged weights, so n rows point at K experts.

    That is `tie`. Where the plan has fitted rows, they choose instead, with the model's own scoring; blocks
    whose experts are not called with the router's choice (Llama 4, Switch) keep their rows, which the fitted
    ones approximate.
    """
    merged = {}
    for group, weights in zip(plan.groups, plan.weights, strict=True):
        if len(group) > 1:
            new = merged_expert(running.layers[plan.layer], group, weights, fit)
            merged.update(dict.fromkeys(group, new))
    hooks: list[Any] = []
    with running.replaced(plan.layer, merged):
        folds = fit.router_KD is not None and len(plan.groups) < plan.n_experts
        if folds and gating is not None and gating.explains and adapter_of(block) is CONTRACT:
            calls = BlockCalls()
            choose = choose_by_fit(plan, fit, gating, top_k, calls)
            hooks.append(block.module.register_forward_pre_hook(calls.begin))
            hooks.append(block.experts.register_forward_pre_hook(choose, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class BlockCalls:
    """Tells a call of the experts by their block from one that asks for given experts' outputs."""

    def __init__(self) -> None:
        self.pending = False

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.pending = True

    def take(self) -> bool:
        """True once per call of the block."""
        pending, self.pending = self.pending, False
        return pending


def choose_by_fit(
    plan: LayerPlan, fit: LayerFit, gating: Gating, top_k: int | None, calls: BlockCalls
) -> Callable[..., Any]:
    """A hook before the experts that replaces the router's choice by the fitted rows'.

    A group's expert is at the position of its dominant.
    """
    assert fit.router_KD is not None
    rows, bias, correction = fit.router_KD.float(), fit.router_bias_K, fit.correction_bias_K
    positions = torch.tensor(plan.dominants)
    fewer_k = min(top_k or gating.top_k, len(plan.groups))
    fitted = gating.with_bias(None if correction is None else correction.float())

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
        if not calls.take():
            return None
        x, index_TK, gates_TK = (*args, *kwargs.values())[:3]  # lab experts take a bound on filled slots too
        logits_TK = x.reshape(-1, x.shape[-1]).float().cpu() @ rows.T
        logits_TK = logits_TK if bias is None else logits_TK + bias.float()
        chosen_TK, new_gates_TK = fitted.route(logits_TK, fewer_k)
        return (x, positions[chosen_TK].to(index_TK), new_gates_TK.to(gates_TK)), {}

    return hook
