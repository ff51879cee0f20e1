"""What the values of `routing_layers.metric` mean: the rest of the glossary, one text a metric.

Chance is the table's chance column and the worst case its collapse column, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from moescope.glossary.column import Column

METRICS: dict[str, Column] = {
    "cv": Column(
        "float",
        "Coefficient of variation of the loads c.",
        "std(c)/mean(c), ddof 0",
        worst="√(n/k − 1)",
        chance="√((n − k)/(N k))",
        best="0",
    ),
    "max_violation": Column(
        "float",
        "By how much the busiest expert exceeds the mean load.",
        "(max c − c̄)/c̄",
        worst="n/k − 1",
        chance="mean of 200 random routings",
        best="0",
        title="max violation",
    ),
    "max_over_mean": Column(
        "float",
        "The busiest expert’s load over the mean: max_violation + 1, as other tools print it.",
        "max c/c̄",
        worst="n/k",
        chance="mean of 200 random routings",
        best="1",
        title="max/mean",
    ),
    "gini": Column(
        "float",
        "Gini coefficient of the loads.",
        "(n + 1 − 2 Σ cumulative shares)/n, ascending",
        worst="1 − k/n",
        chance="about cv chance × √((n − 1)/(π n))",
        best="0",
        title="Gini",
    ),
    "unused": Column(
        "float",
        "The share of experts no token chose.",
        "#{cᵢ = 0}/n",
        worst="1 − k/n",
        chance="(1 − k/n)^N",
        best="0",
        misleads="It falls with the length of the text by itself.",
    ),
    "min_max_ratio": Column(
        "float",
        "The idlest expert’s load over the busiest one’s.",
        "min c/max c",
        worst="0",
        chance="mean of 200 random routings",
        best="1",
        title="min/max",
    ),
    "load_entropy": Column(
        "float",
        "Entropy of the loads’ shares q, in nats.",
        "−Σ q log q",
        worst="log k",
        chance="log n − (n − k)/(2 N k)",
        best="log n",
        title="load entropy",
    ),
    "load_entropy_bits": Column(
        "float",
        "The same in bits.",
        "−Σ q log₂ q",
        worst="log₂ k",
        chance="as load_entropy/log 2",
        best="log₂ n",
        title="load entropy, bits",
    ),
    "load_entropy_share": Column(
        "float",
        "The same as a share of the most there can be.",
        "−Σ q log q/log n",
        worst="log k/log n",
        chance="as load_entropy/log n",
        best="1",
        title="load entropy, share",
    ),
    "dropped": Column(
        "float",
        "The share of expert slots that went empty: capacity was spent.",
        "empty slots/(N k)",
        worst="1",
        chance="0 without capacity",
        best="0",
    ),
    "routing_entropy": Column(
        "float",
        (
            "How undecided the router is: entropy of its probabilities over all experts, mean over "
            "tokens, in nats."
        ),
        "mean of −Σ p log p",
        worst="0: one answer to everything, or log n: none",
        chance="log n for a router that knows nothing",
        best="depends on the aim",
        title="routing entropy",
        misleads="For sigmoid routers p is the sigmoids divided by their sum.",
    ),
    "chosen_entropy": Column(
        "float",
        "The same over the chosen k alone, their probabilities divided by their sum.",
        "mean of −Σ p′ log p′, p′ = p/Σ chosen p",
        worst="0",
        chance="log k",
        best="depends on the aim",
        title="chosen entropy",
    ),
    "confidence": Column(
        "float",
        "The largest probability, mean over tokens.",
        "mean of max p",
        worst="1/n: undecided",
        chance="1/n for a router that knows nothing",
        best="depends on the aim",
    ),
    "top_gap": Column(
        "float",
        "The largest probability less the second, mean over tokens.",
        "mean of p₍₁₎ − p₍₂₎",
        worst="0: undecided",
        chance="0",
        best="1",
        title="top gap",
    ),
    "selection_margin": Column(
        "float",
        "How near a choice was to being another: the k-th selection score less the next, bias included.",
        "mean of s₍ₖ₎ − s₍ₖ₊₁₎, s the scores the choice is made by",
        worst="0",
        chance="0 for a router that knows nothing",
        best="depends on the scores’ scale",
        title="selection margin",
        misleads=(
            "Null where the way of choosing was not recognised. Sigmoid and softmax scores have "
            "different scales."
        ),
    ),
    "z_loss": Column(
        "float",
        "Mean squared log-sum-exp of the logits: how large logits have grown.",
        "mean of (log Σ exp x)²",
        worst="unbounded",
        chance="(log n)² for logits of 0",
        best="0",
        title="z-loss",
    ),
    "sequential_consistency": Column(
        "float",
        "The share of tokens whose first choice is that of the token before, within a document.",
        "P(topᵗ = topᵗ⁺¹)",
        worst="1: the text is not looked at",
        chance="1/n",
        best="depends on the aim",
        title="sequential consistency",
    ),
    "adjacent_jaccard": Column(
        "float",
        "How much the expert sets of neighbouring tokens have in common, within a document.",
        "mean of |S ∩ S′|/|S ∪ S′|",
        worst="1: the text is not looked at",
        chance="Σⱼ P(j) j/(2k − j), hypergeometric",
        best="depends on the aim",
        title="adjacent Jaccard",
    ),
    "expert_overlap": Column(
        "float",
        "Mean Jaccard index of two experts’ token sets.",
        "mean over pairs of |A ∩ B|/|A ∪ B|",
        worst="1 for experts always chosen together",
        chance="ρ/(2 − ρ), ρ = (k − 1)/(n − 1)",
        best="0",
        title="expert overlap",
        misleads="Undefined for k = 1.",
    ),
    "gram_orthogonality": Column(
        "float",
        "How orthogonal router rows are.",
        "1 − ‖G − I‖_F/(n √2), G of normalised rows",
        worst="1 − √((n − 1)/(2n)): 0.29 to 0.5",
        chance="1 − √((n − 1)/(2 n D)), 0.94 at D = 128",
        best="1, or 1 − √((n − D)/(2 n D)) where n > D (Welch)",
        title="Gram orthogonality",
        misleads="Random rows score above 0.9: the value alone is no achievement.",
    ),
    "router_similarity": Column(
        "float",
        "Mean cosine of two router rows.",
        "mean over pairs of cos",
        worst="1",
        chance="0",
        best="0, or −1/(n − 1)",
        title="router cosine",
    ),
    "router_similarity_abs": Column(
        "float",
        "Mean absolute cosine of two router rows.",
        "mean over pairs of |cos|",
        worst="1",
        chance="√(2/(π D))",
        best="0",
        title="router |cos|",
    ),
    "router_similarity_max": Column(
        "float",
        "The most alike pair of router rows.",
        "max over pairs of cos",
        worst="1",
        chance="about √(2 log(pairs)/D)",
        best="0",
        title="router max cos",
    ),
    "purity": Column(
        "float",
        "Mean over experts of their main domain’s share.",
        "mean of max_d P(d | i), every domain counted alike",
        worst="1/number of domains",
        chance="mean over permutations of documents’ labels; 1/number of domains for endless text",
        best="1",
    ),
    "domain_information": Column(
        "float",
        "What an expert tells about the domain, in nats: I(expert; domain).",
        "plug-in less its mean over permutations of documents’ labels",
        worst="0: nothing",
        chance="0",
        best="the entropy of the domains",
        title="I(expert; domain)",
    ),
    "token_information": Column(
        "float",
        "What a token tells about the expert, in nats: held-out gain.",
        "E log p(e | token)/p(e), fitted on half of the documents",
        worst="0 or below: nothing",
        chance="the same with tokens shuffled within documents",
        best="the entropy of the loads",
        title="I(expert; token)",
        misleads="From a sample; its size stands in run.json.",
    ),
    **{
        f"vocabulary_specialisation_{role}": Column(
            "float",
            f"The share of {words} that go to that token’s favourite expert, in the sample.",
            "Σ_v max_i N(v, i)/Σ_v N(v), tokens seen 8 times or more",
            worst="chance",
            chance="the same with tokens shuffled within documents",
            best="1",
            title=f"specialisation by {role} token",
        )
        for role, words in (
            ("input", "a token’s occurrences"),
            ("next", "the places before a token"),
            ("predicted", "the places where a token is predicted"),
        )
    },
}
METRICS |= {
    f"gate_weight_{name}": replace(
        METRICS[name],
        meaning=(
            f"Of gate weight instead of counts: {METRICS[name].meaning[0].lower()}{METRICS[name].meaning[1:]}"
        ),
        chance="the tokens’ own gates dealt to experts at random",
        title=f"{METRICS[name].title or name} of gate weight",
    )
    for name in (
        "cv",
        "max_violation",
        "max_over_mean",
        "gini",
        "min_max_ratio",
        "load_entropy",
        "load_entropy_bits",
        "load_entropy_share",
    )
}
