"""One decomposition per expert, from which every analysis of its weights is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.errors import unknown_name
from moescope.spectral.solvers import Solution, solve_bidiagonal, solve_gram

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.types import Array

LEADING_VECTORS = 64  # how many singular vectors the subspace analyses may use
TOLERANCE = {"fast": 1e-6, "exact": 1e-9}  # of the possible error of align by the Gram method


@dataclass(frozen=True)
class Decomposition:
    """The spectrum of one expert matrix W [F, D] and the router rows' coordinates in it.

    Arrays on a CPU, tensors (but for the singular values) on a GPU.
    """

    singular_values_R: Array  # descending, only those above the rank tolerance
    energy_ER: Array | Tensor  # energy_ER[i, a] = (v_a . r_i)^2 for unit router rows r_i
    leading_DK: Array | Tensor  # the first right singular vectors, oriented so that W v has a positive mean
    full_rank: int  # min(F, D)
    fallback: bool  # the Gram matrix was too inaccurate and W itself was decomposed

    @property
    def rank(self) -> int:
        return len(self.singular_values_R)


def decompose(
    matrix_FD: Tensor,
    routers_ED: Tensor,
    k_grid: list[int],
    precision: str = "fast",
    bits: int | None = None,
    leading: int = LEADING_VECTORS,
) -> Decomposition:
    """Return the singular values of W, the router rows' squared coordinates in its right singular basis, and
    its `leading` vectors, computed on the CPU. `bits` is the precision of the stored weights, see
    `numerical_rank`.

    Formula: with W'W = V S^2 V', energy = (V' r)^2; when F < D the small side is used: W W' = U S^2 U' and
    v_a . r = (u_a . W r) / s_a. All of it in fp64: an fp32 Gram matrix errs by 1e-2 at condition number 1e3.

    Squaring W costs half the digits at the small end of the spectrum, so the result is checked
    (`gram_suffices`), and rank-deficient and very ill-conditioned experts are decomposed again without
    squaring. Misleads where k cuts a tie of singular values: the leading subspace is then not defined, by any
    method.
    """
    import torch

    if precision not in TOLERANCE:
        raise unknown_name("precision", precision, list(TOLERANCE))
    hidden, width = matrix_FD.shape
    long_side = max(hidden, width)
    matrix, scale = remove_scale(matrix_FD)
    W, rows = matrix.numpy(), routers_ED.to(torch.float64).contiguous().numpy()
    bits = bits or tensor_bits(matrix_FD)
    fallback = True
    try:
        solution = solve_gram(W, rows, leading)
        rank = int(numerical_rank(solution.values_R, (hidden, width), bits))
        squares, coordinates = map(torch.from_numpy, (solution.values_R**2, solution.coordinates_ER))
        ks = within_rank(k_grid, rank)
        fallback = not gram_suffices(
            squares[None], coordinates[None], long_side, hidden >= width, ks, TOLERANCE[precision]
        )
    except np.linalg.LinAlgError:  # the Gram matrix has no square root: rank-deficient
        pass
    if fallback:
        solution = solve_bidiagonal(W, rows, leading)
        rank = int(numerical_rank(solution.values_R, (hidden, width), bits))
    solution = Solution(*(part[..., :rank] for part in solution))
    orientation = np.where(matrix.mean(0).numpy() @ solution.leading_DK < 0, -1.0, 1.0)
    return Decomposition(
        singular_values_R=solution.values_R * scale,
        energy_ER=solution.coordinates_ER**2,
        leading_DK=solution.leading_DK * orientation,
        full_rank=min(hidden, width),
        fallback=fallback,
    )


def tensor_bits(matrix: Tensor) -> int:
    """Significand bits of the tensor's dtype: 8 for bf16, 24 for fp32."""
    import torch

    return 1 - int(math.log2(torch.finfo(matrix.dtype).eps))


def numerical_rank(values: Any, shape: tuple[int, ...], bits: int) -> Any:
    """Number of singular values [..., R] (array or tensor, descending) that rounding cannot have made.

    Weights stored with p significand bits differ from those meant by up to 2^-p of each, and a matrix of
    such errors has singular values up to 2^-p rms(W) (sqrt m + sqrt n). The error of an SVD in fp64, max(m,
    n) eps s_1, is the tolerance where it is larger, as for weights stored in fp64. A weaker direction may be
    real: what is stored cannot tell. Weights computed, not only stored, in few bits carry larger errors: the
    product of two factors in fp32 arithmetic may exceed the tolerance.

    The bound takes rows and columns of about equal norm. Rounding errors of a few large ones exceed it: 512 x
    512 matrices of rank 10 in bf16 got rank 11 to 13 in 179 of 200 cases with log-normal norms of rows or of
    columns (sigma 1), 11 in 7 of 200 with sigma 0.5, and 10 in all 200 with sigma 0.25.
    """
    height, width = shape
    rms = ((values**2).sum(-1) / (height * width)) ** 0.5
    stored = 2.0**-bits * rms * (math.sqrt(height) + math.sqrt(width))
    computed = max(shape) * float(np.finfo(float).eps) * values[..., 0]
    return ((values > stored[..., None]) & (values > computed[..., None])).sum(-1)


def random_rank(shape: tuple[int, int], bits: int) -> float:
    """Expected `numerical_rank` of a large Gaussian matrix: the smaller side, less the singular values below
    the tolerance by Marchenko and Pastur's law (1967): 0.25 % of a square matrix in bf16, none of 1 : 2."""
    side = min(shape)
    root = math.sqrt(side / max(shape))
    low, tolerance = 1 - root, 2.0**-bits * (1 + root)  # over rms(W) and the root of the longer side
    if tolerance <= low:
        return float(side)
    middles = low + (tolerance - low) * (np.arange(1024) + 0.5) / 1024
    density = np.sqrt((middles**2 - low**2) * ((1 + root) ** 2 - middles**2)) / (np.pi * root**2 * middles)
    return side * (1 - float(density.mean()) * (tolerance - low))


def within_rank(k_grid: list[int], rank: int) -> list[int]:
    """The ks at which align must be accurate: those of the grid below the rank, and the rank."""
    return sorted({max(min(k, rank), 1) for k in (*k_grid, rank)})


def remove_scale(matrix_FD: Tensor) -> tuple[Tensor, float]:
    """(W / scale in contiguous fp64, scale), scale a power of two, so that nothing is rounded.

    Squares of very large or small weights would leave fp64's range.
    """
    import torch

    matrix = matrix_FD.to(torch.float64, memory_format=torch.contiguous_format)
    lowest, highest = torch.aminmax(matrix)
    exponent = math.frexp(max(-float(lowest), float(highest)))[1]
    if abs(exponent) <= 256:  # ordinary weights: not worth a copy
        return matrix, 1.0
    scale = 2.0 ** (exponent - 1)
    return matrix / scale, scale


def gram_suffices(
    squares_BR: Tensor,
    coordinates_BER: Tensor,
    long_side: int,
    tall: bool,
    k_grid: list[int],
    tolerance: float,
) -> Tensor:
    """[B]: whether the possible error of align by the Gram method is within the tolerance at every k.

    Rounding adds noise of norm e = 8 eps lambda_1 to the Gram matrix. To first order align(k) then changes by
    2 sum over a <= k < b of E_ab x_a x_b / (lambda_a - lambda_b), x the router's coordinates. The entries of
    such noise have no common sign and are far smaller than its norm, so the terms are added as squares with
    E_ab = e; a sum of absolute values would be five orders too large at 4096 dimensions. For wide W, whose
    coordinates are divided by s_a, each term carries s_b / s_a, and e sum over a <= k of x_a^2 / lambda_a is
    added. Fails where that is too much, where e is not small against the gap at k (first order is invalid
    there), or where an eigenvalue is within rounding of zero, so that the rank is uncertain. Any k near the
    top (s_k > s_1 / 8) passes: an SVD of W does no better there.
    """
    import torch

    rank = squares_BR.shape[1]
    noise_B = 8 * torch.finfo(torch.float64).eps * squares_BR[:, 0]
    fine_B = squares_BR[:, -1] > noise_B * long_side  # False for NaN too
    energy, values = coordinates_BER.square(), squares_BR.sqrt()
    for k in k_grid:
        top_B = squares_BR[:, k - 1] >= squares_BR[:, 0] / 64
        if not bool((fine_B & ~top_B).any()):
            continue
        small_B = torch.ones_like(fine_B)
        error_BE = torch.zeros_like(energy[..., 0])
        if not tall:
            error_BE = (energy[..., :k] / squares_BR[:, None, :k]).sum(-1)
        if k < rank:
            small_B = squares_BR[:, k - 1] - squares_BR[:, k] > 10 * noise_B
            mixing = 1 / (squares_BR[:, :k, None] - squares_BR[:, None, k:])
            if not tall:
                mixing *= values[:, None, k:] / values[:, :k, None]
            error_BE = error_BE + 2 * (energy[..., :k] @ mixing.square() * energy[..., k:]).sum(-1).sqrt()
        fine_B = fine_B & (top_B | (small_B & (noise_B * error_BE.amax(1) <= tolerance)))
    return fine_B


def make_k_grid(full_rank: int, extra: tuple[int, ...] = ()) -> list[int]:
    """Powers of two up to the rank, the rank itself, and the `extra` values that do not exceed it."""
    powers = [2**power for power in range(full_rank.bit_length())]
    return sorted({k for k in (*powers, full_rank, *extra) if 1 <= k <= full_rank})


def spectrum_statistics(singular_values_R: Array) -> dict[str, float | int]:
    """Norms and ranks of one matrix from its singular values (descending, all above the rank tolerance).

    stable_rank = ||W||_F^2 / s_1^2; effective_rank = exp of the entropy of s / sum(s) (Roy and Vetterli
    2007); condition = s_1 / s_rank, over the nonzero singular values.
    """
    s = singular_values_R
    share = s / s.sum()
    energy = float((s**2).sum())
    return {
        "frobenius": float(np.sqrt(energy)),
        "spectral_norm": float(s[0]),
        "stable_rank": energy / float(s[0]) ** 2,
        "effective_rank": float(np.exp(-(share * np.log(share)).sum())),
        "rank": len(s),
        "condition": float(s[0] / s[-1]),
    }
