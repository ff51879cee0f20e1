"""What a changed router would do.

How logits become choices and gates is found from what the model did, then applied to others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moescope.compression.states import LayerStates
from moescope.execution.scoring import Scoring

GATES_FIT = 0.02  # relative error up to which gates count as reproduced: half precision stays below


@dataclass(frozen=True)
class Gating:
    """How a router's logits become experts and gates.

    Gate = scale x score, divided by the sum of the chosen scores or not.
    """

    scoring: Scoring
    top_k: int
    normalised: bool
    scale: float
    explains: bool  # whether it reproduces both choices and gates; if not, nothing can be predicted

    def route(self, logits_TE: Tensor, top_k: int | None = None) -> tuple[Tensor, Tensor]:
        """Chosen experts and gates for other logits, over as many experts as they have."""
        chosen_TK = self.scoring.selection(logits_TE).topk(top_k or self.top_k, dim=-1).indices
        return chosen_TK, self.scale * shared_out(
            self.scoring.raw(logits_TE).gather(1, chosen_TK), self.normalised
        )

    def with_bias(self, bias_K: Tensor | None) -> Gating:
        """The same with another bias for choosing, one value an expert.

        Routers without one have none to change.
        """
        return (
            self
            if self.scoring.bias_E is None
            else replace(self, scoring=replace(self.scoring, bias_E=bias_K))
        )

    def words(self) -> str:
        how = "renormalised" if self.normalised else "as they are"
        return f"{self.scoring.words()}; gates {how}" + (
            f", times {self.scale:.4g}" if abs(self.scale - 1) > 1e-3 else ""
        )


def shared_out(scores_TK: Tensor, normalised: bool) -> Tensor:
    return scores_TK / scores_TK.sum(-1, keepdim=True).clamp(min=1e-20) if normalised else scores_TK


def find_gating(states: LayerStates, scoring: Scoring) -> Gating:
    """The gating that reproduces a sample's gates best. Of one that goes to a single expert with gate 1,
    renormalised is said.

    Experts that take tokens by a threshold, as many or as few as pass it, are no choice of the k best:
    nothing explains them here.
    """
    assert states.logits_TE is not None
    by_threshold = states.chosen_TK.shape[1] == states.logits_TE.shape[1] and bool(
        (states.chosen_TK < 0).any()
    )
    whole_T = (states.chosen_TK >= 0).all(-1)
    logits_TE, chosen_TK = states.logits_TE[whole_T].float(), states.chosen_TK[whole_T].long()
    gates_TK = states.gates_TK[whole_T].float()
    scoring = replace(
        scoring, bias_E=None if scoring.bias_E is None else scoring.bias_E.detach().float().cpu()
    )
    found = []
    for normalised in (True, False):
        raw_TK = shared_out(scoring.raw(logits_TE).gather(1, chosen_TK), normalised)
        scale = float((raw_TK * gates_TK).sum() / raw_TK.square().sum().clamp(min=1e-20))
        error = float((scale * raw_TK - gates_TK).norm() / gates_TK.norm().clamp(min=1e-20))
        found.append((error, normalised, scale))
    error, normalised, scale = min(found)
    explains = scoring.explains and len(logits_TE) > 0 and error <= GATES_FIT and not by_threshold
    return Gating(scoring, chosen_TK.shape[1], normalised, scale, explains)


def grouped_probabilities(scoring: Scoring, logits_TE: Tensor, groups: tuple[tuple[int, ...], ...]) -> Tensor:
    """p of a group: the sum of its members' p, over what the groups hold together."""
    p_TE = scoring.scores(logits_TE.double())
    p_TK = torch.stack([p_TE[:, list(group)].sum(-1) for group in groups], -1)
    return p_TK / p_TK.sum(-1, keepdim=True).clamp(min=1e-30)
