"""Checkpoint files in a local folder: safetensors, and `.bin` without executing its pickle."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.files import (
    FLOAT_DTYPES,
    MAX_HEADER_BYTES,
    Files,
    Index,
    StoredTensor,
    check_text_size,
    safetensors_headers,
)
from moescope.errors import BadInput, one_line, reason

if TYPE_CHECKING:
    from torch import Tensor

AGAIN = "download the file again"
OPEN_FILES = 8
MAX_BUFFERS = 1024  # per request: IOV_MAX of Linux and macOS
HASHED_WHOLE = 64 * 2**20  # bytes per file; beyond, the largest tensors are sampled
MAX_SMALL_TENSOR = 8 * 2**20
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class LocalFiles(Files):
    folder: Path
    stored: dict[str, dict[str, StoredTensor]] = field(default_factory=dict, repr=False, compare=False)
    stamps: dict[str, str] = field(default_factory=dict, repr=False, compare=False)  # at header time
    # stays open between reads
    opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def label(self, name: str) -> str:
        return str(self.folder / name)

    def names(self) -> list[str]:
        # Excludes pipes and devices, which would block; folders and broken links fail later, by name.
        entries = self.folder.iterdir()
        return sorted(file.name for file in entries if file.is_file() or file.is_dir() or not file.exists())

    def exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def raw(self, name: str) -> bytes | None:
        path = self.folder / name
        if not path.exists():
            return None
        if not (path.is_file() or path.is_dir()):
            raise BadInput(f"{path}: a pipe or device, not a text file; download it again")
        check_text_size(self, name)
        return path.read_bytes()

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def stamp(self, name: str) -> str:
        stat = (self.folder / name).stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"

    def fingerprint(self, name: str) -> str:
        """Return the size and a hash of the file's content, times aside.

        Of a large file, small tensors are hashed whole, up to HASHED_WHOLE bytes: routers and norms, which
        may be all that a fine-tuning changes. Of the others the first, middle and last SAMPLE_BYTES are.
        """
        size = self.size(name)
        spans = [(0, size)] if size <= HASHED_WHOLE else self.sampled_spans(name, size)
        digest = hashlib.sha256()
        with (self.folder / name).open("rb") as file:
            for start, end in spans:
                file.seek(start)
                digest.update(file.read(end - start))
        return f"{size} {digest.hexdigest()}"

    def sampled_spans(self, name: str, size: int) -> list[tuple[int, int]]:
        pieces = [(tensor.start, tensor.end) for tensor in self.stored.get(name, {}).values()]
        if not pieces:  # a pickle has no table of contents: blocks all over it
            step = max(size // (HASHED_WHOLE // SAMPLE_BYTES), SAMPLE_BYTES)
            return [(start, min(start + SAMPLE_BYTES, size)) for start in range(0, size, step)]
        spans, left = [], HASHED_WHOLE
        for start, end in sorted(pieces, key=lambda piece: (piece[1] - piece[0], piece[0])):
            if end - start <= min(left, MAX_SMALL_TENSOR):
                spans.append((start, end))
                left -= end - start
            else:
                places = (start, (start + end) // 2, max(end - SAMPLE_BYTES, start))
                spans += [(place, min(place + SAMPLE_BYTES, end)) for place in places]
        return spans

    def headers(self, name: str) -> dict[str, StoredTensor]:
        from safetensors import SafetensorError

        path = self.folder / name
        if is_pickle(name):
            return {tensor: in_memory_header(value) for tensor, value in load_pickled(path).items()}
        try:
            with path.open("rb") as opened:  # safetensors reports a file without permission as missing
                length = int.from_bytes(opened.read(8), "little")
                opened.seek(0)
                header = opened.read(8 + min(length, MAX_HEADER_BYTES))
            if header.startswith(b"version https://git-lfs"):
                raise BadInput(f"{path}: a Git LFS pointer, not the weights; `git lfs pull` in its folder")
            self.stored[name] = safetensors_headers(path, header)
            self.stamps[name] = self.stamp(name)
            return self.stored[name]
        except PermissionError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(
                f"{path}: not a complete safetensors file ({reason(error)}); download it again"
            ) from None

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        import torch

        kinds = (OSError, ValueError, RuntimeError, KeyError)
        with one_line(f"{self.label(name)}: cannot read tensor {tensor}", AGAIN, kinds):
            handle = self.handle(name)
            if is_pickle(name):
                value = (handle[tensor] if index is None else handle[tensor][index]).clone().contiguous()
            else:
                # Not through a map: its pages would count as resident, and a cold disk would serve them
                # 128 KiB at a time.
                place = self.stored[name][tensor].part(index)
                data = torch.empty(place.end - place.start, dtype=torch.uint8)
                read_bytes(handle, place.start, [data])
                value = place.from_bytes(data)
        return value

    def read_into(self, name: str, start: int, targets: list[Tensor]) -> None:
        """Fill tensors of bytes from `start` on; other threads run meanwhile."""
        with one_line(f"{self.label(name)}: cannot be read", AGAIN, OSError):
            read_bytes(self.handle(name), start, targets)

    def handle(self, name: str) -> Any:
        """Return the open file.

        At most OPEN_FILES are open; one is closed when its last user releases it, since another thread may
        still read from it.
        """
        with self.lock:
            if name not in self.opened:
                while len(self.opened) >= OPEN_FILES:
                    del self.opened[next(iter(self.opened))]
                path = self.folder / name
                if self.stamps.get(name) not in (None, self.stamp(name)):
                    raise OSError("the file has changed since its header was read")
                self.opened[name] = load_pickled(path) if is_pickle(name) else OpenFile(path)
            return self.opened[name]

    def release(self) -> None:
        """Close all files: the pages of mapped ones count as resident memory until then."""
        with self.lock:
            self.opened.clear()


class OpenFile:
    """A file descriptor that several threads read from; closed with its last reference."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def read_bytes(file: OpenFile, start: int, targets: list[Tensor]) -> None:
    """Fill tensors of bytes from `start` on, by as few requests as the system allows."""
    left = [memoryview(target.numpy()) for target in targets if len(target)]  # type: ignore[arg-type]
    while left:
        count = os.preadv(file.descriptor, left[:MAX_BUFFERS], start)
        if not count:
            raise OSError(f"the file ends {sum(map(len, left))} bytes too early")
        start += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def is_pickle(name: str) -> bool:
    return name.endswith(".bin")


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a `.bin` file with torch's restricted unpickler, which calls nothing else."""
    import torch

    remedy = "pickled code is never run: download it again, or give a checkpoint saved as safetensors"
    # a damaged or hostile pickle may raise anything; none of its code has run
    with one_line(f"{path}: cannot be read as plain tensors", remedy):
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    table = loaded.items() if isinstance(loaded, dict) else ()
    if not table or not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in table):
        raise BadInput(
            f"{path}: not a plain table of names and tensors; give a checkpoint saved as safetensors"
        )
    for name, tensor in table:
        plain = not tensor.is_meta and tensor.layout == torch.strided and not tensor.is_nested
        if not plain or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise BadInput(
                f"{path}: tensor {name} is sparse or nested, or larger than what the file holds of it; give "
                "a checkpoint saved as safetensors"
            )
    return {name: tensor.detach() for name, tensor in table}


def in_memory_header(tensor: Tensor) -> StoredTensor:
    dtype = str(tensor.dtype)
    return StoredTensor(FLOAT_DTYPES.get(dtype, dtype.removeprefix("torch.").upper()), tuple(tensor.shape))
