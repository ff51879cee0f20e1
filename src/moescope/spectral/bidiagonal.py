"""The singular value decomposition of an expert without its singular vectors.

What the routers' coordinates need, no more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moescope.spectral.arrays import Array
from moescope.spectral.lapack import lapack, lapack_with_workspace

LEAF = 25  # size at which dlasda stops dividing
DENSE = 64  # up to this size all singular vectors are formed: nothing is won by avoiding it


class Solution(NamedTuple):
    """One expert's spectrum by some route; nothing is said of how far it may be trusted."""

    values_R: Array  # singular values, falling
    coordinates_ER: Array  # v_a . r_i, signs as they come
    leading_DK: Array  # the first right singular vectors, signs as they come


class BidiagonalSVD:
    """U S V' of the upper bidiagonal B, with U and V kept as the steps of divide and conquer that make them.

    Applying U' to n vectors then takes O(n d^2), and U and V, which take O(d^3), are never formed. These are
    the routines
    of LAPACK's least-squares driver dgelsd (dlasda, dlalsa); Gu and Eisenstat, SIAM J. Matrix Anal. Appl. 16
    (1995).
    """

    def __init__(self, diagonal_R: Array, above_R: Array) -> None:
        size = len(diagonal_R)
        self.scale = float(max(np.abs(diagonal_R).max(), np.abs(above_R).max(initial=0.0)))
        values, above = diagonal_R / self.scale, np.append(above_R / self.scale, 0.0)
        if size <= DENSE:
            left, values, right = np.linalg.svd(np.diag(values) + np.diag(above[:-1], 1))
            self.dense, self.order = (left, right.T), np.arange(size)
        else:
            # As LAPACK's drivers do: a diagonal entry within rounding of zero is put where division by it is
            # safe.
            tiny = np.finfo(float).eps / 2
            values = np.where(np.abs(values) < tiny, np.copysign(tiny, values), values)
            levels = int(np.log2(size / (LEAF + 1))) + 1
            reals = {  # in dlasda's own names
                "u": LEAF,
                "vt": LEAF + 1,
                "difl": levels,
                "difr": 2 * levels,
                "z": levels,
                "poles": 2 * levels,
                "givnum": 2 * levels,
                "c": 1,
                "s": 1,
            }
            real = {name: np.zeros((columns, size)) for name, columns in reals.items()}
            whole = {
                name: np.zeros((columns, size), np.int32)
                for name, columns in {"k": 1, "givptr": 1, "givcol": 2 * levels, "perm": levels}.items()
            }
            self.steps = (
                real["u"],
                size,
                real["vt"],
                whole["k"],
                real["difl"],
                real["difr"],
                real["z"],
                real["poles"],
                whole["givptr"],
                whole["givcol"],
                size,
                whole["perm"],
                real["givnum"],
                real["c"],
                real["s"],
            )
            self.workspace = np.empty(6 * size + (LEAF + 1) ** 2), np.empty(7 * size, np.int32)
            lapack("dlasda", 1, LEAF, size, 0, values, above, *self.steps, *self.workspace)
            self.order = np.argsort(-values, kind="stable")
        self.values_R: Array = values[self.order] * self.scale

    def left_coordinates(self, rows_ER: Array) -> Array:
        """[E, R]: u_a . row for each row, in the order of the singular values."""
        if len(self.order) <= DENSE:
            return rows_ER @ self.dense[0]
        return self.applied(0, rows_ER)[:, self.order]

    def right_vectors(self, count: int) -> Array:
        """[R, count]: the first right singular vectors."""
        if len(self.order) <= DENSE:
            return self.dense[1][:, :count]
        chosen = self.order[:count]
        units = np.zeros((len(chosen), len(self.order)))
        units[np.arange(len(chosen)), chosen] = 1.0
        return self.applied(1, units).T

    def applied(self, right: int, rows: Array) -> Array:
        given, result = rows.copy(), np.empty_like(rows)  # dlalsa overwrites what it is given
        size = len(self.order)
        lapack(
            "dlalsa", right, LEAF, size, len(rows), given, size, result, size, *self.steps, *self.workspace
        )
        return result


def by_bidiagonal_form(matrix_FD: Array, routers_ED: Array, leading: int) -> Solution:
    """Singular values, coordinates and leading vectors to the accuracy of an SVD: W itself is reduced, never
    its square.

    Formula: with the triangular factor X of W (W' = X Q if tall, W' = Q X if wide), the right singular
    vectors of W are the
    left ones of X (times Q, if wide), and X = Q1 B P1' for a bidiagonal B: v_a . r = u_a(B) . Q1' r, or Q1'
    Q' r.
    For the leading vectors B is turned about its antidiagonal, which makes its left singular vectors right
    ones, since
    those are what the compact form can give one by one.
    """
    hidden, width = matrix_FD.shape
    size = min(hidden, width)
    reduced = np.array(matrix_FD, order="C")  # C order [F, D] is W' to LAPACK; overwritten
    outer_scales = np.empty(size)
    if hidden >= width:
        lapack_with_workspace("dgelqf", width, hidden, reduced, width, outer_scales)
        triangle = np.tril(reduced[:size].T)
        rows = routers_ED.copy()
    else:
        lapack_with_workspace("dgeqrf", width, hidden, reduced, width, outer_scales)
        triangle = np.triu(reduced[:, :size].T)
        rows = routers_ED.copy()
        lapack_with_workspace(
            "dormqr", "L", "T", width, len(rows), size, reduced, width, outer_scales, rows, width
        )
        rows = rows[:, :size].copy()
    triangle = np.asfortranarray(triangle)
    diagonal, above, left_scales, right_scales = (np.empty(size) for _ in range(4))
    lapack_with_workspace("dgebrd", size, size, triangle, size, diagonal, above, left_scales, right_scales)
    above = above[:-1]

    def turned(rows_NR: Array, transposed: str) -> None:
        lapack_with_workspace(
            "dormbr",
            "Q",
            "L",
            transposed,
            size,
            len(rows_NR),
            size,
            triangle,
            size,
            left_scales,
            rows_NR,
            size,
        )

    turned(rows, "T")
    svd = BidiagonalSVD(diagonal, above)
    coordinates = svd.left_coordinates(rows)
    mirrored = BidiagonalSVD(diagonal[::-1], above[::-1])
    vectors = np.ascontiguousarray(mirrored.right_vectors(min(leading, size))[::-1].T)
    turned(vectors, "N")
    if hidden < width:
        vectors = np.pad(vectors, ((0, 0), (0, width - size)))
        lapack_with_workspace(
            "dormqr", "L", "N", width, len(vectors), size, reduced, width, outer_scales, vectors, width
        )
    return Solution(svd.values_R, coordinates, vectors.T)
