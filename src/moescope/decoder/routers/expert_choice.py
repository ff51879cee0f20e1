"""Experts choose tokens: balanced by construction, and not causal in training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.routers.capacity import capacity_of
from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.errors import BadInput
from moescope.types import Diagnostic, LinearView

if TYPE_CHECKING:
    from moescope.decoder.config import ModelConfig, Option


class ExpertChoice(Router):
    """Each expert takes its c tokens of largest probability, c = ceil(factor N k / n); gates are the
    probabilities. Zhou et al. 2022.

    Which tokens are in the batch decides who is taken, later tokens included. In evaluation expert i takes
    token t iff
    p[t, i] >= theta_i instead, theta_i the moving average over training batches of the midpoint of the c-th
    and (c+1)-th largest
    probability: about the same share of tokens on text like the training's, token by token, as long as the
    average keeps up with the
    router: with a slow one (`decay` near 1) experts get half or twice their share while the learning rate is
    high. Before any training
    theta is 1/n. A token that nobody takes passes through; `diagnostics` has the share of such tokens, and
    how unevenly experts fall to tokens.
    """

    name = "expert_choice"
    causal_in_training = False
    OPTIONS: ClassVar[dict[str, Option]] = {"capacity_factor": 1.25, "decay": 0.9}
    midpoints_E: Tensor
    steps: Tensor

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__(config, layer, shared)
        self.weight = nn.Parameter(torch.empty(config.experts, config.d_model).normal_(std=0.02))
        self.register_buffer(
            "midpoints_E", torch.zeros(config.experts)
        )  # the moving average, not yet bias-corrected
        self.register_buffer("steps", torch.zeros(()))

    @classmethod
    def check_options(cls, options: dict[str, Any], config: ModelConfig) -> None:
        if options["capacity_factor"] <= 0:
            raise BadInput(
                f"router {cls.name}: capacity_factor must be more than 0, not {options['capacity_factor']}"
            )
        if not 0 <= options["decay"] < 1:
            raise BadInput(f"router {cls.name}: decay must be at least 0 and below 1, not {options['decay']}")

    @classmethod
    def renormalises(cls, config: ModelConfig) -> bool:
        return False

    @property
    def threshold_E(self) -> Tensor:
        """theta; divided by 1 - decay^t, since the average starts at 0."""
        corrected_E = self.midpoints_E / (1 - self.options["decay"] ** self.steps).clamp(min=1e-12)
        return torch.where(self.steps > 0, corrected_E, 1 / self.config.experts)

    def forward(self, given: RouterInput) -> Routed:
        logits_TE = functional.linear(given.x_TD, self.weight)
        scores_TE = logits_TE.softmax(-1)
        if self.training:
            ranks = self.sharing
            everybody_TE, most = self.best_tokens(
                ranks.gathered(scores_TE.detach()), ranks.gathered(given.mask_T)
            )
            taken_TE, at_most = ranks.own(everybody_TE), min(most, len(scores_TE)) * self.config.experts
            selection_TE = scores_TE
        else:
            selection_TE = scores_TE - self.threshold_E
            taken_TE = (selection_TE >= 0) & given.mask_T[:, None]
            at_most = max(int(taken_TE.sum()), 1)  # waits for the device, which evaluation can afford
        chosen_TE = torch.where(taken_TE, torch.arange(self.config.experts, device=taken_TE.device), -1)
        gates_TE = torch.where(taken_TE, scores_TE, 0)
        diagnostics = self.experts_by_token(taken_TE, given.mask_T)
        return Routed(
            chosen_TE,
            gates_TE,
            logits_TE,
            scores_TE,
            selection_TE,
            diagnostics=diagnostics,
            filled_at_most=at_most,
        )

    def experts_by_token(self, taken_TE: Tensor, mask_T: Tensor) -> dict[str, Diagnostic]:
        """How many experts a token has: the share of tokens with none, mean and spread over tokens.

        Beside them experts that take a share p = factor k / n each, independently of each other (binomial),
        and at the worst all of
        them the same tokens.
        """
        n = self.config.experts
        p = min(self.options["capacity_factor"] * self.config.top_k / n, 1.0)
        tokens = mask_T.sum().clamp(min=1)
        count_T = taken_TE.sum(-1).float()  # 0 for pads
        mean = count_T.sum() / tokens
        variance = (count_T.square().sum() / tokens - mean.square()).clamp(min=0)
        without = ((count_T == 0) & mask_T).sum() / tokens
        return {
            "tokens_without_expert": Diagnostic(without, (1 - p) ** n, 1 - p),
            "experts_a_token": Diagnostic(mean, n * p),
            "experts_a_token_spread": Diagnostic(
                variance.sqrt(), math.sqrt(n * p * (1 - p)), n * math.sqrt(p * (1 - p))
            ),
        }

    def best_tokens(self, scores_TE: Tensor, mask_T: Tensor) -> tuple[Tensor, int]:
        """Which tokens of the whole batch each expert takes, bool [T, E], and how many it can at most.

        Remembers the midpoints.
        """
        tokens, n_experts = scores_TE.shape
        factor, top_k = self.options["capacity_factor"], self.config.top_k
        most = max(min(math.ceil(tokens * (factor * top_k / n_experts) - 1e-9), tokens), 1)
        # With padding the capacity is smaller, by how much only the device knows: the places past it are
        # struck out.
        capacity = capacity_of(mask_T, factor, top_k, n_experts).minimum(mask_T.sum())
        ranked_TE = scores_TE.masked_fill(~mask_T[:, None], -1)
        best_CE, tokens_CE = ranked_TE.topk(min(most + 1, tokens), dim=0)
        places_C1 = torch.arange(len(best_CE), device=best_CE.device)[:, None]
        taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(
            0, tokens_CE, (places_C1 < capacity).expand_as(tokens_CE)
        )
        # Where an expert takes everybody nobody comes next; 0 stands in, so that the threshold lies below
        # them all.
        best_CE = functional.pad(best_CE, (0, 0, 0, 1)).clamp(min=0)
        last_and_next_2E = best_CE[torch.stack(((capacity - 1).clamp(min=0), capacity))]
        self.accumulate("midpoints", torch.cat((last_and_next_2E.mean(0), torch.ones_like(best_CE[0, :1]))))
        return taken_TE, most  # never padding: there are real tokens for every place, and they rank first

    def linear_view(self) -> LinearView:
        """Rows times x.

        Thresholds are stored as the average they are made from; one that never moved has none to set.
        """

        def stored(rows_KD: Tensor, threshold_K: Tensor | None) -> dict[str, Tensor]:
            assert threshold_K is not None
            return {
                "weight": rows_KD,
                "midpoints_E": threshold_K * (1 - self.options["decay"] ** self.steps.cpu()),
            }

        return LinearView(self.weight.detach(), lambda x_TD: x_TD, "weight", stored, thresholds=True)

    def after_step(self) -> None:
        total = self.total("midpoints")
        if total is None:
            return
        decay = self.options["decay"]
        self.midpoints_E.mul_(decay).add_((1 - decay) * total[:-1] / total[-1])
        self.steps.add_(1)
