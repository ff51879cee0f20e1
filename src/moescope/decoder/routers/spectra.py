"""SPECTRA: a depth-wise GRU and an expression projector, compared by cosine; Sinkhorn and quota for balance.

Published text and code of SPECTRA disagree; this version gives every part an effect. Sinkhorn and the quota
look at the whole batch, so selection is not causal in training; in evaluation it is per token.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import ModelConfig, Option
from moescope.decoder.routers.capacity import capacity_of, within_capacity
from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.decoder.routers.topk import choice_counts
from moescope.errors import BadInput, unknown_name
from moescope.types import Diagnostic

REPULSIONS = ("between", "published", "none")
PENALTY_SIGNS = ("cost", "published")
EVALUATIONS = ("potentials", "published")
LEAST_ROUTER_DIM = 64
EMPTY = -1e30  # not -inf: a token without any choice would get NaN
NOT_NEGATIVE = (
    *("repulsion_weight", "saturation_weight", "saturation_start"),
    *("orthogonality_weight", "entropy_weight", "speciality_weight"),
)

# Names in the ablation table -> the options each sets.
ABLATIONS: dict[str, dict[str, Option]] = {
    "-GRU": {"gru": False},
    "-Expression": {"expression": False},
    "-Repulsion": {"repulsion": "none"},
    "-Quota": {"quota": False},
    "-Ortho": {"orthogonality_weight": 0.0},
    "-SpecialityPenalty": {"speciality_weight": 0.0},
    "-All": {"plain": True},
}


class Spectra(Router):
    """SPECTRA's router of one layer.

    A state of width R per token, 0 before the first MoE layer, goes through one GRU cell that all layers
    share. A linear map expands it to h[t,i] for every expert; another maps x to v[t,i]. With s = cos(h, v), G
    the Gram matrix of the experts' directions and p = softmax(s/eps), the cost is

        C[t,i] = -s[t,i] + lambda sum_{j != i} G_ij^2 p[t,j] + beta relu(|s[t,i]| - tau)^2

    and logits are -C/eps. Training selects the k largest entries of Sinkhorn's plan, and a quota accepts the
    best of each expert; evaluation selects the k largest of logits + the moving average of the column
    potentials. Gates: softmax of the logits over the surviving choices (k = 1: over all experts), without
    potentials.

    Options besides weights: `gru`, `expression`, `quota` (ablations); `repulsion` ("published": lambda |s|
    sum_j G_ij^2/(n-1), one factor per expert, which changes almost no choice); `penalty_sign` ("published":
    penalties enter the logit as if it were the cost, so repulsion attracts); `evaluation` ("published":
    Sinkhorn over the evaluated batch, uniform for one token alone); `plain` (a linear softmax top-k router
    without any balancing).
    """

    name: ClassVar[str] = "spectra"
    has_rows: ClassVar[bool] = False
    gates_follow: ClassVar[bool] = False
    causal_in_training: ClassVar[bool] = False
    expects_low_entropy = True  # cosines divided by a small epsilon, and an entropy loss
    state_tensors: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("direction_ER", "potential_E", "expand.weight", "expand.bias"), "experts"),
        **dict.fromkeys(("express.weight", "express.bias"), "experts"),  # R rows per expert
        **dict.fromkeys(("state.weight", "state.bias"), "shared"),
    }
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "": {},
        **{name: {"router_options": options} for name, options in ABLATIONS.items()},
    }
    OPTIONS: ClassVar[dict[str, Option]] = {
        "router_dim": 64,
        "gru": True,
        "expression": True,
        "repulsion": "between",
        "repulsion_weight": 0.5,
        "penalty_sign": "cost",
        "saturation_weight": 0.5,
        "saturation_start": 0.7,
        "epsilon": 0.05,
        "iterations": 3,
        "evaluation": "potentials",
        "quota": True,
        "capacity_factor": 1.25,
        "direction_decay": 0.9,
        "potential_decay": 0.9,
        "orthogonality_weight": 0.01,
        "entropy_weight": 1e-3,
        "speciality_weight": 0.01,
        "plain": False,
    }
    components: ClassVar[dict[str, str]] = {
        "gru": "trajectories",
        "projection": "expressions",
        "similarity": "similarity",
        "gram": "gram",
        "cost": "logits",
        "sinkhorn": "balanced",
        "top_k": "choose",
        "quota": "admit",
        "gates": "gates",
        "losses": "losses",
    }
    direction_ER: Tensor
    potential_E: Tensor

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__(config, layer, shared)
        n, width, dim = config.experts, config.d_model, self.options["router_dim"]
        self.expects_low_entropy = not self.options["plain"]
        if self.options["plain"]:
            self.linear = nn.Linear(width, n, bias=False)
            return
        if not self.options["gru"]:
            self.state = nn.Linear(width, dim)
        self.expand = nn.Linear(dim, n * dim)
        # Without biases h and v are odd in x, and their cosine is the same for x and -x.
        self.express = nn.Linear(width, (n if self.options["expression"] else 1) * dim)
        nn.init.orthogonal_(self.express.weight)
        self.register_buffer("direction_ER", torch.zeros(n, dim))  # moving averages, before normalisation
        self.register_buffer("potential_E", torch.zeros(n))

    @classmethod
    def check_options(cls, options: dict[str, Any], config: ModelConfig) -> None:
        for option, known in (
            ("repulsion", REPULSIONS),
            ("penalty_sign", PENALTY_SIGNS),
            ("evaluation", EVALUATIONS),
        ):
            if options[option] not in known:
                raise unknown_name(f"{option} of router spectra", options[option], list(known))
        if options["router_dim"] < LEAST_ROUTER_DIM:
            raise BadInput(
                f"router spectra: router_dim must be at least {LEAST_ROUTER_DIM}, not {options['router_dim']}"
            )
        cls.check_range(options, ("epsilon", "iterations", "capacity_factor"), "more than 0")
        cls.check_range(options, ("direction_decay", "potential_decay"), "at least 0 and below 1")
        cls.check_range(options, NOT_NEGATIVE, "0 or more")

    @classmethod
    def facts(cls, config: ModelConfig) -> dict[str, Any]:
        options = cls.checked_options(config)
        plain, tensors = options["plain"], dict(cls.state_tensors)
        if not options["expression"]:  # one projection for all experts, which belongs to none of them
            tensors |= dict.fromkeys(("express.weight", "express.bias"), "shared")
        changed = {"has_rows": plain, "expects_low_entropy": not plain, "state_tensors": tensors}
        return {**super().facts(config), **changed}

    @classmethod
    def shared_parts(cls, config: ModelConfig) -> nn.Module | None:
        """Return the GRU cell of all layers, where there is one."""
        options = cls.checked_options(config)
        if options["plain"] or not options["gru"]:
            return None
        return nn.GRUCell(config.d_model, options["router_dim"])

    def forward(self, inputs: RouterInput) -> Routed:
        if self.options["plain"]:
            return self.plain(inputs)
        carried_TR, h_TER = self.trajectories(inputs)
        v_TER = self.expressions(inputs.x_TD)
        s_TE = self.similarity(h_TER, v_TER)
        gram_EE = self.gram(v_TER, inputs.mask_T)
        logits_TE = self.adjust_logits(self.logits(s_TE, gram_EE))
        scores_TE = logits_TE.softmax(-1)
        diagnostics = {"direction_overlap": self.direction_overlap(gram_EE.detach())}
        if self.training or self.options["evaluation"] == "published":
            selection_TE, left = self.balanced(logits_TE.detach(), inputs.mask_T)
            untreated = column_error(scores_TE.detach(), inputs.mask_T)
            diagnostics["column_error"] = Diagnostic(left, untreated, float(self.config.experts - 1))
        else:
            selection_TE = logits_TE.detach() + self.potential_E
        selection_TE = self.adjust_selection(selection_TE)
        chosen_TK = self.choose(selection_TE, inputs.mask_T)
        dropped_T = None
        if self.training and self.options["quota"]:
            accepted_TK = self.admit(chosen_TK, selection_TE, inputs.mask_T)
            dropped_T = ((chosen_TK >= 0) & ~accepted_TK).sum(-1)
            chosen_TK = torch.where(accepted_TK, chosen_TK, -1)
        return Routed(
            chosen_TK=chosen_TK,
            gates_TK=self.gates(logits_TE, chosen_TK),
            logits_TE=logits_TE,
            scores_TE=scores_TE,
            selection_TE=selection_TE,
            losses=self.losses(logits_TE, gram_EE, v_TER, inputs.mask_T) if self.training else {},
            dropped_T=dropped_T,
            carried_TR=carried_TR,
            diagnostics=diagnostics,
        )

    def plain(self, inputs: RouterInput) -> Routed:
        """Linear, softmax, top-k, and nothing that balances."""
        logits_TE = self.adjust_logits(self.linear(inputs.x_TD))
        selection_TE = self.adjust_selection(logits_TE.detach())
        chosen_TK = self.choose(selection_TE, inputs.mask_T)
        gates_TK = self.gates(logits_TE, chosen_TK)
        return Routed(chosen_TK, gates_TK, logits_TE, logits_TE.softmax(-1), selection_TE)

    # --- components, in order of execution

    def trajectories(self, inputs: RouterInput) -> tuple[Tensor | None, Tensor]:
        """Return the depth state for the next layer and h [T, n, R] computed from it.

        Without the GRU, h is a linear map of x and there is no state.
        """
        if self.options["gru"]:
            cell = self.shared
            assert isinstance(cell, nn.GRUCell), "the model passes shared_parts to every layer's router"
            carried_TR = cell(inputs.x_TD, inputs.carried_TR)  # a state of None is 0
            return carried_TR, self.per_expert(self.expand(carried_TR))
        return None, self.per_expert(self.expand(self.state(inputs.x_TD)))

    def expressions(self, x_TD: Tensor) -> Tensor:
        """Return v [T, n, R]; without expression one vector per token, the same for all experts."""
        v = self.express(x_TD)
        if self.options["expression"]:
            return self.per_expert(v)
        return v[:, None].expand(-1, self.config.experts, -1)

    def per_expert(self, flat: Tensor) -> Tensor:
        return flat.view(len(flat), self.config.experts, self.options["router_dim"])

    def similarity(self, h_TER: Tensor, v_TER: Tensor) -> Tensor:
        """s = cos(h, v), [T, n]."""
        # functional.cosine_similarity normalises both first: two more tensors of this size, half as fast
        lengths_TE = h_TER.norm(dim=-1) * v_TER.norm(dim=-1)
        return (h_TER * v_TER).sum(-1) / lengths_TE.clamp(min=1e-8)

    def gram(self, v_TER: Tensor, mask_T: Tensor) -> Tensor:
        """G = m m', m_i = unit(0.9 EMA_i + 0.1 masked batch mean of v[t,i]); gradients through the mean only.

        Evaluation: unit(EMA_i).
        """
        if not self.training:
            m_ER = self.direction_ER
        else:
            sum_ER = torch.where(mask_T[:, None, None], v_TER, 0).sum(0)
            self.accumulate("directions", sum_ER)
            self.accumulate("tokens", mask_T.sum())
            decay, ranks = self.options["direction_decay"], self.sharing
            tokens = ranks.sum(mask_T.sum()).clamp(min=1)
            m_ER = decay * self.direction_ER + (1 - decay) * ranks.sum_with_gradients(sum_ER) / tokens
        m_ER = functional.normalize(m_ER, dim=-1)
        return m_ER @ m_ER.T

    def direction_overlap(self, gram_EE: Tensor) -> Diagnostic:
        """Return the mean squared cosine of two directions: 1/R for random ones, 1 when all are equal."""
        n = self.config.experts
        overlap = gram_EE.square().fill_diagonal_(0).sum() / max(n * (n - 1), 1)
        return Diagnostic(overlap, 1 / self.options["router_dim"], 1.0)

    def logits(self, s_TE: Tensor, gram_EE: Tensor) -> Tensor:
        """-C/eps, [T, n]."""
        options = self.options
        penalty_TE = options["saturation_weight"] * (s_TE.abs() - options["saturation_start"]).relu().square()
        if options["repulsion"] != "none":
            squares_EE = gram_EE.square().fill_diagonal_(0)
            if options["repulsion"] == "between":
                shared_TE = (s_TE / options["epsilon"]).softmax(-1) @ squares_EE
            else:
                shared_TE = s_TE.abs() * squares_EE.sum(-1) / max(self.config.experts - 1, 1)
            penalty_TE = penalty_TE + options["repulsion_weight"] * shared_TE
        sign = 1 if options["penalty_sign"] == "published" else -1
        return (s_TE + sign * penalty_TE) / options["epsilon"]

    def balanced(self, logits_TE: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return Sinkhorn's log plan [T, n], warm-started from averaged potentials, and its column error."""
        ranks = self.sharing
        logits_TE, mask_T = ranks.gather_rows(logits_TE), ranks.gather_rows(mask_T)
        plan = balance(logits_TE, mask_T, self.potential_E, self.options["iterations"])
        self.accumulate("potentials", plan.potential_E)
        self.accumulate("batches", torch.ones_like(plan.column_error))
        return ranks.local_rows(plan.log_plan_TE), plan.column_error

    def choose(self, selection_TE: Tensor, mask_T: Tensor) -> Tensor:
        """Return the k best experts of each real token, -1 for pads."""
        return torch.where(mask_T[:, None], selection_TE.topk(self.config.top_k, -1).indices, -1)

    def admit(self, chosen_TK: Tensor, selection_TE: Tensor, mask_T: Tensor) -> Tensor:
        """Return which choices the quota ceil(cf N k / n) accepts, by Sinkhorn's plan.

        Asserts without a host sync that no expert exceeds it.
        """
        n, k, ranks = self.config.experts, self.config.top_k, self.sharing
        capacity = capacity_of(mask_T, self.options["capacity_factor"], k, n, ranks)
        accepted_TK = within_capacity(
            chosen_TK, selection_TE.gather(-1, chosen_TK.clamp(min=0)), capacity, ranks
        )
        load_E = ranks.sum(choice_counts(chosen_TK.masked_fill(~accepted_TK, -1), n))
        torch._assert_async((load_E <= capacity).all(), "spectra: an expert got more tokens than its quota")
        return accepted_TK

    def gates(self, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Softmax of the logits over a token's choices, over all experts where k = 1; 0 in empty slots."""
        picked_TK = logits_TE.gather(-1, chosen_TK.clamp(min=0))
        if self.single:  # a softmax over one choice is 1 and has no gradient
            gates_TK = (picked_TK - logits_TE.logsumexp(-1, keepdim=True)).exp()
        else:
            gates_TK = picked_TK.masked_fill(chosen_TK < 0, EMPTY).softmax(-1)
        return torch.where(chosen_TK < 0, 0, gates_TK)

    def losses(self, logits_TE: Tensor, gram_EE: Tensor, v_TER: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
        """Return the weighted losses; those of weight 0 are skipped.

        orthogonality: ||G - I||_F^2 / (n(n-1)) of the directions. entropy: mean over real tokens of
        -sum p log p, p = softmax(-C/eps). speciality: the first, of each token's v[t,i], mean over tokens.
        """
        n = self.config.experts
        pairs = max(n * (n - 1), 1)
        real_T = mask_T / self.sharing.tokens_per_rank(mask_T)
        losses: dict[str, Tensor] = {}
        if weight := self.options["orthogonality_weight"]:
            losses["orthogonality"] = weight * gram_EE.square().fill_diagonal_(0).sum() / pairs
        if weight := self.options["entropy_weight"]:
            log_p_TE = logits_TE.log_softmax(-1)
            losses["entropy"] = weight * (-(log_p_TE.exp() * log_p_TE).sum(-1) * real_T).sum()
        if weight := self.options["speciality_weight"]:
            v_TER = functional.normalize(v_TER, dim=-1)
            # V V' and V' V have the same norm and the diagonal of the first is 1: use the smaller
            inner = v_TER.mT @ v_TER if v_TER.shape[-1] < n else v_TER @ v_TER.mT
            beyond_T = inner.square().sum((-1, -2)) - n
            losses["speciality"] = weight * (beyond_T * real_T).sum() / pairs
        return losses

    @torch.no_grad()
    def after_step(self) -> None:
        """Update the moving averages of directions and potentials with this step's means."""
        tokens, directions_ER = self.total("tokens"), self.total("directions")
        batches, potentials_E = self.total("batches"), self.total("potentials")
        if tokens is not None and directions_ER is not None:
            self.direction_ER.lerp_(directions_ER / tokens.clamp(min=1), 1 - self.options["direction_decay"])
        if batches is not None and potentials_E is not None:
            self.potential_E.lerp_(potentials_E / batches, 1 - self.options["potential_decay"])


# --- Sinkhorn's iteration in the log domain


class Balanced(NamedTuple):
    """The result of Sinkhorn's iteration."""

    log_plan_TE: Tensor
    potential_E: Tensor  # of the columns, mean zero
    column_error: Tensor  # scalar


def balance(logits_TE: Tensor, mask_T: Tensor, start_E: Tensor, iterations: int) -> Balanced:
    """Return the plan P = exp(L + f + g) whose rows sum to 1 and columns to about N/n, over N real tokens.

    f_t = -log sum_i exp(L_ti + g_i);  g_i = log(N/n) - log sum_t exp(L_ti + f_t);  `iterations` times, then
    rows once more (Cuturi, Sinkhorn Distances, 2013). Rows are exact, columns are not: `column_error` =
    max_i |sum_t P_ti - N/n| / (N/n). Pads get rows too, but do not count in the columns.
    """
    real_T1 = mask_T[:, None]
    even = mask_T.sum().clamp(min=1) / logits_TE.shape[1]
    potential_E = start_E
    for _ in range(iterations):
        rows_TE = (logits_TE + potential_E).log_softmax(-1) - potential_E
        columns_E = rows_TE.masked_fill(~real_T1, -math.inf).logsumexp(0)
        # without real tokens the start stays
        potential_E = torch.where(columns_E.isfinite(), even.log() - columns_E, start_E)
    potential_E = potential_E - potential_E.mean()  # the rows cancel a constant
    log_plan_TE = (logits_TE + potential_E).log_softmax(-1)
    return Balanced(log_plan_TE, potential_E, column_error(log_plan_TE.exp(), mask_T))


def column_error(plan_TE: Tensor, mask_T: Tensor) -> Tensor:
    """Return max_i |sum_t P_ti - N/n| / (N/n); n - 1 where one expert has all tokens."""
    even = mask_T.sum().clamp(min=1) / plan_TE.shape[1]
    taken_E = plan_TE.masked_fill(~mask_T[:, None], 0).sum(0)
    return (taken_E - even).abs().max() / even
