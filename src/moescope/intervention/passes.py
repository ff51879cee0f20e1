"""Passes over the judged documents: the untouched model once, then per change only the layers it reaches.

The input of the first changed layer is kept per batch. While a change runs, the layers before return what is
stored of their output, so a pass costs the layers from the first changed one on. All passes have the same
batches: a suffix in which nothing is changed gives the logits of the whole pass, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moescope.compression.judging import LOGITS_PER_PASS, POSITIONS
from moescope.errors import BadInput
from moescope.execution.adapters import Block, relative_error
from moescope.execution.capture import Capture
from moescope.execution.collect import prefill_inputs
from moescope.execution.documents import Batch, Document, batches, windows
from moescope.execution.layer_weights import stacked_layers
from moescope.execution.models import TracedModel, named_failures
from moescope.execution.streamed import Stop, tensors_in
from moescope.execution.ways import Execution, size
from moescope.intervention.changes import Change, carried_out, prepared
from moescope.intervention.editing import Context
from moescope.types import Array, Integers, Routing

SAME_LOGITS = 1e-3  # relative error of a replayed pass; 0 on CPUs, GPUs may add in any order
CACHED = 2**16  # logits per core that are compared at once, half a megabyte in float64
CARRIED = "state of the router before"  # its place among the stored outputs
Means = Mapping[tuple[int, int], Tensor]


@dataclass(frozen=True)
class Effect:
    """A change against the untouched model: sums per judged document, and routing in the changed layer."""

    loss_D: Array
    kl_D: Array
    predictions_D: Integers
    choices_D: Integers  # in MoE layers after the first changed one
    choices_changed_D: Integers
    routing: dict[str, float | None]


@dataclass
class LayerRouting:
    """Choices per expert, and the entropy of the router's probabilities, summed over tokens."""

    counts_E: Integers
    entropy: float = 0.0
    tokens: int = 0
    has_scores: bool = True

    @classmethod
    def of(cls, n_experts: int) -> LayerRouting:
        return cls(np.zeros(n_experts, dtype=np.int64))

    def add(self, routing: Routing, real_T: Tensor) -> None:
        chosen = routing.chosen_TK[real_T]
        self.counts_E += torch.bincount(chosen[chosen >= 0], minlength=len(self.counts_E)).cpu().numpy()
        self.tokens += len(chosen)
        if routing.scores_TE is None:
            self.has_scores = False
        else:
            self.entropy += float(torch.special.entr(routing.scores_TE[real_T].double()).sum())

    def facts(self, expert: int | None) -> dict[str, float | None]:
        total, mean = int(self.counts_E.sum()), float(self.counts_E.mean())
        return {
            "load": None if expert is None or not total else float(self.counts_E[expert] / total),
            "entropy": self.entropy / self.tokens if self.has_scores and self.tokens else None,
            "cv": float(self.counts_E.std() / mean) if total else None,
        }


class Passes:
    """A resident model and the batches of the judged documents.

    with Passes(traced, documents, batch_size) as passes:
        passes.run_untouched(first=3)      # all layers once; keeps the input of decoder layer 3
        effect = passes.judge([change])    # layers 3 to the last, once
    """

    def __init__(self, traced: TracedModel, documents: Sequence[Document], batch_size: int = 8):
        self.traced, self.documents = traced, list(documents)
        rows = max(1, min(batch_size, LOGITS_PER_PASS // (traced.vocabulary * traced.window)))
        parts = batches(windows(documents, traced.window), rows)
        self.batches = [Batch.of(part, traced.padding) for part in parts]
        self.layers = stacked_layers(traced.name, traced.model, traced.runner)
        self.capture = Capture(traced.model, self.consume)
        self.blocks = {block.layer: block for block in self.capture.blocks}
        self.position = {
            block.layer: number for number, layer in enumerate(self.layers) for block in layer.blocks
        }
        # replaced routers hand a state from layer to layer beside the layers' outputs (SPECTRA)
        replaced = getattr(traced.model, "routers_instead", ())
        self.passing = replaced[0].passing if replaced else None
        self.layer_calls = 0
        self.seconds = 0.0  # of the untouched pass
        self.first = 0  # decoder layer whose inputs are stored
        self.inputs: list[dict[str, Any]] = []  # per batch: outputs of the layers before it
        self.final: list[dict[str, Any]] = []  # per batch: outputs of all layers
        self.chosen: list[dict[int, Tensor]] = []  # per batch: MoE layer -> untouched choices
        self.untouched = {layer: LayerRouting.of(block.n_experts) for layer, block in self.blocks.items()}
        index = {document.number: place for place, document in enumerate(self.documents)}
        self.document_BL = [
            np.array([index[row.number] for row in batch.rows])[:, None].repeat(batch.ids_BL.shape[1], 1)
            for batch in self.batches
        ]
        self.loss_D = np.zeros(len(self.documents))
        self.tokens_D = np.array([max(len(document.ids) - 1, 0) for document in self.documents])
        self.whole = True  # whether the first pass is under way
        self.reached: Reached | None = None  # what the current change does to routing
        self.start = self.end = 0
        self.batch, self.running = 0, False
        self.outputs: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.stack = ExitStack()

    def __enter__(self) -> Passes:
        for number, layer in enumerate(self.layers):
            module = layer.module
            own = vars(module).get("forward")
            restore = partial(setattr, module, "forward", own) if own else partial(delattr, module, "forward")
            module.forward = partial(self.call_layer, number, module.forward)
            self.stack.callback(restore)
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    # --- cost

    def state_bytes(self) -> int:
        """Memory that the kept hidden states take: inputs of the first changed layer, outputs of the last."""
        head = self.traced.model.get_output_embeddings().weight
        tokens = sum(batch.ids_BL.size for batch in self.batches)
        return 2 * tokens * int(head.shape[-1]) * int(head.dtype.itemsize)

    def calls(self, first: Sequence[int]) -> tuple[int, int]:
        """Layer calls of changes that begin at these decoder layers, and those of whole passes.

        All layers once, the layers between the first changed ones once more, then per change the layers that
        it reaches. One batch also checks that stored states are exact.
        """
        n, number = len(self.layers), len(self.batches)
        reached = n + max(first) - min(first) + sum(n - at for at in first)
        return number * reached + n - min(first), number * n * (1 + len(first))

    def check_memory(self, how: Execution) -> None:
        needed = self.state_bytes()
        if needed > how.limit:
            raise BadInput(
                f"{self.traced.name}: hidden states of the judged documents take {size(needed)}, "
                f"{size(how.limit)} are there to use; give fewer documents with --max-tokens, or --memory"
            )

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
        self.layer_calls += 1
        if self.passing is not None and number == self.start:
            self.passing.carried_TR = self.outputs.get(CARRIED)
        output = forward(*args, **kwargs)
        self.outputs = {**self.outputs, stack: output}
        if self.passing is not None and self.passing.carried_TR is not None:
            self.outputs[CARRIED] = self.passing.carried_TR
        return output

    @torch.no_grad()
    def run(
        self, number: int, start: int = 0, stored: dict[str, Any] | None = None, end: int = -1
    ) -> Tensor | None:
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
                logits = self.run(number)
                self.inputs.append(self.kept)
                self.final.append(self.outputs)
                self.add_loss(number, self.predictions(number, logits))
                seconds.append(time.perf_counter() - began)
        self.whole = False
        self.seconds = float(np.mean(seconds[1:] or seconds)) * len(seconds)  # the first one is checked

    def is_exact(self) -> bool:
        """Whether layers after the stored ones give what the whole pass gave, on the first batch."""
        stored = self.inputs[0]
        versions = [tensor._version for tensor in tensors_in(list(stored.values()))]
        again, head = self.run(0, self.first, stored), self.run(0, len(self.layers), self.final[0])
        assert again is not None
        assert head is not None
        unchanged = versions == [tensor._version for tensor in tensors_in(list(stored.values()))]
        return unchanged and relative_error(again, head) <= SAME_LOGITS

    def move_to(self, first: int) -> None:
        """Replace the stored inputs by those of a later decoder layer."""
        if first < self.first:
            raise ValueError(f"layer {first} lies before layer {self.first}")
        if first > self.first:
            start, self.first = self.first, first
            for number, stored in enumerate(self.inputs):
                self.run(number, start, stored, end=first)
                self.inputs[number] = self.outputs

    def judge(self, changes: Sequence[Change], means: Means | None = None, seed: int = 0) -> Effect:
        """Run the layers from the first changed one on with the changes, and compare."""
        return self.judge_each([changes], means, seed)[0]

    def judge_each(
        self, family: Sequence[Sequence[Change]], means: Means | None = None, seed: int = 0
    ) -> list[Effect]:
        """Judge interventions one by one on each batch, so that the untouched head runs once for all."""
        places = [place_of(changes, self.blocks) for changes in family]
        for layer, _ in places:
            if self.position[layer] < self.first:
                raise ValueError(f"layer {layer} is changed, but its input is not stored")
        edits = [prepared(changes, Context(self.blocks, means or {}, seed)) for changes in family]
        routing = [self.reached_at(layer) for layer, _ in places]
        sums = [np.zeros((3, len(self.documents))) for _ in family]
        for number, batch in enumerate(self.batches):
            before = self.predictions(number, self.run(number, len(self.layers), self.final[number]))
            for edit, reached, sums_3D in zip(edits, routing, sums, strict=True):
                self.reached = reached
                try:
                    with carried_out(edit), self.capture:
                        self.capture.tokens = self.tokens(batch)
                        after = self.run(number, self.first, self.inputs[number])
                finally:
                    self.reached = None
                sums_3D += self.compared(number, before, self.predictions(number, after))
        return [
            self.effect(reached, expert, sums_3D)
            for reached, (_, expert), sums_3D in zip(routing, places, sums, strict=True)
        ]

    # --- what happens in a pass

    def reached_at(self, layer: int) -> Reached:
        return Reached(layer, LayerRouting.of(self.blocks[layer].n_experts), len(self.documents))

    def add_loss(self, number: int, before: Predictions) -> None:
        """Add the untouched loss of a batch."""
        _, next_N, document_N = self.predicted(number)
        self.loss_D += self.by_document(before.loss(next_N), document_N)

    def compared(self, number: int, before: Predictions, after: Predictions) -> Array:
        """Return changed loss, KL and changed predictions of a batch, summed by document."""
        _, next_N, document_N = self.predicted(number)
        found = (after.loss(next_N), divergence(before, after), before.top_N != after.top_N)
        return np.stack([self.by_document(values, document_N) for values in found])

    def predictions(self, number: int, logits_BLV: Tensor | None) -> Predictions:
        """Return the predictions of a batch where it has a next token."""
        assert logits_BLV is not None
        return Predictions.of(logits_BLV[self.predicted(number)[0]])

    def effect(self, reached: Reached, expert: int | None, sums_3D: Array) -> Effect:
        """Return the sums of a change beside the untouched routing of its layer."""
        before = self.untouched[reached.layer].facts(expert)
        after = {f"{name}_changed": value for name, value in reached.routing.facts(expert).items()}
        loss_D, kl_D, predictions_D = sums_3D
        counts = (predictions_D.astype(np.int64), reached.choices_D, reached.changed_D)
        return Effect(loss_D, kl_D, *counts, before | after)

    def consume(self, routing: Routing) -> None:
        """Take note of a layer's routing."""
        number = self.batch
        real_T = torch.from_numpy(self.batches[number].real_BL.reshape(-1)).to(routing.chosen_TK.device)
        if self.whole:
            self.chosen[number][routing.layer] = routing.chosen_TK
            self.untouched[routing.layer].add(routing, real_T)
        elif self.reached is not None and self.position[routing.layer] >= self.start:
            document_T = self.document_BL[number].reshape(-1)
            self.reached.see(routing, real_T, self.chosen[number][routing.layer], document_T)

    def tokens(self, batch: Batch) -> Any:
        return batch.tokens(self.traced.device, "prefill", 0, batch.ids_BL.shape[1])

    def predicted(self, number: int) -> tuple[Tensor, Tensor, Integers]:
        """Return where a batch has a next token, that token, and the place of its document."""
        batch = self.batches[number]
        known_BL = batch.real_BL & (batch.next_BL >= 0)
        next_N = torch.from_numpy(batch.next_BL[known_BL]).to(self.traced.device)
        return torch.from_numpy(known_BL).to(self.traced.device), next_N, self.document_BL[number][known_BL]

    def by_document(self, values: Tensor, document_N: Integers) -> Array:
        weights = values.double().cpu().numpy()
        return np.bincount(document_N, weights, minlength=len(self.documents)).astype(np.float64)


class Reached:
    """Routing of a pass with a change, from the first changed layer on."""

    def __init__(self, layer: int, routing: LayerRouting, documents: int):
        self.layer, self.routing = layer, routing
        self.choices_D, self.changed_D = (np.zeros(documents, dtype=np.int64) for _ in range(2))

    def see(self, routing: Routing, real_T: Tensor, before_TK: Tensor, document_T: Integers) -> None:
        if routing.layer == self.layer:
            self.routing.add(routing, real_T)
        elif routing.layer > self.layer:
            chosen_TK = routing.chosen_TK
            valid_TK = (chosen_TK >= 0) & real_T[:, None]
            known_TK = (chosen_TK[:, :, None] == before_TK[:, None, :]).any(-1)
            for total, slots_TK in ((self.choices_D, valid_TK), (self.changed_D, valid_TK & ~known_TK)):
                slots_T = slots_TK.sum(-1).cpu().numpy()
                total += np.bincount(document_T, slots_T, minlength=len(total)).astype(np.int64)


def touched(changes: Sequence[Change], blocks: Mapping[int, Block]) -> list[int]:
    """Return the MoE layers that are changed."""
    return sorted({layer for change in changes for layer in change.layers or blocks})


def place_of(changes: Sequence[Change], blocks: Mapping[int, Block]) -> tuple[int, int | None]:
    """Return the first changed layer, and the changed expert where it is the only one."""
    layers = touched(changes, blocks)
    experts = {expert for change in changes for expert in change.experts}
    return layers[0], experts.pop() if len(layers) == 1 and len(experts) == 1 else None


@dataclass(frozen=True)
class Predictions:
    """Next-token logits of some positions, their normalisers log Σ exp, and the most likely tokens."""

    logits_NV: Tensor
    normaliser_N: Tensor
    top_N: Tensor

    @classmethod
    def of(cls, logits_NV: Tensor) -> Predictions:
        parts = torch.split(logits_NV, rows_at_once(logits_NV))
        normalisers = [part.double().logsumexp(-1) for part in parts]
        return cls(logits_NV, torch.cat(normalisers), torch.cat([part.argmax(-1) for part in parts]))

    def loss(self, next_N: Tensor) -> Tensor:
        return self.normaliser_N - self.logits_NV.gather(-1, next_N[:, None])[:, 0].double()


def rows_at_once(logits_NV: Tensor) -> int:
    """Positions whose distributions are in float64 at once: on a CPU as many as its caches hold."""
    if logits_NV.device.type != "cpu":
        return POSITIONS
    return max(1, CACHED // max(logits_NV.shape[-1], 1)) * torch.get_num_threads()


def divergence(before: Predictions, after: Predictions) -> Tensor:
    """KL(before || after) = Σ p (a - b) + B - A per position, with logits a and b and normalisers A and B."""
    rows = rows_at_once(before.logits_NV)
    parts = zip(
        *(torch.split(part, rows) for part in (before.logits_NV, before.normaliser_N, after.logits_NV)),
        strict=True,
    )
    found = []
    for a_NV, normaliser_N, b_NV in parts:
        a_NV = a_NV.double()
        p_NV = (a_NV - normaliser_N[:, None]).exp_()
        found.append(torch.linalg.vecdot(p_NV, a_NV.sub_(b_NV)))
    return torch.cat(found) + (after.normaliser_N - before.normaliser_N)
