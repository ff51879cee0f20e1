"""Hidden states of all batches between two layers: in memory, or in two files that take turns.

While layer l runs, its inputs are in one file and its outputs go to the other. When all batches are written,
a manifest that names the file and the next layer takes the place of the last one, so a killed run continues
at the layer that it had reached. The manifest holds the file's checksum: if the file has changed since, all
layers run again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import operator
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.storage import atomic_file, reason, remove, write_point

MANIFEST = "manifest.json"
REMEDY = "free some space, then give the same command to resume"


class MemoryStates:
    """Hidden states in memory: a run that is interrupted starts again."""

    part = 0  # the first part to run
    resumes = False

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def get(self, batch: int, device: str) -> Any:
        return place(self.values.get(batch, {}), device)

    def put(self, batch: int, value: Any) -> None:
        self.values[batch] = place(value, "cpu")

    def commit(self, record: Any) -> None:
        """Store what a part has collected; nothing here, since nothing is resumed."""

    def records(self) -> Iterator[Any]:
        """Yield what earlier parts had collected before the run was interrupted."""
        return iter(())

    def remove(self) -> None:
        self.values.clear()


class FileStates:
    """Hidden states in two files of a folder, and what each part has collected.

    `key` identifies model, precision and batches: what a run with another key left is removed.
    """

    resumes = True

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key
        self.part, self.places = 0, dict[int, Any]()  # batch -> its tensors in the file that is read
        self.written: dict[int, Any] = {}  # the same of the file that is written
        self.end = 0
        self.digests: list[str] = []  # of what each part has collected
        self.checksum = 0  # CRC-32 of the file that is written
        self.checker = ThreadPoolExecutor(1)  # a checksum takes a third of the time of writing
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            manifest = read_manifest(folder)
            if manifest.get("key") == key and self.is_unchanged(manifest):
                with reading(folder):
                    self.part = operator.index(manifest["part"])
                    if self.part < 0:
                        raise ValueError(f"part {self.part}")
                    self.places = {int(batch): layout for batch, layout in manifest["places"].items()}
                    self.digests = list(manifest["digests"])
            else:
                for file in sorted(folder.iterdir()):
                    remove(file)

    def is_unchanged(self, manifest: dict[str, Any]) -> bool:
        """Return whether the file that would be read is the one that was written; if not, say so."""
        part, digests, stored = (manifest.get(name) for name in ("part", "digests", "checksum"))
        if not isinstance(digests, list) or part != len(digests) or stored is None:
            return True  # a damaged manifest, which is an error later, or a part without hidden states
        file, checksum = self.file(part), 0
        with suppress(OSError), file.open("rb", buffering=0) as content:
            while chunk := content.read(2**24):
                checksum = zlib.crc32(chunk, checksum)
        if checksum != stored:
            logging.getLogger("moescope").warning(
                f"moescope: {file} has changed since it was written; its pass over the text starts again"
            )
        return bool(checksum == stored)

    def file(self, part: int) -> Path:
        """Return the file with the inputs of a part."""
        return self.folder / f"states-{part % 2}"

    def get(self, batch: int, device: str) -> Any:
        if self.part == 0:
            return {}
        with reading(self.folder):
            descriptor = os.open(self.file(self.part), os.O_RDONLY)
            try:
                return unpack(self.places[batch], descriptor, device)
            finally:
                os.close(descriptor)

    def put(self, batch: int, value: Any) -> None:
        file = self.file(self.part + 1)
        try:
            with writing(file):
                write_point(creates=True)
                flags = os.O_WRONLY | os.O_CREAT | (0 if self.end else os.O_TRUNC)
                descriptor = os.open(file, flags, 0o666)
                try:
                    self.written[batch] = self.pack(value, descriptor)
                finally:
                    os.close(descriptor)
        except BadInput:
            with suppress(OSError):
                os.truncate(file, 0)  # room for run.json to say what happened
            raise

    def pack(self, value: Any, descriptor: int) -> Any:
        """Write nested tensors to the end of a file; return where they are, as JSON can hold it."""
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous()
            raw = memoryview(data.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            start, checksum = self.end, self.checker.submit(zlib.crc32, raw, self.checksum)
            while raw:
                count = os.pwrite(descriptor, raw[: 2**30], self.end)
                raw, self.end = raw[count:], self.end + count
            self.checksum = checksum.result()
            return {"tensor": [start, list(data.shape), str(data.dtype).removeprefix("torch.")]}
        if isinstance(value, dict):
            return {"dict": {name: self.pack(part, descriptor) for name, part in value.items()}}
        if isinstance(value, tuple | list):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.pack(part, descriptor) for part in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise BadInput(
            f"a layer returns {type(value).__name__}, which cannot be stored between layers; "
            "use --execution sharded or resident"
        )

    def commit(self, record: Any) -> None:
        """Make the outputs of the current part the inputs of the next one; store what it has collected."""
        with writing(self.folder):
            if self.written:
                descriptor = os.open(self.file(self.part + 1), os.O_RDWR)
                try:
                    os.fsync(descriptor)  # data before the name that makes them valid
                finally:
                    os.close(descriptor)
        with atomic_file(self.record_file(self.part), REMEDY) as partial, writing(partial):
            torch.save(record, partial)
            digests = [*self.digests, hashlib.sha256(partial.read_bytes()).hexdigest()]
        manifest = {
            "key": self.key,
            "part": self.part + 1,
            "places": self.written,
            "checksum": self.checksum if self.written else None,
            "digests": digests,
        }
        with atomic_file(self.folder / MANIFEST, REMEDY) as partial:
            partial.write_text(json.dumps(manifest))
        self.part, self.places, self.written, self.end = self.part + 1, self.written, {}, 0
        self.digests, self.checksum = digests, 0

    def record_file(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.pt"

    def records(self) -> Iterator[Any]:
        for part in range(self.part):
            with reading(self.folder):
                stored = self.record_file(part).read_bytes()
                if hashlib.sha256(stored).hexdigest() != self.digests[part]:
                    raise ValueError(f"{self.record_file(part).name} has changed")
                record = torch.load(BytesIO(stored), weights_only=True)
            yield record

    def remove(self) -> None:
        self.checker.shutdown()
        if self.folder.exists():
            remove(self.folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of what is stored; empty if there is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn a full disk into one line."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{file}: cannot be written ({reason(error)}); {REMEDY}") from None
    except RuntimeError as error:  # what torch.save raises for the same
        raise BadInput(f"{file}: cannot be written ({str(error).splitlines()[0]}); {REMEDY}") from None


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn whatever damaged files raise into one line."""
    try:
        yield
    except (BadInput, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = (str(error).splitlines() or [""])[0][:80]
        raise BadInput(
            f"{folder}: the stored hidden states are damaged ({type(error).__name__}: {why}); "
            "give the command with --overwrite"
        ) from None


def unpack(layout: dict[str, Any], descriptor: int, device: str) -> Any:
    """Read nested tensors from where `pack` wrote them."""
    ((kind, value),) = layout.items()
    if kind == "tensor":
        start, shape, dtype = value
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        if start < 0 or start + size > os.fstat(descriptor).st_size:
            raise ValueError(f"{size} bytes at {start} are beyond the end")
        data = torch.empty(shape, dtype=getattr(torch, dtype))
        left = memoryview(data.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while left:
            count = os.preadv(descriptor, [left], start)
            if not count:
                raise EOFError("cut off")
            left, start = left[count:], start + count
        return data.to(device)
    if kind == "dict":
        return {name: unpack(part, descriptor, device) for name, part in value.items()}
    if kind in ("tuple", "list"):
        parts = [unpack(part, descriptor, device) for part in value]
        return parts if kind == "list" else tuple(parts)
    return value


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
