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
from moescope.intervention.changes import Change, changed
from moescope.types import Array, Integers, Routing

SAME_LOGITS = 1e-3  # relative error of a replayed pass; 0 on CPUs, GPUs may add in any order
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
        output = forward(*args, **kwargs)
        self.outputs = {**self.outputs, stack: output}
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
                assert logits is not None
                self.inputs.append(self.kept)
                self.final.append(self.outputs)
                self.add_loss(number, logits)
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
        layer, expert = place_of(changes, self.blocks)
        if self.position[layer] < self.first:
            raise ValueError(f"layer {layer} is changed, but its input is not stored")
        reached = self.reached_at(layer)
        sums_3D = np.zeros((3, len(self.documents)))
        self.reached = reached
        try:
            with changed(self.blocks, changes, means=means, seed=seed), self.capture:
                for number, batch in enumerate(self.batches):
                    self.capture.tokens = self.tokens(batch)
                    after = self.run(number, self.first, self.inputs[number])
                    self.reached = None  # the head alone runs next; a lab model tells its routing again
                    before = self.run(number, len(self.layers), self.final[number])
                    self.reached = reached
                    assert after is not None
                    assert before is not None
                    sums_3D += self.compared(number, before, after)
        finally:
            self.reached = None
        return self.effect(reached, expert, sums_3D)

    # --- what happens in a pass

    def reached_at(self, layer: int) -> Reached:
        return Reached(layer, LayerRouting.of(self.blocks[layer].n_experts), len(self.documents))

    def add_loss(self, number: int, logits_BLV: Tensor) -> None:
        """Add the untouched loss of a batch."""
        known, next_N, document_N = self.predicted(number)
        parts = zip(torch.split(logits_BLV[known], POSITIONS), torch.split(next_N, POSITIONS), strict=True)
        loss = [-log_p(part).gather(-1, after[:, None])[:, 0] for part, after in parts]
        if loss:
            self.loss_D += self.by_document(torch.cat(loss), document_N)

    def compared(self, number: int, before_BLV: Tensor, after_BLV: Tensor) -> Array:
        """Return changed loss, KL and changed predictions of a batch, summed by document."""
        known, next_N, document_N = self.predicted(number)
        found = compare(before_BLV[known], after_BLV[known], next_N)
        return np.stack([self.by_document(values, document_N) for values in found])

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


def log_p(logits_NV: Tensor) -> Tensor:
    return logits_NV.double().log_softmax(-1)


def compare(before_NV: Tensor, after_NV: Tensor, next_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return per position the changed loss, KL(before || after), and whether the top prediction differs."""
    found: list[list[Tensor]] = [[], [], []]
    for before, after, following in zip(
        *(torch.split(part, POSITIONS) for part in (before_NV, after_NV, next_N)), strict=True
    ):
        p, q = log_p(before), log_p(after)
        found[0].append(-q.gather(-1, following[:, None])[:, 0])
        found[1].append((p.exp() * (p - q)).sum(-1))
        found[2].append(before.argmax(-1) != after.argmax(-1))
    loss, kl, differs = (torch.cat(parts) if parts else next_N.new_zeros(0) for parts in found)
    return loss, kl, differs
