"""What a checkpoint asks of the place it lies in, be it a disk or a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Index = int | slice | None  # of a tensor's first axis: one, a run of them, or all

LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True)
class Header:
    """What a file says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: BF16, F32, ...


class Files(Protocol):
    """The files of one checkpoint. A file goes by its name beside the others; nothing outside their folder can be asked for."""

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

    def headers(self, name: str) -> dict[str, Header]: ...

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        """A tensor, or a part of its first axis, in memory of its own; no other part of the file is read."""

    def release(self) -> None:
        """Let go of whatever is held between reads. Called after each layer."""


def safetensors_headers(path: Path) -> dict[str, Header]:
    """Every tensor that a safetensors file declares; safetensors itself checks that they fit into the file."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as opened:
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (safe_open is not a mapping)
        return {name: Header(tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
