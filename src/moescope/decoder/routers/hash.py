"""Experts by a fixed hash of the token id: the control that learns nothing."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from moescope.decoder.config import ModelConfig, Option
from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.types import Array, Integers

AT_ONCE = 2**22  # tokens x experts drawn together


class Hash(Router):
    """k different experts per token id, drawn once per layer, gates 1/k. Roller et al. 2021, random hashing.

    It balances the vocabulary, not the text: frequent tokens make the load uneven.

    Parameters
    ----------
    seed
        Seed of the table.
    of
        `token`; two controls: `previous` takes the experts of the token before, `occurrence` mixes token and
        position, so that one token meets other experts each time.
    """

    name = "hash"
    has_rows = False
    has_logits = False
    learns_from_text = False
    compression_effects: ClassVar[dict[str, str]] = {
        "slice": "Token ids of pruned experts are reassigned to the remaining experts in turn.",
        "join": "A merged expert gets the token ids of all its members.",
    }
    seed_options = ("seed",)
    state_tensors: ClassVar[dict[str, str]] = {"table_VK": "table"}
    OPTIONS: ClassVar[dict[str, Option]] = {"seed": 0, "of": "token"}
    BOUNDS: ClassVar[dict[str, tuple[str, ...]]] = {"0 or more": ("seed",)}
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"of": ("token", "previous", "occurrence")}
    table_VK: Tensor

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__(config, layer, shared)
        table_VK = torch.empty(config.vocabulary, config.top_k, dtype=torch.long)
        if not table_VK.is_meta:  # there it is only counted
            draws = np.random.default_rng([self.options["seed"], layer])
            at_once = max(AT_ONCE // config.experts, 1)
            parts = [
                lowest(draws.random((min(at_once, config.vocabulary - first), config.experts)), config.top_k)
                for first in range(0, config.vocabulary, at_once)
            ]
            table_VK = torch.tensor(np.concatenate(parts))
        # saved, so that loading does not depend on numpy's generator
        self.register_buffer("table_VK", table_VK)

    @classmethod
    def reads_context(cls, config: ModelConfig) -> bool:
        return bool(cls.checked_options(config)["of"] != "token")

    def hashed(self, inputs: RouterInput) -> Tensor:
        """Return each token's row of the table."""
        if self.options["of"] == "token":
            return inputs.token_ids_T
        if self.options["of"] == "previous":
            return self.context_of(inputs).previous_T
        return (inputs.token_ids_T * 40_503 + self.context_of(inputs).position_T * 7_919) % len(self.table_VK)

    def forward(self, inputs: RouterInput) -> Routed:
        chosen_TK = self.table_VK[self.hashed(inputs)].masked_fill(~inputs.mask_T[:, None], -1)
        return Routed(chosen_TK, (chosen_TK >= 0).to(inputs.x_TD.dtype) / self.config.top_k)


def lowest(draws_VE: Array, k: int) -> Integers:
    """Return the places of each row's k lowest numbers, in rising order."""
    places_VK = np.argpartition(draws_VE, k - 1, axis=1)[:, :k]
    order_VK = np.take_along_axis(draws_VE, places_VK, axis=1).argsort(axis=1)
    return np.take_along_axis(places_VK, order_VK, axis=1)
