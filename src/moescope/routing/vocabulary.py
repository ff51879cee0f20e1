"""What single tokens of the vocabulary (V) say about experts, from a sample of the text.

Tokens are sorted by id once; counting a layer's choices is then linear in their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from moescope.routing.token_sample import Probe
from moescope.types import Array, Integers

TOP = 50  # tokens listed per expert
FEWEST = 8  # occurrences a token needs to count for specialisation
CELLS = 2**22  # pairs of token and expert that are counted at a time
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

Measured = tuple[str, float, float, float]  # metric, value, chance, collapse
Columns = dict[str, Any]  # of the vocabulary table, text aside


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text sorted by id; those without one (no next token) are left out."""

    ids_V: Integers  # distinct ids
    places_T: Integers  # where in the text each token stands
    rows_T: Integers  # index into ids_V of each

    @classmethod
    def of(cls, ids_T: Integers) -> Tokens:
        places_T = np.argsort(ids_T, kind="stable")
        places_T = places_T[ids_T[places_T] >= 0]
        sorted_T = ids_T[places_T]
        new_T = np.diff(sorted_T, prepend=-1) > 0
        return cls(sorted_T[new_T], places_T, np.cumsum(new_T, dtype=np.int32) - np.int32(1))

    def occurrences_V(self) -> Integers:
        return np.bincount(self.rows_T, minlength=len(self.ids_V))

    def counts_VE(
        self, chosen_TK: Integers, n_experts: int, only_T: Integers | None = None
    ) -> sparse.csc_array:
        """Assignments of each token id to each expert, sparse; `only_T` chooses tokens of the text."""
        among_T = slice(None) if only_T is None else only_T[self.places_T]
        places_T, rows_T = self.places_T[among_T], self.rows_T[among_T]
        step = max(CELLS // n_experts, 1)
        parts = []
        for first in range(0, max(len(self.ids_V), 1), step):
            height = min(step, len(self.ids_V) - first)
            block = slice(*np.searchsorted(rows_T, (first, first + height)))
            chosen_BK = chosen_TK.take(places_T[block], axis=0)
            cells_BK = chosen_BK.astype(np.int64)
            cells_BK *= height
            cells_BK += rows_T[block, None] - first
            cells = cells_BK[chosen_BK >= 0] if (chosen_BK < 0).any() else cells_BK.ravel()
            counts = np.bincount(cells, minlength=height * n_experts)
            filled = np.flatnonzero(counts > 0)
            starts = np.searchsorted(filled, np.arange(n_experts + 1) * height)
            column = counts[filled].astype(float), (filled % max(height, 1)).astype(np.int32), starts
            parts.append(sparse.csc_array(column, shape=(height, n_experts)))
        return parts[0] if len(parts) == 1 else sparse.vstack(parts, format="csc")


def top_tokens(counts_VE: sparse.csc_array, top: int = TOP) -> list[tuple[Integers, Array, Array, Array]]:
    """Return per expert: rows of distinctive tokens, counts, share P(token | expert), lift share/P(token).

    Ranked by count times log lift, the token's part in the expert's information: tokens that are both
    frequent and unusual.
    """
    total = counts_VE.sum()
    per_token_V = np.asarray(counts_VE.sum(1)).ravel()
    ranked = []
    for expert in range(counts_VE.shape[1]):
        column = slice(counts_VE.indptr[expert], counts_VE.indptr[expert + 1])
        rows, counts = counts_VE.indices[column].astype(np.int64), counts_VE.data[column]
        share = counts / max(counts.sum(), 1)
        lift = share * total / per_token_V[rows]
        score = counts * np.log(lift)
        least = np.partition(score, -top)[-top] if len(score) > top else -np.inf
        best = np.flatnonzero(score >= least)  # few are sorted
        order = best[np.lexsort((rows[best], -score[best]))[:top]]
        ranked.append((rows[order], counts[order], share[order], lift[order]))
    return ranked


def vocabulary_specialisation(counts_VE: sparse.csc_array, occurrences_V: Integers) -> float:
    """Share of a token's occurrences that go to its favourite expert, averaged over occurrences.

    sum over tokens v of max over i of N(v, i) / sum of N(v), tokens that occur at least 8 times.
    """
    frequent = occurrences_V >= FEWEST
    if not frequent.any():
        return np.nan
    favourite_V = counts_VE.max(axis=1).toarray().ravel()
    return float(favourite_V[frequent].sum() / occurrences_V[frequent].sum())


def token_information(halves_VE: Sequence[sparse.csc_array]) -> float:
    """Held-out gain in nats of knowing the token: mean of log p(e | token)/p(e).

    Each half of the documents is fitted once and evaluated on the other. p(e | token) is shrunk towards p(e)
    with a strength chosen by leave-one-out within the fitted half. The plug-in estimate cannot be used: with
    a vocabulary it is too high by a nat, corrected or not.
    """
    gains, weights = [], []
    for fitted, held_out in (halves_VE, halves_VE[::-1]):
        if not fitted.sum() or not held_out.sum():
            return np.nan
        prior_E = (np.asarray(fitted.sum(0)).ravel() + 0.5) / (fitted.sum() + 0.5 * fitted.shape[1])
        per_token_V = np.asarray(fitted.sum(1)).ravel()
        counted = fitted.data - 1, per_token_V - 1  # leave one out
        gain_by_strength = {a: gain(*counted, fitted, prior_E, a) for a in STRENGTHS}
        strength = max(STRENGTHS, key=gain_by_strength.__getitem__)
        gains.append(gain(look_up(fitted, held_out), per_token_V, held_out, prior_E, strength))
        weights.append(held_out.sum())
    return float(np.average(gains, weights=weights))


def look_up(counts_VE: sparse.csc_array, places_VE: sparse.csc_array) -> Array:
    """Return the counts at the filled places of another table."""
    return np.asarray(counts_VE[places_VE.tocoo().coords])


def gain(
    seen: Array, per_token_V: Array, held_out_VE: sparse.csc_array, prior_E: Array, strength: float
) -> float:
    """Mean over held-out assignments of log p(e | token)/p(e), p(e | token) = (seen + a p(e))/(sum + a).

    `seen` holds the fitted counts at the places of `held_out_VE`, `per_token_V` their sum over experts.
    """
    tokens_V, assigned_E = np.asarray(held_out_VE.sum(1)).ravel(), np.asarray(held_out_VE.sum(0)).ravel()
    shrunk = seen + np.repeat(strength * prior_E, np.diff(held_out_VE.indptr))
    some = tokens_V > 0
    # sums rather than inner products, whose BLAS threads would wait for each other
    total = (held_out_VE.data * np.log(shrunk)).sum() - (assigned_E * np.log(prior_E)).sum()
    total -= (tokens_V[some] * np.log(per_token_V[some] + strength)).sum()
    return float(total / tokens_V.sum())


def permutation_within_documents(document_T: Integers, seed: int = 0) -> Integers:
    """Return a permutation of tokens within documents: keeps topics, breaks what a single token says."""
    drawn_T = np.lexsort((np.random.default_rng(seed).random(len(document_T)), document_T))
    permutation_T = np.empty(len(document_T), np.int64)
    permutation_T[np.argsort(document_T, kind="stable")] = drawn_T
    return permutation_T


class Vocabulary:
    """A sample's tokens in each role, as they are and permuted: what all layers share."""

    def __init__(self, probe: Probe, seed: int):
        self.probe = probe
        roles = {"input": probe.ids_T, "next": probe.next_T, "predicted": probe.predicted_T}
        self.first_T = probe.half_T == 0
        permutation_T = permutation_within_documents(probe.document_T, seed)
        self.roles = {
            role: (Tokens.of(ids_T), Tokens.of(ids_T[permutation_T]))
            for role, ids_T in roles.items()
            if (ids_T >= 0).any()
        }

    def layer(self, layer: int, n_experts: int) -> tuple[list[Measured], list[Columns]]:
        """Return metrics (name, value, chance, collapse), and columns of the vocabulary table."""
        chosen_TK = self.probe.chosen_TK(layer)
        metrics, columns = list[Measured](), list[Columns]()
        for role, both in self.roles.items():
            if role == "input":
                parts = self.first_T, ~self.first_T
                halves = [[tokens.counts_VE(chosen_TK, n_experts, part) for part in parts] for tokens in both]
                value, chance = map(token_information, halves)
                metrics.append(("token_information", value, chance, 0.0))
                tables = [first + second for first, second in halves]
            else:
                tables = [tokens.counts_VE(chosen_TK, n_experts) for tokens in both]
            value, chance = (
                vocabulary_specialisation(counts_VE, tokens.occurrences_V())
                for counts_VE, tokens in zip(tables, both, strict=True)
            )
            metrics.append((f"vocabulary_specialisation_{role}", value, chance, 1.0))
            for expert, (rows, counts, share, lift) in enumerate(top_tokens(tables[0])):
                ids = {"token_id": both[0].ids_V[rows], "count": counts.astype(np.int64)}
                columns.append({"expert": expert, "role": role, **ids, "share": share, "lift": lift})
        return metrics, columns
