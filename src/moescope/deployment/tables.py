"""The tables of deploy: keys, columns and the meaning of each column."""

from __future__ import annotations

from moescope.tables import Column, Table, define_tables

# fmt: off
COLUMNS: dict[str, Column] = {
    # --- expert caches
    "residency.layer": Column("int", "The layer's number in the model, from 0; null: all layers together."),
    "policy": Column("text",
        "static: the experts used most on other documents, never changed. static_in_sample: those used most "
        "on the same tokens. lru: evict the least recently used. lfu: evict the least often used, counts "
        "survive eviction. belady: evict what is needed last, the optimum. lru_split: lru with the same "
        "bytes split over layers by what further slots gained on other documents."),
    "slots": Column("int", "Experts per layer that the cache holds; with lru_split the mean over layers."),
    "layer_slots": Column("float", "Slots of this layer; with lru_split the mean over both halves learned."),
    "residency.n_experts": Column("int", "Experts of the layer, n."),
    "residency.tokens": Column("int", "Tokens tested."),
    "choices": Column("int", "Choices tested: tokens times experts per token."),
    "hit_rate": Column("float", "Share of choices whose expert is in the cache.", "hits/choices",
        worst="0", chance="chance: the same policy, random routing", best="optimum", title="hit rate",
        misleads="Tokens come one after the other, as in decoding one request; batches share experts."),
    "residency.low": Column("float", "Lower end of the 95 % interval of hit_rate over documents.",
        "hit rate − t · jackknife standard error over groups of documents",
        misleads="Null under 20 documents. It covers other documents like these."),
    "residency.high": Column("float", "Upper end of that interval."),
    "token_hit_rate": Column("float",
        "Share of tokens whose choices in the layer all hit; mean over layers where layer is null.",
        worst="0", best="1", title="token hit rate"),
    "residency.optimum": Column("float",
        "Hit rate of Belady's optimum from the same start on the same tokens: from an empty cache for lru "
        "and lfu, from the preloaded list for static. Null for lru_split, and for static with --cold.",
        best="1 − compulsory, from an empty cache"),
    "residency.chance": Column("float",
        "Hit rate of the same policy on random routing: every token's experts drawn uniformly, as many as in "
        "the trace, replayed (static: a list chosen without the text, exactly).", "static: slots/n"),
    "compulsory": Column("float",
        "Share of choices that are the first of their expert: no cache that starts empty holds them.",
        title="compulsory misses"),
    "loads_per_token": Column("float", "Experts loaded per token.", "misses/tokens", worst="k per layer",
        best="0", title="loads per token", unit="experts"),
    "bytes_per_token": Column("float", "Bytes loaded per token; null where the size of experts is unknown.",
        "loads per token × bytes per expert", title="bytes per token", unit="bytes"),
    "ms_per_token": Column("float", "Time per token to load them at --bandwidth, nothing overlapped.",
        "bytes per token/bandwidth", title="loading time per token", unit="ms",
        misleads="Latency of single reads and overlap with computation are not part of it."),
    "uniform": Column("float",
        "Of lru_split: the hit rate of lru with equal slots in all layers, on the same tokens.",
        title="even split"),
    # --- slots that are needed
    "slots_needed.layer": Column("int", "The layer's number; null: the same slots in all layers."),
    "slots_needed.n_experts": Column("int", "Experts of the layer, n."),
    "slots_needed.share": Column("float", "Share of the choices to be held."),
    "slots_needed.slots": Column("int",
        "Fewest slots per layer, from k on, whose hit rate reaches the share; null where even the slots that "
        "were replayed are too few.", "min {s ≥ k: hit rate(s) ≥ share}", worst="n, or null",
        chance="chance", best="that of belady, for caches that start empty", title="slots needed",
        misleads="An estimate from one trace without interval: near the share, a few documents decide."),
    "slots_needed.hit_rate": Column("float", "Hit rate with as many slots."),
    "slots_needed.chance": Column("int", "Slots that the same policy needs on random routing."),
    "replayed": Column("int", "Most slots with which the policy was replayed: n for static lists and lru."),
    # --- prefetching
    "prefetch.layer": Column("int", "The layer that is predicted; null: all layers together."),
    "predictor": Column("text",
        "What names the experts ahead. static: those used most on other documents. static_in_sample: those "
        "used most on the same tokens. previous_token: those chosen most recently in the document. "
        "previous_layer: those that most often follow the previous layer's choices, learned on other "
        "documents, by the sum of P(expert | previous expert). next_router: those that the layer's router "
        "ranks highest about the state that the MoE layer before it got (trace --probe-next)."),
    "budget": Column("int", "Experts named per token and layer: k, 2k and 4k."),
    "prefetch.n_experts": Column("int", "Experts of the layer, n."),
    "prefetch.tokens": Column("int",
        "Tokens tested; previous_token skips a document's first token, previous_layer takes at most 131,072 "
        "per half of the documents, evenly spaced."),
    "prefetch.choices": Column("int", "Choices tested."),
    "recall": Column("float", "Share of choices whose expert was named.", "named choices/choices",
        worst="0", chance="budget/n", best="1",
        misleads="Of previous_token, experts chosen in earlier documents are not named."),
    "prefetch.low": Column("float", "Lower end of the 95 % interval of recall over documents.",
        misleads="Null under 20 documents."),
    "prefetch.high": Column("float", "Upper end of that interval."),
    "prefetch.optimum": Column("float", "Recall of perfect foresight: 1, as budgets are at least k."),
    "prefetch.chance": Column("float", "Recall of a random list of as many experts.", "budget/n"),
    # --- placement
    "placement.layer": Column("int", "The layer's number in the model; null: all layers together."),
    "method": Column("text",
        "contiguous: experts in order, what servers do by default. random: mean of 8 random placements. "
        "balanced: redundant copies of the busiest experts, then each to the least loaded device with room "
        "(as EPLB). coactivation: balanced, then swapped so that experts chosen together share devices, up "
        "to 1.1 times the mean load. The last two are learned on other documents."),
    "devices": Column("int", "Devices that share the experts of a layer, G."),
    "nodes": Column("int", "Nodes that hold the devices, N."),
    "redundant": Column("int", "Copies of experts beyond one each, R."),
    "batch_tokens": Column("int", "Tokens per batch, B.", title="batch"),
    "balancedness": Column("float",
        "Mean over max load of the devices, over all tested tokens; an expert's copies share its load. All "
        "layers: sum of means over sum of maxima, as layers run one after the other.",
        "Σ_d load(d)/(G max_d load(d))", worst="1/G", chance="balancedness_chance", best="1"),
    "placement.low": Column("float", "Lower end of the 95 % interval of balancedness over documents.",
        misleads="Null under 20 documents, and for random placements and all layers together."),
    "placement.high": Column("float", "Upper end of that interval."),
    "batch_balancedness": Column("float",
        "Mean over batches of B successive tokens of mean over max load; a short rest is skipped.",
        worst="1/G", chance="batch_balancedness_chance", best="1", title="balancedness per batch"),
    "cross_device": Column("float",
        "Distinct remote devices that a token is sent to, its own device being any; all layers: their sum.",
        "(1 − 1/G) Σ_d (1 − Π_e (1 − share(e, d))), e over the token's experts",
        chance="cross_device_chance", best="cross_device_least", title="remote devices", unit="per token",
        misleads="From at most 65,536 tokens per layer and half of the documents."),
    "cross_node": Column("float", "The same for nodes; 0 for one node.", chance="cross_node_chance", best="0",
        title="remote nodes", unit="per token"),
    "balancedness_chance": Column("float", "Balancedness of random placements."),
    "batch_balancedness_chance": Column("float", "Balancedness per batch of random placements."),
    "cross_device_chance": Column("float", "Remote devices per token of random placements."),
    "cross_node_chance": Column("float", "Remote nodes per token of random placements."),
    "cross_device_least": Column("float",
        "Remote devices per token if all of a token's experts were on as few devices as have room for them.",
        "⌈k/((n + R)/G)⌉ (1 − 1/G)"),
    # --- coverage
    "coverage.domain": Column("text", "The name a text was given with; empty: all documents together."),
    "coverage.tokens": Column("int", "Tokens that chose the expert.", chance="N k/n of N tokens"),
    "coverage.chance": Column("float", "Tokens per expert if all experts were used equally.", "N k/n"),
    "minimum": Column("int", "Tokens that every expert should get (--min-tokens)."),
    "coverage.below": Column("bool", "Whether the expert got fewer tokens than the minimum."),
    "coverage.documents": Column("int", "Documents in which the expert was chosen."),
    "documents_needed": Column("float",
        "Documents like these after which the expected tokens reach the minimum; null without a token.",
        "⌈minimum × documents/tokens⌉", title="documents needed",
        misleads="An extrapolation of the mean; text of another kind may use the expert more."),
    "coverage_curve.domain": Column("text", "The domain; empty: all documents together."),
    "coverage_curve.documents": Column("int", "Number of documents."),
    "coverage_curve.below": Column("float",
        "Experts of all layers with fewer tokens than the minimum: mean over 50 subsamples of that many "
        "documents, or extrapolated at each expert's mean rate.", best="0", worst="all experts"),
    "coverage_curve.low": Column("float",
        "2.5th percentile: over subsamples, or over documents resampled with replacement."),
    "coverage_curve.high": Column("float", "97.5th percentile."),
    "extrapolated": Column("bool", "Whether the trace has fewer documents than that."),
    "experts": Column("int", "Experts of all layers."),
    "coverage_curve.unused": Column("int", "Experts of all layers without a token."),
    "needed": Column("float",
        "Documents like these until the least used expert is expected to reach the minimum; null where an "
        "expert has no token.", "max over experts of documents_needed"),
    "needed_low": Column("float", "2.5th percentile of it over documents resampled with replacement."),
    "needed_high": Column("float", "97.5th percentile; null where resamples leave an expert without token."),
}

TABLES: dict[str, Table] = define_tables(
    COLUMNS,
    Table("residency", "Hit rate of expert caches per policy, size and layer; layer null: all together.",
        ("policy", "slots", "layer"),
        ("n_experts", "layer_slots", "tokens", "choices", "hit_rate", "low", "high", "token_hit_rate",
         "optimum", "chance", "compulsory", "loads_per_token", "bytes_per_token", "ms_per_token", "uniform"),
        optional=("layer",)),
    Table("slots_needed", "Fewest slots per layer that hold 80 % of the choices; layer null: all alike.",
        ("policy", "layer"), ("n_experts", "share", "slots", "hit_rate", "chance", "replayed"),
        optional=("layer", "slots", "chance")),
    Table("prefetch", "Recall of predicted experts per predictor, budget and layer; layer null: all.",
        ("predictor", "budget", "layer"),
        ("n_experts", "tokens", "choices", "recall", "low", "high", "optimum", "chance"),
        optional=("layer",)),
    Table("placement", "Balance and traffic of placements on devices, per method and layer; layer null: all.",
        ("method", "layer"),
        ("devices", "nodes", "redundant", "batch_tokens", "balancedness", "low", "high", "batch_balancedness",
         "cross_device", "cross_node", "balancedness_chance", "batch_balancedness_chance",
         "cross_device_chance", "cross_node_chance", "cross_device_least"),
        optional=("layer",)),
    Table("coverage", "Tokens per expert against a minimum, by domain.",
        ("domain", "layer", "expert"),
        ("tokens", "chance", "minimum", "below", "documents", "documents_needed")),
    Table("coverage_curve", "Experts below the minimum by number of documents, and documents needed.",
        ("domain", "documents"),
        ("below", "low", "high", "extrapolated", "experts", "unused", "minimum", "needed", "needed_low",
         "needed_high")),
)
# fmt: on
