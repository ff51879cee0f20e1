"""A small decoder-only language model whose feed-forward blocks are mixtures of experts with any router.

Module names are a rename away from Mixtral's and Qwen3-MoE's checkpoints. Padding is on the right: a causal
model never attends to it, so attention needs no mask; routers get the token mask.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from moescope.decoder.config import BLOCKS, DTYPES, EXPERT_INITS, ModelConfig, check_numbers
from moescope.decoder.experts import GELUExperts, SwiGLUExperts
from moescope.decoder.layers import (
    EAGER,
    Attention,
    Cache,
    Elementwise,
    RMSNorm,
    compiled,
    rotary_tables,
    sinusoids,
)
from moescope.decoder.routers import Routed, Router, RouterInput, TokenContext, router_class, to_routing
from moescope.errors import BadInput, unknown_name
from moescope.types import Routing

Consume = Callable[[Routing], None]
BeforePart = Callable[[str], None]  # called with a part's name before its first weights are drawn


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
        D, V = config.d_model, config.vocabulary
        modern = config.modern
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
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if modern:
            cos, sin = rotary_tables(config)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        else:
            self.register_buffer("sinusoids", sinusoids(config), persistent=False)

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
        x_BLD = self.norm(x_BLD)
        logits_BLV = self.lm_head(x_BLD)
        if targets_BL is None:
            return Output(logits_BLV)
        losses_T = self.elementwise.token_losses(logits_BLV.flatten(0, 1), targets_BL.flatten())
        lm_loss = losses_T.sum() / (targets_BL != -100).sum().clamp(min=1)
        losses: dict[str, Tensor] = {}
        for routed in decisions:
            for name, loss in routed.losses.items():
                losses[name] = losses[name] + loss if name in losses else loss
        aux_loss = sum(losses.values(), torch.zeros((), device=lm_loss.device))
        token_losses_BL = losses_T.detach().view_as(ids_BL)
        return Output(None, lm_loss + aux_loss, lm_loss, aux_loss, token_losses_BL, losses)

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

    def after_step(self) -> None:
        """Let every router update its gradient-free state; call it after each optimiser step."""
        with torch.no_grad():
            for router in self.routers:
                router.after_step()

    def new_cache(self) -> Cache:
        return Cache()

    def cast(self, dtype: torch.dtype) -> LabModel:
        """Convert all weights but the routers', which always compute in float32, in place."""
        routers = [router for router in (*self.routers, self.shared_router) if router]
        excluded = {id(part) for router in routers for part in router.modules()}
        for module in self.modules():
            if id(module) not in excluded:
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
    head = model.d_model // model.heads
    if model.d_model % model.heads:
        raise BadInput(f"{where}: [model] d_model {model.d_model} must be a multiple of heads, {model.heads}")
    if model.modern and head % 2:
        raise BadInput(f"{where}: [model] d_model / heads must be even for rotary positions, not {head}")
    if not model.modern and model.d_model % 2:
        raise BadInput(f"{where}: [model] d_model must be even for sinusoidal positions, not {model.d_model}")
    if model.modern and (model.expert_init != "default" or model.match_expert_scale):
        raise BadInput(f"{where}: [model] expert_init and match_expert_scale are for block = 'some' only")
    if not model.modern and (model.qk_norm or model.tie_embeddings):
        raise BadInput(f"{where}: [model] qk_norm and tie_embeddings are for block = 'modern' only")
    if model.top_k > model.experts:
        raise BadInput(
            f"{where}: [model] top_k {model.top_k} exceeds the number of experts, {model.experts}; "
            f"lower it to at most {model.experts}"
        )
    router = router_class(model.router)
    if router.fixed_top_k not in (None, model.top_k):
        raise BadInput(
            f"{where}: [model] {model.router} routes a token to {router.fixed_top_k} experts; "
            f"remove top_k, or use router = 'topk' for top_k = {model.top_k}"
        )
    router.checked_options(model)
