"""A checkpoint on disk: which tensors it holds, where they lie, and how to read one of them."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.quantised import Packed, unpacked
from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
OPEN_MAPS = 2
GGUF = "GGUF files cannot be read yet; give the folder of a checkpoint saved as safetensors"
READABLE_DTYPES = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def parameters(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint and its config. No tensor data are held."""

    path: Path
    config: dict[str, Any] | None
    tensors: dict[str, TensorInfo] = field(repr=False)  # as the model has them
    packed: dict[str, Packed] = field(repr=False)  # how those of them are read that are quantised
    stored: dict[str, TensorInfo] = field(repr=False)  # as they lie in the files
    opened: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)  # maps kept open between reads

    @property
    def name(self) -> str:
        return self.path.stem if self.path.is_file() else self.path.resolve().name

    def header_hash(self) -> str:
        """SHA-256 over names, shapes and dtypes, config, and every file's size and time of change.

        It tells two checkpoints apart without reading their data; a copy made elsewhere hashes differently.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for info in sorted(self.stored.values(), key=lambda info: info.name):
            digest.update(f"{info.name} {info.shape} {info.dtype} {info.file.name}\n".encode())
        for file in self.files:
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    @property
    def files(self) -> list[Path]:
        return sorted({info.file for info in self.stored.values()})

    def read(self, name: str) -> Tensor:
        """The tensor of that name, a copy in memory of its own; in float32 if it was quantised."""
        return self.read_at(name, None)

    def read_slice(self, name: str, index: int | slice) -> Tensor:
        """One index, or a run of them, of a tensor's first axis; no other part of it is read."""
        return self.read_at(name, index)

    def read_at(self, name: str, index: int | slice | None) -> Tensor:
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

    def read_stored(self, name: str, index: int | slice | None) -> Tensor:
        """A tensor as it lies in its file, or a part of its first axis."""
        from safetensors import SafetensorError

        info = self.stored[name]
        try:
            handle = self.handle(info.file)
            return (handle.get_tensor(name) if index is None else handle.get_slice(name)[index]).clone()
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise BadInput(
                f"{info.file}: cannot read tensor {name} ({first_line(error)}); download the file again"
            ) from None

    def handle(self, file: Path) -> Any:
        """The open map of a file. Kept, since a header of 20,000 tensors takes 30 ms to parse; two shards at most."""
        from safetensors import safe_open

        if file not in self.opened:
            while len(self.opened) >= OPEN_MAPS:
                self.opened.pop(next(iter(self.opened))).__exit__(None, None, None)
            self.opened[file] = safe_open(file, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        return self.opened[file]

    def release(self) -> None:
        """Close all maps: their pages count as resident memory until then. Called after each layer."""
        while self.opened:
            self.opened.popitem()[1].__exit__(None, None, None)


def open_checkpoint(model: str | Path) -> Checkpoint:
    """The checkpoint at a folder or a `.safetensors` file, from its headers alone."""
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # no such user
        raise BadInput(missing_path_message(str(model))) from None
    try:
        if path.is_file():
            if path.suffix == ".gguf":
                raise BadInput(f"{path}: {GGUF}")
            if path.suffix != ".safetensors":
                raise BadInput(f"{path}: not a .safetensors file; give a folder or a .safetensors file")
            config = read_config(path.parent / "config.json")
            return from_headers(path, config, gather_headers([path]))
        if not path.is_dir():
            raise BadInput(missing_path_message(str(model)))
        config = read_config(path / "config.json")
        return from_headers(path, config, folder_tensors(path))
    except PermissionError as error:
        raise BadInput(f"{error.filename or path}: no permission to read; change the file's mode or owner") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise BadInput(missing_path_message(str(model))) from None
        raise BadInput(f"{error.filename or path}: cannot be read ({error.strerror}); download it again") from None


def from_headers(path: Path, config: dict[str, Any] | None, stored: dict[str, TensorInfo]) -> Checkpoint:
    return Checkpoint(path, config, *unpacked(stored, config), stored)


def missing_path_message(model: str) -> str:
    if "://" in model:
        return f"{model}: URLs cannot be read yet; download the checkpoint and give its folder"
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", model):
        return (
            f"{model}: no such folder or file, and hub ids cannot be read yet; "
            f"`hf download {model.split('@')[0]} --local-dir DIR`, then give DIR"
        )
    return f"{model}: no such folder or file; check the path"


def folder_tensors(folder: Path) -> dict[str, TensorInfo]:
    index_path = folder / INDEX_NAME
    if index_path.exists():
        return indexed_tensors(folder, index_path)
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        # Some repositories keep a second copy (`consolidated.safetensors`) under other names beside the standard file.
        files = [folder / "model.safetensors"]
    if not files:
        if any(folder.glob("*.gguf")):
            raise BadInput(f"{folder}: {GGUF}")
        others = sorted({file.suffix for file in folder.iterdir() if file.is_file() and file.suffix})
        held = f"it holds {', '.join(others)} files" if others else "it is empty"
        raise BadInput(
            f"{folder}: no .safetensors file here ({held}); give the folder of a checkpoint saved as safetensors"
        )
    return gather_headers(files)


def indexed_tensors(folder: Path, index_path: Path) -> dict[str, TensorInfo]:
    index = read_json(index_path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index_path}: no weight_map in it; download the file again")
    for tensor, file_name in weight_map.items():
        # An index is untrusted input: it may only name files that lie beside it.
        if (
            not isinstance(file_name, str)
            or file_name in ("", "..")
            or Path(file_name).name != file_name
            or "\\" in file_name
        ):
            raise BadInput(
                f"{index_path}: tensor {tensor} is said to be in {file_name!r}, which is not a file beside the index; download it again"
            )
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise BadInput(
            f"{folder / absent[0]}: {len(absent)} of {len(shards)} shards missing; download {', '.join(absent[:3])}"
        )
    found = gather_headers([folder / shard for shard in shards])
    for tensor, file_name in weight_map.items():
        if tensor not in found or found[tensor].file.name != file_name:
            raise BadInput(
                f"{folder / file_name}: tensor {tensor}, named by {INDEX_NAME}, is not in it; download both again"
            )
    return found


def gather_headers(files: Sequence[Path]) -> dict[str, TensorInfo]:
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, TensorInfo] = {}
    for file in files:
        with file.open("rb"):
            pass  # safetensors reports a file it may not open as missing; this raises PermissionError instead
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  (safe_open is not a mapping)
                    part = opened.get_slice(name)
                    if name in tensors:
                        raise BadInput(
                            f"{file}: tensor {name} is also in {tensors[name].file.name}; keep one of the two files"
                        )
                    tensors[name] = TensorInfo(name, tuple(part.get_shape()), str(part.get_dtype()), file)
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(f"{file}: not a whole safetensors file ({first_line(error)}); download it again") from None
    if not tensors:
        raise BadInput(f"{', '.join(map(str, files))}: no tensor in it; download it again")
    return tensors


def read_config(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadInput(f"{path}: not a JSON object; download the file again")
    return config


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON ({first_line(error)}); download the file again") from None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
