"""Models as users name them, before anything is loaded: checks, identity, names of the MoE layers."""

from __future__ import annotations

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
from moescope.errors import BadInput
from moescope.execution.failures import reject_if
from moescope.execution.texts import Source, is_ids
from moescope.families.reading import text_config
from moescope.types import Integers

CHECKED_IDS = 2**24
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
    checkpoint = checked_checkpoint(name)
    if checkpoint is None:
        path, _, revision = name.partition("@")
        return {"path": path, "revision": revision or None, "header_hash": None}
    facts = {"path": checkpoint.address, "revision": checkpoint.revision}
    return {**facts, "header_hash": checkpoint.header_hash()}


def checkpoint_layer_names(name: str, in_memory: dict[int, str]) -> dict[int, str]:
    """Return layer -> the block's name in the checkpoint, as scan has it, or in memory where unknown."""
    from moescope.families import read_moe

    with suppress(BadInput):
        layers = read_moe(open_checkpoint(name)).layers
        if set(layers) == set(in_memory):
            return {number: layer.layer_name for number, layer in layers.items()}
    return in_memory
