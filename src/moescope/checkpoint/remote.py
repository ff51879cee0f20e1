"""Checkpoint files on a server, by fsspec.

Headers, and then only the byte ranges of the tensors asked for.
"""

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
    LARGEST_TEXT,
    LONGEST_HEADER,
    Index,
    Stored,
    first_line,
    safetensors_places,
)
from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

FIRST_BYTES = 65536  # asked for at once: holds the length of the header and mostly all of it
ATTEMPTS = 4  # a scan of hours should outlive a connection that drops
MARKS = (
    "ETag",
    "etag",
    "blob_id",
    "md5",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "created",
)
NOT_TRANSIENT = (NotImplementedError, ValueError)

Value = TypeVar("Value")


class NotThere(BadInput):
    """The server was reached and has no such file."""


@dataclass(frozen=True)
class RemoteFiles:
    filesystem: Any  # fsspec's
    root: str  # the folder, as that file system names it
    shown: str  # and as the user does, without name, password and query
    query: str = ""  # what follows a file's name, such as a signature
    secrets: tuple[str, ...] = field(default=(), repr=False)  # never to be shown
    infos: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    stored: dict[str, dict[str, Stored]] = field(default_factory=dict, repr=False, compare=False)
    opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    at_once: int = 8

    def label(self, name: str) -> str:
        return f"{self.shown}/{name}"

    def path(self, name: str) -> str:
        return f"{self.root}/{name}{self.query}"

    def without_secrets(self, text: str) -> str:
        """A library's message, which may quote the address with a password in it."""
        for secret in self.secrets:
            text = text.replace(secret, "")
        return text

    def names(self) -> list[str]:
        try:
            listed = self.filesystem.ls(self.root, detail=False)
        except (
            Exception
        ):  # many servers list nothing; the index or the standard name then tells what there is
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)

    def info(self, name: str) -> dict[str, Any]:
        if name not in self.infos:
            self.infos[name] = self.patiently(name, lambda: self.filesystem.info(self.path(name)))
        return self.infos[name]

    def exists(self, name: str) -> bool:
        try:
            return self.info(name).get("type", "file") == "file"
        except NotThere:
            return False

    def raw(self, name: str) -> bytes | None:
        if not self.exists(name):
            return None
        if self.size(name) > LARGEST_TEXT:
            raise BadInput(
                f"{self.label(name)}: {self.size(name):,} bytes are no text file of reasonable "
                "size; check the address"
            )
        return bytes(self.patiently(name, lambda: self.filesystem.cat_file(self.path(name))))

    def size(self, name: str) -> int:
        size = self.info(name).get("size")
        if not isinstance(size, int):
            raise BadInput(
                f"{self.label(name)}: the server does not say how long it is; download it and give its folder"
            )
        return size

    def stamp(self, name: str) -> str:
        info = self.info(name)
        marks = [str(info[mark]) for mark in MARKS if info.get(mark) is not None]
        return " ".join([str(self.size(name)), *marks])

    def headers(self, name: str) -> dict[str, Stored]:
        """The header alone is fetched, and put into a file otherwise full of holes.

        So that safetensors itself may check it.
        """
        from safetensors import SafetensorError

        if not name.endswith(".safetensors"):
            raise BadInput(
                f"{self.label(name)}: only safetensors can be read from a server; download it "
                "and give its folder"
            )
        size = self.size(name)
        start = self.fetch(name, 0, min(size, FIRST_BYTES))
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else size
        if 8 + length > min(size, LONGEST_HEADER):
            raise BadInput(
                f"{self.label(name)}: not a whole safetensors file (its header would be {length} "
                "bytes long); upload it again"
            )
        header = (start + self.fetch(name, len(start), 8 + length))[: 8 + length]
        try:
            with tempfile.TemporaryDirectory() as folder:
                hollow = Path(folder) / "hollow.safetensors"
                with hollow.open("wb") as file:
                    file.write(header)
                    file.truncate(size)
                self.stored[name] = safetensors_places(hollow, header)
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(
                f"{self.label(name)}: not a whole safetensors file ({first_line(error)}); upload it again"
            ) from None
        return self.stored[name]

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        import torch

        place = self.stored[name][tensor].part(index)
        if place.start == place.end:
            return place.tensor(torch.empty(0, dtype=torch.uint8))
        return place.tensor(
            torch.frombuffer(bytearray(self.fetch(name, place.start, place.end)), dtype=torch.uint8)
        )

    def fetch(self, name: str, start: int, end: int) -> bytes:
        """These bytes of the file, and no others."""
        if end <= start:
            return b""
        found = self.patiently(name, lambda: self.fetch_once(name, start, end))
        if len(found) != end - start:
            raise BadInput(
                f"{self.label(name)}: the server sent {len(found):,} bytes where {end - start:,} "
                "were asked for; "
                "it changed, or the server gives no parts of files: download it and give its "
                "folder"
            )
        return found

    def fetch_once(self, name: str, start: int, end: int) -> bytes:
        with self.lock:
            if name not in self.opened:
                self.opened[name] = (self.open(name), threading.Lock())
            file, alone = self.opened[name]
        try:
            with alone:
                file.seek(start)
                return bytes(file.read(end - start))
        except Exception:
            with self.lock:
                self.opened.pop(name, None)  # a dropped connection is opened anew
            raise

    def open(self, name: str) -> Any:
        """The file, without read-ahead: the next tensor asked for seldom lies behind this one."""
        if "http" in self.filesystem.protocol:  # it would ask for the size anew at every opening
            return self.filesystem.open(self.path(name), "rb", cache_type="none", size=self.size(name))
        return self.filesystem.open(self.path(name), "rb", cache_type="none")

    def patiently(self, name: str, ask: Callable[[], Value]) -> Value:
        """The answer, asked for again where a connection failed.

        A refusal in one line where it will not come.
        """
        for attempt in range(ATTEMPTS):
            try:
                return ask()
            except BadInput:
                raise
            except Exception as error:  # every file system has errors of its own
                refused = refusal(error)
                if refused is None and attempt + 1 < ATTEMPTS:
                    time.sleep(0.5 * 2**attempt)
                    continue
                cause = error.__cause__ or error
                why = self.without_secrets(refused or f"{type(cause).__name__}: {first_line(cause)[:160]}")
                if "range requests" in why:  # fsspec's words; a host may be called orange
                    raise BadInput(
                        f"{self.label(name)}: the server gives no parts of files; download it "
                        "and give its folder"
                    ) from None
                if refused == "no such file":
                    raise NotThere(f"{self.label(name)}: no such file; check the address") from None
                raise BadInput(
                    f"{self.label(name)}: cannot be fetched ({why}); check the address and your access"
                ) from None
        raise AssertionError("the last attempt returns or raises")

    def release(self) -> None:
        """Close what is open.

        And refuse to go on with files that have changed on the server since their headers were read.
        """
        with self.lock:
            names = list(self.opened)
            for file, alone in self.opened.values():
                with alone:
                    file.close()
            self.opened.clear()
        for name in names:
            before = self.stamp(name)
            del self.infos[name]
            if self.stamp(name) != before:
                raise BadInput(
                    f"{self.label(name)}: has changed on the server since its header was read; begin again"
                )


def refusal(error: BaseException) -> str | None:
    """In words, why the server will never give it; None where asking again may help."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or isinstance(error, PermissionError):
        return "no permission; log in with `hf auth login` or the tool of that store"
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None and status is None:
        return refusal(error.__cause__)  # fsspec calls every failure of a web server "not found"
    if status == 404 or isinstance(error, FileNotFoundError):
        return "no such file"
    return first_line(error)[:160] if isinstance(error, NOT_TRANSIENT) else None
