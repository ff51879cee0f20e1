"""A small decoder-only language model whose feed-forward blocks are mixtures of experts with any router.

Module names are a rename away from Mixtral's and Qwen3-MoE's checkpoints. Padding is on the right: a causal
model never attends to it, so attention needs no mask; routers get the token mask.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import BLOCKS, DTYPES, EXPERT_INITS, ModelConfig, check_numbers
from moescope.decoder.layers import (
    EAGER,
    Attention,
    Cache,
    Elementwise,
    RMSNorm,
    compiled,
    mix,
    rotary_tables,
    sinusoids,
)
from moescope.decoder.routers import Routed, Router, RouterInput, TokenContext, router_class, to_routing
from moescope.errors import BadInput, unknown_name
from moescope.types import Routing

# --- all experts of a layer as stacked tensors: slots sorted by expert, one grouped product per projection

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
    filled_TK = chosen_TK >= 0
    # int32: half the digits to sort by
    expert_of_slot = torch.where(filled_TK, chosen_TK, n_experts).flatten().to(torch.int32)
    expert_S, order_S = torch.sort(expert_of_slot, stable=True)
    numbers_E = torch.arange(n_experts, dtype=torch.int32, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
    # Compute the first row even if no slot is filled: empty slots point at it, so it must be finite.
    ends_E[-1:].clamp_(min=1)
    row_TK = torch.empty_like(order_S)
    row_TK[order_S] = torch.arange(len(order_S), device=order_S.device)
    row_TK = torch.where(filled_TK, row_TK.view_as(chosen_TK), 0)
    expert_S, order_S = expert_S[:at_most], order_S[:at_most]
    return Sorted(order_S // chosen_TK.shape[1], expert_S, order_S, ends_E, row_TK, filled_TK)


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
    member_ES = expert_S == torch.arange(n_experts, device=expert_S.device)[:, None]
    return member_ES.to(gradient_SF.dtype) @ gradient_SF


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
    places = zip(ends, ends[1:], weight_EOI, strict=False)
    rest = x_SI.new_zeros(len(x_SI) - ends[-1], weight_EOI.shape[1])
    return torch.cat([*(x_SI[start:end] @ weight_OI.T for start, end, weight_OI in places), rest])


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

    def __init__(self, config: ModelConfig, n_experts: int, elementwise: Elementwise = EAGER):
        super().__init__()
        self.n_experts, self.elementwise, self.trained = n_experts, elementwise, not config.frozen_experts
        self.stored_dtype = torch.float32 if self.trained else getattr(torch, config.frozen_dtype)
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
        y_SD = y_SD * gates_TK.flatten()[at.order_S, None]
        mixed_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        return mixed_TD.index_add(0, at.token_S, y_SD.float()).to(x_TD.dtype)


class SwiGLUExperts(Experts):
    """down (silu(gate x) * up x). `gate_up` holds gate above up, as Mixtral's fused tensor does."""

    def __init__(self, config: ModelConfig, n_experts: int, d_ff: int, elementwise: Elementwise = EAGER):
        super().__init__(config, n_experts, elementwise)
        gate_up = torch.empty(n_experts, 2 * d_ff, config.d_model, dtype=self.stored_dtype)
        down = torch.empty(n_experts, config.d_model, d_ff, dtype=self.stored_dtype)
        std = 0.02 / math.sqrt(2 * config.layers)
        self.gate_up = nn.Parameter(gate_up.normal_(std=0.02), requires_grad=self.trained)
        self.down = nn.Parameter(down.normal_(std=std), requires_grad=self.trained)

    def project(self, x_SD: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        hidden_SF = self.elementwise.swiglu(self.product(x_SD, self.gate_up.to(x_SD.dtype), ends_E))
        return self.product(hidden_SF, self.down.to(x_SD.dtype), ends_E)


class GELUExperts(Experts):
    """down gelu(up x + b) + c, biases initially zero; trained, or random and frozen as in SoME."""

    def __init__(self, config: ModelConfig, n_experts: int, d_ff: int, elementwise: Elementwise = EAGER):
        super().__init__(config, n_experts, elementwise)
        D, dtype, trained = config.d_model, self.stored_dtype, self.trained
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


Consume = Callable[[Routing], None]
BeforePart = Callable[[str], None]  # called with a part's name before its first weights are drawn


# --- the decoder


def unseeded(part: str) -> None:
    """Draw each part's weights from the current state of the generator."""


@dataclass(frozen=True)
class Output:
    """Result of a pass: logits without targets, losses with them."""

    logits_BLV: Tensor | None = None
    loss: Tensor | None = None  # lm_loss + aux_loss
    lm_loss: Tensor | None = None  # mean over targets that are not -100, in nats
    aux_loss: Tensor | None = None  # of all layers' routers, weighted
    token_losses_BL: Tensor | None = None  # detached; 0 where there is no target
    losses: dict[str, Tensor] = field(default_factory=dict)  # routers' losses by name, summed over layers


class MoE(nn.Module):
    """Router and experts. Returns the experts' output and the decision, so that a hook sees both."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        shared: nn.Module | None,
        elementwise: Elementwise = EAGER,
        before: BeforePart = unseeded,
    ):
        super().__init__()
        kind = router_class(config.router)
        self.layer, (self.n_experts, d_ff) = layer, kind.expert_shape(config)
        before(f"layers.{layer}.router")
        self.router = kind(config, layer, shared)
        before(f"layers.{layer}.experts")
        experts = SwiGLUExperts if config.modern else GELUExperts
        self.experts = experts(config, self.n_experts, d_ff, elementwise)

    def forward(
        self,
        x_TD: Tensor,
        ids_T: Tensor,
        mask_T: Tensor,
        carried_TR: Tensor | None = None,
        context: TokenContext | None = None,
    ) -> tuple[Tensor, Routed]:
        product_dtype = arithmetic_dtype(x_TD) if self.training else torch.float32
        with torch.autocast(x_TD.device.type, enabled=False):
            routed = self.router(
                RouterInput(x_TD.float(), ids_T, mask_T, self.layer, carried_TR, product_dtype, context)
            )
        return self.experts(x_TD, routed.chosen_TK, routed.gates_TK, routed.filled_at_most), routed


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product with x here: autocast's, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Block(nn.Module):
    """modern: x + MHA(norm x), then x + MoE(norm x). some: LN1(x + MHA(x)), then LN2(x + MoE(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        shared: nn.Module | None,
        elementwise: Elementwise = EAGER,
        before: BeforePart = unseeded,
    ):
        super().__init__()
        self.pre_norm = config.modern
        before(f"layers.{layer}.attention")
        self.self_attn = Attention(config, elementwise)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.d_model, config.norm_epsilon, elementwise)
            if self.pre_norm
            else nn.LayerNorm(config.d_model, config.norm_epsilon)
            for _ in range(2)
        )
        self.mlp = MoE(config, layer, shared, elementwise, before)

    def forward(
        self,
        x_BLD: Tensor,
        ids_T: Tensor,
        mask_T: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        carried_TR: Tensor | None,
        context: TokenContext | None = None,
    ) -> tuple[Tensor, Routed]:
        if self.pre_norm:
            x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), rotary, cache)
            input_BLD = self.post_attention_layernorm(x_BLD)
        else:
            x_BLD = self.input_layernorm(x_BLD + self.self_attn(x_BLD, rotary, cache))
            input_BLD = x_BLD
        added_TD, routed = self.mlp(input_BLD.flatten(0, 1), ids_T, mask_T, carried_TR, context)
        x_BLD = x_BLD + added_TD.view_as(x_BLD)
        return (x_BLD if self.pre_norm else self.post_attention_layernorm(x_BLD)), routed


class LabModel(nn.Module):
    """The model of a config. Weights come from torch's global generator, which `before` may seed per part.

    `modern` ends in an RMSNorm and a head without bias, optionally tied to the embedding. `some` multiplies
    embeddings by sqrt D, adds sinusoids, and ends in an untied head with bias and no norm.
    """

    rotary_cos: Tensor
    rotary_sin: Tensor
    sinusoids: Tensor

    def __init__(self, config: ModelConfig, compile: bool = False, before: BeforePart = unseeded):
        super().__init__()
        check_model(config)
        self.config = config
        self.trained_length = config.max_positions  # set by the training: longer texts are read in windows
        self.elementwise = compiled() if compile else EAGER
        self.reads_context = router_class(config.router).reads_context(config)
        D, V, modern = config.d_model, config.vocabulary, config.modern
        before("embed_tokens")
        self.embed_tokens = nn.Embedding(V, D)
        # With the factor sqrt D, as large as the sinusoids.
        nn.init.normal_(self.embed_tokens.weight, std=0.02 if modern else 1 / math.sqrt(D))
        before("shared_router")
        self.shared_router = router_class(config.router).shared_parts(config)
        self.layers = nn.ModuleList(
            Block(config, layer, self.shared_router, self.elementwise, before)
            for layer in range(config.layers)
        )
        for router in self.routers:
            router.compiles = compile
        self.norm = RMSNorm(D, config.norm_epsilon, self.elementwise) if modern else nn.Identity()
        before("lm_head")
        self.lm_head = nn.Linear(D, V, bias=not modern)
        if modern:
            nn.init.normal_(self.lm_head.weight, std=0.02)
            cos, sin = rotary_tables(config)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        else:
            self.register_buffer("sinusoids", sinusoids(config), persistent=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        ids_BL: Tensor,
        mask_BL: Tensor | None = None,
        targets_BL: Tensor | None = None,
        consume: Consume | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """Return losses against `targets_BL` (ids shifted by one, -100 where there is none), else logits.

        `consume` is called with every layer's Routing, without its tokens, during the pass. With a `cache`
        the ids continue where the last pass over it stopped.
        """
        start, length = 0 if cache is None else cache.length, ids_BL.shape[1]
        if start + length > self.config.max_positions:
            raise BadInput(
                f"{start + length} tokens exceed the model's {self.config.max_positions} positions; "
                "shorten the text, or train with a larger max_positions"
            )
        mask_T = torch.ones_like(ids_BL, dtype=torch.bool) if mask_BL is None else mask_BL.bool()
        ids_T, mask_T = ids_BL.flatten(), mask_T.flatten()
        x_BLD, rotary = self.embed(ids_BL, start)
        context = self.token_context(ids_BL, x_BLD, start, cache) if self.reads_context else None
        carried_TR: Tensor | None = None
        decisions: list[Routed] = []
        for layer, block in enumerate(self.blocks):
            x_BLD, routed = block(x_BLD, ids_T, mask_T, rotary, cache, carried_TR, context)
            carried_TR = routed.carried_TR
            decisions.append(routed)
            if consume is not None:
                consume(to_routing(routed, layer, f"layers.{layer}.mlp", block.mlp.n_experts))
        logits_BLV = self.lm_head(self.norm(x_BLD))
        if targets_BL is None:
            return Output(logits_BLV)
        losses_T = self.elementwise.token_losses(logits_BLV.flatten(0, 1), targets_BL.flatten())
        lm_loss = losses_T.sum() / (targets_BL != -100).sum().clamp(min=1)
        losses: dict[str, Tensor] = {}
        for name, loss in (item for routed in decisions for item in routed.losses.items()):
            losses[name] = losses[name] + loss if name in losses else loss
        aux_loss = sum(losses.values(), torch.zeros((), device=lm_loss.device))
        each_BL = losses_T.detach().view_as(ids_BL)
        return Output(None, lm_loss + aux_loss, lm_loss, aux_loss, each_BL, losses)

    def embed(self, ids_BL: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return embeddings and the rotary tables of these positions; `some` adds its positions instead."""
        end = start + ids_BL.shape[1]
        x_BLD = self.embed_tokens(ids_BL)
        if not self.config.modern:
            return x_BLD * math.sqrt(self.config.d_model) + self.sinusoids[start:end].to(x_BLD.dtype), None
        dtype = arithmetic_dtype(x_BLD)  # of queries and keys
        return x_BLD, (self.rotary_cos[start:end].to(dtype), self.rotary_sin[start:end].to(dtype))

    def token_context(self, ids_BL: Tensor, x_BLD: Tensor, start: int, cache: Cache | None) -> TokenContext:
        before_B1 = ids_BL[:, :1] if cache is None or cache.last_B1 is None else cache.last_B1
        if cache is not None:
            cache.last_B1 = ids_BL[:, -1:]
        rows, length = ids_BL.shape
        position_L = torch.arange(start, start + length, device=ids_BL.device)
        previous_BL = torch.cat([before_B1, ids_BL[:, :-1]], 1)
        return TokenContext(previous_BL.flatten(), position_L.repeat(rows), x_BLD.flatten(0, 1).float())

    @property
    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    @property
    def routers(self) -> list[Router]:
        return [block.mlp.router for block in self.blocks]

    def routing_blocks(self) -> list[tuple[int, str, nn.Module, int]]:
        """Return number, name, router and number of experts of every layer whose Routing `consume` gets."""
        return [
            (at, f"layers.{at}.mlp", block.mlp.router, block.mlp.n_experts)
            for at, block in enumerate(self.blocks)
        ]

    @torch.no_grad()
    def after_step(self) -> None:
        """Let every router update its gradient-free state; call it after each optimiser step."""
        for router in self.routers:
            router.after_step()

    def new_cache(self) -> Cache:
        return Cache()

    def cast(self, dtype: torch.dtype) -> LabModel:
        """Convert all weights but the routers', which always compute in float32, in place."""
        routers = filter(None, (*self.routers, self.shared_router))
        excluded = {id(part) for router in routers for part in router.modules()}
        for module in (module for module in self.modules() if id(module) not in excluded):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
        return self


def seeded_by_part(seed: int) -> BeforePart:
    """Seed every part separately, so that models of one seed share all parts that have the same shape."""

    def before(part: str) -> None:
        digest = hashlib.blake2b(f"{seed} {part}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)

    return before


@dataclass(frozen=True)
class ParameterCounts:
    total: int  # with frozen ones, without buffers (keys, selection biases)
    trainable: int


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Count parameters on the meta device, without allocating memory: all layers are alike."""
    counts = []
    for layers in (1, 2):
        with torch.device("meta"):
            parameters = list(LabModel(replace(config, layers=layers)).parameters())
        trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        counts.append((sum(parameter.numel() for parameter in parameters), trainable))
    total, trainable = (one + (config.layers - 1) * (two - one) for one, two in zip(*counts, strict=True))
    return ParameterCounts(total, trainable)


def check_model(model: ModelConfig, where: str = "config") -> None:
    """Reject a model that cannot be built."""
    check_numbers("model", model, where)
    for name, known in (("block", BLOCKS), ("expert_init", EXPERT_INITS), ("frozen_dtype", DTYPES)):
        if getattr(model, name) not in known:
            raise unknown_name(name, getattr(model, name), list(known))
    router, modern = router_class(model.router), model.modern
    D, heads, head = model.d_model, model.heads, model.d_model // model.heads
    of_some = model.expert_init != "default" or model.match_expert_scale
    for wrong, message in (
        (D % heads, f"d_model {D} must be a multiple of heads, {heads}"),
        (modern and head % 2, f"d_model / heads must be even for rotary positions, not {head}"),
        (not modern and D % 2, f"d_model must be even for sinusoidal positions, not {D}"),
        (modern and of_some, "expert_init and match_expert_scale are for block = 'some' only"),
        (not modern and model.qk_norm, "qk_norm is for block = 'modern' only"),
        (not modern and model.tie_embeddings, "tie_embeddings is for block = 'modern' only"),
        (
            model.top_k > model.experts,
            f"top_k {model.top_k} exceeds the number of experts, {model.experts}; lower it to at most "
            f"{model.experts}",
        ),
        (
            router.fixed_top_k not in (None, model.top_k),
            f"{model.router} routes a token to {router.fixed_top_k} experts; remove top_k, or use router = "
            f"'topk' for top_k = {model.top_k}",
        ),
    ):
        if wrong:
            raise BadInput(f"{where}: [model] {message}")
    router.checked_options(model)
