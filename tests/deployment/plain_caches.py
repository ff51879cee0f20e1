"""Caches as anyone would write them, one choice after the other, and every schedule there is."""

from __future__ import annotations

from itertools import combinations

import numpy as np


def replay_lru(sequence, slots):
    cache, hits = {}, []
    for time, expert in enumerate(sequence):
        hits.append(expert in cache)
        if expert not in cache and len(cache) == slots:
            del cache[min(cache, key=cache.get)]
        cache[expert] = time
    return hits


def replay_lfu(sequence, slots):
    cache, counts, hits = {}, {}, []
    for time, expert in enumerate(sequence):
        hits.append(expert in cache)
        if expert not in cache and len(cache) == slots:
            del cache[min(cache, key=lambda cached: (counts[cached], cache[cached]))]
        counts[expert] = counts.get(expert, 0) + 1
        cache[expert] = time
    return hits


def replay_belady(sequence, slots):
    """The best possible: the first experts are in place, and what is needed last goes, or does not enter."""
    cache, hits = set(list(dict.fromkeys(sequence))[:slots]), []
    for time, expert in enumerate(sequence):
        hits.append(expert in cache)
        cache.add(expert)
        if len(cache) > slots:
            rest = sequence[time + 1 :]
            cache.remove(max(cache, key=lambda cached: rest.index(cached) if cached in rest else len(rest)))
    return hits


def most_hits(sequence, slots):
    """The most hits of any schedule: every start is tried, and every choice of what to leave out."""
    experts = sorted(set(sequence))
    reachable = {frozenset(start): 0 for start in combinations(experts, min(slots, len(experts)))}
    for expert in sequence:
        following: dict[frozenset, int] = {}
        for cache, hits in reachable.items():
            full = cache | {expert}
            options = [full] if len(full) <= slots else [full - {evicted} for evicted in full]
            for state in options:
                following[state] = max(following.get(state, 0), hits + (expert in cache))
        reachable = following
    return max(reachable.values())


def random_tokens(generator, tokens, k, n):
    return np.array([generator.permutation(n)[:k] for _ in range(tokens)])
