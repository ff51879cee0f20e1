"""Tokens spread over experts: Sinkhorn's iteration in the log domain."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Balanced(NamedTuple):
    """What Sinkhorn's iteration left.

    The plan, the column potentials (mean zero), and how far columns still are from even.
    """

    log_plan_TE: Tensor
    potential_E: Tensor
    column_error: Tensor  # scalar


def balance(logits_TE: Tensor, mask_T: Tensor, start_E: Tensor, iterations: int) -> Balanced:
    """The plan P = exp(L + f + g) whose rows sum to 1 and whose columns come near N/n, over the N real
    tokens.

    f_t = -log sum_i exp(L_ti + g_i);  g_i = log(N/n) - log sum_t exp(L_ti + f_t);  `iterations` times, then
    rows once more
    (Cuturi, Sinkhorn Distances, 2013). Rows are exact, columns are not: `column_error` = max_i |sum_t P_ti -
    N/n| / (N/n).
    Rows of pads hold what they would get; they weigh nothing in the columns.
    """
    real_T1 = mask_T[:, None]
    even = mask_T.sum().clamp(min=1) / logits_TE.shape[1]
    potential_E = start_E
    for _ in range(iterations):
        rows_TE = (logits_TE + potential_E).log_softmax(-1) - potential_E
        columns_E = rows_TE.masked_fill(~real_T1, -math.inf).logsumexp(0)
        # no real token: nothing to balance, the start stays
        potential_E = torch.where(columns_E.isfinite(), even.log() - columns_E, start_E)
    potential_E = potential_E - potential_E.mean()  # a constant for all experts is undone by the rows
    log_plan_TE = (logits_TE + potential_E).log_softmax(-1)
    return Balanced(log_plan_TE, potential_E, column_error(log_plan_TE.exp(), mask_T))


def column_error(plan_TE: Tensor, mask_T: Tensor) -> Tensor:
    """How far the columns of a plan are from even: max_i |sum_t P_ti - N/n| / (N/n).

    N - 1 where one expert has all.
    """
    even = mask_T.sum().clamp(min=1) / plan_TE.shape[1]
    taken_E = plan_TE.masked_fill(~mask_T[:, None], 0).sum(0)
    return (taken_E - even).abs().max() / even
