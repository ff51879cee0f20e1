"""The shape of one expert's spectrum in a few numbers."""

from __future__ import annotations

import numpy as np

from moescope.spectral.arrays import Array


def spectrum_statistics(singular_values_R: Array) -> dict[str, float | int]:
    """Norms and ranks of one matrix from its singular values (falling, all above the rank tolerance).

    stable_rank = ||W||_F^2 / s_1^2; effective_rank = exp of the entropy of s / sum(s) (Roy and Vetterli
    2007);
    condition = s_1 / s_rank, over the nonzero singular values.
    """
    s = singular_values_R
    share = s / s.sum()
    energy = float((s**2).sum())
    return {
        "frobenius": float(np.sqrt(energy)),
        "spectral_norm": float(s[0]),
        "stable_rank": energy / float(s[0]) ** 2,
        "effective_rank": float(np.exp(-(share * np.log(share)).sum())),
        "rank": len(s),
        "condition": float(s[0] / s[-1]),
    }
