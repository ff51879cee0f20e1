"""What single tokens of the vocabulary (V) say about experts, from a sample of the text.

Tokens are sorted by id once; counting a layer's choices is then linear in their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from moescope.routing.token_sample import Probe
from moescope.types import Array, Integers

TOP = 50  # tokens listed per expert
FEWEST = 8  # occurrences a token needs to count for specialisation
THREADS = 4  # each holds a few arrays of the sample's choices
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

Measured = tuple[str, float, float, float]  # metric, value, chance, collapse
Columns = dict[str, list[Any]]


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
        ids_V, rows_T = np.unique(ids_T[places_T], return_inverse=True)
        return cls(ids_V, places_T, rows_T.astype(np.int32))

    def occurrences_V(self) -> Integers:
        return np.bincount(self.rows_T, minlength=len(self.ids_V))

    def counts_VE(
        self, chosen_TK: Integers, n_experts: int, only_T: Integers | None = None
    ) -> sparse.csc_array:
        """Assignments of each token id to each expert, sparse; `only_T` chooses tokens of the text."""
        places_T, rows_T = self.places_T, self.rows_T
        if only_T is not None:
            among_T = only_T[places_T]
            places_T, rows_T = places_T[among_T], rows_T[among_T]
        chosen = chosen_TK[places_T].ravel().astype(np.int32)
        rows = np.repeat(rows_T, chosen_TK.shape[1])
        if (chosen < 0).any():
            rows, chosen = rows[chosen >= 0], chosen[chosen >= 0]
        entries = np.ones(len(rows)), (rows, chosen)
        return sparse.coo_array(entries, shape=(len(self.ids_V), n_experts)).tocsc()


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
        order = np.lexsort((rows, -counts * np.log(lift)))[:top]
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


def token_information(halves_VE: tuple[sparse.csc_array, sparse.csc_array]) -> float:
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
        gain_by_strength = {a: gain(fitted, fitted, prior_E, a, leave_one_out=True) for a in STRENGTHS}
        gains.append(gain(fitted, held_out, prior_E, max(STRENGTHS, key=gain_by_strength.__getitem__)))
        weights.append(held_out.sum())
    return float(np.average(gains, weights=weights))


def gain(
    fitted_VE: sparse.csc_array,
    held_out_VE: sparse.csc_array,
    prior_E: Array,
    strength: float,
    leave_one_out: bool = False,
) -> float:
    """Mean over held-out assignments of log p(e | token)/p(e), p(e | token) = (count + a p(e))/(sum + a)."""
    per_token_V = np.asarray(fitted_VE.sum(1)).ravel()
    tokens = held_out_VE.indices
    experts = np.repeat(np.arange(held_out_VE.shape[1]), np.diff(held_out_VE.indptr))
    if leave_one_out:
        seen, total = fitted_VE.data - 1, per_token_V[tokens] - 1
    else:
        found = fitted_VE[tokens, experts]
        seen = np.asarray(found.todense() if sparse.issparse(found) else found).ravel()
        total = per_token_V[tokens]
    ratio = (seen + strength * prior_E[experts]) / (total + strength) / prior_E[experts]
    return float((held_out_VE.data * np.log(ratio)).sum() / held_out_VE.data.sum())


def permute_within_documents(ids_T: Integers, document_T: Integers, seed: int = 0) -> Integers:
    """Permute token ids within each document: keeps its topic, breaks what a single token says."""
    generator = np.random.default_rng(seed)
    order = np.lexsort((generator.random(len(ids_T)), document_T))
    permuted = np.empty_like(ids_T)
    permuted[np.argsort(document_T, kind="stable")] = ids_T[order]
    return permuted


class Vocabulary:
    """A sample's tokens in each role, as they are and permuted: what all layers share."""

    def __init__(self, probe: Probe, seed: int):
        self.probe = probe
        roles = {"input": probe.ids_T, "next": probe.next_T, "predicted": probe.predicted_T}
        self.roles = {
            role: (Tokens.of(ids_T), Tokens.of(permute_within_documents(ids_T, probe.document_T, seed)))
            for role, ids_T in roles.items()
            if (ids_T >= 0).any()
        }

    def layers(self, layers: Iterable[tuple[int, int]]) -> Iterator[tuple[list[Measured], Columns]]:
        """Yield `layer` of several layers, given with their numbers of experts; a few are made at a time."""
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(lambda pair: self.layer(*pair), layers)

    def layer(self, layer: int, n_experts: int) -> tuple[list[Measured], Columns]:
        """Return metrics (name, value, chance, collapse), and the columns of the vocabulary table."""
        chosen_TK = self.probe.chosen_TK(layer)
        metrics = []
        names = ("expert", "role", "token_id", "token", "count", "share", "lift")
        columns: Columns = {name: [] for name in names}
        first_T = self.probe.half_T == 0
        for role, both in self.roles.items():
            if role == "input":
                halves = [
                    (
                        tokens.counts_VE(chosen_TK, n_experts, first_T),
                        tokens.counts_VE(chosen_TK, n_experts, ~first_T),
                    )
                    for tokens in both
                ]
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
            for expert, (rows, count, share, lift) in enumerate(top_tokens(tables[0])):
                ids = both[0].ids_V[rows].tolist()
                columns["expert"] += [expert] * len(ids)
                columns["role"] += [role] * len(ids)
                columns["token_id"] += ids
                columns["token"] += [None] * len(ids)  # the text is looked up by the caller: one thread
                columns["count"] += count.astype(int).tolist()
                columns["share"] += share.tolist()
                columns["lift"] += lift.tolist()
        return metrics, columns
