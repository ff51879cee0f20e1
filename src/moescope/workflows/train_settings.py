"""What a training is to be, from the words a user gives: config, preset, router, or the run it goes on with."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.errors import BadInput
from moescope.run import jsonable, read_run_json

if TYPE_CHECKING:
    from moescope.lab.config import LabConfig, ModelConfig


def settle(
    config: str | Path | dict[str, Any] | LabConfig | None,
    preset: str | None,
    router: str | None,
    from_: str | Path | None,
    seed: int | None,
) -> LabConfig:
    """The config that all these words come to, checked."""
    from moescope.lab import config as lab
    from moescope.lab.vocabulary import check_vocabulary, kind_of

    base = lab.preset(preset) if preset is not None else None
    if isinstance(config, lab.LabConfig):
        settled = config
    elif isinstance(config, dict):
        settled = lab.config_from(config, base)
    elif config is not None:
        settled = lab.read_config(config, base)
    else:
        settled = base or lab.preset("nano")
    if router is not None:
        settled = lab.with_router(settled, router)
    if seed is not None:
        settled = replace(settled, train=replace(settled.train, seed=seed))
    if from_ is not None:
        model = model_from(Path(from_), router)
        settled = replace(settled, model=model, data=replace(settled.data, vocabulary=kind_of(Path(from_))))
    lab.check(settled)
    check_vocabulary(settled.data.vocabulary, settled.model.vocabulary)
    return settled


def model_from(folder: Path, router: str | None) -> ModelConfig:
    from moescope.lab.saving import load_config

    config = load_config(folder)
    if router is not None and router != config.router:
        raise BadInput(f"{folder}: its router is {config.router}; leave --router {router} out, or train from the start")
    return config


def unfinished(
    folder: Path | None, config: Any, preset: str | None, router: str | None, from_: Any, overwrite: bool
) -> tuple[Path, LabConfig, str | None]:
    """The run to be gone on with, and its own config: --resume takes no other."""
    from moescope.lab.config import config_from

    if any(value is not None for value in (config, preset, router, from_)) or overwrite:
        raise BadInput(
            "--resume takes everything from the run itself; give it --out alone, or the same command without it"
        )
    if folder is None:
        found = sorted(Path("runs").glob("train-*/run.json"), key=lambda file: file.stat().st_mtime)
        open_ones = [file.parent for file in found if (read_run_json(file.parent) or {}).get("status") != "done"]
        if not open_ones:
            raise BadInput("--resume: no unfinished training in runs/; give its folder with --out")
        folder = open_ones[-1]
    info = read_run_json(folder)
    if info is None or info["verb"] != "train":
        raise BadInput(f"{folder}: no training there to go on with; give the folder of one with --out")
    arguments = dict(info["arguments"])
    origin = arguments.pop("from", None)
    return folder, config_from(arguments, where=str(folder / "run.json")), origin


def as_plain(config: LabConfig) -> dict[str, Any]:
    from moescope.lab.config import as_dict

    return as_dict(config)


def facts_of(config: LabConfig) -> dict[str, Any]:
    """What a training would be, from the meta device: nothing is allocated or read."""
    from moescope.lab.model import parameter_counts
    from moescope.lab.saving import layout_of

    counts = parameter_counts(config.model)
    train = config.train
    return {
        "router": config.model.router,
        "parameters_total": counts.total,
        "parameters_trainable": counts.trainable,
        "layout": layout_of(config.model),
        "steps": train.steps,
        "tokens_per_step": train.batch_size * train.sequence_length,
        "tokens": train.steps * train.batch_size * train.sequence_length,
        "config": jsonable(as_plain(config)),
    }


def bytes_on_disk(config: LabConfig) -> int:
    """What a training writes: its checkpoints, and the state to go on from, of which two lie there for a moment.

    Trained weights are float32, frozen ones of the dtype they are kept in; the optimiser has two moments a trained weight.
    """
    from moescope.lab.model import parameter_counts

    counts, train = parameter_counts(config.model), config.train
    frozen = (counts.total - counts.trainable) * (2 if config.model.frozen_dtype == "bfloat16" else 4)
    checkpoint = 4 * counts.trainable + frozen
    return math.ceil(train.steps / train.checkpoint_every) * checkpoint + 2 * (checkpoint + 8 * counts.trainable)


def fact_lines(facts: dict[str, Any]) -> list[str]:
    return [
        f"router {facts['router']}, saved in the layout {facts['layout']}",
        f"parameters: {facts['parameters_total']:,} in total, {facts['parameters_trainable']:,} of them trained",
        f"{facts['steps']:,} steps of {facts['tokens_per_step']:,} tokens: {facts['tokens']:,} tokens",
    ]
