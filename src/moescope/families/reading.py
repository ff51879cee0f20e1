"""A checkpoint seen through a layout: its MoE layers in order, and what of it was understood."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moescope.checkpoint import Checkpoint, TensorInfo
from moescope.errors import BadInput
from moescope.families.layout import Config, Family, LayerTensors, Model, check_shape
from moescope.types import Coverage, LayerWeights, LazyTensor

MOST_LAYERS = 100_000  # a config that claims more is damaged; its layers must not be counted one by one


@dataclass(frozen=True)
class MoeCheckpoint:
    """A checkpoint whose layout is known."""

    checkpoint: Checkpoint
    family: Family
    layers: dict[int, LayerWeights]
    coverage: Coverage
    model: Model | None = None  # None without a config, or with one that nobody claims
    extra_heads: frozenset[str] = frozenset()  # tensors of multi-token prediction


@dataclass(frozen=True)
class FoundLayer:
    """The tensor by which a layer was found, its router in most layouts.

    And where its name says it stands.
    """

    prefix: str
    number: int
    sublayer: str
    info: TensorInfo


def pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for letter in "LeS":
        escaped = escaped.replace(rf"\{{{letter}\}}", rf"(?P<{letter}>\d+)", 1)
    return re.compile(rf"(?P<P>.*?)\.?{escaped}")


def found_layers(family: Family, checkpoint: Checkpoint) -> list[FoundLayer]:
    """Every layer of that layout, multi-token-prediction layers left out.

    Experts alone do not make a layout without router rows: rows may have been lost. The config must say that
    there are none.
    """
    if family.router is None and family.rowless_router(text_config(checkpoint.config)) is None:
        return []
    match_anchor = pattern(family.anchor)
    ending = family.anchor.rsplit("}", 1)[1]  # the regex alone takes seconds for 60,000 names and all layouts
    found = []
    for info in checkpoint.tensors.values():
        if not info.name.endswith(ending):
            continue
        match = match_anchor.fullmatch(info.name)
        if match and not is_mtp(info.name):
            groups = match.groupdict()
            if len(groups["L"]) > 9:
                raise BadInput(
                    f"{info.file}: tensor {info.name[:60]}... has a layer number of "
                    f"{len(groups['L'])} digits; "
                    "download the file again"
                )
            found.append(FoundLayer(groups["P"], int(groups["L"]), groups.get("S") or "", info))
    return found


def is_mtp(name: str) -> bool:
    """Multi-token prediction: an extra head for training, not a layer of the model."""
    return name.startswith("mtp.") or ".mtp." in name


def fits(family: Family, checkpoint: Checkpoint) -> bool:
    """Whether some router of the layout has experts of the layout beside it."""
    for found in found_layers(family, checkpoint):
        tensors = LayerTensors(checkpoint, found.prefix, found.number, found.sublayer, 0, 0)
        if any(tensors.has(marker, 0) for marker in family.markers):
            return True
    return False


def text_places(config: Config | None) -> list[Config]:
    """The parts of a config that speak of the language model, outermost first.

    It may be nested more than once.
    """
    places = [config or {}]
    for name in ("thinker_config", "text_config"):
        nested = next((place[name] for place in reversed(places) if name in place), None)
        if isinstance(nested, dict):
            places.append(nested)
    return places


def text_config(config: Config | None) -> Config:
    """What a config says of the language model, inner words laid over outer ones."""
    return {name: value for place in text_places(config) for name, value in place.items()}


def known_kind(models: dict[str, Model], config: Config | None) -> str | None:
    """The model_type by which the model is known; None without a config or for one that nobody claims.

    A model around a language model (vision, speech) may be unknown by its own type and known by that of its
    text_config.
    """
    kinds = ((config or {}).get("model_type"), text_config(config).get("model_type"))
    return next((kind for kind in kinds if isinstance(kind, str) and kind in models), None)


def stated(config: Config, fields: tuple[str, ...], layer: int) -> Any:
    """The first of the fields that the config has; where it is a list, this layer's entry."""
    for path in fields:
        value: Any = config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, list):
            return value[layer] if layer < len(value) else None
        if value is not None:
            return value
    return None


def read_layout(family: Family, model: Model | None, checkpoint: Checkpoint) -> MoeCheckpoint:
    """The checkpoint's MoE layers; refuses one whose layers are missing or do not fit together."""
    config = text_config(checkpoint.config)
    expected = expected_layers(family, model, checkpoint)
    depth = config.get("num_hidden_layers")
    found: dict[int, FoundLayer] = {}
    beyond: set[str] = set()
    for one in found_layers(family, checkpoint):
        layer = one.number + layers_before(one.prefix, config, checkpoint)
        in_stack = not isinstance(depth, int) or one.number < depth or layer != one.number
        if expected is not None and layer not in expected and not in_stack:
            beyond.add(
                f"{one.prefix}.{one.number}."
            )  # DeepSeek and GLM store their MTP head as one layer more
            continue
        if layer in found:
            raise BadInput(
                f"{one.info.file}: two routers for layer {layer}: {found[layer].info.name} and "
                f"{one.info.name}; "
                "give a checkpoint with one stack of layers"
            )
        found[layer] = one
    check_expected(family, checkpoint, expected, set(found))
    taken: set[str] = set()
    layers = {
        layer: one_layer(family, model, checkpoint, config, layer, found[layer], taken)
        for layer in sorted(found)
    }
    extra = (
        frozenset(name for name in checkpoint.tensors if is_mtp(name) or name.startswith(tuple(beyond)))
        - taken
    )
    covered = coverage(family, model, checkpoint, layers, expected, taken, extra)
    return MoeCheckpoint(checkpoint, family, layers, covered, model, extra)


def layers_before(prefix: str, config: Config, checkpoint: Checkpoint) -> int:
    """How many layers come before this stack: an encoder's, where the stack is its decoder; else none."""
    if "decoder" not in prefix.split("."):
        return 0
    said = [config.get(name) for name in ("encoder_layers", "num_layers")]
    counts = [count for count in said if isinstance(count, int) and 0 <= count <= MOST_LAYERS]
    if counts:
        return counts[0]
    numbers = (re.match(r"(?:.*\.)?encoder\.\w+\.(\d{1,9})\.", name) for name in checkpoint.tensors)
    return max((int(match[1]) + 1 for match in numbers if match), default=0)


def expected_layers(family: Family, model: Model | None, checkpoint: Checkpoint) -> set[int] | None:
    """The layers the config says are MoE.

    None where there is no config, or one of a model whose rule is not known.
    """
    if model is None:
        return None
    config = text_config(checkpoint.config)
    try:
        for name in ("num_hidden_layers", "n_layers", "num_layers", "encoder_layers", "decoder_layers"):
            if config.get(name, 0) > MOST_LAYERS:
                raise ValueError(f"{name} {config[name]}")
        return model.moe_layers(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(
            f"{checkpoint.files.label('config.json')}: cannot tell which layers are MoE "
            f"({type(error).__name__}: {error}); "
            f"check its fields against a {family.name} config"
        ) from None


def check_expected(
    family: Family, checkpoint: Checkpoint, expected: set[int] | None, found: set[int]
) -> None:
    if checkpoint.one_file:
        return  # one shard alone is a legitimate thing to look at; coverage says how much of the model it is
    absent = sorted((expected or set()) - found)
    if absent:
        raise BadInput(
            f"{checkpoint.shown}: config.json says layers {absent} are MoE, but no tensor "
            f"{family.anchor} for them; "
            "download the missing shards"
        )


def one_layer(
    family: Family,
    model: Model | None,
    checkpoint: Checkpoint,
    config: Config,
    layer: int,
    found: FoundLayer,
    taken: set[str],
) -> LayerWeights:
    info = found.info
    sides = ("experts", "d_model") if family.router else ("experts", "d_ff", "d_model")
    check_shape(info, sides)
    n_experts, d_model = info.shape[0], info.shape[-1]
    if model is not None:
        said = stated(config, model.experts, layer)
        if said is not None and said != n_experts:
            holds = (
                f"router {info.name} has {n_experts} rows"
                if family.router
                else f"{info.name} holds {n_experts} experts"
            )
            raise BadInput(
                f"{info.file}: {holds}, but config.json says {said!r} experts; check that they "
                "belong together"
            )
    tensors = LayerTensors(
        checkpoint, found.prefix, found.number, found.sublayer, n_experts, d_model, info.name, taken
    )
    gate, up, down = family.experts(tensors)
    correction = next((name for name in family.correction_bias if tensors.has(name)), None)
    top_k: Any = (
        stated(config, model.top_k, layer)
        if model and not isinstance(model.top_k, int)
        else model and model.top_k
    )
    if family.router is None and isinstance(top_k, int):
        top_k = min(top_k, n_experts)  # a dense block stands for as many experts as a token would have met
    activation = model.activation if model else ("hidden_act",)
    norm = model.norm if model and model.norm != Model.norm else family.norm
    return LayerWeights(
        layer=layer,
        layer_name=tensors.name(family.block),
        router_ED=tensors.lazy(family.router, (n_experts, d_model)) if family.router else None,
        gate_EFD=gate,
        up_EFD=up,
        down_EDF=down,
        norm_D=tensors.lazy(norm, (d_model,)) if norm and tensors.has(norm) else None,
        norm_offset=model.norm_offset if model else 0.0,
        top_k=top_k if model else config.get("num_experts_per_tok"),
        scoring=model.scoring
        if model and family.router
        else "unknown",  # without rows there are no logits that weights tell
        activation=activation if isinstance(activation, str) else stated(config, activation, layer),
        router_bias_E=tensors.lazy(family.router_bias, (n_experts,))
        if family.router_bias and tensors.has(family.router_bias)
        else None,
        correction_bias_E=one_row(tensors, correction) if correction else None,
        shared=family.shared(tensors),
        router_state=family.router_state(tensors),
        **family.biases(tensors),
    )


def one_row(tensors: LayerTensors, template: str) -> LazyTensor:
    """A bias of one value an expert, stored as [E] or [1, E]."""
    info = tensors.info(template)
    if info.shape not in ((tensors.n_experts,), (1, tensors.n_experts)):
        check_shape(info, (tensors.n_experts,))
    checkpoint = tensors.checkpoint
    return LazyTensor(
        info.name, (tensors.n_experts,), info.dtype, info.file, lambda: checkpoint.read(info.name).reshape(-1)
    )


def coverage(
    family: Family,
    model: Model | None,
    checkpoint: Checkpoint,
    layers: dict[int, LayerWeights],
    expected: set[int] | None,
    understood: set[str],
    extra_heads: frozenset[str],
) -> Coverage:
    skipped: dict[str, int] = {}
    rowless = family.rowless_router(text_config(checkpoint.config)) if family.router is None else None
    for name in checkpoint.tensors:
        if name not in understood:
            reason = "multi-token prediction" if name in extra_heads else "not part of an MoE block"
            if rowless and any(part in name for part in family.router_parts):
                reason = f"of the {rowless} router, which has no row for each expert"
            skipped[reason] = skipped.get(reason, 0) + 1
    model_type = (checkpoint.config or {}).get("model_type")
    layout = f"{family.name} layout" + ("" if model_type is None else f", model_type {model_type}")
    return Coverage(
        family=layout if model is None else str(model_type),
        layers_found=len(layers),
        layers_expected=None if expected is None else len(expected),
        experts_per_layer=tuple(sorted({weights.n_experts for weights in layers.values()})),
        parameters_understood=sum(checkpoint.tensors[name].parameters for name in understood),
        parameters_total=sum(info.parameters for info in checkpoint.tensors.values()),
        skipped=skipped,
        rowless_router=rowless,
    )
