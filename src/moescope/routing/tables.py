"""The tables of a trace and of a monitored training: keys, columns and the meaning of each column."""

from __future__ import annotations

from moescope.routing.metrics import DIAGNOSTICS, METRICS
from moescope.tables import Column, Table, define_tables

PURPOSE = "depends on the purpose"

COLUMNS: dict[str, Column] = {
    # --- routing on text
    "phase": Column(
        "text",
        "prefill: documents read at once; decode: the same documents one token at a time, with a cache.",
    ),
    "metric": Column("text", "Name of the metric; see below for formula and reference values."),
    "coactivation.expert_a": Column("int", "One expert of a pair; every ordered pair is listed."),
    "coactivation.expert_b": Column("int", "The other expert of the pair."),
    "role": Column(
        "text",
        "input: the routed token; next: the token after it; predicted: the most likely token after it.",
    ),
    "token_id": Column("int", "The token's number in the vocabulary."),
    "token": Column("text", "The token as text; null without a tokenizer."),
    "step_a": Column("int", "The earlier of two checkpoints."),
    "step_b": Column("int", "The later of two checkpoints."),
    "document": Column("int", "The document's number in reading order, from 0."),
    "position": Column("int", "The token's position in its document, from 0."),
    "tokens": Column("int", "Tokens that chose the expert, without padding.", chance="N k/n of N tokens"),
    "routing_layers.n_experts": Column("int", "Experts of the layer, n."),
    "routing_layers.top_k": Column(
        "int", "Expert slots per token, k; a token may leave some empty (capacity, expert choice)."
    ),
    "routing_layers.tokens": Column(
        "int", "Tokens the value is computed from, N: of the domain, or of the sample for vocabulary metrics."
    ),
    "coactivation.tokens": Column("int", "Tokens that chose both experts.", chance="N k (k − 1)/(n (n − 1))"),
    "tokens_a": Column("int", "Tokens that chose expert a."),
    "tokens_b": Column("int", "Tokens that chose expert b."),
    "layer_tokens": Column("int", "Tokens routed in the layer, N."),
    "domains.tokens": Column(
        "int", "Tokens of the domain that chose the expert.", chance="the domain's tokens × k/n"
    ),
    "gate_weight": Column(
        "float",
        "Sum of the gates with which tokens chose the expert.",
        "Σₜ w[t, i]",
        chance="the sum of all gates, divided by n",
        title="gate weight",
        misleads="Models scale gates differently; compare shares. Null where a trace holds no gates.",
    ),
    "value": Column("float", "The metric's value; null where it is undefined."),
    "routing_layers.chance": Column(
        "float",
        "Value under ideal random balanced routing: as many tokens, each choosing k of n experts at random.",
        misleads="Tokens of a text are correlated, so a balanced router lies above it in load metrics.",
    ),
    "collapse": Column(
        "float", "Value when every token chooses the same k experts; null where there is no bound."
    ),
    "low": Column(
        "float",
        "Lower end of the 95 % interval over documents.",
        "value − t · jackknife standard error over 256 groups of documents",
        misleads="It covers other documents like these, not other kinds of text. Null under 20 documents.",
    ),
    "high": Column("float", "Upper end of that interval."),
    "share_of_a": Column(
        "float",
        "Share of a's tokens that also chose b.",
        "tokens(a, b)/tokens(a)",
        worst="1",
        chance="(k − 1)/(n − 1)",
        best="0",
        title="share of a",
    ),
    "lift": Column(
        "float",
        "Co-activation relative to independent choices.",
        "P(a, b)/(P(a) P(b))",
        worst="far above chance_lift: the pair acts as one expert",
        chance="chance_lift, not 1",
        best="chance_lift",
    ),
    "chance_lift": Column(
        "float",
        "Lift of random routing: below 1, since the experts of a token differ.",
        "n (k − 1)/(k (n − 1))",
        title="chance lift",
    ),
    "affinity": Column(
        "float",
        "A domain's use of an expert relative to the mean over domains.",
        "P(i | d)/P(i), every domain counted alike",
        worst="1 everywhere: no specialisation",
        chance="1",
        best="number of domains, for an expert of one domain",
        misleads="With few documents it deviates from 1 by chance; compare domain_information.",
    ),
    "share": Column(
        "float",
        "The domain's share of the expert's use, if all domains were equally long.",
        "P(i | d)/Σ_d P(i | d)",
        worst="share_chance",
        chance="share_chance",
        best="1",
    ),
    "share_chance": Column(
        "float",
        "That share for an expert that all domains use equally.",
        "1/number of domains",
        title="share by chance",
    ),
    "count": Column(
        "int",
        "Times the expert was chosen at this token, in the sample.",
        chance="the token's count × the expert's share",
    ),
    "vocabulary.share": Column(
        "float",
        "Share of the expert's assignments in the sample that are at this token.",
        "P(token | expert)",
        chance="P(token)",
    ),
    "vocabulary.lift": Column(
        "float",
        "Frequency of the token for this expert relative to all experts.",
        "P(token | expert)/P(token)",
        worst="1",
        chance="1, with much spread for rare tokens",
        best="1/P(expert)",
    ),
    "routing_consistency": Column(
        "float",
        "Share of a token's experts that both checkpoints choose, on the same text.",
        "mean over tokens of |S ∩ S′|/k",
        worst="0",
        chance="routing_consistency_chance",
        best="1",
        title="routing consistency",
    ),
    "routing_consistency_chance": Column(
        "float",
        "Routing consistency of two independent routers with these usages.",
        "Σ f f′/k, f = c/N",
        title="consistency by chance",
    ),
    "routing_consistency_corrected": Column(
        "float",
        "Routing consistency corrected for chance.",
        "(o − e)/(1 − e), e = Σ f f′/k",
        worst="below 0",
        chance="0",
        best="1",
        title="corrected consistency",
    ),
    "top1_agreement": Column(
        "float",
        "Share of tokens with the same first choice in both checkpoints.",
        worst="0",
        chance="top1_chance",
        best="1",
        title="top-1 agreement",
    ),
    "top1_chance": Column(
        "float",
        "Top-1 agreement of two independent routers with these usages.",
        "Σ f f′, f = c/N of first choices",
        title="top-1 agreement by chance",
    ),
    "top1_corrected": Column(
        "float",
        "Top-1 agreement corrected for chance.",
        "(o − e)/(1 − e)",
        worst="below 0",
        chance="0",
        best="1",
        title="corrected top-1",
    ),
    "usage_sigma": Column(
        "float",
        "Variation of experts' load shares over the checkpoints from step_a to step_b.",
        "mean over experts of std(q) over checkpoints, ddof 0",
        worst="√(k/n (1 − k/n))/k",
        chance="about √((n − k)/(n² N k))",
        best="0",
        title="usage sigma",
    ),
    "kendall_tau": Column(
        "float",
        "Rank correlation of the experts' usages.",
        "Kendall's τ-b of the two usages",
        worst="−1",
        chance="0",
        best="1",
        misleads="Ranks of even loads are noise: see tau_is_noise.",
        title="Kendall’s τ",
    ),
    "tau_is_noise": Column(
        "bool",
        "Whether the loads of either checkpoint are so even that their ranks are noise.",
        "cv < 3 √((n − k)/(N k))",
        title="τ is noise",
    ),
    "saturation_top1": Column(
        "float",
        "top1_agreement with the last checkpoint; null for other pairs.",
        worst="0",
        chance="top1_chance",
        best="1",
        title="saturation, top-1",
    ),
    "saturation_topk": Column(
        "float",
        "routing_consistency with the last checkpoint; null for other pairs.",
        worst="0",
        chance="routing_consistency_chance",
        best="1",
        title="saturation, top-k",
    ),
    "experts": Column("ints", "The experts the token chose, by falling gate."),
    "gates": Column("floats", "Their gates, as the block applied them; null where a trace holds none."),
    "entropy": Column(
        "float",
        "Entropy of the router's probabilities over all experts.",
        "−Σ p log p",
        worst="0",
        chance="log n",
        best=PURPOSE,
        unit="nats",
    ),
    "contexts.rank": Column("int", "1 for the largest gate, at most 5 places."),
    "before": Column("text", "The ten tokens before it as text; null without a tokenizer."),
    "after": Column("text", "The eight tokens after it as text; null without a tokenizer."),
    "gate": Column(
        "float",
        "The gate with which the token chose the expert.",
        chance="the expert's mean gate: its gate_weight over its tokens",
        misleads="The largest of many gates is always large: look at what the places have in common.",
    ),
    "of": Column(
        "text",
        "router: router rows; outputs: mean outputs before the gate (first 64 tokens of 16 documents).",
        misleads="Mean outputs depend on the tokens an expert gets, so they differ even for equal weights.",
    ),
    "expert_cosines.cosine": Column(
        "float",
        "Cosine of two experts' vectors; null where one is unknown.",
        "v_a · v_b/(‖v_a‖ ‖v_b‖)",
        worst="1: identical directions",
        chance="0, with |cos| about chance",
        best=PURPOSE,
    ),
    "expert_cosines.chance": Column("float", "Mean |cos| of two random directions.", "√(2/(π d))"),
    "dimensions": Column("int", "Length of the compared vectors, d."),
    # --- training
    "steps.tokens": Column(
        "int", "Real tokens since the start of training, over all ranks and micro-batches."
    ),
    "lm_loss": Column(
        "float",
        "The loss without the auxiliary loss.",
        "loss − coefficient × auxiliary loss",
        best="the entropy of the text",
    ),
    "aux_loss": Column(
        "float",
        "Load-balancing loss before its coefficient; null where the model has none.",
        chance="k for a router that spreads tokens evenly (Mixtral's formula)",
    ),
    "validation_loss": Column("float", "Loss on the validation text; null at steps without an evaluation."),
    "validation_loss_published": Column(
        "float", "Validation loss by the formula of a published comparison; null where there is none."
    ),
    "learning_rate": Column("float", "Learning rate of the step."),
    "gradient_norm": Column("float", "Gradient norm before clipping.", "‖∂ loss/∂ all weights‖"),
    "tokens_per_second": Column("float", "Real tokens per second since the row before, over all ranks."),
    "step_seconds": Column("float", "Seconds per step since the row before."),
    "peak_memory_bytes": Column("int", "Peak memory of the first rank's device; null on a CPU."),
    "lm_gradient_norm": Column(
        "float",
        "Gradient norm of the language-model loss at the layer's router.",
        "‖∂ lm_loss/∂ W_router‖",
        worst="0: the router learns nothing from the text, as with renormalised top-1 gates",
        best=PURPOSE,
    ),
    "aux_gradient_norm": Column(
        "float",
        "Gradient norm of the auxiliary loss at the router, coefficient included; null where there is none.",
        "‖∂ (coefficient × aux_loss)/∂ W_router‖",
    ),
    "alerts.expert": Column("int", "The expert; null where the alert is about the layer."),
    "kind": Column(
        "text",
        (
            "dead: an expert that no token chose for that many steps. max_load: largest load over the mean. "
            "unused: share of experts without a token. entropy: the router is nearly certain of every token, "
            "so its gates learn little; not raised for routers with low entropy by design. nan: gates or "
            "logits are not numbers."
        ),
    ),
    "alerts.value": Column("float", "The measured value; null for nan."),
    "threshold": Column("float", "The setting from which on an alert is raised."),
    "message": Column("text", "The alert in a sentence."),
}

TABLES: dict[str, Table] = define_tables(
    COLUMNS,
    Table(
        "load",
        "Tokens and gate weight per expert, one row per domain and phase.",
        ("step", "layer", "phase", "domain", "expert"),
        ("tokens", "gate_weight"),
    ),
    Table(
        "routing_layers",
        "Every routing metric per layer with its references and interval; domain empty: all together.",
        ("step", "layer", "phase", "domain", "metric"),
        ("value", "chance", "collapse", "low", "high", "n_experts", "top_k", "tokens"),
        terms={name: metric.column for name, metric in (METRICS | DIAGNOSTICS).items()},
    ),
    Table(
        "coactivation",
        "Experts chosen by the same token: every ordered pair. Of prefill where traced, else decode.",
        ("step", "layer", "expert_a", "expert_b"),
        ("tokens", "tokens_a", "tokens_b", "layer_tokens", "share_of_a", "lift", "chance_lift"),
    ),
    Table(
        "domains",
        "Use of experts by domains, every domain counted alike. Of prefill where traced, else decode.",
        ("step", "layer", "expert", "domain"),
        ("tokens", "affinity", "share", "share_chance"),
    ),
    Table(
        "vocabulary",
        "The 50 most distinctive tokens per expert and role; from a sample of at most a million tokens.",
        ("step", "layer", "expert", "role", "token_id"),
        ("token", "count", "share", "lift"),
    ),
    Table(
        "stability",
        "Agreement of two checkpoints' routing of the same tokens; from the same sample.",
        ("layer", "step_a", "step_b"),
        (
            "routing_consistency",
            "routing_consistency_chance",
            "routing_consistency_corrected",
            "top1_agreement",
            "top1_chance",
            "top1_corrected",
            "usage_sigma",
            "kendall_tau",
            "tau_is_noise",
            "saturation_top1",
            "saturation_topk",
        ),
    ),
    Table(
        "tokens",
        "Every token with the experts it chose (--save-tokens). Of prefill where traced, else decode.",
        ("step", "document", "position", "layer"),
        ("token_id", "domain", "phase", "experts", "gates", "entropy"),
    ),
    Table(
        "contexts",
        "Places where an expert's gate is largest, one per window and phrase; from the vocabulary's sample.",
        ("step", "layer", "expert", "rank"),
        ("document", "position", "domain", "token_id", "token", "before", "after", "gate"),
    ),
    Table(
        "expert_cosines",
        "Similarity of every two experts by router rows and by mean outputs: the source of expert maps.",
        ("step", "layer", "of", "expert_a", "expert_b"),
        ("cosine", "chance", "dimensions"),
    ),
    Table("token_text", "Text of the ids in the tokens table (--save-tokens).", ("token_id",), ("token",)),
    Table(
        "steps",
        "Loss, speed and memory of the training, at the logged steps.",
        ("step",),
        (
            "tokens",
            "train_loss",
            "lm_loss",
            "aux_loss",
            "validation_loss",
            "validation_loss_published",
            "learning_rate",
            "gradient_norm",
            "tokens_per_second",
            "step_seconds",
            "peak_memory_bytes",
        ),
    ),
    Table(
        "router_gradients",
        "Gradient norm of each loss at each router, at sampled steps.",
        ("step", "layer"),
        ("lm_gradient_norm", "aux_gradient_norm"),
    ),
    Table(
        "alerts",
        "Problems in training, at the step and layer where they were first seen.",
        ("step", "layer", "expert", "kind"),
        ("value", "threshold", "message"),
        optional=("expert",),
    ),
)

TRACE_TABLES = {name: TABLES[name] for name in TABLES if name not in ("steps", "router_gradients", "alerts")}
