"""SPECTRA: a depth-wise GRU and an expression projector meet in a cosine; Sinkhorn and a quota spread the
tokens.

Published text and code of SPECTRA disagree; this is one reading in which every part does something. Sinkhorn
and the quota look at the
whole batch, so in training the choice is not causal; in evaluation it is, token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.routers.capacity import capacity_of, within_capacity
from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.decoder.routers.spectra_sinkhorn import balance, column_error
from moescope.decoder.routers.topk import choice_counts
from moescope.errors import BadInput, unknown_name
from moescope.types import Diagnostic

if TYPE_CHECKING:
    from moescope.decoder.config import ModelConfig, Option

REPULSIONS = ("between", "published", "none")
PENALTY_SIGNS = ("cost", "published")
EVALUATIONS = ("potentials", "published")
LEAST_ROUTER_DIM = 64

# The switches of the ablation table, by the names it has for them: what each sets.
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

    A state of width R a token, 0 before the first MoE layer, goes through one GRU cell that all layers share;
    a linear map makes
    h[t,i] of it for every expert, another one v[t,i] of x. With s = cos(h, v), G the Gram matrix of the
    experts' directions and
    p = softmax(s/eps), the cost is

        C[t,i] = -s[t,i] + lambda sum_{j != i} G_ij^2 p[t,j] + beta relu(|s[t,i]| - tau)^2

    and logits are -C/eps. In training the k largest of Sinkhorn's plan are chosen, and a quota admits the
    best of each expert; in
    evaluation the k largest of logits + the moving average of the column potentials. Gates: softmax of the
    logits over the choices
    that survive (k = 1: over all experts), without potentials.

    Options beside the weights: `gru`, `expression`, `quota` (ablations), `repulsion` ("published": lambda |s|
    sum_j G_ij^2/(n-1), one
    factor an expert, which changes almost no choice), `penalty_sign` ("published": penalties enter the logit
    as if it were the cost,
    so that repulsion attracts), `evaluation` ("published": Sinkhorn over the evaluated batch: uniform for one
    token alone), and
    `plain` (a linear softmax top-k router without any balancing: everything above taken away).
    """

    name: ClassVar[str] = "spectra"
    causal_in_training: ClassVar[bool] = False
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
    # what the overhead table times, and the methods that do it; none of them calls another one
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
        if self.options["plain"]:
            self.linear = nn.Linear(width, n, bias=False)
            return
        if not self.options["gru"]:
            self.state = nn.Linear(width, dim)
        self.expand = nn.Linear(dim, n * dim)
        # Biases matter: without them h and v are odd in x, and their cosine is the same for x and -x.
        self.express = nn.Linear(width, (n if self.options["expression"] else 1) * dim)
        nn.init.orthogonal_(self.express.weight)
        self.register_buffer(
            "direction_ER", torch.zeros(n, dim)
        )  # moving averages, before they are made unit vectors
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
        for option in ("epsilon", "iterations", "capacity_factor"):
            if not options[option] > 0:
                raise BadInput(f"router spectra: {option} must be more than 0, not {options[option]}")
        for option in ("direction_decay", "potential_decay"):
            if not 0 <= options[option] < 1:
                raise BadInput(
                    f"router spectra: {option} must be at least 0 and less than 1, not {options[option]}"
                )
        for option in NOT_NEGATIVE:
            if not options[option] >= 0:
                raise BadInput(f"router spectra: {option} must be 0 or more, not {options[option]}")

    @classmethod
    def shared_parts(cls, config: ModelConfig) -> nn.Module | None:
        """The GRU cell of all layers, where there is one."""
        options = cls.checked_options(config)
        if options["plain"] or not options["gru"]:
            return None
        return nn.GRUCell(config.d_model, options["router_dim"])

    @property
    def sure_by_design(self) -> bool:
        """Cosines divided by a small epsilon, and an entropy that is made small."""
        return not self.options["plain"]

    def forward(self, given: RouterInput) -> Routed:
        if self.options["plain"]:
            return self.plain(given)
        carried_TR, h_TER = self.trajectories(given)
        v_TER = self.expressions(given.x_TD)
        s_TE = self.similarity(h_TER, v_TER)
        gram_EE = self.gram(v_TER, given.mask_T)
        logits_TE = self.logits(s_TE, gram_EE)
        scores_TE = logits_TE.softmax(-1)
        diagnostics = {"direction_overlap": self.direction_overlap(gram_EE.detach())}
        if self.training or self.options["evaluation"] == "published":
            selection_TE, left = self.balanced(logits_TE.detach(), given.mask_T)
            untreated = column_error(scores_TE.detach(), given.mask_T)
            diagnostics["column_error"] = Diagnostic(left, untreated, float(self.config.experts - 1))
        else:
            selection_TE = logits_TE.detach() + self.potential_E
        chosen_TK = self.choose(selection_TE, given.mask_T)
        dropped_T = None
        if self.training and self.options["quota"]:
            kept_TK = self.admit(chosen_TK, selection_TE, given.mask_T)
            dropped_T = ((chosen_TK >= 0) & ~kept_TK).sum(-1)
            chosen_TK = torch.where(kept_TK, chosen_TK, -1)
        return Routed(
            chosen_TK=chosen_TK,
            gates_TK=self.gates(logits_TE, chosen_TK),
            logits_TE=logits_TE,
            scores_TE=scores_TE,
            selection_TE=selection_TE,
            losses=self.losses(logits_TE, gram_EE, v_TER, given.mask_T) if self.training else {},
            dropped_T=dropped_T,
            carried_TR=carried_TR,
            diagnostics=diagnostics,
        )

    def plain(self, given: RouterInput) -> Routed:
        """Linear, softmax, top-k, and nothing that balances."""
        logits_TE = self.linear(given.x_TD)
        chosen_TK = self.choose(logits_TE.detach(), given.mask_T)
        return Routed(
            chosen_TK, self.gates(logits_TE, chosen_TK), logits_TE, logits_TE.softmax(-1), logits_TE.detach()
        )

    # --- the parts, in the order in which they act

    def trajectories(self, given: RouterInput) -> tuple[Tensor | None, Tensor]:
        """The depth state to hand on, and h [T, n, R] made of it.

        Without the GRU a linear map of x stands in, and nothing is handed on.
        """
        if self.options["gru"]:
            cell = self.shared
            assert isinstance(cell, nn.GRUCell), "the model hands shared_parts to every layer's router"
            carried_TR = cell(given.x_TD, given.carried_TR)  # a state of None is 0
            return carried_TR, self.per_expert(self.expand(carried_TR))
        return None, self.per_expert(self.expand(self.state(given.x_TD)))

    def expressions(self, x_TD: Tensor) -> Tensor:
        """v [T, n, R]; without expression one vector a token, the same for all experts."""
        v = self.express(x_TD)
        return (
            self.per_expert(v)
            if self.options["expression"]
            else v[:, None].expand(-1, self.config.experts, -1)
        )

    def per_expert(self, flat: Tensor) -> Tensor:
        return flat.view(len(flat), self.config.experts, self.options["router_dim"])

    def similarity(self, h_TER: Tensor, v_TER: Tensor) -> Tensor:
        """s = cos(h, v), [T, n]."""
        # functional.cosine_similarity makes both unit vectors first: two more tensors of this size, and half
        # as fast
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
        """The mean squared cosine of two experts' directions: 1/R for random ones, 1 when all are one."""
        n = self.config.experts
        return Diagnostic(
            gram_EE.square().fill_diagonal_(0).sum() / max(n * (n - 1), 1),
            1 / self.options["router_dim"],
            1.0,
        )

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
        """Sinkhorn's log plan [T, n], from the moving average of the potentials on.

        And the column error that is left.
        """
        ranks = self.sharing
        plan = balance(
            ranks.gathered(logits_TE), ranks.gathered(mask_T), self.potential_E, self.options["iterations"]
        )
        self.accumulate("potentials", plan.potential_E)
        self.accumulate("batches", torch.ones_like(plan.column_error))
        return ranks.own(plan.log_plan_TE), plan.column_error

    def choose(self, selection_TE: Tensor, mask_T: Tensor) -> Tensor:
        """The k best of each real token, -1 for pads."""
        return torch.where(mask_T[:, None], selection_TE.topk(self.config.top_k, -1).indices, -1)

    def admit(self, chosen_TK: Tensor, selection_TE: Tensor, mask_T: Tensor) -> Tensor:
        """Which choices the quota ceil(cf N k / n) admits, by Sinkhorn's plan.

        That no expert exceeds it is asserted, without a wait.
        """
        n, k, ranks = self.config.experts, self.config.top_k, self.sharing
        capacity = capacity_of(mask_T, self.options["capacity_factor"], k, n, ranks)
        kept_TK = within_capacity(chosen_TK, selection_TE.gather(-1, chosen_TK.clamp(min=0)), capacity, ranks)
        load_E = ranks.sum(choice_counts(chosen_TK.masked_fill(~kept_TK, -1), n))
        torch._assert_async((load_E <= capacity).all(), "spectra: an expert got more tokens than its quota")
        return kept_TK

    def gates(self, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Softmax of the logits over a token's choices, over all experts where k = 1; 0 in empty slots."""
        picked_TK = logits_TE.gather(-1, chosen_TK.clamp(min=0))
        if (
            self.config.top_k == 1
        ):  # over its own choice alone a gate would be 1, and teach the router nothing
            gates_TK = (picked_TK - logits_TE.logsumexp(-1, keepdim=True)).exp()
        else:
            gates_TK = picked_TK.masked_fill(chosen_TK < 0, EMPTY).softmax(-1)
        return torch.where(chosen_TK < 0, 0, gates_TK)

    def losses(self, logits_TE: Tensor, gram_EE: Tensor, v_TER: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
        """What joins the language-model loss, weighted; losses of weight 0 are left out.

        orthogonality: ||G - I||_F^2 / (n(n-1)) of the directions. entropy: mean of -sum p log p, p =
        softmax(-C/eps), over real tokens.
        speciality: the first, of each token's own v[t,i], meaned over tokens.
        """
        n = self.config.experts
        pairs = max(n * (n - 1), 1)
        real_T = mask_T / self.sharing.tokens_a_rank(mask_T)
        found: dict[str, Tensor] = {}
        if weight := self.options["orthogonality_weight"]:
            found["orthogonality"] = weight * gram_EE.square().fill_diagonal_(0).sum() / pairs
        if weight := self.options["entropy_weight"]:
            log_p_TE = logits_TE.log_softmax(-1)
            found["entropy"] = weight * (-(log_p_TE.exp() * log_p_TE).sum(-1) * real_T).sum()
        if weight := self.options["speciality_weight"]:
            v_TER = functional.normalize(v_TER, dim=-1)
            # V V' and V' V have the same norm, and the diagonal of the first is 1: the smaller one will do
            inner = v_TER.mT @ v_TER if v_TER.shape[-1] < n else v_TER @ v_TER.mT
            beyond_T = inner.square().sum((-1, -2)) - n
            found["speciality"] = weight * (beyond_T * real_T).sum() / pairs
        return found

    @torch.no_grad()
    def after_step(self) -> None:
        """Moves the averages of directions and column potentials on.

        By the means over this step's real tokens and passes.
        """
        tokens, directions_ER = self.total("tokens"), self.total("directions")
        batches, potentials_E = self.total("batches"), self.total("potentials")
        if tokens is not None and directions_ER is not None:
            self.direction_ER.lerp_(directions_ER / tokens.clamp(min=1), 1 - self.options["direction_decay"])
        if batches is not None and potentials_E is not None:
            self.potential_E.lerp_(potentials_E / batches, 1 - self.options["potential_decay"])


EMPTY = -1e30  # not -inf: a token without any choice would get NaN
NOT_NEGATIVE = (
    "repulsion_weight",
    "saturation_weight",
    "saturation_start",
    "orthogonality_weight",
    "entropy_weight",
    "speciality_weight",
)
