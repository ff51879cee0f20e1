"""Permutation tests of the pairing of routers and experts over all k, and the verdict."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from moescope.spectral.alignment import TIE, AlignmentMatrix, argmax_accuracy, diagonal, hit_shares, margins
from moescope.types import Array

Indices = npt.NDArray[np.intp]

EXACT_UP_TO = 8  # experts: all 8! = 40,320 pairings are evaluated
SAMPLED_PAIRINGS = 20_000
TOLERANCE = 1e-9
ALPHA = 0.05
ORDER_ALPHA = 0.01  # of the additional search for another order, on top of ALPHA
IDENTIFYING_ACCURACY = 0.9

IDENTIFYING, PERMUTED, NON_RANDOM, CHANCE = "identifying", "permuted", "non_random", "chance"


@dataclass(frozen=True)
class OtherOrder:
    """A one-to-one fit of routers and experts that differs from the stored order."""

    k: int
    experts: list[int]  # router i fits expert experts[i]; -1 where none does
    p: float  # upper bound on the chance probability, corrected for multiple k


@dataclass(frozen=True)
class PairingTest:
    perm_z_K: Array
    p_adjusted_K: Array
    p_value: float
    p_lower: float
    p_accuracy: float
    n_pairings: int
    exact: bool
    best_k: int | None  # None where every k is degenerate
    best_accuracy: float
    chance_accuracy: float  # chance level of the best accuracy over k: its mean over pairings
    verdict: str  # of this layer and view alone
    p_order: float  # of the other order; 1 without one
    other_order: OtherOrder | None
    null_means_KP: Array  # the mean diagonal under every pairing, for the density figure


@functools.lru_cache(maxsize=2)
def pairings(n: int, seed: int) -> tuple[Indices, bool]:
    """([E, P]: the expert of each router under pairing p; whether these are all pairings).

    Every pairing for n <= 8, else 20,000 sampled ones.
    """
    if n <= EXACT_UP_TO:
        return np.ascontiguousarray(np.array(list(itertools.permutations(range(n))), dtype=np.intp).T), True
    stored_PE = np.tile(np.arange(n, dtype=np.intp), (SAMPLED_PAIRINGS, 1))
    sampled_PE = np.random.default_rng(seed).permuted(stored_PE, axis=1)
    return np.ascontiguousarray(sampled_PE.T), False


def paired_means(M_KEE: Array, pairings_EP: Indices) -> Array:
    """[K, P]: mean over i of M[k, i, pairing(i)], for every k and pairing."""
    by_expert_EEK = np.ascontiguousarray(M_KEE.transpose(1, 2, 0))  # one gather fetches all ks
    total_PK = np.zeros((pairings_EP.shape[1], len(M_KEE)))
    for row_EK, experts_P in zip(by_expert_EEK, pairings_EP, strict=True):
        total_PK += row_EK.take(experts_P, axis=0)
    return np.ascontiguousarray(total_PK.T) / M_KEE.shape[1]


def null_moments(M_KEE: Array) -> tuple[Array, Array]:
    """[K] mean and standard deviation of T(k) = mean diagonal under a uniformly random pairing.

    E[T] = mean(M); Var[T] = sum D^2 / (n^2 (n - 1)), D = M less row means, less column means, plus grand mean
    (Hoeffding 1951, the combinatorial central limit theorem). No p-value is derived from the normal law.
    """
    n = M_KEE.shape[1]
    mean = M_KEE.mean(axis=(1, 2))
    D = M_KEE - M_KEE.mean(axis=2, keepdims=True) - M_KEE.mean(axis=1, keepdims=True) + mean[:, None, None]
    return mean, np.sqrt((D**2).sum(axis=(1, 2)) / (n**2 * (n - 1)))


def pairing_test(matrix: AlignmentMatrix, seed: int = 0) -> PairingTest:
    """Test the layer's pairing against all others (n <= 8) or 20,000 sampled ones, corrected for multiple k.

    p_value = share of pairings whose max over k of Z reaches the observed max (max statistic): the same
    pairings serve every k, which keeps the dependence between ks. Degenerate ks are excluded.
    """
    M_KEE, n = matrix.align_KEE, matrix.n_experts
    pairings_EP, exact = pairings(n, seed)
    mean_K, sd_K = null_moments(M_KEE)
    usable_K = ~matrix.degenerate_K & (sd_K > 1e-12)
    safe_sd_K = np.where(usable_K, sd_K, np.inf)  # Z = 0 at a k where all pairings agree
    perm_z_K = (diagonal(M_KEE).mean(axis=1) - mean_K) / safe_sd_K

    null_KP = paired_means(M_KEE, pairings_EP)
    Z_KP = (null_KP - mean_K[:, None]) / safe_sd_K[:, None]
    hits_KEE = hit_shares(M_KEE)
    accuracy_K = argmax_accuracy(M_KEE)

    def tail(null_P: Array, observed: float) -> float:
        reached = int((null_P >= observed - TOLERANCE).sum())
        return reached / len(null_P) if exact else (reached + 1) / (len(null_P) + 1)

    best = best_index(accuracy_K, matrix.degenerate_K)
    p_value = p_lower = p_accuracy = 1.0
    p_adjusted_K, chance_accuracy = np.ones(len(M_KEE)), 1 / n
    if usable_K.any():
        highest_P, lowest_P = Z_KP[usable_K].max(axis=0), Z_KP[usable_K].min(axis=0)
        p_value = tail(highest_P, perm_z_K[usable_K].max())
        p_lower = tail(-lowest_P, -perm_z_K[usable_K].min())
        p_adjusted_K[usable_K] = [tail(highest_P, z) for z in perm_z_K[usable_K]]
    if best is not None:
        best_accuracy_P = paired_means(hits_KEE[~matrix.degenerate_K], pairings_EP).max(axis=0)
        p_accuracy = tail(best_accuracy_P, accuracy_K[best])
        chance_accuracy = float(best_accuracy_P.mean())
    order = other_order(matrix)
    p_order = order.p if order else 1.0
    identifies = p_accuracy <= ALPHA and identifies_experts(M_KEE, accuracy_K, best)
    return PairingTest(
        perm_z_K=perm_z_K,
        p_adjusted_K=p_adjusted_K,
        p_value=p_value,
        p_lower=p_lower,
        p_accuracy=p_accuracy,
        n_pairings=pairings_EP.shape[1],
        exact=exact,
        best_k=None if best is None else matrix.ks[best],
        best_accuracy=float("nan") if best is None else float(accuracy_K[best]),
        chance_accuracy=chance_accuracy,
        verdict=verdict(p_value, p_order, identifies),
        p_order=p_order,
        other_order=order,
        null_means_KP=null_KP,
    )


def best_index(accuracy_K: Array, degenerate_K: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int | None:
    """Index of the k of highest argmax accuracy, ties to the smallest k, degenerate ks excluded."""
    return None if degenerate_K.all() else int(np.argmax(np.where(degenerate_K, -1.0, accuracy_K)))


def identifies_experts(M_KEE: Array, accuracy_K: Array, best: int | None) -> bool:
    """Whether at least 0.9 of the experts are identified at the best k, with positive mean margin."""
    if best is None or accuracy_K[best] < IDENTIFYING_ACCURACY:
        return False
    return bool(margins(M_KEE[best : best + 1]).mean() > 0)


def verdict(p_value: float, p_order: float, identifies: bool) -> str:
    """Classify a pairing by its p, or by its q where several layers and views are judged.

    non_random: the mean alignment of stored pairs exceeds that of random pairings, p_value <= 0.05;
    identifying: also, at the best k at least 0.9 of the experts are identified from the weights alone, with
    positive mean margin and p_accuracy <= 0.05; permuted: routers and experts fit one to one in another order
    than stored, p_order <= 0.01; chance: none of these. The mean finds weak alignment twice as often as
    accuracy does. Two or three experts, often paired correctly by chance, are never called anything but
    chance.
    """
    if p_value <= ALPHA:
        return IDENTIFYING if identifies else NON_RANDOM
    return PERMUTED if p_order <= ORDER_ALPHA else CHANCE


def other_order(matrix: AlignmentMatrix) -> OtherOrder | None:
    """The order in which routers and experts are each other's best match, if it differs from the stored one.

    Searched at every k that is not degenerate. Accepted where at least 0.9 of the routers are in mutual-best
    pairs, which chance, corrected for multiple k, does with p <= 0.01 (`mutual_best_bound`): out of reach for
    up to four experts, for five (0.0079 per k) from two ks on, for six from five, for seven from 18.
    """
    M_KEE, n = matrix.align_KEE, matrix.n_experts
    indices = np.flatnonzero(~matrix.degenerate_K)
    order, most = None, 0
    for index in indices:
        M_EE = M_KEE[index]
        second, first = np.partition(M_EE, -2, axis=1)[:, -2:].T
        best_expert = M_EE.argmax(axis=1)
        mutual = (M_EE.argmax(axis=0)[best_expert] == np.arange(n)) & (first - second > TIE)
        pairs = int(mutual.sum())
        chance = len(indices) * mutual_best_bound(n, pairs)
        if pairs > most and pairs >= IDENTIFYING_ACCURACY * n and chance <= ORDER_ALPHA:
            order, most = (
                OtherOrder(matrix.ks[index], np.where(mutual, best_expert, -1).tolist(), chance),
                pairs,
            )
    stored = order is None or all(expert in (-1, router) for router, expert in enumerate(order.experts))
    return None if stored else order


def false_call_rate(n: int, n_ks: int) -> float:
    """Largest probability that a random layer gets another verdict than chance, with n_ks ks not degenerate.

    Of one layer and view; where all are corrected together, that any of them does.

    ALPHA, and ORDER_ALPHA more where a perfect other order can be called permuted; 0 with two or three
    experts, where no p is as small as ALPHA.
    """
    if 1 / math.factorial(n) > ALPHA:
        return 0.0
    return ALPHA + (ORDER_ALPHA if n_ks * mutual_best_bound(n, n) <= ORDER_ALPHA else 0.0)


def mutual_best_bound(n: int, pairs: int) -> float:
    """Upper bound on the probability that a random n x n matrix of exchangeable entries has that many
    mutual-best pairs.

    A set of r cells, no two in a line, is all mutual-best with probability r! / prod_{j<=r} (n^2 - (n-j)^2):
    in ascending order, the j-th must top a nested set of that many cells. Times the number of such sets,
    C(n,r)^2 r! (Markov). For r = n it is exact: 1/3 for n = 2, 1.6e-4 for n = 8.
    """
    if pairs == 0:
        return 1.0
    j = np.arange(1, pairs + 1)
    log_choose = gammaln(n + 1) - gammaln(pairs + 1) - gammaln(n - pairs + 1)
    log_bound = 2 * log_choose + 2 * gammaln(pairs + 1) - np.log(n**2 - (n - j) ** 2).sum()
    return min(1.0, math.exp(log_bound))
