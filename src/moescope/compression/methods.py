"""METHODS: every compression method, one module each; and the checks of their settings."""

from __future__ import annotations

from dataclasses import asdict
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
from moescope.compression.grouping import MERGE_WEIGHTS
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
    defaults = asdict(PlanSettings())
    changed = [name for name, value in asdict(settings).items() if name != "seed" and value != defaults[name]]
    if changed and not method.merges:
        option = "--unsigned" if changed[0] == "signed" else f"--{changed[0].replace('_', '-')}"
        raise BadInput(f"method {method.name} drops experts and merges none; omit {option}")
    for kind, value, known in (
        ("merge weights", settings.merge_weights, MERGE_WEIGHTS),
        ("router", settings.router, get_args(RouterAfter)),
        (f"distance of {method.name}", settings.distance, ("default", *method.distances)),
        (f"dominant of {method.name}", settings.dominant, ("default", *method.dominants)),
    ):
        if value not in known:
            raise unknown_name(kind, value, list(known))
    if settings.adaptive and not method.adapts:
        adaptive = ", ".join(method.name for method in METHODS if method.adapts)
        raise BadInput(f"method {method.name} has no adaptive budget; use one of {adaptive}")
    if written and settings.router == "tie":
        raise BadInput(
            "router tie keeps a row per old expert, which no checkpoint format can hold; omit --apply to "
            "judge it without writing, or use --router fold"
        )
    if written and settings.adaptive:
        raise BadInput(
            "an adaptive budget gives layers different numbers of experts, but a config holds one number; "
            "omit --apply"
        )
