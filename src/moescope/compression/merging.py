"""Plans that merge.

Experts grouped by one of several likenesses, each group made one expert, and the router folded onto them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moescope.compression import hc_smoe, m_smoe, weights_clustering
from moescope.compression.grouping import Grouping, grouped, most_used, random_groups, sections, share_of_each
from moescope.compression.merge_weights import merge_weights
from moescope.compression.method import Decided, Evidence, Method, PlanSettings, rescaling_words
from moescope.compression.plan import LayerFit
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint
from moescope.families.counts import GROUPS
from moescope.families.reading import config_value, text_config
from moescope.geometry.matching import can_flip, match_neurons
from moescope.types import LayerPlan, LayerWeights

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.compression.calibration import SumCollector
    from moescope.compression.folding import FoldedRouter, RouterParts
    from moescope.compression.rerouting import Gating
    from moescope.compression.states import LayerStates
    from moescope.types import LinearView

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerEvidence:
    """One layer's part of what a method decides from; without a text, weights alone."""

    weights: LayerWeights
    keep: int
    n_groups: int  # routing groups, within which experts are merged
    settings: PlanSettings
    top_k: int | None  # after merging, alike in every layer
    sums: Mapping[str, Tensor]  # by their names in the layer
    states: LayerStates | None
    gating: Gating | None
    like: LayerPlan | None
    device: str = "cpu"  # where routers are fitted and neurons matched
    linear: LinearView | None = (
        None  # of a router that keeps more than rows, where rows for it can be fitted all the same
    )

    @property
    def layer(self) -> int:
        return self.weights.layer

    @property
    def joins(self) -> bool:
        """Whether a group takes over its dominant's part of the router.

        One that keeps more than rows, with nothing to fit them on.
        """
        return self.linear is None and (self.weights.router_ED is None or bool(self.weights.router_state))

    @property
    def usage_E(self) -> Array | None:
        """Tokens that chose each expert."""
        tokens = self.sums.get("tokens_BE")
        return None if tokens is None else tokens.sum(0).double().numpy()

    @property
    def reap_E(self) -> Array | None:
        from moescope.compression.saliency import scores

        named = {f"layer.0.{name}": tensor for name, tensor in self.sums.items()}
        return None if self.usage_E is None else scores(named, 0, "reap")


@dataclass(frozen=True)
class MergedLayer:
    """What becomes of one layer, and what its router's folding cost."""

    plan: LayerPlan
    fit: LayerFit
    grouping: Grouping
    folded: FoldedRouter | None


Group = Callable[[Evidence, LayerEvidence], Grouping]


def layer_evidence(given: Evidence, layer: int) -> LayerEvidence:
    start = f"layer.{layer}."
    own = {name.removeprefix(start): tensor for name, tensor in given.sums.items() if name.startswith(start)}
    return LayerEvidence(
        given.moe.layers[layer],
        given.keep[layer],
        routing_groups(given.moe, layer),
        given.settings,
        top_k_after(given),
        own,
        given.states.get(layer),
        given.gating.get(layer),
        given.like.get(layer),
        given.traced().device if given.traced is not None and given.states else "cpu",
        linear_view(given, layer),
    )


def linear_view(given: Evidence, layer: int) -> LinearView | None:
    if given.traced is None or layer not in given.states or not given.moe.layers[layer].router_state:
        return None
    from moescope.execution.adapters import find_blocks

    return next(block.linear for block in find_blocks(given.traced().model) if block.layer == layer)


def routing_groups(moe: MoeCheckpoint, layer: int) -> int:
    """DeepSeek's n_group, 1 where there are none."""
    found = config_value(text_config(moe.checkpoint.config), GROUPS, layer)
    return found if isinstance(found, int) and found > 1 else 1


def check_adaptive(moe: MoeCheckpoint) -> None:
    """Refuse one budget for all layers where tokens choose groups of experts first.

    Each group must be left as many.
    """
    for layer in moe.layers:
        if (groups := routing_groups(moe, layer)) > 1:
            raise BadInput(
                f"an adaptive budget cannot leave each of the {groups} routing groups of layer "
                f"{layer} as many experts; leave out --adaptive"
            )


def top_k_after(given: Evidence) -> int | None:
    """min(top_k, K), K of the narrowest layer: a config holds one number for all."""
    before = [weights.top_k for weights in given.moe.layers.values() if weights.top_k is not None]
    widths = [len(leaders) for leaders in adaptive_leaders(given).values()] if given.settings.adaptive else []
    return min(max(before), min(widths or given.keep.values())) if before else None


def adaptive_leaders(given: Evidence) -> dict[int, list[int]]:
    """Layer -> its dominant experts under one budget for all layers.

    A control has as many as the plan it is a control of.
    """
    if given.like:
        return {layer: list(plan.dominants) for layer, plan in given.like.items()}
    usage = [given.sums[f"layer.{layer}.tokens_BE"].sum(0).double().numpy() for layer in given.keep]
    found = m_smoe.adaptive_dominants(usage, max(given.keep.values()))
    return dict(zip(given.keep, found, strict=True))


# --- ways of grouping


def by_outputs(given: Evidence, own: LayerEvidence) -> Grouping:
    mean_ED = (own.sums["output_sum_ED"] / own.sums["output_tokens"].clamp(min=1)).double().numpy()
    measure = hc_smoe.MEASURES[0] if own.settings.distance == "default" else own.settings.distance
    assert own.usage_E is not None
    return hc_smoe.hc_smoe(mean_ED, own.usage_E, own.keep, measure, own.n_groups)


def by_router_logits(given: Evidence, own: LayerEvidence) -> Grouping:
    gram_EE = own.sums["logit_gram_EE"].double().numpy()
    assert own.usage_E is not None
    if not own.settings.adaptive:
        return m_smoe.m_smoe(gram_EE, own.usage_E, own.keep, own.n_groups)
    leaders = adaptive_leaders(given)[own.layer]
    return m_smoe.joined(m_smoe.profile_cosines(gram_EE), leaders)


def by_weights(given: Evidence, own: LayerEvidence) -> Grouping:
    experts = [own.weights.expert(number) for number in range(own.weights.n_experts)]
    measure = weights_clustering.MEASURES[0] if own.settings.distance == "default" else own.settings.distance
    grouping, _ = weights_clustering.weights_clusters(
        experts, own.keep, measure, own.n_groups, device=own.device
    )
    return grouping


def at_random(given: Evidence, own: LayerEvidence) -> Grouping:
    """Groups of the sizes of the plan it is a control of, or of random sizes."""
    n_experts = own.weights.n_experts
    generator = np.random.default_rng((own.settings.seed, own.layer, 7))
    choose = most_used(np.zeros(n_experts) if own.usage_E is None else own.usage_E)
    if own.like is not None:
        sizes = [len(group) for group in own.like.groups]
        if len(own.like.dropped) == 0:
            return random_groups(n_experts, sizes, generator, choose, own.n_groups)
    sizes = []
    for part in sections(n_experts, own.n_groups):
        count = share_of_each(own.keep, sections(n_experts, own.n_groups))
        sizes += [
            1 + int(more) for more in generator.multinomial(len(part) - count, np.full(count, 1 / count))
        ]
    return random_groups(n_experts, sizes, generator, choose, own.n_groups)


# --- one layer


def merge_layer(given: Evidence, own: LayerEvidence, group: Group, matched: bool) -> MergedLayer:
    """The layer's groups, weights, neuron orders and router."""
    n_experts = own.weights.n_experts
    if own.keep >= n_experts and not own.settings.adaptive:  # nothing to do, and nothing that could go wrong
        grouping = grouped(n_experts, [(expert,) for expert in range(n_experts)], lambda alone: alone[0])
    else:
        grouping = group(given, own)
    kind = own.settings.merge_weights
    if own.usage_E is None and kind == "usage":
        kind = "uniform"  # the default, where no text says who is used; `decide` tells
    shares = merge_weights(grouping, kind, own.usage_E, own.reap_E)
    plan = LayerPlan(own.layer, n_experts, grouping.groups, grouping.dominants, shares)
    orders, signs = (
        neuron_orders(own.weights, grouping, own.settings.signed, own.device) if matched else ({}, {})
    )
    if own.settings.router == "tie" or own.joins:
        return MergedLayer(plan, LayerFit(orders=orders, signs=signs), grouping, None)
    if own.linear is not None and len(plan.groups) < n_experts:
        fitted, cost = folded_view(own, plan, own.linear)
        return MergedLayer(plan, replace(fitted, orders=orders, signs=signs), grouping, cost)
    rows, folded = folded_router(own, plan)
    fit = LayerFit(rows.router_ED, rows.router_bias_E, rows.correction_bias_E, orders, signs)
    return MergedLayer(plan, fit, grouping, folded)


def neuron_orders(
    weights: LayerWeights, grouping: Grouping, signed: bool, device: str = "cpu"
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Member -> where its neurons go and their signs, for all that are not dominant.

    Two experts are in memory at a time.
    """
    import torch

    orders, signs = {}, {}
    for group, dominant in zip(grouping.groups, grouping.dominants, strict=True):
        others = [expert for expert in group if expert != dominant]
        leader = weights.expert(dominant) if others else None
        for member in others:
            assert leader is not None
            matching = match_neurons(leader, weights.expert(member), signed=signed, device=device)
            orders[member] = torch.from_numpy(matching.order_F)
            if signed and can_flip(leader):
                signs[member] = torch.from_numpy(matching.sign_F)
    return orders, signs


def folded_router(own: LayerEvidence, plan: LayerPlan) -> tuple[RouterParts, FoldedRouter | None]:
    """Rows fitted on the layer's calibration states.

    Without any, or where the way of choosing is not known, weighted means.
    """
    from moescope.compression.folding import RouterParts, fold_router, mean_router

    lazies = (own.weights.router_ED, own.weights.router_bias_E, own.weights.correction_bias_E)
    rows, *biases = (None if lazy is None else lazy.read().float() for lazy in lazies)
    if rows is None:
        raise BadInput(
            f"{own.weights.layer_name}: its router has no row for each expert, so none can be "
            "fitted to a group; prune instead: --method frequency"
        )
    router = RouterParts(rows, *biases)
    start = plan.weights if own.usage_E is None else merge_weights(as_grouping(plan), "usage", own.usage_E)
    if len(plan.groups) == plan.n_experts:
        return router, None
    if own.states is None or own.gating is None or not own.gating.explains:
        return mean_router(router, plan.groups, start), None
    top_k = min(own.top_k or own.gating.top_k, len(plan.groups))
    folded = fold_router(router, plan.groups, start, own.states, own.gating, top_k, own.layer, own.device)
    return RouterParts(folded.router_KD, folded.router_bias_K, folded.correction_bias_K), folded


def folded_view(own: LayerEvidence, plan: LayerPlan, view: LinearView) -> tuple[LayerFit, FoldedRouter]:
    """Rows fitted where a router meets them with something else than x, or goes by thresholds.

    Which then keep each group's load.
    """
    from moescope.compression.folding import RouterParts, fold_router, load_thresholds, through

    assert own.states is not None
    assert own.gating is not None
    states = replace(own.states, x_TD=through(view.reads, own.states.x_TD, view.rows_ED.device))
    start = plan.weights if own.usage_E is None else merge_weights(as_grouping(plan), "usage", own.usage_E)
    top_k = min(own.top_k or own.gating.top_k, len(plan.groups))
    gating = replace(
        own.gating, normalised=own.gating.normalised or view.thresholds
    )  # whose gates are looked at below
    folded = fold_router(
        RouterParts(view.rows_ED), plan.groups, start, states, gating, top_k, own.layer, own.device
    )
    threshold_K = None
    if view.thresholds:
        threshold_K, scale = load_thresholds(folded.router_KD, plan.groups, states)
        folded = replace(folded, gate_scale=scale)
    stored = view.stored(folded.router_KD, threshold_K)
    rows_KD = stored.pop(view.rows_name)
    return LayerFit(rows_KD, state=stored), folded


def as_grouping(plan: LayerPlan) -> Grouping:
    return Grouping(plan.n_experts, plan.groups, plan.dominants)


# --- the whole plan


def merged(group: Group, matched: bool) -> Callable[[Evidence], Decided]:
    def decide(given: Evidence) -> Decided:
        how = matched if given.like_matching is None else given.like_matching != "none"
        if given.settings.sequential and given.reread is not None:
            from moescope.compression.sequential import merge_in_sequence

            layers = merge_in_sequence(
                given, lambda own: merge_layer(given, own, group, how), collectors_of(group)
            )
        else:
            layers = [merge_layer(given, layer_evidence(given, layer), group, how) for layer in given.keep]
        return decided(given, layers, how, group is by_weights)

    return decide


def decided(given: Evidence, layers: list[MergedLayer], matched: bool, by_sketch: bool) -> Decided:
    settings, top_k = given.settings, top_k_after(given)
    before = {weights.top_k for weights in given.moe.layers.values()}
    tied = settings.router == "tie"
    joined = any(layer_evidence(given, layer).joins for layer in given.keep)
    matching = ("signed" if settings.signed else "unsigned") if matched else "none"
    return Decided(
        tuple(layer.plan for layer in layers),
        {layer.plan.layer: layer.fit for layer in layers},
        matching,
        "tie" if tied else "join" if joined else "fold",
        None if tied or {top_k} == before else top_k,
        notes(layers),
        tuple(said(given, layers, by_sketch)),
        {layer.plan.layer: layer.grouping for layer in layers},
    )


def notes(layers: list[MergedLayer]) -> dict[str, str | int | float | bool | None]:
    """What folding cost over all layers, for plan.json."""
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


def said(given: Evidence, layers: list[MergedLayer], by_sketch: bool) -> list[str]:
    """What a reader of the plan must know."""
    found = []
    usage = any(name.endswith("tokens_BE") for name in given.sums)
    if not usage and given.settings.merge_weights == "usage":
        found.append(
            "members count alike in a merged expert: without a text nobody knows how often each is used"
        )
    most = max(layer.plan.n_experts for layer in layers)
    if by_sketch and most * (most - 1) // 2 > weights_clustering.MOST_PAIRS:
        found.append(
            f"neurons were matched for {weights_clustering.MOST_PAIRS} pairs of experts a layer, "
            "the likeliest by a sketch of their weights; "
            "all others count as far apart as the farthest of these"
        )
    merges = [layer for layer in layers if len(layer.plan.groups) < layer.plan.n_experts]
    unfitted = [layer.plan.layer for layer in merges if layer.folded is None]
    if unfitted and given.settings.router == "fold" and not layer_evidence(given, unfitted[0]).joins:
        why = "no text was given to fit them on" if not usage else "the way of choosing was not recognised"
        listed = ", ".join(map(str, unfitted)) if len(unfitted) < len(merges) else "all layers"
        found.append(f"router rows of merged experts are their members' means in {listed}: {why}")
    scales = [layer.folded.gate_scale for layer in layers if layer.folded is not None]
    return found + rescaling_words("merging", scales)


def collectors_of(group: Group) -> Callable[[PlanSettings], list[SumCollector]]:
    def collectors(settings: PlanSettings) -> list[SumCollector]:
        from moescope.compression.profiles import ExpertMeans, LogitProfiles

        if group is by_outputs:
            return [ExpertMeans()]
        return [LogitProfiles()] if group is by_router_logits else []

    return collectors


def merging(
    name: str,
    words: str,
    group: Group,
    matched: bool,
    needs_text: bool = True,
    distances: tuple[str, ...] = (),
) -> Method:
    return Method(
        name,
        words,
        merged(group, matched),
        needs_text,
        True,
        "random_merge",
        collectors_of(group),
        distances=distances,
        adapts=group is by_router_logits,
    )


MERGING = [
    merging(
        "hc_smoe", "merges experts whose mean outputs are near", by_outputs, False, distances=hc_smoe.MEASURES
    ),
    merging(
        "hc_smoe_permuted",
        "the same, members' neurons first put into one order",
        by_outputs,
        True,
        distances=hc_smoe.MEASURES,
    ),
    merging(
        "m_smoe",
        "merges each rarely used expert into the one routers like at the same tokens",
        by_router_logits,
        False,
    ),
    merging("m_smoe_permuted", "the same, members' neurons first put into one order", by_router_logits, True),
    merging(
        "weights",
        "merges experts whose matched weights are near; needs no text",
        by_weights,
        True,
        needs_text=False,
        distances=weights_clustering.MEASURES,
    ),
    merging(
        "random_merge",
        "merges experts at random, neurons matched: the control",
        at_random,
        True,
        needs_text=False,
    ),
]
