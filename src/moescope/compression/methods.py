"""The ways of choosing what goes and what joins: METHODS is the list.

A method says what it needs, and makes a plan from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from moescope.compression.merge_weights import MERGE_WEIGHTS
from moescope.compression.merging import MERGING
from moescope.compression.method import Decided, Evidence, Method, PlanSettings, rescaling_words
from moescope.compression.pruning import gate_scales, keep_best, random_scores, saliency_scores
from moescope.errors import BadInput, unknown_name
from moescope.types import Array

__all__ = ["METHODS", "Decided", "Evidence", "Method", "PlanSettings", "check_settings", "method_named"]
FOLD, TIE = "fold", "tie"


def pruned(given: Evidence, scores: Mapping[int, Array]) -> Decided:
    """The experts with the largest scores.

    And what becomes of the gates where a text has shown how they are made.
    """
    layers = keep_best(given.keep, scores, given.moe)
    scales = gate_scales(layers, given.states, given.gating)
    notes = {"gate_scale": sum(scales) / len(scales)} if scales else {}
    return Decided(layers, notes=notes, warnings=tuple(rescaling_words("pruning", scales)))


def pruning(name: str, words: str) -> Method:
    return Method(
        name,
        words,
        lambda given: pruned(given, saliency_scores(given.sums, given.keep, name)),
        ranked_by=name,
    )


METHODS = [
    pruning("frequency", "drops the experts that fewest tokens were routed to"),
    pruning("gate_weight", "drops the experts with the smallest sum of gates"),
    pruning("ean", "drops the experts with the smallest sum of output norms"),
    pruning("reap", "drops the experts with the smallest mean of gate times output norm"),
    Method(
        "random",
        "drops experts at random: the control",
        lambda given: pruned(given, random_scores(given.moe, given.settings.seed)),
        needs_text=False,
    ),
    *MERGING,
]


def method_named(name: str) -> Method:
    for method in METHODS:
        if method.name == name:
            return method
    raise unknown_name("method", name, [method.name for method in METHODS])


def check_settings(method: Method, settings: PlanSettings, written: bool) -> None:
    """Refuse choices that do not go together, before any work."""
    changed = [
        name
        for name, value in asdict(settings).items()
        if name != "seed" and value != getattr(PlanSettings(), name)
    ]
    if changed and not method.merges:
        raise BadInput(
            f"method {method.name} drops experts and merges none; leave "
            f"{changed[0].replace('_', ' ')} as it is"
        )
    for kind, given, known in (
        ("merge weights", settings.merge_weights, MERGE_WEIGHTS),
        ("router", settings.router, (FOLD, TIE)),
        (f"distance of {method.name}", settings.distance, ("default", *method.distances)),
    ):
        if given not in known:
            raise unknown_name(kind, given, list(known))
    if settings.adaptive and not method.adapts:
        raise BadInput(f"method {method.name} has no adaptive budget; use m_smoe or m_smoe_permuted")
    if written and settings.router == "tie":
        raise BadInput(
            "router tie keeps a row for every old expert, which no checkpoint format has room for; use fold"
        )
    if written and settings.adaptive:
        raise BadInput(
            "an adaptive budget gives layers different numbers of experts, and a config holds "
            "one; leave out --apply"
        )
