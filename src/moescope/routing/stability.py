"""Whether routing stays the same: between checkpoints on one text, and from a token to the next."""

from __future__ import annotations

import warnings

import numpy as np
from scipy import stats

from moescope.routing.load import cv
from moescope.types import Array, Integers

EVEN = 3.0  # loads whose cv is below so many times its chance have no ranks worth comparing


def routing_consistency(chosen_TK: Integers, other_TK: Integers) -> float:
    """Mean over tokens of |S and S'| / k, S the experts a token chose in one checkpoint and S' in the other.

    k is the mean number of experts a token has in the two; tokens that have none in either are left out.
    """
    same_T = shared(chosen_TK, other_TK)
    size_T = ((chosen_TK >= 0).sum(1) + (other_TK >= 0).sum(1)) / 2
    there = size_T > 0
    return float((same_T[there] / size_T[there]).mean()) if there.any() else np.nan


def shared(chosen_TK: Integers, other_TK: Integers) -> Integers:
    equal = (chosen_TK[:, :, None] == other_TK[:, None, :]) & (chosen_TK[:, :, None] >= 0)
    return np.asarray(equal.sum((1, 2)))


def usage(chosen_TK: Integers, n_experts: int) -> Integers:
    return np.bincount(chosen_TK[chosen_TK >= 0], minlength=n_experts)


def expected_consistency(chosen_TK: Integers, other_TK: Integers, n_experts: int) -> float:
    """What two routers with these usages would share if they knew nothing of each other.

    Sum f f' / k, f = c/N.
    """
    tokens = len(chosen_TK)
    k = ((chosen_TK >= 0).sum() + (other_TK >= 0).sum()) / 2 / tokens if tokens else 0
    f_E, other_E = usage(chosen_TK, n_experts) / tokens, usage(other_TK, n_experts) / tokens
    return float((f_E * other_E).sum() / k) if k else np.nan


def corrected(observed: float, expected: float) -> float:
    """(o - e)/(1 - e): 0 at chance, 1 when all is the same; undefined where chance already gives 1."""
    return (observed - expected) / (1 - expected) if expected < 1 else np.nan


def top1_agreement(first_T: Integers, other_T: Integers) -> float:
    """The share of tokens with the same first choice; tokens without one in either are left out."""
    there = (first_T >= 0) & (other_T >= 0)
    return float((first_T[there] == other_T[there]).mean()) if there.any() else np.nan


def usage_sigma(shares_SE: Array) -> float:
    """Mean over experts of the standard deviation (ddof 0) of their share q over checkpoints."""
    return float(shares_SE.std(0).mean())


def rank_correlation(load_E: Array, other_E: Array) -> float:
    """Kendall's tau-b of two checkpoints' usages; NaN where one has all experts alike."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(stats.kendalltau(load_E, other_E).statistic)


def tau_is_noise(load_E: Array, tokens: int, k: float) -> bool:
    """Whether loads are so even that their ranks are noise: cv below three times its chance."""
    chance = np.sqrt(max(len(load_E) - k, 0) / (tokens * k)) if tokens and k else np.inf
    return bool(cv(np.asarray(load_E, dtype=float)) < EVEN * chance)


# --- along a text


def jaccard_chance(n_experts: int, k: int) -> float:
    """Expected Jaccard index of two random k-subsets of n.

    Sum over j of P(j shared) j/(2k - j), hypergeometric.
    """
    shared_by = np.arange(0, k + 1)
    return float((stats.hypergeom.pmf(shared_by, n_experts, k, k) * shared_by / (2 * k - shared_by)).sum())
