"""What a metric is.

A plain function named after the quantity, and what it gives by chance and at the worst.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from moescope.routing.chance import Setting


def unknown(setting: Setting) -> float:
    """For reference values that have no bound."""
    return float("nan")


class Metric(NamedTuple):
    """`chance` is the value under ideal random balanced routing.

    `collapse` the value when all tokens take the same k experts.
    """

    function: Callable[..., Any]
    chance: Callable[[Setting], float] = unknown
    collapse: Callable[[Setting], float] = unknown

    @property
    def name(self) -> str:
        return self.function.__name__
