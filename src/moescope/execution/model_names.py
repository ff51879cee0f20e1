"""Models as users name them, before anything is loaded: checks, identity, names of the MoE layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from moescope.checkpoint import open_checkpoint
from moescope.checkpoint.location import find_location, hide_credentials
from moescope.errors import BadInput

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def step_names(models: Sequence[str | Path], revisions: str | Iterable[str]) -> list[str]:
    """Return one model name per step: the models, or one hub id at several revisions."""
    names = [str(model) for model in models]
    wanted = [part for part in (revisions.split(",") if isinstance(revisions, str) else revisions) if part]
    if not names:
        raise BadInput("no model given; give a model's folder or hub id")
    if wanted:
        if len(names) > 1:
            raise BadInput(f"--revisions belong to one model, {len(names)} given; give one")
        if Path(names[0]).exists() or "@" in names[0]:
            raise BadInput(
                f"{names[0]}: --revisions need a hub id such as owner/name; give folders one by one instead"
            )
        names = [f"{names[0]}@{revision}" for revision in wanted]
    resolved = [str(Path(name).resolve()) if Path(name).exists() else name for name in names]
    for index, name in enumerate(names):
        if resolved[index] in resolved[:index]:
            raise BadInput(f"{name}: given twice; give each step once")
        if "://" in name:
            raise BadInput(
                f"{hide_credentials(name)}: a model cannot be run from a URL; download it and give its folder"
            )
        if not Path(name).is_dir():
            find_location(name)  # fails in a second where transformers would search for half a minute
    return names


def check_routed(name: str) -> None:
    """Reject a dense model of the lab before anything is loaded."""
    from moescope.decoder.routers import router_class
    from moescope.decoder.saving import is_lab_checkpoint, load_config

    if not is_lab_checkpoint(name):
        return
    config = load_config(Path(name))
    if router_class(config.router).expert_shape(config)[0] == 1:
        raise BadInput(
            f"{name}: nothing is routed in it (router {config.router}, one block per layer), so there is "
            "nothing to trace; moescope scan shows its spectra"
        )


def short_name(name: str) -> str:
    return Path(name).resolve().name if Path(name).exists() else name.rsplit("/", 1)[-1]


def checkpoint_identity(name: str) -> dict[str, Any]:
    try:
        checkpoint = open_checkpoint(name)
    except BadInput:  # not safetensors: transformers may still load it
        path, _, revision = name.partition("@")
        return {"path": path, "revision": revision or None, "header_hash": None}
    return {
        "path": checkpoint.address,
        "revision": checkpoint.revision,
        "header_hash": checkpoint.header_hash(),
    }


def checkpoint_layer_names(name: str, in_memory: dict[int, str]) -> dict[int, str]:
    """Return layer -> the block's name in the checkpoint, as scan has it, or in memory where unknown."""
    from moescope.families import read_moe

    try:
        moe = read_moe(open_checkpoint(name))
    except BadInput:
        return in_memory
    on_disk = {number: layer.layer_name for number, layer in moe.layers.items()}
    return on_disk if set(on_disk) == set(in_memory) else in_memory
