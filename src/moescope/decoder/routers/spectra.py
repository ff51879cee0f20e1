"""SPECTRA: a depth-wise GRU and an expression projector, compared by cosine; Sinkhorn and quota for balance.

Published text and code of SPECTRA disagree; this version gives every part an effect. Sinkhorn and the quota
look at the whole batch, so selection is not causal in training; in evaluation it is per token.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import ModelConfig, Option
from moescope.decoder.routers.capacity import capacity_of, within_capacity
from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.decoder.routers.topk import choice_counts
from moescope.types import Diagnostic

Sums = dict[str, Tensor]

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

    Its paper and code disagree; values called `published` do what the code did. The potentials balance
    probabilities, not the counts of the k largest, and evaluation has neither Sinkhorn nor the quota: loads
    are less even there than in training, and the held-out loss can be well above the training loss.

    Parameters
    ----------
    router_dim
        Width R of the state and of expressions; at least 64.
    gru
        The state goes through one GRU cell that all layers share; false: a linear map of x.
    expression
        One vector v per expert; false: one for all.
    repulsion
        `between` experts that want the same token; `published`: lambda |s| sum_j G_ij^2/(n-1), one factor per
        expert, which changes almost no choice; `none`.
    repulsion_weight
        Lambda.
    penalty_sign
        `cost`; `published`: penalties enter the logit as if it were the cost, so repulsion attracts.
    saturation_weight
        Beta.
    saturation_start
        Tau.
    epsilon
        Eps, by which costs are divided.
    iterations
        Sinkhorn iterations in a training pass.
    evaluation
        `potentials`: token by token; `published`: Sinkhorn over the evaluated batch, uniform for one token
        alone and not causal.
    quota
        In training an expert admits its best choices up to capacity.
    capacity_factor
        Capacity is ceil(factor N k / n).
    direction_decay
        Of the moving average of experts' directions.
    potential_decay
        Of the moving average of column potentials.
    orthogonality_weight
        Weight of the loss on the Gram matrix of directions.
    entropy_weight
        Weight of the routing entropy, which is minimised.
    speciality_weight
        Weight of the loss on each token's own Gram matrix of expressions.
    plain
        None of these parts: a linear softmax top-k router without balancing.
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
    BOUNDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "at least 64": ("router_dim",),
        "more than 0": ("epsilon", "iterations", "capacity_factor"),
        "at least 0 and below 1": ("direction_decay", "potential_decay"),
        "0 or more": (
            *("repulsion_weight", "saturation_weight", "saturation_start"),
            *("orthogonality_weight", "entropy_weight", "speciality_weight"),
        ),
    }
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "repulsion": ("between", "published", "none"),
        "penalty_sign": ("cost", "published"),
        "evaluation": ("potentials", "published"),
    }
    components: ClassVar[dict[str, str]] = {
        "gru": "depth_state",
        "expansion": "trajectories",
        "projection": "expressions",
        "similarity": "similarity",
        "directions": "sum_expressions",
        "gram": "gram",
        "cost": "logits",
        "sinkhorn": "balanced",
        "top_k": "choose",
        "quota": "admit",
        "gates": "choice_gates",
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
    def facts(cls, config: ModelConfig) -> dict[str, Any]:
        options = cls.checked_options(config)
        plain, tensors = options["plain"], cls.state_tensors
        if not options["expression"]:  # one projection for all experts, which belongs to none of them
            tensors = tensors | dict.fromkeys(("express.weight", "express.bias"), "shared")
        changed = {"has_rows": plain, "expects_low_entropy": not plain, "state_tensors": tensors}
        return super().facts(config) | changed

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
        x_TD, mask_T = inputs.x_TD, inputs.mask_T
        state_TR = self.depth_state(inputs)
        # two functions for torch.compile, not ten: each call costs the host more than the small kernels
        logits_TE, scores_TE, losses, overlap, sums = self.fused(Spectra.score)(
            self, x_TD, state_TR, mask_T, inputs.product_dtype
        )
        chosen_TK, selection_TE, dropped_T, errors, potentials = self.fused(Spectra.select)(
            self, logits_TE.detach(), scores_TE.detach(), mask_T
        )
        for name, amount in (sums | potentials).items():
            self.accumulate(name, amount)
        diagnostics = {"direction_overlap": Diagnostic(overlap, 1 / self.options["router_dim"], 1.0)}
        if errors is not None:
            diagnostics["column_error"] = Diagnostic(errors[0], errors[1], float(self.config.experts - 1))
        return Routed(
            chosen_TK=chosen_TK,
            gates_TK=self.choice_gates(logits_TE, chosen_TK),
            logits_TE=logits_TE,
            scores_TE=scores_TE,
            selection_TE=selection_TE,
            losses=losses,
            dropped_T=dropped_T,
            carried_TR=state_TR if self.options["gru"] else None,
            diagnostics=diagnostics,
        )

    def score(
        self, x_TD: Tensor, state_TR: Tensor, mask_T: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor, Sums]:
        """Return logits, scores and losses.

        Then the overlap of directions, their mean squared cosine, 1/R for random ones, and sums for the
        moving averages.
        """
        v_TER = self.expressions(x_TD, dtype)
        s_TE = self.similarity(self.trajectories(state_TR, dtype), v_TER)
        sums = {"directions": self.sum_expressions(x_TD, mask_T), "tokens": mask_T.sum()}
        gram_EE = self.gram(sums["directions"], sums["tokens"])
        logits_TE = self.adjust_logits(self.logits(s_TE, gram_EE))
        losses = self.losses(logits_TE, gram_EE, v_TER, mask_T) if self.training else {}
        n = self.config.experts
        overlap = gram_EE.detach().square().fill_diagonal_(0).sum() / max(n * (n - 1), 1)
        return logits_TE, logits_TE.softmax(-1), losses, overlap, sums

    def select(
        self, logits_TE: Tensor, scores_TE: Tensor, mask_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None, Sums]:
        """Return the experts of each token, after the quota in training; without gradients.

        Then what selected them, the dropped slots, the error of columns with and without Sinkhorn, and sums
        for the moving averages.
        """
        errors, sums = None, {}
        if self.training or self.options["evaluation"] == "published":
            selection_TE, potential_E, error = self.balanced(logits_TE, mask_T)
            errors = error, column_error(scores_TE, mask_T)
            sums = {"potentials": potential_E, "batches": torch.ones_like(error)}
        else:
            selection_TE = logits_TE + self.potential_E
        selection_TE = self.adjust_selection(selection_TE)
        chosen_TK = self.choose(selection_TE, mask_T)
        dropped_T = None
        if self.training and self.options["quota"]:
            accepted_TK = self.admit(chosen_TK, selection_TE, mask_T)
            dropped_T = ((chosen_TK >= 0) & ~accepted_TK).sum(-1)
            chosen_TK = torch.where(accepted_TK, chosen_TK, -1)
        return chosen_TK, selection_TE, dropped_T, errors, sums

    def plain(self, inputs: RouterInput) -> Routed:
        """Linear, softmax, top-k, and nothing that balances."""
        logits_TE = self.adjust_logits(self.linear(inputs.x_TD))
        selection_TE = self.adjust_selection(logits_TE.detach())
        chosen_TK = self.choose(selection_TE, inputs.mask_T)
        gates_TK = self.choice_gates(logits_TE, chosen_TK)
        return Routed(chosen_TK, gates_TK, logits_TE, logits_TE.softmax(-1), selection_TE)

    # --- components, in order of execution

    def depth_state(self, inputs: RouterInput) -> Tensor:
        """Return each token's state [T, R], from its x and the state of the previous layer.

        Without the GRU, a linear map of x.
        """
        if not self.options["gru"]:
            return self.state(inputs.x_TD)
        cell = self.shared
        assert isinstance(cell, nn.GRUCell), "the model passes shared_parts to every layer's router"
        return cell(inputs.x_TD, inputs.carried_TR)  # a state of None is 0

    def trajectories(self, state_TR: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return h [T, n, R]."""
        return self.per_expert(self.expand, state_TR, dtype)

    def expressions(self, x_TD: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return v [T, n, R]; without expression one vector per token, the same for all experts."""
        return self.per_expert(self.express, x_TD, dtype)

    def per_expert(self, linear: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the map's result [T, n, R] in that dtype, summed in float32: most of the router's work."""
        with torch.autocast(x.device.type, dtype, enabled=dtype.itemsize < x.dtype.itemsize):
            mapped_TER = linear(x).unflatten(-1, (-1, self.options["router_dim"]))
        return mapped_TER.expand(-1, self.config.experts, -1)

    def similarity(self, h_TER: Tensor, v_TER: Tensor) -> Tensor:
        """s = cos(h, v), [T, n], in float32."""
        # functional.cosine_similarity normalises both first: two more tensors of this size, half as fast
        h_TER, v_TER = h_TER.float(), v_TER.float()
        lengths_TE = h_TER.norm(dim=-1) * v_TER.norm(dim=-1)
        return (h_TER * v_TER).sum(-1) / lengths_TE.clamp(min=1e-8)

    def sum_expressions(self, x_TD: Tensor, mask_T: Tensor) -> Tensor:
        """Return the sum of v over real tokens, [n, R]: v is linear in x, so the map of the sum of x."""
        sum_D = mask_T.to(x_TD.dtype) @ x_TD
        sum_F = functional.linear(sum_D, self.express.weight) + mask_T.sum() * self.express.bias
        return sum_F.view(-1, self.options["router_dim"]).expand_as(self.direction_ER)

    def gram(self, sum_ER: Tensor, tokens: Tensor) -> Tensor:
        """G = m m', m_i = unit(0.9 EMA_i + 0.1 mean of v[t,i] over tokens); gradients through the mean only.

        Evaluation: unit(EMA_i).
        """
        m_ER = self.direction_ER
        if self.training:
            decay, ranks = self.options["direction_decay"], self.sharing
            mean_ER = ranks.sum_with_gradients(sum_ER) / ranks.sum(tokens).clamp(min=1)
            m_ER = decay * m_ER + (1 - decay) * mean_ER
        m_ER = functional.normalize(m_ER, dim=-1)
        return m_ER @ m_ER.T

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

    def balanced(self, logits_TE: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Sinkhorn's log plan of this rank's tokens, and potentials and column error of all tokens."""
        ranks = self.sharing
        log_plan_TE, potential_E, error = balance(
            ranks.gather_rows(logits_TE),
            ranks.gather_rows(mask_T),
            self.potential_E,
            self.options["iterations"],
        )
        return ranks.local_rows(log_plan_TE), potential_E, error

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
            losses["speciality"] = weight * (overlaps(v_TER) * real_T).sum() / pairs
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


def overlaps(v_TER: Tensor) -> Tensor:
    """Return each token's sum of squared cosines of v_i and v_j over i != j, [T]."""
    n, width = v_TER.shape[-2:]
    unit_TER = functional.normalize(v_TER.float(), dim=-1).to(v_TER.dtype)
    with torch.no_grad():
        # U U' U: its inner product with U is ||U U'||^2 = ||U' U||^2, whose gradient is 4 U U' U
        if width < n:
            product_TER = unit_TER @ (unit_TER.mT @ unit_TER)
        else:
            product_TER = (unit_TER @ unit_TER.mT) @ unit_TER
    total_T = (product_TER.float() * unit_TER.float()).sum((-1, -2))
    return 4 * total_T - 3 * total_T.detach() - n  # one product less than by autograd; the diagonal is n


# --- Sinkhorn's iteration in the log domain


def balance(
    logits_TE: Tensor, mask_T: Tensor, start_E: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log P, the columns' potentials g, mean zero, and the error of the columns, a scalar.

    P = exp(L + f + g) is the plan whose rows sum to 1 and columns to about N/n, over N real tokens.

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
    return log_plan_TE, potential_E, column_error(log_plan_TE.exp(), mask_T)


def column_error(plan_TE: Tensor, mask_T: Tensor) -> Tensor:
    """Return max_i |sum_t P_ti - N/n| / (N/n); n - 1 where one expert has all tokens."""
    even = mask_T.sum().clamp(min=1) / plan_TE.shape[1]
    taken_E = plan_TE.masked_fill(~mask_T[:, None], 0).sum(0)
    return (taken_E - even).abs().max() / even
