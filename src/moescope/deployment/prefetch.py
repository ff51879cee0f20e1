"""Prefetching: how many of a token's experts could have been named before its router ran."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moescope.deployment.caches import TOKENS_AT_ONCE, Depths, count_depths, recency
from moescope.deployment.residency import layer_sums, listed_places, rate_rows, tested_tokens
from moescope.deployment.tokens import Mask, Split, TokenTrace, map_parts, usage
from moescope.types import Array, Integers

MOST_TESTED = 2**17  # tokens per layer and half, of the previous layer's prediction
PREDICTORS = ("static", "static_in_sample", "previous_token", "previous_layer", "next_router")


def prefetch_table(
    trace: TokenTrace, splits: list[Split], advance: Callable[[int], None], jobs: int = 1
) -> pd.DataFrame:
    """Return the recall of every predictor at budgets k, 2k and 4k.

    Layer null: all layers that have one before them, so that all predictors are scored on the same.
    """
    parts = [trace.part(max(at - 1, 0), at + 1) for at in range(len(trace.layers))]
    by_layer = map_parts(partial(rank_counts, splits=splits), parts, jobs, advance)
    counts = {name: [layer[name] for layer in by_layer] for name in PREDICTORS}
    rows, most = [], max(trace.n_experts)
    chance = [np.arange(n + 1) / n for n in trace.n_experts]  # of random experts, by budget
    for budget in sorted({min(factor * trace.k, most) for factor in (1, 2, 4)}):
        for name, layers in counts.items():
            sums, budgets = [layer_sums(layer, budget) for layer in layers], [float(budget)] * len(layers)
            of_predictor = rate_rows(trace, sums, budgets, chance, {}, first=min(1, len(layers) - 1))
            facts = {"predictor": name, "budget": budget, "optimum": 1.0}
            rows += [row | facts for row in of_predictor if row["choices"]]
    unused = ["token_hit_rate", "loads_per_token", "layer_slots"]
    return pd.DataFrame(rows).rename(columns={"hit_rate": "recall"}).drop(columns=unused)


def rank_counts(trace: TokenTrace, splits: list[Split]) -> dict[str, Integers]:
    """Count the places of the chosen experts in every predictor's ranking, in the trace's last layer; the one
    before it, if there is one, predicts it."""
    at = len(trace.layers) - 1
    n, chosen_TK = trace.n_experts[at], trace.chosen_LTK[at]
    group_T, groups = trace.group_T, trace.n_groups

    def counted(place_TK: Depths, part: Mask | Integers) -> Integers:
        return count_depths(place_TK, group_T[part], groups, n)

    first_T, test_T = trace.starts()[trace.document_T], tested_tokens(splits)
    recent_TK = recency(chosen_TK, n, first_T)[0]
    follows_T = test_T & (np.arange(len(first_T)) > first_T)  # a document's first token has no previous one
    follows_T[1:] &= (chosen_TK[:-1] >= 0).any(1)
    static = [counted(listed_places(chosen_TK, n, split), split.test_T) for split in splits]
    counts = {
        "static": np.sum(static, axis=0),
        "static_in_sample": counted(listed_places(chosen_TK, n, Split(test_T, test_T)), test_T),
        "previous_token": counted(recent_TK[follows_T], follows_T),
    }
    n_before, routed_T = trace.n_experts[0], (chosen_TK >= 0).any(1)
    before_TK = trace.chosen_LTK[0] if at else np.full_like(chosen_TK, -1)
    both_T = (before_TK >= 0).any(1) & routed_T
    parts = []
    for split in splits:
        learn_T, test = split.learn_T & both_T, np.flatnonzero(split.test_T & both_T)
        test = test[:: max(-(-len(test) // MOST_TESTED), 1)]  # more would cost time and gain no digit
        pairs_EE = count_pairs(before_TK[learn_T], chosen_TK[learn_T], n_before, n)
        scores = follow_scores(pairs_EE, usage(before_TK[learn_T], n_before), usage(chosen_TK[learn_T], n))
        parts.append(counted(predicted_places(scores, before_TK[test], chosen_TK[test]), test))
    named_TX = np.full_like(chosen_TK, -1) if trace.probed_LTX is None else trace.probed_LTX[at]
    probed_T = (named_TX >= 0).any(1) & routed_T & test_T
    return counts | {
        "previous_layer": np.sum(parts, axis=0),
        "next_router": counted(named_places(named_TX[probed_T], chosen_TK[probed_T], n), probed_T),
    }


def named_places(named_TX: NDArray[np.integer], chosen_TK: NDArray[np.integer], n_experts: int) -> Depths:
    """Place of every choice in its token's list of named experts; n_experts where it is not named."""
    place_TK = np.full(chosen_TK.shape, n_experts, dtype=np.int16)
    for place, named_T in enumerate(named_TX.T):
        place_TK[chosen_TK == named_T[:, None]] = place
    return np.where(chosen_TK < 0, np.int16(-1), place_TK)


def count_pairs(
    first_TK: NDArray[np.integer], second_TK: NDArray[np.integer], n_first: int, n_second: int
) -> Integers:
    """Tokens per pair of experts, one of each side."""
    pairs = np.zeros(n_first * n_second, dtype=np.int64)
    for begin in range(0, len(first_TK), 16 * TOKENS_AT_ONCE):
        part = slice(begin, begin + 16 * TOKENS_AT_ONCE)
        one_TK, other_TK = first_TK[part].astype(np.int64), second_TK[part].astype(np.int64)
        for slot in range(first_TK.shape[1]):
            both = (one_TK[:, slot : slot + 1] >= 0) & (other_TK >= 0)
            flat = (one_TK[:, slot : slot + 1] * n_second + other_TK)[both]
            pairs += np.bincount(flat, minlength=len(pairs))
    return pairs.reshape(n_first, n_second)


def follow_scores(pairs_EE: Integers, used_E: Integers, used_next_E: Integers) -> Array:
    """Scores of the next layer's experts per expert of this layer, P(next | this); a last row of zeros.

    Where two scores are equal, the expert used more goes first, then the lower number: both far smaller than
    a difference of two probabilities.
    """
    share_EE = pairs_EE / np.maximum(used_E, 1)[:, None]
    tie_E = 1e-9 * used_next_E / max(int(used_next_E.sum()), 1) - 1e-15 * np.arange(len(used_next_E))
    return np.concatenate([share_EE + tie_E, tie_E[None]])


def predicted_places(
    scores_EE: Array, before_TK: NDArray[np.integer], chosen_TK: NDArray[np.integer]
) -> Depths:
    """Place of every choice among all experts by the summed scores of the previous layer's choices."""
    place_TK = np.full(chosen_TK.shape, -1, dtype=np.int64)
    for begin in range(0, len(chosen_TK), TOKENS_AT_ONCE):
        part = slice(begin, begin + TOKENS_AT_ONCE)
        score_TE = sum(scores_EE[before_TK[part, slot]] for slot in range(before_TK.shape[1]))
        score_ET = np.ascontiguousarray(score_TE.T)
        rows = np.arange(score_ET.shape[1])
        for slot in range(chosen_TK.shape[1]):
            expert_T = chosen_TK[part, slot].astype(np.int64)
            higher_ET = score_ET > score_ET[np.maximum(expert_T, 0), rows]
            counter = np.uint8 if len(score_ET) < 256 else np.uint16
            places_T = higher_ET.view(np.uint8).sum(0, dtype=counter).astype(np.int64)
            place_TK[part, slot] = np.where(expert_T < 0, -1, places_T)
    return place_TK
