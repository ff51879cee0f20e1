"""A training's configuration: model, data and training settings, presets, and TOML files."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from moescope.decoder.config import DTYPES, ModelConfig, check_numbers, override, unknown_key
from moescope.errors import BadInput, unknown_name
from moescope.run import run_to_resume

SIZES = {
    "model": ("vocabulary", "d_model", "layers", "d_ff", "experts", "max_positions"),
    "train": ("steps", "batch_size"),
}
RHYTHM = ("warmup", "evaluate_every", "evaluation_rows", "checkpoint_every")
MOST_ROWS = 10**9  # or steps, of each of them
MOST_TOKENS = 10**15  # of a training; the largest ones known read 1e14
MOST_GIGABYTES = 5_000  # of a training: 300 billion trained parameters
LAYOUTS = ("packed", "documents", "padded")
PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True)
class DataConfig:
    """The text. Without `text` or `domains`: the corpus embedded in the Python installation."""

    vocabulary: str = "bytes"  # or "bpe", with [model] vocabulary entries
    text: tuple[str, ...] = ()
    domains: dict[str, str] = field(default_factory=dict)  # name -> path
    validation: dict[str, str] = field(default_factory=dict)  # name -> path; {}: held out of the domains
    validation_share: float = 0.1
    max_bytes: int = 0  # 0: no limit
    # rows cut from one stream per domain; "documents": one document per row; "padded": its pads are targets
    layout: str = "packed"


@dataclass(frozen=True)
class TrainConfig:
    """The training: AdamW, linear warm-up, cosine decay to `final_learning_rate`."""

    steps: int = 300
    epochs: int = 0  # instead of steps, which is then 0: so often every row is read
    batch_size: int = 16  # rows per optimiser step, over all ranks and micro-batches
    micro_batches: int = 1
    sequence_length: int = 128
    learning_rate: float = 3e-3
    final_learning_rate: float = 3e-4
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0  # gradient norm; 0: no clipping
    seed: int = 0
    evaluate_every: int = 50
    evaluation_rows: int = 64
    checkpoint_every: int = 100
    dtype: str = "float32"  # of the arithmetic; trained weights stay float32
    compile: bool = False
    paired_weights: bool = False  # seed each part's init separately: runs of other routers share the rest
    parallel: str = "ddp"  # every process has all weights; "fsdp": a shard of them


@dataclass(frozen=True)
class LabConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


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
    router_options={
        "published_usage": True,
        "published_peers": True,
        "published_order": True,
        "published_pads": True,
        "published_temperature": True,
    },
    max_positions=1024,
    frozen_experts=True,
    frozen_dtype="bfloat16",
)
SOME_DATA = DataConfig(vocabulary="bpe", layout="documents")
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
MEDIUM_TRAIN = TrainConfig(
    steps=20_000,
    batch_size=32,
    sequence_length=768,
    learning_rate=3e-4,
    final_learning_rate=3e-5,
    warmup=500,
    weight_decay=0.01,
    evaluate_every=500,
    checkpoint_every=1000,
    dtype="bfloat16",
)
BPE = DataConfig(vocabulary="bpe")
MEDIUM = replace(
    SOME,
    block="modern",
    router="topk",
    router_options={},
    frozen_experts=False,
    frozen_dtype="float32",
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
    "medium": LabConfig(MEDIUM, BPE, MEDIUM_TRAIN),
    "some_a4": LabConfig(SOME, SOME_DATA, SOME_TRAIN),
    "some_b1": LabConfig(replace(SOME, experts=128), SOME_DATA, SOME_TRAIN),
    "some_b2": LabConfig(replace(SOME, experts=256), SOME_DATA, SOME_TRAIN),
    "some_b3": LabConfig(replace(SOME, experts=512), SOME_DATA, SOME_TRAIN),
}


def preset_config(name: str) -> LabConfig:
    if name not in PRESETS:
        raise unknown_name("preset", name, list(PRESETS))
    return PRESETS[name]


def with_router(config: LabConfig, router: str) -> LabConfig:
    """Return the config with another router, with its fixed top_k if it has one and its default options."""
    from moescope.decoder.routers import router_class

    fixed = router_class(router).fixed_top_k
    options = config.model.router_options if router == config.model.router else {}
    top_k = config.model.top_k if fixed is None else fixed
    return replace(config, model=replace(config.model, router=router, router_options=options, top_k=top_k))


def read_config(path: str | Path, base: LabConfig | None = None) -> LabConfig:
    """Return the config of a TOML file with the tables [model], [data] and [train].

    Missing values come from `base`, else from the preset that the file names.
    """
    return config_from(read_toml(path), base, where=str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
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
    parts = [part.name for part in fields(LabConfig)]
    for key in tables:
        if key not in parts:
            raise unknown_key(f"{where}: unknown table", key, [*parts, "preset"])
    model = tables.get("model", {})
    if isinstance(model, dict) and isinstance(model.get("router"), str):  # first: it sets top_k
        base = with_router(base, model["router"])
    tables["train"] = one_duration(tables.get("train", {}))
    config = LabConfig(
        **{part: override(getattr(base, part), tables.get(part, {}), f"{where}: [{part}]") for part in parts}
    )
    check(config, where)
    return config


def one_duration(train: Any) -> Any:
    """Return the table [train] in which epochs alone replace the preset's steps, and steps its epochs."""
    pairs = (("steps", "epochs"), ("epochs", "steps"))
    replaced = {other: 0 for key, other in pairs if isinstance(train, dict) and train.get(key)}
    return {**train, **replaced} if len(replaced) == 1 else train


def epochs_to_steps(config: LabConfig, rows: int) -> LabConfig:
    """Return the config with the steps of its epochs over so many rows; a rest below a batch is no step."""
    train = config.train
    if not train.epochs:
        return config
    steps = train.epochs * max(rows // train.batch_size, 1)
    config = replace(config, train=replace(train, steps=steps, epochs=0))
    check_size(config)
    return config


def check(config: LabConfig, where: str = "config") -> None:
    """Reject a config that cannot be built or trained, naming key and remedy."""
    from moescope.decoder.model import check_model

    check_model(config.model, where)
    model, train = config.model, config.train
    check_numbers("train", train, where)
    if (train.steps > 0) == (train.epochs > 0):
        raise BadInput(
            f"{where}: [train] steps = {train.steps} and epochs = {train.epochs}; give one of them, above 0"
        )
    if train.dtype not in DTYPES:
        raise unknown_name("dtype", train.dtype, list(DTYPES))
    if train.parallel not in PARALLEL:
        raise unknown_name("parallel", train.parallel, list(PARALLEL))
    if train.sequence_length > model.max_positions:
        raise BadInput(
            f"{where}: [train] sequence_length {train.sequence_length} is more than "
            f"[model] max_positions, {model.max_positions}"
        )
    if train.batch_size % train.micro_batches:
        raise BadInput(
            f"{where}: [train] batch_size {train.batch_size} must be a multiple of "
            f"micro_batches, {train.micro_batches}"
        )
    if train.seed >= 2**63:
        raise BadInput(f"{where}: [train] seed must be less than 2**63, not {train.seed}")
    check_data(config.data, where)
    check_size(config, where)


def check_size(config: LabConfig, where: str = "config") -> None:
    """Reject a training that no machine could hold or finish, from estimates, before anything is built."""
    from moescope.lab.cost import training_bytes

    train = config.train
    for key in RHYTHM:
        if getattr(train, key) > MOST_ROWS:
            raise BadInput(f"{where}: [train] {key} must be at most {MOST_ROWS:,}")
    tokens = train.batch_size * train.sequence_length
    needed = training_bytes(config.model, tokens // train.micro_batches)
    for amount, most, unit in (
        (train.steps * tokens, MOST_TOKENS, "tokens of text"),
        (needed // 10**9, MOST_GIGABYTES, "GB of memory"),
    ):
        if amount > most:
            raise BadInput(
                f"{where}: this training needs at least {about(amount)} {unit}, more than {about(most)}; "
                f"lower {largest_key(config)}"
            )


def largest_key(config: LabConfig) -> str:
    """Name the size that is largest in relation to the preset medium's."""
    usual = PRESETS["medium"]
    sizes = [
        (Fraction(getattr(getattr(config, part), key), getattr(getattr(usual, part), key)), part, key)
        for part, keys in SIZES.items()
        for key in keys
    ]
    _, part, key = max(sizes)
    return f"[{part}] {key} = {about(getattr(getattr(config, part), key))}"


def about(number: int) -> str:
    """Format a whole number of any length."""
    return f"{number:,}" if number < 10**15 else f"{Decimal(number):.1e}"


def check_data(data: DataConfig, where: str) -> None:
    if data.layout not in LAYOUTS:
        raise unknown_name("layout", data.layout, list(LAYOUTS))
    if not 0 < data.validation_share < 1:
        raise BadInput(
            f"{where}: [data] validation_share must lie between 0 and 1, not {data.validation_share}"
        )
    if data.max_bytes < 0:
        raise BadInput(f"{where}: [data] max_bytes must be 0 or more, not {data.max_bytes}")
    if data.text and data.domains:
        raise BadInput(f"{where}: [data] set text for one domain or domains by name, not both")
    if data.validation and (
        missing := [name for name in data.domains or ["text"] if name not in data.validation]
    ):
        raise BadInput(
            f"{where}: [data] validation has no {missing[0]!r}; give one path for every name in domains"
        )
    for key, name in [("domains", name) for name in data.domains] + [
        ("validation", name) for name in data.validation
    ]:
        if not name or name.startswith(".") or set(name) & set("/\\=\0"):  # it names a file of the run
            raise BadInput(
                f"{where}: [data] {key}: {name!r} cannot be a domain's name; use letters, digits, - and _"
            )


# --- from a verb's arguments


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
    where, tables = "config", {}
    if isinstance(config, LabConfig):
        settled, tables = config, not_default(config)
    elif config is not None:
        if not isinstance(config, dict):
            where = str(config)
        tables = config if isinstance(config, dict) else read_toml(config)
        settled = config_from(tables, base, where)
    else:
        settled = base or PRESETS["nano"]
    if router is not None:
        settled = with_router(settled, router)
    if seed is not None:
        if not 0 <= seed < 2**63:
            raise BadInput(f"--seed {seed}: must be 0 or more, and less than 2**63")
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


def check_matches(tables: dict[str, Any], where: str, model: ModelConfig, kind: str, folder: Path) -> None:
    """Reject explicit settings that contradict the model or vocabulary of the checkpoint to start from.

    Values from a preset do not count.
    """
    from moescope.decoder.layers import uses_qk_norm
    from moescope.decoder.routers import router_class

    actual = {**asdict(model), "qk_norm": uses_qk_norm(model)}
    options = {**router_class(model.router).OPTIONS, **actual.pop("router_options")}
    wanted = dict(tables.get("model", {}))
    # the router first: options of another router are unknown here
    pairs: list[tuple[str, Any, Any]] = [("router", wanted.pop("router", model.router), model.router)]
    pairs += [
        (f"router_options.{name}", value, options.get(name))
        for name, value in wanted.pop("router_options", {}).items()
    ]
    pairs += [(name, value, actual[name]) for name, value in wanted.items()]
    pairs = [(f"[model] {name}", value, other) for name, value, other in pairs]
    pairs.append(("[data] vocabulary", tables.get("data", {}).get("vocabulary", kind), kind))
    for name, value, other in pairs:
        if value is not None and value != other:
            shown, stored = (
                str(one).lower() if isinstance(one, bool) else str(one) for one in (value, other)
            )
            raise BadInput(
                f"{where}: {name} is {shown}, but {folder} has {stored}; remove it, or train without --from"
            )


def not_default(config: LabConfig) -> dict[str, Any]:
    """Return the tables of a config made in Python, without values that equal the default."""
    tables, default = asdict(config), asdict(LabConfig())
    return {
        part: {name: value for name, value in tables[part].items() if value != default[part][name]}
        for part in tables
    }


def resumed_config(folder: Path | None, others: bool) -> tuple[Path, LabConfig, str | None]:
    """Return folder, config and origin of the run to resume; `others`: arguments that --resume excludes."""
    folder, info = run_to_resume(folder, "train", "training", others)
    arguments = dict(info["arguments"])
    origin = arguments.pop("from", None)
    return folder, config_from(arguments, where=str(folder / "run.json")), origin


def settings_warnings(train: TrainConfig) -> list[str]:
    """Return what in the settings is allowed, but hardly meant."""
    if train.warmup <= train.steps:
        return []
    return [
        f"[train] warmup {train.warmup:,} exceeds steps {train.steps:,}: the learning rate ends at "
        f"{train.steps / train.warmup:.0%} of {train.learning_rate:g}; lower warmup"
    ]
