"""What clustering sums up over a text: how alike routers see experts, and what experts give on average."""

from __future__ import annotations

import torch
from torch import Tensor

from moescope.compression.calibration import Sums, real_tokens
from moescope.execution.adapters import Block, ungated_output
from moescope.types import Routing

CHUNK = 2048  # tokens an expert is given at a time


class LogitProfiles:
    """Inner products of the experts' logit profiles over all tokens: E x E numbers a layer.

    Each token's mean logit is subtracted first: a softmax ignores it, and left in it makes all profiles look
    alike.
    """

    def __init__(self) -> None:
        self.gram: dict[int, Tensor] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.logits_TE is not None
        logits_TE = routing.logits_TE[real_tokens(routing)].double()
        centred_TE = logits_TE - logits_TE.mean(-1, keepdim=True)
        add(self.gram, routing.layer, centred_TE.T @ centred_TE)

    def sums(self) -> Sums:
        return named("logit_gram_EE", self.gram)


class ExpertMeans:
    """Sums of every expert's ungated output over all tokens, whether sent to it or not: E x D numbers a
    layer.

    Every expert is given every token, one expert and a few thousand tokens at a time: as many times a layer's
    usual work as there are
    experts for each one chosen.
    """

    def __init__(self) -> None:
        self.output: dict[int, Tensor] = {}
        self.tokens: dict[int, Tensor] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.x_TD is not None
        x_TD = routing.x_TD[real_tokens(routing)]
        total_ED = torch.zeros(routing.n_experts, x_TD.shape[1], dtype=torch.float64, device=x_TD.device)
        for part_TD in torch.split(x_TD, CHUNK):
            for expert in range(routing.n_experts):
                total_ED[expert] += ungated_output(block, part_TD, expert).sum(0, dtype=torch.float64)
        add(self.output, routing.layer, total_ED)
        add(self.tokens, routing.layer, torch.tensor(len(x_TD)))

    def sums(self) -> Sums:
        return named("output_sum_ED", self.output) | named("output_tokens", self.tokens)


def add(held: dict[int, Tensor], layer: int, more: Tensor) -> None:
    held[layer] = held[layer] + more if layer in held else more


def named(name: str, held: dict[int, Tensor]) -> Sums:
    return {f"layer.{layer}.{name}": tensor for layer, tensor in held.items()}
