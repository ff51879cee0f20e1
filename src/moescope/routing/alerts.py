"""What in a training run should make somebody look: thresholds, and alerts when they are first crossed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moescope.errors import BadInput
from moescope.routing.load_balance import max_over_mean, unused
from moescope.routing.metrics import DECISION
from moescope.routing.step_tally import Window
from moescope.types import Integers

FEWEST_LOAD = (
    10  # tokens an expert must have had by chance before loads are judged: below, some are unused by luck
)
ENTROPY = [metric.name for metric in DECISION].index("routing_entropy")
Key = tuple[int, int | None, str]  # layer, expert, kind


@dataclass(frozen=True)
class Thresholds:
    """From where on something is an alert."""

    dead_steps: int = 500  # an expert that no token chose for so many steps
    max_load: float = 5.0  # the busiest expert's load over the mean
    max_unused: float = 0.3  # the share of experts without a token
    min_entropy: float = 0.1  # of the router's probabilities, in nats

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise BadInput(f"{name} {value}: must be a number from 0")
        if self.dead_steps < 1:
            raise BadInput(f"dead_steps {self.dead_steps}: must be at least 1")


@dataclass
class Watch:
    """Which experts were last used when, and which alerts stand; `judge` gives those that are new."""

    thresholds: Thresholds
    layers: list[int]
    n_experts: list[int]
    last_used_LE: Integers
    sure: set[int] = field(
        default_factory=set
    )  # layers whose routers are built to be sure: low entropy is no news there
    standing: set[Key] = field(default_factory=set)

    @classmethod
    def begin(
        cls,
        thresholds: Thresholds,
        layers: list[int],
        n_experts: list[int],
        step: int,
        sure: Iterable[int] = (),
    ) -> Watch:
        return cls(thresholds, layers, n_experts, np.full((len(layers), max(n_experts)), step), set(sure))

    def state(self) -> dict[str, Any]:
        standing = sorted(self.standing, key=lambda key: (key[0], -1 if key[1] is None else key[1], key[2]))
        return {"last_used": self.last_used_LE.tolist(), "standing": standing}

    def restore(self, state: dict[str, Any]) -> None:
        self.last_used_LE = np.array(state["last_used"])
        self.standing = {(layer, expert, kind) for layer, expert, kind in state["standing"]}

    def judge(self, window: Window, step: int, k_L: list[int]) -> list[dict[str, Any]]:
        """The alerts that begin with these steps.

        One that stands is not repeated until it has been gone for a window.
        """
        self.last_used_LE[window.counts_LE > 0] = step
        found = {
            (layer, expert, kind): (value, threshold)
            for row, layer in enumerate(self.layers)
            for expert, kind, value, threshold in self.judge_layer(window, row, step, k_L[row])
        }
        new = [key for key in found if key not in self.standing]
        self.standing = set(found)
        return [alert(step, *key, *found[key]) for key in new]

    def judge_layer(
        self, window: Window, row: int, step: int, k: int
    ) -> Iterator[tuple[int | None, str, float | None, float | None]]:
        limits, n, tokens = self.thresholds, self.n_experts[row], int(window.tokens_L[row])
        if not tokens:
            return
        load_E = window.counts_LE[row, :n].astype(float)
        idle_E = step - self.last_used_LE[row, :n]
        for expert in np.flatnonzero(idle_E >= limits.dead_steps):
            yield int(expert), "dead", float(idle_E[expert]), float(limits.dead_steps)
        if tokens * k / n >= FEWEST_LOAD and load_E.sum():
            if (busiest := float(max_over_mean(load_E))) > limits.max_load:
                yield None, "max_load", busiest, limits.max_load
            if (idle := float(unused(load_E))) > limits.max_unused:
                yield None, "unused", idle, limits.max_unused
        decided = int(window.decided_L[row])
        entropy = window.decisions_LM[row, ENTROPY] / decided if decided else np.nan
        # of one expert there is nothing to be unsure about
        if entropy < limits.min_entropy and n > 1 and self.layers[row] not in self.sure:
            yield None, "entropy", float(entropy), limits.min_entropy
        if np.isnan(window.mass_LE[row, :n]).any() or (decided and np.isnan(entropy)):
            yield None, "nan", None, None


def alert(
    step: int, layer: int, expert: int | None, kind: str, value: float | None, threshold: float | None
) -> dict[str, Any]:
    """One row of the alerts table; the block's name is added by who knows it."""
    sentences = {
        "dead": f"no token has chosen expert {expert} for {value or 0:.0f} steps",
        "max_load": f"the busiest expert has {value or 0:.3g} times the mean load (limit {threshold})",
        "unused": f"{value or 0:.0%} of its experts have no token (limit {threshold or 0:.0%})",
        "entropy": (
            f"routing entropy is {value or 0:.3g} nats (limit {threshold}): the router is all but "
            "certain of every token"
        ),
        "nan": "gates or logits are not numbers",
    }
    message = f"step {step}, layer {layer}: {sentences[kind]}"
    return {
        "step": step,
        "layer": layer,
        "expert": expert,
        "kind": kind,
        "value": value,
        "threshold": threshold,
        "message": message,
    }
