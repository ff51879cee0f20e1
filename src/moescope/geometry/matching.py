"""Which neuron of one expert is which of another's.

An expert is a sum over neurons: neuron p reads with row p of gate and up and writes with column p of down.
Their order means nothing,
and in a gated expert neither does the sign of (up, down) together, so two equal functions may look like
unrelated matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moescope.errors import BadInput, unknown_name
from moescope.types import ExpertWeights

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Matching:
    """How a member's neurons are brought into the dominant expert's order."""

    order_F: npt.NDArray[np.int64]  # place p of the result takes the member's neuron order_F[p]
    sign_F: npt.NDArray[np.int8]  # +1 or -1 at place p, for its row of up and its column of down
    score: float  # the sum over neurons of what was maximised; for equal experts, the number of projections

    def projection(self, name: str, matrix: Tensor) -> Tensor:
        """One projection's matrix (or its polar factor.

        Polar(P W) = P polar(W)) with neurons in their new places.
        """
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
        """The same function with its neurons in the dominant's order.

        The bias of down belongs to no neuron and stays.
        """
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
    """The one-to-one matching of the member's neurons to the dominant's with the largest total score.

    score(p, q) = <g_p, g'_q> + |<u_p, u'_q> + <d_p, d'_q>|, every projection scaled to unit Frobenius norm;
    the sign inside the bars is the
    flip of (up, down). Unsigned there are no bars: experts with biases, for which a flip is another function,
    or without a gate are
    always matched so. Naming fewer projections leaves the others out of the score, for a check on what was
    held out.

    The assignment is exact (Jonker-Volgenant, scipy). It finds an order for unrelated experts too: read the
    distance that is
    left beside what random experts reach (`nulls.py`).
    """
    check_projections(projections)
    if dominant.gate_FD.shape != member.gate_FD.shape or dominant.down_DF.shape != member.down_DF.shape:
        raise BadInput(
            f"experts of {tuple(dominant.gate_FD.shape)} and {tuple(member.gate_FD.shape)} "
            "cannot be matched neuron by neuron; "
            "give two experts of one shape"
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
            "neurons that hold NaN or infinity cannot be matched; look at the checkpoint with `moescope scan`"
        )
    places, order = linear_sum_assignment(score_FF, maximize=True)
    sign = np.ones(neurons, dtype=np.int8)
    if signed:
        agreement = flipped_FF.cpu().numpy()[places, order]
        sign[agreement < 0] = -1
    return Matching(order.astype(np.int64), sign, float(score_FF[places, order].sum(dtype=np.float64)))


def can_flip(expert: ExpertWeights) -> bool:
    """Whether the sign of a neuron's (up, down) means nothing: gated, and without biases."""
    biases = (expert.gate_bias_F, expert.up_bias_F, expert.down_bias_D)
    return expert.up_FD is not None and all(bias is None for bias in biases)


def projection_matrix(expert: ExpertWeights, name: str) -> Tensor | None:
    """The expert's matrix of that name; None where there is no such one."""
    return {"gate": expert.gate_FD, "up": expert.up_FD, "down": expert.down_DF}[name]


def unit_neurons(expert: ExpertWeights, name: str, device: str) -> Tensor | None:
    """One projection with a row for each neuron, at unit Frobenius norm.

    A projection of zeros stays zeros.
    """
    matrix = projection_matrix(expert, name)
    if matrix is None:
        return None
    rows = (matrix.T if name == "down" else matrix).to(device, torch.float32)
    norm = torch.linalg.vector_norm(rows, dtype=torch.float64).item()
    return rows / norm if norm > 0 else rows


def check_projections(projections: tuple[str, ...]) -> None:
    for name in projections:
        if name not in PROJECTIONS:
            raise unknown_name("projection", name, list(PROJECTIONS))
    if not projections:
        raise BadInput(f"no projection to match by; known: {', '.join(PROJECTIONS)}")
