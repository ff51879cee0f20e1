"""The reduction to tridiagonal form in two kernels a column, for GPUs where Triton is installed.

`batched_eigen.tridiagonalise` is the same in plain torch: some twenty kernels a column, each of which waits for the one before
it, and products that read both halves of a symmetric matrix. Here one kernel finishes a column's vectors and begins the next
column, the other multiplies the matrix by its Householder vector and reads each pair of mirrored tiles once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# No `from __future__ import annotations`: Triton reads the annotations of its kernels as they are.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moescope.spectral.batched_eigen import NEXT_TO_NOTHING, PANEL, Reduction, inner

TILE = 128  # rows and columns of the matrix that one program multiplies
CHUNK = 32  # rows of a tile held at once
ROWS = 64  # of the vectors, that one program of the other kernel works on
NOTHING = tl.constexpr(NEXT_TO_NOTHING)


@triton.jit(do_not_specialize=["column", "done", "first_tile"])  # else every sixteenth column would be compiled anew
def finish_and_begin(
    A, V, W, X, products, inner_parts, curvature, squares, factors, diagonal, N, column, done, first_tile, n_tiles, n_blocks,
    FINISH: tl.constexpr, BEGIN: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """FINISH: w of the column before, from the parts of the product. BEGIN: this column, brought up to date with the panel's vectors.

    `done` columns of the panel have a v; the last of them has no w yet. Rows above `column` are left alone.
    """
    matrix = tl.program_id(1).to(tl.int64)
    block = column // R + tl.program_id(0)
    rows = block * R + tl.arange(0, R)
    inside = (rows >= column) & (rows < N)
    head = tl.zeros([R], tl.float64)
    if BEGIN:
        head = tl.load(A + matrix * N * N + column.to(tl.int64) * N + rows, mask=inside, other=0.0)
    if FINISH:
        c = tl.arange(0, P)
        t = tl.arange(0, TILES)
        there = (t >= first_tile) & (t < n_tiles)
        parts = inner_parts + (matrix * n_tiles + t[:, None]) * (2 * P) + c[None, :]
        with_w = tl.sum(tl.load(parts, mask=there[:, None], other=0.0), 0)
        with_v = tl.sum(tl.load(parts + P, mask=there[:, None], other=0.0), 0)
        pair = tl.arange(0, PAIRS)
        left = n_tiles - first_tile
        bends = curvature + matrix * (n_tiles * (n_tiles + 1) // 2) + pair
        vAv = tl.sum(tl.load(bends, mask=pair < left * (left + 1) // 2, other=0.0), 0)
        tau = tl.load(factors + matrix * N + column - 1)
        shift = -0.5 * tau * tau * (vAv - 2 * tl.sum(with_w * with_v, 0))
        before = c < done - 1
        at = inside[:, None] & before[None, :]
        corner = column - done  # the panel's first column
        V_rows = V + matrix * N * N + rows.to(tl.int64) * N + corner
        W_rows = W + (matrix * N + rows) * P
        V_RP = tl.load(V_rows[:, None] + c[None, :], mask=at, other=0.0)
        W_RP = tl.load(W_rows[:, None] + c[None, :], mask=at, other=0.0)
        v = tl.load(V_rows + done - 1, mask=inside, other=0.0)
        slots = products + (matrix * n_tiles + t) * N
        product = tl.sum(tl.load(slots[:, None] + rows[None, :], mask=there[:, None] & inside[None, :], other=0.0), 0)
        w = tau * (product - tl.sum(V_RP * with_w[None, :] + W_RP * with_v[None, :], 1)) + shift * v
        tl.store(W_rows + done - 1, w, mask=inside)
        if BEGIN:  # every program needs the first entry of w, and makes it for itself
            V_P = tl.load(V + matrix * N * N + column.to(tl.int64) * N + corner + c, mask=before, other=0.0)
            W_P = tl.load(W + (matrix * N + column) * P + c, mask=before, other=0.0)
            product_0 = tl.sum(tl.load(slots + column, mask=there, other=0.0), 0)
            w_0 = tau * (product_0 - tl.sum(V_P * with_w + W_P * with_v, 0)) + shift
            head = head - tl.sum(V_RP * W_P[None, :] + W_RP * V_P[None, :], 1) - v * w_0 - w
    if BEGIN:
        head = tl.where(rows == column + 1, head + NOTHING, head)
        tl.store(X + matrix * N + rows, head, mask=inside)
        tl.store(diagonal + matrix * N + rows, head, mask=rows == column)
        below = tl.where(inside & (rows > column), head, 0.0)
        tl.store(squares + matrix * n_blocks + block, tl.sum(below * below, 0))


@triton.jit(do_not_specialize=["column", "done", "first_tile", "first_block"])
def multiply(
    A, V, W, X, products, inner_parts, curvature, squares, factors, beside, N, column, done, first_tile, first_block, n_tiles, n_blocks,
    T: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One tile on or below the diagonal, times the Householder vector on either side; what is left to be summed is stored by tile."""
    matrix = tl.program_id(1).to(tl.int64)
    pair = tl.program_id(0)
    down = ((tl.sqrt((8 * pair + 1).to(tl.float32)) - 1) / 2).to(tl.int32)
    down = tl.where(down * (down + 1) // 2 > pair, down - 1, down)
    down = tl.where((down + 1) * (down + 2) // 2 <= pair, down + 1, down)
    lower, upper = first_tile + down, first_tile + pair - down * (down + 1) // 2

    at = tl.arange(0, BLOCKS)
    known = (at >= first_block) & (at < n_blocks)
    norm = tl.sqrt(tl.sum(tl.load(squares + matrix * n_blocks + at, mask=known, other=0.0), 0))
    first = tl.load(X + matrix * N + column + 1)
    signed = tl.where(first < 0, -norm, norm)
    away = first + signed  # never cancels: both have one sign

    across = upper * T + tl.arange(0, T)
    x = tl.load(X + matrix * N + across, mask=(across > column) & (across < N), other=0.0)
    v_across = tl.where(across == column + 1, 1.0, x / away)
    slots = products + matrix * n_tiles * N
    sums = tl.zeros([C, T], tl.float64)
    bend = tl.zeros([C], tl.float64)
    for start in tl.static_range(0, T, C):
        rows = lower * T + start + tl.arange(0, C)
        x = tl.load(X + matrix * N + rows, mask=(rows > column) & (rows < N), other=0.0)
        v_rows = tl.where(rows == column + 1, 1.0, x / away)
        place = A + matrix * N * N + rows.to(tl.int64)[:, None] * N + across[None, :]
        tile = tl.load(place, mask=(rows < N)[:, None] & (across < N)[None, :], other=0.0)
        along = tl.sum(tile * v_across[None, :], 1)
        tl.store(slots + upper * N + rows, along, mask=rows < N)
        bend += along * v_rows
        sums += tile * v_rows[:, None]
    twice = tl.where(lower == upper, 1.0, 2.0)
    tl.store(curvature + matrix * (n_tiles * (n_tiles + 1) // 2) + pair, tl.sum(bend, 0) * twice)
    if lower != upper:
        tl.store(slots + lower * N + across, tl.sum(sums, 0), mask=across < N)
    else:
        c = tl.arange(0, P)
        with_w = tl.zeros([P], tl.float64)
        with_v = tl.zeros([P], tl.float64)
        for start in tl.static_range(0, T, C):
            rows = lower * T + start + tl.arange(0, C)
            below = (rows > column) & (rows < N)
            x = tl.load(X + matrix * N + rows, mask=below, other=0.0)
            v_rows = tl.where(rows == column + 1, 1.0, x / away)
            V_rows = V + matrix * N * N + rows.to(tl.int64) * N + column - done
            W_rows = W + (matrix * N + rows) * P
            panel = below[:, None] & (c < done)[None, :]
            with_w += tl.sum(tl.load(W_rows[:, None] + c[None, :], mask=panel, other=0.0) * v_rows[:, None], 0)
            with_v += tl.sum(tl.load(V_rows[:, None] + c[None, :], mask=panel, other=0.0) * v_rows[:, None], 0)
            tl.store(V_rows + done, v_rows, mask=below)
        parts = inner_parts + (matrix * n_tiles + lower) * (2 * P) + c
        tl.store(parts, with_w)
        tl.store(parts + P, with_v)
        if pair == 0:
            tl.store(factors + matrix * N + column, away / signed)
            tl.store(beside + matrix * N + column, -signed)


def tridiagonalise_fused(
    matrices_BNN: Tensor,
    vectors_BNV: Tensor,
    columns: int | None = None,
    sizes: tuple[int, int, int, int] = (TILE, CHUNK, ROWS, 8),
) -> Reduction:
    """What `batched_eigen.tridiagonalise` gives, to rounding; `matrices_BNN` is overwritten. `columns`: stop early, for a trial.

    With p = A v - V (W'v) - W (V'v) and w = tau p - (tau^2 / 2) (v'p) v, v'p is v'Av - 2 (W'v)'(V'v), so that all sums over rows
    come from one kernel: nothing has to be waited for between a product and the next column.
    """
    A, Y = matrices_BNN, vectors_BNV.clone()
    batch, N = A.shape[:2]
    T, C, R, warps = sizes
    tiles, blocks = triton.cdiv(N, T), triton.cdiv(N, R)
    V, W = torch.zeros_like(A), A.new_empty(batch, N, PANEL)
    X, products = A.new_empty(batch, N), A.new_empty(batch, tiles, N)
    inner_parts, curvature = A.new_empty(batch, tiles, 2 * PANEL), A.new_empty(batch, tiles * (tiles + 1) // 2)
    squares = A.new_empty(batch, blocks)
    diagonal, beside, factors = A.new_zeros(batch, N), A.new_zeros(batch, N), A.new_zeros(batch, N)
    shared = (A, V, W, X, products, inner_parts, curvature, squares, factors)
    several: dict[str, Any] = {
        "R": R, "P": PANEL, "TILES": triton.next_power_of_2(tiles), "PAIRS": triton.next_power_of_2(tiles * (tiles + 1) // 2)
    }  # fmt: skip

    def vectors(column: int, done: int, finish: bool, begin: bool) -> None:
        finish_and_begin[(blocks - column // R, batch)](
            *shared, diagonal, N, column, done, column // T, tiles, blocks, FINISH=finish, BEGIN=begin, num_warps=4, **several
        )  # fmt: skip

    last = N - 1 if columns is None else min(columns, N - 1)
    for start in range(0, last, PANEL):
        end = min(start + PANEL, last)
        for column in range(start, end):
            vectors(column, column - start, column > start, True)
            first_tile = (column + 1) // T
            left = tiles - first_tile
            multiply[(left * (left + 1) // 2, batch)](
                *shared, beside, N, column, column - start, first_tile, column // R, tiles, blocks,
                T=T, C=C, P=PANEL, BLOCKS=triton.next_power_of_2(blocks), num_warps=warps,
            )  # fmt: skip
        vectors(end, end - start, True, False)
        v, w = V[:, end:, start:end], W[:, end:, : end - start]
        A[:, end:, end:].baddbmm_(torch.cat([v, w], 2), torch.cat([w, v], 2).mT, alpha=-1)
        tail, panel = Y[:, start + 1 :], V[:, start + 1 :, start:end]
        triangle = inner(panel, factors[:, start:end]).tril()
        tail.baddbmm_(panel, torch.linalg.solve_triangular(triangle, panel.mT @ tail, upper=False), alpha=-1)
    diagonal[:, -1] = A[:, -1, -1]
    return Reduction(diagonal, beside[:, : N - 1], Y, V, factors[:, : N - 1])
