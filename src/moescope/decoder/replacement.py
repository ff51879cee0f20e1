"""Routers of the lab in the place of the routers of a transformers model.

Supported is every MoE block whose router `mlp.gate` returns (logits, gates, chosen experts), as most do since
transformers 5. A checkpoint with routers that transformers does not have contains a copy of this module, so
that it runs without moescope. This module therefore imports only torch, numpy and SOURCES of
`execution.replaced`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moescope.decoder.config import ModelConfig
from moescope.decoder.routers import router_class
from moescope.decoder.routers.contract import Router, RouterInput, to_routing
from moescope.types import Routing

KEY = "moescope_replaced"  # model type, and key of config.json: what `Replaced.as_dict` returns


@dataclass(frozen=True)
class Replaced:
    """The routers of a model that were replaced."""

    family: str  # model type in transformers
    model: ModelConfig  # router, its options, experts, top_k, d_model, vocabulary; the rest is not used
    blocks: tuple[tuple[int, str], ...]  # number and name of every MoE block
    scale: float = 1.0  # of all gates: what the family multiplies its own gates by

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Replaced:
        blocks = tuple((int(layer), str(name)) for layer, name in stored["blocks"])
        return cls(str(stored["family"]), ModelConfig(**stored["model"]), blocks, float(stored["scale"]))


class Passing:
    """What the routers of one model see of the current pass besides hidden states."""

    def __init__(self) -> None:
        self.ids_BL: Tensor | None = None
        self.mask_BL: Tensor | None = None
        self.carried_TR: Tensor | None = None
        self.consume: Callable[[Routing], None] | None = None

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take ids, mask and `consume` from the arguments of the decoder's forward pass."""
        kwargs = dict(kwargs)
        self.consume, self.carried_TR = kwargs.pop("consume", None), None
        self.ids_BL = args[0] if args else kwargs.get("input_ids")
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        self.mask_BL = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        return args, kwargs

    def inputs(self, router: Router, x_TD: Tensor) -> RouterInput:
        real_T = torch.ones(len(x_TD), dtype=torch.bool, device=x_TD.device)
        if self.ids_BL is None and not router.has_logits:
            raise ValueError(f"router {router.name} needs input_ids, but the model was given embeddings")
        ids_T = real_T.long() if self.ids_BL is None else self.ids_BL.reshape(-1)
        length = 0 if self.ids_BL is None else self.ids_BL.shape[1]
        if length and self.mask_BL is not None and self.mask_BL.shape[1] >= length:  # longer with a cache
            real_T = self.mask_BL[:, -length:].reshape(-1).bool()
        return RouterInput(x_TD.float(), ids_T, real_T, router.layer, self.carried_TR)


class RouterInstead(nn.Module):
    """A router of the lab that answers as the router of a transformers block does."""

    def __init__(self, router: Router, number: int, name: str, scale: float, passing: Passing):
        super().__init__()
        self.router = router
        self.number, self.block_name, self.scale, self.passing = number, name, scale, passing
        self.losses: dict[str, Tensor] = {}  # of the last pass in training

    def forward(self, hidden_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        with torch.autocast(x_TD.device.type, enabled=False):
            routed = self.router(self.passing.inputs(self.router, x_TD))
        self.passing.carried_TR, self.losses = routed.carried_TR, routed.losses
        n_experts, logits_TE = self.router.config.experts, routed.logits_TE
        if self.passing.consume is not None:
            self.passing.consume(
                replace(to_routing(routed, self.number, self.block_name, n_experts), x_TD=x_TD.detach())
            )
        if logits_TE is None:
            logits_TE = x_TD.new_zeros(len(x_TD), n_experts)
        real_TK = routed.chosen_TK >= 0
        # without this, the gradient of an empty slot may be what lay in memory
        gates_TK = torch.where(real_TK, routed.gates_TK * self.scale, 0.0).to(x_TD.dtype)
        # transformers takes the number of experts for "none of mine"
        return logits_TE, gates_TK, routed.chosen_TK.where(real_TK, n_experts).long()


def install_routers(model: nn.Module, replaced: Replaced) -> list[RouterInstead]:
    """Put new routers into the model's blocks; return them."""
    config, passing = replaced.model, Passing()
    kind = router_class(config.router)
    shared: Any = kind.shared_parts(config)
    before: Any = getattr(model, "moescope_hook", None)
    if before is not None:  # of routers that are replaced again
        before.remove()
    if shared is not None or before is not None:
        model.moescope_shared_router = shared
    installed = []
    for layer, (number, name) in enumerate(replaced.blocks):
        block: Any = model.get_submodule(name)
        block.gate = RouterInstead(kind(config, layer, shared), number, name, replaced.scale, passing)
        block.experts._is_expert_parallel = True  # some slots may be empty
        installed.append(block.gate)
    decoder: Any = getattr(model, "base_model", model)
    hook: Any = decoder.register_forward_pre_hook(passing.begin, with_kwargs=True)
    model.moescope_hook = hook
    return installed


class ReplacedRouters:
    """Mixed into a causal language model of transformers: its config names the routers to put in."""

    _keep_in_fp32_modules_strict = ("router", "moescope_shared_router")

    def __init__(self, config: Any, *more: Any, **named: Any):
        super().__init__(config, *more, **named)  # type: ignore[call-arg]
        model: Any = self
        self.routers_instead = tuple(install_routers(model, Replaced.of(getattr(config, KEY))))
