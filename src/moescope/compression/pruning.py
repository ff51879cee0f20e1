"""Pruning: keep each layer's experts with the largest scores.

Scores are made from `RoutedSums`. X_j are the tokens routed to expert j, g_j its gate weight on them, f_j its
output without the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from moescope.compression.calibration import SUM_NAMES, Gating, LayerStates, Sums
from moescope.compression.folding import gate_scale
from moescope.compression.method import Evidence, Method, Proposal, rescaling_warnings
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint
from moescope.families.counts import check_counts
from moescope.families.writing import NewLayer, check_layer
from moescope.types import Array, LayerPlan

Score = Callable[[Mapping[str, Array]], Array]  # sums [..., E] -> score [..., E]


# --- scores


def frequency(sums: Mapping[str, Array]) -> Array:
    """Number of tokens in X_j."""
    return sums["tokens_BE"].astype(np.float64)


def gate_weight(sums: Mapping[str, Array]) -> Array:
    """Sum of g_j over X_j."""
    return sums["gate_sums_BE"]


def ean(sums: Mapping[str, Array]) -> Array:
    """Sum over X_j of ||f_j||: expert activation norm (Jaiswal et al. 2025, arXiv:2504.05586)."""
    return sums["norm_BE"]


def reap(sums: Mapping[str, Array]) -> Array:
    """Mean over X_j of g_j ||f_j||, 0 where X_j is empty (Lasby et al. 2025, arXiv:2510.13999).

    A mean over few tokens is imprecise: see the interval of its rank (rank_low, rank_high).
    """
    tokens = sums["tokens_BE"]
    return np.where(tokens > 0, sums["gated_norm_BE"] / np.maximum(tokens, 1), 0.0)


def random_scores(moe: MoeCheckpoint, seed: int) -> dict[int, Array]:
    """A random order of every layer's experts, independent of how many are kept."""
    return {
        layer: np.random.default_rng((seed, layer)).permutation(weights.n_experts).astype(np.float64)
        for layer, weights in moe.layers.items()
    }


def layer_sums(sums: Sums, layer: int) -> dict[str, Array]:
    """One layer's sums per bucket of documents."""
    return {name: sums[f"layer.{layer}.{name}"].numpy() for name in SUM_NAMES}


def score_experts(sums: Sums, layer: int, score: Score) -> Array:
    """The score of every expert of a layer over the whole text."""
    return np.asarray(score({name: value.sum(0) for name, value in layer_sums(sums, layer).items()}))


# --- methods


def prune_by(name: str, score: Score, summary: str) -> Method:
    """The method that keeps the experts with the largest `score`."""

    def propose(evidence: Evidence) -> Proposal:
        return prune(evidence, {layer: score_experts(evidence.sums, layer, score) for layer in evidence.keep})

    return Method(name, summary, propose, score=score)


def prune(evidence: Evidence, scores: Mapping[int, Array]) -> Proposal:
    """Keep the experts with the largest scores, and measure the gate sum where gating is known."""
    layers = keep_best(evidence.keep, scores, evidence.moe)
    scales = gate_scales(layers, evidence.states, evidence.gating)
    facts = {"gate_scale": sum(scales) / len(scales)} if scales else {}
    return Proposal(layers, facts=facts, warnings=tuple(rescaling_warnings("pruning", scales)))


def keep_best(
    keep: Mapping[int, int], scores: Mapping[int, Array], moe: MoeCheckpoint
) -> tuple[LayerPlan, ...]:
    """Each layer's experts with the largest scores, in their old order; of tied ones the first."""
    plans = []
    for layer, count in keep.items():
        best = tuple(sorted(np.argsort(-scores[layer], kind="stable")[:count].tolist()))
        groups = tuple((expert,) for expert in best)
        plans.append(LayerPlan(layer, moe.layers[layer].n_experts, groups, best, ((1.0,),) * count))
    return tuple(plans)


def gate_scales(
    layers: Sequence[LayerPlan], states: Mapping[int, LayerStates], gating: Mapping[int, Gating]
) -> list[float]:
    """Mean gate sum of a token after pruning over before, for every layer whose gating is known.

    1 where gates are renormalised. Where they are not, softmax gives the probability of the dropped experts
    to the others, so the block's output becomes larger.
    """
    scales = []
    for layer in layers:
        sample, how = states.get(layer.layer), gating.get(layer.layer)
        if sample is None or sample.logits_TE is None or how is None or not how.explains or not len(sample):
            continue
        experts = list(layer.dominants)
        bias_K = None if how.scoring.bias_E is None else how.scoring.bias_E[experts]
        top_k = min(how.top_k, len(experts))
        scales.append(gate_scale(sample.gates_TK, sample.logits_TE[:, experts], bias_K, how, top_k))
    return scales


FREQUENCY = prune_by("frequency", frequency, "drops the experts with the fewest routed tokens")
GATE_WEIGHT = prune_by("gate_weight", gate_weight, "drops the experts with the smallest sum of gate weights")
EAN = prune_by("ean", ean, "drops the experts with the smallest sum of output norms")
REAP = prune_by("reap", reap, "drops the experts with the smallest mean of gate weight times output norm")
RANDOM = Method(
    "random",
    "drops experts at random: the control",
    lambda evidence: prune(evidence, random_scores(evidence.moe, evidence.settings.seed)),
    needs_text=False,
)


# --- how many experts to keep


def keep_counts(moe: MoeCheckpoint, keep: str | int | float, merges: bool) -> dict[int, int]:
    """Layer -> number of experts to keep, from a share (0.5, 50%) or a number (4).

    Pruning must leave a token as many experts as it is routed to; merging may lower that number.
    """
    share, count = read_keep(keep)
    states = [state.kind for weights in moe.layers.values() for state in weights.router_state]
    merges = merges and "table" not in states  # a table keeps as many experts per token as before
    counts = {}
    for layer, weights in moe.layers.items():
        n = weights.n_experts
        left = count if count is not None else max(1, round(n * (share or 0)))
        if not 1 <= left <= n:
            least = 1 if merges else weights.top_k or 1
            raise BadInput(
                f"keep {keep}: layer {layer} has {n} experts; give a number from {least} to {n}, "
                "or a share such as 0.5"
            )
        if not merges and weights.top_k is not None and left < weights.top_k:
            raise BadInput(
                f"keep {keep}: leaves {left} of {n} experts in layer {layer}, but a token is routed to "
                f"{weights.top_k}; nearest possible: {weights.top_k}"
            )
        counts[layer] = left
        check_layer(moe, layer, NewLayer(range(left)))
    top_k = min((weights.top_k for weights in moe.layers.values() if weights.top_k is not None), default=None)
    lowered = min(counts.values()) if merges and top_k is not None and min(counts.values()) < top_k else None
    check_counts(moe, counts, lowered)
    return counts


def read_keep(keep: str | int | float) -> tuple[float | None, int | None]:
    """(share, None) where there is a decimal point or a percent sign, else (None, count)."""
    text = str(keep).strip()
    try:
        if not set(text) & set("%.e"):
            return None, int(text)
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise BadInput(f"keep {text!r}: give a share such as 0.5, or a number of experts such as 4") from None
    if not 0 < share <= 1:
        raise BadInput(f"keep {text}: a share is above 0 and at most 1; give 0.5, or a whole number")
    return share, None
