"""One decomposition an expert, from which every analysis of its weights is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moescope.errors import unknown_name
from moescope.spectral.bidiagonal import Solution, by_bidiagonal_form
from moescope.spectral.tridiagonal import by_gram_matrix

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.spectral.arrays import Array

LEADING_VECTORS = 64  # how many singular vectors the subspace analyses may ask for
TOLERANCE = {
    "fast": 1e-6,
    "exact": 1e-9,
}  # largest error of align on the ladder that the Gram route may be suspected of


@dataclass(frozen=True)
class Decomposition:
    """The spectrum of one expert matrix W [F, D] and where the routers lie in it."""

    singular_values_R: Array  # falling, only those above the rank tolerance
    energy_ER: (
        Array | Tensor
    )  # energy_ER[i, a] = (v_a . r_i)^2 for unit router rows r_i; on the GPU where it was made there
    leading_DK: (
        Array | Tensor
    )  # the first right singular vectors, oriented so that the mean of W v is positive
    full_rank: int  # min(F, D): what the rank would be without deficiency
    fallback: bool  # the Gram matrix was not trusted and W itself was decomposed

    @property
    def rank(self) -> int:
        return len(self.singular_values_R)


def decompose(
    matrix_FD: Tensor, routers_ED: Tensor, ladder: list[int], precision: str = "fast"
) -> Decomposition:
    """The singular values of W, the routers' squared coordinates in its right singular basis, and its leading
    vectors.

    Formula: with W'W = V S^2 V', energy = (V' r)^2; when F < D the small side is used: W W' = U S^2 U' and
    v_a . r = (u_a . W r) / s_a. All of it in fp64: a fp32 Gram matrix errs by 1e-2 at condition number 1e3.

    Squaring W costs half the digits at the small end of the spectrum, so the result is checked
    (`gram_suffices`), and
    the expert is decomposed again without squaring where the check fails: rank-deficient and very
    ill-conditioned experts.
    Misleads where k cuts a tie of singular values: the leading subspace is then not defined, by any method.
    """
    if precision not in TOLERANCE:
        raise unknown_name("precision", precision, list(TOLERANCE))
    route = decompose_on_gpu if matrix_FD.is_cuda else decompose_on_cpu
    return route(matrix_FD, routers_ED, ladder, TOLERANCE[precision])


def decompose_on_cpu(
    matrix_FD: Tensor, routers_ED: Tensor, ladder: list[int], tolerance: float
) -> Decomposition:
    """Tridiagonal route, and the bidiagonal one where it is not to be trusted.

    No route forms all singular vectors.
    """
    import torch

    hidden, width = matrix_FD.shape
    matrix, scale = unit_scaled(matrix_FD)
    W, rows = matrix.numpy(), routers_ED.to(torch.float64).contiguous().numpy()
    fallback = True
    try:
        found = by_gram_matrix(W, rows, LEADING_VECTORS)
        squares, coordinates = (
            torch.from_numpy(array) for array in (found.values_R**2, found.coordinates_ER)
        )
        shape = max(hidden, width), hidden >= width
        fallback = not gram_suffices(squares[None], coordinates[None], *shape, ladder, tolerance)
    except np.linalg.LinAlgError:  # no square root of the Gram matrix: rank-deficient
        pass
    if fallback:
        found = by_bidiagonal_form(W, rows, LEADING_VECTORS)
        rank = int((found.values_R > max(hidden, width) * np.finfo(float).eps * found.values_R[0]).sum())
        found = Solution(found.values_R[:rank], found.coordinates_ER[:, :rank], found.leading_DK[:, :rank])
    orientation = np.where(matrix.mean(0).numpy() @ found.leading_DK < 0, -1.0, 1.0)
    return Decomposition(
        singular_values_R=found.values_R * scale,
        energy_ER=found.coordinates_ER**2,
        leading_DK=found.leading_DK * orientation,
        full_rank=min(hidden, width),
        fallback=fallback,
    )


def unit_scaled(matrix_FD: Tensor) -> tuple[Tensor, float]:
    """(W in fp64, row by row in memory, less a power of two; that power).

    Squares of very large or small weights would leave fp64's range; a power of two is taken out without
    rounding.
    """
    import math

    import torch

    matrix = matrix_FD.to(torch.float64, memory_format=torch.contiguous_format)
    lowest, highest = torch.aminmax(matrix)
    exponent = math.frexp(max(-float(lowest), float(highest)))[1]
    if abs(exponent) <= 256:  # weights as they are met with: not worth a copy
        return matrix, 1.0
    scale = 2.0 ** (exponent - 1)
    return matrix / scale, scale


def decompose_on_gpu(
    matrix_FD: Tensor, routers_ED: Tensor, ladder: list[int], tolerance: float
) -> Decomposition:
    """All eigenvectors of the Gram matrix by torch, and torch's SVD where they are not to be trusted."""
    import torch

    matrix = matrix_FD.to(torch.float64)
    # Squares of very large or small weights would leave fp64's range; a power of two is taken out without
    # rounding.
    scale = torch.exp2(torch.floor(torch.log2(matrix.abs().max())))
    matrix = matrix / scale
    routers = routers_ED.to(matrix)
    hidden, width = matrix.shape
    tall = hidden >= width
    eigenvalues, basis = torch.linalg.eigh(matrix.T @ matrix if tall else matrix @ matrix.T)
    squares, basis = eigenvalues.flip(0), basis.flip(1)
    values = squares.clamp_min(0).sqrt()
    coordinates = routers @ basis if tall else (routers @ matrix.T) @ basis / values
    fallback = not gram_suffices(
        squares[None], coordinates[None], max(hidden, width), tall, ladder, tolerance
    )
    if fallback:
        _, values, right = torch.linalg.svd(matrix, full_matrices=False)
        rank = int((values > max(hidden, width) * torch.finfo(torch.float64).eps * values[0]).sum())
        values, vectors = values[:rank], right[:rank].T
        coordinates = routers @ vectors
    else:
        leading = basis[:, :LEADING_VECTORS]
        vectors = leading if tall else matrix.T @ leading / values[:LEADING_VECTORS]
    vectors = vectors[:, :LEADING_VECTORS]
    orientation = torch.where((matrix @ vectors).mean(0) < 0, -1.0, 1.0).to(vectors)
    return Decomposition(
        singular_values_R=(values * scale).cpu().numpy(),
        energy_ER=coordinates.square(),
        leading_DK=vectors * orientation,
        full_rank=min(hidden, width),
        fallback=fallback,
    )


def gram_suffices(
    squares_BR: Tensor,
    coordinates_BER: Tensor,
    long_side: int,
    tall: bool,
    ladder: list[int],
    tolerance: float,
) -> Tensor:
    """[B] whether the Gram route may be trusted: the error of align it can have made is within the tolerance
    at every cut.

    Rounding puts noise of norm e = 8 eps lambda_1 into the Gram matrix. To first order align(k) then moves by
    2 sum over a <= k < b of E_ab x_a x_b / (lambda_a - lambda_b), x the router's coordinates. The entries of
    such noise have
    no common sign and are far smaller than its norm, so the terms are added as squares with E_ab = e; no sum
    of absolute
    values, which is five orders too large at 4096 dimensions. For wide W, whose coordinates are divided by
    s_a, each term
    carries s_b / s_a, and e sum over a <= k of x_a^2 / lambda_a comes on top.
    Fails where that is too much, where e is not small against the gap at the cut (first order says nothing
    there), or
    where an eigenvalue is within rounding of zero, so that the rank cannot be told. Cuts near the top (s_k >
    s_1 / 8) are
    let pass: an SVD of W does no better there. Of several experts (B) each is judged for itself.
    """
    import torch

    rank = squares_BR.shape[1]
    noise_B = 8 * torch.finfo(torch.float64).eps * squares_BR[:, 0]
    fine_B = squares_BR[:, -1] > noise_B * long_side  # so written, NaN fails too
    energy, values = coordinates_BER.square(), squares_BR.sqrt()
    for k in ladder:
        top_B = squares_BR[:, k - 1] >= squares_BR[:, 0] / 64
        if not bool((fine_B & ~top_B).any()):
            continue
        small_B = torch.ones_like(fine_B)
        moved_BE = torch.zeros_like(energy[..., 0])
        if not tall:
            moved_BE = (energy[..., :k] / squares_BR[:, None, :k]).sum(-1)
        if k < rank:
            small_B = squares_BR[:, k - 1] - squares_BR[:, k] > 10 * noise_B
            mixing = 1 / (squares_BR[:, :k, None] - squares_BR[:, None, k:])
            if not tall:
                mixing *= values[:, None, k:] / values[:, :k, None]
            moved_BE = moved_BE + 2 * (energy[..., :k] @ mixing.square() * energy[..., k:]).sum(-1).sqrt()
        fine_B = fine_B & (top_B | (small_B & (noise_B * moved_BE.amax(1) <= tolerance)))
    return fine_B


def k_ladder(full_rank: int, named: tuple[int, ...] = ()) -> list[int]:
    """1, 2, 4, ...

    Up to the rank, the rank itself, and the user's own values; nothing beyond the rank, where nothing
    changes.
    """
    powers = [2**power for power in range(full_rank.bit_length())]
    return sorted({k for k in (*powers, full_rank, *named) if 1 <= k <= full_rank})
