"""Read a checkpoint in a layout: its MoE layers in order, and the coverage."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput
from moescope.families.layout import Config, Family, LayerTensors, Model, check_shape
from moescope.types import Coverage, LayerWeights, LazyTensor

MAX_LAYERS = 100_000  # a config that claims more is damaged


@dataclass(frozen=True)
class MoeCheckpoint:
    """A checkpoint whose layout is known."""

    checkpoint: Checkpoint
    family: Family
    layers: dict[int, LayerWeights]
    coverage: Coverage
    model: Model | None = None  # None without a config or for an unknown model_type
    extra_heads: frozenset[str] = frozenset()  # tensors of multi-token prediction


def find_layers(family: Family, checkpoint: Checkpoint) -> list[LayerTensors]:
    """Return every layer of that layout, without multi-token-prediction layers.

    Experts alone do not identify a layout without router rows, since rows may be missing; the config must say
    that there are none.
    """
    if family.router is None and family.rowless_router(text_config(checkpoint.config)) is None:
        return []
    name = re.sub(r"\\{([LeS])\\}", r"(?P<\1>\\d+)", re.escape(family.anchor))
    match_anchor = re.compile(rf"(?P<P>.*?)\.?{name}")
    ending = family.anchor.rsplit("}", 1)[1]  # cheaper than the regex: 60,000 names times all layouts
    layers = []
    for info in checkpoint.tensors.values():
        if not info.name.endswith(ending):
            continue
        match = match_anchor.fullmatch(info.name)
        if match and not is_mtp(info.name):
            parts = match.groupdict()
            if len(parts["L"]) > 9:
                raise BadInput(
                    f"{info.file}: tensor {info.name[:60]}... has a layer number of {len(parts['L'])} "
                    "digits; download the file again"
                )
            layers.append(LayerTensors(checkpoint, parts["P"], int(parts["L"]), parts.get("S") or "", info))
    return layers


def is_mtp(name: str) -> bool:
    """Whether this is a tensor of multi-token prediction, an extra head for training."""
    return name.startswith("mtp.") or ".mtp." in name


def fits(family: Family, checkpoint: Checkpoint) -> bool:
    """Whether some layer has both a router and experts of the layout."""
    return any(layer.has(marker, 0) for layer in find_layers(family, checkpoint) for marker in family.markers)


def text_configs(config: Config | None) -> list[Config]:
    """Return the (nested) parts of a config about the language model, outermost first."""
    configs = [config or {}]
    for name in ("thinker_config", "text_config"):
        nested = next((place[name] for place in reversed(configs) if name in place), None)
        if isinstance(nested, dict):
            configs.append(nested)
    return configs


def text_config(config: Config | None) -> Config:
    """Return the config of the language model; inner fields override outer ones."""
    return {name: value for place in text_configs(config) for name, value in place.items()}


def known_kind(models: dict[str, Model], config: Config | None) -> str | None:
    """Return the model_type by which the model is known; None without one.

    A model around a language model (vision, speech) may be known only by the model_type of its text_config.
    """
    kinds = ((config or {}).get("model_type"), text_config(config).get("model_type"))
    return next((kind for kind in kinds if isinstance(kind, str) and kind in models), None)


def config_value(config: Config, fields: tuple[str, ...], layer: int) -> Any:
    """Return the first of the fields that exists; of a list, this layer's entry."""
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
    """Return the checkpoint's MoE layers; raise if some are missing or do not fit together."""
    config = text_config(checkpoint.config)
    expected = expected_layers(family, model, checkpoint, config)
    depth = config.get("num_hidden_layers")
    found: dict[int, LayerTensors] = {}
    beyond: set[str] = set()
    for tensors in find_layers(family, checkpoint):
        layer = tensors.number + layers_before(tensors.prefix, config, checkpoint)
        in_stack = not isinstance(depth, int) or tensors.number < depth or layer != tensors.number
        if expected is not None and layer not in expected and not in_stack:
            beyond.add(f"{tensors.prefix}.{tensors.number}.")  # DeepSeek's and GLM's MTP head
            continue
        if layer in found:
            raise BadInput(
                f"{tensors.anchor.file}: two routers for layer {layer}: {found[layer].anchor.name} and "
                f"{tensors.anchor.name}; give a checkpoint with one stack of layers"
            )
        found[layer] = tensors
    if not found:
        raise BadInput(
            f"{checkpoint.files.label('config.json')}: num_hidden_layers is {depth}, which leaves out all "
            "MoE layers of the files; correct it"
        )
    absent = sorted((expected or set()) - set(found))
    if absent and not checkpoint.one_file:  # a single shard is allowed; coverage says how much it is
        raise BadInput(
            f"{checkpoint.shown}: config.json says layers {absent} are MoE, but they have no tensor "
            f"{family.anchor}; download the missing shards"
        )
    layers = {layer: one_layer(family, model, config, layer, found[layer]) for layer in sorted(found)}
    used = set[str]().union(*(tensors.used for tensors in found.values()))
    heads = {name for name in checkpoint.tensors if is_mtp(name) or name.startswith(tuple(beyond))}
    extra = frozenset(heads - used)
    covered = coverage(family, model, checkpoint, layers, expected, used, extra)
    return MoeCheckpoint(checkpoint, family, layers, covered, model, extra)


def layers_before(prefix: str, config: Config, checkpoint: Checkpoint) -> int:
    """Return the number of layers before this stack: the encoder's, before a decoder; else 0."""
    if "decoder" not in prefix.split("."):
        return 0
    for name in ("encoder_layers", "num_layers"):
        if isinstance(count := config.get(name), int) and 0 <= count <= MAX_LAYERS:
            return count
    numbers = (re.match(r"(?:.*\.)?encoder\.\w+\.(\d{1,9})\.", name) for name in checkpoint.tensors)
    return max((int(match[1]) + 1 for match in numbers if match), default=0)


def expected_layers(
    family: Family, model: Model | None, checkpoint: Checkpoint, config: Config
) -> set[int] | None:
    """Return the MoE layers according to the config; None without one or for an unknown model."""
    if model is None:
        return None
    try:
        for name in ("num_hidden_layers", "n_layers", "num_layers", "encoder_layers", "decoder_layers"):
            if config.get(name, 0) > MAX_LAYERS:
                raise ValueError(f"{name} {config[name]}")
        return model.moe_layers(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(
            f"{checkpoint.files.label('config.json')}: cannot determine which layers are MoE "
            f"({type(error).__name__}: {error}); check its fields against a {family.name} config"
        ) from None


def one_layer(
    family: Family, model: Model | None, config: Config, layer: int, tensors: LayerTensors
) -> LayerWeights:
    checkpoint, info = tensors.checkpoint, tensors.anchor
    check_shape(info, ("experts", "d_model") if family.router else ("experts", "d_ff", "d_model"))
    n_experts, d_model = tensors.n_experts, tensors.d_model
    count = config_value(config, model.experts, layer) if model else None
    if count not in (None, n_experts):
        has = (
            f"router {info.name} has {n_experts} rows"
            if family.router
            else f"{info.name} holds {n_experts} experts"
        )
        raise BadInput(f"{info.file}: {has}, but config.json says {count!r} experts; check both files")
    gate, up, down = family.experts(tensors)
    top_k: Any = model.top_k if model else ("num_experts_per_tok",)
    if isinstance(top_k, tuple):
        top_k = read_top_k(checkpoint, config, top_k, layer, n_experts, clip=family.router is None)
    activation: Any = model.activation if model else ("hidden_act",)
    if isinstance(activation, tuple):
        activation = config_value(config, activation, layer)
    if not isinstance(activation, str | None):
        raise BadInput(
            f"{checkpoint.files.label('config.json')}: the activation is {activation!s:.60}; give a "
            "name such as silu"
        )
    norm = model.norm if model and model.norm != Model.norm else family.norm
    bias = family.router_bias
    return LayerWeights(
        layer=layer,
        layer_name=tensors.name(family.block),
        router_ED=tensors.lazy(family.router, (n_experts, d_model)) if family.router else None,
        gate_EFD=gate,
        up_EFD=up,
        down_EDF=down,
        norm_D=tensors.lazy(norm, (d_model,)) if norm and tensors.has(norm) else None,
        norm_offset=model.norm_offset if model else 0.0,
        top_k=top_k,
        scoring=model.scoring if model and family.router else "unknown",  # no rows, no logits
        activation=activation,
        router_bias_E=tensors.lazy(bias, (n_experts,)) if bias and tensors.has(bias) else None,
        correction_bias_E=next(
            (one_row(tensors, name) for name in family.correction_bias if tensors.has(name)), None
        ),
        shared=next((found for read in family.shared if (found := read(tensors)) is not None), None),
        router_state=family.router_state(tensors),
        **family.biases(tensors),
    )


def read_top_k(
    checkpoint: Checkpoint, config: Config, fields: tuple[str, ...], layer: int, n_experts: int, clip: bool
) -> int | None:
    """Return the config's experts per token; None where it says nothing. A dense block has fewer: `clip`."""
    top_k = config_value(config, fields, layer)
    whole = isinstance(top_k, int) and not isinstance(top_k, bool) and top_k >= 1
    if top_k is None or (whole and (clip or top_k <= n_experts)):
        return min(top_k, n_experts) if whole else None
    name = next(field for field in fields if config_value(config, (field,), layer) is not None)
    raise BadInput(
        f"{checkpoint.files.label('config.json')}: {name} is {repr(top_k)!s:.60}, but layer {layer} has "
        f"{n_experts} experts; give a whole number from 1 to {n_experts}"
    )


def one_row(tensors: LayerTensors, template: str) -> LazyTensor:
    """Return a bias with one value per expert, stored as [E] or [1, E]."""
    shape = (tensors.n_experts,)
    stored = tensors.lazy(template, (1, *shape) if tensors.info(template).shape == (1, *shape) else shape)
    return replace(stored, shape=shape, read=lambda: stored.read().reshape(-1))


def coverage(
    family: Family,
    model: Model | None,
    checkpoint: Checkpoint,
    layers: dict[int, LayerWeights],
    expected: set[int] | None,
    used: set[str],
    extra_heads: frozenset[str],
) -> Coverage:
    rowless = family.rowless_router(text_config(checkpoint.config)) if family.router is None else None

    def reason(name: str) -> str:
        if rowless and any(part in name for part in family.router_parts):
            return f"of the {rowless} router, which has no row for each expert"
        return "multi-token prediction" if name in extra_heads else "not part of an MoE block"

    model_type = (checkpoint.config or {}).get("model_type")
    layout = f"{family.name} layout" + ("" if model_type is None else f", model_type {model_type}")
    return Coverage(
        family=layout if model is None else str(model_type),
        layers_found=len(layers),
        layers_expected=None if expected is None else len(expected),
        experts_per_layer=tuple(sorted({weights.n_experts for weights in layers.values()})),
        parameters_understood=sum(checkpoint.tensors[name].parameters for name in used),
        parameters_total=sum(info.parameters for info in checkpoint.tensors.values()),
        skipped=dict(Counter(reason(name) for name in checkpoint.tensors if name not in used)),
        rowless_router=rowless,
    )
