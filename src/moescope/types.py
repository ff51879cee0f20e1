"""The values that flow between packages.

Shape suffixes: E experts, D model width, F expert hidden width, K values of k, R singular values; in routing,
T tokens and K experts chosen per token. `align_KEE` is a K x E x E array: k, router, expert, in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moescope.errors import BadInput, printable

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device  # noqa: N812

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

# Of stored elements, the leading one included. Integers share a scale with their largest neighbour: 2^-p of
# the rms is half a step where that is about 4 times the rms.
SIGNIFICAND_BITS = {
    "F64": 53,
    "F32": 24,
    "F16": 11,
    "BF16": 8,
    "F8_E4M3": 4,
    "F8_E5M2": 3,
    "MXFP4": 2,
    "I8": 6,
    "INT8": 6,
    "INT4": 2,
}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor by name, shape and dtype; `read()` reads its data, which are not cached."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class StoredParts:
    """How one projection of every expert is stored: an expert's part is a byte range.

    `view` is a view of the stored part (slice, stride, transpose), so it reads and writes the projection.
    """

    name: str  # of the tensor; {e} is the expert's number if each expert has its own tensor
    dtype: str
    shape: tuple[int, ...]  # of one expert's part
    # shape of the tensor by the number of experts; None: one tensor per expert
    whole: Callable[[int], tuple[int, ...]] | None
    view: Callable[[Tensor], Tensor]  # of a part: the projection, [out, in]

    def tensor_name(self, expert: int) -> str:
        return self.name.replace("{e}", str(expert))


@dataclass(frozen=True)
class ExpertStack:
    """One projection of every expert of a layer, [out, in]; `stack.read(e)` reads only expert e."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # [E, out, in], or [E, out] of a bias
    dtype: str
    files: tuple[str, ...]
    read: Callable[[int], Tensor]
    stored: StoredParts | None = None  # None if it cannot be written back: quantised, or not from a file

    def read_finite(self, expert: int) -> Tensor:
        part = self.read(expert)
        if not part.isfinite().all():
            file, name = (parts[expert % len(parts)] for parts in (self.files, self.names))
            raise BadInput(
                f"{file}: tensor {name} holds NaN or Inf; fix the checkpoint, or download it again"
            )
        return part

    @property
    def significand_bits(self) -> int:
        """Precision p of the stored elements: rounding changes each by up to 2^-p of it."""
        return SIGNIFICAND_BITS[self.dtype]


@dataclass(frozen=True)
class RouterState:
    """A stored tensor of a router other than rows and biases, and how it depends on experts.

    `kind` "experts": the first axis has equally many entries per expert; "table": entries are expert numbers;
    "shared": independent of experts.
    """

    tensor: LazyTensor
    kind: str


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token uses, and its gate if there is one."""

    gate_FD: LazyTensor
    up_FD: LazyTensor | None
    down_DF: LazyTensor
    gate_D: LazyTensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One MoE layer of any family. All tensors are lazy."""

    layer: int
    layer_name: str
    router_ED: LazyTensor | None  # None if the router has no row for each expert, such as a hash router
    gate_EFD: ExpertStack
    up_EFD: ExpertStack | None  # None for experts without a gate
    down_EDF: ExpertStack
    norm_D: LazyTensor | None  # weight of the norm in front of the block
    norm_offset: float  # 1.0 if the norm multiplies by (1 + weight)
    top_k: int | None  # None without a config
    scoring: str  # how logits become scores: "softmax", "sigmoid", ...
    activation: str | None
    router_bias_E: LazyTensor | None = None
    correction_bias_E: LazyTensor | None = None  # added to scores for choosing only
    shared: SharedExpert | None = None
    gate_bias_EF: ExpertStack | None = None
    up_bias_EF: ExpertStack | None = None
    down_bias_ED: ExpertStack | None = None
    router_state: tuple[RouterState, ...] = ()  # thresholds, strengths, tables, projections

    @property
    def n_experts(self) -> int:
        return self.gate_EFD.shape[0]

    @property
    def d_model(self) -> int:
        return self.gate_EFD.shape[2]

    @property
    def d_ff(self) -> int:
        return self.gate_EFD.shape[1]

    @property
    def projections(self) -> dict[str, ExpertStack]:
        """gate, up and down, those that the experts have."""
        stacks = {"gate": self.gate_EFD, "up": self.up_EFD, "down": self.down_EDF}
        return {name: stack for name, stack in stacks.items() if stack is not None}

    def expert(self, number: int, finite: bool = False) -> ExpertWeights:
        """Read one expert, in the stored dtype; with `finite` raise for NaN and Inf in it."""

        def read(stack: ExpertStack | None) -> Any:
            return stack and (stack.read_finite(number) if finite else stack.read(number))

        biases = map(read, (self.gate_bias_EF, self.up_bias_EF, self.down_bias_ED))
        return ExpertWeights(read(self.gate_EFD), read(self.down_EDF), read(self.up_EFD), *biases)


@dataclass(frozen=True)
class ExpertWeights:
    """One expert in memory, in [out, in]. Its neuron p is row p of gate and up and column p of down."""

    gate_FD: Tensor
    down_DF: Tensor
    up_FD: Tensor | None = None
    gate_bias_F: Tensor | None = None
    up_bias_F: Tensor | None = None
    down_bias_D: Tensor | None = None


@dataclass(frozen=True)
class LayerPlan:
    """One layer's part of a plan: each group becomes one expert; experts in no group are dropped.

    Pruning has groups of one. Weights are parallel to the members and sum to 1 in every group.
    """

    layer: int
    n_experts: int  # before
    groups: tuple[tuple[int, ...], ...]
    dominants: tuple[int, ...]  # one member per group, whose neurons the others are matched to
    weights: tuple[tuple[float, ...], ...]

    @property
    def dropped(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.n_experts)).difference(*self.groups)))


@dataclass(frozen=True)
class Plan:
    """What compression will do, as in plan.json; arrays (router rows, neuron orders) are separate files."""

    method: str
    checkpoint: dict[str, str | None]  # address, revision, header hash: applied to no other checkpoint
    layers: tuple[LayerPlan, ...]
    matching: str  # of members' neurons to the dominant's: "signed" or "none"
    # "slice" (pruned), "fold" (fitted rows), "tie" (n rows, fewer experts), "join" (a group inherits its
    # dominant's part of the router; of a table, the tokens of all members)
    router: str
    top_k: int | None  # after
    settings: dict[str, str | int | float | bool | None]  # keep, seed, ...


@dataclass(frozen=True)
class Tokens:
    """The T tokens of one forward pass, row after row with padding; each row is part of one document."""

    rows: int
    ids_T: Tensor
    real_T: Tensor  # False where padding
    document_T: Tensor
    position_T: Tensor  # in the document, from 0
    domain_T: Tensor  # index into the run's domains
    bucket_T: Tensor  # group of documents for the jackknife
    phase: str = "prefill"
    continues: bool = False  # whether rows continue those of the previous pass

    def to(self, device: Device) -> Tokens:
        """Return the tokens on a device; itself where it is there."""
        if self.ids_T.device == device:
            return self
        moved = {name: value.to(device) for name, value in vars(self).items() if hasattr(value, "device")}
        return replace(self, **moved)


@dataclass(frozen=True)
class Routing:
    """One layer's routing of T tokens.

    A token may have fewer experts than slots (capacity, expert choice, experts on other ranks): empty slots
    hold -1 and a gate of 0. Slots are unordered; the first choice is the one with the largest gate.
    """

    layer: int
    layer_name: str
    n_experts: int
    chosen_TK: Tensor
    gates_TK: Tensor
    tokens: Tokens | None = None  # None if unknown: then all tokens are real
    logits_TE: Tensor | None = None
    scores_TE: Tensor | None = None  # probabilities: softmax of the logits, or sigmoids divided by their sum
    selection_TE: Tensor | None = None  # what decides the choice, bias included; -inf in excluded groups
    x_TD: Tensor | None = None  # input of the experts
    dropped_T: Tensor | None = None  # slots per token lost to capacity
    carried_TR: Tensor | None = None  # state from the previous layer's router, if it uses one
    diagnostics: dict[str, Diagnostic] = field(default_factory=dict)  # by metric name


@dataclass(frozen=True)
class LinearView:
    """A router whose logits are rows times a function of the token's state.

    With `thresholds` an expert takes the tokens whose probability reaches its threshold, and `stored` needs
    one threshold per expert beside the rows.
    """

    rows_ED: Tensor
    reads: Callable[[Tensor], Tensor]  # state -> what the rows are multiplied with
    rows_name: str  # name, within the router, of the tensor that holds the rows
    stored: Callable[[Tensor, Tensor | None], dict[str, Tensor]]  # the router's tensors with other rows
    thresholds: bool = False


class Diagnostic(NamedTuple):
    """A number that a router reports about itself per pass, with chance and worst level. Tables hold means.

    Tensors are detached float32 scalars on the device; constant references are plain numbers.
    """

    value: Tensor
    chance: Tensor | float
    collapse: Tensor | float = math.nan
    chance_spread: float = math.nan  # standard deviation of the value by chance, where it is known


@dataclass(frozen=True)
class Coverage:
    """How much of a checkpoint is supported: a partial report must not be mistaken for a complete one."""

    family: str
    layers_found: int
    layers_expected: int | None  # None without a config
    experts_per_layer: tuple[int, ...]
    parameters_understood: int
    parameters_total: int
    skipped: dict[str, int]  # reason -> number of tensors
    rowless_router: str | None = None  # the router's name if it has no row for each expert

    def line(self) -> str:
        expected = "an unknown number" if self.layers_expected is None else str(self.layers_expected)
        experts = (
            "one expert"
            if self.experts_per_layer == (1,)
            else f"{'/'.join(map(str, self.experts_per_layer))} experts"
        )
        share = self.parameters_understood / max(self.parameters_total, 1)
        skipped = "; ".join(f"{count} tensors skipped: {why}" for why, count in self.skipped.items())
        return printable(
            f"{self.family}: {self.layers_found} MoE layers of {expected} expected, {experts} per layer, "
            f"{self.parameters_understood:,} of {self.parameters_total:,} parameters in MoE blocks "
            f"({share:.1%})" + (f"; {skipped}" if skipped else "")
        )

    def without_rows(self) -> str | None:
        """State what scans of this router omit; None if it has a row for each expert."""
        if self.rowless_router is None:
            return None
        if self.experts_per_layer == (1,):
            return (
                f"nothing is routed (router {self.rowless_router}): one block per layer has a spectrum and "
                "nothing to compare it with"
            )
        return (
            f"router {self.rowless_router} has no row for each expert: experts are compared with each other, "
            "without alignment and ambiguity; use moescope trace for its routing"
        )
