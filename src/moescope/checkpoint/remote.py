"""Checkpoint files on a server, through fsspec: headers, then only the byte ranges of requested tensors."""

from __future__ import annotations

import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moescope.checkpoint.files import (
    MAX_HEADER_BYTES,
    MAX_TEXT_BYTES,
    Index,
    StoredTensor,
    first_line,
    safetensors_headers,
)
from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

FIRST_BYTES = 65536  # first request: holds the header's length and usually all of the header
ATTEMPTS = 4  # a scan of hours should survive a dropped connection
VERSION_FIELDS = (
    "ETag", "etag", "blob_id", "md5", "mtime", "LastModified", "last_modified", "Last-Modified", "created",
)  # fmt: skip
NOT_TRANSIENT = (NotImplementedError, ValueError)

Value = TypeVar("Value")


class FileMissing(BadInput):
    """The server was reached and has no such file."""


@dataclass(frozen=True)
class RemoteFiles:
    filesystem: Any  # fsspec's
    root: str  # the folder, as that file system names it
    shown: str  # and as messages name it, without credentials
    query: str = ""  # appended to a file's name, such as a signature
    secrets: tuple[str, ...] = field(default=(), repr=False)  # never shown
    infos: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    stored: dict[str, dict[str, StoredTensor]] = field(default_factory=dict, repr=False, compare=False)
    opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    parallel: int = 8

    def label(self, name: str) -> str:
        return f"{self.shown}/{name}"

    def path(self, name: str) -> str:
        return f"{self.root}/{name}{self.query}"

    def names(self) -> list[str]:
        try:
            listed = self.filesystem.ls(self.root, detail=False)
        except Exception:  # many servers list nothing; the index or the standard name decides then
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)

    def info(self, name: str) -> dict[str, Any]:
        if name not in self.infos:
            self.infos[name] = self.retry(name, lambda: self.filesystem.info(self.path(name)))
        return self.infos[name]

    def exists(self, name: str) -> bool:
        try:
            return self.info(name).get("type", "file") == "file"
        except FileMissing:
            return False

    def raw(self, name: str) -> bytes | None:
        if not self.exists(name):
            return None
        if self.size(name) > MAX_TEXT_BYTES:
            raise BadInput(
                f"{self.label(name)}: {self.size(name):,} bytes is no text file; check the address"
            )
        return bytes(self.retry(name, lambda: self.filesystem.cat_file(self.path(name))))

    def size(self, name: str) -> int:
        size = self.info(name).get("size")
        if not isinstance(size, int):
            raise BadInput(
                f"{self.label(name)}: the server does not report its size; download it and give its folder"
            )
        return size

    def stamp(self, name: str) -> str:
        info = self.info(name)
        versions = [str(info[key]) for key in VERSION_FIELDS if info.get(key) is not None]
        return " ".join([str(self.size(name)), *versions])

    def fingerprint(self, name: str) -> str:
        return self.stamp(name)  # of the server: blocks of a file would be many requests

    def headers(self, name: str) -> dict[str, StoredTensor]:
        """Fetch the header alone, and write it into a sparse file so that safetensors can check it."""
        from safetensors import SafetensorError

        if not name.endswith(".safetensors"):
            raise BadInput(
                f"{self.label(name)}: only safetensors can be read from a server; download it and give its "
                "folder"
            )
        size = self.size(name)
        start = self.fetch(name, 0, min(size, FIRST_BYTES))
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else size
        if 8 + length > min(size, MAX_HEADER_BYTES):
            raise BadInput(
                f"{self.label(name)}: not a complete safetensors file (its header would be {length} bytes "
                "long); upload it again"
            )
        header = (start + self.fetch(name, len(start), 8 + length))[: 8 + length]
        try:
            with tempfile.TemporaryDirectory() as folder:
                sparse = Path(folder) / "sparse.safetensors"
                with sparse.open("wb") as file:
                    file.write(header)
                    file.truncate(size)
                self.stored[name] = safetensors_headers(sparse, header)
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(
                f"{self.label(name)}: not a complete safetensors file ({first_line(error)}); upload it again"
            ) from None
        return self.stored[name]

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        import torch

        place = self.stored[name][tensor].part(index)
        if place.start == place.end:
            return place.from_bytes(torch.empty(0, dtype=torch.uint8))
        data = bytearray(self.fetch(name, place.start, place.end))
        return place.from_bytes(torch.frombuffer(data, dtype=torch.uint8))

    def fetch(self, name: str, start: int, end: int) -> bytes:
        """Fetch this byte range of the file and nothing else."""
        if end <= start:
            return b""
        data = self.retry(name, lambda: self.fetch_once(name, start, end))
        if len(data) != end - start:
            raise BadInput(
                f"{self.label(name)}: the server sent {len(data):,} bytes instead of {end - start:,}; it "
                "changed, or the server does not serve byte ranges: download it and give its folder"
            )
        return data

    def fetch_once(self, name: str, start: int, end: int) -> bytes:
        with self.lock:
            if name not in self.opened:
                self.opened[name] = (self.open(name), threading.Lock())
            file, file_lock = self.opened[name]
        try:
            with file_lock:
                file.seek(start)
                return bytes(file.read(end - start))
        except Exception:
            with self.lock:
                self.opened.pop(name, None)  # a dropped connection is opened again
            raise

    def open(self, name: str) -> Any:
        """Open without read-ahead: the next tensor requested is rarely the next one in the file."""
        # The HTTP file system would ask for the size at every opening.
        size = {"size": self.size(name)} if "http" in self.filesystem.protocol else {}
        return self.filesystem.open(self.path(name), "rb", cache_type="none", **size)

    def retry(self, name: str, request: Callable[[], Value]) -> Value:
        """Return the answer, repeating the request after connection failures."""
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except BadInput:
                raise
            except Exception as error:  # each file system has its own errors
                reason = permanent_failure(error)
                if reason is None and attempt + 1 < ATTEMPTS:
                    time.sleep(0.5 * 2**attempt)
                    continue
                cause = error.__cause__ or error
                why = reason or f"{type(cause).__name__}: {first_line(cause)[:160]}"
                for secret in self.secrets:  # a library's message may quote the address with a password
                    why = why.replace(secret, "")
                if "range requests" in why:  # fsspec's words; a host may be called orange
                    raise BadInput(
                        f"{self.label(name)}: the server does not serve byte ranges; download it and give "
                        "its folder"
                    ) from None
                if reason == "no such file":
                    raise FileMissing(f"{self.label(name)}: no such file; check the address") from None
                raise BadInput(
                    f"{self.label(name)}: cannot be fetched ({why}); check the address and your access"
                ) from None
        raise AssertionError("the last attempt returns or raises")

    def release(self) -> None:
        """Close the files, and raise if one changed on the server since its header was read."""
        with self.lock:
            names = list(self.opened)
            for file, file_lock in self.opened.values():
                with file_lock:
                    file.close()
            self.opened.clear()
        for name in names:
            before = self.stamp(name)
            del self.infos[name]
            if self.stamp(name) != before:
                raise BadInput(
                    f"{self.label(name)}: has changed on the server since its header was read; start again"
                )


def permanent_failure(error: BaseException) -> str | None:
    """Return why the request will never succeed; None if repeating it may help."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or isinstance(error, PermissionError):
        return "no permission; log in with `hf auth login` or the tool of that store"
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None and status is None:
        return permanent_failure(error.__cause__)  # fsspec calls every failure of a web server "not found"
    if status == 404 or isinstance(error, FileNotFoundError):
        return "no such file"
    return first_line(error)[:160] if isinstance(error, NOT_TRANSIENT) else None
