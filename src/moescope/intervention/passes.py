"""Passes over the judged documents: the untouched model once, then per change only the layers it reaches.

The input of the first changed layer is kept per batch. While a change runs, the layers before return what is
stored of their output, so a pass costs the layers from the first changed one on. All passes have the same
batches: a suffix in which nothing is changed gives the logits of the whole pass, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moescope.execution.adapters import Block, relative_error
from moescope.execution.capture import Capture
from moescope.execution.collect import prefill_inputs
from moescope.execution.documents import Batch, Document
from moescope.execution.evaluation import EvaluationBatches, Predictions, kl_divergence
from moescope.execution.layer_weights import stacked_layers
from moescope.execution.models import TracedModel, named_failures
from moescope.execution.streamed import Stop, tensors_in
from moescope.intervention.changes import Change, carried_out, prepared
from moescope.intervention.editing import Context, attribute
from moescope.routing.counts import Counts, LayerCounts
from moescope.types import Integers, Routing

SAME_LOGITS = 1e-3  # relative error of a replayed pass; 0 on CPUs, GPUs may add in any order
CARRIED = "state of the router before"  # its place among the stored outputs
Means = Mapping[tuple[int, int], Tensor]


def counter() -> Counts:
    """Return counts of choices per expert, and of the entropy of the router's probabilities."""
    return Counts(pairs=False, decisions=["routing_entropy"], probabilities=False, order=False)


def routing_facts(counts: LayerCounts, expert: int | None) -> dict[str, float | None]:
    load_E, decided = counts.load_E, counts.sums("decided").sum()
    total, known = load_E.sum(), decided == counts.tokens > 0
    return {
        "load": None if expert is None or not total else float(load_E[expert] / total),
        "entropy": float(counts.sums("routing_entropy").sum() / decided) if known else None,
        "cv": float(load_E.std() / load_E.mean()) if total else None,
    }


class Passes(EvaluationBatches):
    """A resident model and the batches of the judged documents.

    with Passes(traced, documents, batch_size) as passes:
        passes.run_untouched(first=3)      # all layers once; keeps the input of decoder layer 3
        (effect,) = passes.judge([[change]])  # layers 3 to the last, once
    """

    def __init__(self, traced: TracedModel, documents: Sequence[Document], batch_size: int = 8):
        super().__init__(traced, documents, batch_size)
        self.layers = stacked_layers(traced.name, traced.model, traced.runner)
        self.capture = Capture(traced.model, self.consume)
        self.blocks = {block.layer: block for block in self.capture.blocks}
        self.position = {
            block.layer: number for number, layer in enumerate(self.layers) for block in layer.blocks
        }
        # replaced routers hand a state from layer to layer beside the layers' outputs (SPECTRA)
        replaced = getattr(traced.model, "routers_instead", ())
        self.passing = replaced[0].passing if replaced else None
        self.seconds = 0.0  # of the untouched pass
        self.first = 0  # decoder layer whose inputs are stored
        self.inputs: list[dict[str, Any]] = []  # per batch: outputs of the layers before it
        self.final: list[dict[str, Any]] = []  # per batch: outputs of all layers
        self.chosen: list[dict[int, Tensor]] = []  # per batch: MoE layer -> untouched choices
        self.untouched = counter()
        self.loss_D = np.zeros(len(self.documents))
        self.effect: Effect | None = None  # of the current change; None: untouched
        self.start = self.end = 0
        self.batch, self.running = 0, False
        self.outputs: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.stack = ExitStack()

    def __enter__(self) -> Passes:
        for number, layer in enumerate(self.layers):
            call = partial(self.call_layer, number, layer.module.forward)
            self.stack.enter_context(attribute(layer.module, "forward", call))
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    # --- cost

    @property
    def state_bytes(self) -> int:
        """Memory that the kept hidden states take: inputs of the first changed layer, outputs of the last."""
        head = self.traced.model.get_output_embeddings().weight
        tokens = sum(batch.ids_BL.size for batch in self.batches)
        return int(2 * tokens * head.shape[-1] * head.dtype.itemsize)

    def calls(self, first: Sequence[int]) -> tuple[int, int]:
        """Layer calls of changes that begin at these decoder layers, and those of whole passes.

        All layers once, the layers between the first changed ones once more, then per change the layers that
        it reaches. One batch also checks that stored states are exact.
        """
        n, number = len(self.layers), len(self.batches)
        reached = n + max(first) - min(first) + sum(n - at for at in first)
        return number * reached + n - min(first), number * n * (1 + len(first))

    # --- passes

    def call_layer(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of a decoder layer's forward: what is stored before `start`, a stop at `end`."""
        if not self.running:  # not called by `run`
            return forward(*args, **kwargs)
        stack = self.layers[number].stack
        if number < self.start:
            return self.outputs[stack]
        if number == self.end:
            raise Stop
        if number == self.first:
            self.kept = self.outputs
        if self.passing is not None and number == self.start:
            self.passing.carried_TR = self.outputs.get(CARRIED)
        output = forward(*args, **kwargs)
        self.outputs = {**self.outputs, stack: output}
        if self.passing is not None and self.passing.carried_TR is not None:
            self.outputs[CARRIED] = self.passing.carried_TR
        return output

    @torch.no_grad()
    def run(self, number: int, start: int = 0, stored: dict[str, Any] | None = None, end: int = -1) -> Any:
        """Run decoder layers `start` to `end` on a batch; return the logits, None where it stops before."""
        self.batch, self.start, self.end, self.outputs = number, start, end, stored or {}
        self.running = True
        try:
            with named_failures(self.traced):
                output = self.traced.model(**prefill_inputs(self.traced, self.batches[number]))
        except Stop:
            return None
        finally:
            self.running = False
        return output.logits

    def run_untouched(self, first: int) -> None:
        """Run the untouched model over all batches; keep the inputs of decoder layer `first`."""
        self.first, seconds = first, []
        with self.capture:
            for number, batch in enumerate(self.batches):
                began = time.perf_counter()
                self.chosen.append({})
                self.capture.tokens = self.tokens(batch)
                self.add_loss(self.predictions(number, self.run(number)))
                self.inputs.append(self.kept)
                self.final.append(self.outputs)
                seconds.append(time.perf_counter() - began)
        self.seconds = float(np.mean(seconds[1:] or seconds)) * len(seconds)  # the first one is checked

    def is_exact(self) -> bool:
        """Whether layers after the stored ones give what the whole pass gave, on the first batch."""
        stored = self.inputs[0]
        versions = [tensor._version for tensor in tensors_in(list(stored.values()))]
        again, head = self.run(0, self.first, stored), self.run(0, len(self.layers), self.final[0])
        unchanged = versions == [tensor._version for tensor in tensors_in(list(stored.values()))]
        return unchanged and relative_error(again, head) <= SAME_LOGITS

    def move_to(self, first: int) -> None:
        """Replace the stored inputs by those of a later decoder layer."""
        if first > self.first:
            start, self.first = self.first, first
            for number, stored in enumerate(self.inputs):
                self.run(number, start, stored, end=first)
                self.inputs[number] = self.outputs

    def judge(
        self, family: Sequence[Sequence[Change]], means: Means | None = None, seed: int = 0
    ) -> list[Effect]:
        """Run the layers from the first changed one on with each intervention's changes, and compare.

        Interventions are judged one by one on each batch, so that the untouched head runs once for all.
        """
        edits = [prepared(changes, Context(self.blocks, means or {}, seed)) for changes in family]
        effects = [Effect(changes, self) for changes in family]
        for number, batch in enumerate(self.batches):
            before = self.predictions(number, self.run(number, len(self.layers), self.final[number]))
            for edit, effect in zip(edits, effects, strict=True):
                self.effect = effect
                with carried_out(edit), self.capture:
                    self.capture.tokens = self.tokens(batch)
                    after = self.run(number, self.first, self.inputs[number])
                effect.add(before, self.predictions(number, after))
        return effects

    # --- what happens in a pass

    def add_loss(self, before: Predictions) -> None:
        """Add the untouched loss of a batch."""
        self.loss_D += self.by_document(before.loss_N, before.document_N)

    def consume(self, routing: Routing) -> None:
        """Take note of a layer's routing."""
        number, effect = self.batch, self.effect
        counted = effect is None or effect.layer == routing.layer
        if counted and routing.scores_TE is not None:  # for sums of entropies
            routing = replace(routing, scores_TE=routing.scores_TE.double())
        if effect is None:
            self.chosen[number][routing.layer] = routing.chosen_TK
            self.untouched.consume(routing)
        elif self.position[routing.layer] >= self.start:
            document_T = self.document_BL[number].reshape(-1)
            effect.see(routing, self.chosen[number][routing.layer], document_T)

    def tokens(self, batch: Batch) -> Any:
        return batch.tokens(self.traced.device, "prefill", 0, batch.ids_BL.shape[1])


class Effect:
    """A change against the untouched model: sums per judged document, and routing in the changed layer."""

    def __init__(self, changes: Sequence[Change], passes: Passes):
        self.passes, self.counts = passes, counter()
        self.layer, self.expert = place_of(changes, passes.blocks)
        self.sums_XD = np.zeros((5, len(passes.documents)))
        self.loss_D, self.kl_D, self.predictions_D, *choices = self.sums_XD
        self.choices_D, self.choices_changed_D = choices  # in MoE layers after the first changed one

    def add(self, before: Predictions, after: Predictions) -> None:
        """Add changed loss, KL and changed predictions of a batch."""
        effects = (after.loss_N, kl_divergence(before, after), before.top_N != after.top_N)
        self.sums_XD[:3] += [self.passes.by_document(values, before.document_N) for values in effects]

    @property
    def routing(self) -> dict[str, float | None]:
        """Load, entropy and CV of the layer, untouched and with the change."""
        (untouched,), (changed,) = self.passes.untouched.layers(self.layer), self.counts.layers()
        after = routing_facts(changed, self.expert)
        changes = {f"{name}_changed": value for name, value in after.items()}
        return routing_facts(untouched, self.expert) | changes

    def see(self, routing: Routing, before_TK: Tensor, document_T: Integers) -> None:
        if routing.layer == self.layer:
            self.counts.consume(routing)
            self.counts.count()  # now: many changes may be under way
        elif routing.layer > self.layer:
            assert routing.tokens is not None
            chosen_TK = routing.chosen_TK
            valid_TK = (chosen_TK >= 0) & routing.tokens.real_T[:, None]
            known_TK = (chosen_TK[:, :, None] == before_TK[:, None, :]).any(-1)
            for total_D, slots_TK in zip(self.sums_XD[3:], (valid_TK, valid_TK & ~known_TK), strict=True):
                slots_T = slots_TK.sum(-1).cpu().numpy()
                total_D += np.bincount(document_T, slots_T, minlength=len(total_D))


def touched(changes: Sequence[Change], blocks: Mapping[int, Block]) -> list[int]:
    """Return the MoE layers that are changed."""
    return sorted({layer for change in changes for layer in change.layers_of(blocks)})


def place_of(changes: Sequence[Change], blocks: Mapping[int, Block]) -> tuple[int, int | None]:
    """Return the first changed layer, and the changed expert where it is the only one."""
    layers = touched(changes, blocks)
    experts = {expert for change in changes for expert in change.experts}
    return layers[0], experts.pop() if len(layers) == 1 and len(experts) == 1 else None
