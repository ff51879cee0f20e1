"""Balance without a loss: a bias per expert, used for selection only."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import ModelConfig, Option
from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.decoder.routers.topk import choice_counts, masked_mean
from moescope.types import Diagnostic


class LossFree(Router):
    """The k largest of sigmoid(logit) + b; gates are the sigmoids without b, divided by their sum (k > 1).

    After each step b_i += rate sign(mean count - count_i), counts over the whole batch. Wang et al. 2024;
    DeepSeek-V3. Only the sign counts, so b changes by `rate` however small the imbalance and never settles.

    Parameters
    ----------
    rate
        Change of a bias per step.
    """

    name = "loss_free"
    trains_rows = True
    sigmoid_scores = True
    gates_follow = False
    OPTIONS: ClassVar[dict[str, Option]] = {"rate": 0.001}
    BOUNDS: ClassVar[dict[str, tuple[str, ...]]] = {"0 or more": ("rate",)}
    bias_E: Tensor

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__(config, layer, shared)
        self.register_buffer("bias_E", torch.zeros(config.experts))

    @classmethod
    def renormalises(cls, config: ModelConfig) -> bool:
        return config.top_k > 1

    def forward(self, inputs: RouterInput) -> Routed:
        logits_TE = self.adjust_logits(functional.linear(inputs.x_TD, self.weight))
        sigmoids_TE = logits_TE.sigmoid()
        selection_TE = self.adjust_selection(sigmoids_TE.detach() + self.bias_E)
        chosen_TK = selection_TE.topk(self.config.top_k, dim=-1).indices
        gates_TK = sigmoids_TE.gather(1, chosen_TK)
        if not self.single:
            gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
        chosen_TK = chosen_TK.masked_fill(~inputs.mask_T[:, None], -1)
        gates_TK = gates_TK.masked_fill(chosen_TK < 0, 0.0)
        self.accumulate("counts", choice_counts(chosen_TK, self.config.experts))
        scores_TE = sigmoids_TE / sigmoids_TE.sum(-1, keepdim=True)
        diagnostics = {"bias_spread": self.bias_spread(sigmoids_TE.detach(), inputs.mask_T)}
        return Routed(chosen_TK, gates_TK, logits_TE, scores_TE, selection_TE, diagnostics=diagnostics)

    def bias_spread(self, sigmoids_TE: Tensor, mask_T: Tensor) -> Diagnostic:
        """Return the standard deviation of b over experts; its worst case is that of a token's scores.

        Beyond that b decides the selection, not the text.
        """
        # torch's own std takes several times as long along short rows on a CPU
        spread_T = (sigmoids_TE - sigmoids_TE.mean(-1, keepdim=True)).square().mean(-1).sqrt()
        return Diagnostic(self.bias_E.std(correction=0), 0.0, masked_mean(spread_T, mask_T))

    def after_step(self) -> None:
        counts_E = self.total("counts")
        if counts_E is not None:
            self.bias_E.add_(self.options["rate"] * torch.sign(counts_E.mean() - counts_E))
