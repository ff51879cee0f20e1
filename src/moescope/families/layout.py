"""What a disk layout is, and how the layers of a checkpoint in that layout become LayerWeights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moescope.checkpoint import Checkpoint, TensorInfo
from moescope.errors import BadInput
from moescope.types import Coverage, ExpertStack, LayerWeights, LazyTensor

Config = dict[str, Any]
MOST_LAYERS = 100_000  # a config that claims more is damaged; its layers must not be counted one by one


@dataclass(frozen=True)
class Family:
    """One disk layout. Templates are anchored tensor names; {L} is the layer's number, {e} the expert's.

    Each template is what follows the layers' prefix (`model.layers` and the like), which is found, not assumed.
    """

    name: str
    model_types: tuple[str, ...]  # config.model_type values known to use it
    router: str
    gate: str
    up: str
    down: str
    norm: str
    block: str  # the block's own name, for `layer_name`
    expert_count_fields: tuple[str, ...]
    moe_layers: Callable[[Config], set[int]]  # which layers the config says are MoE
    scoring: str = "softmax"
    norm_offset: float = 0.0


@dataclass(frozen=True)
class MoeCheckpoint:
    """A checkpoint whose layout is known: its MoE layers in order, and what was covered."""

    checkpoint: Checkpoint
    family: Family
    layers: dict[int, LayerWeights]
    coverage: Coverage


def pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(r"\{L\}", r"(?P<L>\d{1,9})").replace(r"\{e\}", r"(?P<e>\d{1,9})")
    return re.compile(rf"(?P<P>.*?)\.?{escaped}")


def router_tensors(family: Family, checkpoint: Checkpoint) -> dict[int, tuple[str, TensorInfo]]:
    """Layer number -> (prefix, router tensor), multi-token-prediction layers left out."""
    match_router = pattern(family.router)
    found: dict[int, tuple[str, TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        match = match_router.fullmatch(info.name)
        if match and not match["P"].startswith("mtp"):
            layer = int(match["L"])
            if layer in found:
                raise BadInput(
                    f"{info.file}: two routers for layer {layer}: {found[layer][1].name} and {info.name}; "
                    "give a checkpoint with one stack of layers"
                )
            found[layer] = (match["P"], info)
    return found


def read_layout(family: Family, checkpoint: Checkpoint) -> MoeCheckpoint:
    """The checkpoint seen through the family's eyes; refuses one whose layers are missing or do not fit together."""
    routers = router_tensors(family, checkpoint)
    check_expected_layers(family, checkpoint, routers)
    layers = {layer: one_layer(family, checkpoint, layer, *routers[layer]) for layer in sorted(routers)}
    return MoeCheckpoint(checkpoint, family, layers, coverage(family, checkpoint, layers))


def claims(family: Family, config: Config | None) -> bool:
    """Whether the family knows this model, not only its tensor names; without a config the names must do."""
    return config is None or config.get("model_type") in family.model_types


def expected_layers(family: Family, checkpoint: Checkpoint) -> set[int] | None:
    """The layers the config says are MoE; None where there is no config, or one of a model whose rule is not known."""
    config = checkpoint.config
    if config is None or not claims(family, config):
        return None
    try:
        if config["num_hidden_layers"] > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers {config['num_hidden_layers']}")
        return family.moe_layers(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        folder = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
        raise BadInput(
            f"{folder / 'config.json'}: cannot tell which layers are MoE ({type(error).__name__}: {error}); "
            f"check its fields against a {family.name} config"
        ) from None


def check_expected_layers(family: Family, checkpoint: Checkpoint, routers: dict[int, tuple[str, TensorInfo]]) -> None:
    if checkpoint.path.is_file():
        return  # one shard alone is a legitimate thing to look at; coverage says how much of the model it is
    absent = sorted((expected_layers(family, checkpoint) or set()) - set(routers))
    if absent:
        raise BadInput(
            f"{checkpoint.path}: config.json says layers {absent} are MoE, but no tensor {family.router} for them; "
            "download the missing shards"
        )


def one_layer(family: Family, checkpoint: Checkpoint, layer: int, prefix: str, router: TensorInfo) -> LayerWeights:
    def full(template: str, expert: int | None = None) -> str:
        name = template.replace("{L}", str(layer))
        if expert is not None:
            name = name.replace("{e}", str(expert))
        return f"{prefix}.{name}" if prefix else name

    if len(router.shape) != 2 or 0 in router.shape:
        raise wrong_shape(router, "[experts, d_model]")
    n_experts, d_model = router.shape
    config = checkpoint.config or {}
    stated = next((config[field] for field in family.expert_count_fields if field in config), n_experts)
    if stated != n_experts:
        raise BadInput(
            f"{router.file}: router {router.name} has {n_experts} rows, but config.json says {stated} experts; check that they belong together"
        )

    def stack(template: str, shape: tuple[int, int] | None) -> ExpertStack:
        infos = []
        for expert in range(n_experts):
            name = full(template, expert)
            if name not in checkpoint.tensors:
                raise BadInput(f"{checkpoint.path}: tensor {name} is missing; download the shard that holds it")
            infos.append(checkpoint.tensors[name])
        expected = shape or infos[0].shape
        if len(expected) != 2 or 0 in expected or (shape is None and expected[1] != d_model):
            raise wrong_shape(infos[0], f"[d_ff, {d_model}]")
        for info in infos:
            if info.shape != expected:
                raise wrong_shape(info, str(list(expected)))
        names = tuple(info.name for info in infos)
        files = tuple(str(info.file) for info in infos)
        return ExpertStack(
            names,
            (n_experts, expected[0], expected[1]),
            infos[0].dtype,
            files,
            lambda expert: checkpoint.read(names[expert]),
        )

    if full(family.gate, n_experts) in checkpoint.tensors:
        raise BadInput(
            f"{router.file}: router {router.name} has {n_experts} rows, but there are more experts than that on disk; download both again"
        )
    gate = stack(family.gate, None)
    d_ff = gate.shape[1]
    norm = checkpoint.tensors.get(full(family.norm))
    if norm is not None and norm.shape != (d_model,):
        raise wrong_shape(norm, f"[{d_model}]")
    return LayerWeights(
        layer=layer,
        layer_name=full(family.block),
        router_ED=lazy(checkpoint, router),
        gate_EFD=gate,
        up_EFD=stack(family.up, (d_ff, d_model)),
        down_EDF=stack(family.down, (d_model, d_ff)),
        norm_D=lazy(checkpoint, norm) if norm is not None else None,
        norm_offset=family.norm_offset,
        top_k=config.get("num_experts_per_tok"),
        scoring=family.scoring if claims(family, checkpoint.config) else "unknown",
        activation=config.get("hidden_act"),
    )


def wrong_shape(info: TensorInfo, expected: str) -> BadInput:
    return BadInput(
        f"{info.file}: tensor {info.name} has shape {list(info.shape)}, expected {expected}; check how it was saved"
    )


def lazy(checkpoint: Checkpoint, info: TensorInfo) -> LazyTensor:
    return LazyTensor(info.name, info.shape, info.dtype, str(info.file), lambda: checkpoint.read(info.name))


def coverage(family: Family, checkpoint: Checkpoint, layers: dict[int, LayerWeights]) -> Coverage:
    understood: set[str] = set()
    for weights in layers.values():
        stacks = [stack for stack in (weights.gate_EFD, weights.up_EFD, weights.down_EDF) if stack is not None]
        understood.update(*(stack.names for stack in stacks), (weights.router_ED.name,))
        if weights.norm_D is not None:
            understood.add(weights.norm_D.name)
    skipped: dict[str, int] = {}
    for name in checkpoint.tensors:
        if name not in understood:
            reason = "multi-token prediction" if name.startswith("mtp") else "not part of an MoE block"
            skipped[reason] = skipped.get(reason, 0) + 1
    expected = expected_layers(family, checkpoint)
    model_type = (checkpoint.config or {}).get("model_type")
    return Coverage(
        family=family.name if claims(family, checkpoint.config) else f"{family.name} layout, model_type {model_type}",
        layers_found=len(layers),
        layers_expected=None if expected is None else len(expected),
        experts_per_layer=tuple(sorted({weights.n_experts for weights in layers.values()})),
        parameters_understood=sum(checkpoint.tensors[name].parameters for name in understood),
        parameters_total=sum(info.parameters for info in checkpoint.tensors.values()),
        skipped=skipped,
    )
