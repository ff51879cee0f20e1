"""Redundancy of experts: cosines of their top singular vectors, overlaps of their leading subspaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betaincc, betaincinv

from moescope.spectral.decompose import LEADING_VECTORS
from moescope.types import Array

REDUNDANT, COLLAPSED = 0.3, 0.7  # |cosine| above which two experts are called redundant, and collapsed


@dataclass(frozen=True)
class Similarity:
    """All expert pairs (a < b) of one layer at one k. `cosine_P` exists at k = 1 only."""

    k: int
    cosine_P: Array | None
    overlap_P: Array
    largest_principal_cosine_P: Array


def make_subspace_grid(n_experts: int, smallest_rank: int, d_model: int) -> list[int]:
    """1, 2, 4, ... 64 for up to 32 experts, else 1, 16, 64 (storage); k = d is excluded: all subspaces
    coincide."""
    ks = [2**power for power in range(7)] if n_experts <= 32 else [1, 16, 64]
    return [k for k in ks if k <= min(smallest_rank, LEADING_VECTORS, d_model - 1)]


def similarities(leading_EDK: Sequence[Any], ks: list[int]) -> list[Similarity]:
    """Compare every pair of experts by their leading vectors: numpy arrays, or tensors on a GPU.

    Per k: overlap ||V_a' V_b||_F^2 / k (chance k/d), and the largest principal cosine, sigma_max(V_a' V_b).
    """
    blocks: list[Any]  # per block of pairs and k: cosines, overlaps, largest principal cosines
    if isinstance(leading_EDK[0], np.ndarray):
        stacked = np.stack([vectors[:, : max(ks)] for vectors in leading_EDK])
        # one row of pairs at a time: n = 256 experts would need gigabytes together
        blocks = [
            block_similarities(vectors.T[None] @ stacked[expert + 1 :], ks, largest_singular_value)
            for expert, vectors in enumerate(stacked[:-1])
        ]
    else:
        from moescope.spectral.gpu import pair_similarities

        blocks = pair_similarities(leading_EDK, ks, block_similarities)
    parts_per_k = [tuple(map(np.concatenate, zip(*of_k, strict=True))) for of_k in zip(*blocks, strict=True)]
    return [
        Similarity(
            k=k,
            cosine_P=np.clip(cosine, -1, 1) if k == 1 else None,
            overlap_P=np.clip(overlap, 0, 1),
            largest_principal_cosine_P=np.clip(largest, 0, 1),
        )
        for k, (cosine, overlap, largest) in zip(ks, parts_per_k, strict=True)
    ]


def block_similarities(
    products_PKK: Any, ks: list[int], largest: Callable[[Any], Any]
) -> list[tuple[Any, Any, Any]]:
    """Per k: cosine of the first vectors, overlap, and largest singular value of the leading k x k blocks."""
    blocks = [products_PKK[:, :k, :k] for k in ks]
    return [(of_k[:, 0, 0], (of_k**2).sum((1, 2)) / of_k.shape[1], largest(of_k)) for of_k in blocks]


def largest_singular_value(blocks_PKK: Array) -> Any:
    one = blocks_PKK.shape[1] == 1
    return np.abs(blocks_PKK[:, 0, 0]) if one else np.linalg.svd(blocks_PKK, compute_uv=False)[:, 0]


def orthogonality(similarity: Similarity, d_model: int) -> dict[str, float | int | None]:
    """Statistics over expert pairs: of the signed cosine at k = 1, of the subspace overlap beyond.

    What is of |cos| exists at k = 1 only, such as the counts above 0.3 and 0.7: overlaps grow with k by
    themselves.

    Chance: E|cos| = sqrt(2 / (pi d)) at k = 1, k / d beyond. The sign of a cosine depends on the orientation
    of the singular vectors, so the headline is the mean of |cos|; `mean`, `max` and `min` are signed.
    """
    values = similarity.cosine_P if similarity.cosine_P is not None else similarity.overlap_P
    sizes, pairs, first = np.abs(values), len(values), similarity.k == 1
    overlap = similarity.overlap_P
    return {
        "mean": float(values.mean()),
        "mean_abs": float(sizes.mean()),
        "max": float(values.max()),
        "min": float(values.min()),
        "std": float(values.std(ddof=1)) if pairs > 1 else float("nan"),
        "max_abs": float(sizes.max()),
        "chance": float(np.sqrt(2 / (np.pi * d_model))) if first else similarity.k / d_model,
        "n_pairs_above_0_3": int((sizes > REDUNDANT).sum()) if first else None,
        "n_pairs_above_0_7": int((sizes > COLLAPSED).sum()) if first else None,
        "n_pairs": pairs,
        "max_abs_chance": float(closest_by_chance(pairs, d_model)) if first else None,
        "expected_above_0_3": pairs * share_above(REDUNDANT, d_model) if first else None,
        "expected_above_0_7": pairs * share_above(COLLAPSED, d_model) if first else None,
        "overlap": float(overlap.mean()),
        "overlap_least": float(overlap.min()),
        "overlap_most": float(overlap.max()),
        "overlap_chance": similarity.k / d_model,
        "overlap_std": overlap_std(similarity.k, d_model) / np.sqrt(pairs),
        "mean_abs_std": float(np.sqrt((1 - 2 / np.pi) / d_model / pairs)) if first else None,
    }


def share_above(threshold: Any, d_model: int) -> Any:
    """Return P(|cos| > threshold) of two random directions: cos^2 follows Beta(1/2, (d - 1)/2)."""
    return betaincc(0.5, (d_model - 1) / 2, np.square(threshold))


def closest_by_chance(n_pairs: int, d_model: int, quantile: float = 0.5) -> float:
    """Return a quantile, by default the median, of the largest |cos| among that many random pairs."""
    return float(np.sqrt(betaincinv(0.5, (d_model - 1) / 2, quantile ** (1 / n_pairs))))


def overlap_std(k: int, d_model: int) -> float:
    """Return the standard deviation of the overlap of two random k-dimensional subspaces.

    tr(P Q) of two projections, one of them uniformly random, has variance 2 k^2 (d - k)^2 /
    (d^2 (d - 1) (d + 2)).
    """
    return float(np.sqrt(2 / ((d_model - 1) * (d_model + 2))) * (d_model - k) / d_model)


def similarity_order(cosine_EE: Array) -> list[int]:
    """Return an order that puts similar experts side by side: average linkage on 1 - |cos|."""
    if len(cosine_EE) < 3:
        return list(range(len(cosine_EE)))
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    distance = squareform(np.clip(1 - np.abs(cosine_EE), 0, None), checks=False)
    return [int(leaf) for leaf in leaves_list(linkage(distance, "average"))]


def nearest_experts(cosine_P: Array, n: int, d_model: int) -> dict[str, Any]:
    """Return per expert its nearest one by |cos|, what chance gives, and its place in the similarity order.

    Chance: the nearest of n - 1 random directions; its spread is half of the central 68 %.
    """
    cosine_EE = np.zeros((n, n))
    cosine_EE[np.triu_indices(n, k=1)] = np.abs(cosine_P)
    cosine_EE += cosine_EE.T
    nearest, largest = cosine_EE.argmax(axis=1), cosine_EE.max(axis=1)
    median, low, high = (closest_by_chance(n - 1, d_model, at) for at in (0.5, 0.1587, 0.8413))
    return {
        "nearest": nearest,
        "nearest_cosine": largest,
        "nearest_chance": median,
        "nearest_std": (high - low) / 2,
        "nearest_p": -np.expm1((n - 1) * np.log1p(-np.minimum(share_above(largest, d_model), 1 - 1e-16))),
        "place": np.argsort(similarity_order(cosine_EE)),
    }
