"""A training's configuration: model, data and training settings, presets, and TOML files."""

from __future__ import annotations

import math
import runpy
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from moescope.arguments import one_of
from moescope.decoder.config import DTYPES, Config, ModelConfig, Option, check_numbers, override
from moescope.errors import BadInput, unknown_name

RHYTHM = ("warmup", "evaluate_every", "evaluation_rows", "checkpoint_every")
MOST_ROWS = 10**9  # or steps, of each of them
MOST_TOKENS = 10**15  # of a training; the largest ones known read 1e14
MOST_BYTES = 5_000 * 10**9  # of a training: 300 billion trained parameters
SMALLER = "lower the sizes in [model], or [train] batch_size"
STATE = "training_state.pt"  # among the checkpoints: what a training is resumed from
LAYOUTS = ("packed", "documents", "padded")
TRAINED = ("routers", "routers+experts", "everything")
KEPT = "kept"
MOST_TOML = 10**7  # bytes
MODEL, UPCYCLED, TRAINER, CONTROL = "model", "upcycled", "trainer", "control"  # folders of train --base
REMOVED = {  # table and key -> what there is instead
    ("base", "lora"): "the tensors themselves are trained, of routers in little memory",
    ("base", "expert_list"): 'trained = "routers+experts" trains all experts',
    ("train", "parallel"): "processes of torchrun share the rows, each with all weights (DDP)",
}
ONLY_LAB = (("data", "vocabulary"), ("train", "compile"), ("train", "paired_weights"))


@dataclass(frozen=True)
class DataConfig:
    """The text. Without `text` or `domains`: the corpus embedded in the Python installation.

    Parameters
    ----------
    vocabulary
        `bytes`, or `bpe`: byte-pair encoding of `[model] vocabulary` entries, learned from the training
        texts; with `--from` always that of the checkpoint.
    text
        Files, folders or .jsonl, as one domain.
    domains
        The same by name: `domains = { code = "src", prose = "books.jsonl" }`.
    validation
        Validation texts by name instead of held-out documents; every domain needs one. Texts on both sides
        are not trained on. A study evaluates names that `domains` lacks too, and counts them in no loss.
    validation_share
        Share of the documents held out, by a hash of their content (of embedded ones, of their name); a
        domain of one document is cut near its end, with a warning.
    max_bytes
        Bytes of text, shared evenly by the domains; 0: all of it, or a million per domain of the embedded
        corpus.
    layout
        `packed`: a domain's documents as one stream, cut into rows. `documents`: each in a row of its own,
        cut or padded. `padded`: the same, and padding is to be predicted too.
    """

    vocabulary: str = "bytes"
    text: tuple[str, ...] = ()
    domains: dict[str, str] = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    validation_share: float = 0.1
    max_bytes: int = 0
    layout: str = "packed"


@dataclass(frozen=True)
class TrainConfig:
    """The training: AdamW (betas 0.9 and 0.95), linear warm-up, cosine decay to `final_learning_rate`.

    Parameters
    ----------
    steps
        Optimiser steps.
    epochs
        Instead of `steps`: how often every training row is read; an epoch has rows // `batch_size` steps.
    batch_size
        Rows per step, over all processes and micro-batches.
    micro_batches
        Parts in which the rows of a step are read.
    sequence_length
        Tokens per row.
    learning_rate
        After the warm-up.
    final_learning_rate
        At the last step.
    warmup
        Steps over which the rate rises linearly; a value above `steps` gives a warning.
    weight_decay
        Of matrices; norms and biases do not decay.
    clip
        Norm above which the gradient is scaled down; 0: never.
    seed
        Seed of the initial weights and of the order of rows.
    evaluate_every
        Steps between evaluations.
    evaluation_rows
        Validation rows per evaluation, as many of each domain.
    checkpoint_every
        Steps between checkpoints; the last step is always saved.
    dtype
        `float32` or `bfloat16`: of the arithmetic; trained weights stay float32. On a GPU a bfloat16 step
        runs as one CUDA graph, about five times as fast for small models.
    compile
        torch.compile where it helps; gradients into routers are then not measured.
    paired_weights
        Initialise each part from a seed of its own, so that trainings with the same seed start from the same
        weights wherever shapes agree, whatever their routers; studies set it.
    """

    steps: int = 300
    epochs: int = 0
    batch_size: int = 16
    micro_batches: int = 1
    sequence_length: int = 128
    learning_rate: float = 3e-3
    final_learning_rate: float = 3e-4
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 50
    evaluation_rows: int = 64
    checkpoint_every: int = 100
    dtype: str = "float32"
    compile: bool = False
    paired_weights: bool = False


@dataclass(frozen=True)
class LabConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class BaseConfig:
    """What becomes of the base model of train --base.

    Parameters
    ----------
    router
        A router of the lab, or `kept`.
    router_options
        Options of the router, as the table `[base.router_options]`.
    trained
        `routers`, `routers+experts` or `everything`. By default routers, of a dense base routers and experts.
    balance
        Weight of the family's own balance loss, for kept routers.
    experts
        Of a dense base: copies of every feed-forward block.
    top_k
        Experts per token, for a new router or a dense base; 0: as the base has it, 2 for a dense one.
    noise
        Of a dense base: added to every copy, as a multiple of its standard deviation.
    controls
        Also train the dense base, and the kept router where it is replaced, as long on the same text.
    """

    router: str = KEPT
    router_options: dict[str, Option] = field(default_factory=dict)
    trained: str = ""
    balance: float = 0.01
    experts: int = 8
    top_k: int = 0
    noise: float = 0.0
    controls: bool = False


@dataclass(frozen=True)
class ExistingConfig:
    """A training of a model that exists."""

    base: BaseConfig = field(default_factory=BaseConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            sequence_length=512,
            learning_rate=1e-4,
            final_learning_rate=1e-5,
            weight_decay=0.0,
            evaluate_every=100,
        )
    )


SOME = ModelConfig(
    vocabulary=8192,
    d_model=512,
    layers=10,
    heads=8,
    block="some",
    d_ff=1024,
    experts=64,
    top_k=4,
    router="some",
    router_options=dict.fromkeys(
        ("published_usage", "published_peers", "published_order", "published_pads", "published_temperature"),
        True,
    ),
    max_positions=1024,
    frozen_experts=True,
    frozen_dtype="bfloat16",
)
BPE = DataConfig(vocabulary="bpe")
SOME_DATA = replace(BPE, layout="documents")
SOME_TRAIN = TrainConfig(
    steps=1248,  # 4 epochs of 10,000 rows
    batch_size=32,
    sequence_length=768,
    learning_rate=6e-4,
    final_learning_rate=6e-5,
    weight_decay=0.01,
    evaluate_every=312,
    checkpoint_every=312,
    dtype="bfloat16",
)
MEDIUM = LabConfig(
    replace(
        SOME, block="modern", router="topk", router_options={}, frozen_experts=False, frozen_dtype="float32"
    ),
    BPE,
    replace(
        SOME_TRAIN,
        steps=20_000,
        learning_rate=3e-4,
        final_learning_rate=3e-5,
        warmup=500,
        evaluate_every=500,
        checkpoint_every=1000,
    ),
)
PRESETS: dict[str, LabConfig] = {
    "nano": LabConfig(),
    "small": LabConfig(
        ModelConfig(vocabulary=4096, d_model=256, layers=6, heads=8, d_ff=512, experts=16),
        BPE,
        TrainConfig(
            steps=3000,
            batch_size=32,
            sequence_length=256,
            learning_rate=1e-3,
            final_learning_rate=1e-4,
            warmup=100,
            evaluate_every=250,
            checkpoint_every=500,
        ),
    ),
    "medium": MEDIUM,
    **{
        f"some_{run}": LabConfig(replace(SOME, experts=experts), SOME_DATA, SOME_TRAIN)
        for run, experts in {"a4": 64, "b1": 128, "b2": 256, "b3": 512}.items()
    },
}


def preset_config(name: str) -> LabConfig:
    return PRESETS[one_of("preset", name, PRESETS)]


def with_router(config: LabConfig, router: str) -> LabConfig:
    """Return the config with another router, with its fixed top_k if it has one and its default options."""
    from moescope.decoder.routers import router_class

    model, fixed = config.model, router_class(router).fixed_top_k
    options = model.router_options if router == model.router else {}
    top_k = model.top_k if fixed is None else fixed
    return replace(config, model=replace(model, router=router, router_options=options, top_k=top_k))


def read_toml(path: str | Path) -> dict[str, Any]:
    file = Path(path)
    try:
        special = file.exists() and not file.is_file() and not file.is_dir()
        if special or (file.is_file() and file.stat().st_size > MOST_TOML):
            raise BadInput(f"{path}: a pipe or device, or over {MOST_TOML:,} bytes; give a TOML file")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"cannot read {path}: {reason}; pass the path of a TOML file") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise BadInput(f"{path} is not valid TOML: {error}") from None


def config_from(tables: dict[str, Any], base: LabConfig | None = None, where: str = "config") -> LabConfig:
    """Return the checked config of a dictionary such as a TOML file holds."""
    tables = dict(tables)
    named = tables.pop("preset", None)
    if base is None:
        if named is not None and not isinstance(named, str):
            raise BadInput(f"{where}: preset must be text, not {named!r}; one of {', '.join(PRESETS)}")
        base = preset_config(named or "nano")
    model = tables.get("model", {})
    if isinstance(model, dict) and isinstance(model.get("router"), str):  # first: it sets top_k
        base = with_router(base, model["router"])
    train = tables.get("train")
    if isinstance(train, dict) and bool(train.get("steps")) != bool(train.get("epochs")):
        # epochs alone replace the preset's steps, and steps its epochs
        tables["train"] = {**train, "epochs" if train.get("steps") else "steps": 0}
    config = override_tables(base, tables, where, "preset")
    check(config, where)
    return config


def override_tables(base: Config, tables: dict[str, Any], where: str, *others: str) -> Config:
    """Return a config of several tables with the values of a TOML file."""
    parts = [part.name for part in fields(base)]  # type: ignore[arg-type]
    for key in tables:
        if key not in parts:
            raise unknown_name("table", key, [*parts, *others], where)
    reasons = {place: f"was removed: {instead}; delete the key" for place, instead in REMOVED.items()}
    if isinstance(base, ExistingConfig):
        reasons |= dict.fromkeys(ONLY_LAB, "is for models of the lab; remove it, or --base")
    for (part, key), reason in reasons.items():
        if isinstance(table := tables.get(part), dict) and key in table:
            raise BadInput(f"{where}: [{part}] {key} {reason}")
    return replace(  # type: ignore[type-var]
        base,
        **{part: override(getattr(base, part), tables.get(part, {}), f"{where}: [{part}]") for part in parts},
    )


def epochs_to_steps(config: LabConfig, rows: int) -> LabConfig:
    """Return the config with the steps of its epochs over so many rows; a rest below a batch is no step."""
    train = config.train
    if not train.epochs:
        return config
    steps = train.epochs * max(rows // train.batch_size, 1)
    config = replace(config, train=replace(train, steps=steps, epochs=0))
    check_size(config)
    return config


def reject_first(where: str, *problems: tuple[bool, str]) -> None:
    """Raise the first problem that is present; its words say what is wrong and the remedy."""
    for present, words in problems:
        if present:
            raise BadInput(f"{where}: {words}")


def check(config: LabConfig | ExistingConfig, where: str = "config") -> None:
    """Reject a config that cannot be built or trained, naming key and remedy."""
    from moescope.decoder.routers import router_class

    train, data = config.train, config.data
    if isinstance(config, LabConfig):
        from moescope.decoder.model import check_model

        check_model(config.model, where)
        epochs, seed_bits = True, 63
        length, most = train.sequence_length, config.model.max_positions
        others = [
            (length > most, f"[train] sequence_length {length} is more than [model] max_positions, {most}")
        ]
    else:
        base, epochs, seed_bits = config.base, False, 32
        one_of("trained", base.trained or "routers", TRAINED)
        routes = base.router == KEPT or router_class(base.router).routes
        padded = "[data] layout = 'padded' is for models of the lab; use 'documents'"
        others = [
            (data.layout == "padded", padded),
            (not routes, f"[base] router {base.router} has no experts to choose from; name another"),
            (
                base.router == KEPT and bool(base.router_options),
                "[base] router_options are of a new router; name it with [base] router",
            ),
            (not 0 <= base.balance < math.inf, f"[base] balance must be 0 or more, not {base.balance}"),
        ]
    check_numbers("train", train, where)
    one_of("dtype", train.dtype, DTYPES)
    one_of("layout", data.layout, LAYOUTS)
    missing = [name for name in data.domains or ["text"] if name not in data.validation]
    names = [("domains", name) for name in data.domains] + [("validation", name) for name in data.validation]
    reject_first(
        where,
        (
            (train.steps > 0) == (train.epochs > 0) or (train.epochs > 0 and not epochs),
            f"[train] steps = {train.steps} and epochs = {train.epochs}; give "
            f"{'one of them' if epochs else 'steps'}, above 0",
        ),
        (
            train.batch_size % train.micro_batches > 0,
            f"[train] batch_size {train.batch_size} must be a multiple of micro_batches, "
            f"{train.micro_batches}",
        ),
        (train.seed >= 2**seed_bits, f"[train] seed must be less than 2**{seed_bits}, not {train.seed}"),
        (
            not 0 < data.validation_share < 1,
            f"[data] validation_share must lie between 0 and 1, not {data.validation_share}",
        ),
        (data.max_bytes < 0, f"[data] max_bytes must be 0 or more, not {data.max_bytes}"),
        (bool(data.text and data.domains), "[data] set text for one domain or domains by name, not both"),
        (
            bool(data.validation and missing),
            f"[data] validation has no {str(missing[:1])[1:-1]}; give one path for every name in domains",
        ),
        *(
            (
                not name or name.startswith(".") or bool(set(name) & set("/\\=\0")),  # it names a file
                f"[data] {key}: {name!r} cannot be a domain's name; use letters, digits, - and _",
            )
            for key, name in names
        ),
        *others,
    )
    if isinstance(config, LabConfig):
        check_size(config, where)


def check_size(config: LabConfig, where: str = "config") -> None:
    """Reject a training that no machine could hold or finish, from estimates, before anything is built."""
    from moescope.lab.cost import training_bytes

    train = config.train
    tokens = train.batch_size * train.sequence_length
    reject_first(
        where,
        *(
            (getattr(train, key) > MOST_ROWS, f"[train] {key} must be at most {MOST_ROWS:,}")
            for key in RHYTHM
        ),
        (
            train.steps * tokens > MOST_TOKENS,
            f"this training reads more than {MOST_TOKENS:,} tokens; lower [train] steps or batch_size",
        ),
        (
            training_bytes(config.model, tokens // train.micro_batches) > MOST_BYTES,
            f"this training needs more than {MOST_BYTES // 10**9:,} GB of memory; {SMALLER}",
        ),
    )


# --- from a verb's arguments


def read_tables(config: str | Path | dict[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Return the tables of a TOML file or dictionary, and how errors name it."""
    if config is None or isinstance(config, dict):
        return config or {}, "config"
    return read_toml(config), str(config)


def settle(
    config: str | Path | dict[str, Any] | LabConfig | None,
    preset: str | None,
    router: str | None,
    from_: str | Path | None,
    seed: int | None,
) -> LabConfig:
    """Return the checked config; with `from_`, model and vocabulary are the checkpoint's."""
    from moescope.decoder.saving import load_config
    from moescope.decoder.vocabulary import check_vocabulary, kind_of

    base = None if preset is None else preset_config(preset)
    if isinstance(config, LabConfig):
        settled, default, where = config, asdict(LabConfig()), "config"
        tables = {
            part: {name: value for name, value in values.items() if value != default[part][name]}
            for part, values in asdict(config).items()
        }
    else:
        tables, where = read_tables(config)
        settled = config_from(tables, base, where)
    if router is not None:
        settled = with_router(settled, router)
    if seed is not None:
        settled = replace(settled, train=replace(settled.train, seed=seed))
    if from_ is not None:
        folder = Path(from_)
        model, kind = load_config(folder), kind_of(folder)
        if router not in (None, model.router):
            raise BadInput(
                f"{folder}: its router is {model.router}; remove --router {router}, or train without --from"
            )
        check_matches(tables, where, model, kind, folder)
        settled = replace(settled, model=model, data=replace(settled.data, vocabulary=kind))
    check(settled, where)
    check_vocabulary(settled.data.vocabulary, settled.model.vocabulary)
    return settled


def settle_existing(
    config: str | Path | dict[str, Any] | None, router: str | None, seed: int | None
) -> ExistingConfig:
    """Return the checked config of train --base."""
    tables, where = read_tables(config)
    settled = override_tables(ExistingConfig(), tables, where)
    base = replace(settled.base, router=router or settled.base.router)
    train = replace(settled.train, seed=settled.train.seed if seed is None else seed)
    settled = replace(settled, base=base, train=train)
    check(settled, where)
    return settled


def check_matches(tables: dict[str, Any], where: str, model: ModelConfig, kind: str, folder: Path) -> None:
    """Reject explicit settings that contradict the model or vocabulary of the checkpoint to start from.

    Values from a preset do not count.
    """
    from moescope.decoder.layers import uses_qk_norm
    from moescope.decoder.routers import router_class

    stored = {**asdict(model), "qk_norm": uses_qk_norm(model)}
    options = {**router_class(model.router).OPTIONS, **stored["router_options"]}
    wanted = dict(tables.get("model", {}))
    wanted_options = wanted.pop("router_options", {})
    pairs = (
        ("[model] router", wanted.get("router"), model.router),  # first: options of another are unknown here
        *(
            (f"[model] router_options.{name}", value, options.get(name))
            for name, value in wanted_options.items()
        ),
        *((f"[model] {name}", value, stored[name]) for name, value in wanted.items()),
        ("[data] vocabulary", tables.get("data", {}).get("vocabulary"), kind),
    )
    for name, value, other in pairs:
        if value is not None and value != other:
            shown, held = (str(one).lower() if isinstance(one, bool) else one for one in (value, other))
            raise BadInput(
                f"{where}: {name} is {shown}, but {folder} has {held}; remove it, or train without --from"
            )


def settings_warnings(train: TrainConfig) -> list[str]:
    """Return what in the settings is allowed, but hardly meant."""
    if train.warmup <= train.steps:
        return []
    return [
        f"[train] warmup {train.warmup:,} exceeds steps {train.steps:,}: the learning rate ends at "
        f"{train.steps / train.warmup:.0%} of {train.learning_rate:g}; lower warmup"
    ]


# --- functions that a study or a results.toml names in a Python file of its own: "FILE.py:FUNCTION"


def split_place(place: str, folder: Path, where: str) -> tuple[Path, str]:
    """Return the file and the function of "FILE.py:FUNCTION"; a relative file lies in the folder."""
    file, _, function = place.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise BadInput(f'{where}: {place!r} names no function; write "FILE.py:FUNCTION"')
    return (folder / file).resolve(), function


def load_function(place: str, folder: Path, where: str) -> Callable[..., Any]:
    """Return the function. Its file runs once per process and may import files from its own folder."""
    path, name = split_place(place, folder, where)
    if not path.is_file():
        raise BadInput(f"{where}: {path}: no such file")
    try:
        function = names_of_file(path).get(name)
    except Exception as error:
        raise BadInput(f"{where}: {path} cannot be run ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise BadInput(f"{where}: {path} has no function {name}")
    return function


@cache
def names_of_file(path: Path) -> dict[str, Any]:
    sys.path.insert(0, str(path.parent))
    try:
        return runpy.run_path(str(path), run_name=f"moescope_user_{path.stem}")
    finally:
        sys.path.remove(str(path.parent))
