"""How much routing still changed between the last checkpoints of a training, on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from moescope.decoder.saving import load_model
from moescope.lab.batches import TokenRows
from moescope.routing.stability import layer_stability
from moescope.types import Integers, Routing

LAST = 4  # checkpoints looked at
TOKENS = 4096  # of text, about


@dataclass(frozen=True)
class Stability:
    """Means over layers.

    `consistency` and `kendall_tau` of neighbouring checkpoints, `usage_sigma` over all of them.
    """

    consistency: float
    usage_sigma: float
    kendall_tau: float  # NaN where usages have no ranks


def checkpoint_stability(
    checkpoints: Sequence[tuple[int, Path]], rows: TokenRows, device: str
) -> Stability | None:
    """Of the last few of these (step, folder); None where there is one only, or nothing is routed."""
    last = sorted(checkpoints)[-LAST:]
    if len(last) < 2:
        return None
    chosen: dict[int, list[Integers]] = {}
    n_experts: list[int] = []
    for step, folder in last:
        layers = routed(folder, rows, device)
        chosen[step], n_experts = [layer for layer, _ in layers], [number for _, number in layers]
    if max(n_experts) < 2:
        return None
    found = []
    steps = [step for step, _ in last]
    for layer, number in enumerate(n_experts):
        pairs = {
            (row["step_a"], row["step_b"]): row
            for row in layer_stability({step: chosen[step][layer] for step in steps}, number)
        }
        near = [pairs[pair] for pair in pairwise(steps)]
        taus = [row["kendall_tau"] for row in near if np.isfinite(row["kendall_tau"])]
        tau = float(np.mean(taus)) if taus else np.nan
        same = float(np.mean([row["routing_consistency"] for row in near]))
        found.append((same, pairs[steps[0], steps[-1]]["usage_sigma"], tau))
    values = np.array(found)
    tau = float(np.nanmean(values[:, 2])) if np.isfinite(values[:, 2]).any() else np.nan
    return Stability(float(values[:, 0].mean()), float(values[:, 1].mean()), tau)


@torch.no_grad()
def routed(folder: Path, rows: TokenRows, device: str) -> list[tuple[Integers, int]]:
    """Every layer's chosen experts for the real tokens of the rows, and how many experts there are.

    In evaluation mode.
    """
    model, _ = load_model(folder, device)
    numbers = np.unique(
        np.linspace(0, rows.rows - 1, min(rows.rows, max(TOKENS // rows.length, 1))).astype(np.int64)
    )
    batch = rows.batch(numbers)
    layers: list[tuple[Integers, int]] = []
    real_T = torch.from_numpy(batch.mask_BL.reshape(-1)).to(device)

    def consume(routing: Routing) -> None:
        layers.append((routing.chosen_TK[real_T].cpu().numpy().astype(np.int64), routing.n_experts))

    model(
        torch.from_numpy(batch.ids_BL).to(device), torch.from_numpy(batch.mask_BL).to(device), consume=consume
    )
    return layers
