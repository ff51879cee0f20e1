"""How decided the router is about each token.

Functions return one value per token; a layer's metric is their mean over real tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moescope.types import Routing

if TYPE_CHECKING:
    from torch import Tensor

NAN = float("nan")


def entropy(p: Tensor) -> Tensor:
    import torch  # the metric records, which name these functions, are used where torch is not imported

    return torch.special.entr(p).sum(-1)


def routing_entropy(routing: Routing) -> Tensor:
    """Entropy of the router's probabilities over all n experts, in nats."""
    assert routing.scores_TE is not None
    return entropy(routing.scores_TE)


def chosen_entropy(routing: Routing) -> Tensor:
    """Entropy of the probabilities of the chosen experts, divided by their sum."""
    assert routing.scores_TE is not None
    scores_TK = routing.scores_TE.gather(1, routing.chosen_TK.clamp(min=0)) * (routing.chosen_TK >= 0)
    return entropy(scores_TK / scores_TK.sum(-1, keepdim=True).clamp(min=1e-30))


def confidence(routing: Routing) -> Tensor:
    """The largest probability."""
    assert routing.scores_TE is not None
    return routing.scores_TE.amax(-1)


def top_gap(routing: Routing) -> Tensor:
    """The largest probability minus the second largest."""
    assert routing.scores_TE is not None
    if routing.n_experts < 2:
        return routing.scores_TE.new_full((len(routing.scores_TE),), NAN)
    best = routing.scores_TE.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def selection_margin(routing: Routing) -> Tensor:
    """The k-th largest selection score minus the next, bias included: distance to another choice."""
    k = routing.chosen_TK.shape[1]
    if routing.selection_TE is None or k >= routing.n_experts:
        return routing.gates_TK.new_full((len(routing.chosen_TK),), NAN).float()
    best = routing.selection_TE.topk(k + 1, dim=-1).values
    return best[:, k - 1] - best[:, k]


def z_loss(routing: Routing) -> Tensor:
    """Squared log-sum-exp of the logits."""
    assert routing.logits_TE is not None
    return routing.logits_TE.logsumexp(-1).square()


def first_choice(routing: Routing) -> Tensor:
    """The chosen expert with the largest gate, -1 where there is none. Slots are not always sorted."""
    gates_TK = routing.gates_TK.float().masked_fill(routing.chosen_TK < 0, float("-inf"))
    return routing.chosen_TK.gather(1, gates_TK.argmax(-1, keepdim=True)).squeeze(1)
