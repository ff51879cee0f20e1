"""Pruning: the lowest experts of every layer go. What cannot be done is refused from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moescope.errors import BadInput
from moescope.families import MoeCheckpoint
from moescope.families.counts import check_counts
from moescope.families.writing import NewLayer, check_layer
from moescope.types import Array, LayerPlan

if TYPE_CHECKING:
    from moescope.compression.calibration import Sums
    from moescope.compression.rerouting import Gating
    from moescope.compression.states import LayerStates


def keep_counts(moe: MoeCheckpoint, keep: str | int | float, merges: bool) -> dict[int, int]:
    """How many experts each layer is left with: a share of them (0.5, 50%) or a number (4). Refuses what no
    plan could do.

    Pruning must leave a token as many experts as it goes to; merging may lower that number.
    """
    share, count = read_keep(keep)
    tables = any(state.kind == "table" for weights in moe.layers.values() for state in weights.router_state)
    merges = merges and not tables  # a table holds as many experts for every token as before
    counts = {}
    for layer, weights in moe.layers.items():
        n = weights.n_experts
        kept = count if count is not None else max(1, round(n * (share or 0)))
        if not 1 <= kept <= n:
            least = 1 if merges else weights.top_k or 1
            raise BadInput(
                f"keep {keep}: layer {layer} has {n} experts; give a number from {least} to {n}, "
                "or a share such as 0.5"
            )
        if not merges and weights.top_k is not None and kept < weights.top_k:
            raise BadInput(
                f"keep {keep}: leaves {kept} of {n} experts in layer {layer}, and a token goes "
                f"to {weights.top_k}; "
                f"nearest possible: {weights.top_k}"
            )
        counts[layer] = kept
        check_layer(moe, layer, NewLayer(range(kept)))
    top_k = min((weights.top_k for weights in moe.layers.values() if weights.top_k is not None), default=None)
    lowered = min(counts.values()) if merges and top_k is not None and min(counts.values()) < top_k else None
    check_counts(moe, counts, lowered)
    return counts


def read_keep(keep: str | int | float) -> tuple[float | None, int | None]:
    """A share or a count: what has a point or a percent sign is a share."""
    said = str(keep).strip()
    try:
        if said.endswith("%"):
            share, count = float(said[:-1]) / 100, None
        elif any(letter in said for letter in ".e"):
            share, count = float(said), None
        else:
            share, count = None, int(said)
    except ValueError:
        raise BadInput(f"keep {said!r}: give a share such as 0.5, or a number of experts such as 4") from None
    if share is not None and not 0 < share <= 1:
        raise BadInput(
            f"keep {said}: a share lies above 0 and is at most 1; give one such as 0.5, or a whole number"
        )
    return share, count


def saliency_scores(sums: Sums, layers: Mapping[int, int], name: str) -> dict[int, Array]:
    from moescope.compression.saliency import scores

    return {layer: scores(sums, layer, name) for layer in layers}


def random_scores(moe: MoeCheckpoint, seed: int) -> dict[int, Array]:
    """A random order of every layer's experts, the same for every number kept."""
    return {
        layer: np.random.default_rng((seed, layer)).permutation(weights.n_experts).astype(np.float64)
        for layer, weights in moe.layers.items()
    }


def keep_best(
    keep: Mapping[int, int], scores: Mapping[int, Array], moe: MoeCheckpoint
) -> tuple[LayerPlan, ...]:
    """Each layer's experts with the largest scores, in their old order; of tied ones the first."""
    plans = []
    for layer, count in keep.items():
        order = np.argsort(-scores[layer], kind="stable")[:count]
        kept = tuple(sorted(int(expert) for expert in order))
        plans.append(
            LayerPlan(layer, moe.layers[layer].n_experts, tuple((e,) for e in kept), kept, ((1.0,),) * count)
        )
    return tuple(plans)


def gate_scales(
    layers: Sequence[LayerPlan], states: Mapping[int, LayerStates], gating: Mapping[int, Gating]
) -> list[float]:
    """Of every layer whose way of choosing is known: mean sum of a token's gates after pruning over that
    before.

    1 where gates are divided by their sum. Where they are not, a softmax gives the probability of the dropped
    experts to the others, so
    the block's output becomes larger.
    """
    from moescope.compression.folding import gate_scale

    scales = []
    for layer in layers:
        own, how = states.get(layer.layer), gating.get(layer.layer)
        if own is None or own.logits_TE is None or how is None or not how.explains or not len(own):
            continue
        kept = list(layer.dominants)
        bias_K = None if how.scoring.bias_E is None else how.scoring.bias_E[kept]
        scales.append(
            gate_scale(own.gates_TK, own.logits_TE[:, kept], bias_K, how, min(how.top_k, len(kept)))
        )
    return scales
