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

from moescope.errors import BadInput, unknown_name
from moescope.geometry.distances import PolarFactor, distance, sv_alignment
from moescope.types import ExpertWeights

PROJECTIONS = ("gate", "up", "down")
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
    names = [name for name in PROJECTIONS if projection_matrix(dominant, name) is not None]
    scored = tuple(name for name in projections if name in names)
    neurons = len(dominant.gate_FD)
    sizes = (neurons,) if neurons <= FITTED_NEURONS[-1] else FITTED_NEURONS
    draws = min(max(2 * FITTED_NEURONS[-1] // neurons, 1), 32)  # small experts vary more
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for draw in range(draws):
        random = np.random.default_rng((seed, draw))
        rotations = {name: Rotation.draw(dominant.gate_FD.shape[1], random) for name in scored}
        turned = rotated(member, rotations)
        for size in sizes:
            matching = match_in_blocks(dominant, turned, signed, scored, size, random, device)
            for name in scored:
                a, b = projection_matrix(dominant, name), projection_matrix(turned, name)
                assert a is not None
                assert b is not None
                aligned = float("nan")
                if name in factors[0]:
                    factor = factors[1][name]
                    basis = matching.projection(name, rotate_projection(name, factor.matrix, rotations[name]))
                    aligned = sv_alignment(factors[0][name], PolarFactor(basis, factor.rank))
                cosine = distance(a.float(), matching.projection(name, b)).cosine
                samples.setdefault((name, size), []).append((cosine, aligned))
    chance = dict.fromkeys(names, Chance(UNRELATED_L2, 0.0))
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


@dataclass(frozen=True)
class Rotation:
    """A random rotation of D dimensions that takes D log D steps per vector.

    Three rounds of: permute the coordinates, read pairs of them as complex numbers, turn each by a random
    phase, Fourier transform. Every round is orthogonal; of an odd number one coordinate waits.
    """

    orders_KD: Tensor
    phases_KD: Tensor

    @classmethod
    def draw(cls, width: int, random: np.random.Generator) -> Rotation:
        orders = [random.permutation(width) for _ in range(ROUNDS)]
        phases = random.uniform(0, 2 * pi, (ROUNDS, width // 2))
        return cls(torch.from_numpy(np.stack(orders)), torch.from_numpy(phases).float())

    def __call__(self, rows_ND: Tensor) -> Tensor:
        rows = rows_ND.to(torch.float32)
        even = rows.shape[1] // 2 * 2
        for order, phase in zip(self.orders_KD.to(rows.device), self.phases_KD.to(rows.device), strict=True):
            rows = rows[:, order]
            pairs = torch.view_as_complex(rows[:, :even].reshape(len(rows), -1, 2).contiguous())
            turned = torch.fft.fft(pairs * torch.polar(torch.ones_like(phase), phase), norm="ortho")
            rows = torch.cat([torch.view_as_real(turned).flatten(1), rows[:, even:]], 1)
        return rows


def rotate_projection(name: str, matrix: Tensor, rotation: Rotation) -> Tensor:
    """One projection with its d_model rotated: rows of gate and up, columns of down."""
    return rotation(matrix.T).T if name == "down" else rotation(matrix)


def rotated(expert: ExpertWeights, rotations: Mapping[str, Rotation]) -> ExpertWeights:
    """The expert with those projections rotated."""

    def turn(name: str, matrix: Tensor) -> Tensor:
        return rotate_projection(name, matrix, rotations[name]) if name in rotations else matrix

    return replace(
        expert,
        gate_FD=turn("gate", expert.gate_FD),
        up_FD=None if expert.up_FD is None else turn("up", expert.up_FD),
        down_DF=turn("down", expert.down_DF),
    )


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
    order, sign = np.empty(neurons, np.int64), np.empty(neurons, np.int8)
    parts = -(-neurons // size)
    score = 0.0
    for ours, theirs in zip(
        *(np.array_split(random.permutation(neurons), parts) for _ in range(2)), strict=True
    ):
        part = match_neurons(
            take_neurons(dominant, ours), take_neurons(member, theirs), signed, projections, device
        )
        order[ours], sign[ours] = theirs[part.order_F], part.sign_F
        score += part.score
    return Matching(order, sign, score / parts)


def take_neurons(expert: ExpertWeights, neurons: npt.NDArray[np.int64]) -> ExpertWeights:
    """The expert with these neurons only."""
    signs = np.ones(len(neurons), np.int8)
    return Matching(neurons.astype(np.int64), signs, 0.0).apply(expert)
