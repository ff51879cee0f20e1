"""A model of transformers without weights, whose layers are read from the checkpoint one at a time."""

from __future__ import annotations

import ctypes
import inspect
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from moescope.checkpoint import Checkpoint
from moescope.checkpoint.files import Index, StoredTensor
from moescope.checkpoint.local import LocalFiles
from moescope.errors import BadInput, one_line, reject_if
from moescope.execution.adapters import Block, find_blocks
from moescope.execution.models import DEFECT, is_finite, output_embeddings, runner_of, stored_defect

M_MMAP_THRESHOLD = -3  # of malloc.h
PIECE_BYTES = 64 * 2**20  # read at once
READERS = min(4, os.cpu_count() or 4)  # threads that read pieces; as many as transformers loads with
UNFIT = "check config.json against the weights"


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


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Copy on a GPU's stream (None on a CPU) in this context; at its end the copies are there."""
    with torch.cuda.stream(stream):
        yield
    if stream is not None:
        stream.synchronize()


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
        value, how = self.checkpoint.read(self.name), self.checkpoint.packed.get(self.name)
        if how is not None and any(part.endswith("_blocks") for part in how.parts):
            value = value.mT.contiguous()  # GPT-OSS packs [out, in] and computes with [in, out]
        with on_stream(self.stream):
            return value.to(self.device)


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
        stored: dict[str, tuple[StoredTensor, Tensor]] = {}  # with the memory to read into
        by_file: dict[str, list[tuple[StoredTensor, Tensor]]] = {}
        for name in names:
            file = self.checkpoint.tensors[name].file_name
            if name not in self.checkpoint.packed and file in local.stored:
                self.checkpoint.check_readable(name)
                place = local.stored[file][name]
                memory = torch.empty(place.end - place.start, dtype=torch.uint8, device=self.device)
                stored[name] = place, memory
                by_file.setdefault(file, []).append(stored[name])
        if self.staged and self.buffers.empty():
            pin = self.device.startswith("cuda")
            for _ in range(READERS):
                self.buffers.put(torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=pin))
        with ThreadPoolExecutor(READERS) as pool:
            for reading in [
                pool.submit(self.read_piece, file, piece)
                for file, of_file in by_file.items()
                for piece in pieces(of_file, self.piece_bytes)
            ]:
                reading.result()
        return {name: place.from_bytes(memory) for name, (place, memory) in stored.items()}

    def read_piece(self, file: str, piece: list[tuple[int, Tensor]]) -> None:
        first, targets = piece[0][0], [target for _, target in piece]
        files: Any = self.checkpoint.files
        if not self.staged:
            files.read_into(file, first, targets)
            return
        buffer = self.buffers.get()
        try:
            stored = buffer[: sum(map(len, targets))]
            files.read_into(file, first, [stored])
            with on_stream(self.stream):
                for part, target in zip(torch.split(stored, [*map(len, targets)]), targets, strict=True):
                    target.copy_(part, non_blocking=True)
        finally:
            self.buffers.put(buffer)


def pieces(places: list[tuple[StoredTensor, Tensor]], most: int) -> Iterator[list[tuple[int, Tensor]]]:
    """Cut the tensors of a file into pieces of at most so many bytes, each without a gap.

    A piece is a list of places in the file and the memory that their bytes go to.
    """
    piece: list[tuple[int, Tensor]] = []
    end, room = -1, most
    for place, memory in sorted(places, key=lambda item: item[0].start):
        start = place.start
        while start < place.end:
            if piece and (not room or end != start):
                yield piece
                piece, room = [], most
            end = min(place.end, start + room)
            piece.append((start, memory[start - place.start : end - place.start]))
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
            with on_stream(self.stream):
                self.read_part(part)
            self.loaded.add(part)

    def read_part(self, part: int | str) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model as convert

        more = {"tp_plan": None} if "tp_plan" in inspect.signature(convert).parameters else {}
        for names in self.groups(part):
            ahead = self.reader.read(names) if isinstance(part, int) else {}
            place = (ahead, self.device, self.stream)
            weights = {name: LazyWeight(self.checkpoint, name, *place) for name in names}
            # whatever transformers raises on tensors that do not fit
            with one_line(f"{self.where(part)} cannot be loaded", UNFIT):
                info, _ = convert(self.model, weights, self.config, **more)
            problems = [*info.conversion_errors.values(), *(str(entry) for entry in info.mismatched_keys)]
            for problem in problems:
                why = problem.strip().splitlines()[-1][:160]
                raise BadInput(f"{self.where(part)} cannot be loaded ({why}); {UNFIT}")
        if part == "outer":
            self.model.tie_weights(missing_keys=set(self.absent), recompute_mapping=False)
        moved: dict[tuple[Any, ...], Tensor] = {}  # tied weights stay one tensor
        for module, attribute, tensor in list(self.tensors_of(part)):
            missing = f"{attribute} of {type(module).__name__} is missing"
            reject_if(tensor.is_meta, f"{self.where(part)} cannot be loaded ({missing}); {UNFIT}")
            if not is_finite(tensor):
                where = stored_defect(self.checkpoint, self.names[part])
                raise BadInput(f"{where or f'{self.name}: a weight of layer {part}'} {DEFECT}")
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if memory not in moved:
                moved[memory] = tensor.detach().to(self.device)
            self.replace_tensor(module, attribute, moved[memory])
        self.checkpoint.release()

    def free(self, part: int | str) -> None:
        """Drop a part's weights; routers, which are small, stay on the CPU."""
        self.wait_for_layer()  # their memory is read into at once
        routers = [block.router for block in (self.layers[part].blocks if isinstance(part, int) else ())]
        for module, attribute, tensor in list(self.tensors_of(part)):
            place = "cpu" if module in routers else "meta"
            self.replace_tensor(module, attribute, tensor.detach().to(place))
        self.loaded.discard(part)

    def wait_for_layer(self) -> None:
        """Wait until a GPU has done all that was asked of it, reading weights aside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def tensors_of(self, part: int | str) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yield the part's parameters and stored buffers: their module, their name in it, their value."""
        head, layers = output_embeddings(self.model), [layer.module for layer in self.layers]
        root = layers[part] if isinstance(part, int) else self.runner if part == "outer" else head
        others = [other for other in (*layers, head) if other is not None] if part == "outer" else []
        apart = {module for other in others for module in other.modules()}
        for module in root.modules() if root is not None else ():
            for attribute, tensor in {**module._parameters, **module._buffers}.items():
                temporary = tensor is None or attribute in module._non_persistent_buffers_set
                if module not in apart and not temporary:
                    yield module, attribute, tensor

    def replace_tensor(self, module: nn.Module, attribute: str, value: Tensor) -> None:
        if attribute in module._parameters:
            module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[attribute] = value

    def where(self, part: int | str) -> str:
        return f"{self.name}: {f'layer {part}' if isinstance(part, int) else f'the {part} weights'}"


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
    # By default glibc keeps freed blocks of up to 32 MB, such as experts, and a run held twice its layers.
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
    set_option(M_MMAP_THRESHOLD, 2**20)
    restore_buffers(model, device)
    runner = runner_of(model)
    layers = stacked_layers(name, model, runner)
    mapping: list[Any] = get_model_conversion_mapping(model)
    loading = LoadStateDictConfig(
        pretrained_model_name_or_path=name,
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=mapping,
    )
    names, targets, absent = assign_tensors(model, runner, layers, mapping, checkpoint)
    stream = torch.cuda.Stream(device) if device.startswith("cuda") else None  # type: ignore[no-untyped-call]
    counted = replace(checkpoint, files=CountedFiles(checkpoint.files))
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
        if isinstance(module, nn.ModuleList) and not inside and blocks_in(module, blocks):
            stacks.append(module)
    layers = [
        Layer(paths[stack], f"{paths[part]}.", part, blocks_in(part, blocks))
        for stack in stacks
        for part in stack
    ]
    if {id(block.module) for layer in layers for block in layer.blocks} != {id(b.module) for b in blocks}:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise BadInput(
            f"{name}: the decoder of model type {kind!r} is not a list of layers, so it cannot be streamed; "
            "use --execution sharded"
        )
    return layers


def blocks_in(module: nn.Module, blocks: list[Block]) -> tuple[Block, ...]:
    within = set(module.modules())
    return tuple(block for block in blocks if block.module in within)


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
        part: int | str | None = next(
            (at for prefix, at in prefixes.items() if target.startswith(prefix)), None
        )
        if part is None and of_head is not None and target.startswith(of_head) and target not in tied:
            part = "head"
        if part is None and (target.startswith(outer) or target in tied):
            part = "outer"
        if part is not None:
            names[part].append(name)
    return names, targets, frozenset(absent)
