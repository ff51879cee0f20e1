"""Disk layouts: where a layer's tensors are, and how they become LayerWeights.

A *layout* is how tensors are named and shaped on disk (`Family`, one file each); a *model* is what the config
of one model_type adds (`Model`); `LayerTensors` is one layer of one checkpoint while it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    shared: Callable[[LayerTensors], SharedExpert | None] = lambda tensors: None
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
    n_experts: int
    d_model: int
    router: str = ""  # the router's name, for messages
    used: set[str] = field(default_factory=set, compare=False)  # names read so far, for coverage

    def name(self, template: str, expert: int | None = None) -> str:
        text = template.replace("{L}", str(self.number)).replace("{S}", self.sublayer)
        if expert is not None:
            text = text.replace("{e}", str(expert))
        return f"{self.prefix}.{text}" if self.prefix else text

    def has(self, template: str, expert: int | None = None) -> bool:
        return self.name(template, expert) in self.checkpoint.tensors

    def info(self, template: str, expert: int | None = None) -> TensorInfo:
        name = self.name(template, expert)
        if name not in self.checkpoint.tensors:
            raise BadInput(
                f"{self.checkpoint.shown}: tensor {name} is missing; download the shard that holds it"
            )
        self.checkpoint.check_readable(name)  # here, not an hour into a scan
        self.used.add(name)
        return self.checkpoint.tensors[name]

    def lazy(self, template: str, shape: tuple[int, ...]) -> LazyTensor:
        """Return a tensor of known shape."""
        info = self.info(template)
        check_shape(info, shape)
        return LazyTensor(
            info.name, info.shape, info.dtype, info.file, lambda: self.checkpoint.read(info.name)
        )

    def state(self, template: str, kind: str) -> RouterState:
        """Return a router tensor as stored, of any dtype; coverage excludes it."""
        info = self.checkpoint.tensors[self.name(template)]
        read = self.checkpoint.read_stored
        return RouterState(
            LazyTensor(info.name, info.shape, info.dtype, info.file, lambda: read(info.name, None)), kind
        )

    def each(self, template: str, *sides: int | str) -> ExpertStack:
        """Return one tensor per expert; a named side has the length it has in expert 0."""
        infos = [self.info(template, expert) for expert in range(self.n_experts)]
        if self.has(template, self.n_experts):
            raise BadInput(
                f"{infos[0].file}: router {self.router} has {self.n_experts} rows, but more experts exist, "
                f"such as {self.name(template, self.n_experts)}; download both again"
            )
        check_shape(infos[0], sides)
        for info in infos:
            check_shape(info, infos[0].shape)
        names = tuple(info.name for info in infos)
        packed = any(name in self.checkpoint.packed for name in names)
        parts = StoredParts(self.name(template), infos[0].dtype, infos[0].shape, None, lambda part: part)
        return ExpertStack(
            names,
            (self.n_experts, *infos[0].shape),
            infos[0].dtype,
            tuple(info.file for info in infos),
            lambda expert: self.checkpoint.read(names[expert]),
            None if packed else parts,
        )

    def slices(
        self, template: str, take: Callable[[Tensor], Tensor], stored: tuple[int, ...], shape: tuple[int, ...]
    ) -> ExpertStack:
        """Return slices of one fused tensor [E, *stored]; `take` views a stored slice as `shape`."""
        info = self.info(template)
        check_shape(info, (self.n_experts, *stored))
        parts = StoredParts(info.name, info.dtype, stored, lambda experts: (experts, *stored), take)
        return self.parts(info, parts, shape, lambda expert: expert)

    def row_blocks(
        self, template: str, take: Callable[[Tensor], Tensor], shape: tuple[int, ...]
    ) -> ExpertStack:
        """Return blocks of one tensor [E * rows, columns]; `take` views a block as `shape`."""
        info = self.info(template)
        rows, columns = info.shape[0] // self.n_experts, info.shape[1:]
        parts = StoredParts(
            info.name, info.dtype, (rows, *columns), lambda experts: (experts * rows, *columns), take
        )
        return self.parts(info, parts, shape, lambda expert: slice(expert * rows, (expert + 1) * rows))

    def parts(
        self,
        info: TensorInfo,
        stored: StoredParts,
        shape: tuple[int, ...],
        where: Callable[[int], int | slice],
    ) -> ExpertStack:
        return ExpertStack(
            tuple(f"{info.name}[{expert}]" for expert in range(self.n_experts)),
            (self.n_experts, *shape),
            info.dtype,
            (info.file,) * self.n_experts,
            lambda expert: stored.view(self.checkpoint.read(info.name, where(expert))),
            None if info.name in self.checkpoint.packed else stored,
        )


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

        def half(which: int) -> slice:
            return slice(which, None, 2) if interleaved else slice(which * d_ff, (which + 1) * d_ff)

        def take(which: int):  # type: ignore[no-untyped-def]
            return (lambda part: part[half(which)]) if plain else (lambda part: part[:, half(which)].T)

        sides = (2 * d_ff, width) if plain else (width, 2 * d_ff)
        lower_sides = (width, d_ff) if plain else (d_ff, width)
        gates, ups = (tensors.slices(gate_up, take(which), sides, (d_ff, width)) for which in (0, 1))
        downs = tensors.slices(
            down, (lambda part: part) if plain else (lambda part: part.T), lower_sides, (width, d_ff)
        )
        return gates, ups, downs

    return read


# The usual names of experts under `mlp.experts`, separate and fused.
PROJECTIONS = ("{L}.mlp.experts.{e}.gate_proj.weight", "{L}.mlp.experts.gate_up_proj")


def projections() -> Callable[[LayerTensors], Stacks]:
    """gate_proj, up_proj and down_proj under `mlp.experts`, separate or fused."""
    each, fused = PROJECTIONS
    ups, downs = each.replace("gate_proj", "up_proj"), each.replace("gate_proj", "down_proj")
    return either(
        (each, per_expert(each, ups, downs)), (fused, fused_gate_up(fused, "{L}.mlp.experts.down_proj"))
    )


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

    def read(tensors: LayerTensors) -> SharedExpert | None:
        names = {part: pattern.replace("{p}", part) for part in ("gate", "up", "down")}
        if not tensors.has(names["gate"]):
            return None
        info = tensors.info(names["gate"])
        check_shape(info, ("d_ff", tensors.d_model))
        hidden = info.shape[0]
        parts: dict[str, LazyTensor] = {
            part: tensors.lazy(
                name, (tensors.d_model, hidden) if part == "down" else (hidden, tensors.d_model)
            )
            for part, name in names.items()
        }
        front = tensors.lazy(gate, (1, tensors.d_model)) if gate and tensors.has(gate) else None
        return SharedExpert(parts["gate"], parts["up"], parts["down"], front)

    return read


def shared_gate_up(gate_up: str, down: str) -> Callable[[LayerTensors], SharedExpert | None]:
    """The shared expert with gate and up in one tensor [2F, D]; None if the layer has none."""

    def read(tensors: LayerTensors) -> SharedExpert | None:
        if not tensors.has(gate_up):
            return None
        stored = tensors.info(gate_up)
        check_shape(stored, ("2 * d_ff", tensors.d_model))
        hidden = stored.shape[0] // 2
        lower = tensors.lazy(down, (tensors.d_model, hidden))

        def half(which: int) -> LazyTensor:
            rows, shape = slice(which * hidden, (which + 1) * hidden), (hidden, tensors.d_model)
            read = tensors.checkpoint.read
            return LazyTensor(stored.name, shape, stored.dtype, stored.file, lambda: read(stored.name, rows))

        return SharedExpert(half(0), half(1), lower)

    return read


def first_shared(
    *readers: Callable[[LayerTensors], SharedExpert | None],
) -> Callable[[LayerTensors], SharedExpert | None]:
    """Use the first reader that finds a shared expert."""

    def read(tensors: LayerTensors) -> SharedExpert | None:
        return next((shared for reader in readers if (shared := reader(tensors)) is not None), None)

    return read


# --- which layers are MoE, according to the config


def every_layer(config: Config) -> set[int]:
    return set(range(config["num_hidden_layers"]))


def by_step(config: Config) -> set[int]:
    """Qwen: every `decoder_sparse_step`-th layer except those listed as dense."""
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)
    return {layer for layer in every_layer(config) if layer not in dense and (layer + 1) % step == 0}


def every_block(config: Config) -> set[int]:
    """DBRX: all layers, whose count has another name."""
    return set(range(config["n_layers"]))


def after_dense(default: int) -> Callable[[Config], set[int]]:
    """All but the first layers, by `mlp_layer_types` in newer configs, else by the count of dense layers."""

    def rule(config: Config) -> set[int]:
        kinds = config.get("mlp_layer_types")
        if kinds:
            return {layer for layer, kind in enumerate(kinds) if kind == "sparse"}
        counts = [config.get(name) for name in ("first_k_dense_replace", "num_dense_layers")]
        dense = next((count for count in counts if count is not None), default)
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
        if step > 0:
            offset = step - 1 if last else 1 % step
            layers |= {start + layer for layer in range(count) if layer % step == offset}
        start += count
    return layers
