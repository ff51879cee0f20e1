"""The contract of a compression method: its settings, the evidence it decides from, and its proposal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moescope.compression.plan import Fits
from moescope.families import MoeCheckpoint
from moescope.types import LayerPlan, Plan

if TYPE_CHECKING:
    from moescope.compression.calibration import Gating, LayerStates, Makers, Sums
    from moescope.compression.merging import Grouping
    from moescope.compression.pruning import Score
    from moescope.execution.models import TracedModel

RESCALED = 0.05  # relative change of the gate sum that is worth a warning


@dataclass(frozen=True)
class PlanSettings:
    """What a user may choose about a plan besides the method and the number of experts to keep."""

    seed: int = 0
    router: str = "fold"


@dataclass(frozen=True)
class Evidence:
    """What a method decides from. Without text there are weights only: the other fields are empty."""

    moe: MoeCheckpoint
    keep: Mapping[int, int]  # layer -> number of experts to keep
    settings: PlanSettings
    sums: Sums = field(default_factory=dict)  # of `RoutedSums` and of the method's own collectors
    states: Mapping[int, LayerStates] = field(default_factory=dict)
    gating: Mapping[int, Gating] = field(default_factory=dict)  # layer -> how its router was seen to choose
    traced: Callable[[], TracedModel] | None = None  # returns the running model; None without text
    control_of: Plan | None = None  # the plan whose group sizes and matching a random control copies


@dataclass(frozen=True)
class Proposal:
    """The layers of a `Plan`, the arrays beside them, and what becomes of router and neurons."""

    layers: tuple[LayerPlan, ...]
    fits: Fits = field(default_factory=dict)
    matching: str = "none"
    router: str = "slice"
    top_k: int | None = None  # None: unchanged
    facts: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)  # for plan.settings
    warnings: tuple[str, ...] = ()
    groupings: Mapping[int, Grouping] = field(default_factory=dict)  # layer -> what a dendrogram shows


@dataclass(frozen=True)
class Method:
    """One compression method, listed in `methods.METHODS`."""

    name: str
    summary: str
    propose: Callable[[Evidence], Proposal]
    needs_text: bool = True
    merges: bool = False
    control: str = "random"  # the method that does as much at random
    collectors: Makers = ()  # besides `RoutedSums`
    score: Score | None = None  # the saliency it prunes by; rank intervals use REAP where there is none
    needs_logits: bool = False


def rescaling_warnings(action: str, scales: Sequence[float]) -> list[str]:
    """A warning where the gate sum changes, from each layer's sum after over before."""
    mean = sum(scales) / len(scales) if scales else 1.0
    if abs(mean - 1) <= RESCALED:
        return []
    return [
        f"gates are not renormalised over the chosen experts (norm_topk_prob: false): {action} multiplies "
        f"their sum by {mean:.3g} on average ({min(scales):.3g} to {max(scales):.3g} over layers)"
    ]
