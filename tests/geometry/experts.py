"""Experts for the tests of geometry: random ones, and what they compute."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moescope.types import ExpertWeights


def random_expert(
    seed: int, hidden: int = 24, width: int = 40, gated: bool = True, biases: bool = False
) -> ExpertWeights:
    draw = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).float()

    up = gaussian(hidden, width) if gated else None
    gate, down = gaussian(hidden, width), gaussian(width, hidden)
    if not biases:
        return ExpertWeights(gate, down, up)
    return ExpertWeights(
        gate, down, up, gaussian(hidden), gaussian(hidden) if gated else None, gaussian(width)
    )


def output(expert: ExpertWeights, x_TD: Tensor) -> Tensor:
    """What the expert computes, in fp64.

    Down(silu(gate x) * up x), or down(relu(x)) where there is no gate.
    """

    def linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight.double(), None if bias is None else bias.double())

    gate = linear(expert.gate_FD, expert.gate_bias_F, x_TD.double())
    if expert.up_FD is None:
        hidden = torch.relu(gate)
    else:
        hidden = torch.nn.functional.silu(gate) * linear(expert.up_FD, expert.up_bias_F, x_TD.double())
    return linear(expert.down_DF, expert.down_bias_D, hidden)


def shuffled(expert: ExpertWeights, seed: int, flip: bool) -> tuple[ExpertWeights, np.ndarray, np.ndarray]:
    """The same function with neurons in another order, half of them with the other sign.

    And the order and signs that were taken.
    """
    random = np.random.default_rng(seed)
    hidden = expert.gate_FD.shape[0]
    order = random.permutation(hidden)
    sign = np.ones(hidden)
    if flip:
        sign[random.permutation(hidden)[: hidden // 2]] = -1
    take, flips = torch.from_numpy(order), torch.from_numpy(sign).float()
    return (
        ExpertWeights(
            expert.gate_FD[take],
            expert.down_DF[:, take] * flips,
            None if expert.up_FD is None else expert.up_FD[take] * flips[:, None],
            None if expert.gate_bias_F is None else expert.gate_bias_F[take],
            None if expert.up_bias_F is None else expert.up_bias_F[take],
            expert.down_bias_D,
        ),
        order,
        sign,
    )
