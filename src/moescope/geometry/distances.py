"""How far apart two matrices are, whatever their scale, and all pairs of a layer's experts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]

CHUNK = 1 << 22  # numbers converted to fp64 at a time, over all matrices together: 32 MiB


@dataclass(frozen=True)
class Distance:
    """Two matrices compared entry by entry. NaN where one of them is all zeros: it has no direction."""

    relative_l2: float  # || A/||A|| - B/||B|| ||: 0 equal up to scale, sqrt 2 unrelated, 2 opposite
    cosine: float  # <A, B> / (||A|| ||B||) = 1 - relative_l2^2 / 2
    norm_ratio: float  # ||B|| / ||A||
    change: float  # ||A - B|| / ||A||: scale counts too


@dataclass(frozen=True)
class PairDistances:
    """Every pair of E matrices; row a, column b is the distance from a to b."""

    relative_l2_EE: Array
    cosine_EE: Array
    norm_ratio_EE: Array


def distance(a: Tensor, b: Tensor) -> Distance:
    """The two matrices' distance, summed in fp64 in chunks.

    relative_l2 comes from the difference itself: sqrt(2 - 2 cosine) would lose half of the digits where A and
    B are nearly equal,
    which is what two steps of a training are.
    """
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    step = CHUNK // 2
    sums = torch.zeros(3, dtype=torch.float64, device=a.device)
    for start in range(0, len(flat_a), step):
        x, y = flat_a[start : start + step].double(), flat_b[start : start + step].double()
        sums += torch.stack([x @ x, y @ y, x @ y])
    square_a, square_b, inner = sums.tolist()
    if square_a == 0 or square_b == 0:
        return Distance(np.nan, np.nan, np.sqrt(square_b / square_a) if square_a else np.nan, np.nan)
    norm_a, norm_b = float(np.sqrt(square_a)), float(np.sqrt(square_b))
    apart = torch.zeros(2, dtype=torch.float64, device=a.device)
    for start in range(0, len(flat_a), step):
        x, y = flat_a[start : start + step].double(), flat_b[start : start + step].double()
        directions, entries = x / norm_a - y / norm_b, x - y
        apart += torch.stack([directions @ directions, entries @ entries])
    of_directions, of_entries = apart.sqrt().tolist()
    return Distance(of_directions, inner / (norm_a * norm_b), norm_b / norm_a, of_entries / norm_a)


def relative_l2(a: Tensor, b: Tensor) -> float:
    """|| A/||A|| - B/||B|| ||_F. Unrelated: sqrt 2."""
    return distance(a, b).relative_l2


def cosine(a: Tensor, b: Tensor) -> float:
    """<A, B> / (||A|| ||B||). Unrelated: 0."""
    return distance(a, b).cosine


def norm_ratio(a: Tensor, b: Tensor) -> float:
    """||B|| / ||A||."""
    return distance(a, b).norm_ratio


def gram(matrices: Sequence[Tensor]) -> Array:
    """The E x E inner products of the matrices, in fp64.

    A chunk of each is converted at a time, so memory stays near the matrices' own.
    """
    flat = [matrix.reshape(-1) for matrix in matrices]
    step = max(CHUNK // max(len(flat), 1), 1)
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat[0].device)
    for start in range(0, len(flat[0]), step):
        chunk = torch.stack([vector[start : start + step].double() for vector in flat])
        total.addmm_(chunk, chunk.T)
    return np.asarray(total.cpu().numpy())


def all_distances(matrices: Sequence[Tensor]) -> PairDistances:
    """Every pair's distance from one Gram matrix.

    Relative L2 below 1e-7 is rounding: sqrt(2 - 2 cosine) keeps half of fp64's digits.
    """
    return distances_from_gram(gram(matrices))


def distances_from_gram(gram_EE: Array) -> PairDistances:
    """The same from inner products already at hand."""
    norms = np.sqrt(np.diag(gram_EE))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_EE = gram_EE / np.outer(norms, norms)
        ratio_EE = norms[None, :] / norms[:, None]
    ratio_EE[norms == 0] = np.nan
    relative_EE = np.sqrt(np.maximum(2 - 2 * cosine_EE, 0))
    nonzero = np.flatnonzero(norms > 0)
    relative_EE[nonzero, nonzero] = 0.0
    return PairDistances(relative_EE, cosine_EE, ratio_EE)
