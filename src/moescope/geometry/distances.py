"""Scale-free distance of two matrices, and the alignment of their polar factors (singular values set to
one)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.spectral.decompose import numerical_rank, tensor_bits

CHUNK = 1 << 21  # numbers per matrix converted to fp64 at a time: 16 MiB
GRAM_RESOLUTION = 1e-6  # of the largest singular value; an fp64 Gram matrix errs by 1e-8
WELL_CONDITIONED = 1e-3  # smallest over largest singular value
NEWTON_STEPS = 30  # each multiplies small singular values by 1.5: from 1e-4 of the largest they reach 1
NEWTON_RESIDUAL = 1e-5  # largest allowed || Q Q' - I ||_F / sqrt(rank): ten times the rounding of fp32


@dataclass(frozen=True)
class Distance:
    """Two matrices compared entry by entry. NaN where one of them is all zeros: it has no direction."""

    relative_l2: float  # || A/||A|| - B/||B|| ||: 0 equal up to scale, sqrt 2 unrelated, 2 opposite
    cosine: float  # <A, B> / (||A|| ||B||) = 1 - relative_l2^2 / 2
    norm_ratio: float  # ||B|| / ||A||


def distance(a: Tensor, b: Tensor) -> Distance:
    """Return the distance of two matrices, summed in fp64 in chunks.

    relative_l2 is computed from the difference: sqrt(2 - 2 cosine) would lose half of the digits where A and
    B are nearly equal, as two steps of a training are.
    """
    parts = list(zip(*(torch.split(matrix.reshape(-1), CHUNK) for matrix in (a, b)), strict=True))
    sums, square = (torch.zeros(size, dtype=torch.float64, device=a.device) for size in ((3,), ()))
    for part_a, part_b in parts:
        x, y = part_a.double(), part_b.double()
        sums += torch.stack([x @ x, y @ y, x @ y])
    square_a, square_b, inner = sums.tolist()
    norm_a, norm_b = sqrt(square_a), sqrt(square_b)
    if norm_a == 0 or norm_b == 0:
        return Distance(np.nan, np.nan, norm_b / norm_a if norm_a else np.nan)
    for part_a, part_b in parts:
        difference = part_a.double() / norm_a - part_b.double() / norm_b
        square += difference @ difference
    return Distance(square.sqrt().item(), inner / (norm_a * norm_b), norm_b / norm_a)


@dataclass(frozen=True)
class PolarFactor:
    """Q = U V' of a matrix W = U S V' over its nonzero singular values, in fp32, in the shape of W."""

    matrix: Tensor
    rank: int


def polar_factor(weight: Tensor, device: str = "cpu", bits: int | None = None) -> PolarFactor:
    """Return the polar factor U V' of one matrix: a partial isometry where the rank is deficient.

    Q = (W W')^(-1/2) W (Higham 2008, Functions of Matrices, chapter 8). On a GPU by Newton-Schulz steps,
    which are matrix products only, with residual and rank checked; elsewhere, and where that fails, by the
    eigenvectors of the fp64 Gram matrix. The rank is that of `numerical_rank`, for weights stored with `bits`
    significand bits (those of the tensor's dtype unless given).
    """
    if not torch.isfinite(weight).all():
        raise BadInput(
            "a matrix with NaN or infinity has no polar factor; inspect the checkpoint with `moescope scan`"
        )
    bits = bits or tensor_bits(weight)
    if device != "cpu":
        single = weight.to(device, torch.float32)
        factors, converged = by_newton_schulz(single[None])
        if converged and has_full_rank(single, factors[0], bits):
            return PolarFactor(factors[0], min(weight.shape))
    return by_eigenvectors(weight.to(device), bits)


def has_full_rank(weight: Tensor, factor: Tensor, bits: int) -> bool:
    """Whether all singular values are above the rank tolerance, by a margin: W Q' - t I is positive definite,
    since the eigenvalues of W Q' are the singular values of W."""
    wide, other = (weight.T, factor.T) if weight.shape[0] > weight.shape[1] else (weight, factor)
    product = wide @ other.T
    product = (product + product.T) / 2
    norm = torch.linalg.matrix_norm(wide)
    tolerance = 2.0**-bits * norm * (wide.shape[0] ** -0.5 + wide.shape[1] ** -0.5)
    product.diagonal().sub_(1.01 * tolerance)
    return int(torch.linalg.cholesky_ex(product).info) == 0


def sv_alignment(a: PolarFactor, b: PolarFactor) -> float:
    """R = <Q_A, Q_B>_F / sqrt(rank_A rank_B) = (1/r) sum_ij (u_i^A . u_j^B)(v_i^A . v_j^B) at full rank r.

    1 for equal singular vectors whatever the singular values, 0 expected for unrelated matrices; independent
    of the signs and the order of singular vectors. NaN where a matrix is zero. All directions weigh the same,
    so noise in the smallest counts as much as in the largest.
    """
    if a.rank == 0 or b.rank == 0:
        return float("nan")
    inner = (a.matrix * b.matrix).sum(dim=1, dtype=torch.float64).sum().item()
    return inner / sqrt(a.rank * b.rank)


def by_eigenvectors(weight: Tensor, bits: int) -> PolarFactor:
    """Use the eigenvectors of the smaller fp64 Gram matrix, or the SVD where that has too few digits or its
    solver does not converge."""
    tall = weight.shape[0] > weight.shape[1]
    wide = (weight.T if tall else weight).double()
    squares, vectors = torch.zeros(1), torch.zeros(1)
    with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]  # not in its list of names
        squares, vectors = torch.linalg.eigh(wide @ wide.T)
    if not squares[0] > GRAM_RESOLUTION**2 * squares[-1]:
        factor, rank = by_svd(wide, bits)
        return PolarFactor((factor.T if tall else factor).float().contiguous(), rank)
    rank = int(numerical_rank(squares.sqrt().flip(0), wide.shape, bits))
    basis, squares = vectors[:, len(squares) - rank :], squares[len(squares) - rank :]
    root = (basis * squares.rsqrt()) @ basis.T
    if len(squares) and squares[0] > WELL_CONDITIONED**2 * squares[-1]:
        factor = root.float() @ wide.float()  # fp32 keeps four digits of the weakest direction
    else:
        factor = root @ wide
    return PolarFactor((factor.T if tall else factor).float().contiguous(), rank)


def by_svd(weight: Tensor, bits: int) -> tuple[Tensor, int]:
    """(U V', rank) by the definition, which is slow."""
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    rank = int(numerical_rank(values, weight.shape, bits))
    return left[:, :rank] @ right[:rank], rank


def by_newton_schulz(weights_BMN: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors of a batch, and whether each converged.

    X <- 1.5 X - 0.5 X X' X from X = W / (bound of its largest singular value). Every singular value goes to
    1, small ones by a factor of 1.5 per step; those below 1e-4 of the largest do not arrive, which the
    residual shows.
    """
    tall = weights_BMN.shape[1] > weights_BMN.shape[2]
    wide = weights_BMN.mT if tall else weights_BMN
    scale = torch.linalg.matrix_norm(wide).clamp_min(torch.finfo(torch.float32).tiny)
    x = wide / scale[:, None, None]
    product = x @ x.mT
    # (sum of sigma^8)^(1/8): above the largest, and much closer to it than the Frobenius norm
    bound = torch.linalg.matrix_norm(product @ product).clamp_min(torch.finfo(torch.float32).tiny) ** 0.25
    x = x / bound[:, None, None]
    identity = torch.eye(x.shape[1], device=x.device)
    residual = torch.full(scale.shape, torch.inf, device=x.device)
    for _ in range(NEWTON_STEPS):
        product = x @ x.mT
        residual = torch.linalg.matrix_norm(product - identity) / x.shape[1] ** 0.5
        if (residual < NEWTON_RESIDUAL).all():
            break
        x = torch.baddbmm(x, product, x, beta=1.5, alpha=-0.5)
    return (x.mT if tall else x).contiguous(), residual < NEWTON_RESIDUAL
