"""What experts specialise in: domains of text, and single tokens of the vocabulary.

Domain shares are balanced: every domain counts the same, whatever its length. Token statistics are made from
a sample of the text.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from moescope.routing.load_balance import divide
from moescope.types import Array, Integers

PERMUTATIONS = 200
TOP = 50  # tokens listed per expert
FEWEST = 8  # occurrences a token needs to count for specialisation
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


# --- domains (M)


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


# --- tokens of the vocabulary (V)


def token_counts(ids_T: Integers, chosen_TK: Integers, n_tokens: int, n_experts: int) -> sparse.csr_array:
    """Assignments of each token id to each expert: V x E, sparse. Ids below 0 (no next token) are skipped."""
    there = (chosen_TK >= 0) & (ids_T >= 0)[:, None]
    rows = np.broadcast_to(ids_T[:, None], chosen_TK.shape)[there]
    ones = np.ones(len(rows))
    return sparse.csr_array(sparse.coo_array((ones, (rows, chosen_TK[there])), shape=(n_tokens, n_experts)))


def top_tokens(counts_VE: sparse.csr_array, top: int = TOP) -> list[tuple[Integers, Array, Array, Array]]:
    """Return per expert: ids of distinctive tokens, counts, share P(token | expert), lift share/P(token).

    Ranked by count times log lift, the token's part in the expert's information: tokens that are both
    frequent and unusual.
    """
    total = counts_VE.sum()
    per_token_V = np.asarray(counts_VE.sum(1)).ravel()
    by_expert = sparse.csc_array(counts_VE)
    ranked = []
    for expert in range(counts_VE.shape[1]):
        column = slice(by_expert.indptr[expert], by_expert.indptr[expert + 1])
        ids, counts = by_expert.indices[column].astype(np.int64), by_expert.data[column]
        share = counts / max(counts.sum(), 1)
        lift = share * total / per_token_V[ids]
        order = np.lexsort((ids, -counts * np.log(lift)))[:top]
        ranked.append((ids[order], counts[order], share[order], lift[order]))
    return ranked


def vocabulary_specialisation(ids_T: Integers, chosen_TK: Integers, n_experts: int) -> float:
    """Share of a token's occurrences that go to its favourite expert, averaged over occurrences.

    sum over tokens v of max over i of N(v, i) / sum of N(v), tokens that occur at least 8 times.
    """
    compact = np.unique(ids_T, return_inverse=True)[1]
    real = ids_T >= 0
    occurrences_V = np.bincount(compact[real], minlength=compact.max(initial=0) + 1)
    counts_VE = token_counts(np.where(real, compact, -1), chosen_TK, len(occurrences_V), n_experts)
    frequent = occurrences_V >= FEWEST
    if not frequent.any():
        return np.nan
    favourite_V = counts_VE.max(axis=1).toarray().ravel()
    return float(favourite_V[frequent].sum() / occurrences_V[frequent].sum())


def token_information(ids_T: Integers, chosen_TK: Integers, half_T: Integers, n_experts: int) -> float:
    """Held-out gain in nats of knowing the token: mean of log p(e | token)/p(e).

    Each half of the documents is fitted once and evaluated on the other. p(e | token) is shrunk towards p(e)
    with a strength chosen by leave-one-out within the fitted half. The plug-in estimate cannot be used: with
    a vocabulary it is too high by a nat, corrected or not.
    """
    gains, weights = [], []
    compact = np.unique(ids_T, return_inverse=True)[1]
    n_tokens = int(compact.max(initial=0)) + 1
    tables = [token_counts(compact[half_T == h], chosen_TK[half_T == h], n_tokens, n_experts) for h in (0, 1)]
    for fitted, held_out in (tables, tables[::-1]):
        if not fitted.sum() or not held_out.sum():
            return np.nan
        prior_E = (np.asarray(fitted.sum(0)).ravel() + 0.5) / (fitted.sum() + 0.5 * n_experts)
        gain_by_strength = {a: gain(fitted, fitted, prior_E, a, leave_one_out=True) for a in STRENGTHS}
        gains.append(gain(fitted, held_out, prior_E, max(STRENGTHS, key=gain_by_strength.__getitem__)))
        weights.append(held_out.sum())
    return float(np.average(gains, weights=weights))


def gain(
    fitted_VE: sparse.csr_array,
    held_out_VE: sparse.csr_array,
    prior_E: Array,
    strength: float,
    leave_one_out: bool = False,
) -> float:
    """Mean over held-out assignments of log p(e | token)/p(e), p(e | token) = (count + a p(e))/(sum + a)."""
    held_out = sparse.coo_array(held_out_VE)
    per_token_V = np.asarray(fitted_VE.sum(1)).ravel()
    tokens, experts = held_out.coords
    seen = fitted_VE[tokens, experts]
    seen = np.asarray(seen.todense() if sparse.issparse(seen) else seen).ravel() - leave_one_out
    total = per_token_V[tokens] - leave_one_out
    ratio = (seen + strength * prior_E[experts]) / (total + strength) / prior_E[experts]
    return float((held_out.data * np.log(ratio)).sum() / held_out.data.sum())


def permute_within_documents(ids_T: Integers, document_T: Integers, seed: int = 0) -> Integers:
    """Permute token ids within each document: keeps its topic, breaks what a single token says."""
    generator = np.random.default_rng(seed)
    order = np.lexsort((generator.random(len(ids_T)), document_T))
    permuted = np.empty_like(ids_T)
    permuted[np.argsort(document_T, kind="stable")] = ids_T[order]
    return permuted
