"""How evenly experts are used.

Each function takes loads over the last axis: tokens an expert got, or gate weight.
"""

from __future__ import annotations

import numpy as np

from moescope.routing.metric import Metric
from moescope.types import Array


def cv(load_E: Array) -> Array:
    """Coefficient of variation: std(c, ddof 0) / mean(c)."""
    return np.asarray(divide(load_E.std(-1), load_E.mean(-1)))


def max_violation(load_E: Array) -> Array:
    """By how much the busiest expert exceeds the mean load: (max c - mean c) / mean c."""
    return np.asarray(max_over_mean(load_E) - 1)


def max_over_mean(load_E: Array) -> Array:
    """The busiest expert's load over the mean: max_violation + 1, as other tools print it."""
    return np.asarray(divide(load_E.max(-1), load_E.mean(-1)))


def gini(load_E: Array) -> Array:
    """Gini coefficient: (n + 1 - 2 sum of cumulative shares) / n, loads ascending; 0 when all are equal."""
    n = load_E.shape[-1]
    cumulative = np.cumsum(np.sort(load_E, -1), -1)
    return np.asarray((n + 1 - 2 * divide(cumulative.sum(-1), cumulative[..., -1])) / n)


def unused(load_E: Array) -> Array:
    """The share of experts that got nothing."""
    return np.asarray((load_E == 0).mean(-1))


def min_max_ratio(load_E: Array) -> Array:
    """The idlest expert's load over the busiest one's."""
    return np.asarray(divide(load_E.min(-1), load_E.max(-1)))


def load_entropy(load_E: Array) -> Array:
    """Entropy of the loads' shares in nats: -sum q log q."""
    shares = divide(load_E, load_E.sum(-1, keepdims=True))
    return np.asarray(-np.sum(shares * np.log(np.where(shares > 0, shares, 1.0)), -1))


def load_entropy_bits(load_E: Array) -> Array:
    """The same in bits."""
    return np.asarray(load_entropy(load_E) / np.log(2))


def load_entropy_share(load_E: Array) -> Array:
    """The same as a share of the most there can be: divided by log n."""
    return (
        np.asarray(load_entropy(load_E) / np.log(load_E.shape[-1]))
        if load_E.shape[-1] > 1
        else np.ones(load_E.shape[:-1])
    )


def divide(top: Array, bottom: Array) -> Array:
    """top / bottom, NaN where the bottom is 0: without tokens nothing can be said."""
    return np.asarray(
        np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom > 0)
    )


def entropy_chance(n: int, relative_std: float) -> float:
    """log n - (n - k)/(2 N k), to first order in the variance of the loads."""
    return float(np.log(n) - relative_std**2 / 2)


LOAD = [
    Metric(cv, lambda s: s.relative_std, lambda s: float(np.sqrt(max(s.n_experts / s.k - 1, 0)))),
    Metric(max_violation, lambda s: float(max_violation(s.draws).mean()), lambda s: s.n_experts / s.k - 1),
    Metric(max_over_mean, lambda s: float(max_over_mean(s.draws).mean()), lambda s: s.n_experts / s.k),
    Metric(
        gini,
        lambda s: s.relative_std * float(np.sqrt((s.n_experts - 1) / (np.pi * s.n_experts))),
        lambda s: 1 - s.k / s.n_experts,
    ),
    Metric(unused, lambda s: (1 - s.k / s.n_experts) ** s.tokens, lambda s: 1 - s.k / s.n_experts),
    Metric(
        min_max_ratio, lambda s: float(min_max_ratio(s.draws).mean()), lambda s: float(s.k >= s.n_experts)
    ),
    Metric(load_entropy, lambda s: entropy_chance(s.n_experts, s.relative_std), lambda s: float(np.log(s.k))),
    Metric(
        load_entropy_bits,
        lambda s: entropy_chance(s.n_experts, s.relative_std) / float(np.log(2)),
        lambda s: float(np.log2(s.k)),
    ),
    Metric(
        load_entropy_share,
        lambda s: (
            entropy_chance(s.n_experts, s.relative_std) / float(np.log(s.n_experts))
            if s.n_experts > 1
            else 1.0
        ),
        lambda s: float(np.log(s.k) / np.log(s.n_experts)) if s.n_experts > 1 else 1.0,
    ),
]
