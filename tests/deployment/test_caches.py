"""Cache replays against plain dict caches, brute force and hand-worked cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deployment.plain_caches import most_hits, random_tokens, replay_belady, replay_lfu, replay_lru
from moescope.deployment import caches
from moescope.deployment.caches import (
    belady,
    count_depths,
    held,
    hull_gains,
    lfu,
    recency,
    split_budget,
    spread,
    stack_depths,
)


def test_no_schedule_beats_belady_on_1000_random_traces():
    generator = np.random.default_rng(0)
    cases = [
        generator.integers(0, generator.integers(3, 7), size=generator.integers(5, 15)) for _ in range(1000)
    ]
    depths = stack_depths([belady(sequence, 6) for sequence in cases], 4)
    for sequence, depth_S in zip(cases, depths, strict=True):
        for slots in (1, 2, 3):
            assert (depth_S < slots).sum() == most_hits(sequence.tolist(), slots)


@pytest.mark.parametrize(
    ("reference", "made"), [(replay_lru, None), (replay_lfu, lfu), (replay_belady, belady)]
)
def test_one_pass_equals_a_replay_for_every_number_of_slots(reference, made):
    generator = np.random.default_rng(1)
    for n, k in ((5, 1), (8, 2), (16, 4), (300, 3)):
        chosen_TK = random_tokens(generator, 60, k, n)
        sequence = chosen_TK.reshape(-1)
        if made is None:
            depth_S = recency(chosen_TK, n)[1].reshape(-1)
        else:
            replay = made(sequence, n)
            depth_S = stack_depths([replay], n)[0]
        for slots in range(1, min(n, 20)):
            assert (depth_S < slots).tolist() == reference(sequence.tolist(), slots), (n, slots)


def test_a_short_stack_gives_the_depths_of_the_whole_one():
    generator = np.random.default_rng(2)
    sequences = [generator.integers(0, 12, size=size) for size in (50, 200, 0)]  # of different lengths
    replays = [policy(sequence, 12) for policy in (lfu, belady) for sequence in sequences]
    for short, whole in zip(stack_depths(replays, 5), stack_depths(replays, 12), strict=True):
        assert short.tolist() == np.minimum(whole, 5).tolist()


@pytest.mark.parametrize("length", [7, 100, 1100])
def test_segments_side_by_side_give_the_depths_of_one_replay(monkeypatch, length):
    generator = np.random.default_rng(5)
    popular = np.arange(1, 41) / np.arange(1, 41).sum()
    sequences = [generator.choice(40, size=size, p=popular) for size in (5000, 3000, 1)]
    sequences.append(np.repeat(np.arange(40), 100))  # an expert that comes once in a while: slow to agree
    replays = [lfu(sequence, 40) for sequence in sequences]
    replays += [belady(sequence, 40) for sequence in sequences]
    whole = stack_depths(replays, 20)
    monkeypatch.setattr(caches, "SHORTEST_SEGMENT", length)
    monkeypatch.setattr(caches, "SEGMENTS", 10**6)
    for part, one in zip(stack_depths(replays, 20), whole, strict=True):
        assert part.tolist() == one.tolist()
    for slots in (5, 15):
        for sequence, depth_S in zip(sequences[:2], whole[:2], strict=True):
            assert (depth_S < slots).tolist() == replay_lfu(sequence.tolist(), slots)
        assert (whole[4] < slots).tolist() == replay_belady(sequences[0].tolist(), slots)


def test_recency_skips_empty_slots_and_forgets_at_the_first_token_of_a_document():
    chosen_TK = np.array([[0, 1], [2, -1], [1, 0], [0, 3]])
    at_start, when_made = recency(chosen_TK, 4)
    assert at_start.tolist() == [[4, 4], [4, -1], [1, 2], [0, 4]]  # before token 2: 2, 1, 0
    assert when_made.tolist() == [[4, 4], [4, -1], [1, 2], [0, 4]]
    anew = recency(chosen_TK, 4, np.array([0, 0, 2, 2]))[1]
    assert anew.tolist() == [[4, 4], [4, -1], [4, 4], [0, 4]]


@pytest.mark.parametrize("length", [16, 2048])  # of segments: documents end within and between them
@pytest.mark.parametrize("reference", [replay_lru, replay_lfu, replay_belady])
def test_a_cold_start_per_document_is_a_new_cache_per_document(monkeypatch, reference, length):
    monkeypatch.setattr(caches, "SHORTEST_SEGMENT", length)
    monkeypatch.setattr(caches, "SEGMENTS", 10**6)
    generator = np.random.default_rng(3)
    chosen_TK = random_tokens(generator, 90, 2, 9)
    document_T = np.repeat([0, 1, 2], [20, 40, 30])
    first_T = np.repeat([0, 20, 60], [20, 40, 30])
    if reference is replay_lru:
        depth_S = recency(chosen_TK, 9, first_T)[1].reshape(-1)
    else:
        document_S = np.repeat(document_T, 2)
        policy = lfu if reference is replay_lfu else belady
        depth_S = stack_depths([policy(chosen_TK.reshape(-1), 9, document_S=document_S)], 9)[0]
    for slots in (2, 4, 6):
        parts = [
            reference(chosen_TK[document_T == number].reshape(-1).tolist(), slots) for number in range(3)
        ]
        assert (depth_S < slots).tolist() == list(itertools.chain(*parts))


def test_depths_are_counted_per_group_by_choice_and_by_deepest_choice():
    depth_TK = np.array([[0, 3], [1, -1], [-1, -1], [2, 2]])
    counts = count_depths(depth_TK, np.array([0, 0, 1, 5]), 6, 3)
    assert held(counts, 1)[0, [0, 1, 5]].tolist() == [1, 0, 0]
    assert held(counts, 3)[0, [0, 1, 5]].tolist() == [2, 0, 2]
    assert held(counts, 9)[0, [0, 1, 5]].tolist() == [2, 0, 2]  # depth 3 is beyond the stack
    assert held(counts, 2)[1, [0, 1, 5]].tolist() == [1, 0, 0]
    assert counts[1].sum() == 3  # a token without experts does not count
    assert spread(np.array([4, 5]), np.array([[True, False], [False, True]])).tolist() == [[4, -1], [-1, 5]]


def test_a_budget_goes_where_hits_grow_fastest_and_beats_an_even_split():
    curves = np.array([[0, 0, 10, 10, 10, 10], [0, 1, 2, 20, 21, 22], [0, 5, 6, 6, 6, 6]], dtype=float)
    assert hull_gains(np.array([0.0, 0, 4, 4])).tolist() == [2, 2, 0]
    chosen = split_budget(curves, 1, 2, np.ones(3))
    best = max(
        (curves[np.arange(3), list(slots)].sum(), slots)
        for slots in itertools.product(range(1, 6), repeat=3)
        if sum(slots) <= 6
    )
    assert chosen.sum() == 6
    assert curves[np.arange(3), chosen].sum() == best[0] == 35
    heavy = split_budget(curves, 1, 2, np.array([1.0, 10.0, 1.0]))  # layer 1 costs ten times as much
    assert heavy @ [1, 10, 1] <= 2 * 12
    assert heavy[0] >= 2
