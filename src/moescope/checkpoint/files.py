"""The files of a checkpoint, wherever they are stored, and the tensors their headers declare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moescope.errors import BadInput, one_line

if TYPE_CHECKING:
    from torch import Tensor, dtype

Index = int | slice | None  # of a tensor's first axis: one index, a slice, or all of it

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_CONFIG_BYTES = 10_000_000  # parsed JSON takes up to twenty times as much memory
MAX_INDEX_BYTES = 64_000_000  # the largest seen have a third of that
INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_NAMES = ("model.safetensors", "pytorch_model.bin")
SUFFIXES = (".safetensors", ".bin")
GGUF = "GGUF files are not supported; give the folder of a checkpoint saved as safetensors"
FLOAT_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
}
# dtypes as safetensors names them -> as torch does
TORCH_DTYPES = {
    **{short: name.removeprefix("torch.") for name, short in FLOAT_DTYPES.items()},
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "C64": "complex64",
}  # fmt: skip


def torch_dtype(name: str) -> dtype:
    """Return the torch dtype that safetensors calls `name`."""
    import torch

    if not hasattr(torch, TORCH_DTYPES.get(name, "")):
        raise ValueError(f"dtype {name} is not known")
    return getattr(torch, TORCH_DTYPES[name])


@dataclass(frozen=True)
class StoredTensor:
    """dtype and shape of a tensor, and its byte range `start` to `end` in the file."""

    dtype: str  # as safetensors names it: BF16, F32, ...
    shape: tuple[int, ...]
    start: int = 0
    end: int = 0

    def part(self, index: Index) -> StoredTensor:
        """Return the byte range of a part of the first axis."""
        if index is None:
            return self
        if not self.shape or not self.shape[0]:
            raise ValueError(f"a tensor of shape {list(self.shape)} has no parts")
        row = (self.end - self.start) // self.shape[0]
        chosen = range(self.shape[0])[index]
        rows, lead = (range(chosen, chosen + 1), ()) if isinstance(chosen, int) else (chosen, (len(chosen),))
        start, end = self.start + rows.start * row, self.start + rows.stop * row
        return StoredTensor(self.dtype, (*lead, *self.shape[1:]), start, end)

    def from_bytes(self, data: Tensor) -> Tensor:
        """View uint8 data as a tensor of this dtype and shape."""
        return data.view(torch_dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str  # as messages name it: a path or a URL

    @property
    def file_name(self) -> str:
        return self.file.rsplit("/", 1)[-1]

    @property
    def parameters(self) -> int:
        return prod(self.shape)


class Files(Protocol):
    """The files of one checkpoint, by their names inside one folder. A model in memory has none of them."""

    parallel: int = 1  # how many files are worth requesting at the same time

    def label(self, name: str) -> str:
        """Return the path or URL that messages name the file by."""

    def names(self) -> list[str]:
        """Return all file names; empty where the folder cannot be listed."""
        return []

    def exists(self, name: str) -> bool:
        return False

    def raw(self, name: str) -> bytes | None:
        """Return all of a small file; None if there is no such file."""
        return None

    def size(self, name: str) -> int:
        """Return the number of bytes."""

    def stamp(self, name: str) -> str:
        """Return a string that changes when the file does, without reading the file."""
        return ""

    def fingerprint(self, name: str) -> str:
        """Return a string that is equal for a copy of the file and differs for another file."""
        return self.stamp(name)

    def headers(self, name: str) -> dict[str, StoredTensor]:
        """Return every tensor that the file declares."""

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        """Return a copy of a tensor or of a part of its first axis; nothing else of the file is read."""

    def release(self) -> None:
        """Close what stays open between reads. Called after each layer."""
        return


def safetensors_headers(path: Path, header: bytes) -> dict[str, StoredTensor]:
    """Return every tensor that a safetensors file declares.

    safetensors checks the header and that it fits the file, but does not expose the byte ranges; those come
    from `header`, the first bytes of the file.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        offsets = {
            name: entry["data_offsets"]
            for name, entry in json.loads(header[8:]).items()
            if isinstance(entry, dict) and name in slices
        }
        if set(offsets) != set(slices):
            raise ValueError("its header is not a table of tensors")
        return {
            name: StoredTensor(
                str(part.get_dtype()), tuple(part.get_shape()), *(len(header) + at for at in offsets[name])
            )
            for name, part in slices.items()
        }


def folder_tensors(files: Files) -> dict[str, TensorInfo]:
    """Return the tensors of all weight files; the index lists the files if there is one."""
    names = files.names()
    for index_name, single, suffix in zip(INDEX_NAMES, SINGLE_NAMES, SUFFIXES, strict=True):
        if (index := read_json(files, index_name)) is not None:
            return indexed_tensors(files, index_name, index)
        if single in names or files.exists(single):
            # Some repositories have a second copy (`consolidated.safetensors`) next to the standard file.
            return gather_headers(files, [single])
        stem = "pytorch_model" if suffix == ".bin" else ""  # Trainer also writes `training_args.bin`
        if weights := [name for name in names if name.endswith(suffix) and name.startswith(stem)]:
            return gather_headers(files, weights)
    folder = files.label("").rstrip("/")
    if any(name.endswith(".gguf") for name in names):
        raise BadInput(f"{folder}: {GGUF}")
    suffixes = sorted({Path(name).suffix for name in names if Path(name).suffix})
    if not names and "://" in folder:
        raise BadInput(f"{folder}: no index and no model.safetensors at this address; check it")
    content = f"it holds {', '.join(suffixes or names[:3])}" if names else "it is empty"
    inside = sorted(Path(folder).glob("checkpoints/*/config.json")) if "run.json" in names else []
    remedy = str(inside[-1].parent) if inside else "the folder of a safetensors checkpoint"
    raise BadInput(f"{folder}: no .safetensors file ({content}); give {remedy}")


def indexed_tensors(files: Files, index_name: str, index: Any) -> dict[str, TensorInfo]:
    label = files.label(index_name)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{label}: no weight_map in it; download the file again")
    for tensor, file in weight_map.items():
        # An index is untrusted input: it may only name files in its own folder.
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file or "\\" in file:
            raise BadInput(
                f"{label}: tensor {tensor} is listed in {file!r}, which is not a file in the folder of the "
                "index; download it again"
            )
    shards = sorted(set(weight_map.values()))
    with ThreadPoolExecutor(files.parallel) as pool:
        missing = [
            shard for shard, exists in zip(shards, pool.map(files.exists, shards), strict=True) if not exists
        ]
    if missing:
        raise BadInput(
            f"{files.label(missing[0])}: {len(missing)} of {len(shards)} shards missing; download "
            f"{', '.join(missing[:3])}"
        )
    tensors = gather_headers(files, shards)
    for tensor, file in weight_map.items():
        if tensor not in tensors or tensors[tensor].file_name != file:
            raise BadInput(
                f"{files.label(file)}: tensor {tensor}, listed by {index_name}, is not in it; "
                "download both again"
            )
    return tensors


def gather_headers(files: Files, names: Sequence[str]) -> dict[str, TensorInfo]:
    with ThreadPoolExecutor(files.parallel) as pool:
        headers = list(pool.map(files.headers, names))
    tensors: dict[str, TensorInfo] = {}
    for file_name, in_file in zip(names, headers, strict=True):
        label = files.label(file_name)
        for name, header in in_file.items():
            if name in tensors:
                raise BadInput(
                    f"{label}: tensor {name} is also in {tensors[name].file_name}; keep one of the two files"
                )
            tensors[name] = TensorInfo(name, header.shape, header.dtype, label)
    if not tensors:
        raise BadInput(f"{', '.join(map(files.label, names))}: no tensor in it; download it again")
    return tensors


def check_text_size(files: Files, name: str) -> None:
    """Reject a config or an index that is too large to be one, before it is read."""
    size, most = files.size(name), MAX_INDEX_BYTES if name in INDEX_NAMES else MAX_CONFIG_BYTES
    if size > most:
        raise BadInput(
            f"{files.label(name)}: {size:,} bytes, at most {most:,} are read; download the file again"
        )


def read_config(files: Files) -> dict[str, Any] | None:
    config = read_json(files, "config.json")
    if config is not None and not isinstance(config, dict):
        raise BadInput(f"{files.label('config.json')}: not a JSON object; download the file again")
    return config


def read_json(files: Files, name: str) -> Any:
    """Return the parsed file; None if there is none, [] for JSON's null, which is not an object."""
    if (raw := files.raw(name)) is None:
        return None
    damaged = one_line(
        f"{files.label(name)}: not valid JSON", "download the file again", (ValueError, RecursionError)
    )
    with damaged:
        value = json.loads(raw.decode("utf-8"))
    return [] if value is None else value
