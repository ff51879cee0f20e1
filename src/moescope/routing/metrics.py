"""Every value of `routing_layers.metric`, one record each: function, chance level, bounds, words.

N tokens, n experts, k experts per token (the mean; at collapse at least 1), c loads, q shares of the load,
p the router's probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from moescope.routing import decision, load_balance, separation, specialisation, vocabulary
from moescope.routing.load_balance import Setting, jaccard_chance
from moescope.statistics import LEVEL, NOT_AVAILABLE, Interval
from moescope.tables import Column, Reference
from moescope.types import Array

Level = Callable[[Setting], float]
Levels = tuple[str, str, str]  # in words: worst, at chance, best
PURPOSE = "depends on the purpose"
# a value's share of the largest possible one -> the word for its size
EVENNESS = {0.0: "even", 0.05: "slightly uneven", 0.2: "uneven", 0.8: "collapsed"}
DEPENDENCE = {0.0: "negligible", 0.02: "weak", 0.1: "clear", 0.3: "strong"}
CHANCE = {  # group of a metric -> what its chance level is, in figures and sentences
    "load": "random routing",
    "gate weight": "random routing",
    "sums": "independent tokens",
    "decision": "uniform router",
    "probabilities": "even load",
    "pairs": "random routing",
    "router": "random rows",
    "domains": "permuted labels",
    "vocabulary": "permuted tokens",
    "diagnostic": "chance",
}
DRAWN = "mean of 200 random routings"
PERMUTED = "the same with tokens permuted within documents"
UNIFORM = "for a uniform router"
SIMULATED = (
    "In simulated texts of 20 to 200 documents of similar length (40 to 400 tokens), with 8 and 64 experts "
    "of even load or cv 0.3, 93 to 100 % of the intervals cover the truth"
)
BIASED = (
    "Noise looks like imbalance: with many experts and few documents the value is too large, also above the "
    "interval. `corrected` is without that bias; its interval reaches 0 where loads may be even. "
)
LARGEST = (
    "With many experts and few documents the value is too large; the interval reaches far below it then. "
    f"{SIMULATED}."
)
ENTROPY_BIASED = (
    "Noise looks like imbalance: with many experts and few documents the value is too small, also below the "
    f"interval. `corrected` is the jackknife-corrected value. {SIMULATED}; 82 to 92 % where half of the "
    "experts have a hundredth of the others’ load."
)


def unknown(setting: Setting) -> float:
    """NaN: there is no such bound, or the value is computed from the text (permutations)."""
    return float("nan")


@dataclass(frozen=True)
class Metric:
    """A metric of one layer.

    `chance` is the value under ideal random balanced routing, `collapse` the value when all tokens choose the
    same k experts.
    """

    name: str
    group: str  # what it is computed from: load, gate weight, sums, decision, pairs, router, ...
    meaning: str
    formula: str
    levels: Levels
    function: Callable[..., Any] | None = None  # None: a ratio of sums, or reported by the router itself
    chance: Level = unknown
    collapse: Level = unknown
    interval: Callable[[Array], Interval] | None = None  # of load metrics, from documents' loads; None: none
    sums: tuple[str, str] = ("", "")  # of a ratio: names of numerator and denominator in `LayerCounts.sums`
    share: bool = False  # of tokens, slots or probability: the interval is cut at 0 and 1
    unit: str = ""
    misleads: str = ""
    title: str = ""  # in figures and tables; the name where empty
    chance_label: str = ""  # what the chance level is; by default that of the group
    least: Reference = 0.0  # the end of its axis
    most: Reference = "collapse"  # drawn where it is a column
    most_label: str = "collapse"
    sizes: Mapping[float, str] = field(default_factory=dict)  # least share of `most` -> word
    even: Level = unknown  # chance level of `corrected`, which has no bias
    extreme: Callable[[Setting, float], float] | None = None  # quantile of the value by chance
    scale: Literal["linear", "log"] = "linear"
    better: Literal["", "higher", "lower"] = ""

    def value(self, values: Array) -> float:
        assert self.function is not None
        return float(self.function(values))

    def row(self, setting: Setting, value: float, interval: Interval = NOT_AVAILABLE) -> dict[str, Any]:
        levels = row(self.name, value, self.chance(setting), self.collapse(setting), interval)
        if np.isfinite(interval.corrected):
            levels["corrected_chance"] = self.even(setting)
        if self.extreme is not None:
            each = {"extreme_chance": 0.5, "extreme_limit": 1 - LEVEL}
            levels |= {name: self.extreme(setting, q ** (1 / setting.layers)) for name, q in each.items()}
        return levels

    @property
    def column(self) -> Column:
        """The metric as a column of the rows that hold it: its words, references and interval."""
        words = (self.meaning, self.formula, *self.levels, self.misleads, self.title, self.unit)
        return Column(
            "float",
            *words,
            chance="chance",
            chance_label=self.chance_label or CHANCE[self.group],
            noise="chance_spread",
            least=self.least,
            most=self.most,
            most_label=self.most_label,
            sizes=self.sizes,
            interval=("low", "high"),
            corrected=("corrected", "corrected_chance"),
            extreme=("extreme_chance", "extreme_limit"),
            scale=self.scale,
            better=self.better,
            few="few",
        )


def row(
    metric: str, value: float, chance: float, collapse: float, interval: Interval = NOT_AVAILABLE
) -> dict[str, Any]:
    """Return the columns of routing_layers that depend on the metric."""
    return {"metric": metric, "value": value, "chance": chance, "collapse": collapse, **interval._asdict()}


def load_metric(
    function: Callable[..., Any], meaning: str, formula: str, levels: Levels, **more: Any
) -> Metric:
    """A metric of loads; its chance level is the mean over random routings, where none is given."""
    usual: dict[str, Any] = {"chance": lambda setting: setting.mean_draw(function), "better": "lower"}
    return Metric(function.__name__, "load", meaning, formula, levels, function, **usual | more)


def decision_metric(
    function: Callable[..., Any], meaning: str, formula: str, levels: Levels, **more: Any
) -> Metric:
    name = function.__name__
    return Metric(name, "decision", meaning, formula, levels, function, sums=(name, "decided"), **more)


LOAD = [
    load_metric(
        load_balance.cv,
        "Coefficient of variation of the loads c.",
        "std(c)/mean(c), ddof 0",
        ("√(n/k − 1)", "√((n − k)/(N k))", "0"),
        chance=lambda s: s.relative_std,
        collapse=lambda s: float(np.sqrt(max(s.n_experts / s.k_at_collapse - 1, 0))),
        interval=load_balance.cv_interval,
        misleads=BIASED
        + "It uses products of different documents’ loads only: cv² = n Σᵢ (Tᵢ² − Σ_d x_di²)/(N² − Σ_d N_d²) "
        "− 1, 0 where that is negative. "
        + f"{SIMULATED}; 90 % where one expert of 64 has a fifth of the load.",
        title="CV",
        even=lambda s: 0.0,
        extreme=load_balance.cv_quantile,
        sizes=EVENNESS,
        scale="log",
    ),
    load_metric(
        load_balance.max_violation,
        "Excess of the busiest expert over the mean load.",
        "(max c − c̄)/c̄",
        ("n/k − 1", DRAWN, "0"),
        collapse=lambda s: s.n_experts / s.k_at_collapse - 1,
        interval=load_balance.max_interval(even=0.0),
        misleads=LARGEST,
        title="max violation",
        scale="log",
    ),
    load_metric(
        load_balance.max_over_mean,
        "Load of the busiest expert over the mean: max_violation + 1, as other tools print it.",
        "max c/c̄",
        ("n/k", DRAWN, "1"),
        collapse=lambda s: s.n_experts / s.k_at_collapse,
        interval=load_balance.max_interval(even=1.0),
        misleads=LARGEST,
        title="max/mean",
        unit="× mean load",
        least=1,
        extreme=load_balance.busiest_quantile,
        sizes=EVENNESS,
    ),
    load_metric(
        load_balance.gini,
        "Gini coefficient of the loads.",
        "(n + 1 − 2 Σ cumulative shares)/n, ascending",
        ("1 − k/n", f"{DRAWN}; about cv chance × √((n − 1)/(π n))", "0"),
        collapse=lambda s: 1 - s.k_at_collapse / s.n_experts,
        interval=load_balance.gini_interval,
        title="Gini",
        even=lambda s: 0.0,
        sizes=EVENNESS,
        misleads=BIASED
        + "It is the mean of two values with opposite biases: the jackknife-corrected one, and one that "
        "orders the experts of each document by the other documents. " + f"{SIMULATED}.",
    ),
    load_metric(
        load_balance.unused,
        "Share of experts that no token chose.",
        "#{cᵢ = 0}/n",
        ("1 − k/n", "(1 − k/n)^N", "0"),
        chance=lambda s: (1 - s.k / s.n_experts) ** s.tokens,
        collapse=lambda s: 1 - s.k_at_collapse / s.n_experts,
        misleads="It falls with the length of the text by itself, so it has no interval.",
        extreme=load_balance.unused_quantile,
        title="unused experts",
        unit="share",
    ),
    load_metric(
        load_balance.min_max_ratio,
        "Load of the least busy expert over that of the busiest.",
        "min c/max c",
        ("0", DRAWN, "1"),
        collapse=lambda s: float(s.k >= s.n_experts),
        misleads="It rises with the length of the text by itself, so it has no interval.",
        title="min/max",
        better="higher",
    ),
    load_metric(
        load_balance.load_entropy,
        "Entropy of the load shares q, in nats.",
        "−Σ q log q",
        ("log k", f"{DRAWN}; about log n − (n − k)/(2 N k)", "log n"),
        collapse=lambda s: float(np.log(s.k_at_collapse)),
        interval=load_balance.entropy_interval(load_balance.load_entropy),
        even=lambda s: float(np.log(s.n_experts)),
        unit="nats",
        title="load entropy",
        least=None,
        better="higher",
        misleads=ENTROPY_BIASED,
    ),
    load_metric(
        load_balance.load_entropy_bits,
        "Entropy of the load shares q, in bits.",
        "−Σ q log₂ q",
        ("log₂ k", "as load_entropy/log 2", "log₂ n"),
        collapse=lambda s: float(np.log2(s.k_at_collapse)),
        interval=load_balance.entropy_interval(load_balance.load_entropy_bits),
        even=lambda s: float(np.log2(s.n_experts)),
        unit="bits",
        title="load entropy, bits",
        least=None,
        better="higher",
        misleads=ENTROPY_BIASED,
    ),
    load_metric(
        load_balance.load_entropy_share,
        "Entropy of the load shares over its maximum.",
        "−Σ q log q/log n",
        ("log k/log n", "as load_entropy/log n", "1"),
        collapse=lambda s: float(np.log(s.k_at_collapse) / np.log(s.n_experts)) if s.n_experts > 1 else 1.0,
        interval=load_balance.entropy_interval(load_balance.load_entropy_share),
        even=lambda s: 1.0,
        title="load entropy, share",
        least=None,
        better="higher",
        misleads=ENTROPY_BIASED,
    ),
]
GATE_WEIGHT = [
    replace(
        metric,
        name=f"gate_weight_{metric.name}",
        group="gate weight",
        meaning=f"Of gate weight instead of counts: {metric.meaning[0].lower()}{metric.meaning[1:]}",
        levels=(metric.levels[0], "the tokens’ own gates assigned to experts at random", metric.levels[2]),
        title=f"{metric.title or metric.name} of gate weight",
        extreme=metric.extreme if metric.name == "cv" else None,  # others are quantiles of counts
    )
    for metric in LOAD
    if metric.name != "unused"  # the same experts, counted or weighted
]
DROPPED = Metric(
    "dropped",
    "sums",
    "Share of expert slots left empty because capacity was exhausted.",
    "empty slots/(N k)",
    ("1", "0 without capacity", "0"),
    chance=lambda s: 0.0,
    sums=("dropped", "slots"),
    share=True,
    title="empty expert slots",
    chance_label="unlimited capacity",
    better="lower",
)
DECISION = [
    decision_metric(
        decision.routing_entropy,
        "Entropy of the router’s probabilities over all experts, mean over tokens, in nats.",
        "mean of −Σ p log p",
        ("0: one answer to everything, or log n: none", f"log n {UNIFORM}", PURPOSE),
        chance=lambda s: float(np.log(s.n_experts)),
        collapse=lambda s: 0.0,
        unit="nats",
        title="routing entropy",
        most=None,
        misleads="For sigmoid routers p is the sigmoids divided by their sum.",
    ),
    decision_metric(
        decision.chosen_entropy,
        "Entropy over the chosen k alone, their probabilities divided by their sum.",
        "mean of −Σ p′ log p′, p′ = p/Σ chosen p",
        ("0", "log k", PURPOSE),
        chance=lambda s: float(np.log(s.k_at_collapse)),
        collapse=lambda s: 0.0,
        unit="nats",
        title="chosen entropy",
        most=None,
    ),
    decision_metric(
        decision.confidence,
        "The largest probability, mean over tokens.",
        "mean of max p",
        ("1/n: undecided", f"1/n {UNIFORM}", PURPOSE),
        chance=lambda s: 1 / s.n_experts,
        collapse=lambda s: 1.0,
        share=True,
    ),
    decision_metric(
        decision.top_gap,
        "The largest probability minus the second, mean over tokens.",
        "mean of p₍₁₎ − p₍₂₎",
        ("0: undecided", "0", "1"),
        chance=lambda s: 0.0,
        collapse=lambda s: 1.0,
        share=True,
        title="top gap",
    ),
    decision_metric(
        decision.selection_margin,
        "The k-th selection score minus the next, bias included: distance to another choice.",
        "mean of s₍ₖ₎ − s₍ₖ₊₁₎, s the selection scores",
        ("0", f"0 {UNIFORM}", "depends on the scale of the scores"),
        chance=lambda s: 0.0,
        title="selection margin",
        misleads=(
            "Null where the scoring function was not recognised. Sigmoid and softmax scores differ in scale."
        ),
    ),
    decision_metric(
        decision.z_loss,
        "Mean squared log-sum-exp of the logits: how large logits have grown.",
        "mean of (log Σ exp x)²",
        ("unbounded", "(log n)² for logits of 0", "0"),
        chance=lambda s: float(np.log(s.n_experts) ** 2),
        title="z-loss",
    ),
]
BALANCING_LOSS = Metric(
    "load_balancing_loss",
    "probabilities",
    "Load-balancing loss of the Switch Transformer: shares of the load times mean probabilities.",
    "n Σᵢ fᵢ Pᵢ, fᵢ = cᵢ/(N k), Pᵢ the mean probability",
    ("n/k", "1 for even loads or a uniform router", "1"),
    load_balance.balancing_loss,
    lambda s: 1.0,
    lambda s: s.n_experts / s.k_at_collapse,
    title="load-balancing loss",
    even=lambda s: 1.0,
    least=None,
    better="lower",
    misleads=(
        "Mixtral and other models train with k times this. Values below 1 exist: experts with large "
        "probabilities that are rarely chosen. `corrected` uses products of different documents only."
    ),
)
SEQUENCE = [
    Metric(
        "sequential_consistency",
        "sums",
        "Share of tokens with the same first choice as the token before, within a document.",
        "P(topᵗ = topᵗ⁺¹)",
        (
            "1: routing ignores the text",
            "Σ c(c − 1)/(M(M − 1)), c the first choices per expert, M their sum",
            PURPOSE,
        ),
        chance=lambda s: s.same_first,
        collapse=lambda s: 1.0,
        extreme=load_balance.same_first_quantile,
        sums=("same_first", "neighbours"),
        share=True,
        title="sequential consistency",
    ),
    Metric(
        "adjacent_jaccard",
        "sums",
        "Overlap of the expert sets of adjacent tokens, within a document.",
        "mean of |S ∩ S′|/|S ∪ S′|",
        ("1: routing ignores the text", "Σⱼ P(j) j/(2k − j), hypergeometric", PURPOSE),
        chance=lambda s: jaccard_chance(s.n_experts, s.choices),
        collapse=lambda s: 1.0,
        sums=("jaccard", "neighbours"),
        share=True,
        title="adjacent Jaccard",
        misleads="Chance assumes even use of experts and, where k varies, the mean k of tokens with an "
        "expert: too high by about a tenth where experts choose tokens.",
    ),
]
OVERLAP = Metric(
    "expert_overlap",
    "pairs",
    "Jaccard index of two experts’ token sets, pairs weighted by their use.",
    "Σ cᵢ cⱼ Jᵢⱼ/Σ cᵢ cⱼ over pairs, J = |A ∩ B|/|A ∪ B|",
    (
        "1: the same experts for all tokens",
        "E[cᵢ cⱼ Jᵢⱼ]/E[cᵢ cⱼ] of N random tokens; for endless text and equal k ρ/(2 − ρ), "
        "ρ = (k − 1)/(n − 1)",
        "0",
    ),
    separation.expert_overlap,
    lambda s: separation.overlap_chance(s.tokens, s.n_experts, s.k, s.pairs),
    lambda s: 1.0 if (s.k - 1 if s.pairs is None else s.pairs) > 0 else np.nan,
    title="expert overlap",
    misleads="Undefined for k = 1.",
)
ROUTER = [
    Metric(
        "gram_orthogonality",
        "router",
        "How orthogonal router rows are.",
        "1 − ‖G − I‖_F/(n √2), G of normalised rows",
        (
            "1 − √((n − 1)/(2n)): 0.29 to 0.5",
            "1 − √((n − 1)/(2 n D)), 0.94 at D = 128",
            "1, or 1 − √((n − D)/(2 n D)) where n > D (Welch)",
        ),
        separation.gram_orthogonality,
        lambda s: separation.gram_chance(s.n_experts, s.d_model),
        lambda s: separation.gram_collapse(s.n_experts),
        title="Gram orthogonality",
        misleads="Random rows score above 0.9: the value alone is no achievement.",
    ),
    Metric(
        "router_similarity",
        "router",
        "Mean cosine of two router rows.",
        "mean over pairs of cos",
        ("1", "0", "0, or −1/(n − 1)"),
        separation.router_similarity,
        lambda s: 0.0,
        lambda s: 1.0,
        title="router cosine",
        least=None,
    ),
    Metric(
        "router_similarity_abs",
        "router",
        "Mean absolute cosine of two router rows.",
        "mean over pairs of |cos|",
        ("1", "√(2/(π D))", "0"),
        separation.router_similarity_abs,
        lambda s: float(np.sqrt(2 / (np.pi * s.d_model))),
        lambda s: 1.0,
        title="router |cos|",
    ),
    Metric(
        "router_similarity_max",
        "router",
        "Largest cosine of two router rows.",
        "max over pairs of cos",
        ("1", "about √(2 log(pairs)/D)", "0"),
        separation.router_similarity_max,
        lambda s: separation.similarity_max_chance(s.n_experts, s.d_model),
        lambda s: 1.0,
        title="router max cos",
        least=None,
    ),
]
SPECIALISATION = [
    Metric(
        "purity",
        "domains",
        "Mean over experts of the share of their main domain.",
        "mean of max_d P(d | i), every domain counted alike",
        (
            "1/number of domains",
            "mean over permutations of document labels; 1/number of domains for endless text",
            "1",
        ),
        specialisation.purity,
    ),
    Metric(
        "domain_information",
        "domains",
        "Mutual information of expert and domain, in nats: I(expert; domain).",
        "plug-in minus its mean over permutations of document labels",
        ("0: nothing", "0", "the entropy of the domains"),
        specialisation.domain_information,
        lambda s: 0.0,
        lambda s: 0.0,
        unit="nats",
        title="I(expert; domain)",
        most="largest",
        most_label="the maximum",
        sizes=DEPENDENCE,
    ),
    Metric(
        "token_information",
        "vocabulary",
        "Information of the token about the expert, in nats: held-out gain.",
        "E log p(e | token)/p(e), fitted on half of the documents",
        ("0 or below: nothing", PERMUTED, "the entropy of the loads"),
        vocabulary.token_information,
        collapse=lambda s: 0.0,
        unit="nats",
        title="I(expert; token)",
        most="largest",
        most_label="the maximum",
        sizes=DEPENDENCE,
        misleads="From a sample; run.json states its size.",
    ),
    *(
        Metric(
            f"vocabulary_specialisation_{role}",
            "vocabulary",
            f"Share of {words} that go to that token’s favourite expert, in the sample.",
            "Σ_v max_i N(v, i)/Σ_v N(v), tokens seen 8 times or more",
            ("chance", PERMUTED, "1"),
            vocabulary.vocabulary_specialisation,
            collapse=lambda s: 1.0,
            title=f"specialisation by {role} token",
        )
        for role, words in (
            ("input", "a token’s occurrences"),
            ("next", "the positions before a token"),
            ("predicted", "the positions where a token is predicted"),
        )
    ),
]
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *LOAD,
        DROPPED,
        *DECISION,
        BALANCING_LOSS,
        *SEQUENCE,
        OVERLAP,
        *ROUTER,
        *SPECIALISATION,
        *GATE_WEIGHT,
    )
}


def diagnostic(name: str, meaning: str, formula: str, levels: Levels, **more: Any) -> Metric:
    return Metric(name, "diagnostic", meaning, formula, levels, **{"most": None, **more})


# What a single router of the lab reports about itself in training: means over the passes of some steps. The
# router computes chance and collapse too.
DIAGNOSTICS: dict[str, Metric] = {
    metric.name: metric
    for metric in [
        diagnostic(
            "column_error",
            "SPECTRA: largest relative deviation of an expert’s share in Sinkhorn’s plan from an even share.",
            "max |Σₜ P − N/n|/(N/n), P Sinkhorn’s plan",
            ("n − 1: one expert has all", "the same costs without Sinkhorn: P their softmax", "0"),
            title="column error",
            chance_label="without Sinkhorn",
            scale="log",
            misleads=(
                "Of the plan, before the quota: loads follow its largest entries and may be less even."
            ),
        ),
        diagnostic(
            "direction_overlap",
            "SPECTRA: similarity of experts’ directions.",
            "mean over pairs of cos²",
            (
                "1: all are one",
                "1/R for random directions of width R",
                "0, or (n − R)/(R(n − 1)) where n > R (Welch)",
            ),
            title="overlap of directions",
            chance_label="random directions",
            scale="log",
        ),
        diagnostic(
            "key_cosine",
            "SoME: the mean cosine of two keys.",
            "(|Σ unit keys|² − n)/(n(n − 1))",
            ("1: all keys are one", "0, give or take √(2/(n(n − 1)D))", "0, or −1/(n − 1)"),
            title="key cosine",
            chance_label="random keys",
            least=None,
        ),
        diagnostic(
            "key_strength",
            "SoME: the mean strength ρ of keys.",
            "mean of ρ",
            ("0: no key is used", "1 until the decay begins", "1"),
            title="key strength",
            chance_label="before the decay",
            least=None,
        ),
        diagnostic(
            "weakened_keys",
            "SoME: share of keys that have lost strength and not yet regained it.",
            "#{ρ < 1}/n",
            ("1", "0 until the decay begins, then ⌈q(n − 1)⌉/n: used keys below their quantile q", "0"),
            title="weakened keys",
            chance_label="percentile alone",
        ),
        diagnostic(
            "bias_spread",
            "loss_free: spread of the selection biases.",
            "std of b over experts, ddof 0",
            (
                "the spread of a token’s own scores, mean over tokens: then the bias chooses, not the text",
                "0: scores that are even by themselves",
                "0",
            ),
            title="spread of the bias",
            chance_label="even scores",
            most="collapse",
            misleads="It changes by the rate in every step, so it is never quite 0.",
        ),
        diagnostic(
            "tokens_without_expert",
            "expert_choice: share of tokens that no expert chose.",
            "#{tokens of no expert}/N",
            (
                "1 − p: all experts choose the same tokens",
                "(1 − p)ⁿ for experts that choose a share p each, independently",
                "0",
            ),
            title="tokens without an expert",
            chance_label="independent experts",
        ),
        diagnostic(
            "experts_per_token",
            "expert_choice: mean number of experts per token; in training the capacity alone decides it.",
            "Σ tokens chosen/N",
            (PURPOSE, "n p, p = capacity factor × k/n", PURPOSE),
            title="experts per token",
            chance_label="capacity alone",
        ),
        diagnostic(
            "experts_per_token_spread",
            "expert_choice: spread of the number of experts per token.",
            "std over tokens of the number of experts",
            (
                "n √(p(1 − p)): all experts choose the same tokens",
                "√(n p(1 − p)) for experts that choose independently",
                "0: all tokens have equally many",
            ),
            title="spread of experts per token",
            chance_label="independent experts",
        ),
    ]
}
