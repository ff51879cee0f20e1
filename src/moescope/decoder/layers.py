"""Attention with a cache, norms, positions, and the elementwise steps between matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import ModelConfig
from moescope.decoder.routers import router_class
from moescope.decoder.routers.contract import compiled_function

# --- elementwise steps: pure functions, so that torch.compile can fuse each into one kernel


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean x^2 + epsilon) times weight, computed in float32. Zhang and Sennrich 2019."""
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def rotate(x_BHLd: Tensor, cos_Ld: Tensor, sin_Ld: Tensor) -> Tensor:
    """Rotary positions, halves paired as in Llama and Mixtral. Su et al. 2021."""
    first, second = x_BHLd.chunk(2, -1)
    return x_BHLd * cos_Ld + torch.cat((-second, first), -1) * sin_Ld


def swiglu(gate_up_SF: Tensor) -> Tensor:
    """silu(gate) * up. Shazeer 2020."""
    gate_SF, up_SF = gate_up_SF.chunk(2, -1)
    return functional.silu(gate_SF) * up_SF


def mix(y_SD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """sum_k weight_k y[row_k]: gather, multiply and add in one kernel, summed in float32."""
    weights_TK = weights_TK.to(y_SD.dtype)
    return functional.embedding_bag(row_TK, y_SD.contiguous(), mode="sum", per_sample_weights=weights_TK)


def token_losses(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Cross-entropy of each token in nats, float32; 0 where the target is -100."""
    return functional.cross_entropy(logits_TV.float(), targets_T, ignore_index=-100, reduction="none")


@dataclass(frozen=True)
class Elementwise:
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    swiglu: Callable[[Tensor], Tensor] = swiglu
    token_losses: Callable[[Tensor, Tensor], Tensor] = token_losses


EAGER = Elementwise()


@cache
def compiled() -> Elementwise:
    """Return the same functions through torch.compile, created once per process, compiled on first use."""
    return Elementwise(**{name: compiled_function(function) for name, function in vars(EAGER).items()})


# --- attention


class Cache:
    """Keys and values of the tokens so far, for decoding token by token. All rows have the same length."""

    def __init__(self) -> None:
        self.entries: dict[Attention, tuple[Tensor, Tensor]] = {}
        self.last_B1: Tensor | None = None  # ids of the last tokens

    @property
    def length(self) -> int:
        return next((keys.shape[2] for keys, _ in self.entries.values()), 0)

    def extend(self, layer: Attention, k_BHLd: Tensor, v_BHLd: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.entries:
            before_k, before_v = self.entries[layer]
            k_BHLd, v_BHLd = torch.cat((before_k, k_BHLd), 2), torch.cat((before_v, v_BHLd), 2)
        self.entries[layer] = k_BHLd, v_BHLd
        return k_BHLd, v_BHLd


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float, elementwise: Elementwise = EAGER):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon, self.elementwise = epsilon, elementwise

    def forward(self, x: Tensor) -> Tensor:
        return self.elementwise.rms_norm(x, self.weight, self.epsilon)


class Attention(nn.Module):
    """Causal multi-head attention: rotary without biases in `modern`, with biases, unrotated in `some`."""

    def __init__(self, config: ModelConfig, elementwise: Elementwise = EAGER):
        super().__init__()
        D, modern = config.d_model, config.modern
        self.heads, self.elementwise = config.heads, elementwise
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(D, D, bias=not modern) for _ in range(4)
        )
        # nn.MultiheadAttention's: Xavier over queries, keys and values as one matrix of 3 D rows
        bound = math.sqrt(6 / (4 * D))
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            if modern:
                nn.init.normal_(projection.weight, std=0.02)
            else:
                nn.init.uniform_(projection.weight, -bound, bound)
                nn.init.zeros_(projection.bias)
        if modern:
            nn.init.normal_(self.o_proj.weight, std=0.02 / math.sqrt(2 * config.layers))
        else:
            nn.init.zeros_(self.o_proj.bias)
        self.q_norm, self.k_norm = (
            RMSNorm(D // config.heads, config.norm_epsilon, elementwise) if uses_qk_norm(config) else None
            for _ in range(2)
        )

    def forward(
        self, x_BLD: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Cache | None = None
    ) -> Tensor:
        q, k, v = (
            projection(x_BLD).unflatten(-1, (self.heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rotary is not None:
            q, k = self.elementwise.rotate(q, *rotary), self.elementwise.rotate(k, *rotary)
        if cache is not None:
            k, v = cache.extend(self, k, v)
        past, visible = k.shape[2] - q.shape[2], None
        if past and q.shape[2] > 1:
            visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(past)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=past == 0)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def uses_qk_norm(config: ModelConfig) -> bool:
    """Return whether queries and keys are normed: as configured, else as the router's saved layout needs."""
    if config.qk_norm is not None or not config.modern:
        return bool(config.qk_norm)
    router = router_class(config.router)
    return router.is_plain(config) and not router.renormalises(config)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position times base^(-2i/d), each [positions, d], d the head width."""
    width = config.d_model // config.heads
    frequencies = config.rope_base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def sinusoids(config: ModelConfig) -> Tensor:
    """sin and cos of position times 10000^(-2i/D), interleaved [positions, D]. Vaswani et al. 2017."""
    frequencies = 10_000.0 ** -(torch.arange(0, config.d_model, 2, dtype=torch.float32) / config.d_model)
    angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
