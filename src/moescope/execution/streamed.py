"""Streamed runs: one decoder layer at a time reads its weights, and all batches pass through it.

For every layer and batch the model's own forward pass is called again (replay): layers before the current
one return what is stored of their output, the current one runs, and the pass stops there. So masks, rotary
tables and everything else that a layer receives is the model's own.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.execution.hidden_states import FileStates, MemoryStates
from moescope.execution.layer_weights import LayerWeights, read_by_layer
from moescope.execution.models import (
    HALF,
    TracedModel,
    find_model,
    loading,
    named_failures,
    quiet_transformers,
    with_tokenizer,
)
from moescope.execution.ways import LAYERS_HELD, Execution, Expected, free_on_devices, read_seconds, size
from moescope.processor import avoid_broken_amx
from moescope.run import versions
from moescope.storage import check_disk
from moescope.types import Integers


class Stop(BaseException):
    """Ends a pass after the current layer. No error, so that no model catches it as one."""


@dataclass
class StreamedModel(TracedModel):
    """A model of which one layer at a time has weights; `run` is called once per part and batch."""

    by_layer: ClassVar[bool] = True
    weights: LayerWeights = field(kw_only=True, repr=False)
    execution: Execution = field(kw_only=True, repr=False)
    current: int = -1  # number of the layer that runs; len(layers): norm and head
    outputs: dict[str, Any] = field(default_factory=dict, repr=False)  # stack -> its stored output
    last_called: int = -1
    versions: list[int] = field(default_factory=list, repr=False)  # of the stored outputs' tensors
    change: Callable[[int], None] | None = field(default=None, repr=False)  # of an MoE layer that was loaded
    # of an MoE layer that all batches have passed: they pass it again in this context, for the next layer
    revise: Callable[[int], AbstractContextManager[None]] | None = field(default=None, repr=False)

    @property
    def n_parts(self) -> int:
        """The layers, then norm and head together."""
        return len(self.weights.layers) + 1

    def expect(self, tokens: int) -> Expected:
        """Return what a run over so many tokens, padding included, takes; raise if layers are too large."""
        weights, limit = self.weights, self.execution.limit
        largest = max(weights.bytes_of(number) for number in range(len(weights.layers)))
        outer, devices = weights.bytes_of("outer"), free_on_devices(self.device)
        least, on_device = LAYERS_HELD * largest + outer, 0
        if devices:  # layers are joined on the host and copied
            least, on_device = (LAYERS_HELD - 1) * largest, 2 * largest + outer
        for needed, allowed, where, remedy in (
            (least, limit, "memory", f"give --memory {least // 10**6 + 1}MB or more"),
            (on_device, min(devices[:1], default=0), "GPU memory", "use --device cpu"),
        ):
            if needed > allowed:
                raise BadInput(
                    f"{self.name}: a streamed run needs at least {size(needed)} of {where} (layers of "
                    f"{size(largest)}), {size(allowed)} are there to use; {remedy}"
                )
        states = tokens * int(self.config.get_text_config().hidden_size) * weights.dtype.itemsize
        seconds = max(read_seconds(weights.checkpoint), self.compute_seconds(tokens))
        if least + states <= limit or self.execution.folder is None:
            note = "an interrupted run starts again, since hidden states stay in memory"
            return Expected(self.name, "streamed", least + states, 0, on_device, seconds, note)
        note = "an interrupted run resumes at the layer that it had reached"
        return Expected(self.name, "streamed", least, 2 * states, on_device, seconds, note)

    def open_states(self, ids: list[Integers], collected: list[str]) -> MemoryStates | FileStates:
        """Say what the run is expected to take, and return where its hidden states are stored."""
        expected = self.expect(sum(part.size for part in ids))
        self.execution.announce(expected)
        folder = self.execution.folder
        if not expected.disk_bytes or folder is None:
            return MemoryStates()
        checkpoint = self.weights.checkpoint
        facts = [checkpoint.header_hash(), str(self.weights.dtype), self.device, versions(), *collected]
        digest = hashlib.sha256(json.dumps(facts).encode())
        for part in ids:
            digest.update(str(part.shape).encode() + part.tobytes())
        states = FileStates(folder, digest.hexdigest())
        if not states.part:
            try:
                check_disk(folder, expected.disk_bytes)
            except BadInput:
                states.remove()
                raise
        return states

    def compute_seconds(self, tokens: int) -> float:
        """Return the time of the layers' products, from the time of one matrix product."""
        text = self.config.get_text_config()
        names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
        top_k = next((value for name in names if isinstance(value := getattr(text, name, None), int)), None)
        active = 0.0
        for layer in self.weights.layers:
            active += sum(weight.numel() for weight in layer.module.parameters())
            for block in layer.blocks:
                unused = 1 - min(top_k or block.n_experts, block.n_experts) / block.n_experts
                active -= unused * sum(weight.numel() for weight in block.experts.parameters())
        square = torch.ones(1024, 1024, dtype=self.weights.dtype, device=self.device)
        (square[:64] @ square).sum().item()  # the first product also sets up libraries
        start = time.perf_counter()
        (square @ square).sum().item()
        return 2 * active * tokens * (time.perf_counter() - start) / (2 * 1024**3)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let layers return their stored outputs until the end of the context."""
        layers = self.weights.layers
        for number, layer in enumerate(layers):
            layer.module.forward = partial(self.replay, number, layer.module.forward)
        try:
            with quiet_transformers():
                self.weights.load("outer")
                yield
        finally:
            for layer in layers:
                del layer.module.forward

    def loaded_parts(self, first: int = 0) -> Iterator[int]:
        """Yield the parts from `first` on, each with its weights; the next part is read meanwhile."""
        with ThreadPoolExecutor(1) as reader:
            upcoming: Future[None] = reader.submit(self.load_part, first)
            for part in range(first, self.n_parts):
                upcoming.result()
                self.change_part(part)
                if part + 1 < self.n_parts:
                    upcoming = reader.submit(self.load_part, part + 1)
                self.current = part
                try:
                    yield part
                finally:
                    if part < len(self.weights.layers):
                        self.weights.free(part)

    def change_layers(self, change: Callable[[int], None]) -> None:
        self.change = change

    def change_part(self, part: int) -> None:
        for layer in self.weights.layers[part : part + 1]:
            for block in layer.blocks if self.change is not None else ():
                self.change(block.layer)  # type: ignore[misc]

    @contextmanager
    def revised(self, revise: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
        """Let all batches pass every MoE layer twice: as it is, then in the context `revise(layer)`."""
        self.revise = revise
        try:
            yield
        finally:
            self.revise = None

    def load_part(self, part: int) -> None:
        self.weights.load(part if part < len(self.weights.layers) else "head")

    @contextmanager
    def layer_loaded(self, layer: int) -> Iterator[None]:
        parts = enumerate(self.weights.layers)
        part = next(at for at, each in parts if layer in [block.layer for block in each.blocks])
        with quiet_transformers():
            self.weights.load(part)
        self.change_part(part)
        try:
            yield
        finally:
            self.weights.free(part)

    @torch.no_grad()
    def run_all(self, inputs: Sequence[dict[str, Any]]) -> Iterator[Any]:
        states = self.open_states([each["input_ids"].cpu().numpy() for each in inputs], ["logits"])
        with self.replaying():
            for part in self.loaded_parts(states.part):
                for number, each in enumerate(inputs):
                    stored = states.get(number, self.device)
                    with named_failures(self):
                        outputs, output = self.run(each, stored, self.model)
                    if output is None:
                        states.put(number, outputs)
                    else:
                        yield output
                if part < self.n_parts - 1:
                    states.commit({})
        states.remove()

    def run(
        self, inputs: dict[str, Any], outputs: dict[str, Any], model: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Run the current part on one batch, of the stack without head, or of `model`.

        Returns the outputs of the stacks so far, which the next part needs, and the model's output, which
        only the last part has.
        """
        self.outputs, self.last_called = outputs, -1
        self.versions = [tensor._version for tensor in tensors_in(outputs)]
        output = None
        try:
            output = (model or self.runner)(**inputs)
        except Stop:
            pass
        else:
            if self.current < len(self.weights.layers):
                where = self.weights.layers[self.current].prefix.rstrip(".")
                raise self.rejected(f"{where} does not run in a forward pass")
        return self.outputs, output

    def replay(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of a layer's forward."""
        stack = self.weights.layers[number].stack
        if number <= self.last_called:
            raise self.rejected("its layers do not run one after the other")
        self.last_called = number
        if [tensor._version for tensor in tensors_in(self.outputs)] != self.versions:
            raise self.rejected("outputs of layers are changed in place between layers")
        if number < self.current:
            return self.outputs[stack]
        shared = [value for value in (*args, *kwargs.values()) if isinstance(value, dict | list)]
        sizes = [len(value) for value in shared]
        output = forward(*args, **kwargs)
        if [len(value) for value in shared] != sizes:
            raise self.rejected("its layers share state besides their outputs")
        self.outputs = {**self.outputs, stack: output}
        raise Stop

    def rejected(self, why: str) -> BadInput:
        return BadInput(
            f"{self.name}: model type {self.config.model_type!r} cannot be streamed ({why}); "
            "use --execution sharded or resident"
        )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def load_streamed(
    name: str,
    dtype: str,
    device: str,
    trust_remote_code: bool = False,
    execution: Execution | None = None,
) -> StreamedModel:
    """Prepare a model to be run layer by layer; no weight is read yet."""
    source = find_model(name, trust_remote_code)
    if source.checkpoint is None:
        raise BadInput(
            f"{name}: moescope cannot decode its quantisation, so it cannot be streamed; "
            "use --execution resident"
        )
    if not hasattr(source.kind, "get_init_context"):  # an auto class: Python code of the checkpoint
        raise BadInput(
            f"{name}: the model is defined by code inside the checkpoint, so it cannot be streamed; "
            "use --execution sharded or resident"
        )
    with loading(name):
        precision = source.precision(dtype)
        weights = read_by_layer(name, source.kind, source.config, source.checkpoint, precision, device)
    avoid_broken_amx(device, precision in HALF)
    model = StreamedModel(
        name,
        weights.model,
        weights.runner,
        None,
        device,
        weights=weights,
        execution=execution or Execution("streamed"),
    )
    return with_tokenizer(model, source)
