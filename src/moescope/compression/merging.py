"""Merging: experts grouped by a method, each group made one expert, and the router fitted to the groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from moescope.compression.calibration import Gating, LayerStates, Makers
from moescope.compression.folding import (
    STATES_AT_ONCE,
    FoldedRouter,
    RouterParts,
    fold_router,
    load_thresholds,
    mean_router,
)
from moescope.compression.method import Evidence, Method, PlanSettings, Proposal, rescaling_warnings
from moescope.compression.plan import LayerFit
from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.families.counts import GROUPS
from moescope.families.reading import config_value, text_config
from moescope.geometry.matching import can_flip, match_neurons
from moescope.types import Array, LayerPlan, LayerWeights, LinearView

ChooseDominant = Callable[[tuple[int, ...]], int]


# --- groups of experts


@dataclass(frozen=True)
class Merge:
    """Two nodes joined. A node below n experts is that expert; n + i is the result of the layer's merge i."""

    left: int
    right: int
    height: float  # their distance, in the method's own measure
    size: int  # experts in the result
    done: bool  # False above the cut: drawn, not carried out


@dataclass(frozen=True)
class Grouping:
    """One layer's experts in groups, ordered by first member, each with its dominant member."""

    n_experts: int
    groups: tuple[tuple[int, ...], ...]
    dominants: tuple[int, ...]
    merges: tuple[Merge, ...] = ()
    unrelated: float | None = None  # chance level: the height at which unrelated experts would merge
    distance_EE: Array | None = field(default=None, repr=False, compare=False)  # in the method's measure


def routing_sections(n_experts: int, n_groups: int) -> list[list[int]]:
    """The experts of each routing group (DeepSeek's n_group), in order.

    Experts are merged within a routing group only, because a token chooses routing groups first.
    """
    size, rest = divmod(n_experts, n_groups)
    if rest:
        raise BadInput(
            f"{n_experts} experts do not divide into {n_groups} routing groups; check n_group in config.json"
        )
    return [list(range(start, start + size)) for start in range(0, n_experts, size)]


def keep_per_section(keep: int, sections: Sequence[Sequence[int]]) -> int:
    """How many groups of experts each routing group keeps."""
    n_experts, step = sum(map(len, sections)), len(sections)
    if keep < 1 or keep > n_experts or keep % step:
        nearest = min(max(round(keep / step), 1) * step, n_experts)
        raise BadInput(
            f"keep {keep} of {n_experts} experts: not possible in {step} routing groups; "
            f"nearest possible: {nearest}"
        )
    return keep // step


def average_linkage(distance_EE: Array, keep: int, choose: ChooseDominant, n_groups: int = 1) -> Grouping:
    """Cluster by average linkage (UPGMA, Sokal and Michener 1958) until `keep` groups are left.

    The distance of two groups is the mean distance of their members. The first n - keep merges are carried
    out, which is scipy's `fcluster(..., "maxclust")` except for ties, where that may leave fewer groups.
    """
    n_experts = len(distance_EE)
    sections = routing_sections(n_experts, n_groups)
    groups_each = keep_per_section(keep, sections)
    groups: list[tuple[int, ...]] = []
    merges: list[Merge] = []
    for section in sections:
        within = np.asarray(distance_EE)[np.ix_(section, section)]
        tree = linkage(squareform(within, checks=False), "average") if len(section) > 1 else np.zeros((0, 4))
        nodes = list(section)
        members: dict[int, tuple[int, ...]] = {node: (node,) for node in nodes}
        for index, (left, right, height, size) in enumerate(tree):
            done = index < len(section) - groups_each
            a, b, node = nodes[int(left)], nodes[int(right)], n_experts + len(merges)
            merges.append(Merge(a, b, float(height), int(size), done))
            nodes.append(node)
            if done:
                members[node] = (*members.pop(a), *members.pop(b))
        groups += members.values()
    return replace(ordered_grouping(n_experts, groups, choose, merges), distance_EE=np.asarray(distance_EE))


def ordered_grouping(
    n_experts: int, groups: Sequence[Sequence[int]], choose: ChooseDominant, merges: Sequence[Merge] = ()
) -> Grouping:
    """A `Grouping` with members ascending and groups ordered by first member."""
    ordered = sorted(tuple(sorted(group)) for group in groups)
    if sorted(expert for group in ordered for expert in group) != list(range(n_experts)):
        raise ValueError(f"groups {ordered} do not hold each of {n_experts} experts once")
    return Grouping(n_experts, tuple(ordered), tuple(choose(group) for group in ordered), tuple(merges))


def most_used(usage_E: Array) -> ChooseDominant:
    """Choose the member with the most tokens; of equals the first."""
    return lambda group: max(group, key=lambda expert: (usage_E[expert], -expert))


def most_central(distance_EE: Array) -> ChooseDominant:
    """Choose the member nearest to the others on average (the medoid); of equals the first."""
    return lambda group: min(group, key=lambda expert: (distance_EE[expert, list(group)].sum(), expert))


# --- a method that merges


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
    def joins(self) -> bool:
        """Whether a group takes its dominant's part of a router that has more state than rows to fit."""
        return self.linear is None and (self.weights.router_ED is None or bool(self.weights.router_state))

    @property
    def usage_E(self) -> Array | None:
        """Tokens routed to each expert."""
        tokens = self.sums.get("tokens_BE")
        return None if tokens is None else tokens.sum(0).double().numpy()


@dataclass(frozen=True)
class MergedLayer:
    """One merged layer, and the cost of fitting its router."""

    plan: LayerPlan
    fit: LayerFit
    grouping: Grouping
    folded: FoldedRouter | None


Group = Callable[[LayerEvidence], Grouping]


def merge_by(
    group: Group,
    name: str,
    summary: str,
    *,
    matched: bool,
    needs_text: bool = True,
    collectors: Makers = (),
    needs_logits: bool = False,
    caveats: Callable[[int], list[str]] = lambda n_experts: [],
) -> Method:
    """The method that merges the groups found by `group`, after matching neurons where `matched`."""

    def propose(evidence: Evidence) -> Proposal:
        control_of, router = evidence.control_of, evidence.settings.router
        match = matched if control_of is None else control_of.matching != "none"
        of_layers = [layer_evidence(evidence, layer) for layer in evidence.keep]
        layers = [merge_layer(layer, group, match) for layer in of_layers]
        joined = any(layer.joins for layer in of_layers)
        folded = [layer.folded for layer in layers if layer.folded is not None]
        costs = {
            "router_kl_of_mean_rows": [fold.kl_start for fold in folded],
            "router_kl": [fold.kl for fold in folded],
            "router_kl_held_out": [fold.kl_held_out for fold in folded if fold.kl_held_out is not None],
            "gate_scale": [fold.gate_scale for fold in folded],
        }
        top_k = top_k_after(evidence)
        unchanged = {top_k} == {weights.top_k for weights in evidence.moe.layers.values()}
        return Proposal(
            tuple(layer.plan for layer in layers),
            {layer.plan.layer: layer.fit for layer in layers},
            "signed" if match else "none",
            "join" if joined and router == "fold" else router,
            None if router == "tie" or unchanged else top_k,
            {name: float(np.mean(cost)) if cost else None for name, cost in costs.items() if folded},
            tuple(merging_warnings(evidence, layers, caveats)),
            {layer.plan.layer: layer.grouping for layer in layers},
        )

    return Method(
        name, summary, propose, needs_text, True, "random_merge", collectors, needs_logits=needs_logits
    )


def merge_both(
    group: Group, name: str, summary: str, collectors: Makers, needs_logits: bool = False
) -> tuple[Method, Method]:
    """The method without and with neuron matching."""
    matched = f"{name} with the members' neurons matched first"
    needs: dict[str, Any] = {"collectors": collectors, "needs_logits": needs_logits}
    return (
        merge_by(group, name, summary, matched=False, **needs),
        merge_by(group, f"{name}_permuted", matched, matched=True, **needs),
    )


def merging_warnings(
    evidence: Evidence, layers: list[MergedLayer], caveats: Callable[[int], list[str]]
) -> list[str]:
    uniform = "merge weights are uniform: without text the usage of experts is unknown"
    usage = any(name.endswith("tokens_BE") for name in evidence.sums)
    warnings = [*([] if usage else [uniform]), *caveats(max(layer.plan.n_experts for layer in layers))]
    merged = [layer for layer in layers if len(layer.plan.groups) < layer.plan.n_experts]
    unfitted = [layer for layer in merged if layer.folded is None]
    if unfitted and unfitted[0].fit.router_KD is not None:
        why = "gating was not recognised" if usage else "no text was given to fit them on"
        numbers = ", ".join(str(layer.plan.layer) for layer in unfitted)
        where = f"layers {numbers}" if len(unfitted) < len(merged) else "all layers"
        warnings.append(f"router rows of merged experts are their members' means in {where}: {why}")
    scales = [layer.folded.gate_scale for layer in layers if layer.folded is not None]
    return warnings + rescaling_warnings("merging", scales)


# --- evidence per layer


def layer_evidence(evidence: Evidence, layer: int) -> LayerEvidence:
    prefix = f"layer.{layer}."
    groups = config_value(text_config(evidence.moe.checkpoint.config), GROUPS, layer)  # DeepSeek's n_group
    control_of = evidence.control_of.layers if evidence.control_of else ()
    weights, traced, linear = evidence.moe.layers[layer], None, None
    if evidence.traced is not None and evidence.states:
        traced = evidence.traced()
    if traced is not None and layer in evidence.states and weights.router_state:
        linear = next(block.linear for block in find_blocks(traced.model) if block.layer == layer)
    return LayerEvidence(
        weights,
        evidence.keep[layer],
        groups if isinstance(groups, int) and groups > 1 else 1,
        evidence.settings,
        top_k_after(evidence),
        {name.removeprefix(prefix): part for name, part in evidence.sums.items() if name.startswith(prefix)},
        evidence.states.get(layer),
        evidence.gating.get(layer),
        next((plan for plan in control_of if plan.layer == layer), None),
        "cpu" if traced is None else traced.device,
        linear,
    )


def top_k_after(evidence: Evidence) -> int | None:
    """min(top_k, K), K of the narrowest layer: a config holds one number for all layers."""
    before = [weights.top_k for weights in evidence.moe.layers.values() if weights.top_k is not None]
    return min(max(before), *evidence.keep.values()) if before else None


# --- one layer


def merge_layer(layer: LayerEvidence, group: Group, matched: bool) -> MergedLayer:
    """The layer's groups, weights, neuron orders and router."""
    n_experts = layer.weights.n_experts
    if layer.keep >= n_experts:
        grouping = ordered_grouping(n_experts, [(expert,) for expert in range(n_experts)], lambda one: one[0])
    else:
        grouping = group(layer)
    weights = merge_weights(grouping, layer.usage_E)
    plan = LayerPlan(layer.weights.layer, n_experts, grouping.groups, grouping.dominants, weights)
    fit, cost = LayerFit(), None
    if layer.settings.router != "tie" and not layer.joins:
        linear = layer.linear is not None and len(plan.groups) < n_experts
        fit, cost = (fold_linear_view if linear else fold_rows)(layer, plan)
    if matched:
        orders, signs = neuron_orders(layer.weights, grouping, layer.device)
        fit = replace(fit, orders=orders, signs=signs)
    return MergedLayer(plan, fit, grouping, cost)


def neuron_orders(
    weights: LayerWeights, grouping: Grouping, device: str = "cpu"
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Order and signs of members' neurons; two experts are in memory at a time."""
    orders: dict[int, Tensor] = {}
    signs: dict[int, Tensor] = {}
    for members, dominant in zip(grouping.groups, grouping.dominants, strict=True):
        if len(members) == 1:
            continue
        target = weights.expert(dominant, finite=True)
        for member in (member for member in members if member != dominant):
            matching = match_neurons(target, weights.expert(member, finite=True), device=device)
            orders[member] = torch.from_numpy(matching.order_F)
            if can_flip(target):
                signs[member] = torch.from_numpy(matching.sign_F)
    return orders, signs


def fold_rows(layer: LayerEvidence, plan: LayerPlan) -> tuple[LayerFit, FoldedRouter | None]:
    """Rows fitted on the layer's calibration states; weighted means without states or known gating."""
    stored = (layer.weights.router_ED, layer.weights.router_bias_E, layer.weights.correction_bias_E)
    rows, *biases = (None if lazy is None else lazy.read().float() for lazy in stored)
    if rows is None:
        raise BadInput(
            f"{layer.weights.layer_name}: its router has no row per expert to fit to a group; "
            "prune instead: --method frequency"
        )
    router, folded = RouterParts(rows, *biases), None
    if len(plan.groups) < plan.n_experts:
        if layer.states is None or layer.gating is None or not layer.gating.explains:
            router = mean_router(router, plan.groups, plan.weights)
        else:
            folded = fold(layer, plan, router, layer.states, layer.gating)
            router = folded.router
    return LayerFit(router.router_ED, router.router_bias_E, router.correction_bias_E), folded


def fold(
    layer: LayerEvidence, plan: LayerPlan, router: RouterParts, states: LayerStates, gating: Gating
) -> FoldedRouter:
    top_k = min(layer.top_k or gating.top_k, len(plan.groups))
    return fold_router(router, plan.groups, plan.weights, states, gating, top_k, plan.layer, layer.device)


@torch.no_grad()
def fold_linear_view(layer: LayerEvidence, plan: LayerPlan) -> tuple[LayerFit, FoldedRouter]:
    """Rows fitted to what the router makes of x; where it uses thresholds, they keep each group's load."""
    view = layer.linear
    assert view is not None
    assert layer.states is not None
    assert layer.gating is not None
    parts = torch.split(layer.states.x_TD, STATES_AT_ONCE)
    x_TD = torch.cat([view.reads(part.to(view.rows_ED.device, torch.float32)).cpu() for part in parts])
    states = replace(layer.states, x_TD=x_TD)
    # `load_thresholds` measures the gates of a router with thresholds
    gating = replace(layer.gating, normalised=layer.gating.normalised or view.thresholds)
    folded = fold(layer, plan, RouterParts(view.rows_ED), states, gating)
    threshold_K = None
    if view.thresholds:
        threshold_K, scale = load_thresholds(folded.router.router_ED, plan.groups, states)
        folded = replace(folded, gate_scale=scale)
    stored = view.stored(folded.router.router_ED, threshold_K)
    return LayerFit(stored.pop(view.rows_name), state=stored), folded


def merge_weights(grouping: Grouping, usage_E: Array | None) -> tuple[tuple[float, ...], ...]:
    """A weight per member, in the shape of `grouping.groups`: its share of its group's tokens
    (Li et al. 2024, M-SMoE).

    Members of a group without tokens, or of unknown usage, get equal weights.
    """
    usage = np.ones(grouping.n_experts) if usage_E is None else usage_E
    used = [usage[list(group)] for group in grouping.groups]
    used = [tokens if tokens.sum() > 0 else np.ones(len(tokens)) for tokens in used]
    return tuple(tuple((tokens / tokens.sum()).tolist()) for tokens in used)


# --- the control: groups at random


def random_groups(
    n_experts: int,
    sizes: Sequence[int],
    generator: np.random.Generator,
    choose: ChooseDominant,
    n_groups: int = 1,
) -> Grouping:
    """Permute the experts into groups of these sizes; with routing groups, sizes of each in turn."""
    sections = routing_sections(n_experts, n_groups)
    ends = np.cumsum(sizes).tolist()
    if not {section[-1] + 1 for section in sections} <= set(ends):
        raise ValueError(
            f"sizes {list(sizes)} do not fill {n_groups} routing groups of {len(sections[0])} experts"
        )
    permuted = np.concatenate([generator.permutation(section) for section in sections])
    groups = [group.tolist() for group in np.split(permuted, ends[:-1])]
    return ordered_grouping(n_experts, groups, choose)


def group_at_random(layer: LayerEvidence) -> Grouping:
    """Groups of the sizes of the plan this is a control of, or of random sizes."""
    n_experts = layer.weights.n_experts
    generator = np.random.default_rng((layer.settings.seed, layer.weights.layer, 7))
    choose = most_used(np.zeros(n_experts) if layer.usage_E is None else layer.usage_E)
    if layer.control_of is not None and not layer.control_of.dropped:
        sizes = [len(group) for group in layer.control_of.groups]
    else:
        sections = routing_sections(n_experts, layer.n_groups)
        count = keep_per_section(layer.keep, sections)
        extra = [generator.multinomial(len(part) - count, np.full(count, 1 / count)) for part in sections]
        sizes = (1 + np.concatenate(extra)).tolist()
    return random_groups(n_experts, sizes, generator, choose, layer.n_groups)


RANDOM = merge_by(
    group_at_random,
    "random_merge",
    "merges experts at random with neurons matched: the control",
    matched=True,
    needs_text=False,
)
