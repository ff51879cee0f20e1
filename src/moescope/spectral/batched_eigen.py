"""Eigenvalues of a batch of symmetric matrices, and the coordinates of some vectors in their eigenbases.

cuSOLVER solves the matrices of a batch one after the other, and a matrix of 768 rows leaves a large GPU idle
for most of its 8 ms. Here every step handles the entire batch: reduction to tridiagonal form, of which only
Q' times the vectors is stored, then divide and conquer, of which only the product with those vectors is
formed. Only the leading eigenvectors are computed. Plain torch, so that it runs and is tested on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 32  # columns reduced before the rest of the matrix is updated
LEAF = 32  # largest tridiagonal block that the library's batched solver handles
ITERATIONS = 60  # limit of the secular equation's solver: mostly six, bisection where eigenvalues are tied
Update = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
EPS = torch.finfo(torch.float64).eps
TINY = 1e-150  # its square does not underflow
SETTLED = 1e-9  # relative step below which the next one is lost in rounding: convergence is quadratic


@dataclass(frozen=True)
class Reduction:
    """Q' G Q = T, tridiagonal, for each matrix of a batch. Suffixes: B matrices, N rows, V vectors, P panel
    columns."""

    diagonal_BN: Tensor
    beside_BN: Tensor  # off the diagonal: N - 1 entries
    vectors_BNV: Tensor  # Q' applied to the input vectors
    reflectors_BNN: Tensor  # column j: the Householder vector that cleared column j
    factors_BN: Tensor

    def back(self, vectors_BNV: Tensor) -> Tensor:
        """Q applied to vectors: from the tridiagonal matrix's basis to the original one."""
        out = vectors_BNV.clone()
        columns = self.factors_BN.shape[1]
        for start in reversed(range(0, columns, PANEL)):
            end = min(start + PANEL, columns)
            V = self.reflectors_BNN[:, start + 1 :, start:end]
            triangle = inner(V, self.factors_BN[:, start:end]).triu()
            tail = out[:, start + 1 :]
            tail -= V @ torch.linalg.solve_triangular(triangle, V.mT @ tail, upper=True)
        return out


def inner(V_BNP: Tensor, factors_BP: Tensor) -> Tensor:
    """V'V with 1/tau on the diagonal: its upper triangle is the inverse of T in H_1 ... H_p = I - V T V'."""
    products = V_BNP.mT @ V_BNP
    products.diagonal(dim1=1, dim2=2).copy_(1 / factors_BP)
    return products


def tridiagonalise(matrices_BNN: Tensor, vectors_BNV: Tensor) -> Reduction:
    """Reduce each matrix to tridiagonal form by Householder reflections; overwrites `matrices_BNN`.

    Blocked as in LAPACK's sytrd: within a panel the matrix stays unchanged and each step corrects its product
    with the panel's vectors, so that the matrix is read once per step and written once per panel.
    """
    A, Y = matrices_BNN, vectors_BNV.clone()
    batch, rows = A.shape[:2]
    diagonal, beside, factors = (A.new_zeros(batch, size) for size in (rows, rows - 1, rows - 1))
    reflectors = A.new_zeros(batch, rows, rows - 1)
    for start in range(0, rows - 1, PANEL):
        end = min(start + PANEL, rows - 1)
        V, W = reflectors[:, :, start:end], A.new_zeros(batch, rows, end - start)
        for column in range(start, end):  # few kernels: each takes microseconds, and runs N times
            done, below = slice(0, column - start), slice(column + 1, None)
            head = A[:, column:, column, None]
            if column > start:
                head = torch.baddbmm(head, V[:, column:, done], W[:, column, done, None], alpha=-1)
                head = head.baddbmm_(W[:, column:, done], V[:, column, done, None], alpha=-1)
            diagonal[:, column] = head[:, 0, 0]
            v, tau = householder(head[:, 1:], beside[:, column])
            p = A[:, below, below] @ v
            if column > start:
                p.baddbmm_(V[:, below, done], W[:, below, done].mT @ v, alpha=-1)
                p.baddbmm_(W[:, below, done], V[:, below, done].mT @ v, alpha=-1)
            p *= tau
            V[:, below, column - start] = v[..., 0]
            torch.sub(p[..., 0], ((tau * (v.mT @ p)) * v)[..., 0], alpha=0.5, out=W[:, below, column - start])
            factors[:, column] = tau[:, 0, 0]
        v, w = V[:, end:], W[:, end:]
        A[:, end:, end:].baddbmm_(v, w.mT, alpha=-1).baddbmm_(w, v.mT, alpha=-1)
        reflect(Y[:, start + 1 :], V[:, start + 1 :], factors[:, start:end])
    diagonal[:, -1] = A[:, -1, -1]
    return Reduction(diagonal, beside, Y, reflectors, factors)


def reflect(vectors_BNV: Tensor, V_BNP: Tensor, factors_BP: Tensor) -> None:
    """Apply a panel's reflections to the vectors, in place."""
    triangle = inner(V_BNP, factors_BP).tril()
    products = torch.linalg.solve_triangular(triangle, V_BNP.mT @ vectors_BNV, upper=False)
    vectors_BNV.baddbmm_(V_BNP, products, alpha=-1)


def householder(columns_BM1: Tensor, beta_B: Tensor) -> tuple[Tensor, Tensor]:
    """v with v_0 = 1 and tau such that (I - tau v v') x = beta e_0; writes beta into `beta_B`."""
    first = columns_BM1[:, :1]
    first += TINY  # so that a column of zeros can be reflected
    signed = torch.copysign(torch.linalg.vector_norm(columns_BM1, dim=1, keepdim=True), first)
    torch.neg(signed[:, 0, 0], out=beta_B)
    away = first + signed  # never cancels: same sign
    v = columns_BM1 / away
    v[:, 0] = 1.0
    return v, away / signed


@dataclass(frozen=True)
class Merge:
    """One level of divide and conquer: from the eigenbases of pairs of blocks to those of their unions."""

    order: Tensor  # [..., M]: ascending order of the two blocks' eigenvalues
    vectors: Tensor  # [..., M, M]: row i is eigenvector i of the union, in the sorted order of the old ones


@dataclass(frozen=True)
class Eigenbasis:
    """The eigenbasis of each tridiagonal matrix of a batch, eigenvalues ascending."""

    values_BN: Tensor
    coordinates_BVN: Tensor  # the input vectors in the eigenbasis
    leaves: Tensor
    merges: list[Merge]
    padding: int
    converged_B: Tensor

    def top_vectors(self, count: int) -> Tensor:
        """[B, N, count]: the eigenvectors of the largest eigenvalues, largest first."""
        batch, rows = self.values_BN.shape
        padded = rows + self.padding
        if not self.merges:
            return self.leaves[:, 0, self.padding :, self.padding :].flip(-1)[..., :count]
        top = self.merges[-1].vectors[:, 0].flip(-2)[:, :count].mT  # [B, padded, count]
        parts = top.reshape(batch, 1, padded, top.shape[-1])
        for level in reversed(range(len(self.merges))):
            if level < len(self.merges) - 1:
                parts = self.merges[level].vectors.mT @ parts
            order = self.merges[level].order[..., None].expand(parts.shape)
            parts = torch.empty_like(parts).scatter_(-2, order, parts)
            parts = parts.reshape(batch, 2 * parts.shape[1], parts.shape[2] // 2, parts.shape[3])
        return (self.leaves @ parts).reshape(batch, padded, -1)[:, self.padding :]


def divide_and_conquer(
    diagonal_BN: Tensor, beside_BN: Tensor, vectors_BNV: Tensor, update: Update | None = None
) -> Eigenbasis:
    """Eigenvalues of tridiagonal matrices and the vectors' coordinates in their eigenbases (Cuppen; Gu and
    Eisenstat 1995).

    Libraries deflate: they skip eigenvalues that a merge does not change. Deflation differs between matrices,
    so here the problem is perturbed instead, by no more than rounding: equal eigenvalues are separated by
    eps, and no coupling is below eps. Every matrix then takes the same steps, as accurately as if its entries
    had been rounded once more. `update` replaces `rank_one_update` where a quicker one exists.
    """
    update = update or rank_one_update
    batch, rows = diagonal_BN.shape
    scale = torch.cat([diagonal_BN, beside_BN], 1).abs().amax(1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    blocks = 1 << ((rows - 1) // LEAF).bit_length()
    leaf = -(-rows // blocks)
    padding = leaf * blocks - rows
    # padding lies below all eigenvalues (3 exceeds the norm of a scaled tridiagonal matrix), so that it sorts
    # first
    steps = torch.arange(padding, 0, -1, device=diagonal_BN.device, dtype=diagonal_BN.dtype)
    below = -3.0 - steps / max(padding, 1)
    a = torch.cat([below.expand(batch, padding), diagonal_BN / scale], 1)
    b = torch.cat([beside_BN.new_zeros(batch, padding), beside_BN / scale], 1)
    sign = torch.where(b < 0, -1.0, 1.0)
    coupling = b.abs().clamp_min(EPS)
    cuts = torch.arange(leaf, blocks * leaf, leaf, device=a.device)  # first row of each block but the first
    a = a.index_add(1, cuts, -coupling[:, cuts - 1]).index_add(1, cuts - 1, -coupling[:, cuts - 1])
    leaves = torch.diag_embed(a.reshape(batch, blocks, leaf))
    if leaf > 1:
        ends = torch.cat([b, b.new_zeros(batch, 1)], 1)[:, : blocks * leaf]
        ends = ends.reshape(batch, blocks, leaf)[..., :-1]
        leaves = leaves + torch.diag_embed(ends, 1) + torch.diag_embed(ends, -1)
    values, leaf_vectors = torch.linalg.eigh(leaves)
    Y = torch.nn.functional.pad(vectors_BNV, (0, 0, padding, 0)).mT
    Y = Y.reshape(batch, -1, blocks, leaf).transpose(1, 2)
    edges = torch.stack([leaf_vectors[..., 0, :], leaf_vectors[..., -1, :]], -2)
    work = torch.cat([edges, Y @ leaf_vectors], -2)  # first and last row of the eigenbasis, then the vectors
    merges: list[Merge] = []
    converged = torch.ones(batch, dtype=torch.bool, device=a.device)
    while blocks > 1:
        size = values.shape[-1]
        blocks //= 2
        cut = torch.arange(1, 2 * blocks, 2, device=a.device) * size  # first row of every second block
        strength, side = coupling[:, cut - 1], sign[:, cut - 1]
        pair_values = values.reshape(batch, blocks, 2 * size)
        left, right = work[:, 0::2], work[:, 1::2]
        # first row of the union: the left block's; last row: the right block's; the vectors: both
        zeros = torch.zeros_like(left[:, :, :1])
        tied = torch.cat([left[:, :, 1:2], side[..., None, None] * right[:, :, :1]], -1)
        first = torch.cat([left[:, :, :1], zeros], -1)
        last = torch.cat([zeros, right[:, :, 1:2]], -1)
        both = torch.cat([left[:, :, 2:], right[:, :, 2:]], -1)
        joined = torch.cat([tied, first, last, both], -2)
        sorted_values, order = pair_values.sort(-1)
        joined = joined.gather(-1, order[..., None, :].expand(joined.shape))
        values, rotation, fine = update(sorted_values, joined[..., 0, :], strength)
        converged &= fine.reshape(batch, -1).all(1)
        work = joined[..., 1:, :] @ rotation.mT
        merges.append(Merge(order, rotation))
    return Eigenbasis(
        values_BN=values.reshape(batch, -1)[:, padding:] * scale,
        coordinates_BVN=work[:, 0, 2:, padding:],
        leaves=leaf_vectors,
        merges=merges,
        padding=padding,
        converged_B=converged,
    )


def rank_one_update(poles_M: Tensor, coupling_M: Tensor, strength: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors (as rows) of diag(d) + rho z z', d ascending, and whether each root
    converged.

    Each eigenvalue is stored as its distance from the nearer pole, so that d_j - lambda_i is exact to the
    last digits. The vectors are made from the z that has these eigenvalues exactly (Gu and Eisenstat 1994):
    orthogonal to rounding.
    """
    size = poles_M.shape[-1]
    steps = torch.arange(size, device=poles_M.device)
    poles, z, weights, gap = separate_poles(poles_M, coupling_M, strength)
    # the sign of the secular function halfway shows which of its two poles a root is nearer to
    half = poles + gap / 2
    middle = 1 + weighted_sums(poles[..., None, :] - half[..., None], weights)[0]
    has_far = steps < size - 1  # the last root has a pole on one side only
    upper = (middle < 0) & has_far
    near = steps + upper  # the pole from which the root is measured
    origin = poles.gather(-1, near)
    distance = poles[..., None, :] - origin[..., None]  # [root, pole]
    near_weight = weights.gather(-1, near)
    other = torch.where(upper, -gap, gap)  # position of the root's other pole
    low = torch.where(upper, -gap / 2, 0.0)
    high = torch.where(upper, 0.0, torch.where(has_far, gap / 2, gap))
    root = torch.where(has_far, (low + high) / 2, high)
    settled = torch.zeros_like(root, dtype=torch.bool)
    for iteration in range(ITERATIONS):
        rest, slope = weighted_sums(distance - root[..., None], weights, near)
        rest = 1 + rest
        residual = rest - near_weight / root
        low, high = torch.where(residual < 0, root, low), torch.where(residual >= 0, root, high)
        # c - w / x + t / (other - x): the near pole exactly, the rest by value and slope (Li's fixed weight
        # method). Solved for x, not for a step: x is a distance from a pole and must keep its digits however
        # small it is.
        to_other = torch.where(has_far, other - root, 0.0)
        t = to_other.square() * slope
        c = rest - to_other * slope
        linear, constant = c * other + near_weight + t, near_weight * other
        radical = (linear.square() - 4 * c * constant).clamp_min(0).sqrt()
        two_poles = torch.where(linear > 0, 2 * constant / (linear + radical), (linear - radical) / (2 * c))
        # the last root: rest + slope (x - root) - w / x
        tangent = rest - root * slope
        radical = (tangent.square() + 4 * slope * near_weight).sqrt()
        one_pole = torch.where(
            tangent > 0, 2 * near_weight / (tangent + radical), (radical - tangent) / (2 * slope)
        )
        proposed = torch.where(has_far, two_poles, one_pole)
        inside = (proposed > low) & (proposed < high)  # NaN is outside
        close = (proposed - root).abs() <= SETTLED * root.abs()
        safe = torch.where(inside, proposed, halfway(low, high))
        following = torch.where(close, proposed.clamp(low, high), safe)
        # the sign of a residual within the rounding of its sum is meaningless
        size_of_terms = 1 + rest.abs() + (near_weight / root).abs() + slope * root.abs()
        settled |= residual.abs() <= 4 * size**0.5 * EPS * size_of_terms
        root = torch.where(settled, root, following)
        settled |= close
        if iteration > 3 and bool(settled.all()):
            break
    shifted = distance - root[..., None]
    # z that makes these the exact eigenvalues: z_j^2 rho = prod_i (lambda_i - d_j) / prod_{i != j} (d_i -
    # d_j)
    between = poles[..., None, :] - poles[..., :, None]
    between.diagonal(dim1=-2, dim2=-1).fill_(-1.0)
    exact = (shifted / between).prod(-2).abs().sqrt() * torch.where(z < 0, -1.0, 1.0)
    vectors = exact[..., None, :] / shifted
    vectors = vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return origin + root, vectors, settled


def separate_poles(
    poles_M: Tensor, coupling_M: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(separated poles, nonzero couplings z, rho z^2, width of the interval above each pole that holds a
    root)."""
    steps = torch.arange(poles_M.shape[-1], device=poles_M.device)
    gap = 2 * EPS * torch.maximum(poles_M.abs().amax(-1, keepdim=True), strength[..., None])
    poles = torch.cummax(poles_M - steps * gap, -1).values + steps * gap
    z = torch.where(coupling_M < 0, -1.0, 1.0) * coupling_M.abs().clamp_min(EPS)
    weights = strength[..., None] * z.square()  # rho z_j^2
    above = torch.cat([poles[..., 1:], poles[..., -1:] + weights.sum(-1, keepdim=True)], -1)
    return poles, z, weights, above - poles


def weighted_sums(
    distances: Tensor, weights_M: Tensor, without: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sums over poles of w / d and of w / d^2 per root, excluding the pole `without`; overwrites `distances`.

    Matrix-vector products: a sum of terms would write them to memory first.
    """
    inverse = distances.reciprocal_()
    if without is not None:
        inverse.scatter_(-1, without[..., None], 0.0)
    return (inverse @ weights_M[..., None])[..., 0], (inverse.square_() @ weights_M[..., None])[..., 0]


def halfway(low: Tensor, high: Tensor) -> Tensor:
    """The geometric mean of two nonzero bounds, since a root may lie very near a pole; else their mean."""
    same = low * high > 0
    geometric = torch.sign(low + high) * (low.abs().sqrt() * high.abs().sqrt())
    return torch.where(same, geometric, (low + high) / 2)
