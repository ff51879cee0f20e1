"""Softmax over a linear map, the k largest: Switch (k = 1), Mixtral (k = 2) and any k between."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from moescope.decoder.config import ModelConfig, Option
from moescope.decoder.ranks import ALONE, Ranks
from moescope.decoder.routers.capacity import capacity_of, within_capacity
from moescope.decoder.routers.contract import Routed, Router, RouterInput


def choice_counts(chosen_TK: Tensor, n_experts: int) -> Tensor:
    """Return how many slots hold each expert, float32 [E], without a host sync. Empty slots do not count."""
    counts = torch.zeros(n_experts + 1, device=chosen_TK.device)
    flat = torch.where(chosen_TK < 0, n_experts, chosen_TK).flatten()
    return counts.index_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))[:-1]


def masked_mean(values_T: Tensor, mask_T: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Return the mean over real tokens (dim 0), or this rank's part of it; 0 without real tokens."""
    weighted = values_T * mask_T.to(values_T.dtype).view(-1, *[1] * (values_T.dim() - 1))
    return weighted.sum(0) / ranks.tokens_per_rank(mask_T)


def switch_loss(scores_TE: Tensor, chosen_TK: Tensor, mask_T: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """n sum_i f_i P_i: f_i the share of slots that chose expert i, P_i its mean probability.

    1 when either is uniform, n at collapse. Fedus, Zoph, Shazeer 2022, equations 4 to 6, with f over N k
    slots; transformers' load_balancing_loss_func is k times this. Not a lower bound: values below 1 are
    possible where f and P disagree. Gradients flow through P only. f covers the slots of all ranks and the
    loss is linear in P, so its mean over ranks is that of the whole batch (Qiu et al. 2025, global balance).
    """
    n_experts = scores_TE.shape[1]
    counts_E = ranks.sum(choice_counts(chosen_TK, n_experts))
    share_E = counts_E / counts_E.sum().clamp(min=1)
    return n_experts * (share_E * masked_mean(scores_TE, mask_T, ranks)).sum()


def z_loss(logits_TE: Tensor, mask_T: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Mean over real tokens of logsumexp(logits)^2; keeps logits small. Zoph et al. 2022 (ST-MoE), eq. 5."""
    return masked_mean(torch.logsumexp(logits_TE, -1).square(), mask_T, ranks)


class TopK(Router):
    """The k most probable experts; gates are their probabilities divided by their sum (k > 1).

    At k = 1 the gate is the probability itself: divided by itself it would be the constant 1, and the
    language-model loss would have no gradient into the router.

    Parameters
    ----------
    balance
        Weight of the Switch loss, which is 1 when balanced and n at collapse.
    z
        Weight of the z-loss.
    capacity_factor
        In training each expert accepts its ceil(factor N k / n) most probable tokens; the rest is dropped and
        counted. That looks at the whole batch, so it is not causal in training. 0: no capacity.
    renormalise
        Divide gates by their sum; at `top_k` 1 they are the probabilities anyway.
    reads
        What logits are made from: `hidden`, the hidden state, or `embedding`, that of the token: a control
        that sees what `hash` sees, saved in the lab's own layout.
    """

    name = "topk"
    trains_rows = True
    plain_top_k = True
    OPTIONS: ClassVar[dict[str, Option]] = {
        "balance": 0.01,
        "z": 1e-3,
        "capacity_factor": 0.0,
        "renormalise": True,
        "reads": "hidden",
    }
    BOUNDS: ClassVar[dict[str, tuple[str, ...]]] = {"0 or more": ("balance", "z", "capacity_factor")}
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"reads": ("hidden", "embedding")}

    @classmethod
    def reads_context(cls, config: ModelConfig) -> bool:
        return bool(cls.checked_options(config)["reads"] == "embedding")

    @classmethod
    def is_plain(cls, config: ModelConfig) -> bool:
        return not cls.reads_context(config)

    @classmethod
    def facts(cls, config: ModelConfig) -> dict[str, Any]:
        return {**super().facts(config), "plain_top_k": cls.is_plain(config)}

    @classmethod
    def renormalises(cls, config: ModelConfig) -> bool:
        return config.top_k > 1 and bool(cls.checked_options(config)["renormalise"])

    def forward(self, inputs: RouterInput) -> Routed:
        config, options, ranks = self.config, self.options, self.sharing
        x_TD = inputs.x_TD if options["reads"] == "hidden" else self.context_of(inputs).embedded_TD
        logits_TE = self.adjust_logits(functional.linear(x_TD, self.weight))
        scores_TE = logits_TE.softmax(-1)
        gates_TK, chosen_TK = scores_TE.topk(config.top_k, dim=-1)
        if not self.single and options["renormalise"]:
            gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
        chosen_TK = chosen_TK.masked_fill(~inputs.mask_T[:, None], -1)
        losses = {}
        if self.training and (weight := options["balance"]):
            losses["balance"] = weight * switch_loss(scores_TE, chosen_TK, inputs.mask_T, ranks)
        if self.training and (weight := options["z"]):
            losses["z"] = weight * z_loss(logits_TE, inputs.mask_T, ranks)
        dropped_T = None
        if self.training and options["capacity_factor"]:
            capacity = capacity_of(
                inputs.mask_T, options["capacity_factor"], config.top_k, config.experts, ranks
            )
            priority_TK = scores_TE.gather(1, chosen_TK.clamp(min=0))
            accepted_TK = within_capacity(chosen_TK, priority_TK, capacity, ranks)
            dropped_T = ((chosen_TK >= 0) & ~accepted_TK).sum(-1)
            chosen_TK = chosen_TK.masked_fill(~accepted_TK, -1)
        gates_TK = gates_TK.masked_fill(chosen_TK < 0, 0.0)
        return Routed(chosen_TK, gates_TK, logits_TE, scores_TE, scores_TE, losses, dropped_T)


class SwitchTop1(TopK):
    """One expert per token, its gate the probability. Fedus, Zoph, Shazeer 2022."""

    name = "switch_top1"
    fixed_top_k = 1
    OPTIONS: ClassVar[dict[str, Option]] = {
        option: value for option, value in TopK.OPTIONS.items() if option != "renormalise"
    }


class Top2(TopK):
    """Two experts per token, gates renormalised: Mixtral's router with the Switch loss."""

    name = "top2"
    fixed_top_k = 2
