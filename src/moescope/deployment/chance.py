"""Chance level of expert caches: the same policy on random routing, replayed.

Every token chooses as many experts as in the trace, uniformly and without regard to other tokens. A list
that was not learned from these choices holds slots/n of them; what LRU, LFU, Belady's rule or a list learned
on the same tokens hold depends on the order and the number of choices, so random choices are replayed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moescope.deployment.caches import belady, lfu, neighbours, recency, stack_depths
from moescope.types import Array, Integers

ENOUGH_CHOICES = 2**15  # of all repetitions together: a standard error of about 0.3 %
MOST_REPETITIONS = 256


def random_choices(filled_TK: NDArray[np.bool_], n_experts: int, generator: np.random.Generator) -> Integers:
    """Draw different experts per token, all equally likely; -1 where a slot is empty."""
    tokens, k = filled_TK.shape
    chosen_TK = np.empty((tokens, k), dtype=np.int64)
    sorted_TK = np.empty((tokens, 0), dtype=np.int64)
    for slot in range(k):
        # a number among the experts that are left, then past each smaller one that is taken
        chosen_T: Integers = generator.integers(0, max(n_experts - slot, 1), (tokens,))
        for taken_T in sorted_TK.T:
            chosen_T = chosen_T + (chosen_T >= taken_T)
        chosen_TK[:, slot] = chosen_T
        sorted_TK = np.sort(chosen_TK[:, : slot + 1], axis=1)
    return np.where(filled_TK, chosen_TK, -1)


def random_rates(
    filled_TK: NDArray[np.bool_], document_T: Integers | None, n_experts: int, most: int, seed: int
) -> dict[str, Array]:
    """Return the hit rate of every policy on random routing, for 0 to `most` slots (LRU and lists: to n).

    `document_T` is given where caches start empty in every document. Short traces are drawn repeatedly.
    """
    per_draw = max(int(filled_TK.sum()), 1)
    repetitions = min(-(-ENOUGH_CHOICES // per_draw), MOST_REPETITIONS)
    repetition_T = np.repeat(np.arange(repetitions), len(filled_TK))
    filled_TK = np.tile(filled_TK, (repetitions, 1))
    chosen_TK = random_choices(filled_TK, n_experts, np.random.default_rng(seed))
    start_T = repetition_T  # tokens of one number share a cache
    if document_T is not None:
        start_T = repetition_T * (int(document_T.max(initial=0)) + 1) + np.tile(document_T, repetitions)
    starts = np.flatnonzero(np.diff(start_T, prepend=-1))
    first_T = np.repeat(starts, np.diff(np.append(starts, len(start_T))))
    start_S = np.repeat(start_T, filled_TK.sum(1))
    sequence_S = chosen_TK[filled_TK]
    known = neighbours(sequence_S, start_S)
    replays = [
        lfu(sequence_S, n_experts, start_S, known),
        belady(sequence_S, n_experts, document_S=start_S, known=known),
    ]
    by_use, optimum = stack_depths(replays, most)
    use_RE = np.bincount(
        np.repeat(repetition_T, filled_TK.sum(1)) * n_experts + chosen_TK[filled_TK],
        minlength=repetitions * n_experts,
    ).reshape(repetitions, n_experts)
    held_E = np.sort(use_RE, axis=1)[:, ::-1].sum(0) / max(len(sequence_S), 1)
    return {
        "static": np.arange(n_experts + 1) / n_experts,
        "static_in_sample": np.concatenate([[0.0], np.cumsum(held_E)]),
        "lru": hit_rates(recency(chosen_TK, n_experts, first_T)[1][filled_TK], n_experts),
        "lfu": hit_rates(by_use, most),
        "belady": hit_rates(optimum, most),
    }


def hit_rates(depth_S: NDArray[np.integer], most: int) -> Array:
    """Share of choices that caches of 0 to `most` slots hold."""
    counts_D = np.bincount(np.minimum(depth_S, most), minlength=most + 1)[:most]
    return np.concatenate([[0.0], np.cumsum(counts_D)]) / max(len(depth_S), 1)
