"""SoME, the self-organising mixture of experts: frozen random experts, moving keys, trained queries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from moescope.decoder.config import ModelConfig, Option
from moescope.decoder.routers.contract import Routed, Router, RouterInput
from moescope.errors import BadInput
from moescope.types import Array, Diagnostic, LinearView

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED_EVALUATION_TEMPERATURE = 0.5
RESPAWN_BELOW = 0.1  # of a key's strength
DRAWS = 20  # random key sets, for the chance level of the map's share of variance

BLOCK = {"block": "some", "frozen_experts": True}
# Controls of the ablation study: changes to [model], one part removed or fixed at a time.
CONTROLS: dict[str, dict[str, Any]] = {
    "-PeerPull": {"router_options": {"peer_pull": 0.0}},
    "-MovingKeys": {"router_options": {"frozen_keys": True}},
    "-Experts": {"expert_init": "zero"},
    "+TrainedExperts": {"frozen_experts": False},  # the same operations per token
    "+Orthogonal": {"expert_init": "orthogonal"},
    "+OrthogonalMatched": {"expert_init": "orthogonal", "match_expert_scale": True},
    "+Sparse": {"expert_init": "sparse"},
    "+SparseMatched": {"expert_init": "sparse", "match_expert_scale": True},
}


class SoME(Router):
    """The router of one SoME layer.

    q = unit(W2 gelu(W1 x)); scores q K'; the k largest; gates softmax(score/T) over them (k = 1: over all
    experts). Keys K_i = rho_i khat_i, |khat_i| = 1, have no gradient: `after_step` updates them.

    Parameters
    ----------
    temperature
        T of the gates.
    attraction
        Alpha, by which chosen keys move towards queries.
    peer_pull
        Beta, by which keys chosen together move towards each other; 0 is the control. Alone it drives keys
        together.
    usage_decay
        Of the moving average of counts.
    decay
        Delta, by which rho of hardly used keys shrinks per step.
    decay_after
        Steps before the decay begins.
    decay_percentile
        Percentile of the used keys' usage below which keys are hardly used.
    respawn
        Keys whose rho fell below 0.1 restart at a random query.
    frozen_keys
        Control: keys never move; usage is still counted.
    published_usage
        Usage is not bias-corrected, so the first steps overshoot.
    published_peers
        The pull is divided by the smaller usage of a pair instead of the larger.
    published_order
        Keys are normalised after the decay, which cancels it.
    published_pads
        Padding moves keys too.
    published_temperature
        0.5 in evaluation.
    """

    name: ClassVar[str] = "some"
    has_keys: ClassVar[bool] = True
    expects_frozen_experts: ClassVar[bool] = True
    compression_effects: ClassVar[dict[str, str]] = {
        "fold": "The rows are keys, fitted on the queries they meet."
    }
    state_tensors: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("strength_E", "usage_E"), "experts"),
        **dict.fromkeys(("steps", "wide.weight", "wide.bias", "narrow.weight", "narrow.bias"), "shared"),
    }
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "": BLOCK,
        **{name: {**BLOCK, **changes} for name, changes in CONTROLS.items()},
    }
    OPTIONS: ClassVar[dict[str, Option]] = {
        "temperature": 0.8,
        "attraction": 0.01,
        "peer_pull": 0.005,
        "usage_decay": 0.99,
        "decay": 0.001,
        "decay_after": 400,
        "decay_percentile": 5.0,
        "respawn": False,
        "frozen_keys": False,
        "published_usage": False,
        "published_peers": False,
        "published_order": False,
        "published_pads": False,
        "published_temperature": False,
    }
    BOUNDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "more than 0": ("temperature",),
        "0 or more": ("attraction", "peer_pull", "decay_after"),
        "at least 0 and below 1": ("usage_decay", "decay"),
        "between 0 and 100": ("decay_percentile",),
    }
    components: ClassVar[dict[str, str]] = {
        "query": "query",
        "similarity": "scores",
        "top_k": "choose",
        "gates": "choice_gates",
        "bookkeeping": "remember",
    }
    direction_ED: Tensor
    strength_E: Tensor
    usage_E: Tensor
    steps: Tensor

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__(config, layer, shared)
        width = config.d_model
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.register_buffer("direction_ED", functional.normalize(torch.randn(config.experts, width), dim=-1))
        self.register_buffer("strength_E", torch.ones(config.experts))  # rho
        self.register_buffer("usage_E", torch.zeros(config.experts))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        if options["respawn"] and (options["frozen_keys"] or options["published_order"]):
            raise BadInput("router some: respawn needs decaying keys; unset frozen_keys and published_order")

    @property
    def keys_ED(self) -> Tensor:
        """K = rho khat."""
        return self.strength_E[:, None] * self.direction_ED

    def forward(self, inputs: RouterInput) -> Routed:
        q_TD = self.query(inputs.x_TD)
        scores_TE = self.adjust_logits(self.scores(q_TD))
        with_pads_TK = self.choose(scores_TE)
        chosen_TK = with_pads_TK.masked_fill(~inputs.mask_T[:, None], -1)
        logits_TE = scores_TE / self.temperature()
        if self.training:
            self.remember(q_TD, with_pads_TK if self.options["published_pads"] else chosen_TK)
        return Routed(
            chosen_TK=chosen_TK,
            gates_TK=self.choice_gates(logits_TE, chosen_TK),
            logits_TE=logits_TE,
            scores_TE=logits_TE.softmax(-1),
            selection_TE=scores_TE.detach(),
            diagnostics=self.key_diagnostics(),
        )

    def key_diagnostics(self) -> dict[str, Diagnostic]:
        """Return the mean cosine of two keys (0 random, 1 all equal), mean rho, and the share with rho < 1.

        The reference of that share, once the decay has begun, is the share of n used keys below percentile q:
        ceil(q (n - 1))/n. The mean cosine of n random keys of width D has the standard deviation
        sqrt(2/(n(n - 1)D)).
        """
        n, options = self.config.experts, self.options
        cosine = (self.direction_ED.sum(0).square().sum() - n) / max(n * (n - 1), 1)
        spread = math.sqrt(2 / (n * (n - 1) * self.direction_ED.shape[1])) if n > 1 else math.nan
        begun = (self.steps > options["decay_after"]).float()
        below = math.ceil(options["decay_percentile"] / 100 * (n - 1) - 1e-9) / n
        return {
            "key_cosine": Diagnostic(cosine, 0.0, 1.0, spread),
            "key_strength": Diagnostic(self.strength_E.mean(), 1.0, 0.0),
            "weakened_keys": Diagnostic((self.strength_E < 1).float().mean(), begun * below, 1.0),
        }

    def key_map(self, counts_E: Array) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Return the map of the keys, and their mean cosine with its chance level."""
        keys_ED = self.keys_ED.double().cpu().numpy()
        places, shown, by_chance = key_map(keys_ED, counts_E)
        cosine, spread = key_cosine(keys_ED)
        row = {"metric": "cosine", "value": cosine, "chance": 0.0, "collapse": 1.0, "chance_spread": spread}
        return places.assign(variance_share=shown, variance_share_chance=by_chance), row

    def linear_view(self) -> LinearView:
        """Keys divided by the temperature, times queries. Fitted strengths may exceed 1."""

        def stored(rows_KD: Tensor, threshold_K: Tensor | None) -> dict[str, Tensor]:
            keys_KD = rows_KD * self.temperature()
            return {"direction_ED": functional.normalize(keys_KD, dim=-1), "strength_E": keys_KD.norm(dim=-1)}

        return LinearView(self.keys_ED / self.temperature(), self.query, "direction_ED", stored)

    def temperature(self) -> float:
        published = self.options["published_temperature"] and not self.training
        return PUBLISHED_EVALUATION_TEMPERATURE if published else self.options["temperature"]

    def query(self, x_TD: Tensor) -> Tensor:
        """Return unit queries, [T, D]."""
        return functional.normalize(self.narrow(functional.gelu(self.wide(x_TD))), dim=-1)

    def scores(self, q_TD: Tensor) -> Tensor:
        return q_TD @ self.keys_ED.T

    def choose(self, scores_TE: Tensor) -> Tensor:
        return scores_TE.detach().topk(self.config.top_k, -1).indices

    @torch.no_grad()
    def remember(self, q_TD: Tensor, chosen_TK: Tensor) -> None:
        """Accumulate the update's sums: choices per expert, their queries, co-activation counts of pairs."""
        n = self.config.experts
        slots_TK = torch.where(chosen_TK < 0, n, chosen_TK)
        member_TE = torch.zeros(len(slots_TK), n + 1, device=q_TD.device).scatter_(1, slots_TK, 1)[:, :n]
        self.accumulate("counts", member_TE.sum(0))
        self.accumulate("queries", member_TE.T @ q_TD)
        self.accumulate("pairs", (member_TE.T @ member_TE).fill_diagonal_(0))
        if self.options["respawn"]:
            real_T = self.ranks.gather_rows((chosen_TK[:, 0] >= 0).double())
            # multinomial rejects all-zero weights; the result is then unused
            picked_E = torch.multinomial(real_T + (real_T.sum() == 0), n, replacement=True)
            self.accumulated["candidates"] = self.ranks.select_rows(q_TD, self.ranks.broadcast(picked_E))

    @torch.no_grad()
    def after_step(self) -> None:
        """Update usage, keys and strengths from this step's queries and choices (Kohonen's rule).

        u <- 0.99 u + 0.01 c, used as u/(1 - 0.99^t). From the keys before the update:
        K_i += alpha/(1+u_i) sum_{slots of i} (q - K_i)
               + sum_{tokens, j co-activated with i} beta/max(1+u_i, 1+u_j) (K_j - K_i).
        Only khat is normalised again. After `decay_after` steps rho <- rho (1 - delta) where u is below the
        percentile of the used ones, rho <- min(1, rho/(1 - delta)) elsewhere.
        """
        options = self.options
        counts_E, queries_ED, pairs_EE = self.total("counts"), self.total("queries"), self.total("pairs")
        if counts_E is None or queries_ED is None or pairs_EE is None:
            return
        self.steps += 1
        self.usage_E.lerp_(counts_E, 1 - options["usage_decay"])
        if options["frozen_keys"]:
            return
        usage_E = self.usage_E if options["published_usage"] else self.corrected_usage()
        self.move_keys(counts_E, queries_ED, pairs_EE, usage_E)
        if not options["published_order"]:
            self.decay_strengths(usage_E)
        if options["respawn"]:
            self.respawn_keys(self.accumulated.pop("candidates"))

    def corrected_usage(self) -> Tensor:
        """Return u/(1 - 0.99^t): the mean count, weighted towards recent steps."""
        return self.usage_E / (1 - self.options["usage_decay"] ** self.steps.clamp(min=1))

    def move_keys(self, counts_E: Tensor, queries_ED: Tensor, pairs_EE: Tensor, usage_E: Tensor) -> None:
        K_ED = self.keys_ED
        slowness_E = 1 + usage_E
        pair = torch.minimum if self.options["published_peers"] else torch.maximum
        pull_EE = pairs_EE * self.options["peer_pull"] / pair(slowness_E[:, None], slowness_E)
        change_ED = queries_ED - counts_E[:, None] * K_ED
        change_ED *= (self.options["attraction"] / slowness_E)[:, None]
        change_ED += pull_EE @ K_ED - pull_EE.sum(-1, keepdim=True) * K_ED
        self.direction_ED.copy_(functional.normalize(K_ED + change_ED, dim=-1))

    def decay_strengths(self, usage_E: Tensor) -> None:
        """Shrink rho of rarely used keys, let others grow back; nothing before `decay_after` steps."""
        keep = 1 - self.options["decay"]
        idle_E = usage_E < quantile_of_used(usage_E, self.options["decay_percentile"] / 100)
        changed_E = torch.where(idle_E, self.strength_E * keep, (self.strength_E / keep).clamp(max=1))
        decaying = self.steps > self.options["decay_after"]
        self.strength_E.copy_(torch.where(decaying, changed_E, self.strength_E))

    def respawn_keys(self, candidates_ED: Tensor) -> None:
        """Restart keys too weak to be chosen at a query of this step, at full strength."""
        weak_E = self.strength_E < RESPAWN_BELOW
        self.direction_ED.copy_(torch.where(weak_E[:, None], candidates_ED, self.direction_ED))
        self.strength_E.masked_fill_(weak_E, 1)


def quantile_of_used(usage_E: Tensor, share: float) -> Tensor:
    """Return the linearly interpolated quantile of the values above 0; NaN where there are none.

    Bit-equal to torch.nanquantile, which syncs with the host in some versions.
    """
    used = (usage_E > 0).sum()
    ascending_E = torch.where(usage_E > 0, usage_E, torch.inf).sort().values
    rank = (share * (used - 1)).clamp(min=0)
    below, above = (ascending_E.gather(0, at.long()[None])[0] for at in (rank.floor(), rank.ceil()))
    return torch.where(used > 0, torch.lerp(below, above, rank - rank.floor()), torch.nan)


def key_cosine(keys_ED: Array) -> tuple[float, float]:
    """Return the mean cosine between two keys, and its standard deviation for random keys.

    (|sum of unit keys|^2 - n) / (n (n - 1)); for random directions the mean is 0 and the deviation sqrt(2 /
    (n (n - 1) D)). Near 1 all keys are equal, and rounding decides which expert a token gets.
    """
    n, width = keys_ED.shape
    if n < 2:
        return float("nan"), float("nan")
    total_D = unit(keys_ED).sum(0)
    return float((total_D @ total_D - n) / (n * (n - 1))), float(np.sqrt(2 / (n * (n - 1) * width)))


def key_map(keys_ED: Array, counts_E: Array) -> tuple[pd.DataFrame, float, float]:
    """Return a map of the unit keys by their first two principal components, and the share of variance shown.

    Columns: expert, x, y, tokens, strength. The third value is the share for random keys, larger for fewer
    keys.
    """
    import pandas as pd

    n, width = keys_ED.shape
    xy_E2, shown = two_components(unit(keys_ED))
    generator = np.random.default_rng(0)
    by_chance = [two_components(unit(generator.standard_normal((n, width))))[1] for _ in range(DRAWS)]
    frame = pd.DataFrame({"expert": np.arange(n), "x": xy_E2[:, 0], "y": xy_E2[:, 1]})
    counts, strength = np.asarray(counts_E, dtype=np.int64), np.linalg.norm(keys_ED, axis=1)
    return frame.assign(tokens=counts, strength=strength), shown, float(np.mean(by_chance))


def unit(keys_ED: Array) -> Array:
    keys_ED = np.asarray(keys_ED, dtype=np.float64)
    return np.asarray(keys_ED / np.linalg.norm(keys_ED, axis=1, keepdims=True))


def two_components(points_ED: Array) -> tuple[Array, float]:
    """Return coordinates on the first two principal axes and their share of variance.

    The sign of each axis makes its largest entry positive.
    """
    left, singular, _ = np.linalg.svd(points_ED - points_ED.mean(0), full_matrices=False)
    places = np.zeros((len(points_ED), 2))
    places[:, : len(singular)] = (left * singular)[:, :2]
    largest = places[np.abs(places).argmax(0), [0, 1]]
    variance = singular**2
    return places * np.where(largest < 0, -1, 1), float(variance[:2].sum() / max(variance.sum(), 1e-300))
