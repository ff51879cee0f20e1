"""No routing: one feed-forward block as wide as the experts a token would meet. The reference."""

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
        mask_T1 = inputs.mask_T[:, None]
        return Routed(torch.where(mask_T1, 0, -1), mask_T1.to(inputs.x_TD.dtype))
