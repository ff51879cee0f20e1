"""What a disk layout is: where a layer's tensors lie, and how they become LayerWeights.

Three words: a *layout* is how tensors are named and shaped on disk (`Family`, one file each); a *model* is
what a config
of one model_type says beyond that (`Model`); `LayerTensors` is one layer of one checkpoint while it is being
read.
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
    """What the config of one model_type says: how many experts, how many chosen, how they are scored, which
    layers are MoE.

    Fields are paths into the config (`text_config.num_experts`); the first that is there counts.
    """

    experts: tuple[str, ...]
    top_k: tuple[str, ...] | int
    moe_layers: Callable[[Config], set[int]]  # given the config of the text model
    scoring: str = "softmax"
    norm_offset: float = 0.0  # 1.0 where the norm multiplies by (1 + weight)
    norm: str | None = (
        "as the layout has it"  # where the norm in front of the block lies; None where there is none
    )
    activation: tuple[str, ...] | str = (
        "hidden_act",
        "hidden_activation",
    )  # a plain string is the activation itself


@dataclass(frozen=True)
class Family:
    """One disk layout. Templates are anchored tensor names: {L} is the layer's number, {e} the expert's, {S}
    any number.

    Each template is what follows the layers' prefix (`model.layers` and the like), which is found, not
    assumed.
    """

    name: str
    models: dict[
        str, Model
    ]  # config.model_type -> what it says, of the models that transformers writes in this layout
    router: str | None  # None where routers have no row for each expert
    markers: tuple[
        str, ...
    ]  # of these one must be there: tells layouts apart whose routers have the same name
    experts: Callable[[LayerTensors], Stacks]
    block: str  # the block's own name, for `layer_name`
    norm: str | None
    router_bias: str | None = None
    correction_bias: tuple[str, ...] = ()  # where the bias for choosing may lie
    shared: Callable[[LayerTensors], SharedExpert | None] = lambda tensors: None
    biases: Callable[[LayerTensors], dict[str, ExpertStack]] = lambda tensors: {}
    router_state: Callable[[LayerTensors], tuple[RouterState, ...]] = lambda tensors: ()
    rowless_router: Callable[[Config], str | None] = lambda config: (
        None
    )  # its name, where the config says it has no rows
    router_parts: tuple[
        str, ...
    ] = ()  # in the names of such a router's tensors, which are counted and not read

    @property
    def anchor(self) -> str:
        """The tensor by which a layer is found: its router, or its experts where that has no rows.

        Its first side counts experts, its last is d_model.
        """
        return self.router or self.markers[0]


@dataclass(frozen=True)
class LayerTensors:
    """One layer of a checkpoint, by template: what a layout's functions read from."""

    checkpoint: Checkpoint
    prefix: str
    number: int  # as it stands in the tensors' names
    sublayer: str  # what {S} stands for
    n_experts: int
    d_model: int
    router: str = ""  # the router's name, for messages
    taken: set[str] = field(default_factory=set, compare=False)  # names understood so far, for coverage

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
        self.taken.add(name)
        return self.checkpoint.tensors[name]

    def lazy(self, template: str, shape: tuple[int, ...]) -> LazyTensor:
        """A whole tensor of known shape."""
        info = self.info(template)
        check_shape(info, shape)
        return LazyTensor(
            info.name, info.shape, info.dtype, info.file, lambda: self.checkpoint.read(info.name)
        )

    def state(self, template: str, kind: str) -> RouterState:
        """A router's tensor of whatever dtype, as it is stored.

        It does not count as read, since nothing but rewriting looks at it.
        """
        info = self.checkpoint.tensors[self.name(template)]
        read = self.checkpoint.read_stored
        return RouterState(
            LazyTensor(info.name, info.shape, info.dtype, info.file, lambda: read(info.name, None)), kind
        )

    def each(self, template: str, *sides: int | str) -> ExpertStack:
        """One tensor an expert; a side given by name is taken from expert 0."""
        infos = [self.info(template, expert) for expert in range(self.n_experts)]
        if self.has(template, self.n_experts):
            raise BadInput(
                f"{infos[0].file}: router {self.router} has {self.n_experts} rows, but there are "
                "more experts than that "
                f"on disk, such as {self.name(template, self.n_experts)}; download both again"
            )
        check_shape(infos[0], sides)
        for info in infos:
            check_shape(info, infos[0].shape)
        names = tuple(info.name for info in infos)
        return ExpertStack(
            names,
            (self.n_experts, *infos[0].shape),
            infos[0].dtype,
            tuple(info.file for info in infos),
            lambda expert: self.checkpoint.read(names[expert]),
            None
            if any(name in self.checkpoint.packed for name in names)
            else StoredParts(self.name(template), infos[0].dtype, infos[0].shape, None, lambda part: part),
        )

    def slices(
        self, template: str, take: Callable[[Tensor], Tensor], stored: tuple[int, ...], shape: tuple[int, ...]
    ) -> ExpertStack:
        """Expert slices of one fused tensor [E, *stored]: `take` views a stored slice as one of `shape`."""
        info = self.info(template)
        check_shape(info, (self.n_experts, *stored))
        parts = StoredParts(info.name, info.dtype, stored, lambda experts: (experts, *stored), take)
        return self.parts(info, parts, shape, lambda expert: expert)

    def row_blocks(
        self, template: str, take: Callable[[Tensor], Tensor], shape: tuple[int, ...]
    ) -> ExpertStack:
        """Experts one below the other in one tensor [E * rows, columns].

        `take` views a block as one of `shape`.
        """
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
    """Refuse another shape than expected; a side given by name may be of any length."""
    fits = len(info.shape) == len(expected) and all(
        isinstance(side, str) or side == found for side, found in zip(expected, info.shape, strict=True)
    )
    if not fits or 0 in info.shape:
        wanted = f"[{', '.join(map(str, expected))}]"
        raise BadInput(
            f"{info.file}: tensor {info.name} has shape {list(info.shape)}, expected {wanted}; "
            "check how it was saved"
        )
