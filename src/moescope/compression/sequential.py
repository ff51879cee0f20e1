"""Merging layer after layer.

Each layer is judged on what the layers before it, already merged, make of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moescope.compression.applying import merged_expert
from moescope.compression.calibration import SumCollector, Sums
from moescope.compression.plan import LayerFit
from moescope.compression.rerouting import Gating, find_gating
from moescope.compression.running import RunningExperts
from moescope.compression.saliency import RoutedSums
from moescope.compression.states import StateSample
from moescope.execution.adapters import CONTRACT, Block, adapter_of, find_blocks
from moescope.types import LayerPlan, Routing

if TYPE_CHECKING:
    from moescope.compression.merging import LayerEvidence, MergedLayer
    from moescope.compression.method import Evidence, PlanSettings


class OneLayer:
    """A collector that is shown one layer only."""

    def __init__(self, layer: int, collector: SumCollector):
        self.layer, self.collector = layer, collector

    def consume(self, routing: Routing, block: Block) -> None:
        if routing.layer == self.layer:
            self.collector.consume(routing, block)

    def sums(self) -> Sums:
        return self.collector.sums()


def merge_in_sequence(
    given: Evidence,
    merge: Callable[[LayerEvidence], MergedLayer],
    collectors: Callable[[PlanSettings], list[SumCollector]],
) -> list[MergedLayer]:
    """Every layer's merging, each planned on states recomputed through the merged layers before it (as in
    REAM).

    Reads the calibrating text once for every layer after the first. The running model is left as it was.
    """
    from moescope.compression.merging import layer_evidence

    assert given.traced is not None
    assert given.reread is not None
    model = given.traced().model
    running = RunningExperts(model)
    blocks = {block.layer: block for block in find_blocks(model)}
    found: list[MergedLayer] = []
    with ExitStack() as installed:
        for layer in given.keep:
            own = layer_evidence(given, layer)
            if found:
                own = seen_anew(given, own, collectors(given.settings))
            found.append(merge(own))
            plan, fit = found[-1].plan, found[-1].fit
            installed.enter_context(merged_in_place(running, blocks[layer], plan, fit, own.gating, own.top_k))
    return found


def seen_anew(given: Evidence, own: LayerEvidence, collectors: list[SumCollector]) -> LayerEvidence:
    """The layer's evidence by one more pass over the text, through whatever the model has become."""
    assert given.reread is not None
    sample = StateSample(given.settings.seed, layers=len(given.keep))
    gathered = [RoutedSums(), *collectors]
    blocks = given.reread([OneLayer(own.layer, collector) for collector in (*gathered, sample)]).blocks
    start = f"layer.{own.layer}."
    sums = {name.removeprefix(start): part.cpu() for one in gathered for name, part in one.sums().items()}
    states = sample.states()[own.layer]
    scoring = blocks[own.layer].scoring
    gating = own.gating if scoring is None else find_gating(states, scoring)
    return replace(own, sums=sums, states=states, gating=gating)


@contextmanager
def merged_in_place(
    running: RunningExperts,
    block: Block,
    plan: LayerPlan,
    fit: LayerFit,
    gating: Gating | None,
    top_k: int | None,
) -> Iterator[None]:
    """The running model with one layer merged: every member has the merged expert's weights, so that n router
    rows point at K experts.

    That is `tie`. Where the plan has fitted rows, they choose instead, in the model's own way of scoring;
    blocks whose experts are
    not called with the router's choice (Llama 4, Switch) keep their own rows, which the fitted ones stand
    for.
    """
    made = {}
    for group, shares in zip(plan.groups, plan.weights, strict=True):
        if len(group) > 1:
            new = merged_expert(running.layers[plan.layer], group, shares, fit)
            made.update(dict.fromkeys(group, new))
    folds = (
        fit.router_KD is not None and gating is not None and gating.explains and adapter_of(block) is CONTRACT
    )
    hooks: list[Any] = []
    with running.replaced(plan.layer, made):
        if folds and len(plan.groups) < plan.n_experts:
            assert gating is not None
            own_call = OwnCall()
            choose = chosen_by(plan, fit, gating, top_k, own_call)
            hooks.append(block.module.register_forward_pre_hook(own_call.begins))
            hooks.append(block.experts.register_forward_pre_hook(choose, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class OwnCall:
    """Whether the experts are being called by their block.

    Or by somebody who asks them for the output of given experts.
    """

    def __init__(self) -> None:
        self.awaited = False

    def begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.awaited = True

    def taken(self) -> bool:
        """True once for every call of the block."""
        awaited, self.awaited = self.awaited, False
        return awaited


def chosen_by(
    plan: LayerPlan, fit: LayerFit, gating: Gating, top_k: int | None, own_call: OwnCall
) -> Callable[..., Any]:
    """A hook in front of the experts that puts the fitted rows' choice in place of the router's.

    Groups stand where their dominants do.
    """
    assert fit.router_KD is not None
    rows, bias, correction = fit.router_KD.float(), fit.router_bias_K, fit.correction_bias_K
    slots = torch.tensor(plan.dominants)
    chosen_k = min(top_k or gating.top_k, len(plan.groups))
    own = gating.with_bias(None if correction is None else correction.float())

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
        if not own_call.taken():
            return None
        x, index_TK, gates_TK = (*args, *kwargs.values())[:3]  # the lab's take a bound on filled slots too
        logits_TK = x.reshape(-1, x.shape[-1]).float().cpu() @ rows.T
        logits_TK = logits_TK if bias is None else logits_TK + bias.float()
        chosen_TK, new_TK = own.route(logits_TK, chosen_k)
        return (x, slots[chosen_TK].to(index_TK), new_TK.to(gates_TK)), {}

    return hook
