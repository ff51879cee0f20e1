"""Router-expert alignment M(k)[i, j] = align(router i, expert j; k), its nulls and accuracies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moescope.types import Array

if TYPE_CHECKING:
    from torch import Tensor

TIE = 1e-6  # two alignments closer than this count as equal


@dataclass(frozen=True)
class AlignmentMatrix:
    """M(k) of one layer at every k of the grid."""

    ks: list[int]
    align_KEE: Array  # k, router, expert
    rank_E: Array
    d_model: int

    @property
    def n_experts(self) -> int:
        return int(self.align_KEE.shape[1])

    @property
    def degenerate_K(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """k >= d: every alignment is 1 whatever the weights. k = rank < d is not degenerate."""
        return np.array(self.ks) >= self.d_model


def cumulate(
    energy_per_expert: Sequence[Array], ranks: Sequence[int], d_model: int, k_grid: list[int]
) -> AlignmentMatrix:
    """align(i, j; k) = sum over a <= k of (v_a(W_j) . r_i)^2, for every k of the grid.

    `energy_per_expert[j]` [routers, ks + 1] comes from `cumulative_energy`. The layer's largest rank replaces
    every larger k: nothing changes beyond it.
    """
    top = max(ranks)
    below = [index for index, k in enumerate(k_grid) if k < top]
    columns = [np.append(energy[:, below], energy[:, -1:], axis=1) for energy in energy_per_expert]
    align_KEE = np.clip(np.stack(columns, axis=-1).transpose(1, 0, 2), 0.0, 1.0)
    return AlignmentMatrix(
        [*(k_grid[index] for index in below), top], align_KEE, np.array(ranks, float), d_model
    )


def cumulative_energy(energy_ER: Array | Tensor, k_grid: list[int]) -> Array:
    """[routers, ks + 1]: the energy up to each k (the total where k exceeds the rank), then the total."""
    sums, rank = energy_ER.cumsum(1), energy_ER.shape[1]
    selected = sums[:, [*(min(k, rank) - 1 for k in k_grid), rank - 1]]
    return selected if isinstance(selected, np.ndarray) else selected.cpu().numpy()


def diagonal(M_KEE: Array) -> Array:
    return np.diagonal(M_KEE, axis1=-2, axis2=-1)


def random_expectation(ks: list[int], rank_E: Array, d_model: int) -> Array:
    """[K, E]: min(k, rank) / d, the mean alignment of a router row drawn uniformly from the sphere."""
    return np.minimum(np.array(ks, float)[:, None], rank_E[None, :]) / d_model


def shuffle_null(M_KEE: Array) -> tuple[Array, Array]:
    """[K] mean and population standard deviation of all n^2 entries: the limit of many pooled re-pairings."""
    return M_KEE.mean(axis=(1, 2)), M_KEE.std(axis=(1, 2))


def z_scores(delta: Array, std_K: Array) -> Array:
    """delta / std, and 0 where the std is 0 (all entries equal, as at k = d)."""
    return delta / np.where(std_K > 1e-12, std_K, np.inf)[:, None]


def z_ceiling(n: int) -> float:
    """sqrt(n - 1): the largest mean z that a layer of n experts can reach under the closed-form null.

    With the n^2 entries standardised to mean 0 and variance 1, the diagonal's mean is largest when all
    diagonal entries equal x and all others y: n x + n (n - 1) y = 0 and n x^2 + n (n - 1) y^2 = n^2 give x =
    sqrt(n - 1).
    """
    return float(np.sqrt(n - 1))


def hit_shares(M_KEE: Array) -> Array:
    """[K, E, E]: 1/(number tied) where expert j is among router i's best, else 0. Rows sum to 1."""
    best = M_KEE.max(axis=2, keepdims=True) - M_KEE <= TIE
    return best / best.sum(axis=2, keepdims=True)


def argmax_accuracy(M_KEE: Array) -> Array:
    """[K]: share of routers whose paired expert aligns best; ties count 1/(number tied). Chance 1/n."""
    return diagonal(hit_shares(M_KEE)).mean(axis=1)


def assignment_accuracy(M_KEE: Array) -> Array:
    """[K]: diagonal share of the best one-to-one assignment; robust to an expert that attracts every router.

    1/n, as under chance, where all assignments are equally good: the solver would return one of them, often
    the stored order.
    """
    from scipy.optimize import linear_sum_assignment  # a report needs none of it

    accuracies = np.full(len(M_KEE), 1 / M_KEE.shape[1])
    interaction_KEE = M_KEE - M_KEE.mean(axis=2, keepdims=True) - M_KEE.mean(axis=1, keepdims=True)
    for index in np.flatnonzero(np.ptp(interaction_KEE, axis=(1, 2)) > TIE):
        rows, columns = linear_sum_assignment(M_KEE[index], maximize=True)
        accuracies[index] = (rows == columns).mean()
    return accuracies


def margins(M_KEE: Array) -> Array:
    """[K, E]: alignment with the paired expert less the best other expert's."""
    return diagonal(M_KEE) - np.where(np.eye(M_KEE.shape[1], dtype=bool), -np.inf, M_KEE).max(axis=2)
