"""Made-up experts and routers for the measurements.

As large as real ones, with spectra like and unlike theirs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SPECTRA = ("random", "condition 1e4", "heavy-tailed", "rank-deficient")


def routers(n: int, width: int, seed: int = 0) -> Tensor:
    """[n, width] unit rows in fp64."""
    rows = torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows / rows.norm(dim=1, keepdim=True)


def random_experts(count: int, hidden: int, width: int, seed: int = 0) -> list[Tensor]:
    """Independent Gaussian weights in bf16, as a checkpoint would hold them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(hidden, width, generator=generator).to(torch.bfloat16) for _ in range(count)]


def expert(kind: str, hidden: int, width: int, seed: int = 0) -> Tensor:
    """[hidden, width] in fp32 with the named spectrum, up to the rounding to fp32.

    random: Gaussian. condition 1e4: singular values fall geometrically over four decades. heavy-tailed: s_i ~
    i^-0.8, the
    first ones far above the rest, as in trained weights. rank-deficient: the last tenth is zero (in fp64:
    rounding to
    fp32 would fill it up).
    """
    generator = np.random.default_rng(seed)
    size = min(hidden, width)
    if kind == "random":
        return torch.from_numpy(generator.standard_normal((hidden, width), dtype=np.float32))
    rank = size - max(1, size // 10) if kind == "rank-deficient" else size
    values = {
        "condition 1e4": np.geomspace(1, 1e-4, rank),
        "heavy-tailed": np.arange(1, rank + 1) ** -0.8,
        "rank-deficient": np.linspace(2, 1, rank),
    }[kind]
    left, right = (orthonormal(generator, side, rank) for side in (hidden, width))
    matrix = (left * torch.from_numpy(values)) @ right.T
    return matrix if kind == "rank-deficient" else matrix.to(torch.float32)


def orthonormal(generator: np.random.Generator, rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.from_numpy(generator.standard_normal((rows, columns))))[0]
