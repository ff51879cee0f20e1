"""The ways of choosing what goes and what joins: METHODS is the list. A method says what it needs, and makes a plan from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from moescope.compression.plan import Fits
from moescope.compression.pruning import keep_best, random_scores, saliency_scores
from moescope.errors import BadInput, unknown_name
from moescope.families import MoeCheckpoint
from moescope.types import LayerPlan

if TYPE_CHECKING:
    from moescope.compression.calibration import Calibrated, Collector, Sums
    from moescope.compression.rerouting import Gating
    from moescope.compression.states import LayerStates
    from moescope.routing.models import TracedModel


@dataclass(frozen=True)
class PlanSettings:
    """What a user may choose about a plan, besides the method and how many experts to keep. Merging reads most of it."""

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
    reread: Callable[[Sequence[Collector]], Calibrated] | None = None  # reads the calibrating text once more


@dataclass(frozen=True)
class Decided:
    """What a method decided: the layers of a `Plan`, the arrays beside them, and what becomes of router and neurons."""

    layers: tuple[LayerPlan, ...]
    fits: Fits = field(default_factory=dict)
    matching: str = "none"
    router: str = "slice"
    top_k: int | None = None  # None: as it was
    notes: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)  # kept in the plan's settings
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """One way of compressing. `control` is the method that does as much at random."""

    name: str
    words: str
    decide: Callable[[Evidence], Decided]
    needs_text: bool = True
    merges: bool = False
    control: str = "random"
    collectors: Callable[[PlanSettings], list[Collector]] = lambda settings: []  # besides `RoutedSums`
    ranked_by: str = "reap"  # the score whose rank intervals the saliency table gives


def pruning(name: str, words: str) -> Method:
    return Method(
        name, words, lambda given: Decided(keep_best(given.keep, saliency_scores(given.sums, given.keep, name), given.moe)),
        ranked_by=name,
    )  # fmt: skip


METHODS = [
    pruning("frequency", "drops the experts that fewest tokens were routed to"),
    pruning("gate_mass", "drops the experts with the smallest sum of gates"),
    pruning("ean", "drops the experts with the smallest sum of output norms"),
    pruning("reap", "drops the experts with the smallest mean of gate times output norm"),
    Method(
        "random", "drops experts at random: the control",
        lambda given: Decided(keep_best(given.keep, random_scores(given.moe, given.settings.seed), given.moe)),
        needs_text=False,
    ),
]  # fmt: skip


def method_named(name: str) -> Method:
    for method in METHODS:
        if method.name == name:
            return method
    raise unknown_name("method", name, [method.name for method in METHODS])


def check_settings(method: Method, settings: PlanSettings, written: bool) -> None:
    """Refuse choices that do not go together, before any work."""
    changed = [
        name for name, value in asdict(settings).items() if name != "seed" and value != getattr(PlanSettings(), name)
    ]
    if changed and not method.merges:
        raise BadInput(
            f"method {method.name} drops experts and merges none; leave {changed[0].replace('_', ' ')} as it is"
        )
    if written and settings.router == "tie":
        raise BadInput("router tie keeps a row for every old expert, which no checkpoint format has room for; use fold")
    if written and settings.adaptive:
        raise BadInput(
            "an adaptive budget gives layers different numbers of experts, and a config holds one; leave out --apply"
        )
