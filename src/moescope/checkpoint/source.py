"""A checkpoint, or a model in memory: its tensors, and how to read one of them."""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.files import (
    FLOAT_DTYPES,
    Files,
    Index,
    StoredTensor,
    TensorInfo,
    folder_tensors,
    gather_headers,
    read_config,
)
from moescope.checkpoint.local import in_memory_header
from moescope.checkpoint.location import find_location
from moescope.checkpoint.quantised import Packed, logical_tensors
from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor, nn

READABLE_DTYPES = set(FLOAT_DTYPES.values())


@dataclass(frozen=True)
class Checkpoint:
    """Headers and config of a checkpoint. Holds no tensor data."""

    location: str = field(repr=False)  # as the user typed it: folder, file, hub id or URL with credentials
    address: str  # as run.json stores it: absolute, without revision and credentials
    name: str
    config: dict[str, Any] | None
    tensors: dict[str, TensorInfo] = field(repr=False)  # as the model has them
    packed: dict[str, Packed] = field(repr=False)  # how to read those that are quantised
    stored: dict[str, TensorInfo] = field(repr=False)  # as the files have them
    files: Files = field(repr=False, compare=False)
    revision: str | None = None  # the commit of a hub repository
    one_file: bool = False  # a single file was given: it may be one of several shards

    @property
    def shown(self) -> str:
        """The location for messages, without credentials."""
        return self.address if "://" in self.location and self.revision is None else self.location

    def header_hash(self) -> str:
        """Return SHA-256 over names, shapes, dtypes, config, and each file's size and content.

        A copy elsewhere has the same hash, whatever its times. For a hub repository the commit replaces
        the content, so that the cached copy equals the one on the server; for a URL the server's marks do.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        digest.update(str(self.revision).encode())
        for info in sorted(self.stored.values(), key=lambda info: info.name):
            facts = f"{info.name} {info.shape} {info.dtype} {info.file_name}\n"
            digest.update(facts.encode(errors="surrogateescape"))
        for file in self.file_names():
            mark = self.files.fingerprint(file) if self.revision is None else str(self.files.size(file))
            digest.update(f"{file} {mark}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def file_names(self) -> list[str]:
        return sorted({info.file_name for info in self.stored.values()})

    def bytes(self) -> int:
        """Return the size of the weight files."""
        return sum(self.files.size(file) for file in self.file_names())

    def read(self, name: str, index: Index = None) -> Tensor:
        """Return a copy of a tensor or of a part of its first axis; float32 if it was quantised."""
        self.check_readable(name)
        packed = self.packed.get(name)
        return packed.read(self.read_stored, index) if packed else self.read_stored(name, index)

    def check_readable(self, name: str) -> None:
        """Raise for a tensor of unsupported dtype or quantisation, from headers alone."""
        info, packed = self.tensors[name], self.packed.get(name)
        if packed and packed.problem:
            raise BadInput(packed.problem)
        if not packed and info.dtype not in READABLE_DTYPES:
            raise BadInput(
                f"{info.file}: tensor {name} has dtype {info.dtype}, which is not supported; "
                f"give a checkpoint in {', '.join(sorted(READABLE_DTYPES))}"
            )

    def read_stored(self, name: str, index: Index) -> Tensor:
        """Read a tensor as it is in its file, or a part of its first axis."""
        return self.files.read(self.stored[name].file_name, name, index)

    def release(self) -> None:
        """Close open files, whose pages count as resident memory. Called after each layer."""
        self.files.release()


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint by its headers: a folder, a file, a hub id (`owner/name[@revision]`) or a URL."""
    try:
        at = find_location(model, revision)
        config = read_config(at.files)
        stored = gather_headers(at.files, [at.one_file]) if at.one_file else folder_tensors(at.files)
        origin, tensors = (at.text, at.address, at.name), logical_tensors(stored, config)
        return Checkpoint(*origin, config, *tensors, stored, at.files, at.revision, bool(at.one_file))
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


@dataclass(frozen=True)
class MemoryFiles(Files):
    """The weights of a model in memory, in place of a checkpoint's files."""

    weights: dict[str, Tensor]
    model_label: str

    def label(self, name: str) -> str:
        return self.model_label

    def size(self, name: str) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def headers(self, name: str) -> dict[str, StoredTensor]:
        return {tensor: in_memory_header(value) for tensor, value in self.weights.items()}

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        value = self.weights[tensor] if index is None else self.weights[tensor][index]
        return value.detach().to("cpu", copy=True)


def in_memory(model: nn.Module, label: str) -> Checkpoint:
    """Present a model's floating-point tensors, without copying them, as a checkpoint called `label`."""
    weights = {name: value for name, value in model.state_dict().items() if str(value.dtype) in FLOAT_DTYPES}
    files = MemoryFiles(weights, label)
    tensors = {
        name: TensorInfo(name, header.shape, header.dtype, label)
        for name, header in files.headers("").items()
    }
    config: Any = getattr(model, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else None  # without one, tensor names decide
    return Checkpoint(label, label, "model", known, tensors, {}, tensors, files)
