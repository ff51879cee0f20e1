"""Whether experts are apart: which are chosen together, and how alike their router rows are."""

from __future__ import annotations

import numpy as np

from moescope.routing.load import divide
from moescope.routing.metric import Metric
from moescope.types import Array, Integers


def pair_counts(chosen_TK: Integers, n_experts: int, adjacent: bool = False) -> Array:
    """How many tokens chose both a and b, for all pairs; the diagonal holds how many chose a.

    `adjacent=True` counts only pairs that stand next to each other in rank (first with second, second with
    third), as one
    published tool does. It needs slots sorted by gate, and misses k (k - 1)/2 - (k - 1) of a token's pairs.
    """
    pairs_EE = np.zeros((n_experts, n_experts))
    k = chosen_TK.shape[1]
    for a in range(k):
        for b in range(a, k) if not adjacent else range(a, min(a + 2, k)):
            both = (chosen_TK[:, a] >= 0) & (chosen_TK[:, b] >= 0)
            np.add.at(pairs_EE, (chosen_TK[both, a], chosen_TK[both, b]), 1)
            if a != b:
                np.add.at(pairs_EE, (chosen_TK[both, b], chosen_TK[both, a]), 1)
    return pairs_EE


def coactivation(pairs_EE: Array, tokens: int) -> tuple[Array, Array]:
    """For every pair: the share of a's tokens that also chose b, and lift: that share over b's own share of
    tokens.

    lift = P(a, b) / (P(a) P(b)).
    """
    counts_E = np.diag(pairs_EE)
    share_EE = divide(pairs_EE, np.broadcast_to(counts_E[:, None], pairs_EE.shape))
    return share_EE, divide(share_EE * tokens, np.broadcast_to(counts_E[None, :], pairs_EE.shape))


def chance_lift(n_experts: int, k: float) -> float:
    """n (k - 1)/(k (n - 1)): below 1, since a token's k experts are different ones."""
    return n_experts * (k - 1) / (k * (n_experts - 1)) if n_experts > 1 else np.nan


def expert_overlap(pairs_EE: Array) -> float:
    """Mean over pairs of experts of the Jaccard index of their token sets; pairs of which neither has a token
    are left out.

    Undefined (NaN) where no token chose two experts by design, k = 1.
    """
    counts_E = np.diag(pairs_EE)
    a, b = np.triu_indices(len(pairs_EE), 1)
    union = counts_E[a] + counts_E[b] - pairs_EE[a, b]
    jaccard = divide(pairs_EE[a, b], union)
    return float(np.nanmean(jaccard)) if np.isfinite(jaccard).any() else np.nan


def overlap_floor(n_experts: int, k: float) -> float:
    """rho/(2 - rho), rho = (k - 1)/(n - 1) the chance that a token of one expert is also another's."""
    if n_experts < 2 or k <= 1:
        return np.nan
    rho = (k - 1) / (n_experts - 1)
    return rho / (2 - rho)


def overlap_collapse(n_experts: int, k: float) -> float:
    """The k used experts share all tokens; pairs with one unused expert share none.

    Pairs of unused ones do not count.
    """
    if n_experts < 2 or k <= 1:
        return np.nan
    used, mixed = k * (k - 1) / 2, k * (n_experts - k)
    return used / (used + mixed)


def normalised(rows_ED: Array) -> Array:
    return divide(rows_ED, np.broadcast_to(np.linalg.norm(rows_ED, axis=1, keepdims=True), rows_ED.shape))


def gram_orthogonality(rows_ED: Array) -> float:
    """1 - ||G - I||_F / (n sqrt 2), G the Gram matrix of normalised rows.

    Random rows already score 1 - sqrt((n - 1)/(2 n D)), 0.94 at D = 128; n > D rows cannot exceed 1 - sqrt((n
    - D)/(2 n D))
    (Welch); n equal rows score 1 - sqrt((n - 1)/(2 n)), 0.29 to 0.5 and not 0.
    """
    n = len(rows_ED)
    unit_ED = normalised(rows_ED)
    return float(1 - np.linalg.norm(unit_ED @ unit_ED.T - np.eye(n)) / (n * np.sqrt(2)))


def gram_chance(n: int, d: int) -> float:
    return float(1 - np.sqrt((n - 1) / (2 * n * d)))


def gram_best(n: int, d: int) -> float:
    """1 where the rows can all be orthogonal.

    The Welch bound where there are more of them than dimensions.
    """
    return float(1 - np.sqrt(max(n - d, 0) / (2 * n * d)))


def gram_collapse(n: int) -> float:
    return float(1 - np.sqrt((n - 1) / (2 * n)))


def router_similarity(rows_ED: Array) -> dict[str, float]:
    """Off-diagonal cosines of router rows: mean, mean of absolute values, and largest."""
    unit_ED = normalised(rows_ED)
    cosines = (unit_ED @ unit_ED.T)[np.triu_indices(len(rows_ED), 1)]
    if not len(cosines):
        return dict.fromkeys(("router_similarity", "router_similarity_abs", "router_similarity_max"), np.nan)
    return {
        "router_similarity": float(cosines.mean()),
        "router_similarity_abs": float(np.abs(cosines).mean()),
        "router_similarity_max": float(cosines.max()),
    }


def similarity_floors(n: int, d: int) -> dict[str, float]:
    """What random rows give; the largest of P = n(n - 1)/2 cosines is about sqrt(2 log P / D)."""
    pairs = n * (n - 1) / 2
    return {
        "router_similarity": 0.0,
        "router_similarity_abs": float(np.sqrt(2 / (np.pi * d))),
        "router_similarity_max": float(min(np.sqrt(2 * np.log(max(pairs, 1)) / d), 1.0)),
    }


SEPARATION = [
    Metric(
        expert_overlap,
        lambda s: overlap_floor(s.n_experts, s.k),
        lambda s: overlap_collapse(s.n_experts, s.k),
    ),
]
