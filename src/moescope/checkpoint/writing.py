"""Write a checkpoint: plan names, shapes and sizes, then stream the data in chunks."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.files import INDEX_NAMES, TORCH_DTYPES
from moescope.checkpoint.local import LocalFiles, is_pickle
from moescope.checkpoint.source import Checkpoint
from moescope.errors import BadInput, one_line
from moescope.storage import check_disk, sync, whole_folder

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARD_BYTES = 5 * 10**9
CHUNK_BYTES = 8 * 2**20  # in memory at a time when a tensor is copied
# the largest tokenizers are a third of that; larger files are weights of an unknown kind
SMALL_FILE_BYTES = 100 * 10**6
WEIGHT_ENDINGS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz",
    ".npy", ".pkl", ".tflite", ".index", ".distcp", ".tmp",
}  # fmt: skip
TEMPLATE_FOLDER = "additional_chat_templates"  # the one subfolder that belongs to a tokenizer


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write: its header, and where its bytes come from."""

    name: str
    dtype: str  # as safetensors names it: BF16, F8_E4M3, U8
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterable[memoryview]] = field(repr=False)


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written."""

    path: Path
    shards: tuple[str, ...]
    tensors: int
    total_bytes: int


@dataclass
class StoredBytes:
    """The stored bytes of a checkpoint's tensors, of any dtype; unchanged tensors are copied bit for bit."""

    checkpoint: Checkpoint
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        files = local_files(self.checkpoint)
        for file in self.checkpoint.file_names():
            self.ranges |= {name: (place.start, place.end) for name, place in files.stored[file].items()}

    def place(self, name: str) -> tuple[Path, int]:
        """Return file and offset; reading in this order needs no seeking."""
        return Path(self.checkpoint.stored[name].file), self.ranges[name][0]

    def nbytes(self, name: str) -> int:
        return self.ranges[name][1] - self.ranges[name][0]

    def chunks(self, name: str, first: int = 0, length: int | None = None) -> Iterator[memoryview]:
        """Yield the tensor's bytes, or `length` of them from byte `first` on, a few MB at a time."""
        file = Path(self.checkpoint.stored[name].file)
        begin, end = self.ranges[name]
        left = end - begin - first if length is None else length
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(left, 1))))
        damaged = one_line(f"{file}: cannot read tensor {name}", "download the file again", OSError)
        with damaged, file.open("rb", buffering=0) as opened:
            opened.seek(begin + first)
            while left:
                count = opened.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    raise OSError(f"it ends {left} bytes too early")
                left -= count
                yield buffer[:count]

    def copy(self, name: str, new_name: str | None = None) -> PlannedTensor:
        info = self.checkpoint.stored[name]
        return PlannedTensor(
            new_name or name, info.dtype, info.shape, self.nbytes(name), lambda: self.chunks(name)
        )


def local_files(checkpoint: Checkpoint) -> LocalFiles:
    """Return the checkpoint's local files; raise if it has none whose bytes can be copied."""
    files = checkpoint.files
    if not isinstance(files, LocalFiles) or any(is_pickle(name) for name in checkpoint.file_names()):
        raise BadInput(
            f"{checkpoint.shown}: only safetensors on this machine can be rewritten; `hf download MODEL "
            "--local-dir DIR`, then give DIR"
        )
    return files


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's data in row-major order, without a copy if it has that order."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def plan_tensor(name: str, tensor: Tensor) -> PlannedTensor:
    """Plan a tensor that is in memory."""
    dtype = next(
        (short for short, full in TORCH_DTYPES.items() if f"torch.{full}" == str(tensor.dtype)), None
    )
    if dtype is None:
        raise BadInput(
            f"tensor {name} has dtype {tensor.dtype}, which cannot be written; supported: "
            f"{', '.join(TORCH_DTYPES)}"
        )
    return PlannedTensor(name, dtype, tuple(tensor.shape), tensor.nbytes, lambda: [bytes_of(tensor)])


def write_checkpoint(
    folder: str | Path,
    tensors: Sequence[PlannedTensor],
    config: dict[str, Any] | None = None,
    source: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write a checkpoint that transformers loads, completely or not at all, in bounded memory.

    `source` is the folder whose tokenizer and other small files are copied, and its config.json if `config`
    is None. `progress` receives the bytes written and the total after each tensor.
    """
    shards = split_shards(tensors, max_shard_bytes)
    names = ["model.safetensors"]
    if (count := len(shards)) > 1:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    small = small_files(source, with_config=config is None) if source else {}
    with whole_folder(Path(folder)) as partial:
        headers = [header_bytes(shard) for shard in shards]
        needed = total + sum(map(len, headers)) + sum(path.stat().st_size for path in small.values())
        check_disk(partial.parent, needed, "free some space, or give a folder on another disk")
        copy_small_files(small, partial)
        for name, header, shard in zip(names, headers, shards, strict=True):
            for written in write_shard(partial / name, header, shard):
                done += written
                if progress:
                    progress(done, total)
        if len(shards) > 1:
            weight_map = {
                tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
            }
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_text(partial / INDEX_NAMES[0], index, sort=True)
        if config is not None:
            write_text(partial / "config.json", config)
    return Written(Path(folder), tuple(names), len(tensors), total)


def split_shards(tensors: Sequence[PlannedTensor], max_bytes: int) -> list[list[PlannedTensor]]:
    """Split into shards of at most that size, in order; a larger tensor has a shard of its own.

    Within a shard wide dtypes come first, so that every tensor starts at a multiple of its width.
    """
    if max_bytes < 1:
        raise BadInput(f"shards of {max_bytes} bytes hold nothing; give at least 1")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("two tensors of one name")
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return [
        sorted(shard, key=lambda tensor: -tensor.nbytes // max(math.prod(tensor.shape), 1))
        for shard in shards
    ]


def header_bytes(shard: Sequence[PlannedTensor]) -> bytes:
    """Return the header's length in 8 bytes and the header, padded so that the data are aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, header: bytes, shard: Sequence[PlannedTensor]) -> Iterator[int]:
    """Write the file; yield each tensor's number of bytes."""
    with path.open("wb") as file:
        file.write(header)
        for tensor in shard:
            written = 0
            for chunk in tensor.chunks():
                file.write(chunk)
                written += chunk.nbytes
            # the header has promised otherwise, and every later tensor would be shifted
            if written != tensor.nbytes:
                raise ValueError(f"tensor {tensor.name}: {written} bytes came, {tensor.nbytes} were planned")
            yield written
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, value: dict[str, Any], sort: bool = False) -> None:
    text = json.dumps(value, indent=2, sort_keys=sort, ensure_ascii=False) + "\n"
    # backslashreplace: lone surrogates, as JSON would write them
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    sync(path)


def small_files(source: Path, with_config: bool) -> dict[str, Path]:
    """Return name -> file of what belongs to a model besides weights: tokenizer, templates, licence, code."""
    files = {}
    for file in sorted((*source.iterdir(), *(source / TEMPLATE_FOLDER).glob("*"))):
        name = file.relative_to(source).as_posix()
        excluded = (
            file.suffix.lower() in WEIGHT_ENDINGS
            or name.endswith(".index.json")
            or name.startswith(".")
            or name == "trainer_state.json"
            or (name == "config.json" and not with_config)
        )
        if not excluded and is_inside(file, source) and file.stat().st_size <= SMALL_FILE_BYTES:
            files[name] = file
    return files


def is_inside(file: Path, source: Path) -> bool:
    """Whether a file is inside the folder or, in the hub's cache, inside its repository.

    A link may lead to any private file, and what is written here may be published.
    """
    if not file.is_file():
        return False
    folder = source.resolve()
    repository = folder.parent.parent if folder.parent.name == "snapshots" else folder
    return file.resolve().is_relative_to(repository)


def copy_small_files(files: dict[str, Path], folder: Path) -> None:
    for name, file in files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        try:
            shutil.copyfile(file, target)
        except PermissionError as error:
            raise BadInput(
                f"{error.filename}: no permission to read; change the file's mode or owner"
            ) from None
        sync(target)
        if target.parent != folder:
            sync(target.parent)
