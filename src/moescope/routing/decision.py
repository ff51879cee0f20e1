"""How sure the router is of each token.

Functions give one value a token; a layer's metric is their mean over real tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moescope.routing.metric import Metric
from moescope.types import Routing


def routing_entropy(routing: Routing) -> Tensor:
    """Entropy of the router's probabilities over all n experts, in nats."""
    assert routing.scores_TE is not None
    return torch.special.entr(routing.scores_TE).sum(-1)


def chosen_entropy(routing: Routing) -> Tensor:
    """Entropy of the probabilities of the chosen experts alone, divided by their sum."""
    assert routing.scores_TE is not None
    chosen = routing.chosen_TK >= 0
    scores_TK = routing.scores_TE.gather(1, routing.chosen_TK.clamp(min=0)) * chosen
    total_T = scores_TK.sum(-1, keepdim=True)
    return torch.special.entr(scores_TK / total_T.clamp(min=1e-30)).sum(-1)


def confidence(routing: Routing) -> Tensor:
    """The largest probability."""
    assert routing.scores_TE is not None
    return routing.scores_TE.amax(-1)


def top_gap(routing: Routing) -> Tensor:
    """The largest probability less the second largest."""
    assert routing.scores_TE is not None
    if routing.n_experts < 2:
        return torch.full_like(routing.scores_TE[:, 0], float("nan"))
    best = routing.scores_TE.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def selection_margin(routing: Routing) -> Tensor:
    """The k-th largest selection score less the next, bias included.

    How near the choice was to being another.
    """
    k = routing.chosen_TK.shape[1]
    if routing.selection_TE is None or k >= routing.n_experts:
        return torch.full(routing.chosen_TK.shape[:1], float("nan"), device=routing.chosen_TK.device)
    best = routing.selection_TE.topk(k + 1, dim=-1).values
    return best[:, k - 1] - best[:, k]


def z_loss(routing: Routing) -> Tensor:
    """Squared log-sum-exp of the logits."""
    assert routing.logits_TE is not None
    return routing.logits_TE.logsumexp(-1).square()


DECISION = [
    Metric(routing_entropy, lambda s: float(np.log(s.n_experts)), lambda s: 0.0),
    Metric(chosen_entropy, lambda s: float(np.log(s.k)), lambda s: 0.0),
    Metric(confidence, lambda s: 1 / s.n_experts, lambda s: 1.0),
    Metric(top_gap, lambda s: 0.0, lambda s: 1.0),
    Metric(selection_margin, lambda s: 0.0),
    Metric(z_loss, lambda s: float(np.log(s.n_experts) ** 2)),
]


def first_choice(routing: Routing) -> Tensor:
    """The chosen expert with the largest gate, -1 where there is none. Slots are not always sorted."""
    empty = routing.chosen_TK < 0
    gates_TK = routing.gates_TK.float().masked_fill(empty, float("-inf"))
    return routing.chosen_TK.gather(1, gates_TK.argmax(-1, keepdim=True)).squeeze(1)
