"""Streamed runs: one decoder layer at a time reads its weights, and all batches pass through it.

For every layer and batch the model's own forward pass is called again (replay): layers before the current
one return what is stored of their output, the current one runs, and the pass stops there. So masks, rotary
tables and everything else that a layer receives is the model's own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar
from zipfile import ZipFile

import torch
from torch import Tensor

from moescope.errors import BadInput, one_line, reason, reject_if
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
from moescope.storage import atomic_file, check_disk, remove, write_point
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
    change: Callable[[int], None] = field(default=lambda layer: None, repr=False)  # of a loaded MoE layer

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
            reject_if(
                needed > allowed,
                f"{self.name}: a streamed run needs at least {size(needed)} of {where} (layers of "
                f"{size(largest)}), {size(allowed)} are there to use; {remedy}",
            )
        states = tokens * int(self.config.get_text_config().hidden_size) * weights.dtype.itemsize
        seconds = max(read_seconds(weights.checkpoint), self.compute_seconds(tokens))
        memory, disk, note = least, 2 * states, "an interrupted run resumes at the layer that it had reached"
        if least + states <= limit or self.execution.folder is None:
            memory, disk = least + states, 0
            note = "an interrupted run starts again, since hidden states stay in memory"
        return Expected(self.name, "streamed", memory, disk, on_device, seconds, note)

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
        weights = [weight for layer in self.weights.layers for weight in layer.module.parameters()]
        active: float = sum(weight.numel() for weight in weights)
        for block in (block for layer in self.weights.layers for block in layer.blocks):
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
            for block in layer.blocks:
                self.change(block.layer)

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

    def run_all(self, inputs: Sequence[dict[str, Any]]) -> Iterator[Any]:
        states = self.open_states([each["input_ids"].cpu().numpy() for each in inputs], ["logits"])
        return (output for _, output in self.run_parts(inputs, states, self.model) if output is not None)

    @torch.no_grad()
    def run_parts(
        self,
        inputs: Sequence[dict[str, Any]],
        states: MemoryStates | FileStates,
        model: Any = None,
        begin: Callable[[int], None] = lambda number: None,
        record: Callable[[int], Any] = lambda part: {},
    ) -> Iterator[tuple[int, Any]]:
        """Run all batches through one part after the other; yield a batch's number and the model's output.

        Only the last part has an output. `begin` is called before each pass with the number of its batch;
        `record` returns what a part has collected, for a run that resumes. Hidden states are left behind
        after an error only where a run can resume from them.
        """
        try:
            with self.replaying():
                for part in self.loaded_parts(states.part):
                    for number, each in enumerate(inputs):
                        begin(number)
                        with named_failures(self):
                            outputs, output = self.run(each, states.get(number, self.device), model)
                        yield number, output
                        if output is None:
                            states.put(number, outputs)
                    if part < self.n_parts - 1 and isinstance(states, FileStates):
                        states.commit(record(part))
        except BaseException:
            if states.part == 0:
                states.remove()
            raise
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
        with suppress(Stop):
            output = (model or self.runner)(**inputs)
            if self.current == len(self.weights.layers):
                return self.outputs, output
            where = self.weights.layers[self.current].prefix.rstrip(".")
            raise self.rejected(f"{where} does not run in a forward pass")
        return self.outputs, None

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
    reject_if(
        not hasattr(source.kind, "get_init_context"),  # an auto class: Python code of the checkpoint
        f"{name}: the model is defined by code inside the checkpoint, so it cannot be streamed; "
        "use --execution sharded or resident",
    )
    with loading(name):
        precision = source.precision(dtype)
        weights = read_by_layer(name, source.kind, source.config, source.checkpoint, precision, device)
    avoid_broken_amx(device, precision in HALF)
    how, parts = execution or Execution("streamed"), (weights.model, weights.runner)
    model = StreamedModel(name, *parts, None, device, weights=weights, execution=how)
    return with_tokenizer(model, source)


# --- hidden states of all batches between two layers: in memory, or in two folders that take turns
#
# While layer l runs, its inputs are in one folder and its outputs go to the other. When all are written, a
# manifest that names the next layer takes the place of the last one, so a killed run continues at the layer
# that it had reached. The files hold checksums: if one has changed since, all layers run again.

MANIFEST = "manifest.json"
REMEDY = "free some space, then give the same command to resume"


class MemoryStates:
    """Hidden states in memory: a run that is interrupted starts again."""

    part = 0  # the first part to run

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def get(self, batch: int, device: str) -> Any:
        return place(self.values.get(batch, {}), device)

    def put(self, batch: int, value: Any) -> None:
        self.values[batch] = place(value, "cpu")

    def records(self) -> Iterator[Any]:
        """Yield what earlier parts had collected before the run was interrupted."""
        return iter(())

    def remove(self) -> None:
        self.values.clear()


class FileStates:
    """Hidden states in two folders of a folder, and what each part has collected.

    `key` identifies model, precision and batches: what a run with another key left is removed.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self.key, self.part = folder, key, 0
        self.batches = 0  # that are written for the next part
        self.digests: list[str] = []  # of what each part has collected
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            manifest = read_manifest(folder)
            if manifest.get("key") == key:
                with reading(folder):
                    part, digests = operator.index(manifest["part"]), list(manifest["digests"])
                    if part != len(digests):
                        raise ValueError(f"part {part}")
                    if all(is_whole(self.file(part, batch)) for batch in range(manifest["batches"])):
                        self.part, self.digests = part, digests
                        return
                logging.getLogger("moescope").warning(
                    f"moescope: {self.file(part)} has changed since it was written; its pass over the text "
                    "starts again"
                )
            for file in sorted(folder.iterdir()):
                remove(file, folder)

    def file(self, part: int, batch: int | None = None) -> Path:
        """Return the file with a part's inputs of a batch, or the folder of all batches."""
        folder = self.folder / f"states-{part % 2}"
        return folder if batch is None else folder / f"{batch:06d}.pt"

    def get(self, batch: int, device: str) -> Any:
        if self.part == 0:
            return {}
        unstorable = f"{self.folder}: a layer returns what cannot be stored between layers"
        with (
            reading(self.folder),
            one_line(unstorable, "use --execution sharded or resident", UnpicklingError),
        ):
            return torch.load(self.file(self.part, batch), device, weights_only=True)

    def put(self, batch: int, value: Any) -> None:
        folder = self.file(self.part + 1)
        try:
            with writing(folder):
                write_point(creates=True)
                folder.mkdir(exist_ok=True)
                torch.save(value, self.file(self.part + 1, batch))
        except BadInput:
            remove(folder, self.folder)  # room for run.json to say what happened
            raise
        self.batches = max(self.batches, batch + 1)

    def commit(self, record: Any) -> None:
        """Make the outputs of the current part the inputs of the next one; store what it has collected."""
        with atomic_file(self.record_file(self.part), REMEDY) as partial, writing(partial):
            torch.save(record, partial)
            digests = [*self.digests, hashlib.sha256(partial.read_bytes()).hexdigest()]
        manifest = {"key": self.key, "part": self.part + 1, "batches": self.batches, "digests": digests}
        with atomic_file(self.folder / MANIFEST, REMEDY) as partial:
            partial.write_text(json.dumps(manifest))
        self.part, self.batches, self.digests = self.part + 1, 0, digests

    def record_file(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.pt"

    def records(self) -> Iterator[Any]:
        for part, digest in enumerate(self.digests):
            with reading(self.folder):
                stored = self.record_file(part).read_bytes()
                if hashlib.sha256(stored).hexdigest() != digest:
                    raise ValueError(f"{self.record_file(part).name} has changed")
                yield torch.load(BytesIO(stored), weights_only=True)

    def remove(self) -> None:
        remove(self.folder, self.folder.parent)


def is_whole(file: Path) -> bool:
    """Return whether a file of torch.save holds what was written, by the checksums in it."""
    with suppress(Exception), ZipFile(file) as stored:  # changed bytes can raise anything
        return stored.testzip() is None
    return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of what is stored; empty if there is none."""
    manifest = None
    with suppress(OSError, ValueError):
        manifest = json.loads((folder / MANIFEST).read_text())
    return manifest if isinstance(manifest, dict) else {}


def writing(file: Path) -> AbstractContextManager[None]:
    """Turn a full disk into one line; torch.save raises a RuntimeError for it."""
    return one_line(f"{file}: cannot be written", REMEDY, (OSError, RuntimeError))


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn whatever damaged files raise into one line."""
    try:
        yield
    except (BadInput, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadInput(
            f"{folder}: the stored hidden states are damaged ({reason(error)}); "
            "give the command with --overwrite"
        ) from None


def place(value: Any, device: str) -> Any:
    """Return nested tensors on the device; from a GPU to pinned memory, which is copied fastest.

    Copies are only queued: what runs on the GPU later sees them done, the CPU after a synchronisation.
    """
    if isinstance(value, Tensor):
        if value.is_cuda and device == "cpu":
            return torch.empty_like(value, device=device, pin_memory=True).copy_(value, non_blocking=True)
        return value.detach().to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: place(part, device) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [place(part, device) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
