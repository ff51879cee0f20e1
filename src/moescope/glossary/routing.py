"""The columns of traces."""

from __future__ import annotations

from moescope.glossary.column import Column

ROUTING: dict[str, Column] = {
    # --- routing on text
    "phase": Column(
        "text",
        (
            "prefill: documents read whole, as in training too. decode: the same documents read one "
            "token at a time through the cache, as in generation."
        ),
    ),
    "domain": Column(
        "text",
        (
            "The name a text was given with, train for what a training run read; in routing_layers "
            "empty for all domains together."
        ),
    ),
    "metric": Column(
        "text", "Which quantity; each is explained below, with its formula and reference values."
    ),
    "coactivation.expert_a": Column("int", "One expert of a pair; every ordered pair is listed."),
    "coactivation.expert_b": Column("int", "The other expert of the pair."),
    "role": Column(
        "text",
        (
            "Which token is meant: input, the token that was routed; next, the one that follows it "
            "in the text; predicted, the one "
            "the model holds most likely to follow."
        ),
    ),
    "token_id": Column("int", "The token's number in the vocabulary."),
    "token": Column("text", "The token as text; null without a tokenizer."),
    "step_a": Column("int", "The earlier checkpoint of two."),
    "step_b": Column("int", "The later checkpoint of two."),
    "document": Column("int", "The document's number in the order of reading, from 0."),
    "position": Column("int", "The token's place in its document, from 0."),
    "tokens": Column(
        "int", "How many tokens chose the expert; padding is never counted.", chance="N k/n of N tokens"
    ),
    "routing_layers.n_experts": Column("int", "Experts of the layer, n."),
    "routing_layers.top_k": Column(
        "int", "Expert slots per token, k; a token may leave some empty (capacity, expert choice)."
    ),
    "routing_layers.tokens": Column(
        "int", "Tokens the value is computed from, N: of the domain, or of the sample for vocabulary metrics."
    ),
    "coactivation.tokens": Column(
        "int", "How many tokens chose both experts.", chance="N k (k − 1)/(n (n − 1))"
    ),
    "tokens_a": Column("int", "How many tokens chose expert a."),
    "tokens_b": Column("int", "How many tokens chose expert b."),
    "layer_tokens": Column("int", "Tokens routed in the layer, N."),
    "domains.tokens": Column(
        "int", "How many of the domain's tokens chose the expert.", chance="the domain's tokens × k/n"
    ),
    "gate_weight": Column(
        "float",
        "The sum of the gates with which tokens chose the expert: how much it is heard, not only how often.",
        "Σₜ w[t, i]",
        chance="the sum of all gates, divided by n",
        title="gate weight",
        misleads=(
            "Gates of different models are scaled differently; compare shares, not sums. Null where "
            "a trace holds no gates."
        ),
    ),
    "value": Column("float", "The metric's value; null where it cannot be said."),
    "routing_layers.chance": Column(
        "float",
        (
            "What ideal random balanced routing gives: the same number of tokens, each choosing k of "
            "n experts at random."
        ),
        misleads=(
            "Tokens of a text are alike, so even a balanced router lies above the chance of load "
            "metrics on real text."
        ),
    ),
    "collapse": Column(
        "float",
        "What total collapse gives: every token goes to the same k experts. Null where that has no bound.",
    ),
    "low": Column(
        "float",
        "Lower end of the 95 % interval over documents.",
        "value − t · jackknife standard error, one of 256 groups of documents left out at a time",
        misleads=(
            "It says how much other documents like these would differ, not other kinds of text. Null "
            "under 20 documents."
        ),
    ),
    "high": Column("float", "Upper end of that interval."),
    "share_of_a": Column(
        "float",
        "Of the tokens that chose a, the share that chose b too.",
        "tokens(a, b)/tokens(a)",
        worst="1",
        chance="(k − 1)/(n − 1)",
        best="0",
        title="share of a",
    ),
    "lift": Column(
        "float",
        "How much more often two experts are chosen together than if each were chosen on its own.",
        "P(a, b)/(P(a) P(b))",
        worst="far above chance_lift: the pair acts as one expert",
        chance="chance_lift, not 1",
        best="chance_lift",
    ),
    "chance_lift": Column(
        "float",
        "The lift of random routing: below 1, since one token's experts differ.",
        "n (k − 1)/(k (n − 1))",
        title="chance lift",
    ),
    "affinity": Column(
        "float",
        "How much more a domain uses an expert than domains do on average.",
        "P(i | d)/P(i), every domain counted alike",
        worst="1 everywhere: nothing is specialised",
        chance="1",
        best="number of domains, for an expert of one domain",
        misleads="Few documents make it stray from 1 by themselves; read domain_information beside it.",
    ),
    "share": Column(
        "float",
        "The share of an expert's use that the domain makes up, if all domains were equally long.",
        "P(i | d)/Σ_d P(i | d)",
        worst="share_chance",
        chance="share_chance",
        best="1",
    ),
    "share_chance": Column(
        "float",
        "That share for an expert all domains use alike.",
        "1/number of domains",
        title="share by chance",
    ),
    "count": Column(
        "int",
        "How often the expert was chosen at this token, in the sample.",
        chance="the token's count × the expert's share",
    ),
    "vocabulary.share": Column(
        "float",
        "Of the expert's assignments in the sample, the share at this token.",
        "P(token | expert)",
        chance="P(token)",
    ),
    "vocabulary.lift": Column(
        "float",
        "How much more often the expert is chosen at this token than experts are on average.",
        "P(token | expert)/P(token)",
        worst="1",
        chance="1, with much spread for rare tokens",
        best="1/P(expert)",
    ),
    "routing_consistency": Column(
        "float",
        "Of a token's experts in one checkpoint, the share it has in the other too, on one text.",
        "mean over tokens of |S ∩ S′|/k",
        worst="0",
        chance="Σ f f′/k, f = c/N",
        best="1",
        title="routing consistency",
    ),
    "routing_consistency_chance": Column(
        "float",
        "The same for two independent routers with these usages.",
        "Σ f f′/k, f = c/N",
        title="consistency by chance",
    ),
    "routing_consistency_corrected": Column(
        "float",
        "The same beyond what the experts' usages alone would give.",
        "(o − e)/(1 − e), e = Σ f f′/k",
        worst="below 0",
        chance="0",
        best="1",
        title="corrected consistency",
    ),
    "top1_agreement": Column(
        "float",
        "The share of tokens with the same first choice in both checkpoints.",
        worst="0",
        chance="Σ f f′ of first choices",
        best="1",
        title="top-1 agreement",
    ),
    "top1_chance": Column(
        "float",
        "The same for two independent routers with these usages of first choices.",
        "Σ f f′, f = c/N",
        title="top-1 agreement by chance",
    ),
    "top1_corrected": Column(
        "float",
        "The same beyond chance.",
        "(o − e)/(1 − e)",
        worst="below 0",
        chance="0",
        best="1",
        title="corrected top-1",
    ),
    "usage_sigma": Column(
        "float",
        "How much experts' shares of the load move over the checkpoints from step_a to step_b.",
        "mean over experts of std(q) over checkpoints, ddof 0",
        worst="√(k/n (1 − k/n))/k",
        chance="about √((n − k)/(n² N k))",
        best="0",
        title="usage sigma",
    ),
    "kendall_tau": Column(
        "float",
        "Whether experts keep their order by usage.",
        "Kendall's τ-b of the two usages",
        worst="−1",
        chance="0",
        best="1",
        misleads="Ranks of even loads are noise: see tau_is_noise.",
        title="Kendall’s τ",
    ),
    "tau_is_noise": Column(
        "bool",
        "Whether loads of either checkpoint are so even that their ranks mean nothing.",
        "cv < 3 √((n − k)/(N k))",
        title="τ is noise",
    ),
    "saturation_top1": Column(
        "float",
        (
            "top1_agreement with the last checkpoint: how much of the final routing is already "
            "there. Null for other pairs."
        ),
        worst="0",
        chance="as top1_agreement",
        best="1",
        title="saturation, top-1",
    ),
    "saturation_topk": Column(
        "float",
        "routing_consistency with the last checkpoint. Null for other pairs.",
        worst="0",
        chance="as routing_consistency",
        best="1",
        title="saturation, top-k",
    ),
    "experts": Column("ints", "The experts the token chose, by falling gate."),
    "gates": Column("floats", "Their gates, as the block applied them; null where a trace holds none."),
    "entropy": Column(
        "float",
        "Entropy of the router's probabilities over all experts, in nats.",
        "−Σ p log p",
        worst="0",
        chance="log n",
        best="depends on the aim",
    ),
    "contexts.rank": Column("int", "1 for the largest gate, 5 places at most."),
    "before": Column("text", "The ten tokens before it, as text; null without a tokenizer."),
    "after": Column("text", "The eight tokens after it, as text; null without a tokenizer."),
    "gate": Column(
        "float",
        "The gate with which the token chose the expert.",
        chance="the expert's mean gate: its gate_weight over its tokens",
        misleads=(
            "The largest of many gates is large whatever the expert does: read what the places have "
            "in common, not the number."
        ),
    ),
    "of": Column(
        "text",
        (
            "What of two experts is compared. router: their router rows. outputs: the mean of what "
            "each gave, before its gate, over those of up to "
            "1,024 tokens that chose it (the first 64 of 16 documents, from every domain)."
        ),
        misleads=(
            "Mean outputs are of the tokens each expert was given: experts of other tokens differ in "
            "them even if their weights are alike."
        ),
    ),
    "expert_cosines.cosine": Column(
        "float",
        "The cosine of the angle between two experts' vectors; null where one of them is not known.",
        "v_a · v_b/(‖v_a‖ ‖v_b‖)",
        worst="1: the two cannot be told apart",
        chance="0, with |cos| about chance",
        best="depends on the aim",
    ),
    "dimensions": Column("int", "Length of the compared vectors, d."),
    "expert_cosines.chance": Column("float", "The mean |cos| of two random directions.", "√(2/(π d))"),
}
