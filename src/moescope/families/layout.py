"""Disk layouts: where a layer's tensors are, and how they become LayerWeights.

A *layout* is how tensors are named and shaped on disk (`Family`, one file each); a *model* is what the config
of one model_type adds (`Model`); `LayerTensors` is one layer of one checkpoint while it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from moescope.checkpoint import Checkpoint, TensorInfo
from moescope.errors import BadInput
from moescope.types import ExpertStack, LazyTensor, RouterState, SharedExpert, StoredParts

if TYPE_CHECKING:
    from torch import Tensor

Config = dict[str, Any]
Stacks = tuple[ExpertStack, ExpertStack | None, ExpertStack]  # gate, up, down


@dataclass(frozen=True)
class Model:
    """What the config of one model_type says about its experts and MoE layers.

    Fields are paths into the config (`text_config.num_experts`); the first that exists is used.
    """

    experts: tuple[str, ...]
    top_k: tuple[str, ...] | int
    moe_layers: Callable[[Config], set[int]]  # from the config of the text model
    scoring: str = "softmax"
    norm_offset: float = 0.0  # 1.0 if the norm multiplies by (1 + weight)
    norm: str | None = "as in the layout"  # template of the norm in front of the block; None: it has none
    # a plain string is the activation itself
    activation: tuple[str, ...] | str = ("hidden_act", "hidden_activation")


@dataclass(frozen=True)
class Family:
    """One disk layout.

    Templates are tensor names after the layers' prefix (`model.layers` or similar, found in the names): {L}
    is the layer number, {e} the expert, {S} any number.
    """

    name: str
    models: dict[str, Model]  # by config.model_type: the models that transformers writes in this layout
    router: str | None  # None if the router has no row per expert
    markers: tuple[str, ...]  # one must exist: distinguishes layouts whose routers have the same name
    experts: Callable[[LayerTensors], Stacks]
    block: str  # name of the block, for `layer_name`
    norm: str | None
    router_bias: str | None = None
    correction_bias: tuple[str, ...] = ()  # possible names
    shared: tuple[Callable[[LayerTensors], SharedExpert | None], ...] = ()  # the first that finds one is used
    biases: Callable[[LayerTensors], dict[str, ExpertStack]] = lambda tensors: {}
    router_state: Callable[[LayerTensors], tuple[RouterState, ...]] = lambda tensors: ()
    # the router's name if the config says that it has no rows
    rowless_router: Callable[[Config], str | None] = lambda config: None
    router_parts: tuple[str, ...] = ()  # in the names of its tensors, which are counted but not read

    @property
    def anchor(self) -> str:
        """The tensor that identifies a layer, [experts, ..., d_model]: its router, or experts without one."""
        return self.router or self.markers[0]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer of a checkpoint, by template."""

    checkpoint: Checkpoint
    prefix: str
    number: int  # as in the tensors' names
    sublayer: str  # the value of {S}
    anchor: TensorInfo  # identifies the layer: its router in most layouts
    used: set[str] = field(default_factory=set, compare=False)  # names read so far, for coverage

    @property
    def n_experts(self) -> int:
        return self.anchor.shape[0]

    @property
    def d_model(self) -> int:
        return self.anchor.shape[-1]

    def name(self, template: str, expert: int | str = "{e}") -> str:
        text = (
            template.replace("{L}", str(self.number))
            .replace("{S}", self.sublayer)
            .replace("{e}", str(expert))
        )
        return f"{self.prefix}.{text}" if self.prefix else text

    def has(self, template: str, expert: int | str = "{e}") -> bool:
        return self.name(template, expert) in self.checkpoint.tensors

    def info(self, template: str, expert: int | str = "{e}") -> TensorInfo:
        name = self.name(template, expert)
        if name not in self.checkpoint.tensors:
            raise BadInput(
                f"{self.checkpoint.shown}: tensor {name} is missing; download the shard that holds it"
            )
        self.checkpoint.check_readable(name)  # here, not an hour into a scan
        self.used.add(name)
        return self.checkpoint.tensors[name]

    def lazy(self, template: str, shape: tuple[int, ...], rows: slice | None = None) -> LazyTensor:
        """Return a tensor of known shape, or only these rows of it."""
        info = self.info(template)
        check_shape(info, shape)
        shape = shape if rows is None else (rows.stop - rows.start, *shape[1:])
        return LazyTensor(
            info.name, shape, info.dtype, info.file, lambda: self.checkpoint.read(info.name, rows)
        )

    def state(self, template: str, kind: str) -> RouterState:
        """Return a router tensor as stored, of any dtype; coverage excludes it."""
        info = self.checkpoint.tensors[self.name(template)]
        read = partial(self.checkpoint.read_stored, info.name, None)
        return RouterState(LazyTensor(info.name, info.shape, info.dtype, info.file, read), kind)

    def each(self, template: str, *sides: int | str) -> ExpertStack:
        """Return one tensor per expert; a named side has the length it has in expert 0."""
        infos = [self.info(template, expert) for expert in range(self.n_experts)]
        first, names = infos[0], tuple(info.name for info in infos)
        if self.has(template, self.n_experts):
            raise BadInput(
                f"{first.file}: router {self.anchor.name} has {self.n_experts} rows, but more experts exist, "
                f"such as {self.name(template, self.n_experts)}; download both again"
            )
        check_shape(first, sides)
        for info in infos:
            check_shape(info, first.shape)
        packed = any(name in self.checkpoint.packed for name in names)
        return ExpertStack(
            names,
            (self.n_experts, *first.shape),
            first.dtype,
            tuple(info.file for info in infos),
            lambda expert: self.checkpoint.read(names[expert]),
            None if packed else StoredParts(self.name(template), first.dtype, first.shape, None, as_stored),
        )

    def slices(
        self,
        template: str,
        take: Callable[[Tensor], Tensor],
        stored: tuple[int, ...],
        shape: tuple[int, ...],
        stacked: bool = True,
    ) -> ExpertStack:
        """Return slices of one fused tensor; `take` views a stored slice as `shape`.

        The tensor is [E, *stored], or, not `stacked`, [E * rows, columns].
        """
        info, checkpoint, rows = self.info(template), self.checkpoint, stored[0]

        def whole(experts: int) -> tuple[int, ...]:
            return (experts, *stored) if stacked else (experts * rows, *stored[1:])

        def read(expert: int) -> Tensor:
            where = expert if stacked else slice(expert * rows, (expert + 1) * rows)
            return take(checkpoint.read(info.name, where))

        check_shape(info, whole(self.n_experts))
        names = tuple(f"{info.name}[{expert}]" for expert in range(self.n_experts))
        parts = StoredParts(info.name, info.dtype, stored, whole, take)
        return ExpertStack(
            names,
            (self.n_experts, *shape),
            info.dtype,
            (info.file,) * self.n_experts,
            read,
            None if info.name in checkpoint.packed else parts,
        )


def as_stored(part: Tensor) -> Tensor:
    return part


def check_shape(info: TensorInfo, expected: tuple[int | str, ...]) -> None:
    """Raise for another shape than expected; a named side may have any length."""
    fits = len(info.shape) == len(expected) and all(
        isinstance(side, str) or side == length for side, length in zip(expected, info.shape, strict=True)
    )
    if not fits or 0 in info.shape:
        raise BadInput(
            f"{info.file}: tensor {info.name} has shape {list(info.shape)}, expected "
            f"[{', '.join(map(str, expected))}]; check how it was saved"
        )


# --- how the experts of a layer are stored


def per_expert(gate: str, up: str | None, down: str) -> Callable[[LayerTensors], Stacks]:
    """One [out, in] tensor per expert and projection; `up` is None for experts without a gate."""

    def read(tensors: LayerTensors) -> Stacks:
        gates = tensors.each(gate, "d_ff", tensors.d_model)
        d_ff = gates.shape[1]
        ups = tensors.each(up, d_ff, tensors.d_model) if up else None
        return gates, ups, tensors.each(down, tensors.d_model, d_ff)

    return read


def fused_gate_up(gate_up: str, down: str, interleaved: bool = False) -> Callable[[LayerTensors], Stacks]:
    """Gate and up fused in one tensor, down in another: [E, 2F, D] and [E, D, F], or both transposed.

    The shapes of both decide: D is known from the router, and where F = D gate_up is not square. Gate is the
    first half of the 2F axis, or its even indices if `interleaved`.
    """

    def read(tensors: LayerTensors) -> Stacks:
        stored, lower = tensors.info(gate_up), tensors.info(down)
        width = tensors.d_model
        if len(stored.shape) != 3 or len(lower.shape) != 3:
            raise BadInput(
                f"{stored.file}: tensors {stored.name} and {lower.name} must have three axes; check how they "
                "were saved"
            )
        plain = stored.shape[2] == width and lower.shape[1] == width and stored.shape[1] == 2 * lower.shape[2]
        transposed = (
            stored.shape[1] == width and lower.shape[2] == width and stored.shape[2] == 2 * lower.shape[1]
        )
        if plain == transposed:
            raise BadInput(
                f"{stored.file}: tensors {stored.name} {list(stored.shape)} and {lower.name} "
                f"{list(lower.shape)} do not fit d_model {width}; expected [E, 2F, {width}] and [E, {width}, "
                "F], or both transposed; check how they were saved"
            )
        d_ff = lower.shape[2] if plain else lower.shape[1]

        def take(which: int, part: Tensor) -> Tensor:
            half = slice(which, None, 2) if interleaved else slice(which * d_ff, (which + 1) * d_ff)
            return part[half] if plain else part[:, half].T

        sides = (2 * d_ff, width) if plain else (width, 2 * d_ff)
        lower_sides = (width, d_ff) if plain else (d_ff, width)
        gates, ups = (tensors.slices(gate_up, partial(take, which), sides, (d_ff, width)) for which in (0, 1))
        view = as_stored if plain else (lambda part: part.T)
        return gates, ups, tensors.slices(down, view, lower_sides, (width, d_ff))

    return read


def projections(
    block: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Any]:
    """A Family's block whose experts hold gate, up and down of those names, or gate_up_proj and down_proj."""
    gate, up, down = (f"{block}.experts.{{e}}.{name}.weight" for name in names)
    fused = f"{block}.experts.gate_up_proj"
    fused_down = f"{block}.experts.down_proj"
    experts = either((gate, per_expert(gate, up, down)), (fused, fused_gate_up(fused, fused_down)))
    return {"markers": (gate, fused), "experts": experts, "block": block}


def either(*readers: tuple[str, Callable[[LayerTensors], Stacks]]) -> Callable[[LayerTensors], Stacks]:
    """Use the first reader whose named tensor exists: a family may be saved in several forms."""

    def read(tensors: LayerTensors) -> Stacks:
        for template, reader in readers:
            if tensors.has(template, 0):
                return reader(tensors)
        first, *others = (tensors.name(template, 0) for template, _ in readers)
        instead = "".join(f" (or {other})" for other in others)
        raise BadInput(f"{tensors.checkpoint.shown}: tensor {first}{instead} is missing; download the shard")

    return read


def shared_expert(pattern: str, gate: str | None = None) -> Callable[[LayerTensors], SharedExpert | None]:
    """The shared expert with projections {p} = gate, up, down; None if the layer has none."""

    gate_name, up_name, down_name = (pattern.replace("{p}", part) for part in ("gate", "up", "down"))

    def read(tensors: LayerTensors) -> SharedExpert | None:
        if not tensors.has(gate_name):
            return None
        info = tensors.info(gate_name)
        check_shape(info, ("d_ff", tensors.d_model))
        sides = (info.shape[0], tensors.d_model)
        front = tensors.lazy(gate, (1, tensors.d_model)) if gate and tensors.has(gate) else None
        gate_FD, up_FD = tensors.lazy(gate_name, sides), tensors.lazy(up_name, sides)
        return SharedExpert(gate_FD, up_FD, tensors.lazy(down_name, sides[::-1]), front)

    return read


def shared_gate_up(gate_up: str, down: str) -> Callable[[LayerTensors], SharedExpert | None]:
    """The shared expert with gate and up in one tensor [2F, D]; None if the layer has none."""

    def read(tensors: LayerTensors) -> SharedExpert | None:
        if not tensors.has(gate_up):
            return None
        stored = tensors.info(gate_up)
        check_shape(stored, ("2 * d_ff", tensors.d_model))
        hidden, width = stored.shape[0] // 2, tensors.d_model
        gate_FD = tensors.lazy(gate_up, stored.shape, slice(0, hidden))
        up_FD = tensors.lazy(gate_up, stored.shape, slice(hidden, 2 * hidden))
        return SharedExpert(gate_FD, up_FD, tensors.lazy(down, (width, hidden)))

    return read


# --- which layers are MoE, according to the config


def every_layer(config: Config) -> set[int]:
    return set(range(config["num_hidden_layers"]))


def by_step(config: Config) -> set[int]:
    """Qwen: every `decoder_sparse_step`-th layer except those listed as dense."""
    step = config.get("decoder_sparse_step", 1)
    return {layer for layer in every_layer(config) if (layer + 1) % step == 0} - set(
        config.get("mlp_only_layers") or ()
    )


def after_dense(default: int) -> Callable[[Config], set[int]]:
    """All but the first layers, by `mlp_layer_types` in newer configs, else by the count of dense layers."""

    def rule(config: Config) -> set[int]:
        if kinds := config.get("mlp_layer_types"):
            return {layer for layer, kind in enumerate(kinds) if kind == "sparse"}
        fields = ("first_k_dense_replace", "num_dense_layers")
        dense = next((config[name] for name in fields if config.get(name) is not None), default)
        every: int = config.get("moe_layer_freq") or 1
        return {layer for layer in every_layer(config) if layer >= dense and layer % every == 0}

    return rule


def in_window(config: Config) -> set[int]:
    """ERNIE: every n-th layer from a first to a last."""
    last = config.get("moe_layer_end_index", -1)
    last = config["num_hidden_layers"] - 1 if last in (None, -1) else last
    first, every = config.get("moe_layer_start_index", 0), config.get("moe_layer_interval", 1)
    return {layer for layer in every_layer(config) if first <= layer <= last and (layer + 1) % every == 0}


def interleaved(config: Config) -> set[int]:
    """Llama 4: the listed layers, or every n-th."""
    if config.get("moe_layers"):
        return set(config["moe_layers"])
    every = config.get("interleave_moe_layer_step", 1)
    return {layer for layer in every_layer(config) if (layer + 1) % every == 0}


def by_period(config: Config) -> set[int]:
    """Jamba: a period and an offset."""
    period, offset = config["expert_layer_period"], config["expert_layer_offset"]
    return {layer for layer in every_layer(config) if layer % period == offset}


def nllb(config: Config) -> set[int]:
    """NLLB: every n-th layer of encoder and decoder; decoder layers are numbered after the encoder's."""
    encoder, decoder = config["encoder_layers"], config["decoder_layers"]
    steps = (config.get("encoder_sparse_step", 4), config.get("decoder_sparse_step", 4))
    return stacks((encoder, steps[0]), (decoder, steps[1]), last=True)


def switch(config: Config) -> set[int]:
    """Switch: n layers of encoder and decoder, evenly spaced; decoder layers follow the encoder's."""
    encoder = config["num_layers"]
    decoder = config.get("num_decoder_layers") or encoder
    sparse = (config.get("num_sparse_encoder_layers", 3), config.get("num_sparse_decoder_layers", 3))
    steps = [count // moe if moe else count for count, moe in zip((encoder, decoder), sparse, strict=True)]
    return stacks((encoder, steps[0]), (decoder, steps[1]), last=False)


def stacks(*halves: tuple[int, int], last: bool) -> set[int]:
    """Of each (count, step) take the last layer per step, or its second; a step of 0 has none."""
    layers, start = set(), 0
    for count, step in halves:
        first = step - 1 if last else 1 % max(step, 1)
        layers |= {start + layer for layer in range(first, count, step)} if step > 0 else set()
        start += count
    return layers
