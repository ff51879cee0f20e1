"""Replay of expert caches: for every choice, the smallest cache that would have held the expert.

LRU, LFU and Belady's optimum are stack algorithms (Mattson et al. 1970, IBM Systems Journal 9:78): a cache of
s slots always holds a subset of what one of s + 1 slots holds, so experts can be kept in one stack, and a
choice hits every cache that is larger than its expert's depth in it. One replay answers for all sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moescope.types import Array, Integers

Keys = NDArray[np.int64]
Depths = NDArray[np.integer]  # per token and slot; -1 where the slot is empty
LOWEST = np.iinfo(np.int64).min
TOKENS_AT_ONCE = 4096
STEPS_AT_ONCE = 8192


class DepthCounts(NamedTuple):
    """Choices, and tokens by their deepest choice, per group of documents and depth.

    The last depth is beyond the stack: no cache holds it.
    """

    choices_GD: Integers
    tokens_GD: Integers

    def hits_G(self, slots: int, tokens: bool = False) -> Integers:
        """Choices (or tokens with all choices) that a cache of this size holds, per group of documents."""
        counts_GD = self.tokens_GD if tokens else self.choices_GD
        return counts_GD[:, : min(slots, counts_GD.shape[1] - 1)].sum(1)


def count_depths(depth_TK: Depths, group_T: Integers, groups: int, most: int) -> DepthCounts:
    """Count depths per group of documents; `most` and deeper are one class."""
    filled_TK = depth_TK >= 0
    depth_TK = np.minimum(depth_TK, most)
    flat = (group_T[:, None] * (most + 1) + depth_TK)[filled_TK]
    deepest_T = depth_TK.max(1, initial=-1)
    used_T = deepest_T >= 0
    cells = groups * (most + 1)
    return DepthCounts(
        np.bincount(flat, minlength=cells).reshape(groups, -1),
        np.bincount(group_T[used_T] * (most + 1) + deepest_T[used_T], minlength=cells).reshape(groups, -1),
    )


# --- LRU, directly


def recency(
    chosen_TK: NDArray[np.integer], n_experts: int, first_T: Integers | None = None
) -> tuple[Depths, Depths]:
    """Return LRU's stack depth of every choice: at the start of its token, and when it is made.

    The depth is the number of distinct experts chosen since the expert's last choice, n_experts where it was
    not chosen before (or, with `first_T`, not since that token: the first of its document). It counts the
    experts whose last choice is later, a comparison of whole columns: no replay.
    """
    tokens, k = chosen_TK.shape
    at_start_TK = np.full((tokens, k), -1, dtype=np.int16)
    when_made_TK = at_start_TK.copy()
    last_E = np.full(n_experts, -1, dtype=np.int64)
    counter = np.uint8 if n_experts < 256 else np.uint16
    for begin in range(0, tokens, TOKENS_AT_ONCE):
        part_TK = chosen_TK[begin : begin + TOKENS_AT_ONCE].astype(np.int64)
        size = len(part_TK)
        filled_TK = part_TK >= 0
        times_TK = (begin + np.arange(size))[:, None] * k + np.arange(k)
        # last_ET[e, t]: when expert e was last chosen before token t
        last_ET = np.full((n_experts, size + 1), -1, dtype=np.int64)
        last_ET[:, 0] = last_E
        rows, _ = np.nonzero(filled_TK)
        last_ET[part_TK[filled_TK], rows + 1] = times_TK[filled_TK]
        np.maximum.accumulate(last_ET, axis=1, out=last_ET)
        last_E = last_ET[:, -1].copy()
        since_T = np.zeros(size, dtype=np.int64) if first_T is None else first_T[begin : begin + size] * k
        previous_TK = np.where(filled_TK, last_ET[part_TK, np.arange(size)[:, None]], -1)
        for slot in range(k):
            previous_T = previous_TK[:, slot]
            later_T = (last_ET[:, :size] > previous_T).view(np.uint8).sum(0, dtype=counter).astype(np.int64)
            # experts of earlier slots were chosen meanwhile, and are counted already if chosen since
            earlier = filled_TK[:, :slot] & (previous_TK[:, :slot] < previous_T[:, None])
            new_T = previous_T < since_T
            depths = ((at_start_TK, later_T), (when_made_TK, later_T + earlier.sum(1)))
            for depth_TK, depth_T in depths:
                depth_T = np.where(new_T, n_experts, depth_T)
                depth_TK[begin : begin + size, slot] = np.where(filled_TK[:, slot], depth_T, -1)
    return at_start_TK, when_made_TK


# --- any stack algorithm


class Replay(NamedTuple):
    """One cache to replay: the priorities of the chosen experts before and after each choice.

    Of the experts in a cache the one with the lowest priority is evicted. Priorities are unique; an expert
    that was not chosen before has none in the stack.
    """

    before_S: Keys
    after_S: Keys
    preloaded: Keys  # priorities of the experts that fill the cache at the start, first slot first


def neighbours(sequence_S: Integers) -> tuple[Integers, Integers, Integers]:
    """Return, per step: when the same value came before (-1: never), when next (-1), how often before."""
    steps = len(sequence_S)
    order = np.argsort(sequence_S, kind="stable")
    new = np.ones(steps, dtype=bool)
    new[1:] = sequence_S[order[1:]] != sequence_S[order[:-1]]
    before, after = np.full(steps, -1), np.full(steps, -1)
    before[order[1:]] = np.where(new[1:], -1, order[:-1])
    after[order[:-1]] = np.where(new[1:], -1, order[1:])
    count = np.empty(steps, dtype=np.int64)
    starts = np.flatnonzero(new)
    count[order] = np.arange(steps) - np.repeat(starts, np.diff(np.append(starts, steps)))
    return before, after, count


def belady(sequence_S: Integers, n_experts: int, preloaded: Integers | None = None) -> Replay:
    """Belady's optimum: evict the expert whose next choice is farthest away (1966, IBM Systems Journal 5:78).

    `preloaded` are the experts that fill the cache at the start, first slot first.
    """
    steps = len(sequence_S)
    _, next_S, _ = neighbours(sequence_S)
    never_S = steps + n_experts + np.arange(steps)
    after_S = -np.where(next_S < 0, never_S, next_S)
    loaded = np.zeros(0, dtype=np.int64)
    if preloaded is not None:
        first_E = steps + np.arange(n_experts)
        values, where = np.unique(sequence_S, return_index=True)
        first_E[values] = where
        loaded = -first_E[preloaded]
    return Replay(-np.arange(steps), after_S, loaded)


def lfu(sequence_S: Integers, document_S: Integers | None = None) -> Replay:
    """Least frequently used: evict the expert with the fewest choices, of equals the least recent.

    Counts survive eviction. With `document_S` they start anew in each document, and experts of earlier
    documents are evicted first: the same as an empty cache.
    """
    steps = len(sequence_S)
    before_S, _, count_S = neighbours(sequence_S)
    span = steps + 1
    base_S = 0 if document_S is None else document_S * (int(count_S.max(initial=0)) + 2) * span
    keys = base_S + count_S * span + before_S
    return Replay(
        np.where(before_S < 0, LOWEST + 1, keys),
        base_S + (count_S + 1) * span + np.arange(steps),
        before_S[:0],
    )


def stack_depths(replays: list[Replay], most: int) -> list[Depths]:
    """Return the depth of every choice in its cache's stack, `most` where it is deeper or new.

    A chosen expert moves to the top. Going down from there, of the expert that is carried and the one in
    place the one with the higher priority stays and the other is carried on, until the chosen expert's old
    place is filled. The carried priority is a running minimum, so all caches take each step together.
    """
    longest = max((len(replay.before_S) for replay in replays), default=0)
    rows = len(replays)
    stack_RM = np.full((rows, most), LOWEST)
    for stack_M, replay in zip(stack_RM, replays, strict=True):
        stack_M[: len(replay.preloaded)] = replay.preloaded[:most]
    equal_RM = np.ones((rows, most + 1), dtype=bool)  # the last one catches what is not in the stack
    inside_RM, carried_RM = equal_RM[:, :most], np.empty_like(stack_RM)
    above_RM, below_RM, top_R = carried_RM[:, :-1], stack_RM[:, 1:], stack_RM[:, 0]
    found = np.full((rows, longest), most, dtype=np.uint16)
    for begin in range(0, longest, STEPS_AT_ONCE):
        end = min(begin + STEPS_AT_ONCE, longest)
        before_SR, after_SR = np.full((2, end - begin, rows), LOWEST + 1)
        for row, replay in enumerate(replays):
            part = replay.before_S[begin:end]
            before_SR[: len(part), row], after_SR[: len(part), row] = part, replay.after_S[begin:end]
        depth_SR = np.empty((end - begin, rows), dtype=np.intp)
        for before_R1, after_R, depth_R in zip(before_SR[..., None], after_SR, depth_SR, strict=True):
            np.equal(stack_RM, before_R1, out=inside_RM)
            equal_RM.argmax(1, out=depth_R)
            np.copyto(stack_RM, LOWEST, where=inside_RM)
            np.minimum.accumulate(stack_RM, axis=1, out=carried_RM)
            np.maximum(above_RM, below_RM, out=below_RM)
            np.copyto(top_R, after_R)
        found[:, begin:end] = depth_SR.T
    return [found[row, : len(replay.before_S)] for row, replay in enumerate(replays)]


def spread(depth_S: Depths, filled_TK: NDArray[np.bool_]) -> Depths:
    """Return the depths of a sequence of choices per token and slot, -1 where a slot is empty."""
    depth_TK = np.full(filled_TK.shape, -1, dtype=np.int32)
    depth_TK[filled_TK] = depth_S
    return depth_TK


# --- a global budget


def split_budget(hits_LS: Array, smallest: int, slots: int, sizes_L: Array) -> Integers:
    """Return slots per layer: a budget of `slots` per layer goes where hits per byte grow fastest.

    hits_LS[l, s] are the hits of s slots in layer l. Gains are taken on the concave hull of each curve, from
    `smallest` slots up: a step that pays later is then not hidden by one that pays nothing.
    """
    n_layers, most = hits_LS.shape[0], hits_LS.shape[1] - 1
    gains = np.stack([hull_gains(hits_S[smallest:]) for hits_S in hits_LS]) / sizes_L[:, None]
    budget = float((slots - smallest) * sizes_L.sum())
    order = np.argsort(-gains, axis=None, kind="stable")
    layer_of = order // max(most - smallest, 1)
    spent = np.cumsum(sizes_L[layer_of])
    taken = layer_of[: int(np.searchsorted(spent, budget * (1 + 1e-12), side="right"))]
    return smallest + np.bincount(taken, minlength=n_layers)


def hull_gains(hits_S: Array) -> Array:
    """Gain of every further slot on the upper concave hull of a curve."""
    corners = [0]
    for slot in range(1, len(hits_S)):
        while len(corners) > 1:
            left, middle = corners[-2:]
            if (hits_S[middle] - hits_S[left]) * (slot - left) > (hits_S[slot] - hits_S[left]) * (
                middle - left
            ):
                break
            corners.pop()
        corners.append(slot)
    hull = np.interp(np.arange(len(hits_S)), corners, np.asarray(hits_S, dtype=float)[corners])
    return np.diff(hull)
