"""How a router's logits become scores and a choice, found out from what it chose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

AGREES = 0.98  # share of tokens whose choice must be reproduced; the rest may be ties or rounding
GATES_FIT = 0.02  # mean error of gates up to which they count as made from the scores


@dataclass(frozen=True)
class Scoring:
    """How logits become scores (softmax or sigmoid), and scores a choice.

    Plus a bias, within the best groups, or neither.
    """

    function: str
    bias_E: Tensor | None = None
    groups: tuple[int, int] = (1, 1)
    group_score: str = ""  # what a group is judged by: "two best" or "best"
    explains: bool = True  # whether it reproduces what was chosen; if not, no selection scores are given

    def raw(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid() if self.function == "sigmoid" else logits_TE.softmax(-1)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Probabilities over all experts; sigmoids are divided by their sum."""
        raw_TE = self.raw(logits_TE)
        return raw_TE / raw_TE.sum(-1, keepdim=True) if self.function == "sigmoid" else raw_TE

    def selection(self, logits_TE: Tensor) -> Tensor:
        """What the k largest of are chosen: scores and bias, -inf in groups that were ruled out."""
        selection_TE = self.raw(logits_TE)
        if self.bias_E is not None:
            selection_TE = selection_TE + self.bias_E
        n_groups, kept = self.groups
        if not self.group_score or n_groups == kept:
            return selection_TE
        by_group = selection_TE.reshape(len(selection_TE), n_groups, -1)
        best = min(2 if self.group_score == "two best" else 1, by_group.shape[-1])
        judged = by_group.topk(best, dim=-1).values.sum(-1)
        allowed = torch.zeros_like(judged, dtype=torch.bool).scatter(
            1, judged.topk(kept, dim=-1).indices, True
        )
        return by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)

    def judged(self, logits_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores and selection scores, the latter None where the choice is not explained.

        One tensor where they are one thing.
        """
        scores_TE = self.scores(logits_TE)
        if not self.explains:
            return scores_TE, None
        same = self.function == "softmax" and self.bias_E is None and not self.group_score
        return scores_TE, scores_TE if same else self.selection(logits_TE)

    def words(self) -> str:
        parts = [self.function]
        parts += ["bias for choosing"] if self.bias_E is not None else []
        parts += (
            [f"{self.groups[1]} of {self.groups[0]} groups by their {self.group_score}"]
            if self.group_score
            else []
        )
        return ", ".join(parts if self.explains else [*parts, "choice not reproduced"])


def find_scoring(
    logits_TE: Tensor,
    chosen_TK: Tensor,
    gates_TK: Tensor,
    bias_E: Tensor | None,
    groups: tuple[int, int],
    expected: str | None = None,
) -> Scoring:
    """The way of scoring that reproduces these choices, and among those that do, the one nearest the gates.

    Softmax and sigmoid order experts alike, so without a bias the gates alone tell them apart: as they are (k
    = 1) or in their
    ratios (k > 1). Gates made in yet another way (sparsemixer) tell nothing, and softmax is taken; so it is
    where nothing
    reproduces the choices, and then `explains` is False. `expected` is what is known of the model: then only
    the rest is found out,
    so that a pass of a few tokens cannot mislead. Of ways that fit alike the first counts: bias and groups
    are used where there are some.
    """
    whole = (chosen_TK >= 0).all(-1)
    logits_TE, chosen_TK, gates_TK = logits_TE[whole], chosen_TK[whole], gates_TK[whole].float()
    known = expected in ("softmax", "sigmoid")
    found: list[tuple[float, Scoring]] = []
    for function, with_bias in product(
        (expected or "",) if known else ("softmax", "sigmoid"),
        (True, False) if bias_E is not None else (False,),
    ):
        judged_by = ("two best", "best", "") if function == "sigmoid" else ("best", "two best", "")
        for group_score in judged_by if groups[0] > groups[1] else ("",):
            scoring = Scoring(function, bias_E if with_bias else None, groups, group_score)
            if reproduced(scoring.selection(logits_TE), chosen_TK) >= AGREES:
                error = (
                    gate_error(scoring.raw(logits_TE).gather(1, chosen_TK), gates_TK)
                    if len(gates_TK)
                    else 0.0
                )
                found.append((error if error < GATES_FIT and not known else 1.0, scoring))
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    return (
        find_scoring(logits_TE, chosen_TK, gates_TK, bias_E, groups)
        if known
        else Scoring("softmax", explains=False)
    )


def reproduced(selection_TE: Tensor, chosen_TK: Tensor) -> float:
    """The share of tokens for which the largest selection scores are those of the chosen experts."""
    if not len(chosen_TK):
        return 1.0
    best_TK = selection_TE.topk(chosen_TK.shape[1], dim=-1).indices
    return (best_TK.sort(-1).values == chosen_TK.sort(-1).values).all(-1).float().mean().item()


def gate_error(scores_TK: Tensor, gates_TK: Tensor) -> float:
    """How far the gates are from the scores of the chosen, or from their ratios: the smaller of the two."""
    ratios = [part / part.sum(-1, keepdim=True).clamp(min=1e-30) for part in (scores_TK, gates_TK)]
    apart = [(scores_TK - gates_TK).abs().mean().item()]
    if gates_TK.shape[1] > 1:
        apart.append((ratios[0] - ratios[1]).abs().mean().item())
    return min(apart)
