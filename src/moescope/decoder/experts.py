"""All experts of a layer as stacked tensors: slots sorted by expert, one grouped product per projection.

No host sync: the number of rows per expert stays on the device. Rows of empty slots come last and belong to
no group; a grouped product leaves them unwritten, so nothing may read them. Empty slots point at the first
row with weight 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import ModelConfig
from moescope.decoder.layers import EAGER, Elementwise, mix

SPARSITY, SPARSE_STD = 0.9, 0.01  # of torch.nn.init.sparse_
PROBES, PROBE_SEED = 256, 0x5CA1E  # Gaussian inputs that measure an expert's output scale


@dataclass(frozen=True)
class Sorted:
    """T tokens' slots by expert: row s is slot `order_S[s]` of T K; expert e's rows end at `ends_E[e]`."""

    token_S: Tensor
    expert_S: Tensor  # n_experts where the slot is empty
    order_S: Tensor
    ends_E: Tensor  # int32
    row_TK: Tensor  # row of each slot; 0, a computed row, where empty
    filled_TK: Tensor


def sort_by_expert(chosen_TK: Tensor, n_experts: int, at_most: int | None) -> Sorted:
    slots = chosen_TK.numel()
    rows = slots if at_most is None else min(at_most, slots)
    filled_TK = chosen_TK >= 0
    # int32: half the digits to sort by
    expert_of_slot = torch.where(filled_TK, chosen_TK, n_experts).flatten().to(torch.int32)
    expert_S, order_S = torch.sort(expert_of_slot, stable=True)
    numbers_E = torch.arange(n_experts, dtype=torch.int32, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
    # Compute the first row even if no slot is filled: empty slots point at it, so it must be finite.
    ends_E[-1:].clamp_(min=1)
    row_TK = torch.empty_like(order_S)
    row_TK[order_S] = torch.arange(slots, device=order_S.device)
    order_S = order_S[:rows]
    return Sorted(
        order_S // chosen_TK.shape[1],
        expert_S[:rows],
        order_S,
        ends_E,
        torch.where(filled_TK, row_TK.view_as(chosen_TK), 0),
        filled_TK,
    )


class Spread(torch.autograd.Function):
    """x_TD -> x_SD, one row per slot. Backward gathers instead of scattering, for deterministic sums."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, at: Sorted) -> Tensor:
        ctx.save_for_backward(at.row_TK, at.filled_TK)
        return x_TD[at.token_S]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        row_TK, filled_TK = ctx.saved_tensors
        return mix(gradients[0], filled_TK, row_TK), None


class Mix(torch.autograd.Function):
    """y_SD, gates_TK -> sum over a token's slots of gate times row."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, gates_TK: Tensor, at: Sorted) -> Tensor:
        ctx.save_for_backward(y_SD, gates_TK, at.token_S, at.order_S, at.row_TK, at.filled_TK)
        return mix(y_SD, gates_TK, at.row_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        y_SD, gates_TK, token_S, order_S, row_TK, filled_TK = ctx.saved_tensors
        gradient_SD = gradients[0][token_S]
        gates_gradient_TK = None
        if ctx.needs_input_grad[1]:
            gradient_S = (y_SD * gradient_SD).sum(-1, dtype=torch.float32)
            gates_gradient_TK = torch.where(filled_TK, gradient_S[row_TK], 0).to(gates_TK.dtype)
        return gradient_SD.mul_(gates_TK.flatten()[order_S, None]), gates_gradient_TK, None


class RowsOfExperts(torch.autograd.Function):
    """bias_EF -> bias_SF, the row of each slot's expert; rows of empty slots add nothing to a gradient.

    An index's own gradient adds an expert's rows in bfloat16 on a CPU, and one after another on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, bias_EF: Tensor, expert_S: Tensor) -> Tensor:
        ctx.save_for_backward(expert_S)
        ctx.n_experts = len(bias_EF)
        return bias_EF[expert_S.clamp(max=len(bias_EF) - 1)]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (expert_S,), gradient_SF = ctx.saved_tensors, gradients[0]
        if gradient_SF.is_cuda:
            return one_product(gradient_SF, expert_S, ctx.n_experts), None
        wide_SF = gradient_SF.to(torch.promote_types(gradient_SF.dtype, torch.float32))
        sums_EF = wide_SF.new_zeros(ctx.n_experts + 1, wide_SF.shape[1]).index_add_(0, expert_S, wide_SF)
        return sums_EF[:-1].to(gradient_SF.dtype), None


def one_product(gradient_SF: Tensor, expert_S: Tensor, n_experts: int) -> Tensor:
    """Return the sum of each expert's rows, in a fixed order; a NaN in one row reaches all experts."""
    # what unwritten rows hold may be NaN, and 0 NaN is not 0
    gradient_SF = torch.where((expert_S < n_experts)[:, None], gradient_SF, 0)
    numbers_E1 = torch.arange(n_experts, device=expert_S.device)[:, None]
    return (expert_S == numbers_E1).to(gradient_SF.dtype) @ gradient_SF


def grouped_product(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Return row s times its expert's transposed weight; rows past the last expert's stay unwritten."""
    if len(weight_EOI) == 1:  # nothing to group
        return x_SI @ weight_EOI[0].T
    if grouped_mm_runs(x_SI, weight_EOI):
        return functional.grouped_mm(x_SI, weight_EOI.transpose(-2, -1), offs=ends_E)
    return looped_product(x_SI, weight_EOI, ends_E)


def looped_product(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The same, one expert at a time: the oracle, and the fallback where no grouped product runs."""
    ends = [0, *ends_E.tolist()]
    parts = [
        x_SI[start:end] @ weight_OI.T
        for start, end, weight_OI in zip(ends, ends[1:], weight_EOI, strict=False)
    ]
    rest = x_SI.new_zeros(len(x_SI) - ends[-1], weight_EOI.shape[1])
    return torch.cat([*parts, rest])


def grouped_mm_runs(x_SI: Tensor, weight_EOI: Tensor) -> bool:
    """Return whether torch's grouped product supports these: rows of whole 16 bytes, on a GPU bfloat16 only.

    Other dtypes run as a loop inside torch.
    """
    if any(width * x_SI.element_size() % 16 for width in weight_EOI.shape[1:]):
        return False
    if x_SI.is_cuda:
        return x_SI.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x_SI.device) >= (8, 0)
    return x_SI.device.type == "cpu"


class Experts(nn.Module):
    """Sort, project, activate, project, mix: what SwiGLU and GELU experts share."""

    def __init__(self, n_experts: int, elementwise: Elementwise = EAGER):
        super().__init__()
        self.n_experts, self.elementwise = n_experts, elementwise
        self.product = grouped_product  # tests replace it by the loop

    def project(self, x_SD: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        raise NotImplementedError

    def waits(self, dtype: torch.dtype) -> bool:
        """Whether a pass in this arithmetic waits for the device, because a product is a loop over experts.

        Inside torch it is one on GPUs without a kernel for it: all but NVIDIA's capabilities 9 and 10.
        """
        matrices = [weight for weight in self.parameters() if weight.dim() == 3]
        device, rows = matrices[0].device, matrices[0].new_empty(0, dtype=dtype)
        kernel = (
            device.type == "cuda"
            and torch.version.hip is None
            and torch.cuda.get_device_capability(device)[0] in (9, 10)
            and all(grouped_mm_runs(rows, weight) for weight in matrices)
        )
        return self.n_experts > 1 and not kernel

    def forward(
        self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor, at_most: int | None = None
    ) -> Tensor:
        """Return sum_k gate_k expert_k(x). Empty slots add nothing, and no gradient."""
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
        with torch.autocast(x_TD.device.type, enabled=False):
            if at_most is not None and at_most < chosen_TK.numel():
                return self.scattered(x_TD, chosen_TK, gates_TK, at_most)
            at = sort_by_expert(chosen_TK, self.n_experts, None)
            x_SD = Spread.apply(x_TD, at)  # type: ignore[no-untyped-call]
            y_SD = self.project(x_SD, at.expert_S, at.ends_E)
            return Mix.apply(y_SD, gates_TK, at)  # type: ignore[no-untyped-call]

    def scattered(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor, at_most: int) -> Tensor:
        """The same where most slots are empty, as when experts choose: allocates `at_most` rows, not T K."""
        at = sort_by_expert(chosen_TK, self.n_experts, at_most)
        real_S1 = (at.expert_S < self.n_experts)[:, None]
        x_SD = torch.where(real_S1, x_TD[at.token_S], 0)
        y_SD = torch.where(real_S1, self.project(x_SD, at.expert_S, at.ends_E), 0)
        weighted_SD = y_SD * gates_TK.flatten()[at.order_S, None]
        mixed_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        return mixed_TD.index_add(0, at.token_S, weighted_SD.float()).to(x_TD.dtype)


class SwiGLUExperts(Experts):
    """down (silu(gate x) * up x). `gate_up` holds gate above up, as Mixtral's fused tensor does."""

    def __init__(self, config: ModelConfig, n_experts: int, d_ff: int, elementwise: Elementwise = EAGER):
        super().__init__(n_experts, elementwise)
        trained = not config.frozen_experts
        dtype = torch.float32 if trained else getattr(torch, config.frozen_dtype)
        gate_up = torch.empty(n_experts, 2 * d_ff, config.d_model, dtype=dtype).normal_(std=0.02)
        down = torch.empty(n_experts, config.d_model, d_ff, dtype=dtype).normal_(
            std=0.02 / math.sqrt(2 * config.layers)
        )
        self.gate_up = nn.Parameter(gate_up, requires_grad=trained)
        self.down = nn.Parameter(down, requires_grad=trained)

    def project(self, x_SD: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        hidden_SF = self.elementwise.swiglu(self.product(x_SD, self.gate_up.to(x_SD.dtype), ends_E))
        return self.product(hidden_SF, self.down.to(x_SD.dtype), ends_E)


class GELUExperts(Experts):
    """down gelu(up x + b) + c, biases initially zero; trained, or random and frozen as in SoME."""

    def __init__(self, config: ModelConfig, n_experts: int, d_ff: int, elementwise: Elementwise = EAGER):
        super().__init__(n_experts, elementwise)
        trained, D = not config.frozen_experts, config.d_model
        dtype = torch.float32 if trained else getattr(torch, config.frozen_dtype)
        up, down = torch.empty(n_experts, d_ff, D), torch.empty(n_experts, D, d_ff)
        if not up.is_meta:
            fill_experts(up, down, config.expert_init, config.match_expert_scale)
        self.up = nn.Parameter(up.to(dtype), requires_grad=trained)
        self.up_bias = nn.Parameter(torch.zeros(n_experts, d_ff, dtype=dtype), requires_grad=trained)
        self.down = nn.Parameter(down.to(dtype), requires_grad=trained)
        self.down_bias = nn.Parameter(torch.zeros(n_experts, D, dtype=dtype), requires_grad=trained)

    def project(self, x_SD: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        dtype = x_SD.dtype
        up_SF, down_SD = (
            RowsOfExperts.apply(bias.to(dtype), expert_S)  # type: ignore[no-untyped-call]
            for bias in (self.up_bias, self.down_bias)
        )
        hidden_SF = functional.gelu(self.product(x_SD, self.up.to(dtype), ends_E) + up_SF)
        return self.product(hidden_SF, self.down.to(dtype), ends_E) + down_SD


def fill_experts(up_EFD: Tensor, down_EDF: Tensor, init: str, match_scale: bool) -> None:
    """Fill both in place, expert by expert.

    default: uniform in +-1/sqrt(fan in), as nn.Linear; orthogonal: columns or rows orthonormal; sparse: a
    tenth of each column N(0, 0.01^2), the rest 0; zero: zero output, the control for what experts add.
    """
    for up_FD, down_DF in zip(up_EFD, down_EDF, strict=True):
        for weight in (up_FD, down_DF):
            if init == "orthogonal":
                nn.init.orthogonal_(weight)
            elif init == "sparse":
                nn.init.sparse_(weight, SPARSITY, SPARSE_STD)
            else:
                weight.uniform_(-1, 1).div_(math.sqrt(weight.shape[1]))
        if init == "zero":
            down_DF.zero_()
        elif match_scale:
            down_DF.mul_(default_output_scale() / output_scale(up_FD, down_DF))


def output_scale(up_FD: Tensor, down_DF: Tensor) -> float:
    """Return the root mean square of an expert's outputs for fixed unit Gaussian inputs."""
    # A seed that no training uses: otherwise probes would equal the numbers the weights were drawn from.
    generator = torch.Generator(device="cpu").manual_seed(PROBE_SEED)
    x_TD = torch.randn(PROBES, up_FD.shape[1], generator=generator, device="cpu").to(up_FD.device)
    y_TD = functional.gelu(x_TD @ up_FD.T) @ down_DF.T
    return float(y_TD.square().mean().sqrt())


def default_output_scale() -> float:
    """Return the expected scale of `default`: sqrt(E[gelu(z)^2] / 3), z ~ N(0, 1/3), for every width.

    Weights uniform in +-1/sqrt(n) have variance 1/(3 n), so each map turns a mean square m into m / 3.
    """
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64) / math.sqrt(3)
    density = torch.exp(-1.5 * z.square()) * math.sqrt(1.5 / math.pi)
    return math.sqrt(float(torch.trapezoid(functional.gelu(z).square() * density, z)) / 3)
