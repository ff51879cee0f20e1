"""What a disk layout is: where a layer's tensors lie, and how they become LayerWeights.

Three words: a *layout* is how tensors are named and shaped on disk (`Family`, one file each); a *model* is what a config
of one model_type says beyond that (`Model`); `LayerTensors` is one layer of one checkpoint while it is being read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moescope.checkpoint import Checkpoint, TensorInfo
from moescope.errors import BadInput
from moescope.types import ExpertStack, LazyTensor, SharedExpert

if TYPE_CHECKING:
    from torch import Tensor

Config = dict[str, Any]
Stacks = tuple[ExpertStack, ExpertStack | None, ExpertStack]  # gate, up, down


@dataclass(frozen=True)
class Model:
    """What the config of one model_type says: how many experts, how many chosen, how they are scored, which layers are MoE.

    Fields are paths into the config (`text_config.num_experts`); the first that is there counts.
    """

    experts: tuple[str, ...]
    top_k: tuple[str, ...] | int
    moe_layers: Callable[[Config], set[int]]  # given the config of the text model
    scoring: str = "softmax"
    norm_offset: float = 0.0  # 1.0 where the norm multiplies by (1 + weight)
    activation: tuple[str, ...] | str = ("hidden_act", "hidden_activation")  # a plain string is the activation itself


@dataclass(frozen=True)
class Family:
    """One disk layout. Templates are anchored tensor names: {L} is the layer's number, {e} the expert's, {S} any number.

    Each template is what follows the layers' prefix (`model.layers` and the like), which is found, not assumed.
    """

    name: str
    models: dict[str, Model]  # config.model_type -> what it says
    router: str
    markers: tuple[str, ...]  # of these one must be there: tells layouts apart whose routers have the same name
    experts: Callable[[LayerTensors], Stacks]
    block: str  # the block's own name, for `layer_name`
    norm: str | None
    router_bias: str | None = None
    correction_bias: tuple[str, ...] = ()  # where the bias for choosing may lie
    shared: Callable[[LayerTensors], SharedExpert | None] = lambda tensors: None
    biases: Callable[[LayerTensors], dict[str, ExpertStack]] = lambda tensors: {}


@dataclass(frozen=True)
class LayerTensors:
    """One layer of a checkpoint, by template: what a layout's functions read from."""

    checkpoint: Checkpoint
    prefix: str
    number: int  # as it stands in the tensors' names
    sublayer: str  # what {S} stands for
    n_experts: int
    d_model: int
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
            raise BadInput(f"{self.checkpoint.path}: tensor {name} is missing; download the shard that holds it")
        self.taken.add(name)
        return self.checkpoint.tensors[name]

    def lazy(self, template: str, shape: tuple[int, ...]) -> LazyTensor:
        """A whole tensor of known shape."""
        info = self.info(template)
        check_shape(info, shape)
        return LazyTensor(info.name, info.shape, info.dtype, str(info.file), lambda: self.checkpoint.read(info.name))

    def each(self, template: str, rows: int | None, columns: int | None) -> ExpertStack:
        """One tensor an expert, [out, in]; a side given as None is taken from expert 0."""
        infos = [self.info(template, expert) for expert in range(self.n_experts)]
        if self.has(template, self.n_experts):
            raise BadInput(
                f"{infos[0].file}: the router has {self.n_experts} rows, but there is a tensor "
                f"{self.name(template, self.n_experts)}; download both again"
            )
        first = infos[0].shape
        expected = (rows or (first[0] if first else 0), columns or (first[-1] if first else 0))
        for info in infos:
            check_shape(info, expected)
        names = tuple(info.name for info in infos)
        return ExpertStack(
            names, (self.n_experts, *expected), infos[0].dtype, tuple(str(info.file) for info in infos),
            lambda expert: self.checkpoint.read(names[expert]),
        )  # fmt: skip

    def slices(
        self, template: str, take: Callable[[Tensor], Tensor], stored: tuple[int, ...], shape: tuple[int, int]
    ) -> ExpertStack:
        """Expert slices of one fused tensor [E, ...]: `take` turns a stored slice into [out, in]."""
        info = self.info(template)
        check_shape(info, (self.n_experts, *stored))
        return ExpertStack(
            (info.name,), (self.n_experts, *shape), info.dtype, (str(info.file),) * self.n_experts,
            lambda expert: take(self.checkpoint.read_slice(info.name, expert)),
        )  # fmt: skip


def check_shape(info: TensorInfo, expected: tuple[int, ...]) -> None:
    if info.shape != expected or 0 in info.shape:
        raise BadInput(
            f"{info.file}: tensor {info.name} has shape {list(info.shape)}, expected {list(expected)}; check how it was saved"
        )
