"""Causal self-attention with a cache, norms, and the two kinds of positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import ModelConfig
from moescope.decoder.elementwise import EAGER, Elementwise
from moescope.decoder.routers import router_class


class Cache:
    """Keys and values of the tokens read so far, for reading on token by token. All rows are equally long."""

    def __init__(self) -> None:
        self.held: dict[Attention, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return next((keys.shape[2] for keys, _ in self.held.values()), 0)

    def extended(self, layer: Attention, k_BHLd: Tensor, v_BHLd: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.held:
            before_k, before_v = self.held[layer]
            k_BHLd, v_BHLd = torch.cat((before_k, k_BHLd), 2), torch.cat((before_v, v_BHLd), 2)
        self.held[layer] = k_BHLd, v_BHLd
        return k_BHLd, v_BHLd


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float, elementwise: Elementwise = EAGER):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon, self.elementwise = epsilon, elementwise

    def forward(self, x: Tensor) -> Tensor:
        return self.elementwise.rms_norm(x, self.weight, self.epsilon)


class Attention(nn.Module):
    """Causal multi-head attention.

    Rotary and without biases in `modern`, with biases and no positions of its own in `some`.
    """

    def __init__(self, config: ModelConfig, elementwise: Elementwise = EAGER):
        super().__init__()
        D, modern = config.d_model, config.block == "modern"
        self.heads, self.elementwise = config.heads, elementwise
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(D, D, bias=not modern) for _ in range(4)
        )
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            # nn.MultiheadAttention's: Xavier over queries, keys and values as one matrix of 3 D rows
            bound = math.sqrt(6 / (4 * D))
            nn.init.normal_(projection.weight, std=0.02) if modern else nn.init.uniform_(
                projection.weight, -bound, bound
            )
        if modern:
            nn.init.normal_(self.o_proj.weight, std=0.02 / math.sqrt(2 * config.layers))
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if uses_qk_norm(config):
            self.q_norm = RMSNorm(D // config.heads, config.norm_epsilon, elementwise)
            self.k_norm = RMSNorm(D // config.heads, config.norm_epsilon, elementwise)

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
            k, v = cache.extended(self, k, v)
        past = k.shape[2] - q.shape[2]
        sees = None
        if past and q.shape[2] > 1:
            sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(past)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, is_causal=past == 0)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def uses_qk_norm(config: ModelConfig) -> bool:
    """Whether queries and keys are normed.

    As the config says, else as the layout the router is saved in needs it.
    """
    if config.qk_norm is not None or config.block != "modern":
        return bool(config.qk_norm)
    router = router_class(config.router)
    return router.plain_top_k and not router.renormalises(config)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times base^(-2i/d), each [positions, d], d the width of a head."""
    width = config.d_model // config.heads
    frequencies = config.rope_base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def sinusoids(config: ModelConfig) -> Tensor:
    """sin and cos of position times 10000^(-2i/D), interleaved [positions, D]. Vaswani et al. 2017."""
    frequencies = 10_000.0 ** -(torch.arange(0, config.d_model, 2, dtype=torch.float32) / config.d_model)
    angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
