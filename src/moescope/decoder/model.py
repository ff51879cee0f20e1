"""A small decoder-only language model whose feed-forward blocks are mixtures of experts under any router.

Names of modules are chosen so that Mixtral's and Qwen3-MoE's checkpoints are a rename away. Padding stands on
the right: a causal
model never looks at it, so attention needs no mask, and routers are told which tokens are real.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from moescope.decoder.attention import Attention, Cache, RMSNorm, rotary_tables, sinusoids
from moescope.decoder.config import ModelConfig, check_model
from moescope.decoder.elementwise import EAGER, Elementwise, compiled
from moescope.decoder.experts import GELUExperts, SwiGLUExperts
from moescope.decoder.routers import Routed, Router, RouterInput, router_class, to_routing
from moescope.errors import BadInput
from moescope.types import Routing

Consume = Callable[[Routing], None]
BeforePart = Callable[[str], None]  # called with a part's name before its first weights are drawn


def as_it_comes(part: str) -> None:
    """Weights are drawn one part after the other, wherever the generator stands."""


@dataclass(frozen=True)
class Output:
    """What a pass gives: logits where no targets were given, losses where they were."""

    logits_BLV: Tensor | None = None
    loss: Tensor | None = None  # what is trained: lm_loss + aux_loss
    lm_loss: Tensor | None = None  # mean over targets that are not -100, in nats
    aux_loss: Tensor | None = None  # of all layers' routers, weighted
    token_losses_BL: Tensor | None = None  # detached; 0 where there is no target
    losses: dict[str, Tensor] = field(default_factory=dict)  # routers' losses by name, summed over layers


class MoE(nn.Module):
    """Router and experts. Returns what the experts add, and the decision itself, so that a hook sees both."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        shared: nn.Module | None,
        elementwise: Elementwise = EAGER,
        before: BeforePart = as_it_comes,
    ):
        super().__init__()
        kind = router_class(config.router)
        self.layer, (self.n_experts, d_ff) = layer, kind.expert_shape(config)
        before(f"layers.{layer}.router")
        self.router = kind(config, layer, shared)
        before(f"layers.{layer}.experts")
        experts = SwiGLUExperts if config.block == "modern" else GELUExperts
        self.experts = experts(config, self.n_experts, d_ff, elementwise)

    def forward(
        self, x_TD: Tensor, ids_T: Tensor, mask_T: Tensor, carried_TR: Tensor | None = None
    ) -> tuple[Tensor, Routed]:
        with torch.autocast(x_TD.device.type, enabled=False):
            routed = self.router(RouterInput(x_TD.float(), ids_T, mask_T, self.layer, carried_TR))
        return self.experts(x_TD, routed.chosen_TK, routed.gates_TK, routed.filled_at_most), routed


class Block(nn.Module):
    """modern: x + MHA(norm x), then x + MoE(norm x). some: LN1(x + MHA(x)), then LN2(x + MoE(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        shared: nn.Module | None,
        elementwise: Elementwise = EAGER,
        before: BeforePart = as_it_comes,
    ):
        super().__init__()
        self.pre_norm = config.block == "modern"
        before(f"layers.{layer}.attention")
        self.self_attn = Attention(config, elementwise)
        if self.pre_norm:
            self.input_layernorm: nn.Module = RMSNorm(config.d_model, config.norm_epsilon, elementwise)
            self.post_attention_layernorm: nn.Module = RMSNorm(
                config.d_model, config.norm_epsilon, elementwise
            )
        else:
            self.input_layernorm = nn.LayerNorm(config.d_model, config.norm_epsilon)
            self.post_attention_layernorm = nn.LayerNorm(config.d_model, config.norm_epsilon)
        self.mlp = MoE(config, layer, shared, elementwise, before)

    def forward(
        self,
        x_BLD: Tensor,
        ids_T: Tensor,
        mask_T: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        carried_TR: Tensor | None,
    ) -> tuple[Tensor, Routed]:
        if self.pre_norm:
            x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), rotary, cache)
            given_BLD = self.post_attention_layernorm(x_BLD)
        else:
            x_BLD = self.input_layernorm(x_BLD + self.self_attn(x_BLD, rotary, cache))
            given_BLD = x_BLD
        added_TD, routed = self.mlp(given_BLD.flatten(0, 1), ids_T, mask_T, carried_TR)
        x_BLD = x_BLD + added_TD.view_as(x_BLD)
        return (x_BLD if self.pre_norm else self.post_attention_layernorm(x_BLD)), routed


class LabModel(nn.Module):
    """The model of a config, with weights drawn from torch's global generator, which `before` may seed for
    each part.

    `modern` ends in an RMSNorm and a head without bias, tied to the embedding if the config says so. `some`
    multiplies embeddings
    by sqrt D, adds sinusoids, and ends in an untied head with bias and no norm.
    """

    rotary_cos: Tensor
    rotary_sin: Tensor
    sinusoids: Tensor

    def __init__(self, config: ModelConfig, compile: bool = False, before: BeforePart = as_it_comes):
        super().__init__()
        check_model(config)
        self.config = config
        self.elementwise = compiled() if compile else EAGER
        D, V = config.d_model, config.vocabulary
        modern = config.block == "modern"
        before("embed_tokens")
        self.embed_tokens = nn.Embedding(V, D)
        # With sqrt D in front, as large as the sinusoids beside them.
        nn.init.normal_(self.embed_tokens.weight, std=0.02 if modern else 1 / math.sqrt(D))
        before("shared_router")
        self.shared_router = router_class(config.router).shared_parts(config)
        self.layers = nn.ModuleList(
            Block(config, layer, self.shared_router, self.elementwise, before)
            for layer in range(config.layers)
        )
        self.norm = RMSNorm(D, config.norm_epsilon, self.elementwise) if modern else nn.Identity()
        before("lm_head")
        self.lm_head = nn.Linear(D, V, bias=not modern)
        if modern:
            nn.init.normal_(self.lm_head.weight, std=0.02)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        tables = rotary_tables(config) if modern else (sinusoids(config),)
        for name, table in zip(
            ("rotary_cos", "rotary_sin") if modern else ("sinusoids",), tables, strict=True
        ):
            self.register_buffer(name, table, persistent=False)

    def forward(
        self,
        ids_BL: Tensor,
        mask_BL: Tensor | None = None,
        targets_BL: Tensor | None = None,
        consume: Consume | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """Targets stand where their predictions are made (ids moved by one), -100 where there is none.

        `consume` gets every layer's Routing, without its tokens, as the pass goes on. With a `cache` the ids
        go on where the
        last pass over it stopped.
        """
        start, length = 0 if cache is None else cache.length, ids_BL.shape[1]
        if start + length > self.config.max_positions:
            raise BadInput(
                f"{start + length} tokens are more than the model's {self.config.max_positions} "
                "positions; cut the text, or train with a larger max_positions"
            )
        mask_T = torch.ones_like(ids_BL, dtype=torch.bool) if mask_BL is None else mask_BL.bool()
        ids_T, mask_T = ids_BL.flatten(), mask_T.flatten()
        x_BLD, rotary = self.embedded(ids_BL, start)
        carried_TR: Tensor | None = None
        decided: list[Routed] = []
        for layer, block in enumerate(self.blocks):
            x_BLD, routed = block(x_BLD, ids_T, mask_T, rotary, cache, carried_TR)
            carried_TR = routed.carried_TR
            decided.append(routed)
            if consume is not None:
                consume(to_routing(routed, layer, f"layers.{layer}.mlp", block.mlp.n_experts))
        x_BLD = self.norm(x_BLD)
        logits_BLV = self.lm_head(x_BLD)
        if targets_BL is None:
            return Output(logits_BLV)
        losses_T = self.elementwise.token_losses(logits_BLV.flatten(0, 1), targets_BL.flatten())
        lm_loss = losses_T.sum() / (targets_BL != -100).sum().clamp(min=1)
        losses: dict[str, Tensor] = {}
        for routed in decided:
            for name, loss in routed.losses.items():
                losses[name] = losses[name] + loss if name in losses else loss
        aux_loss = sum(losses.values(), torch.zeros((), device=lm_loss.device))
        return Output(
            None,
            lm_loss + aux_loss,
            lm_loss,
            aux_loss,
            losses_T.detach().view_as(ids_BL),
            losses,
        )

    def embedded(self, ids_BL: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Embeddings, and the rotary angles of these positions; `some` has its positions added already."""
        end = start + ids_BL.shape[1]
        x_BLD = self.embed_tokens(ids_BL)
        if self.config.block == "some":
            return x_BLD * math.sqrt(self.config.d_model) + self.sinusoids[start:end].to(x_BLD.dtype), None
        # In the dtype that queries and keys will have.
        autocast = torch.is_autocast_enabled(x_BLD.device.type)
        dtype = torch.get_autocast_dtype(x_BLD.device.type) if autocast else x_BLD.dtype
        return x_BLD, (self.rotary_cos[start:end].to(dtype), self.rotary_sin[start:end].to(dtype))

    @property
    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    @property
    def routers(self) -> list[Router]:
        return [block.mlp.router for block in self.blocks]

    def routing_blocks(self) -> list[tuple[int, str, nn.Module, int]]:
        """Number, name, router and number of experts of every layer whose Routing `consume` gets."""
        return [
            (at, f"layers.{at}.mlp", block.mlp.router, block.mlp.n_experts)
            for at, block in enumerate(self.blocks)
        ]

    def after_step(self) -> None:
        """Lets every router change what it changes without gradients.

        To be called after each optimiser step.
        """
        with torch.no_grad():
            for router in self.routers:
                router.after_step()

    def new_cache(self) -> Cache:
        return Cache()

    def cast(self, dtype: torch.dtype) -> LabModel:
        """Weights in this dtype, in place, all but the routers', which compute in float32 always."""
        kept = {
            id(part) for router in [*self.routers, self.shared_router] if router for part in router.modules()
        }
        for module in self.modules():
            if id(module) not in kept:
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype)
        return self


def seeded_by_part(seed: int) -> BeforePart:
    """Every part's first weights from a seed of its own.

    Models of one seed share all parts of equal shape, whatever their routers draw.
    """

    def before(part: str) -> None:
        digest = hashlib.blake2b(f"{seed} {part}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)

    return before


@dataclass(frozen=True)
class ParameterCounts:
    total: int  # frozen ones included, buffers (keys, biases for choosing) not
    trainable: int


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Counted on the meta device: no memory, whatever the size."""
    with torch.device("meta"):
        parameters = list(LabModel(config).parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return ParameterCounts(sum(parameter.numel() for parameter in parameters), trainable)
