"""Triton kernels for `batched_eigen`: tridiagonal reduction in two kernels per column, rank-one update in
three.

`tridiagonalise` in plain torch takes some twenty kernels per column, each of which waits for the one before
it, and reads both halves of a symmetric matrix. Here one kernel finishes a column's vectors and begins the
next column; the other multiplies the matrix by a vector and reads each pair of mirrored tiles once.

`rank_one_update` in plain torch writes and reads a matrix of all roots and poles in each iteration, a
gigabyte for eight matrices of 4096 rows. Here only the final eigenvectors have that size.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# No `from __future__ import annotations`: Triton evaluates the annotations of its kernels.
import torch
import triton
import triton.language as tl
from torch import Tensor

from moescope.spectral.batched_eigen import (
    EPS,
    ITERATIONS,
    PANEL,
    SETTLED,
    TINY,
    Reduction,
    reflect,
    separate_poles,
)

# block sizes, tuned on an H200
TILE = 64  # rows and columns of the matrix that one program multiplies
STRETCH = 128  # rows of the panel that one program multiplies
ROWS = 32  # rows of the vectors that one program of finish_and_begin handles
CHUNK = 64  # rows of the panel that a program holds at a time
FEW_PAIRS = 1024
SMALL = tl.constexpr(TINY)
ROOTS = 8  # roots per program
POLES = 128  # poles that it loads at a time
FAR = tl.constexpr(1e300)  # position of a missing pole
CLOSE = tl.constexpr(SETTLED)


# do_not_specialize: otherwise every sixteenth column would be compiled again
@triton.jit(do_not_specialize=["column", "done", "first_tile"])
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
    """A x, one program per tile on or below the diagonal, used on both sides; then W'x and V'x, one program
    per stretch of rows.

    Partial sums are stored by tile and by stretch. x is the column below the diagonal, 0 above, not yet
    scaled to a Householder vector: every program would have to wait for the column's norm.
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
        # New names: in Triton a name has one type in both branches.
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
    """FINISH: v and w of the previous column, from the partial products. BEGIN: update this column with the
    panel.

    With x the previous column and s = copysign(norm, x_0): v = (x + s e_0) / (x_0 + s), so that A v, W'v and
    V'v follow from the products with x. `done` columns of the panel have been begun. Rows above `column` stay
    unchanged.
    """
    matrix = tl.program_id(1).to(tl.int64)
    block = column // R + tl.program_id(0)
    rows = block * R + tl.arange(0, R)
    inside = (rows >= column) & (rows < N)
    column_row = A + matrix * N * N + column.to(tl.int64) * N
    head = tl.load(column_row + rows, mask=inside, other=0.0)
    if FINISH:
        # All loads come before the first sum: sums make a program's threads wait for each other.
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
        corner_entry = tl.load(column_row + column)
        left = n_tiles - first_tile
        n_bends = left * (left + 1) // 2
        pair = tl.arange(0, PAIRS)
        bent = tl.load(bends + matrix * n_pairs + pair, mask=pair < n_bends, other=0.0)
        for start in range(PAIRS, n_bends, PAIRS):  # one load would use most registers
            bent += tl.load(bends + matrix * n_pairs + start + pair, mask=start + pair < n_bends, other=0.0)
        panel = inside[:, None] & before[None, :]
        V_rows = V + matrix * N * N + rows.to(tl.int64) * N + corner
        W_rows = W + (matrix * N + rows) * P
        V_RP = tl.load(V_rows[:, None] + c[None, :], mask=panel, other=0.0)
        W_RP = tl.load(W_rows[:, None] + c[None, :], mask=panel, other=0.0)

        norm = tl.sqrt(tl.sum(squares_B, 0))
        signed = tl.where(x_0 < 0, -norm, norm)
        away = x_0 + signed  # never cancels: same sign
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
        if BEGIN:  # every program needs the first entry of w and computes it
            product_0 = (Ax_0 + signed * corner_entry) / away
            w_0 = tau * (product_0 - tl.sum(V_P * with_w + W_P * with_v, 0)) + shift
            head = head - tl.sum(V_RP * W_P[None, :] + W_RP * V_P[None, :], 1) - v * w_0 - w
    if BEGIN:
        head = tl.where(rows == column + 1, head + SMALL, head)
        tl.store(X_next + matrix * N + rows, head, mask=inside)
        tl.store(diagonal + matrix * N + rows, head, mask=rows == column)
        below = tl.where(inside & (rows > column), head, 0.0)
        tl.store(squares_next + matrix * n_blocks + block, tl.sum(below * below, 0))


def tridiagonalise_fused(matrices_BNN: Tensor, vectors_BNV: Tensor, columns: int | None = None) -> Reduction:
    """`batched_eigen.tridiagonalise`, to rounding; overwrites `matrices_BNN`. Stops early after `columns`.

    With p = A v - V (W'v) - W (V'v) and w = tau p - (tau^2 / 2) (v'p) v, v'p is v'Av - 2 (W'v)'(V'v), so that
    all sums over rows come from one kernel: no wait between a product and the next column.
    """
    A, Y = matrices_BNN, vectors_BNV.clone()
    batch, N = A.shape[:2]
    T, S, R = TILE, STRETCH, ROWS
    tiles, stretches, blocks = triton.cdiv(N, T), triton.cdiv(N, S), triton.cdiv(N, R)
    pairs = tiles * (tiles + 1) // 2
    V, W = torch.zeros_like(A), A.new_empty(batch, N, PANEL)
    # Two buffers each: a column's entries and squares are read while those of the next are written.
    X, squares = A.new_empty(2, batch, N), A.new_empty(2, batch, blocks)
    products, panel_parts = A.new_empty(batch, tiles, N), A.new_empty(batch, stretches, 2 * PANEL)
    bends = A.new_empty(batch, pairs)
    diagonal, beside, factors = A.new_zeros(batch, N), A.new_zeros(batch, N), A.new_zeros(batch, N)
    counts = (tiles, stretches, min(pairs, FEW_PAIRS), blocks)
    names = ("TILES", "STRETCHES", "PAIRS", "BLOCKS")
    options = {name: triton.next_power_of_2(count) for name, count in zip(names, counts, strict=True)}
    options |= {"R": R, "S": S, "P": PANEL, "num_warps": 4, "maxnreg": 128}
    partial_sums = (products, panel_parts, bends, N)

    def vectors(column: int, done: int, finish: bool, begin: bool) -> None:
        now, then = column % 2, (column + 1) % 2
        finish_and_begin[(blocks - column // R, batch)](
            *(A, V, W, X[then], *partial_sums, column, done, column // T, tiles, stretches, pairs),
            *(X[now], squares[then], squares[now], factors, beside, diagonal, blocks),
            **{"FINISH": finish, "BEGIN": begin, **options},
        )

    last = N - 1 if columns is None else min(columns, N - 1)
    for start in range(0, last, PANEL):
        end = min(start + PANEL, last)
        for column in range(start, end):
            vectors(column, column - start, column > start, True)
            left = tiles - (column + 1) // T
            multiply[(left * (left + 1) // 2 + stretches - (column + 1) // S, batch)](
                *(A, V, W, X[column % 2], *partial_sums, column, column - start, (column + 1) // T),
                *(tiles, stretches, pairs),
                **{"T": T, "S": S, "C": min(S, CHUNK), "P": PANEL, "EVEN": N % T == 0, "num_warps": 4},
            )
        vectors(end, end - start, True, False)
        v, w = V[:, end:, start:end], W[:, end:, : end - start]
        A[:, end:, end:].baddbmm_(torch.cat([v, w], 2), torch.cat([w, v], 2).mT, alpha=-1)
        reflect(Y[:, start + 1 :], V[:, start + 1 :, start:end], factors[:, start:end])
    diagonal[:, -1] = A[:, -1, -1]
    return Reduction(diagonal, beside[:, : N - 1], Y, V, factors[:, : N - 1])


# --- rank-one update


@triton.jit
def find_roots(
    poles,
    weights,
    gaps,
    origins,
    roots,
    converged,
    M,
    rounding,
    MOST: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
):
    """Roots of 1 + sum of w / (d - x), each as its distance from the nearer pole: `rank_one_update` line by
    line."""
    base = tl.program_id(1).to(tl.int64) * M
    i = tl.program_id(0) * R + tl.arange(0, R)
    live = i < M
    pole = tl.load(poles + base + i, mask=live, other=0.0)
    gap = tl.load(gaps + base + i, mask=live, other=1.0)
    has_far = i < M - 1
    half = pole + gap / 2
    sums = tl.zeros([R, P], tl.float64)
    for start in range(0, M, P):
        j = start + tl.arange(0, P)
        d = tl.load(poles + base + j, mask=j < M, other=FAR)
        w = tl.load(weights + base + j, mask=j < M, other=0.0)
        sums += w[None, :] / (d[None, :] - half[:, None])
    upper = (1 + tl.sum(sums, 1) < 0) & has_far
    near = i + upper.to(tl.int32)
    origin = tl.load(poles + base + near, mask=live, other=0.0)
    near_weight = tl.load(weights + base + near, mask=live, other=1.0)
    other = tl.where(upper, -gap, gap)
    low = tl.where(upper, -gap / 2, 0.0)
    high = tl.where(upper, 0.0, tl.where(has_far, gap / 2, gap))
    root = tl.where(has_far, (low + high) / 2, high)
    settled = i >= M
    iteration = 0
    while (iteration < MOST) & (tl.sum(settled.to(tl.int32), 0) < R):
        sums = tl.zeros([R, P], tl.float64)
        slopes = tl.zeros([R, P], tl.float64)
        for start in range(0, M, P):
            j = start + tl.arange(0, P)
            d = tl.load(poles + base + j, mask=j < M, other=FAR)
            w = tl.load(weights + base + j, mask=j < M, other=0.0)
            inverse = 1.0 / ((d[None, :] - origin[:, None]) - root[:, None])
            inverse = tl.where(j[None, :] == near[:, None], 0.0, inverse)
            sums += w[None, :] * inverse
            slopes += w[None, :] * (inverse * inverse)
        rest = 1 + tl.sum(sums, 1)
        slope = tl.sum(slopes, 1)
        residual = rest - near_weight / root
        low = tl.where(residual < 0, root, low)
        high = tl.where(residual >= 0, root, high)
        to_other = tl.where(has_far, other - root, 0.0)
        t = to_other * to_other * slope
        c = rest - to_other * slope
        linear = c * other + near_weight + t
        constant = near_weight * other
        radical = tl.sqrt(tl.maximum(linear * linear - 4 * c * constant, 0.0))
        two_poles = tl.where(linear > 0, 2 * constant / (linear + radical), (linear - radical) / (2 * c))
        tangent = rest - root * slope
        radical = tl.sqrt(tangent * tangent + 4 * slope * near_weight)
        one_pole = tl.where(
            tangent > 0, 2 * near_weight / (tangent + radical), (radical - tangent) / (2 * slope)
        )
        proposed = tl.where(has_far, two_poles, one_pole)
        inside = (proposed > low) & (proposed < high)
        close = tl.abs(proposed - root) <= CLOSE * tl.abs(root)
        geometric = tl.where(low + high < 0, -1.0, 1.0) * (tl.sqrt(tl.abs(low)) * tl.sqrt(tl.abs(high)))
        halfway = tl.where(low * high > 0, geometric, (low + high) / 2)
        clamped = tl.minimum(tl.maximum(proposed, low), high)
        following = tl.where(close, clamped, tl.where(inside, proposed, halfway))
        size_of_terms = 1 + tl.abs(rest) + tl.abs(near_weight / root) + slope * tl.abs(root)
        settled = settled | (tl.abs(residual) <= rounding * size_of_terms)
        root = tl.where(settled, root, following)
        settled = settled | close
        iteration += 1
    tl.store(origins + base + i, origin, mask=live)
    tl.store(roots + base + i, root, mask=live)
    tl.store(converged + base + i, settled, mask=live)


@triton.jit
def times(a, b):
    return a * b


@triton.jit
def fit_coupling(poles, coupling, origins, roots, exact, M, R: tl.constexpr, P: tl.constexpr):
    """The z that has exactly these roots, with the signs of `coupling`."""
    base = tl.program_id(1).to(tl.int64) * M
    j = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.load(poles + base + j, mask=j < M, other=FAR)
    product = tl.full([P, R], 1.0, tl.float64)
    for start in range(0, M, P):
        i = start + tl.arange(0, P)
        live = i < M
        pole = tl.load(poles + base + i, mask=live, other=0.0)
        origin = tl.load(origins + base + i, mask=live, other=0.0)
        root = tl.load(roots + base + i, mask=live, other=0.0)
        shifted = (d[None, :] - origin[:, None]) - root[:, None]
        between = tl.where(i[:, None] == j[None, :], -1.0, d[None, :] - pole[:, None])
        product *= tl.where(live[:, None], shifted / between, 1.0)
    z = tl.load(coupling + base + j, mask=j < M, other=1.0)
    size = tl.sqrt(tl.abs(tl.reduce(product, 0, times)))
    tl.store(exact + base + j, tl.where(z < 0, -size, size), mask=j < M)


@triton.jit
def make_vectors(poles, exact, origins, roots, vectors, M, R: tl.constexpr, P: tl.constexpr):
    """Row i: z / (d - root i), of unit length."""
    base = tl.program_id(1).to(tl.int64) * M
    i = tl.program_id(0) * R + tl.arange(0, R)
    live = i < M
    origin = tl.load(origins + base + i, mask=live, other=0.0)
    root = tl.load(roots + base + i, mask=live, other=1.0)
    squares = tl.zeros([R, P], tl.float64)
    for start in range(0, M, P):
        j = start + tl.arange(0, P)
        d = tl.load(poles + base + j, mask=j < M, other=FAR)
        z = tl.load(exact + base + j, mask=j < M, other=0.0)
        entry = z[None, :] / ((d[None, :] - origin[:, None]) - root[:, None])
        squares += entry * entry
    length = tl.sqrt(tl.sum(squares, 1))
    rows = vectors + (base + i)[:, None] * M
    for start in range(0, M, P):
        j = start + tl.arange(0, P)
        d = tl.load(poles + base + j, mask=j < M, other=FAR)
        z = tl.load(exact + base + j, mask=j < M, other=0.0)
        entry = z[None, :] / ((d[None, :] - origin[:, None]) - root[:, None])
        tl.store(rows + j[None, :], entry / length[:, None], mask=live[:, None] & (j < M)[None, :])


def rank_one_update_fused(
    poles_M: Tensor, coupling_M: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`batched_eigen.rank_one_update`, to rounding."""
    poles, z, weights, gap = (part.contiguous() for part in separate_poles(poles_M, coupling_M, strength))
    size = poles.shape[-1]
    origin, root, exact = (torch.empty_like(poles) for _ in range(3))
    converged = torch.empty_like(poles, dtype=torch.bool)
    vectors = poles.new_empty(*poles.shape, size)
    grid = (triton.cdiv(size, ROOTS), poles.numel() // size)
    blocks = {"R": ROOTS, "P": POLES, "num_warps": 4}
    find_roots[grid](
        poles, weights, gap, origin, root, converged, size, 4 * size**0.5 * EPS, MOST=ITERATIONS, **blocks
    )
    fit_coupling[grid](poles, z, origin, root, exact, size, **blocks)
    make_vectors[grid](poles, exact, origin, root, vectors, size, **blocks)
    return origin + root, vectors, converged
