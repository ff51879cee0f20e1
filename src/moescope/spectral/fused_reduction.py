"""The reduction to tridiagonal form in two kernels a column, for GPUs where Triton is installed.

`batched_eigen.tridiagonalise` is the same in plain torch: some twenty kernels a column, each of which waits
for the one before
it, and products that read both halves of a symmetric matrix. Here one kernel finishes a column's vectors and
begins the next
column, the other multiplies the matrix by a vector and reads each pair of mirrored tiles once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# No `from __future__ import annotations`: Triton reads the annotations of its kernels as they are.
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moescope.spectral.batched_eigen import NEXT_TO_NOTHING, PANEL, Reduction, inner

CHUNK = 64  # rows of the panel, and pairs of tiles, that a program holds at a time
FEW_PAIRS = 1024
NOTHING = tl.constexpr(NEXT_TO_NOTHING)


class Sizes(NamedTuple):
    """How the work is cut. Measured on an H200; smaller ones serve tests."""

    tile: int = 64  # rows and columns of the matrix that one program multiplies
    warps: int = 4
    stretch: int = 128  # rows of the panel that one program multiplies
    rows: int = 32  # of the vectors, that one program of the other kernel works on


@triton.jit(
    do_not_specialize=["column", "done", "first_tile"]
)  # else every sixteenth column would be compiled anew
def multiply(
    A,
    V,
    W,
    X,
    products,
    panel_parts,
    bends,
    N,
    column,
    done,
    first_tile,
    n_tiles,
    n_stretches,
    n_pairs,
    T: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A x, one tile on or below the diagonal a program, used on either side; then W'x and V'x, one stretch of
    rows a program.

    What is left to be summed is stored by tile and by stretch. x is the column below the diagonal, 0 above:
    not yet scaled to a
    Householder vector, for which every program would have to wait for the column's norm first.
    """
    matrix = tl.program_id(1).to(tl.int64)
    pair = tl.program_id(0)
    x_at = X + matrix * N
    left = n_tiles - first_tile
    if pair < left * (left + 1) // 2:
        down = ((tl.sqrt((8 * pair + 1).to(tl.float32)) - 1) / 2).to(tl.int32)
        down = tl.where(down * (down + 1) // 2 > pair, down - 1, down)
        down = tl.where((down + 1) * (down + 2) // 2 <= pair, down + 1, down)
        lower, upper = first_tile + down, first_tile + pair - down * (down + 1) // 2
        rows, across = lower * T + tl.arange(0, T), upper * T + tl.arange(0, T)
        place = A + matrix * N * N + rows.to(tl.int64)[:, None] * N + across[None, :]
        if EVEN:
            tile = tl.load(place)
        else:
            tile = tl.load(place, mask=(rows < N)[:, None] & (across < N)[None, :], other=0.0)
        x_across = tl.load(x_at + across, mask=(across > column) & (across < N), other=0.0)
        x_rows = tl.load(x_at + rows, mask=(rows > column) & (rows < N), other=0.0)
        along = tl.sum(tile * x_across[None, :], 1)
        slots = products + matrix * n_tiles * N
        tl.store(slots + upper * N + rows, along, mask=rows < N)
        if lower != upper:
            tl.store(slots + lower * N + across, tl.sum(tile * x_rows[:, None], 0), mask=across < N)
        twice = tl.where(lower == upper, 1.0, 2.0)
        tl.store(bends + matrix * n_pairs + pair, tl.sum(along * x_rows, 0) * twice)
    else:
        # Other names than above: Triton wants a name to have one type in both branches.
        stretch = (column + 1) // S + pair - left * (left + 1) // 2
        c = tl.arange(0, P)
        with_w = tl.zeros([P], tl.float64)
        with_v = tl.zeros([P], tl.float64)
        for start in range(stretch * S, stretch * S + S, C):
            r = start + tl.arange(0, C)
            below = (r > column) & (r < N)
            at = below[:, None] & (c < done)[None, :]
            x = tl.load(x_at + r, mask=below, other=0.0)
            V_rows = V + matrix * N * N + r.to(tl.int64) * N + column - done
            W_CP = tl.load(W + (matrix * N + r)[:, None] * P + c[None, :], mask=at, other=0.0)
            V_CP = tl.load(V_rows[:, None] + c[None, :], mask=at, other=0.0)
            with_w += tl.sum(W_CP * x[:, None], 0)
            with_v += tl.sum(V_CP * x[:, None], 0)
        parts = panel_parts + (matrix * n_stretches + stretch) * (2 * P) + c
        tl.store(parts, with_w)
        tl.store(parts + P, with_v)


@triton.jit(do_not_specialize=["column", "done", "first_tile"])
def finish_and_begin(
    A,
    V,
    W,
    X,
    products,
    panel_parts,
    bends,
    N,
    column,
    done,
    first_tile,
    n_tiles,
    n_stretches,
    n_pairs,
    X_next,
    squares,
    squares_next,
    factors,
    beside,
    diagonal,
    n_blocks,
    FINISH: tl.constexpr,
    BEGIN: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    TILES: tl.constexpr,
    STRETCHES: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """FINISH: v and w of the column before, from the parts of the products. BEGIN: this column, brought up to
    date with the panel.

    With x the column before and s = copysign(norm, x_0): v = (x + s e_0) / (x_0 + s), so that A v, W'v and
    V'v follow from the
    products with x. `done` columns of the panel have been begun. Rows above `column` are left alone.
    """
    matrix = tl.program_id(1).to(tl.int64)
    block = column // R + tl.program_id(0)
    rows = block * R + tl.arange(0, R)
    inside = (rows >= column) & (rows < N)
    own_row = A + matrix * N * N + column.to(tl.int64) * N
    head = tl.load(own_row + rows, mask=inside, other=0.0)
    if FINISH:
        # All that is read, before the first sum: sums make a program's threads wait for each other, and loads
        # with them.
        at = tl.arange(0, BLOCKS)
        known = (at >= (column - 1) // R) & (at < n_blocks)
        squares_B = tl.load(squares + matrix * n_blocks + at, mask=known, other=0.0)
        x_0 = tl.load(X + matrix * N + column)
        x = tl.load(X + matrix * N + rows, mask=inside, other=0.0)
        c = tl.arange(0, P)
        before = c < done - 1
        corner = column - done  # the panel's first column
        V_P = tl.load(V + matrix * N * N + column.to(tl.int64) * N + corner + c, mask=before, other=0.0)
        W_P = tl.load(W + (matrix * N + column) * P + c, mask=before, other=0.0)
        s = tl.arange(0, STRETCHES)
        some = ((s >= column // S) & (s < n_stretches))[:, None] & before[None, :]
        parts = panel_parts + (matrix * n_stretches + s[:, None]) * (2 * P) + c[None, :]
        with_w_SP = tl.load(parts, mask=some, other=0.0)
        with_v_SP = tl.load(parts + P, mask=some, other=0.0)
        t = tl.arange(0, TILES)
        there = (t >= first_tile) & (t < n_tiles)
        slots = products + (matrix * n_tiles + t) * N
        Ax_0_T = tl.load(slots + column, mask=there, other=0.0)
        Ax_TR = tl.load(slots[:, None] + rows[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        corner_entry = tl.load(own_row + column)
        left = n_tiles - first_tile
        n_bends = left * (left + 1) // 2
        pair = tl.arange(0, PAIRS)
        bent = tl.load(bends + matrix * n_pairs + pair, mask=pair < n_bends, other=0.0)
        for start in range(PAIRS, n_bends, PAIRS):  # all at once would take up most registers
            bent += tl.load(bends + matrix * n_pairs + start + pair, mask=start + pair < n_bends, other=0.0)
        panel = inside[:, None] & before[None, :]
        V_rows = V + matrix * N * N + rows.to(tl.int64) * N + corner
        W_rows = W + (matrix * N + rows) * P
        V_RP = tl.load(V_rows[:, None] + c[None, :], mask=panel, other=0.0)
        W_RP = tl.load(W_rows[:, None] + c[None, :], mask=panel, other=0.0)

        norm = tl.sqrt(tl.sum(squares_B, 0))
        signed = tl.where(x_0 < 0, -norm, norm)
        away = x_0 + signed  # never cancels: both have one sign
        tau = away / signed
        with_w = (tl.sum(with_w_SP, 0) + signed * W_P) / away
        with_v = (tl.sum(with_v_SP, 0) + signed * V_P) / away
        Ax_0 = tl.sum(Ax_0_T, 0)
        vAv = (tl.sum(bent, 0) + 2 * signed * Ax_0 + signed * signed * corner_entry) / (away * away)
        shift = -0.5 * tau * tau * (vAv - 2 * tl.sum(with_w * with_v, 0))
        v = tl.where(rows == column, 1.0, x / away)
        product = (tl.sum(Ax_TR, 0) + signed * head) / away
        w = tau * (product - tl.sum(V_RP * with_w[None, :] + W_RP * with_v[None, :], 1)) + shift * v
        tl.store(V_rows + done - 1, v, mask=inside)
        tl.store(W_rows + done - 1, w, mask=inside)
        first = (rows == column) & (tl.program_id(0) == 0)
        tl.store(factors + matrix * N + rows - 1, tau, mask=first)
        tl.store(beside + matrix * N + rows - 1, -signed, mask=first)
        if BEGIN:  # every program needs the first entry of w, and makes it for itself
            product_0 = (Ax_0 + signed * corner_entry) / away
            w_0 = tau * (product_0 - tl.sum(V_P * with_w + W_P * with_v, 0)) + shift
            head = head - tl.sum(V_RP * W_P[None, :] + W_RP * V_P[None, :], 1) - v * w_0 - w
    if BEGIN:
        head = tl.where(rows == column + 1, head + NOTHING, head)
        tl.store(X_next + matrix * N + rows, head, mask=inside)
        tl.store(diagonal + matrix * N + rows, head, mask=rows == column)
        below = tl.where(inside & (rows > column), head, 0.0)
        tl.store(squares_next + matrix * n_blocks + block, tl.sum(below * below, 0))


def tridiagonalise_fused(
    matrices_BNN: Tensor, vectors_BNV: Tensor, columns: int | None = None, sizes: Sizes | None = None
) -> Reduction:
    """What `batched_eigen.tridiagonalise` gives, to rounding; `matrices_BNN` is overwritten. `columns`: stop
    early, for a trial.

    With p = A v - V (W'v) - W (V'v) and w = tau p - (tau^2 / 2) (v'p) v, v'p is v'Av - 2 (W'v)'(V'v), so that
    all sums over rows
    come from one kernel: nothing has to be waited for between a product and the next column.
    """
    A, Y = matrices_BNN, vectors_BNV.clone()
    batch, N = A.shape[:2]
    T, warps, S, R = sizes or Sizes()
    tiles, stretches, blocks = triton.cdiv(N, T), triton.cdiv(N, S), triton.cdiv(N, R)
    pairs = tiles * (tiles + 1) // 2
    V, W = torch.zeros_like(A), A.new_empty(batch, N, PANEL)
    # A column's entries and squares are read while those of the next are written: two of each, by turns.
    X, squares = A.new_empty(2, batch, N), A.new_empty(2, batch, blocks)
    products, panel_parts = A.new_empty(batch, tiles, N), A.new_empty(batch, stretches, 2 * PANEL)
    bends = A.new_empty(batch, pairs)
    diagonal, beside, factors = A.new_zeros(batch, N), A.new_zeros(batch, N), A.new_zeros(batch, N)
    counts: dict[str, Any] = {
        "TILES": tiles,
        "STRETCHES": stretches,
        "PAIRS": min(pairs, FEW_PAIRS),
        "BLOCKS": blocks,
    }
    counts = {name: triton.next_power_of_2(count) for name, count in counts.items()}

    def vectors(column: int, done: int, finish: bool, begin: bool) -> None:
        now, then = column % 2, (column + 1) % 2
        finish_and_begin[(blocks - column // R, batch)](
            A,
            V,
            W,
            X[then],
            products,
            panel_parts,
            bends,
            N,
            column,
            done,
            column // T,
            tiles,
            stretches,
            pairs,
            X[now],
            squares[then],
            squares[now],
            factors,
            beside,
            diagonal,
            blocks,
            FINISH=finish,
            BEGIN=begin,
            R=R,
            S=S,
            P=PANEL,
            num_warps=4,
            maxnreg=128,
            **counts,
        )

    last = N - 1 if columns is None else min(columns, N - 1)
    for start in range(0, last, PANEL):
        end = min(start + PANEL, last)
        for column in range(start, end):
            vectors(column, column - start, column > start, True)
            left = tiles - (column + 1) // T
            multiply[(left * (left + 1) // 2 + stretches - (column + 1) // S, batch)](
                A,
                V,
                W,
                X[column % 2],
                products,
                panel_parts,
                bends,
                N,
                column,
                column - start,
                (column + 1) // T,
                tiles,
                stretches,
                pairs,
                T=T,
                S=S,
                C=min(S, CHUNK),
                P=PANEL,
                EVEN=N % T == 0,
                num_warps=warps,
            )
        vectors(end, end - start, True, False)
        v, w = V[:, end:, start:end], W[:, end:, : end - start]
        A[:, end:, end:].baddbmm_(torch.cat([v, w], 2), torch.cat([w, v], 2).mT, alpha=-1)
        tail, panel = Y[:, start + 1 :], V[:, start + 1 :, start:end]
        triangle = inner(panel, factors[:, start:end]).tril()
        tail.baddbmm_(panel, torch.linalg.solve_triangular(triangle, panel.mT @ tail, upper=False), alpha=-1)
    diagonal[:, -1] = A[:, -1, -1]
    return Reduction(diagonal, beside[:, : N - 1], Y, V, factors[:, : N - 1])
