"""Redundancy of experts: cosines of their top singular vectors, overlaps of their leading subspaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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


def expert_pairs(
    n: int,
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], np.ndarray[tuple[int], np.dtype[np.intp]]]:
    first, second = np.triu_indices(n, k=1)
    return first, second


def similarities(leading_EDK: Sequence[Any], ks: list[int]) -> list[Similarity]:
    """Compare every pair of experts by their leading vectors: numpy arrays, or tensors on a GPU.

    Per k: overlap ||V_a' V_b||_F^2 / k (chance k/d), and the largest principal cosine, sigma_max(V_a' V_b).
    """
    parts_per_k: list[Any]
    if isinstance(leading_EDK[0], np.ndarray):
        stacked = np.stack([vectors[:, : max(ks)] for vectors in leading_EDK])
        # one row of pairs at a time: n = 256 experts would need gigabytes together
        rows = [
            row_similarities(stacked[expert].T[None] @ stacked[expert + 1 :], ks)
            for expert in range(len(stacked) - 1)
        ]
        parts_per_k = [
            tuple(map(np.concatenate, zip(*of_k, strict=True))) for of_k in zip(*rows, strict=True)
        ]
    else:
        from moescope.spectral.gpu import pair_similarities

        parts_per_k = pair_similarities(leading_EDK, ks)
    return [
        Similarity(
            k=k,
            cosine_P=np.clip(cosine, -1, 1) if k == 1 else None,
            overlap_P=np.clip(overlap, 0, 1),
            largest_principal_cosine_P=np.clip(largest, 0, 1),
        )
        for k, (cosine, overlap, largest) in zip(ks, parts_per_k, strict=True)
    ]


def row_similarities(products_PKK: Array, ks: list[int]) -> list[tuple[Any, Any, Any]]:
    """Per k: cosine of the first vectors, overlap, and largest singular value of the leading k x k blocks."""
    parts_per_k = []
    for k in ks:
        block = products_PKK[:, :k, :k]
        cosine = block[:, 0, 0]
        largest = np.abs(cosine) if k == 1 else np.linalg.svd(block, compute_uv=False)[:, 0]
        parts_per_k.append((cosine, (block**2).sum(axis=(1, 2)) / k, largest))
    return parts_per_k


def orthogonality(similarity: Similarity, d_model: int) -> dict[str, float | int | None]:
    """Statistics over expert pairs: of the signed cosine at k = 1, of the subspace overlap beyond.

    The counts above 0.3 and 0.7 are of |cos| and exist at k = 1 only: overlaps grow with k by themselves.

    Chance: E|cos| = sqrt(2 / (pi d)) at k = 1, k / d beyond. The sign of a cosine depends on the orientation
    of the singular vectors, so the headline is the mean of |cos|; `mean`, `max` and `min` are signed.
    """
    values = similarity.cosine_P if similarity.cosine_P is not None else similarity.overlap_P
    sizes = np.abs(values)
    return {
        "mean": float(values.mean()),
        "mean_abs": float(sizes.mean()),
        "max": float(values.max()),
        "min": float(values.min()),
        "std": float(values.std(ddof=1)) if len(values) > 1 else float("nan"),
        "max_abs": float(sizes.max()),
        "chance": float(np.sqrt(2 / (np.pi * d_model))) if similarity.k == 1 else similarity.k / d_model,
        "n_pairs_above_0_3": int((sizes > REDUNDANT).sum()) if similarity.k == 1 else None,
        "n_pairs_above_0_7": int((sizes > COLLAPSED).sum()) if similarity.k == 1 else None,
    }
