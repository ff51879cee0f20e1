"""The tables of deploy: keys, columns and the meaning of each column."""

from __future__ import annotations

from typing import Any

from moescope.tables import Column, Table, define_tables

# fmt: off
RATE: dict[str, Any] = {"least": 0, "most": 1, "interval": ("low", "high"), "better": "higher"}
RANDOM: dict[str, Any] = {"chance_label": "random routing"}
PLACED: dict[str, Any] = {"chance_label": "random placement"}
COLUMNS: dict[str, Column] = {
    # --- expert caches
    "residency.layer": Column("int", "The layer's number in the model, from 0; null: all layers together."),
    "policy": Column("text",
        "static: the experts used most on other documents, never changed. static_in_sample: those used most "
        "on the same tokens. lru: evict the least recently used. lfu: evict the least often used, counts "
        "survive eviction. belady: start with the experts needed first, evict or leave out what is needed last; "
        "no policy with these slots holds more. lru_split: lru with the same bytes split over layers by what "
        "further slots gained on other documents.",
        names={"lru": "LRU", "static": "static list", "belady": "best possible, equal slots", "lfu": "LFU",
               "static_in_sample": "static list in sample", "lru_split": "LRU, split over layers"}),
    "slots": Column("int", "Experts per layer that the cache holds; with lru_split the mean over layers.",
        label="slots per layer"),
    "lead": Column("bool", "Whether it is the number of slots nearest to half of the experts."),
    "layer_slots": Column("float", "Slots of this layer; with lru_split the mean over both halves learned."),
    "residency.n_experts": Column("int", "Experts of the layer, n."),
    "residency.tokens": Column("int", "Tokens tested, the same for all policies: all; of a single document the second half."),
    "choices": Column("int", "Choices tested: tokens times experts per token."),
    "hit_rate": Column("float", "Share of choices whose expert is in the cache.", "hits/choices",
        at_worst="0", at_chance="chance: the same policy, random routing", at_best="optimum", label="hit rate",
        misleads="Tokens come one after the other, as in decoding one request; batches share experts.",
        chance="chance", guides={0.8: "80 %", 0.9: "90 %", 0.95: "95 %"}, **RANDOM, **RATE),
    "residency.low": Column("float", "Lower end of the 95 % interval of hit_rate over documents.",
        "hit rate − t · jackknife standard error over groups of documents",
        misleads="Null under 20 documents. It covers other documents like these."),
    "residency.high": Column("float", "Upper end of that interval."),
    "token_hit_rate": Column("float",
        "Share of tokens whose choices in the layer all hit; mean over layers where layer is null.",
        at_worst="0", at_best="1", label="token hit rate"),
    "residency.optimum": Column("float",
        "Hit rate of belady on the same tokens: the most of any policy with these slots that loads an expert "
        "only when it is chosen, whatever its cache holds at the start. Null for lru_split."),
    "from_empty": Column("float",
        "Of lru: hit rate from an empty cache at the first tested token. It differs from hit_rate for a single "
        "document, whose first half fills the cache.", label="from an empty cache"),
    "residency.chance": Column("float",
        "Hit rate of the same policy on random routing: every token's experts drawn uniformly, as many as in "
        "the trace, replayed (static: a list chosen without the text, exactly).", "static: slots/n"),
    "compulsory": Column("float",
        "Share of choices that are the first of their expert: no cache that starts empty holds them.",
        label="compulsory misses"),
    "loads_per_token": Column("float", "Experts loaded per token.", "misses/tokens", at_worst="k per layer",
        at_best="0", label="loads per token", unit="experts", least=0, chance="loads_chance", better="lower",
        **RANDOM),
    "loads_chance": Column("float", "Experts loaded per token by the same policy on random routing.",
        "choices/tokens × (1 − chance)", label="loads by chance"),
    "bytes_per_token": Column("float", "Bytes loaded per token; null where the size of experts is unknown.",
        "loads per token × bytes per expert", label="bytes per token", unit="bytes", least=0, chance="bytes_chance",
        better="lower", **RANDOM),
    "bytes_chance": Column("float", "Bytes loaded per token on random routing.", label="bytes by chance"),
    "ms_per_token": Column("float", "Time per token to load them at --bandwidth, nothing overlapped.",
        "bytes per token/bandwidth", label="loading time per token", unit="ms", least=0, chance="ms_chance", better="lower", **RANDOM,
        misleads="Latency of single reads and overlap with computation are not part of it."),
    "resident_bytes": Column("float", "Bytes of the experts that the slots hold, in all layers; null where the size of experts is unknown.",
        "Σ layers slots × bytes per expert", label="resident", unit="bytes"),
    "ms_chance": Column("float", "Time per token to load them on random routing.", label="time by chance"),
    "uniform": Column("float",
        "Of lru_split: the hit rate of lru with equal slots in all layers, on the same tokens.",
        label="even split"),
    # --- slots that are needed
    "slots_needed.layer": Column("int", "The layer's number; null: the same slots in all layers."),
    "slots_needed.n_experts": Column("int", "Experts of the layer, n."),
    "slots_needed.share": Column("float", "Share of the choices to be held."),
    "slots_needed.slots": Column("int",
        "Fewest slots per layer, from k on, whose hit rate reaches the share; null where even the slots that "
        "were replayed are too few.", "min {s ≥ k: hit rate(s) ≥ share}", at_worst="n, or null",
        at_chance="chance", at_best="that of belady", label="slots needed",
        misleads="An estimate from one trace without interval: near the share, a few documents decide."),
    "slots_needed.hit_rate": Column("float", "Hit rate with as many slots."),
    "slots_needed.chance": Column("int", "Slots that the same policy needs on random routing."),
    "replayed": Column("int", "Most slots with which the policy was replayed: n for static lists and lru."),
    # --- prefetching
    "prefetch.layer": Column("int", "The layer that is predicted; null: all but the first, which no layer comes before."),
    "predictor": Column("text",
        "What names the experts ahead. static: those used most on other documents. static_in_sample: those "
        "used most on the same tokens. previous_token: those chosen most recently in the document. "
        "previous_layer: those that most often follow the previous layer's choices, learned on other "
        "documents, by the sum of P(expert | previous expert). next_router: those that the layer's router "
        "ranks highest about the state that the MoE layer before it got (trace --probe-next).",
        names={"previous_layer": "previous layer", "static": "static list", "next_router": "next router",
               "previous_token": "previous tokens", "static_in_sample": "static list in sample"}),
    "budget": Column("int", "Experts named per token and layer: k, 2k and 4k.", label="experts named per layer"),
    "prefetch.n_experts": Column("int", "Experts of the layer, n."),
    "prefetch.tokens": Column("int",
        "Tokens tested: all; of a single document the second half. previous_token skips a document's first token, previous_layer takes at most 131,072 "
        "per half of the documents, evenly spaced."),
    "prefetch.choices": Column("int", "Choices tested."),
    "recall": Column("float", "Share of choices whose expert was named.", "named choices/choices",
        at_worst="0", at_chance="budget/n", at_best="1",
        misleads="Of previous_token, experts chosen in earlier documents are not named.",
        chance="chance", chance_label="random experts", **RATE),
    "prefetch.low": Column("float", "Lower end of the 95 % interval of recall over documents.",
        misleads="Null under 20 documents."),
    "prefetch.high": Column("float", "Upper end of that interval."),
    "prefetch.optimum": Column("float", "Recall of perfect foresight: 1, as budgets are at least k."),
    "prefetch.chance": Column("float", "Recall of a random list of as many experts.", "budget/n"),
    # --- placement
    "placement.layer": Column("int", "The layer's number in the model; null: all layers together."),
    "method": Column("text",
        "contiguous: experts in order, what servers do by default. "
        "balanced: redundant copies of the busiest experts, then each to the least loaded device with room "
        "(as EPLB). coactivation: balanced, then swapped so that experts chosen together share devices, up "
        "to 1.1 times the mean load. The last two are learned on other documents.",
        names={"contiguous": "in order", "balanced": "balanced", "coactivation": "co-activation"}),
    "devices": Column("int", "Devices that share the experts of a layer, G."),
    "nodes": Column("int", "Nodes that hold the devices, N."),
    "redundant": Column("int", "Copies of experts beyond one each, R."),
    "batch_tokens": Column("int", "Tokens per batch, B.", label="batch"),
    "balancedness": Column("float",
        "Mean over max load of the devices, over all tested tokens; an expert's copies share its load. All "
        "layers: sum of means over sum of maxima, as layers run one after the other.",
        "Σ_d load(d)/(G max_d load(d))", at_worst="1/G", at_chance="balancedness_chance", at_best="1",
        chance="balancedness_chance", **PLACED, **RATE),
    "placement.low": Column("float", "Lower end of the 95 % interval of balancedness over documents.",
        misleads="Null under 20 documents, and for all layers together."),
    "placement.high": Column("float", "Upper end of that interval."),
    "batch_balancedness": Column("float",
        "Mean over batches of B successive tokens of mean over max load; a short rest is skipped.",
        at_worst="1/G", at_chance="batch_balancedness_chance", at_best="1", label="balancedness per batch",
        chance="batch_balancedness_chance", least=0, most=1, better="higher", **PLACED),
    "cross_device": Column("float",
        "Distinct remote devices that a token is sent to, its own device being any; all layers: their sum.",
        "(1 − 1/G) Σ_d (1 − Π_e (1 − share(e, d))), e over the token's experts",
        at_chance="cross_device_chance", label="remote devices", unit="per token",
        misleads="From at most 65,536 tokens per layer and half of the documents.",
        chance="cross_device_chance", least=0, better="lower", **PLACED),
    "cross_node": Column("float", "The same for nodes; 0 for one node.", at_chance="cross_node_chance", at_best="0",
        label="remote nodes", unit="per token",
        chance="cross_node_chance", least=0, better="lower", **PLACED),
    "balancedness_chance": Column("float", "Balancedness of random placements, mean of 8; copies are of random experts."),
    "batch_balancedness_chance": Column("float", "Balancedness per batch of random placements."),
    "cross_device_chance": Column("float", "Remote devices per token of random placements."),
    "cross_node_chance": Column("float", "Remote nodes per token of random placements."),
    "cross_device_least": Column("float",
        "Bound for one token: remote devices if all its experts were on as few devices as have room for them.",
        "⌈k/((n + R)/G)⌉ (1 − 1/G)", label="bound for one token",
        misleads="No optimum: experts cannot share devices with all that other tokens choose beside them."),
    # --- coverage
    "coverage.domain": Column("text", "The name a text was given with; empty: all documents together.",
        names={"": "all documents"}),
    "coverage.tokens": Column("int", "Tokens that chose the expert.", at_chance="N k/n of N tokens", chance="chance",
        chance_label="even share", least=0, scale="log", better="higher"),
    "rank_share": Column("float", "Share of all experts that got at most as many tokens.", label="share of experts"),
    "coverage.chance": Column("float", "Tokens per expert if all experts were used equally.", "N k/n"),
    "minimum": Column("int", "Tokens that every expert should get (--min-tokens)."),
    "coverage.below": Column("bool", "Whether the expert got fewer tokens than the minimum."),
    "coverage.documents": Column("int", "Documents in which the expert was chosen."),
    "coverage_curve.domain": Column("text", "The domain; empty: all documents together.",
        names={"": "all documents"}),
    "coverage_curve.documents": Column("int", "Number of documents."),
    "coverage_curve.below": Column("float",
        "Experts of all layers with fewer tokens than the minimum; of fewer documents than the trace has the mean "
        "over 50 subsamples.", at_best="0", at_worst="all experts",
        label="experts below the minimum", least=0, interval=("low", "high"), better="lower"),
    "coverage_curve.low": Column("float", "2.5th percentile over subsamples; null for all documents."),
    "coverage_curve.high": Column("float", "97.5th percentile."),
    "experts": Column("int", "Experts of all layers."),
    "coverage_curve.unused": Column("int", "Experts of all layers without a token."),
}

TABLES: dict[str, Table] = define_tables(
    COLUMNS,
    Table("residency", "Hit rate of expert caches per policy, size and layer; layer null: all together.",
        ("policy", "slots", "layer"),
        ("n_experts", "layer_slots", "tokens", "choices", "hit_rate", "low", "high", "token_hit_rate",
         "optimum", "from_empty", "chance", "compulsory", "loads_per_token", "bytes_per_token", "ms_per_token", "uniform", "lead",
         "loads_chance", "bytes_chance", "ms_chance", "resident_bytes"),
        optional=("layer",), whole={"layer": None}),
    Table("slots_needed", "Fewest slots per layer that hold 80, 90 and 95 % of the choices; layer null: all alike.",
        ("policy", "share", "layer"), ("n_experts", "slots", "hit_rate", "chance", "replayed"),
        optional=("layer", "slots", "chance"), whole={"layer": None}),
    Table("prefetch", "Recall of predicted experts per predictor, budget and layer; layer null: all but the first.",
        ("predictor", "budget", "layer"),
        ("n_experts", "tokens", "choices", "recall", "low", "high", "optimum", "chance"),
        optional=("layer",), whole={"layer": None}),
    Table("placement", "Balance and traffic of placements on devices, per method and layer; layer null: all.",
        ("method", "layer"),
        ("devices", "nodes", "redundant", "batch_tokens", "balancedness", "low", "high", "batch_balancedness",
         "cross_device", "cross_node", "balancedness_chance", "batch_balancedness_chance",
         "cross_device_chance", "cross_node_chance", "cross_device_least"),
        optional=("layer",), whole={"layer": None}),
    Table("coverage", "Tokens per expert against a minimum, by domain.",
        ("domain", "layer", "expert"),
        ("tokens", "chance", "minimum", "below", "documents", "rank_share")),
    Table("coverage_curve", "Experts below the minimum by number of documents.",
        ("domain", "documents"),
        ("below", "low", "high", "experts", "unused", "minimum")),
)
# fmt: on
