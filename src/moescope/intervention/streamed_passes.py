"""Changes of single layers in a model that is read layer by layer: all of them in one reading of the weights.

While a layer has its weights, the untouched hidden states pass through it, then those of every change so far.
A change leaves the untouched states at its own layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from moescope.errors import BadInput
from moescope.execution.collect import prefill_inputs
from moescope.execution.models import named_failures
from moescope.execution.streamed import StreamedModel
from moescope.execution.ways import size
from moescope.intervention.changes import changed
from moescope.intervention.passes import Effect, Means, Passes, Reached, place_of, touched
from moescope.intervention.plan import Planned


@torch.no_grad()
def judge_streamed(
    traced: StreamedModel,
    passes: Passes,
    plan: Mapping[int, Planned],
    means: Means | None,
    seed: int,
    advance: Callable[[int], None] = lambda layers: None,
) -> dict[int, Effect]:
    """Return the effect of every intervention; each must change one layer."""
    if several := [each for each in plan.values() if len(touched(each.changes, passes.blocks)) > 1]:
        raise BadInput(
            f"{several[0].label}: changes several layers; with --execution streamed give one layer per change"
        )
    tokens = sum(batch.ids_BL.size for batch in passes.batches)
    expected = traced.expect(tokens * (len(plan) + 1))
    if expected.disk_bytes:
        raise BadInput(
            f"{traced.name}: hidden states of {len(plan)} changes take "
            f"{size(passes.state_bytes() // 2 * (len(plan) + 1))}; give fewer documents with --max-tokens, "
            "fewer layers, or --memory"
        )
    traced.execution.announce(expected)
    places = {number: place_of(each.changes, passes.blocks) for number, each in plan.items()}
    routing = {number: passes.reached_at(layer) for number, (layer, _) in places.items()}
    inputs = [prefill_inputs(traced, batch) for batch in passes.batches]
    untouched: list[Any] = [{} for _ in inputs]
    branches: dict[int, list[Any]] = {}
    sums = {number: np.zeros((3, len(passes.documents))) for number in plan}

    def run(states: list[Any], number: int, reached: Reached | None) -> tuple[Any, Any]:
        passes.batch, passes.reached, passes.whole = number, reached, reached is None
        passes.capture.tokens = passes.tokens(passes.batches[number])
        with passes.capture, named_failures(traced):
            return traced.run(inputs[number], states[number], traced.model)

    passes.chosen = [{} for _ in inputs]
    with traced.replaying():
        for part in traced.loaded_parts():
            if part == traced.n_parts - 1:
                for at in range(len(inputs)):
                    before = passes.predictions(at, run(untouched, at, None)[1].logits)
                    passes.add_loss(at, before)
                    for number, total_3D in sums.items():
                        after = passes.predictions(at, run(branches[number], at, routing[number])[1].logits)
                        total_3D += passes.compared(at, before, after)
                continue
            here = [block.layer for block in traced.weights.layers[part].blocks]
            following = [run(untouched, number, None)[0] for number in range(len(inputs))]
            for number, (layer, _) in places.items():
                begins = layer in here
                if begins or number in branches:
                    states = untouched if begins else branches[number]
                    context: Any = nullcontext()
                    if begins:
                        context = changed(passes.blocks, plan[number].changes, means=means, seed=seed)
                    with context:
                        branches[number] = [run(states, at, routing[number])[0] for at in range(len(inputs))]
            untouched = following
            advance(1)
    return {
        number: passes.effect(routing[number], places[number][1], total) for number, total in sums.items()
    }
