"""How distinct experts are: which are chosen together, and how similar their router rows are."""

from __future__ import annotations

import numpy as np

from moescope.routing.load_balance import divide
from moescope.types import Array

FITTING_STEPS = 100  # of the weights of experts that pairs are expected by


def coactivation(pairs_EE: Array, tokens: int) -> tuple[Array, Array]:
    """Share of a's tokens that also chose b, and lift = P(a, b) / (P(a) P(b)), for every pair."""
    counts_E = np.diag(pairs_EE)
    share_EE = divide(pairs_EE, np.broadcast_to(counts_E[:, None], pairs_EE.shape))
    return share_EE, divide(share_EE * tokens, np.broadcast_to(counts_E[None, :], pairs_EE.shape))


def pair_probability(n_experts: int, pairs: float) -> float:
    """Probability that a random token chose two given experts; `pairs` is the tokens' mean of k (k - 1)."""
    return pairs / (n_experts * (n_experts - 1)) if n_experts > 1 else np.nan


def chance_lift(n_experts: int, k: float, pairs: float) -> float:
    """P(both)/P(one)^2 of random tokens, k their mean number of experts and `pairs` the mean of k (k - 1).

    n (k - 1)/(k (n - 1)) where all tokens have k experts: below 1, since the experts of a token differ.
    """
    return pair_probability(n_experts, pairs) / (k / n_experts) ** 2 if k > 0 else np.nan


def expert_overlap(pairs_EE: Array) -> float:
    """Jaccard index J of two experts' token sets, pairs weighted by use: sum c_i c_j J_ij / sum c_i c_j.

    Without weights, unused experts would hide collapse. Undefined (NaN) for k = 1, where no token can choose
    two experts.
    """
    counts_E = np.diag(pairs_EE)
    a, b = np.triu_indices(len(pairs_EE), 1)
    together, weight = pairs_EE[a, b], counts_E[a] * counts_E[b]
    if not together.any():
        return float("nan")
    jaccard = together / np.maximum(counts_E[a] + counts_E[b] - together, 1)
    return float((weight * jaccard).sum() / weight.sum())


def overlap_chance(tokens: int, n_experts: int, k: float, pairs: float | None = None) -> float:
    """Expected overlap of random tokens, k their mean number of experts: E[c_i c_j J_ij] / E[c_i c_j].

    Of U ~ Bin(N, 2 p - b) tokens that chose i or j, p = k/n and b = P(both), each chose both with q = b/(2 p
    - b), i alone with r = (1 - q)/2: E[c_i c_j J | U] = U q + U (U - 1) q^2 + (U - 1)(U - 2) q r^2 where U >
    0, and E[c_i c_j] = N b + N (N - 1) p^2. For endless text it is q = b/(2 p - b). Few tokens lie far above:
    128 experts, 6 per token: 0.040 for 28 tokens, 0.020 for endless text.

    `pairs` is the mean of k (k - 1), by default that of tokens with k experts each. Undefined (NaN) where no
    token has two experts.
    """
    pairs = k * (k - 1) if pairs is None else pairs
    if n_experts < 2 or not pairs > 0 or not tokens:
        return np.nan
    p, both = k / n_experts, pair_probability(n_experts, pairs)
    either = 2 * p - both
    q = both / either
    r = (1 - q) / 2
    mean, product = tokens * either, tokens * (tokens - 1) * either**2
    beside = product - 2 * mean + 2 - 2 * max(1 - either, 0.0) ** tokens
    return (mean * q + product * q**2 + beside * q * r**2) / (tokens * both + tokens * (tokens - 1) * p**2)


def normalised(rows_ED: Array) -> Array:
    return divide(rows_ED, np.broadcast_to(np.linalg.norm(rows_ED, axis=1, keepdims=True), rows_ED.shape))


def pair_cosines(rows_ED: Array) -> Array:
    """Cosine of every two rows, in the order of `np.triu_indices(n, 1)`."""
    unit_ED = normalised(rows_ED)
    return np.asarray((unit_ED @ unit_ED.T)[np.triu_indices(len(rows_ED), 1)])


def gram_orthogonality(rows_ED: Array) -> float:
    """1 - ||G - I||_F / (n sqrt 2), G the Gram matrix of normalised rows.

    Random rows already score 1 - sqrt((n - 1)/(2 n D)), 0.94 at D = 128; n > D rows cannot exceed
    1 - sqrt((n - D)/(2 n D)) (Welch); n equal rows score 1 - sqrt((n - 1)/(2 n)), 0.29 to 0.5 and not 0.
    """
    n = len(rows_ED)
    unit_ED = normalised(rows_ED)
    return float(1 - np.linalg.norm(unit_ED @ unit_ED.T - np.eye(n)) / (n * np.sqrt(2)))


def gram_chance(n: int, d: int) -> float:
    return float(1 - np.sqrt((n - 1) / (2 * n * d)))


def gram_collapse(n: int) -> float:
    return float(1 - np.sqrt((n - 1) / (2 * n)))


def router_similarity(rows_ED: Array) -> float:
    """Mean cosine of two router rows; NaN for a single row."""
    return float(pair_cosines(rows_ED).mean()) if len(rows_ED) > 1 else np.nan


def router_similarity_abs(rows_ED: Array) -> float:
    """Mean absolute cosine of two router rows; sqrt(2/(pi D)) for random rows."""
    return float(np.abs(pair_cosines(rows_ED)).mean()) if len(rows_ED) > 1 else np.nan


def router_similarity_max(rows_ED: Array) -> float:
    """Largest cosine of two router rows."""
    return float(pair_cosines(rows_ED).max()) if len(rows_ED) > 1 else np.nan


def similarity_max_chance(n: int, d: int) -> float:
    """About sqrt(2 log P / D) for the largest of P = n(n - 1)/2 cosines of random rows."""
    return float(min(np.sqrt(2 * np.log(max(n * (n - 1) / 2, 1)) / d), 1.0))


def expected_pairs(pairs_EE: Array, tokens: int) -> tuple[Array, Array]:
    """Return tokens that would choose every pair if experts were chosen independently, and the noise.

    Quasi-independence: w_a w_b for different experts, fitted to each expert's pairs, so that busy experts are
    expected together more often (Goodman 1968). Exact for two experts per token and weights of the experts;
    for evenly used experts it is random routing.

    The noise is of the count over what is expected, given the experts' tokens. Of a token that chooses a with
    probability s_a and both with p, the variance is p (1 - p) - g' C^-1 g, C the covariance of the two
    choices and g theirs with both, p (1 - s_a) and p (1 - s_b): p (1 - s_a) (1 - s_b) where choices are
    independent, more where they exclude each other.
    """
    share_E = np.diag(pairs_EE) / max(tokens, 1)
    total_E = pairs_EE.sum(1) - np.diag(pairs_EE)
    weight_E = total_E / np.sqrt(max(total_E.sum(), 1.0))
    for _ in range(FITTING_STEPS):  # the geometric mean of two steps does not swing
        weight_E = np.sqrt(weight_E * np.nan_to_num(divide(total_E, weight_E.sum() - weight_E)))
    a, b = np.meshgrid(share_E, share_E, indexing="ij")
    p = np.outer(weight_E, weight_E) / max(tokens, 1)
    variance_a, variance_b, both = a * (1 - a), b * (1 - b), p - a * b
    with_a, with_b = p * (1 - a), p * (1 - b)
    explained = with_a**2 * variance_b - 2 * with_a * with_b * both + with_b**2 * variance_a
    left = p * (1 - p) - np.nan_to_num(divide(explained, variance_a * variance_b - both**2))
    return p * tokens, np.sqrt(divide(np.maximum(left, 0.0), p**2 * tokens))


def pair_p(pairs_EE: Array, expected_EE: Array, noise_EE: Array) -> Array:
    """P of a pair of experts that independent tokens choose together at least as often.

    The tail of a binomial count with the mean and the variance of the expected one, (expected noise)^2.
    """
    from scipy.special import betainc

    with np.errstate(divide="ignore", invalid="ignore"):
        share_EE = np.clip(1 - expected_EE * noise_EE**2, 1e-12, 1.0)
        trials_EE = expected_EE / share_EE
        tail_EE = betainc(np.maximum(pairs_EE, 1), np.maximum(trials_EE - pairs_EE + 1, 1e-9), share_EE)
    return np.where(pairs_EE > 0, tail_EE, 1.0)


def largest_pair(count: int, expected: Array, noise: Array) -> Array:
    """Median of the largest of `count` pairs over what is expected, all with this expectation and noise.

    1 + noise (z + skewness (z^2 - 1)/6), z the median of the largest normal number (Cornish and Fisher 1938).
    """
    from scipy.special import ndtri

    z = float(ndtri(0.5 ** (1 / max(count, 1))))
    skewness = (2 * expected * noise**2 - 1) / np.maximum(expected * noise, 1e-12)
    return np.asarray(1 + noise * (z + skewness * (z**2 - 1) / 6))
