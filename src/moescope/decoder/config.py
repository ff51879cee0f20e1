"""The model's configuration and its checks.

Shape suffixes in the decoder and the lab: B batch rows, L positions, T = B L tokens, E experts, K slots per
token, S all slots sorted by expert, D model width, F expert hidden width, H heads, V vocabulary, R router
state width.
"""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from moescope.errors import BadInput, unknown_name

Option = bool | int | float | str
Config = TypeVar("Config")

MODERN, SOME = BLOCKS = ("modern", "some")
EXPERT_INITS = ("default", "orthogonal", "sparse", "zero")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Parameters
    ----------
    vocabulary
        Entries of embedding and head; a run warns if the text leaves more than a twentieth of them unused.
    d_model
        Width.
    layers
        Blocks, each of attention and experts.
    heads
        Attention heads; `d_model` is a multiple of it.
    block
        `modern`: pre-RMSNorm, rotary positions, SwiGLU experts. `some`: post-LayerNorm, sinusoidal positions,
        GELU experts, biases, an untied head.
    d_ff
        Hidden width of one expert.
    experts
        Experts per layer.
    top_k
        Experts per token; `switch_top1` and `top2` set their own.
    router
        A router of the lab.
    router_options
        Options of the router, as the table `[model.router_options]`.
    tie_embeddings
        The head is the embedding; `modern` only.
    max_positions
        The longest row. `trace` and `compress` read windows no longer than were trained
        (`max_position_embeddings` of the checkpoint).
    qk_norm
        Whether queries and keys are normalised. Unset: as the layout that the router is saved in needs it;
        Qwen3-MoE's, for gates that are not renormalised, has such norms, Mixtral's has none. Set it to
        compare routers. `modern` only.
    rope_base
        Base of rotary positions.
    norm_epsilon
        Added under the root of every norm.
    frozen_experts
        Experts are random and never trained: no gradients, no optimiser state.
    frozen_dtype
        `float32` or `bfloat16`: how frozen experts are stored.
    expert_init
        `default`, `orthogonal`, `sparse` or `zero`; block `some` only.
    match_expert_scale
        Rescale every initialisation to the output scale of `default`; block `some` only.
    """

    vocabulary: int = 260
    d_model: int = 64
    layers: int = 4
    heads: int = 4
    block: str = MODERN
    d_ff: int = 128
    experts: int = 8
    top_k: int = 2
    router: str = "top2"
    router_options: dict[str, Option] = field(default_factory=dict)
    tie_embeddings: bool = False
    max_positions: int = 1024
    qk_norm: bool | None = None
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    frozen_experts: bool = False
    frozen_dtype: str = "float32"
    expert_init: str = "default"
    match_expert_scale: bool = False

    @property
    def modern(self) -> bool:
        return self.block == MODERN


def override(base: Config, table: object, where: str) -> Config:
    """Return the dataclass with the table's values."""
    return replace(base, **check_table(table, typing.get_type_hints(type(base)), where))  # type: ignore[type-var]


def check_table(table: object, hints: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values as the annotations want them; unknown keys and wrong types are rejected by name."""
    if not isinstance(table, dict):
        raise BadInput(f"{where} must be a table, not {table!r}")
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise unknown_name("key", key, list(hints), where)
        values[key] = check_type(value, hints[key], f"{where}: {key}")
    return values


WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", types.NoneType: "unset"}


def check_type(value: Any, hint: Any, where: str) -> Any:
    """Return the value as the annotation wants it, or raise an error that names the place."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    kinds = inner if origin is types.UnionType else (hint,)
    several = next((kind for kind in kinds if typing.get_origin(kind) is tuple), None)
    if several and (len(kinds) == 1 or isinstance(value, list)):
        if not isinstance(value, list | tuple):
            raise BadInput(f"{where} must be a list, not {value!r}")
        kind = typing.get_args(several)[0]
        return tuple(check_type(one, kind, f"{where}, item {at}") for at, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise BadInput(f"{where} must be a table, not {value!r}")
        return {str(name): check_type(one, inner[1], f"{where}.{name}") for name, one in value.items()}
    if hint is Any:
        return value
    if not any(fits(value, one) for one in kinds if one is not several):
        words = " or ".join("a list of text" if one is several else WORDS[one] for one in kinds)
        raise BadInput(f"{where} must be {words}, not {value!r}")
    try:
        return float(value) if hint is float else value
    except OverflowError:
        raise BadInput(f"{where} is too large a number: it has {len(str(value))} digits") from None


def fits(value: object, hint: type) -> bool:
    if hint in (int, float) and isinstance(value, bool):  # in Python true is an int
        return False
    return isinstance(value, int | float if hint is float else hint)


def check_numbers(section: str, config: Any, where: str) -> None:
    """Reject numbers of ModelConfig or TrainConfig that are out of range or not finite."""
    for names, least, words in ((POSITIVE, math.ulp(0), "more than 0"), (NOT_NEGATIVE, 0, "0 or more")):
        for name in names[section]:
            if not least <= getattr(config, name) < math.inf:  # rejects NaN too
                raise BadInput(f"{where}: [{section}] {name} must be {words}, not {getattr(config, name)}")


POSITIVE = {
    "model": (
        *("vocabulary", "d_model", "layers", "heads", "d_ff", "experts", "top_k", "max_positions"),
        *("rope_base", "norm_epsilon"),
    ),
    "train": (
        *("batch_size", "micro_batches", "sequence_length", "learning_rate"),
        *("evaluate_every", "evaluation_rows", "checkpoint_every"),
    ),
}
NOT_NEGATIVE = {
    "model": (),
    "train": ("steps", "epochs", "final_learning_rate", "warmup", "weight_decay", "clip", "seed"),
}
