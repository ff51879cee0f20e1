"""Hard capacity: how many tokens an expert accepts, and which."""

import torch
from torch import Tensor

from moescope.decoder.ranks import ALONE, Ranks


def capacity_of(mask_T: Tensor, factor: float, top_k: int, n_experts: int, ranks: Ranks = ALONE) -> Tensor:
    """Return ceil(factor N k / n), N the real tokens of all ranks; at least 1.

    A tensor, so that the host does not wait for the device.
    """
    # In float64: in float32, 1.25 x 24,576 x 4 / 64 and similar products may round to just above an integer.
    real = ranks.sum(mask_T.sum()).double()
    return torch.ceil(real * (factor * top_k / n_experts) - 1e-9).clamp(min=1).long()


def place_in_line(chosen_TK: Tensor, priority_TK: Tensor) -> Tensor:
    """Return how many slots with higher priority chose the same expert; ties go to the earlier token.

    int64 [T, K]. Empty slots (-1) form a line of their own.
    """
    chosen_S = chosen_TK.flatten()
    by_priority = torch.sort(priority_TK.detach().flatten(), descending=True, stable=True).indices
    order = by_priority[torch.sort(chosen_S[by_priority], stable=True).indices]
    sorted_S = chosen_S[order]
    place_S = torch.arange(len(order), device=order.device)
    line_S = torch.empty_like(place_S)
    line_S[order] = place_S - torch.searchsorted(sorted_S, sorted_S)  # the first place of the same expert
    return line_S.view_as(chosen_TK)


def within_capacity(
    chosen_TK: Tensor, priority_TK: Tensor, capacity: Tensor | int, ranks: Ranks = ALONE
) -> Tensor:
    """Return which slots are filled and among the `capacity` slots of highest priority of their expert.

    bool [T, K]; the slots of all ranks compete with each other.
    """
    line_TK = place_in_line(ranks.gather_rows(chosen_TK), ranks.gather_rows(priority_TK))
    return (chosen_TK >= 0) & (ranks.local_rows(line_TK) < capacity)
