"""Caches as anyone would write them, one choice after the other, and every schedule there is."""

from __future__ import annotations

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


def replay_belady(sequence, slots, preloaded=()):
    cache, hits = set(preloaded), []
    for time, expert in enumerate(sequence):
        hits.append(expert in cache)
        if expert not in cache and len(cache) == slots:
            rest = sequence[time:]
            cache.remove(max(cache, key=lambda cached: rest.index(cached) if cached in rest else len(rest)))
        cache.add(expert)
    return hits


def most_hits(sequence, slots, preloaded=()):
    """The most hits of any schedule: every choice of the expert to evict is tried."""
    reachable = {frozenset(preloaded): 0}
    for expert in sequence:
        following: dict[frozenset, int] = {}
        for cache, hits in reachable.items():
            if expert in cache:
                options = [(cache, hits + 1)]
            elif len(cache) < slots:
                options = [(cache | {expert}, hits)]
            else:
                options = [(cache - {evicted} | {expert}, hits) for evicted in cache]
            for state, count in options:
                following[state] = max(following.get(state, 0), count)
        reachable = following
    return max(reachable.values())


def random_tokens(generator, tokens, k, n):
    return np.array([generator.permutation(n)[:k] for _ in range(tokens)])
