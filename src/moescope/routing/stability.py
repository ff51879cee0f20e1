"""Stability of routing: between checkpoints on the same tokens, and from one token to the next."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.errors import BadInput
from moescope.routing.load_balance import Setting, cv, divide
from moescope.routing.tables import TABLES
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pandas as pd

EVEN = 3.0  # ranks of loads are noise where cv is below this many times its chance level


def routing_consistency(chosen_TK: Integers, other_TK: Integers) -> float:
    """Mean over tokens of |S and S'| / k, S the experts a token chose in one checkpoint and S' in the other.

    k is the token's mean number of experts in the two; tokens that have none in either are skipped.
    """
    equal = (chosen_TK[:, :, None] == other_TK[:, None, :]) & (chosen_TK[:, :, None] >= 0)
    size_T = ((chosen_TK >= 0).sum(1) + (other_TK >= 0).sum(1)) / 2
    share_T = divide(equal.sum((1, 2)), size_T)[size_T > 0]
    return float(share_T.mean()) if len(share_T) else np.nan


def usage(chosen_TK: Integers, n_experts: int) -> Integers:
    return np.bincount(chosen_TK[chosen_TK >= 0], minlength=n_experts)


def expected_consistency(chosen_TK: Integers, other_TK: Integers, n_experts: int) -> float:
    """Consistency of two independent routers with these usages: sum f f' / k, f = c/N."""
    tokens = len(chosen_TK)
    k = ((chosen_TK >= 0).sum() + (other_TK >= 0).sum()) / 2 / tokens if tokens else 0
    f_E, other_E = usage(chosen_TK, n_experts) / tokens, usage(other_TK, n_experts) / tokens
    return float((f_E * other_E).sum() / k) if k else np.nan


def corrected(observed: float, expected: float) -> float:
    """(o - e)/(1 - e): 0 at chance, 1 when all is the same; undefined where chance already gives 1."""
    return (observed - expected) / (1 - expected) if expected < 1 else np.nan


def top1_agreement(first_T: Integers, other_T: Integers) -> float:
    """Share of tokens with the same first choice; tokens without one in either are skipped."""
    there = (first_T >= 0) & (other_T >= 0)
    return float((first_T[there] == other_T[there]).mean()) if there.any() else np.nan


def usage_sigma(shares_SE: Array) -> float:
    """Mean over experts of the standard deviation (ddof 0) of their share q over checkpoints."""
    return float(shares_SE.std(0).mean())


def rank_correlation(load_E: Array, other_E: Array) -> float:
    """Kendall's tau-b of two checkpoints' usages; NaN where one uses all experts equally."""
    from scipy.stats import kendalltau

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(kendalltau(load_E, other_E).statistic)


def tau_is_noise(load_E: Array, tokens: int, k: float) -> bool:
    """Whether loads are so even that their ranks are noise: cv below three times its chance level."""
    chance = Setting(tokens, len(load_E), k).relative_std if tokens and k else np.inf
    return bool(cv(np.asarray(load_E, dtype=float)) < EVEN * chance)


def stability_table(
    steps: list[int],
    setups: list[dict[str, Any]],
    array: Callable[[int, str], Any],
    layer_names: dict[int, str],
) -> pd.DataFrame:
    """Compare every pair of steps in every layer; empty for one step.

    `array(step, name)` returns an array that was stored with the step's sample.
    """
    import pandas as pd

    rows = []
    for step in steps[1:]:
        if not np.array_equal(array(steps[0], "ids"), array(step, "ids")):
            raise BadInput(
                f"step {step} splits the text into other tokens than step {steps[0]}; trace each alone"
            )
    for index, layer in enumerate(setups[0]["layers"] if len(steps) > 1 else ()):
        chosen = {step: np.asarray(array(step, "chosen")[index], dtype=np.int64) for step in steps}
        rows += [
            {"layer": layer, "layer_name": layer_names[layer], **row}
            for row in layer_stability(chosen, setups[0]["n_experts"][index])
        ]
    return pd.DataFrame(rows, columns=list(TABLES["stability"].columns))


def layer_stability(chosen: dict[int, Integers], n_experts: int) -> list[dict[str, Any]]:
    """Return the values of the stability table for every pair of steps of one layer."""
    steps = sorted(chosen)
    loads: dict[int, Array] = {step: usage(chosen[step], n_experts).astype(float) for step in steps}
    shares = {step: load / max(load.sum(), 1) for step, load in loads.items()}
    rows = []
    for a, b in combinations(steps, 2):
        both, tokens = (chosen[a], chosen[b]), len(chosen[a])
        first = both[0][:, :1], both[1][:, :1]
        same, agreement = routing_consistency(*both), top1_agreement(first[0][:, 0], first[1][:, 0])
        same_chance, agreement_chance = (expected_consistency(*pair, n_experts) for pair in (both, first))
        noise = [tau_is_noise(loads[step], tokens, loads[step].sum() / max(tokens, 1)) for step in (a, b)]
        rows.append(
            {
                "step_a": a,
                "step_b": b,
                "routing_consistency": same,
                "routing_consistency_chance": same_chance,
                "routing_consistency_corrected": corrected(same, same_chance),
                "top1_agreement": agreement,
                "top1_chance": agreement_chance,
                "top1_corrected": corrected(agreement, agreement_chance),
                "usage_sigma": usage_sigma(np.stack([shares[step] for step in steps if a <= step <= b])),
                "kendall_tau": rank_correlation(loads[a], loads[b]),
                "tau_is_noise": any(noise),
                "saturation_top1": agreement if b == steps[-1] else np.nan,
                "saturation_topk": same if b == steps[-1] else np.nan,
            }
        )
    return rows
