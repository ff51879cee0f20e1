"""Models as users name them, before anything is loaded: checks, identity, names of the MoE layers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moescope.checkpoint import Checkpoint, open_checkpoint
from moescope.checkpoint.files import read_config
from moescope.checkpoint.location import find_location, hide_credentials
from moescope.checkpoint.writing import SMALL_FILE_BYTES, TEMPLATE_FOLDER
from moescope.errors import BadInput, reject_if
from moescope.execution.texts import Source, is_ids
from moescope.families.reading import text_config
from moescope.types import Integers

CHECKED_IDS = 2**24
# of a tokenizer and its chat templates
TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "spiece*"),
    *("sentencepiece*", "chat_template*", f"{TEMPLATE_FOLDER}/*"),
)
MOST_GROWTH = 1000  # characters that a tokenizer may make of one
LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|block|h)\.(\d{1,9})\.")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def step_names(models: Sequence[str | Path], revisions: str | Iterable[str]) -> list[str]:
    """Return one model name per step: the models, or one hub id at several revisions."""
    names = [str(model) for model in models]
    wanted = [part for part in (revisions.split(",") if isinstance(revisions, str) else revisions) if part]
    reject_if(not names, "no model given; give a model's folder or hub id")
    if wanted:
        reject_if(len(names) > 1, f"--revisions belong to one model, {len(names)} given; give one")
        reject_if(
            os.path.exists(names[0]) or "@" in names[0],
            f"{names[0]}: --revisions need a hub id such as owner/name; give folders one by one instead",
        )
        names = [f"{names[0]}@{revision}" for revision in wanted]
    resolved = [str(Path(name).resolve()) if os.path.exists(name) else name for name in names]
    for index, name in enumerate(names):
        reject_if(resolved[index] in resolved[:index], f"{name}: given twice; give each step once")
        reject_if(
            "://" in name,
            f"{hide_credentials(name)}: a model cannot be run from a URL; download it and give its folder",
        )
        if not os.path.isdir(name):
            find_location(name)  # fails in a second where transformers would search for half a minute
    return names


def check_routed(name: str) -> None:
    """Reject a dense model of the lab before anything is loaded."""
    from moescope.decoder.routers import router_class
    from moescope.decoder.saving import is_lab_checkpoint, load_config

    if not is_lab_checkpoint(name):
        return
    config = load_config(Path(name))
    reject_if(
        router_class(config.router).expert_shape(config)[0] == 1,
        f"{name}: nothing is routed in it (router {config.router}, one block per layer), so there is "
        "nothing to trace; moescope scan shows its spectra",
    )


def short_name(name: str) -> str:
    return Path(name).resolve().name if os.path.exists(name) else name.rsplit("/", 1)[-1]


def check_token_ids(names: Iterable[str], reading: Sequence[Source]) -> None:
    """Check token ids against the vocabularies in the configs, before a model is loaded."""
    sizes = {name: size for name in names if (size := vocabulary_size(name)) is not None}
    left = CHECKED_IDS
    for content in (content for source in reading for content in source.read() if is_ids(content)):
        for name, size in sizes.items():
            check_ids(np.asarray(content), name, size)
        left -= len(content)
        if left < 0:  # the others are checked when they are read
            return


def vocabulary_size(name: str) -> int | None:
    """Return the size in the checkpoint's config; None where it is not stated."""
    with suppress(BadInput):
        size = text_config(open_checkpoint(name).config).get("vocab_size")
        return size if type(size) is int else None
    return None


def check_ids(ids: Integers, name: str, vocabulary: int) -> None:
    for worst in ids[(ids < 0) | (ids >= vocabulary)][:1]:
        raise BadInput(
            f"token id {worst}: {name} has {vocabulary} tokens, numbered from 0; give its tokenizer's ids"
        )


def checked_checkpoint(name: str) -> Checkpoint | None:
    """Open the checkpoint of a model that is to be run, and check its files, headers and config as scan does.

    None where it is quantised in a way that only transformers can read.
    """
    from moescope.families import MODELS, read_moe
    from moescope.families.reading import known_kind

    try:
        checkpoint = open_checkpoint(name)
        if known_kind(MODELS, checkpoint.config) is not None:  # other models may have a layout of their own
            read_moe(checkpoint)
    except BadInput:
        if is_quantised(name):
            return None
        raise
    numbers = (LAYER.search(tensor) for tensor in checkpoint.tensors)
    depth = max((int(match[1]) + 1 for match in numbers if match), default=0)
    config = text_config(checkpoint.config)
    for field in ("num_hidden_layers", "n_layers", "num_layers"):
        layers = config.get(field)
        reject_if(
            isinstance(layers, int) and layers > depth > 0,
            f"{checkpoint.files.label('config.json')}: {field} is {layers}, but the files hold {depth} "
            "layers; correct it, or download the missing files",
        )
    return checkpoint


def is_quantised(name: str) -> bool:
    with suppress(BadInput, OSError):
        return "quantization_config" in (read_config(find_location(name).files) or {})
    return False


def checkpoint_identity(name: str) -> dict[str, Any]:
    checkpoint, tokenizer = checked_checkpoint(name), tokenizer_hash(name)
    if checkpoint is None:
        path, _, revision = name.partition("@")
        return {"path": path, "revision": revision or None, "header_hash": None, "tokenizer": tokenizer}
    facts = {"path": checkpoint.address, "revision": checkpoint.revision}
    return {**facts, "header_hash": checkpoint.header_hash(), "tokenizer": tokenizer}


def tokenizer_files(name: str) -> list[Path]:
    """Return the files of a folder's tokenizer; reject what would take endless time or memory to load."""
    folder = Path(name)
    found = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)} if folder.is_dir() else ()
    files = sorted(file for file in found if file.exists() and not file.is_dir())
    for file in files:
        reject_if(
            not file.is_file() or file.stat().st_size > SMALL_FILE_BYTES,
            f"{file}: a pipe or device, or over {SMALL_FILE_BYTES:,} bytes; download the tokenizer again",
        )
        if file.name == "tokenizer.json" and b'"Replace"' in (content := file.read_bytes()):
            with suppress(ValueError, RecursionError, AttributeError):  # loading says what is wrong
                times = growth(json.loads(content).get("normalizer"))
                reject_if(
                    times > MOST_GROWTH,
                    f"{file}: its normalizer makes up to {times:.3g} characters of one; download it again",
                )
    return files


def growth(part: Any) -> float:
    """Return how many characters the replacements in a part of tokenizer.json make of one, all in a row."""
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    content = part.get("content") if isinstance(part, dict) and part.get("type") == "Replace" else None
    own = max(len(content), 1) if isinstance(content, str) else 1
    return math.prod(map(growth, parts), start=float(own))


def tokenizer_hash(name: str) -> str | None:
    """Return a hash of the tokenizer in a folder; None elsewhere: a commit has one tokenizer."""
    files = tokenizer_files(name)
    parts = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest() if files else None


def checkpoint_layer_names(name: str, in_memory: dict[int, str]) -> dict[int, str]:
    """Return layer -> the block's name in the checkpoint, as scan has it, or in memory where unknown."""
    from moescope.families import read_moe

    with suppress(BadInput):
        layers = read_moe(open_checkpoint(name)).layers
        if set(layers) == set(in_memory):
            return {number: layer.layer_name for number, layer in layers.items()}
    return in_memory
