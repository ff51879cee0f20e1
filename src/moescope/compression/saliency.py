"""Sums over the tokens routed to each expert, which pruning scores are computed from.

X_j are the tokens routed to expert j, g_j its gate weight on them, f_j its output without the gate. The
scores themselves are one module each: frequency.py, gate_weight.py, ean.py, reap.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from moescope.compression.calibration import Sums, outputs_of_chosen
from moescope.execution.adapters import Block
from moescope.statistics import BUCKETS
from moescope.types import Array, Routing

SUM_NAMES = ("tokens_BE", "gate_sums_BE", "norm_BE", "gated_norm_BE")  # per bucket of documents and expert
Score = Callable[[Mapping[str, Array]], Array]  # sums [..., E] -> score [..., E]


class RoutedSums:
    """Collector of sums over X_j of 1, g, ||f|| and g ||f||, per bucket of documents (256, by content).

    f comes from the block's own experts, called with a gate of 1. Llama 4 multiplies a token by its gate
    before the expert: there f is the output for the unscaled token, and g ||f|| only approximates what the
    expert adds.
    """

    def __init__(self) -> None:
        self.layers: dict[int, dict[str, Tensor]] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        if routing.layer not in self.layers:
            shape, device = (BUCKETS, routing.n_experts), routing.chosen_TK.device
            self.layers[routing.layer] = {
                name: torch.zeros(
                    shape, dtype=torch.int64 if name == "tokens_BE" else torch.float64, device=device
                )
                for name in SUM_NAMES
            }
        totals = self.layers[routing.layer]
        for routed in outputs_of_chosen(routing, block):
            norm_N = routed.out_ND.float().norm(dim=-1).double()
            gate_N = routed.gates_N.double()
            bucket_N = torch.zeros_like(routed.token_N)
            if routing.tokens is not None:
                bucket_N = routing.tokens.bucket_T[routed.token_N]
            cell_N = bucket_N * routing.n_experts + routed.expert_N
            values = (torch.ones_like(cell_N), gate_N, norm_N, gate_N * norm_N)
            for name, value in zip(SUM_NAMES, values, strict=True):
                totals[name].view(-1).index_add_(0, cell_N, value)

    def sums(self) -> Sums:
        return {
            f"layer.{layer}.{name}": tensor.cpu()
            for layer, totals in self.layers.items()
            for name, tensor in totals.items()
        }


def layer_sums(sums: Sums, layer: int) -> dict[str, Array]:
    """One layer's sums per bucket of documents."""
    return {name: sums[f"layer.{layer}.{name}"].numpy() for name in SUM_NAMES}


def score_experts(sums: Sums, layer: int, score: Score) -> Array:
    """The score of every expert of a layer over the whole text."""
    return np.asarray(score({name: value.sum(0) for name, value in layer_sums(sums, layer).items()}))
