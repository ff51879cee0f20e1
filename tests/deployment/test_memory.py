"""Memory of deploy's tables on long traces, from allocations at a small size."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from deployment.deployment_runs import token_trace
from deployment.plain_caches import random_tokens
from moescope.deployment import prefetch, residency
from moescope.deployment.coverage import coverage_tables
from moescope.deployment.placement import Cluster, placement_table
from moescope.deployment.tokens import split_tokens

LAYER_CHOICES = 8_000_000  # a million tokens, top 8
PROCESS_BYTES = 1_000_000_000  # two processes, a trace of 0.77 GB and the libraries stay below 4 GB
TABLES = {
    # abs stands for a callback that does nothing
    "residency": lambda *known: residency.residency_tables(
        known[0], [8, 64], known[1], None, None, False, abs
    ),
    "prefetch": lambda *known: prefetch.prefetch_table(*known, abs),
    "placement": lambda *known: placement_table(*known, Cluster(8, 1, 16, 256), 0, abs),
    "coverage": lambda *known: coverage_tables(known[0], 64, 0, abs),
}


def peak_bytes(table, tokens):
    """Most memory that is allocated while a table of two layers is made."""
    chosen = [random_tokens(np.random.default_rng(layer), tokens, 8, 128) for layer in range(2)]
    trace = token_trace(chosen, np.arange(tokens) // 400, 128)
    splits = split_tokens(trace.document_T, 0)
    tracemalloc.start()
    TABLES[table](trace, splits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("table", TABLES)
def test_a_process_takes_at_most_a_gigabyte_beside_a_trace_of_a_million_tokens(table, monkeypatch):
    at_once = max(residency.CHOICES_AT_ONCE, LAYER_CHOICES) if table == "residency" else LAYER_CHOICES
    monkeypatch.setattr(residency, "CHOICES_AT_ONCE", 1)  # one layer at a time
    monkeypatch.setattr(prefetch, "TOKENS_AT_ONCE", 512)  # both sizes fill its buffer
    peak_bytes(table, 800)  # imports
    per_choice = (peak_bytes(table, 16_000) - peak_bytes(table, 8_000)) / (8_000 * 8)
    assert per_choice * at_once < PROCESS_BYTES
