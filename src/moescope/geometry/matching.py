"""Match the neurons of two experts, and the distances that matching reaches on random experts.

An expert is a sum over neurons: neuron p reads with row p of gate and up and writes with column p of down.
Their order is arbitrary, and in a gated expert so is the sign of (up, down) together, so two equal functions
may look like unrelated matrices.

Unrelated experts have relative L2 sqrt 2 and R = 0. Matching brings any two experts closer, because it may
choose among F! orders: a matched distance is meaningful only below what the same matching reaches on random
experts of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moescope.errors import BadInput, unknown_name
from moescope.types import ExpertWeights

PROJECTIONS = ("gate", "up", "down")
UNRELATED_L2 = sqrt(2)
MAX_SAMPLED_NEURONS = 2048  # larger random experts are extrapolated, see matched_chance
MAX_SAMPLED_WIDTH = 1024
FITTED_NEURONS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Matching:
    """A permutation (and signs) of a member's neurons into the dominant expert's order."""

    order_F: npt.NDArray[np.int64]  # position p of the result takes the member's neuron order_F[p]
    sign_F: npt.NDArray[np.int8]  # +1 or -1 at position p, for its row of up and its column of down
    score: float  # the maximised sum over neurons; for equal experts, the number of projections

    def projection(self, name: str, matrix: Tensor) -> Tensor:
        """Permute one projection's matrix, or its polar factor: polar(P W) = P polar(W)."""
        order = torch.from_numpy(self.order_F).to(matrix.device)
        sign = torch.from_numpy(self.sign_F).to(matrix)
        if name == "gate":
            return matrix[order]
        if name == "up":
            return matrix[order] * sign[:, None]
        if name == "down":
            return matrix[:, order] * sign
        raise unknown_name("projection", name, list(PROJECTIONS))

    def apply(self, member: ExpertWeights) -> ExpertWeights:
        """Return the same function with its neurons in the dominant's order; the bias of down stays."""
        order = torch.from_numpy(self.order_F).to(member.gate_FD.device)
        return ExpertWeights(
            self.projection("gate", member.gate_FD),
            self.projection("down", member.down_DF),
            None if member.up_FD is None else self.projection("up", member.up_FD),
            None if member.gate_bias_F is None else member.gate_bias_F[order],
            None if member.up_bias_F is None else member.up_bias_F[order],
            member.down_bias_D,
        )


def match_neurons(
    dominant: ExpertWeights,
    member: ExpertWeights,
    signed: bool = True,
    projections: tuple[str, ...] = PROJECTIONS,
    device: str = "cpu",
) -> Matching:
    """Return the one-to-one matching of the member's neurons to the dominant's with the largest total score.

    score(p, q) = <g_p, g'_q> + |<u_p, u'_q> + <d_p, d'_q>|, every projection scaled to unit Frobenius norm;
    the sign inside the bars is the flip of (up, down). Unsigned matching has no bars; experts with biases,
    for which a flip is another function, or without a gate are always matched unsigned. Projections not named
    are held out of the score.

    The assignment is exact (Jonker-Volgenant, scipy). It finds an order for unrelated experts too: compare
    the remaining distance with `matched_chance`.
    """
    for name in projections:
        if name not in PROJECTIONS:
            raise unknown_name("projection", name, list(PROJECTIONS))
    if not projections:
        raise BadInput(f"no projection to match by; known: {', '.join(PROJECTIONS)}")
    if dominant.gate_FD.shape != member.gate_FD.shape or dominant.down_DF.shape != member.down_DF.shape:
        raise BadInput(
            f"cannot match neurons of experts of shapes {tuple(dominant.gate_FD.shape)} and "
            f"{tuple(member.gate_FD.shape)}; use two experts of one shape"
        )
    signed = signed and can_flip(dominant) and can_flip(member)
    neurons = dominant.gate_FD.shape[0]
    fixed_FF = torch.zeros(neurons, neurons, device=device)
    flipped_FF = torch.zeros(neurons, neurons, device=device)
    for name in projections:
        rows = [unit_neurons(expert, name, device) for expert in (dominant, member)]
        if rows[0] is not None and rows[1] is not None:
            (fixed_FF if name == "gate" else flipped_FF).addmm_(rows[0], rows[1].T)
    score_FF = (fixed_FF + (flipped_FF.abs() if signed else flipped_FF)).cpu().numpy()
    if not np.isfinite(score_FF).all():
        raise BadInput(
            "neurons with NaN or infinity cannot be matched; inspect the checkpoint with `moescope scan`"
        )
    places, order = linear_sum_assignment(score_FF, maximize=True)
    sign = np.ones(neurons, dtype=np.int8)
    if signed:
        sign[flipped_FF.cpu().numpy()[places, order] < 0] = -1
    return Matching(order.astype(np.int64), sign, float(score_FF[places, order].sum(dtype=np.float64)))


def can_flip(expert: ExpertWeights) -> bool:
    """Whether the sign of a neuron's (up, down) is arbitrary: gated, and without biases."""
    biases = (expert.gate_bias_F, expert.up_bias_F, expert.down_bias_D)
    return expert.up_FD is not None and all(bias is None for bias in biases)


def projection_matrix(expert: ExpertWeights, name: str) -> Tensor | None:
    """The expert's matrix of that name; None where it has none."""
    return {"gate": expert.gate_FD, "up": expert.up_FD, "down": expert.down_DF}[name]


def unit_neurons(expert: ExpertWeights, name: str, device: str) -> Tensor | None:
    """One projection with one row per neuron, at unit Frobenius norm; zeros stay zeros."""
    matrix = projection_matrix(expert, name)
    if matrix is None:
        return None
    rows = (matrix.T if name == "down" else matrix).to(device, torch.float32)
    norm = torch.linalg.vector_norm(rows, dtype=torch.float64).item()
    return rows / norm if norm > 0 else rows


# --- chance


@dataclass(frozen=True)
class Chance:
    """What matching reaches on one projection of random experts."""

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

    L2 = sqrt(2 - 2c), c the matched cosine of sampled experts (`match_neurons`). R = c (sum s)^2 / (r sum
    s^2), since matched random experts are to first order correlated Gaussian matrices, and the share of a
    Gaussian matrix in its polar factor follows from the law of its singular values (Marchenko and Pastur
    1967). A projection held out of the score has sqrt 2 and 0.

    Two laws keep this cheap. The cosine falls as 1/sqrt(D), so widths above 1024 are scaled; and its square
    grows linearly in log F (the extreme values of a Gaussian), so beyond 2048 neurons it is a line fitted to
    samples of 256 to 2048. Tests check both against sampled experts.
    """
    names = [name for name in PROJECTIONS if gated or name != "up"]
    scored = tuple(name for name in projections if name in names)
    sampled_width = min(width, MAX_SAMPLED_WIDTH)
    scale = sqrt(sampled_width / width)
    if hidden <= MAX_SAMPLED_NEURONS:
        cosines = sampled_cosines(hidden, sampled_width, signed, gated, scored, seed)
    else:
        samples = [
            sampled_cosines(size, sampled_width, signed, gated, scored, seed) for size in FITTED_NEURONS
        ]
        sizes = [log(size) for size in FITTED_NEURONS]
        lines = {name: np.polyfit(sizes, [sample[name] ** 2 for sample in samples], 1) for name in scored}
        cosines = {name: sqrt(max(float(np.polyval(line, log(hidden))), 0.0)) for name, line in lines.items()}
    share = polar_share(min(hidden, width) / max(hidden, width))
    chance = {}
    for name in names:
        cosine = min(cosines.get(name, 0.0) * scale, 1.0)
        chance[name] = Chance(sqrt(2 - 2 * cosine), cosine * share)
    return chance


@lru_cache(maxsize=256)
def sampled_cosines(
    hidden: int, width: int, signed: bool, gated: bool, projections: tuple[str, ...], seed: int
) -> dict[str, float]:
    """Projection -> mean cosine after matching over pairs of random experts; small ones vary more and get
    more pairs."""
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


def polar_share(aspect: float) -> float:
    """(sum s)^2 / (r sum s^2) of a large Gaussian matrix whose shorter side is `aspect` times the longer: 1
    for a very long one, 0.72 for a square.

    (2/pi integral over 0..pi of sin^2 t / sqrt(1 + g + 2 sqrt(g) cos t) dt)^2: the mean of sqrt(x) under
    Marchenko and Pastur's law, whose mean is 1.
    """
    steps = 4096
    angle = (np.arange(steps) + 0.5) * np.pi / steps
    root = np.sqrt(1 + aspect + 2 * np.sqrt(aspect) * np.cos(angle))
    return float((2 * np.mean(np.sin(angle) ** 2 / root)) ** 2)
