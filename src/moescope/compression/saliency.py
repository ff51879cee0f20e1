"""How much each expert matters, by what it did on a text: the scores pruning goes by, and how sure their
order is.

X_j are the tokens routed to expert j, g_j its gate on them, f_j its output without the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from moescope.compression.calibration import Sums, outputs_of_chosen
from moescope.execution.adapters import Block
from moescope.statistics import BUCKETS, FEWEST_DOCUMENTS
from moescope.types import Array, Routing

if TYPE_CHECKING:
    import pandas as pd

COUNTED = ("tokens_BE", "gate_weight_BE", "norm_BE", "gated_norm_BE")  # by group of documents and expert
RESAMPLED = 1000
CONFIDENCE = 0.95


class RoutedSums:
    """Sums over X_j, by group of documents (256 groups, by content): 1, g, ||f||, g ||f||. A `Collector`.

    f comes from the block's own experts, for whole experts at a time, with a gate of 1. Llama 4 multiplies a
    token by its gate before
    the expert: there f is the output for the token as it came, and g ||f|| is not quite what the expert
    added.
    """

    def __init__(self) -> None:
        self.layers: dict[int, dict[str, Tensor]] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        if routing.layer not in self.layers:
            shape = (BUCKETS, routing.n_experts)
            self.layers[routing.layer] = {
                name: torch.zeros(
                    shape,
                    dtype=torch.int64 if name == "tokens_BE" else torch.float64,
                    device=routing.chosen_TK.device,
                )
                for name in COUNTED
            }
        own = self.layers[routing.layer]
        for handled in outputs_of_chosen(routing, block):
            norm_N = handled.out_ND.float().norm(dim=-1).double()
            gate_N = handled.gates_N.double()
            bucket_N = torch.zeros_like(handled.at_N)
            if routing.tokens is not None:
                bucket_N = routing.tokens.bucket_T[handled.at_N]
            cell_N = bucket_N * routing.n_experts + handled.expert_N
            values = (torch.ones_like(cell_N), gate_N, norm_N, gate_N * norm_N)
            for name, value in zip(COUNTED, values, strict=True):
                own[name].view(-1).index_add_(0, cell_N, value)

    def sums(self) -> Sums:
        return {
            f"layer.{layer}.{name}": tensor.cpu()
            for layer, own in self.layers.items()
            for name, tensor in own.items()
        }


# --- scores, from sums [..., E]


def frequency(sums: Mapping[str, Array]) -> Array:
    """Number of tokens in X_j."""
    return sums["tokens_BE"].astype(np.float64)


def gate_weight(sums: Mapping[str, Array]) -> Array:
    """Sum of g_j over X_j."""
    return sums["gate_weight_BE"]


def ean(sums: Mapping[str, Array]) -> Array:
    """Sum over X_j of ||f_j||: expert activation norm (Jaiswal et al. 2025, arXiv:2504.05586)."""
    return sums["norm_BE"]


def reap(sums: Mapping[str, Array]) -> Array:
    """Mean over X_j of g_j ||f_j||, 0 where X_j is empty (Lasby et al. 2025, arXiv:2510.13999).

    A mean over few tokens is loose: look at the rank's interval beside it.
    """
    tokens = sums["tokens_BE"]
    return np.where(tokens > 0, sums["gated_norm_BE"] / np.maximum(tokens, 1), 0.0)


SALIENCIES: dict[str, Callable[[Mapping[str, Array]], Array]] = {
    "frequency": frequency,
    "gate_weight": gate_weight,
    "ean": ean,
    "reap": reap,
}


def layer_sums(sums: Sums, layer: int) -> dict[str, Array]:
    """One layer's sums by group of documents."""
    return {name: sums[f"layer.{layer}.{name}"].numpy() for name in COUNTED}


def scores(sums: Sums, layer: int, name: str) -> Array:
    """One score of every expert of a layer, over the whole text."""
    return SALIENCIES[name]({part: value.sum(0) for part, value in layer_sums(sums, layer).items()})


def rank_intervals(sums: Sums, layer: int, name: str, documents: int, seed: int) -> tuple[Array, Array]:
    """95 % intervals of each expert's rank (1: the most salient), by drawing groups of documents anew a
    thousand times.

    Percentile bootstrap; tied experts share the mean of their ranks. NaN under 20 documents.
    """
    own = layer_sums(sums, layer)
    used = own["tokens_BE"].any(1)
    n, n_experts = int(used.sum()), own["tokens_BE"].shape[1]
    if documents < FEWEST_DOCUMENTS or n < 2:
        nothing = np.full(n_experts, np.nan)
        return nothing, nothing
    drawn_NB = np.random.default_rng((seed, layer)).multinomial(n, np.full(n, 1 / n), size=RESAMPLED)
    resampled = {part: drawn_NB @ value[used] for part, value in own.items()}
    ranks_NE = stats.rankdata(-SALIENCIES[name](resampled), axis=1)
    low, high = np.quantile(ranks_NE, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], axis=0)
    return low, high


def saliency_rows(
    sums: Sums, layer_names: Mapping[int, str], ranked_by: str, documents: int, seed: int
) -> pd.DataFrame:
    """The table `saliency`.

    Every expert's sums and scores, and the interval of its rank by the score that decides.
    """
    import pandas as pd

    frames = []
    for layer, layer_name in layer_names.items():
        low, high = rank_intervals(sums, layer, ranked_by, documents, seed)
        found = {name: scores(sums, layer, name) for name in ("gate_weight", "ean", "reap")}
        tokens = scores(sums, layer, "frequency").astype(np.int64)
        frame = pd.DataFrame({"tokens": tokens, **found, "rank_low": low, "rank_high": high})
        frame.insert(0, "expert", range(len(frame)))
        frame.insert(0, "layer_name", layer_name)
        frame.insert(0, "layer", layer)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)
