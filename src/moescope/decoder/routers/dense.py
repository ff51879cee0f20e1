"""No routing: one feed-forward block as wide as the experts a token would have met. The reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moescope.decoder.routers.contract import Routed, Router, RouterInput

if TYPE_CHECKING:
    from moescope.decoder.config import ModelConfig


class Dense(Router):
    """Every token to the one expert there is, of width k F, gate 1.

    The active parameters of a mixture without its choice.
    """

    name = "dense"
    learns_from_text = False

    @classmethod
    def expert_shape(cls, config: ModelConfig) -> tuple[int, int]:
        return 1, config.top_k * config.d_ff

    def forward(self, given: RouterInput) -> Routed:
        chosen_T1 = torch.where(given.mask_T, 0, -1)[:, None]
        return Routed(chosen_T1, given.mask_T[:, None].to(given.x_TD.dtype))
