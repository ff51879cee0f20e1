"""What chance gives: distances of unrelated experts, as they lie and after the best matching of their
neurons.

Unrelated experts are sqrt 2 apart and have R = 0. Matching brings any two experts closer, because it may
choose among F! orders, so a
matched distance means something only below what the same matching makes of random experts of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt

import numpy as np
import torch

from moescope.geometry.matching import PROJECTIONS, match_neurons, projection_matrix
from moescope.types import ExpertWeights

UNRELATED_L2 = sqrt(2)
UNRELATED_R = 0.0
LARGEST_DRAWN = 2048  # neurons of the experts that are really drawn and matched; beyond, the law below
WIDEST_DRAWN = 1024
RUNGS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Chance:
    """What matching reaches on random experts, of one projection."""

    relative_l2: float
    sv_alignment: float


@lru_cache(maxsize=64)
def matched_chance(
    hidden: int,
    width: int,
    signed: bool = True,
    gated: bool = True,
    projections: tuple[str, ...] = PROJECTIONS,
    seed: int = 0,
) -> dict[str, Chance]:
    """Projection -> relative L2 and R that matching with this objective reaches between Gaussian experts of F
    x D.

    L2 = sqrt(2 - 2c), c the matched cosine, drawn: real experts matched by `match_neurons`. R = c (sum s)^2 /
    (r sum s^2), since matched random experts
    are to first order correlated Gaussian matrices, and the share of a Gaussian matrix in its own polar
    factor is known from the law of its
    singular values (Marchenko and Pastur 1967). A projection left out of the score keeps sqrt 2 and 0.

    Two laws keep this cheap. The cosine falls as 1/sqrt(D), so width is drawn up to 1024 and scaled; and its
    square grows linearly in log F (the
    extreme values of a Gaussian), so beyond 2048 neurons it is a line through what was drawn at 256 to 2048.
    Tests hold both against drawn experts.
    """
    names = [name for name in PROJECTIONS if gated or name != "up"]
    scored = tuple(name for name in projections if name in names)
    drawn_width = min(width, WIDEST_DRAWN)
    scale = sqrt(drawn_width / width)
    if hidden <= LARGEST_DRAWN:
        cosines = drawn_cosines(hidden, drawn_width, signed, gated, scored, seed)
    else:
        rungs = [drawn_cosines(rung, drawn_width, signed, gated, scored, seed) for rung in RUNGS]
        at = [log(rung) for rung in RUNGS]
        lines = {name: np.polyfit(at, [rung[name] ** 2 for rung in rungs], 1) for name in scored}
        cosines = {name: sqrt(max(float(np.polyval(line, log(hidden))), 0.0)) for name, line in lines.items()}
    share = own_share(min(hidden, width) / max(hidden, width))
    found = {}
    for name in names:
        cosine = min(cosines.get(name, 0.0) * scale, 1.0)
        found[name] = Chance(sqrt(2 - 2 * cosine), cosine * share)
    return found


@lru_cache(maxsize=256)
def drawn_cosines(
    hidden: int, width: int, signed: bool, gated: bool, projections: tuple[str, ...], seed: int
) -> dict[str, float]:
    """Projection -> cosine after matching, mean over pairs of random experts.

    More pairs of small experts, which scatter more.
    """
    pairs = min(max(2048 // hidden, 2), 32)
    generator = torch.Generator().manual_seed(seed)

    def gaussian() -> ExpertWeights:
        gate, up = (torch.randn(hidden, width, generator=generator) for _ in range(2))
        return ExpertWeights(gate, torch.randn(width, hidden, generator=generator), up if gated else None)

    cosines: dict[str, list[float]] = {name: [] for name in projections}
    for _ in range(pairs):
        dominant, member = gaussian(), gaussian()
        matched = match_neurons(dominant, member, signed, projections).apply(member)
        for name in projections:
            a, b = projection_matrix(dominant, name), projection_matrix(matched, name)
            assert a is not None
            assert b is not None
            cosines[name].append(float((a * b).sum() / (torch.linalg.norm(a) * torch.linalg.norm(b))))
    return {name: float(np.mean(values)) for name, values in cosines.items()}


def own_share(aspect: float) -> float:
    """(sum s)^2 / (r sum s^2) of a large Gaussian matrix whose shorter side is `aspect` of the longer: 1 for
    a very long one, 0.72 for a square.

    (2/pi integral over 0..pi of sin^2 t / sqrt(1 + g + 2 sqrt(g) cos t) dt)^2: the mean of sqrt(x) under
    Marchenko and Pastur's law, whose mean is 1.
    """
    steps = 4096
    angle = (np.arange(steps) + 0.5) * np.pi / steps
    root = np.sqrt(1 + aspect + 2 * np.sqrt(aspect) * np.cos(angle))
    return float((2 * np.mean(np.sin(angle) ** 2 / root)) ** 2)
