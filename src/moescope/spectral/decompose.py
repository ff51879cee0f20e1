"""One decomposition per expert, from which every analysis of its weights is made."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from moescope.errors import unknown_name
from moescope.spectral.lapack import blas, lapack, lapack_with_workspace, product
from moescope.types import Array

if TYPE_CHECKING:
    from torch import Tensor

# --- the spectrum of one expert, without forming all singular vectors

LEAF = 25  # size at which dlasda stops dividing
DENSE = 64  # up to this size forming all singular vectors costs nothing
FP32_BITS = 24  # significand
ROUTERS_PER_DIMENSION = 1 / 16  # beyond, all eigenvectors are quicker than the compact form (measured: 0.07)


class Solution(NamedTuple):
    """One expert's spectrum by some method, not yet checked for accuracy."""

    values_R: Array  # singular values, descending
    coordinates_ER: Array  # v_a . r_i, with arbitrary signs
    leading_DK: Array  # the first right singular vectors, with arbitrary signs


class BidiagonalSVD:
    """U S V' of the upper bidiagonal B, with U and V stored as the divide-and-conquer steps that make them.

    Applying U' to n vectors takes O(n d^2); U and V, which take O(d^3), are never formed. These are the
    routines of LAPACK's least-squares driver dgelsd (dlasda, dlalsa); Gu and Eisenstat, SIAM J. Matrix Anal.
    Appl. 16 (1995).
    """

    def __init__(self, diagonal_R: Array, above_R: Array) -> None:
        size = len(diagonal_R)
        self.scale = float(max(np.abs(diagonal_R).max(), np.abs(above_R).max(initial=0.0)))
        values, above = diagonal_R / self.scale, np.append(above_R / self.scale, 0.0)
        if size <= DENSE:
            left, values, right = np.linalg.svd(np.diag(values) + np.diag(above[:-1], 1))
            self.dense, self.order = (left, right.T), np.arange(size)
        else:
            # As in LAPACK's drivers, a diagonal entry within rounding of zero is moved to where division is
            # safe.
            tiny = np.finfo(float).eps / 2
            values = np.where(np.abs(values) < tiny, np.copysign(tiny, values), values)
            levels = int(np.log2(size / (LEAF + 1))) + 1
            # dlasda's arguments u, vt, difl, difr, z, poles, givnum, c, s; then k, givptr, givcol, perm
            reals = (LEAF, LEAF + 1, levels, 2 * levels, levels, 2 * levels, 2 * levels, 1, 1)
            u, vt, *updates, givnum, c, s = (np.zeros((columns, size)) for columns in reals)
            integers = (1, 1, 2 * levels, levels)
            k, givptr, givcol, perm = (np.zeros((columns, size), np.int32) for columns in integers)
            self.steps: tuple[Any, ...] = (u, size, vt, k, *updates, givptr, givcol, size, perm, givnum, c, s)
            self.workspace = np.empty(6 * size + (LEAF + 1) ** 2), np.empty(7 * size, np.int32)
            lapack("dlasda", 1, LEAF, size, 0, values, above, *self.steps, *self.workspace)
            self.order = np.argsort(-values, kind="stable")
        self.values_R: Array = values[self.order] * self.scale

    def left_coordinates(self, rows_ER: Array) -> Array:
        """[E, R]: u_a . row for each row, in the order of the singular values."""
        if len(self.order) <= DENSE:
            return rows_ER @ self.dense[0]
        return self.apply(0, rows_ER)[:, self.order]

    def right_vectors(self, count: int) -> Array:
        """[R, count]: the first right singular vectors."""
        if len(self.order) <= DENSE:
            return self.dense[1][:, :count]
        return self.apply(1, (self.order[:count, None] == np.arange(len(self.order))).astype(float)).T

    def apply(self, right: int, rows: Array) -> Array:
        source, result = rows.copy(), np.empty_like(rows)  # dlalsa overwrites its input
        n, size = rows.shape
        lapack("dlalsa", right, LEAF, size, n, source, size, result, size, *self.steps, *self.workspace)
        return result


def solve_bidiagonal(matrix_FD: Array, routers_ED: Array, leading: int) -> Solution:
    """Solve to the accuracy of an SVD: W is reduced to bidiagonal form, never squared.

    Formula: with the triangular factor X of W (W' = X Q if tall, W' = Q X if wide), the right singular
    vectors of W are the left ones of X (times Q, if wide), and X = Q1 B P1' for a bidiagonal B: v_a . r =
    u_a(B) . Q1' r, or Q1' Q' r. For the leading vectors B is flipped about its antidiagonal, which turns its
    left singular vectors into right ones: the compact form can only form those one by one.
    """
    hidden, width = matrix_FD.shape
    size = min(hidden, width)
    reduced = np.array(matrix_FD, order="C")  # C order [F, D] is W' to LAPACK; overwritten
    outer_scales = np.empty(size)
    rows = routers_ED.copy()
    outer = (size, reduced, width, outer_scales)
    if hidden >= width:
        lapack_with_workspace("dgelqf", width, hidden, *outer[1:])
        triangle = np.tril(reduced[:size].T)
    else:
        lapack_with_workspace("dgeqrf", width, hidden, *outer[1:])
        triangle = np.triu(reduced[:, :size].T)
        lapack_with_workspace("dormqr", "L", "T", width, len(rows), *outer, rows, width)
        rows = rows[:, :size].copy()
    triangle = np.asfortranarray(triangle)
    diagonal, above, left_scales, right_scales = (np.empty(size) for _ in range(4))
    lapack_with_workspace("dgebrd", size, size, triangle, size, diagonal, above, left_scales, right_scales)
    above = above[:-1]

    def rotate(rows_NR: Array, transposed: str) -> None:
        factor = (size, triangle, size, left_scales)
        lapack_with_workspace("dormbr", "Q", "L", transposed, size, len(rows_NR), *factor, rows_NR, size)

    rotate(rows, "T")
    svd = BidiagonalSVD(diagonal, above)
    coordinates = svd.left_coordinates(rows)
    mirrored = BidiagonalSVD(diagonal[::-1], above[::-1])
    vectors = np.ascontiguousarray(mirrored.right_vectors(min(leading, size))[::-1].T)
    rotate(vectors, "N")
    if hidden < width:
        vectors = np.pad(vectors, ((0, 0), (0, width - size)))
        lapack_with_workspace("dormqr", "L", "N", width, len(vectors), *outer, vectors, width)
    return Solution(svd.values_R, coordinates, vectors.T)


def solve_gram(matrix_FD: Array, routers_ED: Array, leading: int) -> Solution:
    """Solve quickly, from the eigenvalues of W'W, or of WW' where that is smaller.

    Formula: W'W = Q T Q' with T tridiagonal, T = Z S^2 Z'; then v_a . r = z_a . Q' r. Only the leading
    vectors Q z_a are formed. When F < D, WW' is used: v_a . r = (z_a . Q' W r) / s_a and v_a = W' Q z_a /
    s_a, made orthogonal to the stronger ones, of which rounding leaves a part in it.

    Squaring costs half the digits at the small end of the spectrum: the caller must check the result. Raises
    LinAlgError where W'W is not positive definite to rounding.
    """
    from scipy.linalg import qr

    hidden, width = matrix_FD.shape
    tall, size = hidden >= width, min(hidden, width)
    leading = min(leading, size)
    gram = np.empty((size, size))
    matrix = np.ascontiguousarray(matrix_FD)  # which is W' to LAPACK
    blas("dsyrk", "L", "N" if tall else "T", size, max(hidden, width), 1.0, matrix, width, 0.0, gram, size)
    rows = np.array(routers_ED, order="C") if tall else product(routers_ED, matrix, transposed=True)

    diagonal, beside, scales = np.empty(size), np.empty(size), np.empty(size)
    lapack_with_workspace("dsytrd", "L", size, gram, size, diagonal, beside, scales)
    beside = beside[: size - 1]

    def rotate(vectors_NR: Array, transposed: str) -> None:
        n = len(vectors_NR)
        lapack_with_workspace("dormtr", "L", "L", transposed, size, n, gram, size, scales, vectors_NR, size)

    rotate(rows, "T")
    if size <= DENSE or len(rows) > ROUTERS_PER_DIMENSION * size:
        squares, eigenvectors = all_eigenvectors(diagonal, beside)
        values = np.sqrt(np.maximum(squares, 0))
        coordinates, vectors = product(rows, eigenvectors, transposed=True), eigenvectors[:leading].copy()
        if not values[-1] > 0:
            raise np.linalg.LinAlgError("the Gram matrix is not positive definite")
    else:
        svd = BidiagonalSVD(*bidiagonal_root(diagonal, beside))
        values, coordinates = svd.values_R, svd.left_coordinates(rows)
        vectors = leading_eigenvectors(diagonal, beside, leading)
    rotate(vectors, "N")
    if not tall:
        coordinates = coordinates / values
        vectors = qr(product(vectors, matrix).T, mode="economic", check_finite=False)[0].T
    return Solution(values, coordinates, vectors.T)


def bidiagonal_root(diagonal_R: Array, beside_R: Array) -> tuple[Array, Array]:
    """(diagonal, superdiagonal) of the upper bidiagonal B with BB' = T: B's left singular vectors are T's
    eigenvectors."""
    from scipy.linalg.lapack import dpttrf

    # Cholesky gives a lower factor; applied from the last row upwards, it gives the upper one.
    pivots, ratios, info = dpttrf(diagonal_R[::-1], beside_R[::-1])
    if info:
        raise np.linalg.LinAlgError("the Gram matrix is not positive definite")
    roots = np.sqrt(pivots)
    return roots[::-1], (ratios * roots[:-1])[::-1]


def all_eigenvectors(diagonal_R: Array, beside_R: Array) -> tuple[Array, Array]:
    """(eigenvalues, descending; eigenvectors, one per row) of the tridiagonal T."""
    size = len(diagonal_R)
    eigenvalues, vectors = diagonal_R.copy(), np.empty((size, size))
    reals, integers = 1 + 4 * size + size**2, 3 + 5 * size
    workspace = (np.empty(reals), reals, np.empty(integers, np.int32), integers)
    lapack("dstevd", "V", size, eigenvalues, np.append(beside_R, 0.0), vectors, size, *workspace)
    return eigenvalues[::-1], vectors[::-1]


def leading_eigenvectors(diagonal_R: Array, beside_R: Array, count: int) -> Array:
    """[count, R]: T's eigenvectors of the largest eigenvalues, largest first, one per row."""
    size = len(diagonal_R)
    vectors = np.empty((count, size))
    selection = (0.0, 0.0, size - count + 1, size)  # vl, vu (unused), il, iu
    results = (np.zeros(1, np.int32), np.empty(size), vectors, size, count, np.empty(2 * count, np.int32))
    reals, integers = np.empty(18 * size), np.empty(10 * size, np.int32)
    workspace = (np.ones(1, np.int32), reals, len(reals), integers, len(integers))
    beside = np.append(beside_R, 0.0)
    lapack("dstemr", "V", "I", size, diagonal_R.copy(), beside, *selection, *results, *workspace)
    return np.ascontiguousarray(vectors[::-1])


# --- one decomposition per expert

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
    shape = matrix_FD.shape
    matrix = matrix_FD.to(torch.float64, memory_format=torch.contiguous_format)
    # Squares of very large or small weights would leave fp64's range; dividing by a power of two rounds
    # nothing. Ordinary weights are not worth a copy.
    lowest, highest = torch.aminmax(matrix)
    exponent = math.frexp(max(-float(lowest), float(highest)))[1]
    scale = 2.0 ** (exponent - 1) if abs(exponent) > 256 else 1.0
    matrix = matrix if scale == 1.0 else matrix / scale
    W, rows = matrix.numpy(), routers_ED.to(torch.float64).contiguous().numpy()
    bits = bits or tensor_bits(matrix_FD)
    fallback = True
    with suppress(np.linalg.LinAlgError):  # the Gram matrix has no square root: rank-deficient
        solution = solve_gram(W, rows, leading)
        rank = int(numerical_rank(solution.values_R, shape, bits))
        squares, coordinates = map(torch.from_numpy, (solution.values_R**2, solution.coordinates_ER))
        ks = within_rank(k_grid, rank)
        fallback = not gram_suffices(squares[None], coordinates[None], shape, ks, TOLERANCE[precision])
    if fallback:
        solution = solve_bidiagonal(W, rows, leading)
        rank = int(numerical_rank(solution.values_R, shape, bits))
    solution = Solution(*(part[..., :rank] for part in solution))
    orientation = np.where(matrix.mean(0).numpy() @ solution.leading_DK < 0, -1.0, 1.0)
    return Decomposition(
        singular_values_R=solution.values_R * scale,
        energy_ER=solution.coordinates_ER**2,
        leading_DK=solution.leading_DK * orientation,
        full_rank=min(shape),
        fallback=fallback,
    )


def tensor_bits(matrix: Tensor) -> int:
    """Significand bits of the tensor's dtype: 8 for bf16, 24 for fp32."""
    import torch

    return 1 - int(math.log2(torch.finfo(matrix.dtype).eps))


def numerical_rank(values: Any, shape: Sequence[int], bits: int) -> Any:
    """Number of singular values [..., R] (array or tensor, descending) that rounding cannot have made.

    Weights stored with p significand bits differ from those meant by up to 2^-p of each, and a matrix of
    such errors has singular values up to 2^-p rms(W) (sqrt m + sqrt n). The error of an SVD in fp64, max(m,
    n) eps s_1, is the tolerance where it is larger, as for weights stored in fp64. A weaker direction may be
    real: what is stored cannot tell.

    Weights stored in fp32 were also computed in it, which adds errors: the first singular value beyond the
    rank of a product of two fp32 factors is up to 3.3 times the bound (Gaussian factors, inner sizes 1 to
    384, sides 64 to 1024; 1.3 times at rank 10). The bound is four times larger there. In fewer bits, sums
    are formed in fp32 and rounded once: the bound holds for products too, except of rank 1 (1.3 times).

    The bound takes rows and columns of about equal norm. Rounding errors of a few large ones exceed it: 512 x
    512 matrices of rank 10 in bf16 got rank 11 to 13 in 179 of 200 cases with log-normal norms of rows or of
    columns (sigma 1), 11 in 7 of 200 with sigma 0.5, and 10 in all 200 with sigma 0.25.
    """
    height, width = shape
    rms = ((values**2).sum(-1) / (height * width)) ** 0.5
    bits = bits - 2 if bits == FP32_BITS else bits
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


def gram_suffices(
    squares_BR: Tensor, coordinates_BER: Tensor, shape: Sequence[int], k_grid: list[int], tolerance: float
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

    rank, tall = squares_BR.shape[1], shape[0] >= shape[1]
    noise_B = 8 * torch.finfo(torch.float64).eps * squares_BR[:, 0]
    fine_B = squares_BR[:, -1] > noise_B * max(shape)  # False for NaN too
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


# --- several experts at once

Item = TypeVar("Item")
Result = TypeVar("Result")


def submitted(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[tuple[int, Item]], ahead: int
) -> Iterator[tuple[int, Future[Result]]]:
    """Yield (expert, future of work(item)) in input order; up to `ahead` items are in the pool at a time."""
    pending: deque[tuple[int, Future[Result]]] = deque()
    for expert, item in items:
        pending.append((expert, pool.submit(work, item)))
        del item  # the worker holds the only reference, so memory is freed when it finishes
        if len(pending) >= ahead:
            yield pending.popleft()
    while pending:
        yield pending.popleft()
