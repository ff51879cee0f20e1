"""The few values that flow between the parts.

Shape suffixes in compute code: E experts, D model width, F expert hidden width, K values of k, R singular
values.
A name like `align_KEE` is a K x E x E array: k, router, expert, in that order. In routing, T are tokens and K
the experts
chosen for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moescope.errors import printable

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor known by name, shape and dtype; its data are read when `read()` is called, and not kept."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class StoredParts:
    """Where one projection of every expert lies on disk: an expert's part is a run of bytes, `view` shows the
    projection in it.

    Since `view` is a view of the stored part (a slice, a stride, a transpose), what reads a projection writes
    it too.
    """

    name: str  # the tensor's; {e} stands for the expert's number where each expert has a tensor of its own
    dtype: str
    shape: tuple[int, ...]  # of one expert's part
    whole: (
        Callable[[int], tuple[int, ...]] | None
    )  # the tensor's shape with so many experts; None: one tensor an expert
    view: Callable[[Tensor], Tensor]  # of a part: the projection, [out, in]

    def tensor_name(self, expert: int) -> str:
        return self.name.replace("{e}", str(expert))


@dataclass(frozen=True)
class ExpertStack:
    """One projection of every expert of a layer, in [out, in] orientation.

    `stack.read(e)` reads expert e and no other.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]  # [E, out, in], or [E, out] of a bias
    dtype: str
    files: tuple[str, ...]
    read: Callable[[int], Tensor]
    stored: StoredParts | None = None  # None where it cannot be written back: quantised, or not from a file


@dataclass(frozen=True)
class RouterState:
    """A stored tensor of a router beside its rows and biases, and what of it belongs to which expert.

    `kind` "experts": the first axis falls into as many equal runs as there are experts, one each; "table":
    its entries are experts'
    numbers; "shared": nothing in it belongs to one expert.
    """

    tensor: LazyTensor
    kind: str


@dataclass(frozen=True)
class SharedExpert:
    """The expert every token goes through, and the gate in front of it where there is one."""

    gate_FD: LazyTensor
    up_FD: LazyTensor | None
    down_DF: LazyTensor
    gate_D: LazyTensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One MoE layer, whatever family it came from. Nothing in it has been read yet: every tensor is lazy."""

    layer: int
    layer_name: str
    router_ED: (
        LazyTensor | None
    )  # None where the router has no row for each expert: it hashes, or there is nothing to choose
    gate_EFD: ExpertStack
    up_EFD: ExpertStack | None  # None for experts without a gate
    down_EDF: ExpertStack
    norm_D: LazyTensor | None  # the weight of the norm in front of the block
    norm_offset: float  # 1.0 where the norm multiplies by (1 + weight)
    top_k: int | None  # None when no config tells
    scoring: str  # how logits become scores: "softmax", "sigmoid", ...
    activation: str | None
    router_bias_E: LazyTensor | None = None
    correction_bias_E: LazyTensor | None = None  # added to scores for choosing only
    shared: SharedExpert | None = None
    gate_bias_EF: ExpertStack | None = None
    up_bias_EF: ExpertStack | None = None
    down_bias_ED: ExpertStack | None = None
    router_state: tuple[
        RouterState, ...
    ] = ()  # what else the router keeps: thresholds, strengths, tables, projections

    @property
    def n_experts(self) -> int:
        return self.gate_EFD.shape[0]

    @property
    def d_model(self) -> int:
        return self.gate_EFD.shape[2]

    @property
    def d_ff(self) -> int:
        return self.gate_EFD.shape[1]

    def expert(self, number: int) -> ExpertWeights:
        """One expert, read now, as stored."""
        stacks = (
            self.gate_EFD,
            self.down_EDF,
            self.up_EFD,
            self.gate_bias_EF,
            self.up_bias_EF,
            self.down_bias_ED,
        )
        gate, down, *rest = (None if stack is None else stack.read(number) for stack in stacks)
        assert gate is not None
        assert down is not None
        return ExpertWeights(gate, down, *rest)


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
    """What becomes of one layer's experts: each group becomes one expert; experts in no group are dropped.

    Pruning keeps groups of one. Weights stand beside their members and sum to 1 in every group.
    """

    layer: int
    n_experts: int  # before
    groups: tuple[tuple[int, ...], ...]
    dominants: tuple[
        int, ...
    ]  # one a group, a member of it: the expert whose neurons the others are matched to
    weights: tuple[tuple[float, ...], ...]

    @property
    def dropped(self) -> tuple[int, ...]:
        kept = {expert for group in self.groups for expert in group}
        return tuple(expert for expert in range(self.n_experts) if expert not in kept)


@dataclass(frozen=True)
class Plan:
    """What compression will do.

    Written as plan.json; arrays it carries (fitted router rows, neuron orders) lie beside it.
    """

    method: str
    checkpoint: dict[
        str, str | None
    ]  # address, revision, hash of the headers: a plan is carried out on no other one
    layers: tuple[LayerPlan, ...]
    matching: str  # how members' neurons are brought into the dominant's order: "signed", "unsigned", "none"
    # What the router becomes: "slice" (pruned), "fold" (fitted rows), "tie" (n rows, fewer experts), "join"
    # (a group takes over its
    # dominant's part of the router, of a table the tokens of all members)
    router: str
    top_k: int | None  # after
    settings: dict[
        str, str | int | float | bool | None
    ]  # what made the plan: keep, linkage, merge weights, seed, ...


@dataclass(frozen=True)
class Tokens:
    """The T tokens of one forward pass, row after row, padding included.

    Each row is a stretch of one document.
    """

    rows: int
    ids_T: Tensor
    real_T: Tensor  # False where padding
    document_T: Tensor
    position_T: Tensor  # in the document, from 0
    domain_T: Tensor  # index into the run's domains
    bucket_T: Tensor  # which of the jackknife's groups of documents
    phase: str = "prefill"
    continues: bool = False  # whether each row goes on where it stopped in the pass before


@dataclass(frozen=True)
class Routing:
    """One layer's routing of T tokens.

    A token may have fewer experts than slots (capacity, expert choice, experts on other ranks): the slots
    left over hold -1 and a
    gate of 0. Slots are in no particular order; the first choice is the one with the largest gate.
    """

    layer: int
    layer_name: str
    n_experts: int
    chosen_TK: Tensor
    gates_TK: Tensor
    tokens: Tokens | None = None  # None where nobody said which tokens these are: then all are real
    logits_TE: Tensor | None = None
    scores_TE: Tensor | None = None  # probabilities: softmax of the logits, or sigmoids divided by their sum
    selection_TE: Tensor | None = (
        None  # what the choice was made by, bias included; -inf where a group was ruled out
    )
    auxiliary_loss: Tensor | None = None
    x_TD: Tensor | None = None  # what the experts were given
    dropped_T: Tensor | None = None  # slots a token lost to capacity
    carried_TR: Tensor | None = None  # what the router of the layer before handed on, where it reads that
    diagnostics: dict[str, Diagnostic] = field(
        default_factory=dict
    )  # what the router says of itself, by the metric's name


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
    """A number a router says of itself in a pass, beside what it is by chance and at the worst. Tables hold
    means over passes.

    Tensors are detached scalars in float32, left on the device; references that do not depend on the pass are
    plain numbers.
    """

    value: Tensor
    chance: Tensor | float
    collapse: Tensor | float = math.nan


@dataclass(frozen=True)
class Coverage:
    """What of a checkpoint was understood, so that a smaller report is never mistaken for a whole one."""

    family: str
    layers_found: int
    layers_expected: int | None  # None where no config tells
    experts_per_layer: tuple[int, ...]
    parameters_understood: int
    parameters_total: int
    skipped: dict[str, int]  # reason -> number of tensors
    rowless_router: str | None = None  # what the router is called where it has no row for each expert

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
            f"{self.family}: {self.layers_found} MoE layers of {expected} expected, {experts} a layer, "
            f"{self.parameters_understood:,} of {self.parameters_total:,} parameters understood ({share:.1%})"
            + (f"; {skipped}" if skipped else "")
        )

    def without_rows(self) -> str | None:
        """Why the weights tell less of it than of others, in a sentence; None where its routers have rows."""
        if self.rowless_router is None:
            return None
        if self.experts_per_layer == (1,):
            return (
                f"nothing is routed (router {self.rowless_router}): one block a layer has a "
                "spectrum, and nothing to be compared with"
            )
        return (
            f"router {self.rowless_router} has no row for each expert, so experts are compared "
            "with each other alone, and alignment and "
            "ambiguity are left out; moescope trace shows where it sends text"
        )
