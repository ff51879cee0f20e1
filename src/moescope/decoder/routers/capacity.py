"""Hard capacity: how many tokens an expert may take, and which ones it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from moescope.decoder.ranks import ALONE, Ranks


def capacity_of(mask_T: Tensor, factor: float, top_k: int, n_experts: int, ranks: Ranks = ALONE) -> Tensor:
    """ceil(factor N k / n), N the real tokens of all ranks; at least 1.

    A tensor, so that the device is not waited for.
    """
    # In float64: in float32, 1.25 x 24,576 x 4 / 64 and its like may come out just above a whole number.
    real = ranks.sum(mask_T.sum()).double()
    return torch.ceil(real * (factor * top_k / n_experts) - 1e-9).clamp(min=1).long()


def place_in_line(chosen_TK: Tensor, priority_TK: Tensor) -> Tensor:
    """How many slots with higher priority ask for the same expert; at equal priority the earlier token goes
    first. int64 [T, K].

    Empty slots (-1) stand in a line of their own.
    """
    chosen_S = chosen_TK.flatten()
    by_priority = torch.sort(priority_TK.detach().flatten(), descending=True, stable=True).indices
    order = by_priority[torch.sort(chosen_S[by_priority], stable=True).indices]
    sorted_S = chosen_S[order]
    place_S = torch.arange(len(order), device=order.device)
    begins = torch.ones_like(sorted_S, dtype=torch.bool)
    begins[1:] = sorted_S[1:] != sorted_S[:-1]
    first_S = torch.where(begins, place_S, 0).cummax(0).values
    line_S = torch.empty_like(place_S)
    line_S[order] = place_S - first_S
    return line_S.view_as(chosen_TK)


def within_capacity(
    chosen_TK: Tensor, priority_TK: Tensor, capacity: Tensor | int, ranks: Ranks = ALONE
) -> Tensor:
    """True where a slot is filled and its expert keeps it: each expert keeps its `capacity` slots of highest
    priority. bool [T, K].

    The slots of all ranks stand in one line.
    """
    line_TK = place_in_line(ranks.gathered(chosen_TK), ranks.gathered(priority_TK))
    return (chosen_TK >= 0) & (ranks.own(line_TK) < capacity)
