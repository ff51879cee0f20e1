"""Experts choose tokens: balanced by construction, and not causal in training."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import ModelConfig, Option
from moescope.decoder.routers.capacity import capacity_of
from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.types import Diagnostic, LinearView


class ExpertChoice(Router):
    """Each expert takes its c = ceil(factor N k / n) tokens of largest probability; gates are probabilities.

    Zhou et al. 2022. The whole batch, later tokens included, decides who is taken. In evaluation expert i
    instead takes token t iff p[t, i] >= theta_i, theta_i the moving average over training batches of the
    midpoint of the c-th and (c+1)-th largest probability: about the same share of tokens on similar text.
    Before training theta is 1/n. A token that no expert takes passes through; `diagnostics` report the share
    of such tokens and how unevenly experts spread over tokens.

    Parameters
    ----------
    capacity_factor
        Each expert takes ceil(factor N k / n) tokens.
    decay
        Of the moving average that is the threshold in evaluation; near 1 it lags behind the router, and
        experts get half or twice their share while the learning rate is high.
    """

    name = "expert_choice"
    trains_rows = True
    gates_follow = False
    experts_choose = True
    causal_in_training = False
    compression_effects: ClassVar[dict[str, str]] = {
        "slice": "Thresholds stay while probabilities grow: the remaining experts take more tokens.",
        "fold": "Thresholds are set so that a merged expert takes as many tokens as any of its members took.",
    }
    state_tensors: ClassVar[dict[str, str]] = {"midpoints_E": "experts", "steps": "shared"}
    OPTIONS: ClassVar[dict[str, Option]] = {"capacity_factor": 1.25, "decay": 0.9}
    BOUNDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "more than 0": ("capacity_factor",),
        "at least 0 and below 1": ("decay",),
    }
    midpoints_E: Tensor
    steps: Tensor

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__(config, layer, shared)
        self.register_buffer("midpoints_E", torch.zeros(config.experts))  # moving average, not bias-corrected
        self.register_buffer("steps", torch.zeros(()))

    @classmethod
    def renormalises(cls, config: ModelConfig) -> bool:
        return False

    @classmethod
    def slots_per_token(cls, config: ModelConfig) -> float:
        return min(float(cls.checked_options(config)["capacity_factor"]) * config.top_k, config.experts)

    @property
    def threshold_E(self) -> Tensor:
        """theta, divided by 1 - decay^t since the average starts at 0."""
        corrected_E = self.midpoints_E / (1 - self.options["decay"] ** self.steps).clamp(min=1e-12)
        return torch.where(self.steps > 0, corrected_E, 1 / self.config.experts)

    def forward(self, inputs: RouterInput) -> Routed:
        logits_TE = self.adjust_logits(functional.linear(inputs.x_TD, self.weight))
        scores_TE = logits_TE.softmax(-1)
        if self.training:
            rows, ranks = len(scores_TE), self.sharing
            all_TE, all_T = ranks.gather_rows(scores_TE.detach()), ranks.gather_rows(inputs.mask_T)
            taken_TE, most = self.best_tokens(all_TE, all_T)
            taken_TE, at_most = ranks.local_rows(taken_TE), min(most, rows) * self.config.experts
            selection_TE = scores_TE
        else:
            selection_TE = self.adjust_selection(scores_TE - self.threshold_E)
            taken_TE = (selection_TE >= 0) & inputs.mask_T[:, None]
            at_most = max(int(taken_TE.sum()), 1)  # a host sync, which evaluation can afford
        chosen_TE = torch.where(taken_TE, torch.arange(self.config.experts, device=taken_TE.device), -1)
        gates_TE = torch.where(taken_TE, scores_TE, 0)
        return Routed(
            *(chosen_TE, gates_TE, logits_TE, scores_TE, selection_TE),
            diagnostics=self.experts_by_token(taken_TE, inputs.mask_T),
            filled_at_most=at_most,
        )

    def experts_by_token(self, taken_TE: Tensor, mask_T: Tensor) -> dict[str, Diagnostic]:
        """Return the share of tokens without an expert, and mean and spread of experts per token.

        Reference: experts that each take a share p = factor k / n independently (binomial). Worst case: all
        take the same tokens.
        """
        n = self.config.experts
        p = min(self.options["capacity_factor"] * self.config.top_k / n, 1.0)
        tokens = mask_T.sum().clamp(min=1)
        count_T = taken_TE.sum(-1).float()  # 0 for pads
        mean = count_T.sum() / tokens
        variance = (count_T.square().sum() / tokens - mean.square()).clamp(min=0)
        without, spread = ((count_T == 0) & mask_T).sum() / tokens, math.sqrt(p * (1 - p))
        return {
            "tokens_without_expert": Diagnostic(without, (1 - p) ** n, 1 - p),
            "experts_per_token": Diagnostic(mean, n * p),
            "experts_per_token_spread": Diagnostic(variance.sqrt(), math.sqrt(n * p * (1 - p)), n * spread),
        }

    def best_tokens(self, scores_TE: Tensor, mask_T: Tensor) -> tuple[Tensor, int]:
        """Return the tokens of the whole batch that each expert takes, bool [T, E], and the most it can take.

        Accumulates the midpoints.
        """
        tokens, n_experts = scores_TE.shape
        factor, top_k = self.options["capacity_factor"], self.config.top_k
        most = max(min(math.ceil(tokens * (factor * top_k / n_experts) - 1e-9), tokens), 1)
        # Padding lowers the capacity by an amount only the device knows: places beyond it are masked.
        capacity = capacity_of(mask_T, factor, top_k, n_experts).minimum(mask_T.sum())
        best_CE, tokens_CE = scores_TE.masked_fill(~mask_T[:, None], -1).topk(min(most + 1, tokens), dim=0)
        places_C1 = torch.arange(len(best_CE), device=best_CE.device)[:, None]
        taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(
            0, tokens_CE, (places_C1 < capacity).expand_as(tokens_CE)
        )
        # Where an expert takes every token there is no next one: 0 puts the threshold below all of them.
        best_CE = functional.pad(best_CE, (0, 0, 0, 1)).clamp(min=0)
        last_and_next_2E = best_CE[torch.stack(((capacity - 1).clamp(min=0), capacity))]
        self.accumulate("midpoints", torch.cat((last_and_next_2E.mean(0), torch.ones_like(best_CE[0, :1]))))
        return taken_TE, most  # never padding: real tokens rank first, and there is one for every place

    def linear_view(self) -> LinearView:
        """Rows times x. Thresholds are stored as the moving average that they are computed from."""

        def stored(rows_KD: Tensor, threshold_K: Tensor | None) -> dict[str, Tensor]:
            assert threshold_K is not None
            return {
                "weight": rows_KD,
                "midpoints_E": threshold_K * (1 - self.options["decay"] ** self.steps.cpu()),
            }

        return LinearView(self.weight.detach(), lambda x_TD: x_TD, "weight", stored, thresholds=True)

    def after_step(self) -> None:
        total, decay = self.total("midpoints"), self.options["decay"]
        if total is not None:
            self.midpoints_E.mul_(decay).add_((1 - decay) * total[:-1] / total[-1])
            self.steps.add_(1)
