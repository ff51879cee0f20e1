"""No routing: one feed-forward block as wide as the experts a token would meet. The reference."""

from __future__ import annotations

import torch

from moescope.decoder.config import ModelConfig
from moescope.decoder.routers.contract import Routed, Router, RouterInput


class Dense(Router):
    """Every token to the one expert there is, of width k F, gate 1: the active parameters of an MoE layer."""

    name = "dense"
    routes = False
    has_rows = False
    has_logits = False
    learns_from_text = False

    @classmethod
    def expert_shape(cls, config: ModelConfig) -> tuple[int, int]:
        return 1, config.top_k * config.d_ff

    @classmethod
    def slots_per_token(cls, config: ModelConfig) -> float:
        return 1.0

    def forward(self, inputs: RouterInput) -> Routed:
        chosen_T1 = torch.where(inputs.mask_T, 0, -1)[:, None]
        return Routed(chosen_T1, inputs.mask_T[:, None].to(inputs.x_TD.dtype))
