"""Small routers and inputs that the tests of routers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moescope.decoder.config import ModelConfig
from moescope.decoder.ranks import Ranks
from moescope.decoder.routers import Router, RouterInput, router_class


def small_config(router: str, **changes: Any) -> ModelConfig:
    """Four experts, two a token, width 16; what is no field of the config is an option of the router."""
    fields = {name: changes.pop(name) for name in list(changes) if name in ModelConfig.__dataclass_fields__}
    shape = {"d_model": 16, "layers": 2, "experts": 4, "top_k": 2, "d_ff": 8, "heads": 2}
    return ModelConfig(**{**shape, **fields}, router=router, router_options=changes)


def small_router(router: str, seed: int = 0, **changes: Any) -> Router:
    torch.manual_seed(seed)
    config = small_config(router, **changes)
    made = router_class(router)
    return made(config, 0, made.shared_parts(config))


def tokens(x_TD: Tensor, mask_T: Tensor | None = None, carried_TR: Tensor | None = None) -> RouterInput:
    real_T = torch.ones(len(x_TD), dtype=torch.bool) if mask_T is None else mask_T
    return RouterInput(x_TD, torch.arange(len(x_TD)), real_T, 0, carried_TR)


def noise(n_tokens: int, width: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(n_tokens, width, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class SecondRank(Ranks):
    """The first of two ranks, the second of which sees the same tokens."""

    world: int = 2

    def sum(self, amount: Tensor) -> Tensor:
        return amount.detach() * 2

    def sum_with_gradients(self, amount: Tensor) -> Tensor:
        return amount * 2

    def gather_rows(self, rows_T: Tensor) -> Tensor:
        return torch.cat([rows_T.detach()] * 2)
