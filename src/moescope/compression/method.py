"""What a way of compressing is: what it may be told, what it decides from, and what it decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moescope.compression.grouping import Grouping
from moescope.compression.plan import Fits
from moescope.families import MoeCheckpoint
from moescope.types import LayerPlan

if TYPE_CHECKING:
    from moescope.compression.calibration import SumCollector, Sums
    from moescope.compression.rerouting import Gating
    from moescope.compression.states import LayerStates
    from moescope.execution.collect import Collected
    from moescope.execution.models import TracedModel


RESCALED = 0.05  # change of the gates' sum from which on it is worth a warning


@dataclass(frozen=True)
class PlanSettings:
    """What a user may choose about a plan, besides the method and how many experts to keep.

    Merging reads most of it.
    """

    seed: int = 0
    merge_weights: str = "usage"
    distance: str = "default"
    signed: bool = True
    router: str = "fold"
    adaptive: bool = False
    sequential: bool = False


@dataclass(frozen=True)
class Evidence:
    """What a method decides from. Without a text there are weights alone: the rest is empty."""

    moe: MoeCheckpoint
    keep: Mapping[int, int]  # experts that are to be left, by layer
    settings: PlanSettings
    sums: Sums = field(default_factory=dict)  # of the method's own collectors and of `RoutedSums`
    states: Mapping[int, LayerStates] = field(default_factory=dict)
    gating: Mapping[int, Gating] = field(default_factory=dict)  # how each layer's router was seen to choose
    traced: Callable[[], TracedModel] | None = None  # gives the running model; None without a text
    reread: Callable[[Sequence[SumCollector]], Collected] | None = None  # reads the calibration text again
    like: Mapping[int, LayerPlan] = field(
        default_factory=dict
    )  # the plan whose group sizes a control is to have
    like_matching: str | None = None  # how that plan's neurons were matched; None where this is no control


@dataclass(frozen=True)
class Decided:
    """What a method decided.

    The layers of a `Plan`, the arrays beside them, and what becomes of router and neurons.
    """

    layers: tuple[LayerPlan, ...]
    fits: Fits = field(default_factory=dict)
    matching: str = "none"
    router: str = "slice"
    top_k: int | None = None  # None: as it was
    notes: Mapping[str, str | int | float | bool | None] = field(
        default_factory=dict
    )  # kept in the plan's settings
    warnings: tuple[str, ...] = ()
    groupings: Mapping[int, Grouping] = field(default_factory=dict)  # by layer: what a dendrogram shows


@dataclass(frozen=True)
class Method:
    """One way of compressing. `control` is the method that does as much at random."""

    name: str
    words: str
    decide: Callable[[Evidence], Decided]
    needs_text: bool = True
    merges: bool = False
    control: str = "random"
    collectors: Callable[[PlanSettings], list[SumCollector]] = lambda settings: []  # besides `RoutedSums`
    ranked_by: str = "reap"  # the score whose rank intervals the saliency table gives
    distances: tuple[str, ...] = ()  # by which experts may be compared; the first is the default
    adapts: bool = False  # whether layers may be given different numbers of experts


def rescaling_words(doing: str, scales: Sequence[float]) -> list[str]:
    """What to say of gates whose sum changes, from each layer's sum after over before.

    Nothing where it hardly does.
    """
    mean = sum(scales) / len(scales) if scales else 1.0
    if abs(mean - 1) <= RESCALED:
        return []
    return [
        f"this family does not renormalise gates: {doing} multiplies their sum by {mean:.3g} on average "
        f"({min(scales):.3g} to {max(scales):.3g} over layers)"
    ]
