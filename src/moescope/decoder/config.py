"""What a training is: model, data and training settings, read from TOML and checked before anything is built.

Shape suffixes in the lab: B rows, L positions, T = B L tokens, E experts, K slots a token, S rows of all
slots sorted by expert,
D model width, F expert hidden width, H heads, V vocabulary, R width of a router's own state.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import types
import typing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from moescope.errors import BadInput, unknown_name

Option = bool | int | float | str

BLOCKS = ("modern", "some")
EXPERT_INITS = ("default", "orthogonal", "sparse", "zero")
DTYPES = ("float32", "bfloat16")
LAYOUTS = ("packed", "documents")
PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    `modern`: pre-RMSNorm, RoPE, SwiGLU experts; `some`: post-LayerNorm, sinusoidal positions, GELU experts.
    """

    vocabulary: int = 260
    d_model: int = 64
    layers: int = 4
    heads: int = 4
    block: str = "modern"
    d_ff: int = 128  # of one expert
    experts: int = 8
    top_k: int = 2
    router: str = "top2"
    router_options: dict[str, Option] = field(
        default_factory=dict
    )  # each router names its own; others are refused
    tie_embeddings: bool = False
    max_positions: int = 1024
    # None: as the layout wants that the router is saved in. Qwen3-MoE's, for gates that are not renormalised,
    # has norms on
    # queries and keys, Mixtral's has none. Set it where routers are compared, so that they differ in nothing
    # else.
    qk_norm: bool | None = None
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    frozen_experts: bool = False  # random experts that are never trained: no gradients, no optimiser state
    frozen_dtype: str = "float32"  # what frozen experts are kept in
    expert_init: str = "default"  # of the GELU experts of `some`
    match_expert_scale: bool = False  # every init rescaled to the output scale of `default`


@dataclass(frozen=True)
class DataConfig:
    """The text. Without `text` or `domains` it is the corpus made from the Python installation."""

    vocabulary: str = "bytes"  # or "bpe", of the model's number of entries
    text: tuple[str, ...] = ()
    domains: dict[str, str] = field(default_factory=dict)  # name -> path
    validation_share: float = 0.1
    max_bytes: int = 0  # 0: everything
    layout: str = "packed"  # rows cut from one stream a domain; "documents": a document a row, cut or padded


@dataclass(frozen=True)
class TrainConfig:
    """The training: AdamW, linear warm-up, cosine decay to `final_learning_rate`."""

    steps: int = 300
    batch_size: int = 16  # rows of one optimiser step, over all ranks and micro-batches
    micro_batches: int = 1
    sequence_length: int = 128
    learning_rate: float = 3e-3
    final_learning_rate: float = 3e-4
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0  # of the gradient's norm; 0: none
    seed: int = 0
    evaluate_every: int = 50
    evaluation_rows: int = 64
    checkpoint_every: int = 100
    dtype: str = "float32"  # of the arithmetic; weights that are trained stay float32
    compile: bool = False
    paired_weights: bool = (
        False  # each part's first weights from a seed of its own: routers share what is not theirs
    )
    parallel: str = "ddp"  # every process has all weights; "fsdp": a part of them


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
    """The config with another router.

    Its own number of experts a token where it has one, and no options of the router before.
    """
    from moescope.decoder.routers import (
        router_class,
    )  # routers know of configs, so this cannot stand at the top

    fixed = router_class(router).fixed_top_k
    options = config.model.router_options if router == config.model.router else {}
    top_k = config.model.top_k if fixed is None else fixed
    return replace(config, model=replace(config.model, router=router, router_options=options, top_k=top_k))


def read_config(path: str | Path, base: LabConfig | None = None) -> LabConfig:
    """The config in a TOML file with the tables [model], [data] and [train] over `base`.

    Or over the preset the file names.
    """
    return config_from(read_toml(path), base, where=str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror or error}; give the path of a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None


def config_from(given: dict[str, Any], base: LabConfig | None = None, where: str = "config") -> LabConfig:
    """The checked config of a dictionary such as a TOML file holds."""
    given = dict(given)
    named = given.pop("preset", None)
    if base is None:
        if named is not None and not isinstance(named, str):
            raise BadInput(f"{where}: preset must be text, not {named!r}; one of {', '.join(PRESETS)}")
        base = preset(named or "nano")
    parts = [part.name for part in fields(LabConfig)]
    for key in given:
        if key not in parts:
            raise unknown_key(f"{where}: unknown table", key, [*parts, "preset"])
    model = given.get("model", {})
    if isinstance(model, dict) and isinstance(
        model.get("router"), str
    ):  # before the rest: it brings its own top_k
        base = with_router(base, model["router"])
    made = {part: overlaid(getattr(base, part), given.get(part, {}), f"{where}: [{part}]") for part in parts}
    config = LabConfig(**made)
    check(config, where)
    return config


def as_dict(config: LabConfig) -> dict[str, Any]:
    """What `config_from` makes the same config of again; fit for JSON."""
    return asdict(config)


Part = TypeVar("Part", ModelConfig, DataConfig, TrainConfig)


def overlaid(base: Part, given: object, where: str) -> Part:
    """The dataclass with the given values in place of its own.

    Unknown keys and wrong types are refused by name.
    """
    if not isinstance(given, dict):
        raise BadInput(f"{where} must be a table, not {given!r}")
    hints = typing.get_type_hints(type(base))
    known = [part.name for part in fields(base)]
    values = {}
    for key, value in given.items():
        if key not in known:
            raise unknown_key(f"{where}: unknown key", key, known)
        values[key] = checked_type(value, hints[key], f"{where}: {key}")
    return replace(base, **values)


WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "left out",
}


def checked_type(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation wants it, or an error that names the place."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if any(fits(value, one) for one in inner):
            return value
        raise BadInput(f"{where} must be {' or '.join(WORDS[one] for one in inner)}, not {value!r}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise BadInput(f"{where} must be a list, not {value!r}")
        return tuple(checked_type(one, inner[0], f"{where}, item {at}") for at, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise BadInput(f"{where} must be a table, not {value!r}")
        return {str(name): checked_type(one, inner[1], f"{where}.{name}") for name, one in value.items()}
    if not fits(value, hint):
        raise BadInput(f"{where} must be {WORDS[hint]}, not {value!r}")
    return float(value) if hint is float else value


def fits(value: object, hint: type) -> bool:
    if hint in (int, float) and isinstance(value, bool):  # Python takes true for 1
        return False
    return isinstance(value, int | float if hint is float else hint)


def unknown_key(what: str, key: str, known: list[str]) -> BadInput:
    """The error for a key nobody knows, with the nearest known one, else with all."""
    near = difflib.get_close_matches(key, known, 1)
    return BadInput(
        f"{what} {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
    )


def check(config: LabConfig, where: str = "config") -> None:
    """Refuses what cannot be built or trained, naming key and remedy."""
    check_model(config.model, where)
    model, train = config.model, config.train
    check_numbers("train", train, where)
    if train.dtype not in DTYPES:
        raise unknown_name("dtype", train.dtype, list(DTYPES))
    if train.parallel not in PARALLEL:
        raise unknown_name("parallel", train.parallel, list(PARALLEL))
    if train.sequence_length > model.max_positions:
        raise BadInput(
            f"{where}: [train] sequence_length {train.sequence_length} is more than [model] "
            f"max_positions, {model.max_positions}"
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
        raise BadInput(
            f"{where}: [data] text and domains are both given; give text for one domain, or domains by name"
        )
    for name in data.domains:
        if (
            not name or name.startswith(".") or set(name) & set("/\\=\0")
        ):  # a file of the run is named after it
            raise BadInput(
                f"{where}: [data] domains: {name!r} cannot be a domain's name; use letters, digits, - and _"
            )


def check_model(model: ModelConfig, where: str = "config") -> None:
    """Refuses a model that cannot be built."""
    from moescope.decoder.routers import router_class

    check_numbers("model", model, where)
    for name, known in (("block", BLOCKS), ("expert_init", EXPERT_INITS), ("frozen_dtype", DTYPES)):
        if getattr(model, name) not in known:
            raise unknown_name(name, getattr(model, name), list(known))
    head = model.d_model // model.heads
    if model.d_model % model.heads:
        raise BadInput(f"{where}: [model] d_model {model.d_model} must be a multiple of heads, {model.heads}")
    if model.block == "modern" and head % 2:
        raise BadInput(f"{where}: [model] d_model / heads must be even for rotary positions, not {head}")
    if model.block == "some" and model.d_model % 2:
        raise BadInput(f"{where}: [model] d_model must be even for sinusoidal positions, not {model.d_model}")
    if model.block == "modern" and (model.expert_init != "default" or model.match_expert_scale):
        raise BadInput(f"{where}: [model] expert_init and match_expert_scale are for block = 'some' only")
    if model.block == "some" and (model.qk_norm or model.tie_embeddings):
        raise BadInput(f"{where}: [model] qk_norm and tie_embeddings are for block = 'modern' only")
    if model.top_k > model.experts:
        raise BadInput(
            f"{where}: [model] top_k {model.top_k} is more than the {model.experts} experts there are"
        )
    router = router_class(model.router)
    if router.fixed_top_k not in (None, model.top_k):
        raise BadInput(
            f"{where}: [model] {model.router} sends a token to {router.fixed_top_k} experts; "
            f"leave top_k out, or use router = 'topk' for top_k = {model.top_k}"
        )
    router.checked_options(model)


def check_numbers(section: str, part: ModelConfig | TrainConfig, where: str) -> None:
    for names, least, words in ((POSITIVE, math.ulp(0), "more than 0"), (NOT_NEGATIVE, 0, "0 or more")):
        for name in names[section]:
            if not least <= getattr(part, name) < math.inf:  # which refuses nan too
                raise BadInput(f"{where}: [{section}] {name} must be {words}, not {getattr(part, name)}")


POSITIVE = {
    "model": (
        "vocabulary",
        "d_model",
        "layers",
        "heads",
        "d_ff",
        "experts",
        "top_k",
        "max_positions",
        "rope_base",
        "norm_epsilon",
    ),
    "train": (
        "steps",
        "batch_size",
        "micro_batches",
        "sequence_length",
        "learning_rate",
        "evaluate_every",
        "evaluation_rows",
        "checkpoint_every",
    ),
}
NOT_NEGATIVE = {"model": (), "train": ("final_learning_rate", "warmup", "weight_decay", "clip", "seed")}
