"""What experts specialise in: domains of text. Every domain counts the same, whatever its length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moescope.routing.load_balance import divide
from moescope.statistics import CONFIDENCE, FEWEST_DOCUMENTS, ROUNDING, TAILS
from moescope.types import Array, Integers

PERMUTATIONS = 200
FEWEST_USING = 8  # groups of documents, in effect, that use an expert whose affinity has an interval


def expert_shares(counts_ME: Array) -> Array:
    """P(i | d): share of domain d's assignments that went to expert i."""
    return divide(counts_ME, np.broadcast_to(counts_ME.sum(-1, keepdims=True), counts_ME.shape))


def affinity(counts_ME: Array) -> Array:
    """P(i | d) / P(i), P(i) the mean over domains: 1 where a domain uses an expert like the others do."""
    shares_ME = expert_shares(counts_ME)
    return divide(shares_ME, np.broadcast_to(shares_ME.mean(-2, keepdims=True), shares_ME.shape))


def affinity_interval(counts_MBE: Array, documents_M: Sequence[int]) -> tuple[Array, Array, Array]:
    """95 % intervals of the affinity over documents and its noise, (low, high, noise) [M, E]; NaN for none.

    log A(d) = log s(d) - log mean(s), s(d) = P(i | d), is linear in the shares to first order, and documents
    of different domains are independent: Var log A(d) = (1/s(d) - 1/S)^2 V(d) + sum over other domains of
    V/S^2, S the sum of s over domains, V the variance of a ratio of sums over groups of documents, V = B/(B -
    1) sum over groups of (c - s C)^2/C(d)^2. The quantile is Student's with (sum c)^2/sum c^2 - 1 degrees of
    freedom, the groups that use the expert in effect; A is at most the number of domains. No interval under
    20 documents in any domain, and under 8 such groups.

    The noise is the affinity's error by the same variance, 1.96 times which is half an interval, and at least
    that of independent tokens; there is none with a single document in a domain, which is not told from it.
    """
    from scipy.special import ndtri, stdtrit

    n_domains = len(counts_MBE)
    size_MB = counts_MBE.sum(-1)
    groups_M = (size_MB > 0).sum(1)
    shares_ME = expert_shares(counts_MBE.sum(1))
    residual_MBE = counts_MBE - shares_ME[:, None] * size_MB[..., None]
    scale_M = groups_M / np.maximum(groups_M - 1, 1) / np.maximum(size_MB.sum(1), 1) ** 2
    variance_ME = scale_M[:, None] * (residual_MBE**2).sum(1)
    total_ME = np.broadcast_to(shares_ME.sum(0), shares_ME.shape)
    slope_ME = divide(total_ME - shares_ME, shares_ME)  # times S
    others_ME = variance_ME.sum(0) - variance_ME
    spread_ME = divide(np.sqrt(slope_ME**2 * variance_ME + others_ME), total_ME)
    using_ME = divide(counts_MBE.sum(1) ** 2, (counts_MBE**2).sum(1))
    affinity_ME = affinity(counts_MBE.sum(1))
    # False for NaN
    known_ME = (using_ME >= FEWEST_USING) & (min(documents_M) >= FEWEST_DOCUMENTS)
    half_ME = stdtrit(np.fmax(using_ME - 1, 1.0), 0.5 + CONFIDENCE / 2) * np.nan_to_num(spread_ME)
    factor_ME = np.exp(np.where(known_ME, half_ME, 0.0))
    low_ME = np.where(known_ME, affinity_ME / factor_ME, np.nan)
    high_ME = np.where(known_ME, np.minimum(affinity_ME * factor_ME, n_domains), np.nan)
    expected_ME = size_MB.sum(1)[:, None] * shares_ME.mean(0)
    noise_ME = np.fmax(
        np.nan_to_num(affinity_ME) * half_ME / ndtri(TAILS[1]), divide(np.ones(()), expected_ME) ** 0.5
    )
    return low_ME, high_ME, noise_ME if groups_M.min() > 1 else np.full_like(noise_ME, np.nan)


def domain_shares(counts_ME: Array) -> Array:
    """P(d | i) when all domains are equally long: P(i | d) / sum over d of P(i | d)."""
    shares_ME = expert_shares(counts_ME)
    return divide(shares_ME, np.broadcast_to(shares_ME.sum(-2, keepdims=True), shares_ME.shape))


def purity(counts_ME: Array) -> Array:
    """Mean over used experts of max over d of P(d | i); NaN where a domain has no token."""
    largest_E = domain_shares(counts_ME).max(-2)
    used_E = ~np.isnan(largest_E)
    return divide(np.where(used_E, largest_E, 0.0).sum(-1), used_E.sum(-1))


def information(joint: Array) -> Array:
    """Plug-in mutual information in nats of the last two axes of a table of counts (biased upward)."""
    p = divide(joint, np.broadcast_to(joint.sum((-2, -1), keepdims=True), joint.shape))
    independent = p.sum(-1, keepdims=True) * p.sum(-2, keepdims=True)
    ratio = np.where(p > 0, p, 1.0) / np.where(p > 0, independent, 1.0)
    return np.asarray((p * np.log(ratio)).sum((-2, -1)))


def permuted_tables(
    counts_CE: Array, labels_C: Integers, n_domains: int, seed: int, draws: int = PERMUTATIONS
) -> Array:
    """Tables [draws, M, E] with the domain labels of documents (or groups of documents) permuted."""
    generator = np.random.default_rng(seed)
    permuted_PC = np.stack([generator.permutation(labels_C) for _ in range(draws)])
    onehot_PMC = (permuted_PC[:, None, :] == np.arange(n_domains)[None, :, None]).astype(float)
    return onehot_PMC @ counts_CE


def affinity_z(tables_PME: Array) -> Array:
    """|z| of affinities [..., M, E] over their mean and spread in all tables, that of the text included.

    NaN where all are equal. With the text among them, the largest of all cells is exchangeable, so that its
    rank among the tables is an exact p.
    """
    affinity_PME = affinity(tables_PME)
    spread_ME = np.broadcast_to(affinity_PME.std(0), affinity_PME.shape)
    return divide(np.abs(affinity_PME - affinity_PME.mean(0)), np.where(spread_ME > ROUNDING, spread_ME, 0.0))


def by_domain(counts_CE: Array, labels_C: Integers, n_domains: int) -> Array:
    return (labels_C == np.arange(n_domains)[:, None]).astype(float) @ counts_CE


def domain_information(counts_CE: Array, labels_C: Integers, n_domains: int, seed: int = 0) -> float:
    """I(expert; domain) in nats: the plug-in value minus its mean over permutations of document labels.

    Documents are permuted, not tokens: tokens of one document are alike, so permuting tokens would call any
    text specialised.
    """
    observed = information(by_domain(counts_CE, labels_C, n_domains))
    return float(observed - information(permuted_tables(counts_CE, labels_C, n_domains, seed)).mean())
