"""What a checkpoint asks of the place it lies in, be it a disk or a server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Index = int | slice | None  # of a tensor's first axis: one, a run of them, or all

LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
LARGEST_TEXT = 1_000_000_000  # bytes of an index or a config; the largest seen are a few megabytes


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in its file: from byte `start` up to `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def part(self, index: Index) -> Stored:
        """Where a part of the tensor's first axis lies."""
        if index is None:
            return self
        if not self.shape or not self.shape[0]:
            raise ValueError(f"a tensor of shape {list(self.shape)} has no parts")
        row = (self.end - self.start) // self.shape[0]
        if isinstance(index, int):
            first, shape = range(self.shape[0])[index], self.shape[1:]
            last = first + 1
        else:
            first, last, step = index.indices(self.shape[0])
            assert step == 1
            shape = (last - first, *self.shape[1:])
        return Stored(self.dtype, shape, self.start + first * row, self.start + last * row)

    def tensor(self, data_bytes: Tensor) -> Tensor:
        """The bytes as the tensor they are."""
        import torch

        names = {
            "BOOL": "bool",
            "F8_E4M3": "float8_e4m3fn",
            "F8_E5M2": "float8_e5m2",
            "F8_E8M0": "float8_e8m0fnu",
            "BF16": "bfloat16",
        }
        kinds = {"F": "float", "I": "int", "U": "uint", "C": "complex"}
        name = names.get(self.dtype) or kinds.get(self.dtype[0], "unknown") + self.dtype[1:]
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {self.dtype} is not known")
        return data_bytes.view(dtype).reshape(self.shape)


class Files(Protocol):
    """The files of one checkpoint.

    A file goes by its name beside the others; nothing outside their folder can be asked for.
    """

    @property
    def at_once(self) -> int:
        """How many files may be asked for at the same time with profit."""

    def label(self, name: str) -> str:
        """The file as messages name it: a path or a URL."""

    def names(self) -> list[str]:
        """All files there are; empty where the place gives no list."""

    def exists(self, name: str) -> bool: ...

    def raw(self, name: str) -> bytes | None:
        """All of a small file; None where there is no such file."""

    def size(self, name: str) -> int: ...

    def stamp(self, name: str) -> str:
        """What changes when the file does, without reading it."""

    def headers(self, name: str) -> dict[str, Stored]:
        """Every tensor of the file, with its dtype in safetensors' words: BF16, F32, ..."""

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        """A tensor, or a part of its first axis, in memory of its own; no other part of the file is read."""

    def release(self) -> None:
        """Let go of whatever is held between reads. Called after each layer."""


def safetensors_places(path: Path, header: bytes) -> dict[str, Stored]:
    """Every tensor that a safetensors file declares. safetensors itself checks the header and that it fits
    the file at `path`,
    but does not say where in the file the data lie: that is read off the header, which begins the file.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as opened:
        # (safe_open is not a mapping)
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        offsets = {
            name: entry["data_offsets"]
            for name, entry in json.loads(header[8:]).items()
            if isinstance(entry, dict) and name in parts
        }
        if set(offsets) != set(parts):
            raise ValueError("its header is not a table of tensors")
        return {
            name: Stored(
                str(part.get_dtype()),
                tuple(part.get_shape()),
                *(len(header) + place for place in offsets[name]),
            )
            for name, part in parts.items()
        }


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
