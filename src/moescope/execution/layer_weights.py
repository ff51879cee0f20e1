"""A model of transformers without weights, whose layers are read from the checkpoint one at a time."""

from __future__ import annotations

import ctypes
import inspect
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moescope.checkpoint import Checkpoint
from moescope.checkpoint.files import Index, StoredTensor
from moescope.checkpoint.local import LocalFiles
from moescope.errors import BadInput
from moescope.execution.adapters import Block, find_blocks
from moescope.execution.models import DEFECT, HALF, cause, runner_of

M_MMAP_THRESHOLD = -3  # of malloc.h
PIECE_BYTES = 64 * 2**20  # read at once
READERS = min(4, os.cpu_count() or 4)  # threads that read pieces; as many as transformers loads with
FLOATS = (*HALF, torch.float32, torch.float64)


class CountedFiles:
    """The files of a checkpoint, with a counter of the bytes read from them."""

    def __init__(self, files: Any):
        self.files, self.bytes_read, self.lock = files, 0, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        value: Tensor = self.files.read(name, tensor, index)
        with self.lock:
            self.bytes_read += value.nbytes
        return value

    def read_into(self, name: str, start: int, targets: list[Tensor]) -> None:
        self.files.read_into(name, start, targets)
        with self.lock:
            self.bytes_read += sum(map(len, targets))


@dataclass(frozen=True)
class LazyWeight:
    """A tensor of the checkpoint that is taken, or read and decoded, when transformers slices it."""

    checkpoint: Checkpoint
    name: str
    read_ahead: dict[str, Tensor]  # tensors leave it, so that their memory is free once they are converted
    device: str = "cpu"
    stream: Any = None  # of copies to a GPU, so that they do not wait for the layer that computes

    def __getitem__(self, index: Any) -> Tensor:
        if self.name in self.read_ahead:
            return self.read_ahead.pop(self.name)
        with torch.cuda.stream(self.stream):
            value = self.read().to(self.device)
        if self.stream is not None:
            self.stream.synchronize()
        return value

    def read(self) -> Tensor:
        value = self.checkpoint.read(self.name)
        how = self.checkpoint.packed.get(self.name)
        if how is not None and any(part.endswith("_blocks") for part in how.parts):
            value = value.mT.contiguous()  # GPT-OSS packs [out, in] and computes with [in, out]
        return value


class BulkReader:
    """Reads a layer's tensors from local files in large pieces, which leaves the interpreter to the layer
    that computes: what lies side by side in a file is one request.

    On a CPU the pieces go straight into the tensors. For a GPU they go through a few pinned buffers.
    """

    def __init__(self, checkpoint: Checkpoint, device: str, stream: Any, piece_bytes: int = PIECE_BYTES):
        self.checkpoint, self.device, self.stream, self.piece_bytes = checkpoint, device, stream, piece_bytes
        self.buffers: SimpleQueue[Tensor] = SimpleQueue()
        self.staged = not device.startswith("cpu")

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Return the tensors on the device; those that are quantised, remote or pickled are missing."""
        local: Any = getattr(self.checkpoint.files, "files", None)
        if not isinstance(local, LocalFiles):
            return {}
        places: dict[str, dict[str, StoredTensor]] = {}  # by file
        for name in names:
            file = self.checkpoint.tensors[name].file_name
            if name not in self.checkpoint.packed and file in local.stored:
                self.checkpoint.check_readable(name)
                places.setdefault(file, {})[name] = local.stored[file][name]
        tensors = {
            name: torch.empty(place.end - place.start, dtype=torch.uint8, device=self.device)
            for of_file in places.values()
            for name, place in of_file.items()
        }
        if self.staged and self.buffers.empty():
            for _ in range(READERS):
                pin = self.device.startswith("cuda")
                self.buffers.put(torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=pin))
        with ThreadPoolExecutor(READERS) as pool:
            for reading in [
                pool.submit(self.read_piece, file, piece, of_file, tensors)
                for file, of_file in places.items()
                for piece in pieces(of_file, self.piece_bytes)
            ]:
                reading.result()
        return {
            name: place.from_bytes(tensors[name])
            for of_file in places.values()
            for name, place in of_file.items()
        }

    def read_piece(
        self, file: str, piece: list[Span], places: dict[str, StoredTensor], tensors: dict[str, Tensor]
    ) -> None:
        targets = [
            tensors[name][start - places[name].start : end - places[name].start] for name, start, end in piece
        ]
        first, last = piece[0].start, piece[-1].end
        files: Any = self.checkpoint.files
        if not self.staged:
            files.read_into(file, first, targets)
            return
        buffer = self.buffers.get()
        try:
            files.read_into(file, first, [buffer[: last - first]])
            with torch.cuda.stream(self.stream):
                for span, target in zip(piece, targets, strict=True):
                    target.copy_(buffer[span.start - first : span.end - first], non_blocking=True)
            if self.stream is not None:
                self.stream.synchronize()
        finally:
            self.buffers.put(buffer)


class Span(NamedTuple):
    """Bytes `start` to `end` of a file, which belong to a tensor."""

    tensor: str
    start: int
    end: int


def pieces(places: dict[str, StoredTensor], most: int) -> Iterator[list[Span]]:
    """Cut the tensors of a file into pieces of at most so many bytes, each without a gap."""
    piece: list[Span] = []
    room = most
    for name, place in sorted(places.items(), key=lambda item: item[1].start):
        start = place.start
        while start < place.end:
            if piece and (not room or piece[-1].end != start):
                yield piece
                piece, room = [], most
            end = min(place.end, start + room)
            piece.append(Span(name, start, end))
            start, room = end, room - (end - start)
    if piece:
        yield piece


@dataclass(frozen=True)
class Layer:
    """One layer of a stack: `prefix` begins the names of its tensors in the model."""

    stack: str
    prefix: str
    module: nn.Module
    blocks: tuple[Block, ...] = ()


@dataclass
class LayerWeights:
    """The skeleton of a model on the meta device, and where every part of its weights is stored.

    Parts are the layers in the order in which they run, by number, then "outer" (embeddings, norms, whatever
    else the decoder has) and "head". transformers itself renames, converts and sets the tensors.
    """

    name: str
    model: Any
    runner: Any
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: str
    layers: list[Layer]
    names: dict[int | str, list[str]]  # part -> tensors of the checkpoint
    targets: dict[
        str, str
    ]  # tensor of the checkpoint -> name in the model, of the first if there are several
    absent: frozenset[str]  # names in the model without a tensor of their own: they are tied to others
    config: Any = field(repr=False)  # of transformers' loading
    loaded: set[int | str] = field(default_factory=set)
    stream: Any = None  # that reads weights; None on a CPU
    reader: BulkReader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.reader = BulkReader(self.checkpoint, self.device, self.stream)

    @property
    def bytes_read(self) -> int:
        return int(self.checkpoint.files.bytes_read)  # type: ignore[attr-defined]

    def bytes_of(self, part: int | str) -> int:
        """Return the size of a part in memory."""
        shapes = (self.checkpoint.tensors[name].shape for name in self.names[part])
        return sum(map(prod, shapes)) * self.dtype.itemsize

    def groups(self, part: int | str) -> Iterator[list[str]]:
        """Yield a part's tensors in groups that are read and joined one after the other.

        So fewer are held at once. What becomes one tensor of the model stays together.
        """
        by_target: dict[str, list[str]] = {}
        for name in self.names[part]:
            by_target.setdefault(self.targets[name], []).append(name)
        group, held, most = list[str](), 0, self.bytes_of(part) / 2
        for names in by_target.values():
            size = sum(self.checkpoint.tensors[name].parameters for name in names) * self.dtype.itemsize
            if group and held + size > most:
                yield group
                group, held = [], 0
            group, held = group + names, held + size
        yield group

    def load(self, part: int | str) -> None:
        """Read a part's weights and put them on the device."""
        if part not in self.loaded:
            with torch.cuda.stream(self.stream):
                self.read_part(part)
            if self.stream is not None:
                self.stream.synchronize()
            self.loaded.add(part)

    def read_part(self, part: int | str) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model as convert

        more = {"tp_plan": None} if "tp_plan" in inspect.signature(convert).parameters else {}
        for names in self.groups(part):
            ahead = self.reader.read(names) if isinstance(part, int) else {}
            place = (ahead, self.device, self.stream)
            weights = {name: LazyWeight(self.checkpoint, name, *place) for name in names}
            try:
                info, _ = convert(self.model, weights, self.config, **more)
            except BadInput:
                raise
            except Exception as error:  # whatever transformers raises on tensors that do not fit
                raise BadInput(self.unusable(part, cause(error))) from None
            problems = [*info.conversion_errors.values(), *(str(entry) for entry in info.mismatched_keys)]
            if problems:
                raise BadInput(self.unusable(part, problems[0].strip().splitlines()[-1][:160]))
        if part == "outer":
            self.model.tie_weights(missing_keys=set(self.absent), recompute_mapping=False)
        moved: dict[tuple[Any, ...], Tensor] = {}  # tied weights stay one tensor
        for module, attribute, tensor in list(self.tensors_of(part)):
            if tensor.is_meta:
                raise BadInput(self.unusable(part, f"{attribute} of {type(module).__name__} is missing"))
            checkable = tensor.dtype in FLOATS and tensor.numel()
            if checkable and not torch.stack(tensor.detach().aminmax()).isfinite().all():
                raise BadInput(f"{self.defect(part)} {DEFECT}")
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if memory not in moved:
                moved[memory] = tensor.detach().to(self.device)
            self.replace_tensor(module, attribute, moved[memory])
        self.checkpoint.release()

    def free(self, part: int | str) -> None:
        """Drop a part's weights; routers, which are small, stay on the CPU."""
        self.wait_for_layer()  # their memory is read into at once
        routers = {block.router for layer in self.layers_of(part) for block in layer.blocks}
        for module, attribute, tensor in list(self.tensors_of(part)):
            place = "cpu" if module in routers else "meta"
            self.replace_tensor(module, attribute, tensor.detach().to(place))
        self.loaded.discard(part)

    def wait_for_layer(self) -> None:
        """Wait until a GPU has done all that was asked of it, reading weights aside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def layers_of(self, part: int | str) -> list[Layer]:
        return [self.layers[part]] if isinstance(part, int) else []

    def tensors_of(self, part: int | str) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yield the part's parameters and stored buffers: their module, their name in it, their value."""
        if isinstance(part, int):
            roots, excluded = [self.layers[part].module], set[nn.Module]()
        else:
            head = self.head()
            of_head = set(head.modules()) if head is not None else set()
            of_layers = {module for layer in self.layers for module in layer.module.modules()}
            roots = [self.runner] if part == "outer" else [head] if head is not None else []
            excluded = of_layers | of_head if part == "outer" else set()
        for root in roots:
            for module in root.modules():
                if module in excluded:
                    continue
                temporary = module._non_persistent_buffers_set
                own = {**module._parameters, **module._buffers}
                for attribute, tensor in own.items():
                    if tensor is not None and attribute not in temporary:
                        yield module, attribute, tensor

    def replace_tensor(self, module: nn.Module, attribute: str, value: Tensor) -> None:
        if attribute in module._parameters:
            module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[attribute] = value

    def head(self) -> nn.Module | None:
        return output_embeddings(self.model)

    def unusable(self, part: int | str, why: str) -> str:
        where = f"layer {part}" if isinstance(part, int) else f"the {part} weights"
        return f"{self.name}: {where} cannot be loaded ({why}); check config.json against the weights"

    def defect(self, part: int | str) -> str:
        """Return file and name of the part's first stored tensor with NaN or Inf."""
        for name in self.names[part]:
            if not self.checkpoint.read(name).isfinite().all():
                return f"{self.checkpoint.tensors[name].file}: tensor {name}"
        return f"{self.name}: a weight of layer {part}"


def return_freed_memory() -> None:
    """Let this process give freed tensors back to the system at once.

    By default glibc keeps blocks of up to 32 MB, such as single experts, and a run held twice its layers.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, 2**20)


def output_embeddings(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def read_by_layer(
    name: str, kind: Any, config: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: str
) -> LayerWeights:
    """Build the skeleton of a model and plan which tensors each of its layers needs; reads headers only."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    with ExitStack() as contexts:
        for context in kind.get_init_context(dtype, False, False, None):
            contexts.enter_context(context)
        model = kind(config)
    model.eval()
    return_freed_memory()
    restore_buffers(model, device)
    runner = runner_of(model)
    layers = stacked_layers(name, model, runner)
    mapping: list[Any] = get_model_conversion_mapping(model)
    counted = replace(checkpoint, files=CountedFiles(checkpoint.files))
    loading = LoadStateDictConfig(
        pretrained_model_name_or_path=name,
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=mapping,
    )
    names, targets, absent = assign_tensors(model, runner, layers, mapping, checkpoint)
    stream = torch.cuda.Stream(device) if device.startswith("cuda") else None  # type: ignore[no-untyped-call]
    found = (layers, names, targets, absent, loading)
    return LayerWeights(name, model, runner, counted, dtype, device, *found, stream=stream)


def restore_buffers(model: Any, device: str) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies, and put them on the device.

    transformers computes them when it initialises weights; what is marked as initialised stays as it is.
    It does so on the CPU for resident models too, so that both have the same values.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True
    model._move_missing_keys_from_meta_to_device(set(), {"": "cpu"}, None, None)
    model.initialize_weights()
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if module._buffers[name] is not None:
                module._buffers[name] = module._buffers[name].to(device)


def stacked_layers(name: str, model: nn.Module, runner: nn.Module) -> list[Layer]:
    """Return the layers of every stack in the order in which they run: an encoder's before a decoder's."""
    paths = {module: path for path, module in model.named_modules()}
    blocks = find_blocks(model)
    stacks: list[nn.ModuleList] = []
    for module in runner.modules():
        inside = any(module in set(stack.modules()) for stack in stacks)
        if isinstance(module, nn.ModuleList) and not inside:
            within = set(module.modules())
            if any(block.module in within for block in blocks):
                stacks.append(module)
    layers = []
    for stack in stacks:
        for part in stack:
            within = set(part.modules())
            own = tuple(block for block in blocks if block.module in within)
            layers.append(Layer(paths[stack], f"{paths[part]}.", part, own))
    if {id(block.module) for layer in layers for block in layer.blocks} != {id(b.module) for b in blocks}:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise BadInput(
            f"{name}: the decoder of model type {kind!r} is not a list of layers, so it cannot be streamed; "
            "use --execution sharded"
        )
    return layers


def assign_tensors(
    model: Any, runner: nn.Module, layers: list[Layer], mapping: list[Any], checkpoint: Checkpoint
) -> tuple[dict[int | str, list[str]], dict[str, str], frozenset[str]]:
    """Return each part's tensors of the checkpoint, their names in the model, and those that get none."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key
    from transformers.core_model_loading import rename_source_key as rename

    known = model.state_dict()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    paths = {module: path for path, module in model.named_modules()}
    outer = f"{paths[runner]}." if paths[runner] else ""
    head = output_embeddings(model)
    of_head = f"{paths[head]}." if head is not None else None
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    absent, targets = set(known), dict[str, str]()
    names: dict[int | str, list[str]] = {"outer": [], "head": [], **{at: [] for at in range(len(layers))}}
    prefixes = {layer.prefix: at for at, layer in enumerate(layers)}
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        target, _ = rename(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, _ = rename(name, [], [], model.base_model_prefix, known)
        if target not in known:
            continue  # such as layers of multi-token prediction
        absent.discard(target)
        targets[name] = target
        at = next((at for prefix, at in prefixes.items() if target.startswith(prefix)), None)
        if at is not None:
            names[at].append(name)
        elif target.startswith(outer) or target in tied:
            is_head = of_head is not None and target.startswith(of_head) and target not in tied
            names["head" if is_head else "outer"].append(name)
        elif of_head is not None and target.startswith(of_head):
            names["head"].append(name)
    return names, targets, frozenset(absent)
