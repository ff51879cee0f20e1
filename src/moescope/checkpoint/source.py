"""A checkpoint: which tensors it holds, where they lie, and how to read one of them."""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.files import Files, Index
from moescope.checkpoint.headers import TensorInfo, folder_tensors, gather_headers, read_config
from moescope.checkpoint.places import find_place
from moescope.checkpoint.quantised import Packed, unpacked
from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

READABLE_DTYPES = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint and its config. No tensor data are held."""

    location: str = field(
        repr=False
    )  # as the user gave it: folder, file, hub id or URL, which may hold a password
    address: str  # as run.json keeps it: absolute, without revision, password and query
    name: str
    config: dict[str, Any] | None
    tensors: dict[str, TensorInfo] = field(repr=False)  # as the model has them
    packed: dict[str, Packed] = field(repr=False)  # how those of them are read that are quantised
    stored: dict[str, TensorInfo] = field(repr=False)  # as they lie in the files
    files: Files = field(repr=False, compare=False)
    revision: str | None = None  # the commit of a hub repository
    one_file: bool = False  # a single file was given: it may be one shard of several

    @property
    def shown(self) -> str:
        """As messages name it: as the user did, but never with a password."""
        return self.address if "://" in self.location and self.revision is None else self.location

    def header_hash(self) -> str:
        """SHA-256 over names, shapes and dtypes, config, and what tells that a file changed: size and time,
        or a server's mark.

        It tells two checkpoints apart without reading their data; a copy made elsewhere hashes differently.
        Of a hub
        repository the commit is known, so that a copy in the cache is the same checkpoint as the one on the
        server.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        digest.update(str(self.revision).encode())
        for info in sorted(self.stored.values(), key=lambda info: info.name):
            digest.update(f"{info.name} {info.shape} {info.dtype} {info.file_name}\n".encode())
        for file in self.file_names():
            stamp = self.files.stamp(file) if self.revision is None else str(self.files.size(file))
            digest.update(f"{file} {stamp}\n".encode())
        return digest.hexdigest()

    def file_names(self) -> list[str]:
        return sorted({info.file_name for info in self.stored.values()})

    def bytes(self) -> int:
        """How much the weights take up where they lie."""
        return sum(self.files.size(file) for file in self.file_names())

    def read(self, name: str, index: Index = None) -> Tensor:
        """The tensor of that name, or one index or run of its first axis, in memory of its own; in float32 if
        it was quantised.

        Nothing else is read.
        """
        self.check_readable(name)
        if name in self.packed:
            return self.packed[name].read(self.read_stored, index)
        return self.read_stored(name, index)

    def check_readable(self, name: str) -> None:
        """Refuse a tensor whose dtype, or whose quantisation, cannot be read; from headers alone."""
        info = self.tensors[name]
        if name in self.packed:
            self.packed[name].check()
        elif info.dtype not in READABLE_DTYPES:
            raise BadInput(
                f"{info.file}: tensor {name} has dtype {info.dtype}, which cannot be read yet; "
                f"give a checkpoint in {', '.join(sorted(READABLE_DTYPES))}"
            )

    def read_stored(self, name: str, index: Index) -> Tensor:
        """A tensor as it lies in its file, or a part of its first axis."""
        return self.files.read(self.stored[name].file_name, name, index)

    def release(self) -> None:
        """Let go of what is kept open between reads: its pages count as resident memory.

        Called after each layer.
        """
        self.files.release()


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """The checkpoint at a folder, a file, a hub id (`owner/name`, `owner/name@revision`) or an fsspec URL.

    From its headers alone.
    """
    try:
        place = find_place(model, revision)
        config = read_config(place.files)
        stored = (
            gather_headers(place.files, [place.one_file]) if place.one_file else folder_tensors(place.files)
        )
        return Checkpoint(
            place.location,
            place.address,
            place.name,
            config,
            *unpacked(stored, config),
            stored,
            place.files,
            place.revision,
            bool(place.one_file),
        )
    except PermissionError as error:
        raise BadInput(
            f"{error.filename or model}: no permission to read; change the file's mode or owner"
        ) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise BadInput(f"{model}: no such folder or file; check the path") from None
        raise BadInput(
            f"{error.filename or model}: cannot be read ({error.strerror}); download it again"
        ) from None
