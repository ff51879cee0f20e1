"""The quick route.

The smaller Gram matrix of an expert, made tridiagonal, and only what is asked of its eigenvectors.
"""

from __future__ import annotations

import numpy as np

from moescope.spectral.arrays import Array
from moescope.spectral.bidiagonal import BidiagonalSVD, Solution
from moescope.spectral.lapack import blas, lapack, lapack_with_workspace, product

ALL_VECTORS_UP_TO = 64  # dimensions; below, forming all eigenvectors costs nothing
ROUTERS_PER_DIMENSION = (
    1 / 16
)  # beyond, all eigenvectors at once are quicker than the compact form (measured: 0.07)


def by_gram_matrix(matrix_FD: Array, routers_ED: Array, leading: int) -> Solution:
    """Singular values, coordinates and leading vectors from the eigenvalues of W'W, or of WW' where that is
    smaller.

    Formula: W'W = Q T Q' with T tridiagonal, T = Z S^2 Z'; then v_a . r = z_a . Q' r. Of the d vectors Q z_a
    only the leading
    ones are formed: what the others are needed for is n numbers each. When F < D, WW' is taken, v_a . r =
    (z_a . Q' W r) / s_a
    and v_a = W' Q z_a / s_a.

    Squaring costs half the digits at the small end of the spectrum; raises LinAlgError where W'W is not
    positive definite to
    rounding, and is otherwise to be checked by who asks.
    """
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

    def turned(vectors_NR: Array, transposed: str) -> None:
        n = len(vectors_NR)
        lapack_with_workspace("dormtr", "L", "L", transposed, size, n, gram, size, scales, vectors_NR, size)

    turned(rows, "T")
    if size <= ALL_VECTORS_UP_TO or len(rows) > ROUTERS_PER_DIMENSION * size:
        squares, eigenvectors = all_eigenvectors(diagonal, beside)
        values = np.sqrt(np.maximum(squares, 0))
        coordinates, vectors = product(rows, eigenvectors, transposed=True), eigenvectors[:leading].copy()
        if not values[-1] > 0:
            raise np.linalg.LinAlgError("the Gram matrix is not positive definite")
    else:
        svd = BidiagonalSVD(*bidiagonal_root(diagonal, beside))
        values, coordinates = svd.values_R, svd.left_coordinates(rows)
        vectors = leading_eigenvectors(diagonal, beside, leading)
    turned(vectors, "N")
    if not tall:
        coordinates = coordinates / values
        vectors = product(vectors, matrix) / values[:leading, None]
    return Solution(values, coordinates, vectors.T)


def bidiagonal_root(diagonal_R: Array, beside_R: Array) -> tuple[Array, Array]:
    """(diagonal, above it) of the upper bidiagonal B with BB' = T.

    Whose left singular vectors are T's eigenvectors.
    """
    from scipy.linalg.lapack import dpttrf

    # Cholesky gives a lower factor; from the last row upwards, it gives the upper one.
    pivots, ratios, info = dpttrf(diagonal_R[::-1], beside_R[::-1])
    if info:
        raise np.linalg.LinAlgError("the Gram matrix is not positive definite")
    roots = np.sqrt(pivots)
    return roots[::-1], (ratios * roots[:-1])[::-1]


def all_eigenvectors(diagonal_R: Array, beside_R: Array) -> tuple[Array, Array]:
    """(eigenvalues, falling; eigenvectors, one a row) of the tridiagonal T."""
    size = len(diagonal_R)
    eigenvalues, vectors = diagonal_R.copy(), np.empty((size, size))
    reals, wholes = 1 + 4 * size + size**2, 3 + 5 * size
    beside = np.append(beside_R, 0.0)
    lapack(
        "dstevd",
        "V",
        size,
        eigenvalues,
        beside,
        vectors,
        size,
        np.empty(reals),
        reals,
        np.empty(wholes, np.int32),
        wholes,
    )
    return eigenvalues[::-1], vectors[::-1]


def leading_eigenvectors(diagonal_R: Array, beside_R: Array, count: int) -> Array:
    """[count, R]: T's eigenvectors of the largest eigenvalues, largest first, one a row."""
    size = len(diagonal_R)
    found, eigenvalues, vectors = np.zeros(1, np.int32), np.empty(size), np.empty((count, size))
    support, with_accuracy = np.empty(2 * count, np.int32), np.ones(1, np.int32)
    lapack(
        "dstemr",
        "V",
        "I",
        size,
        diagonal_R.copy(),
        np.append(beside_R, 0.0),
        0.0,
        0.0,
        size - count + 1,
        size,
        found,
        eigenvalues,
        vectors,
        size,
        count,
        support,
        with_accuracy,
        np.empty(18 * size),
        18 * size,
        np.empty(10 * size, np.int32),
        10 * size,
    )
    return np.ascontiguousarray(vectors[::-1])
