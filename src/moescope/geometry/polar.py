"""Polar factors.

What is left of a matrix when all its singular values are set to one, and how alike two of them are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moescope.errors import BadInput
from moescope.geometry.distances import Array, gram

RANK_TOLERANCE = (
    1e-6  # of the largest singular value: what fp32 rounding leaves of a smaller rank lies below 1e-7
)
WELL_CONDITIONED = 1e-3  # smallest over largest singular value
NEWTON_STEPS = (
    30  # at most; each multiplies small singular values by 1.5: from 1e-4 of the largest they reach 1
)
NEWTON_RESIDUAL = 1e-5  # largest allowed || Q Q' - I ||_F / sqrt(rank): ten times what fp32 leaves


@dataclass(frozen=True)
class PolarFactor:
    """Q = U V' of a matrix W = U S V', over the singular values that are not zero.

    In fp32, in the shape of W.
    """

    matrix: Tensor
    rank: int


def polar_factor(weight: Tensor, device: str = "cpu") -> PolarFactor:
    """The polar factor U V' of one matrix: a partial isometry where the rank is deficient.

    Q = (W W')^(-1/2) W (Higham 2008, Functions of Matrices, chapter 8). On a GPU by Newton-Schulz steps,
    which are matrix products alone, with
    the residual checked; elsewhere, and where that fails, by the eigenvectors of the fp64 Gram matrix. It
    resolves singular values down to
    1e-6 of the largest; smaller ones count as zero. A low rank stored in bf16 is not seen as such: rounding
    fills it up.
    """
    return polar_factors([weight], device)[0]


def polar_factors(weights: Sequence[Tensor], device: str = "cpu") -> list[PolarFactor]:
    """The polar factors of several matrices of one shape; on a GPU, many at a time."""
    for weight in weights:
        if not torch.isfinite(weight).all():
            raise BadInput(
                "a matrix that holds NaN or infinity has no polar factor; look at it with `moescope scan`"
            )
    if device == "cpu":
        return [by_eigenvectors(weight.to(device)) for weight in weights]
    found: list[PolarFactor] = []
    batch = max(
        (1 << 28) // weights[0].numel(), 1
    )  # 1 GiB of fp32 a batch, and three times that while it works
    for start in range(0, len(weights), batch):
        together = torch.stack(
            [weight.to(device, torch.float32) for weight in weights[start : start + batch]]
        )
        factors, converged = by_newton_schulz(together)
        for weight, factor, good in zip(
            weights[start : start + batch], factors, converged.tolist(), strict=True
        ):
            found.append(
                PolarFactor(factor, min(factor.shape)) if good else by_eigenvectors(weight.to(device))
            )
    return found


def sv_alignment(a: PolarFactor, b: PolarFactor) -> float:
    """R = <Q_A, Q_B>_F / sqrt(rank_A rank_B) = (1/r) sum_ij (u_i^A . u_j^B)(v_i^A . v_j^B) at full rank r.

    1 for equal singular vectors whatever the singular values, 0 expected for unrelated matrices; free of the
    signs and the order of
    singular vectors. NaN where a matrix is zero. It weighs all directions alike, so noise in the smallest
    counts as much as in the largest.
    """
    if a.rank == 0 or b.rank == 0:
        return float("nan")
    return inner(a.matrix, b.matrix) / float(np.sqrt(a.rank * b.rank))


def all_alignments(factors: Sequence[PolarFactor]) -> Array:
    """R of every pair, from one E x E Gram matrix of polar factors."""
    ranks = np.array([factor.rank for factor in factors], dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(gram([factor.matrix for factor in factors]) / np.sqrt(np.outer(ranks, ranks)))


def inner(a: Tensor, b: Tensor) -> float:
    """<A, B>_F in fp64, row by row: A need not be copied whole."""
    return float((a * b).sum(dim=1, dtype=torch.float64).sum().item())


def by_eigenvectors(weight: Tensor) -> PolarFactor:
    """By the eigenvectors of the smaller Gram matrix, in fp64.

    By the SVD where the eigenvalue solver does not converge.
    """
    tall = weight.shape[0] > weight.shape[1]
    wide = (weight.T if tall else weight).double()
    try:
        squares, vectors = torch.linalg.eigh(wide @ wide.T)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # documented, but not in its list of names
        factor, rank = by_svd(wide)
        return PolarFactor((factor.T if tall else factor).float(), rank)
    kept = squares > RANK_TOLERANCE**2 * squares[-1]
    basis, squares = vectors[:, kept], squares[kept]
    root = (basis * squares.rsqrt()) @ basis.T
    if (
        len(squares) and squares[0] > WELL_CONDITIONED**2 * squares[-1]
    ):  # then fp32 keeps four digits of the weakest direction
        factor = root.float() @ wide.float()
    else:
        factor = root @ wide
    return PolarFactor((factor.T if tall else factor).float().contiguous(), int(kept.sum()))


def by_svd(weight: Tensor) -> tuple[Tensor, int]:
    """By the definition itself: the slow road, and the tests' oracle."""
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    rank = int((values > RANK_TOLERANCE * values[0]).sum())
    return left[:, :rank] @ right[:rank], rank


def by_newton_schulz(weights_BMN: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors of a batch, and whether each converged: X <- 1.5 X - 0.5 X X' X from X = W / (bound of
    its largest singular value).

    Every singular value goes to 1, small ones by a factor of 1.5 a step; those below 1e-4 of the largest do
    not arrive, the residual
    shows it, and the caller takes the other road.
    """
    tall = weights_BMN.shape[1] > weights_BMN.shape[2]
    wide = weights_BMN.mT if tall else weights_BMN
    scale = torch.linalg.matrix_norm(wide).clamp_min(torch.finfo(torch.float32).tiny)
    x = wide / scale[:, None, None]
    product = x @ x.mT
    bound = torch.linalg.matrix_norm(product @ product).clamp_min(torch.finfo(torch.float32).tiny) ** 0.25
    x = (
        x / bound[:, None, None]
    )  # (sum of sigma^8)^(1/8): above the largest, much closer to it than the Frobenius norm
    identity = torch.eye(x.shape[1], device=x.device)
    residual = torch.full(scale.shape, torch.inf, device=x.device)
    for _ in range(NEWTON_STEPS):
        product = x @ x.mT
        residual = torch.linalg.matrix_norm(product - identity) / x.shape[1] ** 0.5
        if (residual < NEWTON_RESIDUAL).all():
            break
        x = torch.baddbmm(x, product, x, beta=1.5, alpha=-0.5)
    return (x.mT if tall else x).contiguous(), residual < NEWTON_RESIDUAL
