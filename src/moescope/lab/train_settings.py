"""What a training is to be, from the words a user gives.

Config, preset, router, or the run it goes on with.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.errors import BadInput
from moescope.run import jsonable, run_to_resume

if TYPE_CHECKING:
    from moescope.decoder.config import ModelConfig
    from moescope.lab.config import LabConfig


def settle(
    config: str | Path | dict[str, Any] | LabConfig | None,
    preset: str | None,
    router: str | None,
    from_: str | Path | None,
    seed: int | None,
) -> LabConfig:
    """The config that all these words come to, checked.

    With `from_`, model and vocabulary are the checkpoint's.
    """
    from moescope.decoder.vocabulary import check_vocabulary, kind_of
    from moescope.lab import config as lab

    base = lab.preset(preset) if preset is not None else None
    where, given = "config", {}
    if isinstance(config, lab.LabConfig):
        settled, given = config, not_default(config)
    elif config is not None:
        where, given = (
            ("config", config) if isinstance(config, dict) else (str(config), lab.read_toml(config))
        )
        settled = lab.config_from(given, base, where)
    else:
        settled = base or lab.preset("nano")
    if router is not None:
        settled = lab.with_router(settled, router)
    if seed is not None:
        if not 0 <= seed < 2**63:
            raise BadInput(f"--seed {seed}: must be 0 or more, and less than 2**63")
        settled = replace(settled, train=replace(settled.train, seed=seed))
    if from_ is not None:
        model, kind = model_from(Path(from_), router), kind_of(Path(from_))
        check_said(given, where, model, kind, Path(from_))
        settled = replace(settled, model=model, data=replace(settled.data, vocabulary=kind))
    lab.check(settled, where)
    check_vocabulary(settled.data.vocabulary, settled.model.vocabulary)
    return settled


def model_from(folder: Path, router: str | None) -> ModelConfig:
    from moescope.decoder.saving import load_config

    config = load_config(folder)
    if router is not None and router != config.router:
        raise BadInput(
            f"{folder}: its router is {config.router}; leave --router {router} out, or train from the start"
        )
    return config


def check_said(given: dict[str, Any], where: str, model: ModelConfig, kind: str, folder: Path) -> None:
    """Refuse a config that says something else of the model or its vocabulary than the checkpoint whose
    weights come first.

    What the config leaves to its preset is not said, so it is no contradiction.
    """
    from moescope.decoder.layers import uses_qk_norm
    from moescope.decoder.routers import router_class

    has = {**asdict(model), "qk_norm": uses_qk_norm(model)}
    options = {**router_class(model.router).OPTIONS, **has.pop("router_options")}
    said = dict(given.get("model", {}))
    pairs: list[tuple[str, Any, Any]] = [
        ("router", said.pop("router", model.router), model.router)
    ]  # first: options of another router are not known here
    pairs += [
        (f"router_options.{name}", value, options.get(name))
        for name, value in said.pop("router_options", {}).items()
    ]
    pairs += [(name, value, has[name]) for name, value in said.items()]
    pairs = [(f"[model] {name}", value, own) for name, value, own in pairs]
    pairs.append(("[data] vocabulary", given.get("data", {}).get("vocabulary", kind), kind))
    for name, value, own in pairs:
        if value is not None and value != own:
            raise BadInput(
                f"{where}: {name} is {shown(value)}, but {folder} has {shown(own)}; leave it "
                "out, or train from the start without --from"
            )


def not_default(config: LabConfig) -> dict[str, Any]:
    """What a config made in Python says, as a file would: whatever is not as it would be without a word."""
    from moescope.lab.config import LabConfig

    own, other = as_plain(config), as_plain(LabConfig())
    return {
        part: {name: value for name, value in own[part].items() if value != other[part][name]} for part in own
    }


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def unfinished(
    folder: Path | None, config: Any, preset: str | None, router: str | None, from_: Any, overwrite: bool
) -> tuple[Path, LabConfig, str | None]:
    """The run to be gone on with, and its own config: --resume takes no other."""
    from moescope.lab.config import config_from

    others = overwrite or any(value is not None for value in (config, preset, router, from_))
    folder, info = run_to_resume(folder, "train", "training", others)
    arguments = dict(info["arguments"])
    origin = arguments.pop("from", None)
    return folder, config_from(arguments, where=str(folder / "run.json")), origin


def as_plain(config: LabConfig) -> dict[str, Any]:
    return asdict(config)


def facts_of(config: LabConfig, origin: str | None = None) -> dict[str, Any]:
    """What a training would be, from the meta device: nothing is allocated or read.

    `origin` is the checkpoint it begins with.
    """
    from moescope.decoder.model import parameter_counts
    from moescope.decoder.saving import layout_of

    counts = parameter_counts(config.model)
    train = config.train
    return {
        "router": config.model.router,
        "parameters_total": counts.total,
        "parameters_trainable": counts.trainable,
        "layout": layout_of(config.model),
        "frozen": frozen_words(config.model),
        "from": origin,
        "warnings": settings_warnings(config),
        "steps": train.steps,
        "tokens_per_step": train.batch_size * train.sequence_length,
        "tokens": train.steps * train.batch_size * train.sequence_length,
        "config": jsonable(as_plain(config)),
    }


def bytes_on_disk(config: LabConfig) -> int:
    """What a training writes: its checkpoints, and the state to go on from, of which two lie there for a
    moment.

    Trained weights are float32, frozen ones of the dtype they are kept in; the optimiser has two moments a
    trained weight.
    """
    from moescope.decoder.model import parameter_counts

    counts, train = parameter_counts(config.model), config.train
    frozen = (counts.total - counts.trainable) * (2 if config.model.frozen_dtype == "bfloat16" else 4)
    checkpoint = 4 * counts.trainable + frozen
    return math.ceil(train.steps / train.checkpoint_every) * checkpoint + 2 * (
        checkpoint + 8 * counts.trainable
    )


def frozen_words(model: ModelConfig) -> str | None:
    """What is not trained.

    For SoME's router also that nothing is, since its experts are meant to be frozen.
    """
    if model.frozen_experts:
        return "frozen: the experts stay as they were drawn"
    from moescope.decoder.routers import router_class

    if router_class(model.router).expects_frozen_experts:
        return (
            "frozen: nothing; the experts are trained too, while SoME's are not: set [model] "
            "frozen_experts = true, or begin with a preset of block some"
        )
    return None


def settings_warnings(config: LabConfig) -> list[str]:
    """What can be trained as it is written but is hardly meant so."""
    train = config.train
    if train.warmup > train.steps:
        return [
            (
                f"[train] warmup is {train.warmup:,} steps, more than the {train.steps:,} there are: "
                "the learning rate ends at "
                f"{train.steps / train.warmup:.0%} of {train.learning_rate:g}; lower warmup"
            )
        ]
    return []


def fact_lines(facts: dict[str, Any]) -> list[str]:
    begins = f"begins with {facts['from']}: model and vocabulary are its own, whatever the preset has"
    return [
        f"router {facts['router']}, saved in the layout {facts['layout']}",
        *([begins] if facts["from"] else []),
        (
            f"parameters: {facts['parameters_total']:,} in total, {facts['parameters_trainable']:,} "
            "of them trained"
        ),
        *([facts["frozen"]] if facts["frozen"] else []),
        f"{facts['steps']:,} steps of {facts['tokens_per_step']:,} tokens: {facts['tokens']:,} tokens",
        *(f"warning: {warning}" for warning in facts["warnings"]),
    ]
