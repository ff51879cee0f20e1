"""How a router's logits become scores and a choice, inferred from what it chose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

AGREES = 0.98  # share of tokens whose choice must be reproduced; the rest may be ties or rounding
GATES_FIT = 0.02  # mean error up to which gates count as made from the scores


@dataclass(frozen=True)
class Scoring:
    """Logits -> scores (softmax or sigmoid) -> choice, optionally with a bias and within the best groups."""

    function: str
    bias_E: Tensor | None = None
    groups: tuple[int, int] = (1, 1)
    group_score: str = ""  # how a group is ranked: "two best" or "best"
    explains: bool = True  # whether it reproduces the choices; if not, there are no selection scores

    def raw(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid() if self.function == "sigmoid" else logits_TE.softmax(-1)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return probabilities over all experts; sigmoids are divided by their sum."""
        raw_TE = self.raw(logits_TE)
        return raw_TE / raw_TE.sum(-1, keepdim=True) if self.function == "sigmoid" else raw_TE

    def selection(self, logits_TE: Tensor) -> Tensor:
        """Return the scores whose k largest are chosen: bias included, -inf in excluded groups."""
        raw_TE = self.raw(logits_TE)
        return self.in_best_groups(raw_TE if self.bias_E is None else raw_TE + self.bias_E)

    def in_best_groups(self, selection_TE: Tensor) -> Tensor:
        n_groups, n_allowed = self.groups
        if not self.group_score or n_groups == n_allowed:
            return selection_TE
        by_group = selection_TE.reshape(len(selection_TE), n_groups, -1)
        best = min(2 if self.group_score == "two best" else 1, by_group.shape[-1])
        rank_TG = by_group.topk(best, dim=-1).values.sum(-1)
        top_TG = rank_TG.topk(n_allowed, dim=-1).indices
        allowed_TG = torch.zeros_like(rank_TG, dtype=torch.bool).scatter(1, top_TG, True)
        return by_group.masked_fill(~allowed_TG[..., None], float("-inf")).flatten(-2)

    def judged(self, logits_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scores and selection scores: the same tensor where equal, None where unexplained."""
        scores_TE = self.scores(logits_TE)
        if not self.explains:
            return scores_TE, None
        same = self.function == "softmax" and self.bias_E is None and not self.group_score
        return scores_TE, scores_TE if same else self.selection(logits_TE)

    def words(self) -> str:
        groups = f"{self.groups[1]} of {self.groups[0]} groups by their {self.group_score}"
        parts = {
            self.function: True,
            "bias for choosing": self.bias_E is not None,
            groups: self.group_score,
            "choice not reproduced": not self.explains,
        }
        return ", ".join(part for part, holds in parts.items() if holds)


def find_scoring(
    logits_TE: Tensor,
    chosen_TK: Tensor,
    gates_TK: Tensor,
    bias_E: Tensor | None,
    groups: tuple[int, int],
    expected: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Scoring:
    """Return the scoring that reproduces these choices; among several, the one closest to the gates.

    `dtype` is that of the router's logits. The rounding to it moves near ties, so a choice counts as
    reproduced if logits and scores within that rounding give it.

    Softmax and sigmoid order experts alike, so without a bias only the gates tell them apart: by their values
    (k = 1) or their ratios (k > 1). Gates made in another way (sparsemixer) tell nothing: softmax is assumed.
    The same where nothing reproduces the choices; then `explains` is False. `expected` is the function known
    from the model type; then only the rest is inferred, so that a pass of a few tokens cannot mislead. Of
    fits equally close to the gates the one that reproduces most choices without rounding counts, then the
    first: bias and groups are used where there are some.
    """
    complete = (chosen_TK >= 0).all(-1)
    logits_TE, chosen_TK, gates_TK = logits_TE[complete], chosen_TK[complete], gates_TK[complete].float()
    known = expected in ("softmax", "sigmoid")
    unit = torch.finfo(dtype).eps / 2
    fits: list[tuple[float, float, Scoring]] = []
    for function, with_bias in product(
        (expected or "",) if known else ("softmax", "sigmoid"),
        (True, False) if bias_E is not None else (False,),
    ):
        group_scores = ("two best", "best", "") if function == "sigmoid" else ("best", "two best", "")
        for group_score in group_scores if groups[0] > groups[1] else ("",):
            scoring = Scoring(function, bias_E if with_bias else None, groups, group_score)
            if reproduced(scoring, logits_TE, chosen_TK, unit) >= AGREES:
                error = gate_error(scoring.raw(logits_TE).gather(1, chosen_TK), gates_TK)
                missed = 1 - reproduced(scoring, logits_TE, chosen_TK, 0.0)
                fits.append((error if error < GATES_FIT and not known else 1.0, missed, scoring))
    if fits:
        return min(fits, key=lambda fit: fit[:2])[2]
    if known:
        return find_scoring(logits_TE, chosen_TK, gates_TK, bias_E, groups, dtype=dtype)
    return Scoring("softmax", explains=False)


def reproduced(scoring: Scoring, logits_TE: Tensor, chosen_TK: Tensor, unit: float) -> float:
    """Return the share of tokens whose chosen experts have the largest selection scores.

    Rounding may move every number by its `unit`-th part. It moves a near tie the way that was chosen if the
    choice follows once chosen experts are moved up and all others down.
    """
    if not len(chosen_TK):
        return 1.0
    error_TE = torch.full_like(logits_TE, -unit).scatter(1, chosen_TK, unit)  # of logits, scores and bias
    moved_TE = logits_TE + (error_TE * logits_TE.abs()).nan_to_num()  # -inf rules an expert out
    selection_TE = scoring.raw(moved_TE) * (1 + error_TE)
    if scoring.bias_E is not None:
        selection_TE = selection_TE + scoring.bias_E + error_TE * scoring.bias_E.abs()
    best_TK = scoring.in_best_groups(selection_TE).topk(chosen_TK.shape[1], dim=-1).indices
    return (best_TK.sort(-1).values == chosen_TK.sort(-1).values).all(-1).float().mean().item()


def gate_error(scores_TK: Tensor, gates_TK: Tensor) -> float:
    """Return the distance of the gates from the chosen scores, or of their ratios: the smaller one."""
    if not len(gates_TK):
        return 0.0
    ratios = [part / part.sum(-1, keepdim=True).clamp(min=1e-30) for part in (scores_TK, gates_TK)]
    pairs = ((scores_TK, gates_TK), ratios)[: gates_TK.shape[1]]  # the ratio of one gate is 1
    return min((ours - theirs).abs().mean().item() for ours, theirs in pairs)
