"""What each expert gives on average, from a few tokens of every domain.

Run once more through the experts' own code, slot by slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moescope.execution.adapters import Block, adapter_of
from moescope.execution.capture import Capture
from moescope.execution.documents import Batch, Document
from moescope.types import Array, Integers, Routing

DOCUMENTS = 16  # looked at, all domains together
TOKENS_EACH = 64  # from their beginning: a text of 20,000 tokens then takes some 3 % longer


@dataclass
class OutputMeans:
    """Means over tokens of every expert's output before its gate, of the first documents of each domain.

    A layer hands on gates times outputs, summed; single outputs are not seen anywhere. So a few tokens (1,024
    at most) go through
    the experts once more. Which they are hangs on the order of reading, not on batches.
    """

    n_domains: int
    read: list[int] = field(default_factory=list)  # documents so far, by domain
    wanted: set[int] = field(default_factory=set)  # numbers of documents to look at
    at: Tensor | None = None  # which of the pass's tokens; None: none
    sums: dict[int, Tensor] = field(default_factory=dict)  # by layer: E x D
    tokens: dict[int, Tensor] = field(default_factory=dict)  # by layer: E

    def see(self, document: Document) -> None:
        """A document that will be read; the first ones of its domain are looked at."""
        self.read = self.read or [0] * self.n_domains
        if self.read[document.domain] < max(DOCUMENTS // self.n_domains, 1):
            self.wanted.add(document.number)
        self.read[document.domain] += 1

    def aim(self, batch: Batch, start: int, stop: int, device: str) -> None:
        """Choose the tokens to look at in a pass over columns `start` to `stop`."""
        ours = np.array([row.number in self.wanted for row in batch.rows])
        first = np.array([row.start for row in batch.rows])
        places_BL = first[:, None] + np.arange(start, stop)
        at: Integers = np.flatnonzero(
            batch.real_BL[:, start:stop] & ours[:, None] & (places_BL < TOKENS_EACH)
        )
        self.at = torch.from_numpy(at).to(device) if len(at) else None

    def add(self, routing: Routing, capture: Capture) -> None:
        if self.at is None or routing.x_TD is None or capture.hands_out:
            return  # a model that hands out its routing itself need not have experts that can be run apart
        block = next(block for block in capture.blocks if block.layer == routing.layer)
        x_TD, chosen_TK = routing.x_TD[self.at], routing.chosen_TK[self.at]
        capture.busy = True  # these passes are not the model's own
        try:
            sums_ED, tokens_E = summed_outputs(block, x_TD, chosen_TK)
        finally:
            capture.busy = False
        self.sums[routing.layer] = self.sums.get(routing.layer, 0) + sums_ED.cpu()
        self.tokens[routing.layer] = self.tokens.get(routing.layer, 0) + tokens_E.cpu()

    def means(self, layer: int) -> Array | None:
        """E x D, NaN for an expert that none of these tokens chose; None where nothing was looked at."""
        if layer not in self.sums:
            return None
        tokens_E = self.tokens[layer].double()
        found = self.sums[layer].double() / torch.where(tokens_E > 0, tokens_E, torch.nan)[:, None]
        return np.asarray(found.numpy())


def summed_outputs(block: Block, x_TD: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over tokens of each expert's output, how many tokens chose it)."""
    sums_ED = x_TD.new_zeros(block.n_experts, x_TD.shape[1], dtype=torch.float32)
    tokens_E = torch.zeros(block.n_experts, dtype=torch.int64, device=x_TD.device)
    for slot in range(chosen_TK.shape[1]):
        there = chosen_TK[:, slot] >= 0
        chosen_T, x = chosen_TK[there, slot], x_TD[there]
        if len(x):
            sums_ED.index_add_(0, chosen_T, adapter_of(block).output(block, x, chosen_T).float())
            tokens_E += torch.bincount(chosen_T, minlength=block.n_experts)
    return sums_ED, tokens_E
