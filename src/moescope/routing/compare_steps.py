"""Checkpoints against each other, on the tokens they all were sampled at."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.errors import BadInput
from moescope.routing.stability import (
    corrected,
    expected_consistency,
    rank_correlation,
    routing_consistency,
    tau_is_noise,
    top1_agreement,
    usage,
    usage_sigma,
)
from moescope.tables import TABLES
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pandas as pd


def stability_table(
    steps: list[int],
    setups: list[dict[str, Any]],
    array: Callable[[int, str], Any],
    layer_names: dict[int, str],
) -> pd.DataFrame:
    """Every pair of steps in every layer; empty for one step.

    `array(step, name)` reads what a step kept of its sample.
    """
    import pandas as pd

    rows = []
    if len(steps) > 1:
        check_same_tokens(steps, array)
        for index, layer in enumerate(setups[0]["layers"]):
            chosen = {step: np.asarray(array(step, "chosen")[index], dtype=np.int64) for step in steps}
            n_experts = setups[0]["n_experts"][index]
            rows += [
                {"layer": layer, "layer_name": layer_names[layer], **row}
                for row in layer_stability(chosen, n_experts)
            ]
    return pd.DataFrame(rows, columns=list(TABLES["stability"].columns))


def check_same_tokens(steps: list[int], array: Callable[[int, str], Any]) -> None:
    first = array(steps[0], "ids")
    for step in steps[1:]:
        if not np.array_equal(first, array(step, "ids")):
            raise BadInput(
                f"step {step} reads the text as other tokens than step {steps[0]}; trace each alone"
            )


def layer_stability(chosen: dict[int, Integers], n_experts: int) -> list[dict[str, Any]]:
    """The stability table's values for every pair of steps of one layer."""
    steps = sorted(chosen)
    loads = {step: usage(chosen[step], n_experts) for step in steps}
    shares: dict[int, Array] = {step: load / max(load.sum(), 1) for step, load in loads.items()}
    rows = []
    for a, b in combinations(steps, 2):
        both = chosen[a], chosen[b]
        first = both[0][:, :1], both[1][:, :1]
        same, agreement = routing_consistency(*both), top1_agreement(first[0][:, 0], first[1][:, 0])
        tokens = len(both[0])
        between = np.stack([shares[step] for step in steps if a <= step <= b])
        rows.append(
            {
                "step_a": a,
                "step_b": b,
                "routing_consistency": same,
                "routing_consistency_corrected": corrected(same, expected_consistency(*both, n_experts)),
                "top1_agreement": agreement,
                "top1_corrected": corrected(agreement, expected_consistency(*first, n_experts)),
                "usage_sigma": usage_sigma(between),
                "kendall_tau": rank_correlation(loads[a].astype(float), loads[b].astype(float)),
                "tau_is_noise": any(
                    tau_is_noise(loads[step].astype(float), tokens, loads[step].sum() / max(tokens, 1))
                    for step in (a, b)
                ),
                "saturation_top1": agreement if b == steps[-1] else np.nan,
                "saturation_topk": same if b == steps[-1] else np.nan,
            }
        )
    return rows
