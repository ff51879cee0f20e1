"""What experts know of single tokens, from a sample of the text.

A token's own identity, the next one, the one predicted.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from moescope.types import Array, Integers

TOP = 50  # tokens listed for an expert
FEWEST = 8  # occurrences a token needs to count for specialisation
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def token_counts(ids_T: Integers, chosen_TK: Integers, n_tokens: int, n_experts: int) -> sparse.csr_array:
    """How often each token id went to each expert: V x E, sparse.

    Ids below 0 (no next token) are left out.
    """
    there = (chosen_TK >= 0) & (ids_T >= 0)[:, None]
    rows = np.broadcast_to(ids_T[:, None], chosen_TK.shape)[there]
    ones = np.ones(len(rows))
    return sparse.csr_array(sparse.coo_array((ones, (rows, chosen_TK[there])), shape=(n_tokens, n_experts)))


def top_tokens(counts_VE: sparse.csr_array, top: int = TOP) -> list[tuple[Integers, Array, Array, Array]]:
    """For each expert the tokens that set it apart: ids, counts, share P(token | expert), lift P(token |
    expert)/P(token).

    Ranked by count times log lift, the token's part in the expert's information: frequent and unusual, not
    either alone.
    """
    total = counts_VE.sum()
    of_token_V = np.asarray(counts_VE.sum(1)).ravel()
    by_expert = sparse.csc_array(counts_VE)
    found = []
    for expert in range(counts_VE.shape[1]):
        column = slice(by_expert.indptr[expert], by_expert.indptr[expert + 1])
        ids, counts = by_expert.indices[column].astype(np.int64), by_expert.data[column]
        share = counts / max(counts.sum(), 1)
        lift = share * total / of_token_V[ids]
        order = np.lexsort((ids, -counts * np.log(lift)))[:top]
        found.append((ids[order], counts[order], share[order], lift[order]))
    return found


def vocabulary_specialisation(ids_T: Integers, chosen_TK: Integers, n_experts: int) -> float:
    """The share of a token's occurrences that go to its favourite expert, averaged over occurrences.

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
    """Held-out gain in nats of knowing the token: mean of log p(e | token)/p(e), fitted on one half of the
    documents.

    Each half is fitted once and judged on the other. p(e | token) leans on p(e) with a strength chosen by
    leave-one-out within the
    fitted half. The plug-in estimate cannot be used: with a vocabulary it is too high by a nat, corrected or
    not.
    """
    gains, weights = [], []
    compact = np.unique(ids_T, return_inverse=True)[1]
    n_tokens = int(compact.max(initial=0)) + 1
    tables = [token_counts(compact[half_T == h], chosen_TK[half_T == h], n_tokens, n_experts) for h in (0, 1)]
    for fitted, judged in ((0, 1), (1, 0)):
        if not tables[fitted].sum() or not tables[judged].sum():
            return np.nan
        prior_E = (np.asarray(tables[fitted].sum(0)).ravel() + 0.5) / (tables[fitted].sum() + 0.5 * n_experts)
        strength = max(
            STRENGTHS, key=lambda a: gain(tables[fitted], tables[fitted], prior_E, a, leave_one_out=True)
        )
        gains.append(gain(tables[fitted], tables[judged], prior_E, strength))
        weights.append(tables[judged].sum())
    return float(np.average(gains, weights=weights))


def gain(
    fitted_VE: sparse.csr_array,
    judged_VE: sparse.csr_array,
    prior_E: Array,
    strength: float,
    leave_one_out: bool = False,
) -> float:
    """Mean over judged assignments of log p(e | token)/p(e), p(e | token) = (count + a p(e))/(total + a)."""
    judged = sparse.coo_array(judged_VE)
    of_token_V = np.asarray(fitted_VE.sum(1)).ravel()
    tokens, experts = judged.coords
    seen = fitted_VE[tokens, experts]
    seen = np.asarray(seen.todense() if sparse.issparse(seen) else seen).ravel() - leave_one_out
    total = of_token_V[tokens] - leave_one_out
    ratio = (seen + strength * prior_E[experts]) / (total + strength) / prior_E[experts]
    return float((judged.data * np.log(ratio)).sum() / judged.data.sum())


def shuffled_within(ids_T: Integers, document_T: Integers, seed: int = 0) -> Integers:
    """Token ids dealt anew within each document: keeps what a document is about, breaks what a token is."""
    generator = np.random.default_rng(seed)
    order = np.lexsort((generator.random(len(ids_T)), document_T))
    home = np.argsort(document_T, kind="stable")
    dealt = np.empty_like(ids_T)
    dealt[home] = ids_T[order]
    return dealt
