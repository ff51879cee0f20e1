"""METHODS: every compression method, one module each; and the checks of their settings."""

from __future__ import annotations

from typing import get_args

from moescope.compression import (
    ean,
    frequency,
    gate_weight,
    hc_smoe,
    m_smoe,
    random_merge,
    random_pruning,
    reap,
    weights_clustering,
)
from moescope.compression.method import Method, PlanSettings
from moescope.compression.plan import RouterAfter
from moescope.errors import BadInput, unknown_name

METHODS: list[Method] = [
    frequency.METHOD,
    gate_weight.METHOD,
    ean.METHOD,
    reap.METHOD,
    random_pruning.METHOD,
    hc_smoe.METHOD,
    hc_smoe.PERMUTED,
    m_smoe.METHOD,
    m_smoe.PERMUTED,
    weights_clustering.METHOD,
    random_merge.METHOD,
]


def method_named(name: str) -> Method:
    for method in METHODS:
        if method.name == name:
            return method
    raise unknown_name("method", name, [method.name for method in METHODS])


def check_settings(method: Method, settings: PlanSettings, written: bool) -> None:
    """Raise for settings that the method does not have, before any work."""
    if settings.router not in get_args(RouterAfter):
        raise unknown_name("router", str(settings.router), list(get_args(RouterAfter)))
    if settings.router != "fold" and not method.merges:
        raise BadInput(f"method {method.name} drops experts and merges none; omit --router")
    if written and settings.router == "tie":
        raise BadInput(
            "router tie keeps a row per old expert, which no checkpoint format can hold; omit --apply to "
            "judge it without writing, or use --router fold"
        )
