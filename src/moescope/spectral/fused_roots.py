"""The rank-one update of divide and conquer in three kernels, for GPUs where Triton is installed.

`batched_eigen.rank_one_update` is the same in plain torch: each step of its iteration writes and reads a
matrix of all roots
and poles, a gigabyte for eight matrices of 4096 rows. Here nothing of that size exists but the eigenvectors
at the end.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# No `from __future__ import annotations`: Triton reads the annotations of its kernels as they are.
import torch
import triton
import triton.language as tl
from torch import Tensor

from moescope.spectral.batched_eigen import EPS, ITERATIONS, SETTLED, interlaced

ROOTS = 8  # that one program looks for
POLES = 128  # that it looks at at a time
FAR = tl.constexpr(1e300)  # where a pole that is not there is put
CLOSE = tl.constexpr(SETTLED)


@triton.jit
def find_roots(
    poles,
    weights,
    gaps,
    origins,
    roots,
    found,
    M,
    rounding,
    MOST: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
):
    """Roots of 1 + sum of w / (d - x), each as its distance from the nearer pole.

    See `rank_one_update`, line by line.
    """
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
    own = i + upper.to(tl.int32)
    origin = tl.load(poles + base + own, mask=live, other=0.0)
    own_weight = tl.load(weights + base + own, mask=live, other=1.0)
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
            inverse = tl.where(j[None, :] == own[:, None], 0.0, inverse)
            sums += w[None, :] * inverse
            slopes += w[None, :] * (inverse * inverse)
        rest = 1 + tl.sum(sums, 1)
        slope = tl.sum(slopes, 1)
        residual = rest - own_weight / root
        low = tl.where(residual < 0, root, low)
        high = tl.where(residual >= 0, root, high)
        to_other = tl.where(has_far, other - root, 0.0)
        t = to_other * to_other * slope
        c = rest - to_other * slope
        linear = c * other + own_weight + t
        constant = own_weight * other
        radical = tl.sqrt(tl.maximum(linear * linear - 4 * c * constant, 0.0))
        two_poles = tl.where(linear > 0, 2 * constant / (linear + radical), (linear - radical) / (2 * c))
        tangent = rest - root * slope
        radical = tl.sqrt(tangent * tangent + 4 * slope * own_weight)
        one_pole = tl.where(
            tangent > 0, 2 * own_weight / (tangent + radical), (radical - tangent) / (2 * slope)
        )
        proposed = tl.where(has_far, two_poles, one_pole)
        inside = (proposed > low) & (proposed < high)
        close = tl.abs(proposed - root) <= CLOSE * tl.abs(root)
        geometric = tl.where(low + high < 0, -1.0, 1.0) * (tl.sqrt(tl.abs(low)) * tl.sqrt(tl.abs(high)))
        halfway = tl.where(low * high > 0, geometric, (low + high) / 2)
        clamped = tl.minimum(tl.maximum(proposed, low), high)
        moved = tl.where(close, clamped, tl.where(inside, proposed, halfway))
        size_of_terms = 1 + tl.abs(rest) + tl.abs(own_weight / root) + slope * tl.abs(root)
        settled = settled | (tl.abs(residual) <= rounding * size_of_terms)
        root = tl.where(settled, root, moved)
        settled = settled | close
        iteration += 1
    tl.store(origins + base + i, origin, mask=live)
    tl.store(roots + base + i, root, mask=live)
    tl.store(found + base + i, settled, mask=live)


@triton.jit
def times(a, b):
    return a * b


@triton.jit
def fit_coupling(poles, coupling, origins, roots, exact, M, R: tl.constexpr, P: tl.constexpr):
    """The z that has these roots exactly, with the signs of the one given."""
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
    """What `batched_eigen.rank_one_update` gives, to rounding."""
    poles, z, weights, gap = (part.contiguous() for part in interlaced(poles_M, coupling_M, strength))
    size = poles.shape[-1]
    origin, root, exact = (torch.empty_like(poles) for _ in range(3))
    found = torch.empty_like(poles, dtype=torch.bool)
    vectors = poles.new_empty(*poles.shape, size)
    grid = (triton.cdiv(size, ROOTS), poles.numel() // size)
    blocks = {"R": ROOTS, "P": POLES, "num_warps": 4}
    find_roots[grid](
        poles, weights, gap, origin, root, found, size, 4 * size**0.5 * EPS, MOST=ITERATIONS, **blocks
    )
    fit_coupling[grid](poles, z, origin, root, exact, size, **blocks)
    make_vectors[grid](poles, exact, origin, root, vectors, size, **blocks)
    return origin + root, vectors, found
