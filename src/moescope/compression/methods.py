"""METHODS: every compression method."""

from __future__ import annotations

from moescope.arguments import one_of
from moescope.compression import hc_smoe, m_smoe, merging, pruning, weights_clustering
from moescope.compression.method import Method

METHODS: list[Method] = [
    pruning.FREQUENCY,
    pruning.GATE_WEIGHT,
    pruning.EAN,
    pruning.REAP,
    pruning.RANDOM,
    hc_smoe.METHOD,
    hc_smoe.PERMUTED,
    m_smoe.METHOD,
    m_smoe.PERMUTED,
    weights_clustering.METHOD,
    merging.RANDOM,
]


def method_named(name: str) -> Method:
    """Return the method of that name; an error that lists the known ones for any other."""
    by_name = {method.name: method for method in METHODS}
    return by_name[one_of("method", name, by_name)]
