"""A training's configuration: model, data and training settings, presets, and TOML files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from moescope.decoder.config import DTYPES, ModelConfig, check_numbers, override, unknown_key
from moescope.errors import BadInput, unknown_name

LAYOUTS = ("packed", "documents")
PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True)
class DataConfig:
    """The text. Without `text` or `domains`: the corpus embedded in the Python installation."""

    vocabulary: str = "bytes"  # or "bpe", with [model] vocabulary entries
    text: tuple[str, ...] = ()
    domains: dict[str, str] = field(default_factory=dict)  # name -> path
    validation_share: float = 0.1
    max_bytes: int = 0  # 0: no limit
    layout: str = "packed"  # rows cut from one stream per domain; "documents": one document per row


@dataclass(frozen=True)
class TrainConfig:
    """The training: AdamW, linear warm-up, cosine decay to `final_learning_rate`."""

    steps: int = 300
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
    max_positions=1024,
    frozen_experts=True,
    frozen_dtype="bfloat16",
)
SOME_TRAIN = TrainConfig(
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
MEDIUM = replace(SOME, block="modern", router="topk", frozen_experts=False, frozen_dtype="float32")

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
    "medium": LabConfig(MEDIUM, BPE, SOME_TRAIN),
    "some_a4": LabConfig(SOME, BPE, SOME_TRAIN),
    "some_b1": LabConfig(replace(SOME, experts=128), BPE, SOME_TRAIN),
    "some_b2": LabConfig(replace(SOME, experts=256), BPE, SOME_TRAIN),
    "some_b3": LabConfig(replace(SOME, experts=512), BPE, SOME_TRAIN),
}


def preset(name: str) -> LabConfig:
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None


def config_from(tables: dict[str, Any], base: LabConfig | None = None, where: str = "config") -> LabConfig:
    """Return the checked config of a dictionary such as a TOML file holds."""
    tables = dict(tables)
    named = tables.pop("preset", None)
    if base is None:
        if named is not None and not isinstance(named, str):
            raise BadInput(f"{where}: preset must be text, not {named!r}; one of {', '.join(PRESETS)}")
        base = preset(named or "nano")
    parts = [part.name for part in fields(LabConfig)]
    for key in tables:
        if key not in parts:
            raise unknown_key(f"{where}: unknown table", key, [*parts, "preset"])
    model = tables.get("model", {})
    if isinstance(model, dict) and isinstance(model.get("router"), str):  # first: it sets top_k
        base = with_router(base, model["router"])
    config = LabConfig(
        **{part: override(getattr(base, part), tables.get(part, {}), f"{where}: [{part}]") for part in parts}
    )
    check(config, where)
    return config


def check(config: LabConfig, where: str = "config") -> None:
    """Reject a config that cannot be built or trained, naming key and remedy."""
    from moescope.decoder.model import check_model

    check_model(config.model, where)
    model, train = config.model, config.train
    check_numbers("train", train, where)
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
    for name in data.domains:
        if not name or name.startswith(".") or set(name) & set("/\\=\0"):  # it names a file of the run
            raise BadInput(
                f"{where}: [data] domains: {name!r} cannot be a domain's name; use letters, digits, - and _"
            )
