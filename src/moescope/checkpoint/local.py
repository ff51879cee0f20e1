"""Checkpoint files in a folder of this machine: safetensors through memory maps, `.bin` without running its pickle."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.files import Header, Index, first_line, safetensors_headers
from moescope.errors import BadInput, check_stopped

if TYPE_CHECKING:
    from torch import Tensor

OPEN_MAPS = 2


@dataclass(frozen=True)
class LocalFiles:
    folder: Path
    opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # maps kept open between reads
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    at_once: int = 1

    def label(self, name: str) -> str:
        return str(self.folder / name)

    def names(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())

    def exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def raw(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.exists() else None

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def stamp(self, name: str) -> str:
        stat = (self.folder / name).stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"

    def headers(self, name: str) -> dict[str, Header]:
        from safetensors import SafetensorError

        path = self.folder / name
        with path.open("rb"):
            pass  # safetensors reports a file it may not open as missing; this raises PermissionError instead
        if is_pickle(name):
            return {tensor: pickled_header(value) for tensor, value in load_pickled(path).items()}
        try:
            return safetensors_headers(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(f"{path}: not a whole safetensors file ({first_line(error)}); download it again") from None

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        from safetensors import SafetensorError

        try:
            handle = self.handle(name)
            if is_pickle(name):
                return (handle[tensor] if index is None else handle[tensor][index]).clone().contiguous()
            return (handle.get_tensor(tensor) if index is None else handle.get_slice(tensor)[index]).clone()
        except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
            check_stopped()
            raise BadInput(
                f"{self.label(name)}: cannot read tensor {tensor} ({first_line(error)}); download the file again"
            ) from None

    def handle(self, name: str) -> Any:
        """The open map of a file. Kept, since a header of 20,000 tensors takes 30 ms to parse; two shards at most.

        A map is closed when its last user lets go of it: another thread may be reading from it still.
        """
        with self.lock:
            if name not in self.opened:
                while len(self.opened) >= OPEN_MAPS:
                    del self.opened[next(iter(self.opened))]
                self.opened[name] = open_map(self.folder / name)
            return self.opened[name]

    def release(self) -> None:
        """Close all maps: their pages count as resident memory until then."""
        with self.lock:
            self.opened.clear()


def is_pickle(name: str) -> bool:
    return name.endswith(".bin")


def open_map(path: Path) -> Any:
    from safetensors import safe_open

    if is_pickle(path.name):
        return load_pickled(path)
    return safe_open(path, framework="pt")


def load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` file, mapped, not read. torch's restricted unpickler knows tensors and calls nothing else."""
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged or hostile pickle may end in any exception; none of its code has run
        raise BadInput(
            f"{path}: cannot be read as plain tensors ({first_line(error)[:120]}), and pickled code is never run; "
            "give a checkpoint saved as safetensors"
        ) from None
    tensors = loaded if isinstance(loaded, dict) else {}
    if not tensors or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in tensors.items()
    ):
        raise BadInput(f"{path}: not a plain table of names and tensors; give a checkpoint saved as safetensors")
    return tensors


def pickled_header(tensor: Tensor) -> Header:
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return Header(tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.").upper()))
