"""Match the neurons of two experts, and the distances that matching reaches on unrelated experts.

An expert is a sum over neurons: neuron p reads with row p of gate and up and writes with column p of down.
Their order is arbitrary, and in a gated expert so is the sign of (up, down) together, so two equal functions
may look like unrelated matrices.

Unrelated experts have relative L2 sqrt 2 and R = 0. Matching brings any two experts closer, because it may
choose among F! orders: a matched distance is meaningful only below what the same matching reaches on the same
experts after a random rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log, pi, sqrt

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moescope.arguments import names
from moescope.errors import BadInput
from moescope.geometry.distances import PolarFactor, distance, sv_alignment
from moescope.types import ExpertWeights

FIELDS = {"gate": "gate_FD", "up": "up_FD", "down": "down_DF"}  # of ExpertWeights
PROJECTIONS = tuple(FIELDS)
UNRELATED_L2 = sqrt(2)
FITTED_NEURONS = (256, 512, 1024)  # blocks of experts with more neurons, see matched_chance
ROUNDS = 3  # of a rotation


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
        return matrix[order] * sign[:, None] if name == "up" else matrix[:, order] * sign

    def apply(self, member: ExpertWeights) -> ExpertWeights:
        """Return the same function with its neurons in the dominant's order; the bias of down stays."""
        order = torch.from_numpy(self.order_F).to(member.gate_FD.device)
        moved = {FIELDS[name]: self.projection(name, part) for name, part in projections_of(member).items()}
        biases = {"gate_bias_F": member.gate_bias_F, "up_bias_F": member.up_bias_F}
        moved |= {name: bias[order] for name, bias in biases.items() if bias is not None}
        return replace(member, **moved)


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
    projections = names("projection", projections, PROJECTIONS)
    if dominant.gate_FD.shape != member.gate_FD.shape or dominant.down_DF.shape != member.down_DF.shape:
        raise BadInput(
            f"cannot match neurons of experts of shapes {tuple(dominant.gate_FD.shape)} and "
            f"{tuple(member.gate_FD.shape)}; use two experts of one shape"
        )
    signed = signed and can_flip(dominant) and can_flip(member)
    neurons = dominant.gate_FD.shape[0]
    fixed_FF = torch.zeros(neurons, neurons, device=device)
    flipped_FF = torch.zeros(neurons, neurons, device=device)
    a, b = projections_of(dominant), projections_of(member)
    for name in (name for name in projections if name in a and name in b):
        rows = [(part.T if name == "down" else part).to(device, torch.float32) for part in (a[name], b[name])]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64).item() for part in rows]
        ours, theirs = (part / (norm or 1.0) for part, norm in zip(rows, norms, strict=True))
        (fixed_FF if name == "gate" else flipped_FF).addmm_(ours, theirs.T)
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


def projections_of(expert: ExpertWeights) -> dict[str, Tensor]:
    """The expert's matrices by name."""
    parts = {name: getattr(expert, part) for name, part in FIELDS.items()}
    return {name: matrix for name, matrix in parts.items() if matrix is not None}


# --- chance


@dataclass(frozen=True)
class Chance:
    """What matching reaches on one projection of unrelated experts; NaN where there is nothing to compare."""

    relative_l2: float
    sv_alignment: float


def matched_chance(
    dominant: ExpertWeights,
    member: ExpertWeights,
    signed: bool = True,
    projections: tuple[str, ...] = PROJECTIONS,
    factors: tuple[Mapping[str, PolarFactor], Mapping[str, PolarFactor]] = ({}, {}),
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Chance]:
    """Projection -> relative L2 and R after matching the dominant with randomly rotated copies of the member.

    A rotation of d_model makes the two unrelated and keeps the norm of every neuron and the spectrum of every
    matrix, which both change what matching reaches: of uneven neurons only the large ones count. Each
    projection has its own rotation, so one held out of the score has sqrt 2 and 0. polar(W R) = polar(W) R:
    R needs no new decomposition, and is NaN without `factors`, the polar factors of both.

    Beyond 1,024 neurons matching is done within random blocks of 256, 512 and 1,024; the squares of cosine
    and R grow linearly in the log of the block, as the extreme values of a Gaussian do, and are extrapolated.
    """
    ours, theirs = projections_of(dominant), projections_of(member)
    scored = tuple(name for name in projections if name in ours)
    neurons, width = dominant.gate_FD.shape
    sizes = (neurons,) if neurons <= FITTED_NEURONS[-1] else FITTED_NEURONS
    draws = min(max(2 * FITTED_NEURONS[-1] // neurons, 1), 32)  # small experts vary more
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for draw in range(draws):
        random = np.random.default_rng((seed, draw))
        rotations = {name: Rotation(width, random) for name in scored}
        turned = {name: rotations[name].turn(name, theirs[name]) for name in scored}
        rotated = replace(member, **{FIELDS[name]: matrix for name, matrix in turned.items()})
        for size in sizes:
            matching = match_in_blocks(dominant, rotated, signed, scored, size, random, device)
            for name in scored:
                aligned = float("nan")
                if name in factors[0]:
                    factor = factors[1][name]
                    basis = matching.projection(name, rotations[name].turn(name, factor.matrix))
                    aligned = sv_alignment(factors[0][name], PolarFactor(basis, factor.rank))
                cosine = distance(ours[name].float(), matching.projection(name, turned[name])).cosine
                samples.setdefault((name, size), []).append((cosine, aligned))
    chance = dict.fromkeys(ours, Chance(UNRELATED_L2, 0.0))
    for name in scored:
        means = np.array([np.mean(samples[name, size], axis=0) for size in sizes])
        cosine, aligned = means[0]
        if len(sizes) > 1 and np.isfinite(means[:, 0]).all():
            cosine, aligned = (
                sqrt(max(float(np.polyval(np.polyfit(np.log(sizes), column**2, 1), log(neurons))), 0.0))
                if np.isfinite(column).all()
                else float("nan")
                for column in means.T
            )
        chance[name] = Chance(sqrt(max(2 - 2 * cosine, 0.0)), float(aligned))
    return chance


class Rotation:
    """A random rotation of D dimensions that takes D log D steps per vector.

    Three rounds of: permute the coordinates, read pairs of them as complex numbers, turn each by a random
    phase, Fourier transform. Every round is orthogonal; of an odd number one coordinate waits.
    """

    def __init__(self, width: int, random: np.random.Generator):
        self.orders_KD = torch.from_numpy(np.stack([random.permutation(width) for _ in range(ROUNDS)]))
        self.phases_KD = torch.from_numpy(random.uniform(0, 2 * pi, (ROUNDS, width // 2))).float()

    def __call__(self, rows_ND: Tensor) -> Tensor:
        rows = rows_ND.to(torch.float32)
        even = rows.shape[1] // 2 * 2
        for order, phase in zip(self.orders_KD.to(rows.device), self.phases_KD.to(rows.device), strict=True):
            rows = rows[:, order]
            pairs = torch.view_as_complex(rows[:, :even].reshape(len(rows), -1, 2).contiguous())
            turned = torch.fft.fft(pairs * torch.polar(torch.ones_like(phase), phase), norm="ortho")
            rows = torch.cat([torch.view_as_real(turned).flatten(1), rows[:, even:]], 1)
        return rows

    def turn(self, name: str, matrix: Tensor) -> Tensor:
        """One projection with its d_model rotated: rows of gate and up, columns of down."""
        return self(matrix.T).T if name == "down" else self(matrix)


def match_in_blocks(
    dominant: ExpertWeights,
    member: ExpertWeights,
    signed: bool,
    projections: tuple[str, ...],
    size: int,
    random: np.random.Generator,
    device: str,
) -> Matching:
    """Match random blocks of about `size` neurons of the two, one to one."""
    neurons = len(dominant.gate_FD)
    if size >= neurons:
        return match_neurons(dominant, member, signed, projections, device)

    def part_of(expert: ExpertWeights, chosen: npt.NDArray[np.int64]) -> ExpertWeights:
        return Matching(chosen, np.ones(len(chosen), np.int8), 0.0).apply(expert)

    order, sign, score = np.empty(neurons, np.int64), np.empty(neurons, np.int8), 0.0
    parts = -(-neurons // size)
    blocks = (np.array_split(random.permutation(neurons), parts) for _ in range(2))
    for ours, theirs in zip(*blocks, strict=True):
        part = match_neurons(part_of(dominant, ours), part_of(member, theirs), signed, projections, device)
        order[ours], sign[ours] = theirs[part.order_F], part.sign_F
        score += part.score
    return Matching(order, sign, score / parts)
