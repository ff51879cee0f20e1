"""Replay of expert caches: for every choice, the smallest cache that would have held the expert.

LRU, LFU and Belady's optimum are stack algorithms (Mattson et al. 1970, IBM Systems Journal 9:78): a cache of
s slots always holds a subset of what one of s + 1 slots holds, so experts can be kept in one stack, and a
choice hits every cache that is larger than its expert's depth in it. One replay answers for all sizes.

The optimum is that of all policies that load an expert only when it is chosen, whatever their cache holds at
the start: it starts with the experts that are chosen first, and may leave a loaded expert out of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moescope.types import Array, Integers

Keys = NDArray[np.int16]
Depths = NDArray[np.integer]  # per token and slot; -1 where the slot is empty
LOWEST = np.int16(-2)  # of an empty place in a stack
HIGHEST = np.int16(2**15 - 1)
ABSENT = np.int16(-1)  # of an expert that is in no stack
TOKENS_AT_ONCE = 4096
FIRST_CHECK = 64  # steps, then doubled: a segment that is repeated ends where nothing changes any more
STEPS_AT_ONCE = 256
SEGMENTS = 4096  # replayed side by side
FEW_SEGMENTS = 512  # below: fewer and larger operations are faster
SHORTEST_SEGMENT = 2048  # steps
MOST_KEYS = 2**15 - 2  # that 16 bits tell apart in a segment


def count_depths(depth_TK: Depths, group_T: Integers, groups: int, most: int) -> Integers:
    """Return counts [2, group, depth] of choices, and of tokens by their deepest choice.

    The last depth is beyond the stack, which no cache holds: `most` and deeper are one class.
    """
    place_TK = np.minimum(depth_TK, most) + np.int16(1)  # 0: an empty slot
    deepest_T = place_TK[:, 0]
    for place_T in place_TK.T[1:]:
        deepest_T = np.maximum(deepest_T, place_T)
    offset_T = group_T * (most + 2)
    places = (offset_T[:, None] + place_TK).reshape(-1), offset_T + deepest_T
    counts = [np.bincount(place_X, minlength=groups * (most + 2)) for place_X in places]
    return np.stack(counts).reshape(2, groups, -1)[:, :, 1:]


def held(counts_XGD: Integers, slots: int) -> Integers:
    """Choices, and tokens with all choices, that a cache of this size holds, per group of documents."""
    return counts_XGD[:, :, : min(slots, counts_XGD.shape[2] - 1)].sum(2)


# --- LRU, directly


def recency(
    chosen_TK: NDArray[np.integer], n_experts: int, first_T: Integers | None = None
) -> tuple[Depths, Depths]:
    """Return LRU's stack depth of every choice: at the start of its token, and when it is made.

    The depth is the number of distinct experts chosen since the expert's last choice, n_experts where it was
    not chosen before (or, with `first_T`, not since that token: the first of its document). It counts the
    experts whose last choice is later, a comparison of whole columns: no replay. Times are counted from the
    first of the tokens that are compared at once, earlier ones by their order, so that 16 bits suffice.
    """
    tokens, k = chosen_TK.shape
    at_start_TK, when_made_TK = np.full((2, tokens, k), -1, dtype=np.int16)
    last_E = np.full(n_experts, -1, dtype=np.int64)
    counter = np.uint8 if n_experts < 256 else np.uint16
    at_once = max(min(TOKENS_AT_ONCE, (2**15 - 1) // k), 1)
    for begin in range(0, tokens, at_once):
        part_TK = chosen_TK[begin : begin + at_once].astype(np.int64)
        size = len(part_TK)
        filled_TK = part_TK >= 0
        times_TK = np.arange(size * k, dtype=np.int16).reshape(size, k)
        # last_ET[e, t]: when expert e was last chosen before token t
        last_ET = np.full((n_experts, size + 1), -n_experts - 1, dtype=np.int16)
        order_E = np.argsort(last_E, kind="stable")
        last_ET[order_E, 0] = np.where(last_E[order_E] < 0, -n_experts - 1, np.arange(n_experts) - n_experts)
        rows, _ = np.nonzero(filled_TK)
        last_ET[part_TK[filled_TK], rows + 1] = times_TK[filled_TK]
        np.maximum.accumulate(last_ET, axis=1, out=last_ET)
        since_T = np.zeros(size, dtype=np.int64) if first_T is None else first_T[begin : begin + size] * k
        previous_KT = last_ET[np.maximum(part_TK.T, 0), np.arange(size)]
        for slot, previous_T in enumerate(previous_KT):
            later_T = (last_ET[:, :size] > previous_T).view(np.uint8).sum(0, dtype=counter).astype(np.int16)
            # experts of earlier slots were chosen meanwhile, and are counted already if chosen since
            made_T = later_T.copy()
            for earlier, filled_T in zip(previous_KT[:slot], filled_TK.T, strict=False):
                made_T += filled_T & (earlier < previous_T)
            time_T = np.where(
                previous_T < 0, last_E[part_TK[:, slot]], begin * k + previous_T.astype(np.int64)
            )
            for depth_TK, depth_T in ((at_start_TK, later_T), (when_made_TK, made_T)):
                depth_T[time_T < since_T] = n_experts
                depth_TK[begin : begin + size, slot] = np.where(filled_TK[:, slot], depth_T, -1)
        now_E = last_ET[:, -1]
        last_E = np.where(now_E < 0, last_E, begin * k + now_E.astype(np.int64))
    return at_start_TK, when_made_TK


# --- any stack algorithm


class Neighbours(NamedTuple):
    """Per step: when the same expert came before (-1: never), when next (-1), how often it came before.

    Experts of another document count as others where documents are given.
    """

    before_S: NDArray[np.int32]
    next_S: NDArray[np.int32]
    count_S: NDArray[np.int32]


def neighbours(sequence_S: NDArray[np.integer], document_S: Integers | None = None) -> Neighbours:
    steps = len(sequence_S)
    # 16 bits are sorted in linear time
    order = np.argsort(sequence_S.astype(np.int16), kind="stable").astype(np.int32)
    new = np.ones(steps, dtype=bool)
    sorted_S = sequence_S[order]
    new[1:] = sorted_S[1:] != sorted_S[:-1]
    if document_S is not None:
        new[1:] |= document_S[order[1:]] != document_S[order[:-1]]
    before, after, count = np.full((3, steps), -1, dtype=np.int32)
    before[order[1:]] = np.where(new[1:], -1, order[:-1])
    after[order[:-1]] = np.where(new[1:], -1, order[1:])
    starts = np.flatnonzero(new).astype(np.int32)
    count[order] = np.arange(steps, dtype=np.int32) - np.repeat(starts, np.diff(np.append(starts, steps)))
    return Neighbours(before, after, count)


class Keys16(NamedTuple):
    """The priorities in R segments of L steps, as numbers that order the experts within each segment."""

    before_RL: Keys  # of the chosen expert, as it stands in the stack
    after_RL: Keys  # of the chosen expert from then on
    start_RE: Keys  # of every expert at the segment's start; ABSENT: it has none
    end_RE: Keys  # at its end


class Replay(NamedTuple):
    """One cache to replay: of the experts in it the one with the lowest priority is evicted."""

    sequence_S: NDArray[np.integer]
    n_experts: int
    known: Neighbours
    document_S: Integers | None  # given where caches start anew in every document
    keys: Callable[[Replay, int, Integers], Keys16]
    optimal: bool = False  # starts with the experts chosen first; may leave a chosen expert out


def belady(
    sequence_S: NDArray[np.integer],
    n_experts: int,
    document_S: Integers | None = None,
    known: Neighbours | None = None,
) -> Replay:
    """Belady's optimum: evict the expert whose next choice is farthest away (1966, IBM Systems Journal 5:78),
    which may be the one just loaded.

    The experts chosen first are in place at the start; with `document_S` at that of each document. `known`
    are the sequence's neighbours, where they are computed already.
    """
    known = known or neighbours(sequence_S, document_S)
    return Replay(sequence_S, n_experts, known, document_S, belady_keys, optimal=True)


def lfu(sequence_S: NDArray[np.integer], n_experts: int, document_S: Integers | None = None) -> Replay:
    """Least frequently used: evict the expert with the fewest choices, of equals the least recent.

    Counts survive eviction. With `document_S` they start anew in each document, and experts of earlier
    documents are evicted first: the same as an empty cache.
    """
    return Replay(sequence_S, n_experts, neighbours(sequence_S, document_S), document_S, lfu_keys)


def last_times(replay: Replay, length: int) -> Integers:
    """When each expert was last chosen before every segment's start and the last one's end; -1: never.

    Where caches start empty in every document: in the document that continues.
    """
    steps = len(replay.sequence_S)
    rows = -(-steps // length)
    last_RE = np.full((rows + 1, replay.n_experts), -1, dtype=np.int64)
    for row in range(rows):
        part_S = replay.sequence_S[row * length : (row + 1) * length]
        last_RE[row + 1] = last_RE[row]
        last_RE[row + 1, part_S] = np.arange(row * length, row * length + len(part_S))
    if replay.document_S is not None:
        now_R = replay.document_S[np.minimum(np.arange(rows + 1) * length, steps - 1)]
        last_RE[replay.document_S[last_RE] != now_R[:, None]] = -1
    return last_RE


def in_rows(values_S: NDArray[Any], length: int, filler: int) -> NDArray[Any]:
    """Cut a sequence into rows; the last one is filled up."""
    rest = -len(values_S) % length
    padded_S = np.pad(values_S, (0, rest), constant_values=filler) if rest else values_S
    return padded_S.reshape(-1, length)


def belady_keys(replay: Replay, length: int, last_RE: Integers) -> Keys16:
    """Next choices within the segment by their time; later ones by their order, below those."""
    n, rows, steps = replay.n_experts, len(last_RE) - 1, len(replay.sequence_S)
    next_S, never = replay.known.next_S, steps + length
    next_RE = np.where(last_RE < 0, never, next_S[last_RE])
    next_RE[(next_RE < 0) | (next_RE >= steps)] = never
    end_R = (np.arange(rows) + 1) * length
    order_RE = np.argsort(-next_RE[1:], axis=1, kind="stable")
    end_RE = np.empty((rows, n), dtype=np.int16)
    np.put_along_axis(end_RE, order_RE, np.arange(1, n + 1, dtype=np.int16)[None], axis=1)
    within_RE = next_RE[:-1] < end_R[:, None]
    # what is chosen again in a later document only is never needed: 0
    later_RE = np.where(last_RE[:-1] == last_RE[1:], end_RE, 0)
    start_RE = np.where(within_RE, n + 1 + end_R[:, None] - next_RE[:-1], later_RE).astype(np.int16)
    next_RL = in_rows(next_S, length, -1)
    outside = np.flatnonzero((next_RL < 0) | (next_RL >= end_R[:, None]))
    outside = outside[outside < steps]
    after_RL = (n + 1 + end_R[:, None] - next_RL).astype(np.int16)
    expert, row = replay.sequence_S[outside], outside // length
    lasts = last_RE[row + 1, expert] == outside
    after_RL.reshape(-1)[outside] = np.where(lasts, end_RE[row, expert], 0)
    before_RL = np.tile((n + 1 + length - np.arange(length)).astype(np.int16), (rows, 1))
    before_RL.reshape(-1)[steps:], after_RL.reshape(-1)[steps:] = ABSENT, 0
    start_RE[last_RE[:-1] < 0] = ABSENT
    end_RE[last_RE[1:] < 0] = ABSENT
    return Keys16(before_RL, after_RL, start_RE, end_RE)


def lfu_keys(replay: Replay, length: int, last_RE: Integers) -> Keys16:
    """Place of every choice, and of every expert's last one, by document, count and time in the segment."""
    n, rows, steps = replay.n_experts, len(last_RE) - 1, len(replay.sequence_S)
    priority_S = replay.known.count_S.astype(np.int64)
    if replay.document_S is not None:
        priority_S += replay.document_S * (steps + 1)
    order_RE = np.argsort(last_RE[:-1], axis=1, kind="stable")
    sorted_last_RE = np.take_along_axis(last_RE[:-1], order_RE, axis=1)
    # one number per expert and choice that sorts by priority, then time: its low bits are its column
    all_RX = np.zeros((rows, n + length), dtype=np.int64)
    all_RX[:, :n] = np.where(sorted_last_RE < 0, -1, priority_S[sorted_last_RE])
    all_RX[:, n:] = in_rows(priority_S, length, 0)
    all_RX += 1
    all_RX <<= 16
    all_RX |= np.arange(n + length)
    all_RX.sort(axis=1)
    rank_RX = np.empty(all_RX.shape, dtype=np.int16)
    columns_RX = (all_RX & 0xFFFF).astype(np.int64)
    np.put_along_axis(rank_RX, columns_RX, np.arange(n + length, dtype=np.int16)[None], axis=1)
    start_RE = np.empty((rows, n), dtype=np.int16)
    np.put_along_axis(start_RE, order_RE, rank_RX[:, :n], axis=1)
    start_RE[last_RE[:-1] < 0] = ABSENT
    begin_R = np.arange(rows) * length
    place_RE = last_RE[1:] - begin_R[:, None]
    chosen_RE = np.take_along_axis(rank_RX, n + np.maximum(place_RE, 0), axis=1)
    end_RE = np.where(place_RE >= 0, chosen_RE, start_RE)
    end_RE[last_RE[1:] < 0] = ABSENT
    place_RL = in_rows(replay.known.before_S, length, -1) - begin_R.astype(np.int32)[:, None]
    before_RL = np.take_along_axis(rank_RX, n + np.maximum(place_RL, 0), axis=1)
    outside = np.flatnonzero(place_RL < 0)
    outside = outside[outside < steps]
    carried = start_RE[outside // length, replay.sequence_S[outside]]
    before_RL.reshape(-1)[outside] = np.where(replay.known.before_S[outside] < 0, ABSENT, carried)
    before_RL.reshape(-1)[steps:] = ABSENT
    return Keys16(before_RL, np.ascontiguousarray(rank_RX[:, n:]), start_RE, end_RE)


def stack_depths(replays: list[Replay], most: int) -> list[Depths]:
    """Return the depth of every choice in its cache's stack, `most` where it is deeper or new.

    Time is cut into segments that are replayed side by side. Each starts with a guess: the last choice on
    top, the others by priority. Then segments start again from the stack that the one before ended with,
    until their stack is the one they had before at the same step: from there on nothing changes. A segment
    whose start has changed is repeated until none has, so the depths are those of one replay from beginning
    to end.
    """
    steps = [len(replay.sequence_S) for replay in replays]
    widest = max((replay.n_experts for replay in replays), default=1)
    length = max(SHORTEST_SEGMENT, -(-sum(steps) // SEGMENTS))
    length = max(min(length, max(steps, default=1), MOST_KEYS - 2 * widest), 1)
    side = Segments(replays, length, most)
    side.settle()
    depths = []
    for number, replay in enumerate(replays):
        part_RL = side.depth_RL[side.first[number] : side.first[number + 1]]
        depth_S = part_RL.reshape(-1)[: steps[number]].copy()
        if replay.optimal:  # the first s experts are in a cache of s slots from the start
            new_S = replay.known.before_S < 0
            order_S = np.cumsum(new_S, dtype=np.int32) - 1
            if replay.document_S is not None:
                order_S -= order_S[np.searchsorted(replay.document_S, replay.document_S)]  # sorted
            depth_S[new_S] = np.minimum(order_S[new_S], most)
        depths.append(depth_S)
    return depths


class Segments:
    """Segments replayed side by side: their keys, the depths, the stacks at some steps and at the end."""

    def __init__(self, replays: list[Replay], length: int, most: int) -> None:
        self.replays, self.most = replays, most
        sizes = [-(-len(replay.sequence_S) // length) for replay in replays]
        self.first = np.cumsum([0, *sizes])  # segment of each replay
        count = int(self.first[-1])
        widest = max((replay.n_experts for replay in replays), default=1)
        self.before_RL, self.after_RL = np.empty((2, count, length), dtype=np.int16)
        self.start_RE, self.end_RE = np.full((2, count, widest), ABSENT, dtype=np.int16)
        self.depth_RL = np.empty((count, length), dtype=np.uint8 if most < 256 else np.uint16)
        self.begin_MR = np.full((most, count), LOWEST, dtype=np.int16)  # stacks at the start
        self.last_MR = self.begin_MR.copy()  # and at the end
        self.always_R = np.repeat([not replay.optimal for replay in replays], sizes)  # a chosen expert enters
        for number, replay in enumerate(replays):
            if sizes[number]:
                own = slice(self.first[number], self.first[number + 1])
                last_RE = last_times(replay, length)
                keys = replay.keys(replay, length, last_RE)
                self.before_RL[own], self.after_RL[own] = keys.before_RL, keys.after_RL
                self.start_RE[own, : replay.n_experts], self.end_RE[own, : replay.n_experts] = keys[2:]
                guess_RE = np.where(last_RE[:-1] >= 0, keys.start_RE, LOWEST)
                top_R = last_RE[:-1].argmax(1)
                tops = np.take_along_axis(guess_RE, top_R[:, None], axis=1)
                if not replay.optimal:
                    np.put_along_axis(guess_RE, top_R[:, None], HIGHEST, axis=1)
                guess_RE = -np.sort(-guess_RE, axis=1)[:, :most]
                if not replay.optimal:
                    guess_RE[:, :1] = tops
                self.begin_MR[: guess_RE.shape[1], own] = guess_RE.T
        ends = {FIRST_CHECK, *range(STEPS_AT_ONCE, length, STEPS_AT_ONCE), length}
        self.ends = sorted(end for end in ends if end <= length)
        checks = [FIRST_CHECK << power for power in range(16) if FIRST_CHECK << power < length]
        self.checks = {step: np.full_like(self.begin_MR, LOWEST - 1) for step in checks if step in self.ends}

    def settle(self) -> None:
        """Replay until every segment starts as the one before ends."""
        self.begin_MR[:, self.first[:-1][np.diff(self.first) > 0]] = LOWEST
        later = np.ones(self.first[-1] + 1, dtype=bool)
        later[self.first] = False
        changed = np.arange(self.first[-1])
        while len(changed):
            self.replay(changed)
            following = changed[later[changed + 1]] + 1
            start_MR = self.carried(following)
            differs = (start_MR != self.begin_MR[:, following]).any(0)
            changed = following[differs]
            self.begin_MR[:, changed] = start_MR[:, differs]

    def carried(self, following: Integers) -> Keys:
        """The stacks that the segments before end with, in the keys of these segments."""
        found_MR = np.full((self.most, len(following)), LOWEST, dtype=np.int16)
        for begin in range(0, len(following), 256):
            own = following[begin : begin + 256]
            order_RE = np.argsort(self.end_RE[own - 1], axis=1)
            sorted_RE = np.take_along_axis(self.end_RE[own - 1], order_RE, axis=1).astype(np.int32)
            start_RE = np.take_along_axis(self.start_RE[own], order_RE, axis=1)
            offset_R = np.arange(len(own), dtype=np.int32)[:, None] * 2**16
            flat = (sorted_RE + offset_R).reshape(-1)
            wanted_RM = self.last_MR[:, own - 1].T + offset_R
            at = np.minimum(np.searchsorted(flat, wanted_RM), len(flat) - 1)
            known = (flat[at] == wanted_RM) & (self.last_MR[:, own - 1].T >= 0)
            start_RM = np.where(known, start_RE.reshape(-1)[at], LOWEST)
            found_MR[:, begin : begin + 256] = start_RM.T
        return found_MR

    def replay(self, active: Integers) -> None:
        """Replay the active segments from their stacks, as long as they differ from the last replay."""
        stack_MR = np.full((self.most + 1, len(active)), LOWEST, dtype=np.int16)
        stack_MR[:-1] = self.begin_MR[:, active]
        begin = 0
        for end in self.ends:
            part = slice(begin, end)
            depth_SR = np.empty((end - begin, len(active)), dtype=self.depth_RL.dtype)
            before_SR, after_SR = (
                np.ascontiguousarray(keys_RL[active, part].T) for keys_RL in (self.before_RL, self.after_RL)
            )
            stack_MR = replay_steps(stack_MR, before_SR, after_SR, depth_SR, self.always_R[active])
            self.depth_RL[active, part] = depth_SR.T
            if end in self.checks:
                seen_MR = self.checks[end]
                differs = (seen_MR[:, active] != stack_MR[:-1]).any(0)
                seen_MR[:, active] = stack_MR[:-1]
                active, stack_MR = active[differs], np.ascontiguousarray(stack_MR[:, differs])
                if not len(active):
                    return
            begin = end
        self.last_MR[:, active] = stack_MR[:-1]


def replay_steps(
    stack_MR: Keys, before_SR: Keys, after_SR: Keys, depth_SR: Depths, always_R: NDArray[np.bool_]
) -> Keys:
    """Make these choices in all stacks at once, write their depths, and return the new stacks.

    A chosen expert moves to the top, where it always enters the cache; else it is carried like the others.
    Going down, of the expert that is carried and the one in place the one with the higher priority stays and
    the other is carried on, until the chosen expert's old place is filled: it counts as the lowest priority,
    which carries nothing on. The last row is below the stack: what is written there is lost.
    """
    most, rows = len(stack_MR) - 1, stack_MR.shape[1]
    next_MR, equal_MR = np.empty_like(stack_MR), np.empty((most, rows), dtype=bool)
    height_MR = np.empty((most, rows), dtype=depth_SR.dtype)
    height_M = np.arange(most, 0, -1, dtype=depth_SR.dtype)[:, None]
    carried_MR, column_R = np.empty((most, rows), dtype=np.int16), np.arange(rows)
    carried_R = carried_MR[0]
    entering_SR = np.where(always_R, HIGHEST, after_SR)
    for before_R, after_R, entering_R, depth_R in zip(
        before_SR, after_SR, entering_SR, depth_SR, strict=True
    ):
        np.equal(stack_MR[:-1], before_R, out=equal_MR)
        np.multiply(equal_MR.view(np.uint8), height_M, out=height_MR)
        np.subtract(most, height_MR.sum(0, dtype=depth_SR.dtype), out=depth_R)
        place_R = depth_R.astype(np.intp)
        place_R *= rows
        place_R += column_R
        stack_MR.reshape(-1)[place_R] = LOWEST
        np.maximum(stack_MR[0], after_R, out=next_MR[0])
        np.copyto(next_MR[0], after_R, where=always_R)
        np.minimum(stack_MR[0], entering_R, out=stack_MR[0])
        if rows < FEW_SEGMENTS:
            np.minimum.accumulate(stack_MR[:-1], axis=0, out=carried_MR)
            np.maximum(carried_MR[:-1], stack_MR[1:-1], out=next_MR[1:-1])
        else:
            carried_R[:] = stack_MR[0]
            for place, following in zip(stack_MR[1:-1], next_MR[1:-1], strict=True):
                np.maximum(carried_R, place, out=following)
                np.minimum(carried_R, place, out=carried_R)
        stack_MR, next_MR = next_MR, stack_MR
    return stack_MR


def spread(depth_S: Depths, filled_TK: NDArray[np.bool_]) -> Depths:
    """Return the depths of a sequence of choices per token and slot, -1 where a slot is empty."""
    if len(depth_S) == filled_TK.size:
        return depth_S.reshape(filled_TK.shape).astype(np.int16)
    depth_TK = np.full(filled_TK.shape, -1, dtype=np.int16)
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
    budget = (slots - smallest) * sizes_L.sum() * (1 + 1e-12)
    order = np.argsort(-gains, axis=None, kind="stable")
    layer_of = order // max(most - smallest, 1)
    taken = layer_of[: int(np.searchsorted(np.cumsum(sizes_L[layer_of]), budget, side="right"))]
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
    return np.diff(np.interp(np.arange(len(hits_S)), corners, np.asarray(hits_S, dtype=float)[corners]))
