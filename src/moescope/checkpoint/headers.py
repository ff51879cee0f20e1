"""The tensors that a checkpoint's files declare, gathered from an index or from the files themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moescope.checkpoint.files import Files, first_line
from moescope.errors import BadInput

INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_NAMES = ("model.safetensors", "pytorch_model.bin")
SUFFIXES = (".safetensors", ".bin")
GGUF = "GGUF files cannot be read yet; give the folder of a checkpoint saved as safetensors"


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str  # as messages name it: a path or a URL

    @property
    def file_name(self) -> str:
        """The file's name beside the others."""
        return Path(self.file).name if "://" not in self.file else self.file.rsplit("/", 1)[-1]

    @property
    def parameters(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count


def folder_tensors(files: Files) -> dict[str, TensorInfo]:
    """The tensors of all weight files; the index names them where there is one."""
    names = files.names()
    for index_name, single, suffix in zip(INDEX_NAMES, SINGLE_NAMES, SUFFIXES, strict=True):
        if (index := read_json(files, index_name)) is not None:
            return indexed_tensors(files, index_name, index)
        if single in names or files.exists(single):
            # Some repositories keep a second copy (`consolidated.safetensors`) under other names beside the
            # standard file.
            return gather_headers(files, [single])
        stem = (
            "pytorch_model" if suffix == ".bin" else ""
        )  # Trainer leaves `training_args.bin` beside the weights
        found = [name for name in names if name.endswith(suffix) and name.startswith(stem)]
        if found:
            return gather_headers(files, found)
    place = files.label("").rstrip("/")
    if any(name.endswith(".gguf") for name in names):
        raise BadInput(f"{place}: {GGUF}")
    suffixes = sorted({Path(name).suffix for name in names if Path(name).suffix})
    if not names and "://" in place:
        raise BadInput(f"{place}: no index and no model.safetensors at this address; check it")
    held = f"it holds {', '.join(suffixes or names[:3])}" if names else "it is empty"
    raise BadInput(
        f"{place}: no .safetensors file here ({held}); give the folder of a checkpoint saved as safetensors"
    )


def indexed_tensors(files: Files, index_name: str, index: Any) -> dict[str, TensorInfo]:
    label = files.label(index_name)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{label}: no weight_map in it; download the file again")
    for tensor, file_name in weight_map.items():
        # An index is untrusted input: it may only name files that lie beside it.
        if (
            not isinstance(file_name, str)
            or file_name in ("", "..")
            or Path(file_name).name != file_name
            or "\\" in file_name
        ):
            raise BadInput(
                f"{label}: tensor {tensor} is said to be in {file_name!r}, which is not a file "
                "beside the index; download it again"
            )
    shards = sorted(set(weight_map.values()))
    with ThreadPoolExecutor(files.at_once) as pool:
        there = list(pool.map(files.exists, shards))
    absent = [shard for shard, found in zip(shards, there, strict=True) if not found]
    if absent:
        raise BadInput(
            f"{files.label(absent[0])}: {len(absent)} of {len(shards)} shards missing; download "
            f"{', '.join(absent[:3])}"
        )
    found = gather_headers(files, shards)
    for tensor, file_name in weight_map.items():
        if tensor not in found or found[tensor].file_name != file_name:
            raise BadInput(
                f"{files.label(file_name)}: tensor {tensor}, named by {index_name}, is not in "
                "it; download both again"
            )
    return found


def gather_headers(files: Files, names: Sequence[str]) -> dict[str, TensorInfo]:
    with ThreadPoolExecutor(files.at_once) as pool:
        headers = list(pool.map(files.headers, names))
    tensors: dict[str, TensorInfo] = {}
    for file_name, in_file in zip(names, headers, strict=True):
        label = files.label(file_name)
        for name, header in in_file.items():
            if name in tensors:
                raise BadInput(
                    f"{label}: tensor {name} is also in {tensors[name].file_name}; keep one of the two files"
                )
            tensors[name] = TensorInfo(name, header.shape, header.dtype, label)
    if not tensors:
        raise BadInput(f"{', '.join(map(files.label, names))}: no tensor in it; download it again")
    return tensors


def read_config(files: Files) -> dict[str, Any] | None:
    config = read_json(files, "config.json")
    if config is not None and not isinstance(config, dict):
        raise BadInput(f"{files.label('config.json')}: not a JSON object; download the file again")
    return config


def read_json(files: Files, name: str) -> Any:
    """What the file holds; None where there is none."""
    raw = files.raw(name)
    try:
        value = None if raw is None else json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{files.label(name)}: not valid JSON ({first_line(error)}); download the file again"
        ) from None
    return value if raw is None or value is not None else []  # JSON's null is no object, but it is there
