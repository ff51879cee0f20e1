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

Keys = NDArray[np.int32]
Depths = NDArray[np.integer]  # per token and slot; -1 where the slot is empty
LOWEST = np.iinfo(np.int32).min  # of an empty place in a stack
ABSENT = np.int32(LOWEST + 1)  # of an expert that is in no stack
TOKENS_AT_ONCE = 4096
STEPS_AT_ONCE = 256
SEGMENTS = 2048  # replayed side by side
SHORTEST_SEGMENT = 4096  # steps


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


class Neighbours(NamedTuple):
    """Per step: when the same value came before (-1: never), when next (-1), how often it came before."""

    before_S: Keys
    next_S: Keys
    count_S: Keys


def neighbours(sequence_S: Integers) -> Neighbours:
    steps = len(sequence_S)
    small = sequence_S.max(initial=0) < 2**15  # 16 bits are sorted in linear time
    order = np.argsort(sequence_S.astype(np.int16) if small else sequence_S, kind="stable").astype(np.int32)
    new = np.ones(steps, dtype=bool)
    new[1:] = sequence_S[order[1:]] != sequence_S[order[:-1]]
    before, after, count = np.full((3, steps), -1, dtype=np.int32)
    before[order[1:]] = np.where(new[1:], -1, order[:-1])
    after[order[:-1]] = np.where(new[1:], -1, order[1:])
    starts = np.flatnonzero(new)
    count[order] = np.arange(steps) - np.repeat(starts, np.diff(np.append(starts, steps)))
    return Neighbours(before, after, count)


def belady(
    sequence_S: Integers,
    n_experts: int,
    preloaded: Integers | None = None,
    known: Neighbours | None = None,
) -> Replay:
    """Belady's optimum: evict the expert whose next choice is farthest away (1966, IBM Systems Journal 5:78).

    `preloaded` are the experts that fill the cache at the start, first slot first; `known` are the sequence's
    neighbours, where they are computed already.
    """
    steps, next_S = len(sequence_S), (known or neighbours(sequence_S)).next_S
    time_S = np.arange(steps, dtype=np.int32)
    after_S = -np.where(next_S < 0, steps + n_experts + time_S, next_S).astype(np.int32)
    loaded = np.zeros(0, dtype=np.int32)
    if preloaded is not None:
        first_E = steps + np.arange(n_experts, dtype=np.int32)
        values, where = np.unique(sequence_S, return_index=True)
        first_E[values] = where
        loaded = -first_E[preloaded]
    return Replay(-time_S, after_S, loaded)


def lfu(sequence_S: Integers, document_S: Integers | None = None, known: Neighbours | None = None) -> Replay:
    """Least frequently used: evict the expert with the fewest choices, of equals the least recent.

    Counts survive eviction. With `document_S` they start anew in each document, and experts of earlier
    documents are evicted first: the same as an empty cache.
    """
    before_S, _, count_S = known or neighbours(sequence_S)
    if document_S is None:
        order = np.argsort(count_S, kind="stable")
    else:
        order = np.lexsort((count_S, document_S))
    after_S = np.empty(len(sequence_S), dtype=np.int32)  # the place in that order is the priority
    after_S[order] = np.arange(len(sequence_S), dtype=np.int32)
    return Replay(np.where(before_S < 0, ABSENT, after_S[before_S]), after_S, after_S[:0])


def stack_depths(replays: list[Replay], most: int) -> list[Depths]:
    """Return the depth of every choice in its cache's stack, `most` where it is deeper or new.

    Time is cut into segments that are replayed side by side. At first each starts with an empty stack, except
    a cache's first one. Then segments start again from the stack that the one before ended with, until their
    stack is the one they had before at the same step: from there on nothing changes. A segment whose start
    has changed is repeated until none has, so the depths are those of one replay from beginning to end.
    """
    steps = [len(replay.before_S) for replay in replays]
    length = max(min(max(SHORTEST_SEGMENT, -(-sum(steps) // SEGMENTS)), max(steps, default=1)), 1)
    segments = [
        Segment(row, begin, begin == 0)
        for row, replay in enumerate(replays)
        for begin in range(0, len(replay.before_S), length)
    ]
    side = Segments(replays, segments, length, most)
    start_MR = np.full((most, len(segments)), LOWEST, dtype=np.int32)
    for at, segment in enumerate(segments):
        if segment.first:
            loaded = replays[segment.row].preloaded[:most]
            start_MR[: len(loaded), at] = loaded
    side.replay(np.arange(len(segments)), start_MR)
    later = np.array([at for at, segment in enumerate(segments) if not segment.first], dtype=np.int64)
    while len(later):
        changed = later[(start_MR[:, later] != side.end_MR[:, later - 1]).any(0)]
        if not len(changed):
            break
        start_MR[:, changed] = side.end_MR[:, changed - 1]
        side.replay(changed, start_MR)
    found: list[Depths] = [np.empty(len(replay.before_S), dtype=np.uint16) for replay in replays]
    for at, segment in enumerate(segments):
        part = found[segment.row][segment.begin : segment.begin + length]
        part[:] = side.depth_RS[at, : len(part)]
    return found


class Segment(NamedTuple):
    row: int  # of the replays
    begin: int
    first: bool


class Segments:
    """Segments replayed side by side: the depths, the stacks at some steps and at the end."""

    def __init__(self, replays: list[Replay], segments: list[Segment], length: int, most: int) -> None:
        self.replays, self.segments, self.length, self.most = replays, segments, length, most
        self.depth_RS = np.full((len(segments), length), most, dtype=np.uint16)
        self.end_MR = np.full((most, len(segments)), LOWEST, dtype=np.int32)
        checks = [2**power for power in range(9, 32) if 2**power < length]
        self.check_CMR = {step: np.full_like(self.end_MR, LOWEST + 2) for step in checks}

    def replay(self, active: Integers, start_MR: Keys) -> None:
        """Replay the active segments from these stacks, as long as they differ from the last replay."""
        stack_MR = np.ascontiguousarray(start_MR[:, active])
        for begin in range(0, self.length, STEPS_AT_ONCE):
            end = min(begin + STEPS_AT_ONCE, self.length)
            before_SR, after_SR = self.keys(active, begin, end)
            depth_SR = np.full(before_SR.shape, self.most, dtype=np.uint16)
            stack_MR = replay_steps(stack_MR, before_SR, after_SR, depth_SR)
            self.depth_RS[active, begin:end] = depth_SR.T
            if end in self.check_CMR:
                seen_MR = self.check_CMR[end]
                differs = (seen_MR[:, active] != stack_MR).any(0)
                seen_MR[:, active] = stack_MR
                active, stack_MR = active[differs], np.ascontiguousarray(stack_MR[:, differs])
                if not len(active):
                    return
        self.end_MR[:, active] = stack_MR

    def keys(self, active: Integers, begin: int, end: int) -> tuple[Keys, Keys]:
        """Priorities before and after the choices of these steps; beyond a cache's last choice, none."""
        before_SR, after_SR = np.full((2, end - begin, len(active)), ABSENT, dtype=np.int32)
        for column, at in enumerate(active.tolist()):
            segment = self.segments[at]
            replay = self.replays[segment.row]
            part = slice(segment.begin + begin, segment.begin + end)
            size = len(replay.before_S[part])
            before_SR[:size, column], after_SR[:size, column] = replay.before_S[part], replay.after_S[part]
        return before_SR, after_SR


def replay_steps(stack_MR: Keys, before_SR: Keys, after_SR: Keys, depth_SR: Depths) -> Keys:
    """Make these choices in all stacks at once, write their depths, and return the new stacks.

    A chosen expert moves to the top. Going down from there, of the expert that is carried and the one in
    place the one with the higher priority stays and the other is carried on, until the chosen expert's old
    place is filled: it counts as the lowest priority, which carries nothing on.
    """
    rows = stack_MR.shape[1]
    next_MR, equal_MR = np.empty_like(stack_MR), np.empty(stack_MR.shape, dtype=bool)
    carried_R = np.empty(rows, dtype=np.int32)
    for before_R, after_R, depth_R in zip(before_SR, after_SR, depth_SR, strict=True):
        np.equal(stack_MR, before_R, out=equal_MR)
        found = np.flatnonzero(equal_MR)
        stack_MR.reshape(-1)[found] = LOWEST
        depth_R[found % rows] = found // rows
        next_MR[0] = after_R
        carried_R[:] = stack_MR[0]
        for place_R, next_R in zip(stack_MR[1:], next_MR[1:], strict=True):
            np.maximum(carried_R, place_R, out=next_R)
            np.minimum(carried_R, place_R, out=carried_R)
        stack_MR, next_MR = next_MR, stack_MR
    return stack_MR


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
