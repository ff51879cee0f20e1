"""Blocks called `feed_forward`: Llama 4 (fused and transposed), Jamba (separate or fused), LFM2."""

from moescope.families.layout import (
    Family,
    Model,
    after_dense,
    by_period,
    interleaved,
    projections,
    shared_expert,
)

TOP_K = ("num_experts_per_tok",)
# Llama 4's sigmoid multiplies an expert's input, not its output.
LLAMA4 = Model(("num_local_experts",), TOP_K, interleaved, scoring="sigmoid")

FEED_FORWARD = Family(
    name="feed_forward",
    models={
        "llama4": LLAMA4,
        "llama4_text": LLAMA4,
        "jamba": Model(("num_experts",), TOP_K, by_period, norm="{L}.pre_ff_layernorm.weight"),
    },
    router="{L}.feed_forward.router.weight",
    **projections("{L}.feed_forward"),
    norm="{L}.post_attention_layernorm.weight",
    shared=(shared_expert("{L}.feed_forward.shared_expert.{p}_proj.weight"),),
)

# w1 gate, w3 up, w2 down
LFM2 = Family(
    name="lfm2",
    models={"lfm2_moe": Model(("num_experts",), TOP_K, after_dense(2), scoring="sigmoid", activation="silu")},
    router="{L}.feed_forward.gate.weight",
    **projections("{L}.feed_forward", ("w1", "w3", "w2")),
    norm="{L}.ffn_norm.weight",
    correction_bias=("{L}.feed_forward.expert_bias", "{L}.feed_forward.gate.e_score_correction_bias"),
)
