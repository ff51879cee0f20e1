"""What experts specialise in: domains of text. Every domain counts the same, whatever its length."""

from __future__ import annotations

import numpy as np

from moescope.routing.load_balance import divide
from moescope.types import Array, Integers

PERMUTATIONS = 200


def expert_shares(counts_ME: Array) -> Array:
    """P(i | d): share of domain d's assignments that went to expert i."""
    return divide(counts_ME, np.broadcast_to(counts_ME.sum(-1, keepdims=True), counts_ME.shape))


def affinity(counts_ME: Array) -> Array:
    """P(i | d) / P(i), P(i) the mean over domains: 1 where a domain uses an expert like the others do."""
    shares_ME = expert_shares(counts_ME)
    return divide(shares_ME, np.broadcast_to(shares_ME.mean(-2, keepdims=True), shares_ME.shape))


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


def by_domain(counts_CE: Array, labels_C: Integers, n_domains: int) -> Array:
    table_ME = np.zeros((n_domains, counts_CE.shape[1]))
    np.add.at(table_ME, labels_C, counts_CE)
    return table_ME


def domain_information(counts_CE: Array, labels_C: Integers, n_domains: int, seed: int = 0) -> float:
    """I(expert; domain) in nats: the plug-in value minus its mean over permutations of document labels.

    Documents are permuted, not tokens: tokens of one document are alike, so permuting tokens would call any
    text specialised.
    """
    observed = information(by_domain(counts_CE, labels_C, n_domains))
    return float(observed - information(permuted_tables(counts_CE, labels_C, n_domains, seed)).mean())
