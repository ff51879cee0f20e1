"""Singular values of one expert, router coordinates and leading vectors, without forming all singular
vectors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moescope.spectral.lapack import blas, lapack, lapack_with_workspace, product
from moescope.types import Array

LEAF = 25  # size at which dlasda stops dividing
DENSE = 64  # up to this size forming all singular vectors costs nothing
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

            def real(columns: int) -> Array:
                return np.zeros((columns, size))

            def integer(columns: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
                return np.zeros((columns, size), np.int32)

            # dlasda's arguments u, ldu, vt, k, difl, difr, z, poles, givptr, givcol, ldgcol, perm, givnum, c,
            # s
            bases = (real(LEAF), size, real(LEAF + 1), integer(1))
            updates = (real(levels), real(2 * levels), real(levels), real(2 * levels))
            rotations = (integer(1), integer(2 * levels), size, integer(levels), real(2 * levels))
            self.steps = (*bases, *updates, *rotations, real(1), real(1))
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
        chosen = self.order[:count]
        units = np.zeros((len(chosen), len(self.order)))
        units[np.arange(len(chosen)), chosen] = 1.0
        return self.apply(1, units).T

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
