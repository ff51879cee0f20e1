"""Experts by a fixed hash of the token id: the control that learns nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.errors import BadInput

if TYPE_CHECKING:
    from moescope.decoder.config import ModelConfig, Option


class Hash(Router):
    """k different experts for every token id, drawn once for each layer, gates 1/k. Roller et al. 2021,
    random hashing.

    Frequent tokens make it uneven: balance is of the vocabulary, not of the text.
    """

    name = "hash"
    learns_from_text = False
    OPTIONS: ClassVar[dict[str, Option]] = {"seed": 0}
    table_VK: Tensor

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__(config, layer, shared)
        draws = np.random.default_rng([self.options["seed"], layer])
        order_VE = draws.random((config.vocabulary, config.experts)).argsort(axis=1)
        table_VK = torch.tensor(np.ascontiguousarray(order_VE[:, : config.top_k]))
        self.register_buffer(
            "table_VK", table_VK
        )  # saved, so that no random number generator need be trusted later

    @classmethod
    def check_options(cls, options: dict[str, Any], config: ModelConfig) -> None:
        if options["seed"] < 0:
            raise BadInput(f"router {cls.name}: seed must be 0 or more, not {options['seed']}")

    def forward(self, given: RouterInput) -> Routed:
        chosen_TK = self.table_VK[given.token_ids_T].masked_fill(~given.mask_T[:, None], -1)
        gates_TK = (chosen_TK >= 0).to(given.x_TD.dtype) / self.config.top_k
        return Routed(chosen_TK, gates_TK)
