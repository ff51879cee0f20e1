"""What the lab's routers say of themselves in training: values of `routing_layers.metric` that only one
router has.

Chance is the table's chance column and the worst case its collapse column. Each is the mean over the passes
of a stretch of steps.
"""

from __future__ import annotations

from moescope.glossary.column import Column

DIAGNOSTICS: dict[str, Column] = {
    "column_error": Column(
        "float",
        "SPECTRA: how far from even Sinkhorn leaves the busiest or idlest expert of its plan.",
        "max |Σₜ P − N/n|/(N/n), P Sinkhorn’s plan",
        worst="n − 1: one expert has all",
        chance="the same costs without Sinkhorn: P their softmax",
        best="0",
        title="column error",
        misleads=(
            "Of the plan, before the quota: choices are the plan’s largest entries, so loads may be "
            "less even."
        ),
    ),
    "direction_overlap": Column(
        "float",
        "SPECTRA: how alike experts’ directions are.",
        "mean over pairs of cos²",
        worst="1: all are one",
        chance="1/R for random directions of width R",
        best="0, or (n − R)/(R(n − 1)) where n > R (Welch)",
        title="overlap of directions",
    ),
    "key_cosine": Column(
        "float",
        "SoME: the mean cosine of two keys.",
        "(|Σ unit keys|² − n)/(n(n − 1))",
        worst="1: all keys are one",
        chance="0, give or take √(2/(n(n − 1)D))",
        best="0, or −1/(n − 1)",
        title="key cosine",
    ),
    "key_strength": Column(
        "float",
        "SoME: the mean strength ρ of keys.",
        "mean of ρ",
        worst="0: no key is heard",
        chance="1 until the decay begins",
        best="1",
        title="key strength",
    ),
    "weakened_keys": Column(
        "float",
        "SoME: the share of keys that have lost strength and not yet won it back.",
        "#{ρ < 1}/n",
        worst="1",
        chance=(
            "0 until the decay begins, then ⌈q(n − 1)⌉/n: how many of n used keys lie below their quantile q"
        ),
        best="0",
        title="weakened keys",
    ),
    "bias_spread": Column(
        "float",
        "loss_free: how far the biases for choosing lie apart.",
        "std of b over experts, ddof 0",
        worst=(
            "the spread of a token’s own scores over experts, mean over tokens: then the bias "
            "chooses, and not the text"
        ),
        chance="0: scores that are even by themselves",
        best="0",
        title="spread of the bias",
        misleads="It moves by the rate in every step, so it is never quite 0.",
    ),
    "tokens_without_expert": Column(
        "float",
        "expert_choice: the share of tokens that no expert took.",
        "#{tokens of no expert}/N",
        worst="1 − p: all experts take the same tokens",
        chance="(1 − p)ⁿ for experts that take a share p each, independently",
        best="0",
        title="tokens without an expert",
    ),
    "experts_per_token": Column(
        "float",
        "expert_choice: how many experts a token has on average; its capacity alone decides it in training.",
        "Σ tokens taken/N",
        worst="depends on the aim",
        chance="n p, p = capacity factor × k/n",
        best="depends on the aim",
        title="experts a token",
    ),
    "experts_per_token_spread": Column(
        "float",
        "expert_choice: how unevenly experts fall to tokens.",
        "std over tokens of how many experts each has",
        worst="n √(p(1 − p)): all experts take the same tokens",
        chance="√(n p(1 − p)) for experts that choose independently",
        best="0: all tokens have equally many",
        title="spread of experts a token",
    ),
}
