"""Mixtral: w1 gate, w3 up, w2 down, under `block_sparse_moe`."""

from moescope.families.layout import Family, Model, after_dense, every_layer, projections, shared_expert

EXPERTS, TOP_K = ("num_local_experts",), ("num_experts_per_tok",)

MIXTRAL = Family(
    name="mixtral",
    models={
        "mixtral": Model(EXPERTS, TOP_K, every_layer),
        "minimax": Model(EXPERTS, TOP_K, every_layer),
        "minimax_m2": Model(EXPERTS, TOP_K, every_layer, scoring="sigmoid"),
        "phimoe": Model(EXPERTS, TOP_K, every_layer, scoring="sparsemixer"),
        "kimi_linear": Model(("num_experts",), ("num_experts_per_token",), after_dense(1), scoring="sigmoid"),
    },
    router="{L}.block_sparse_moe.gate.weight",
    **projections("{L}.block_sparse_moe", ("w1", "w3", "w2")),
    norm="{L}.post_attention_layernorm.weight",
    correction_bias=(
        "{L}.block_sparse_moe.e_score_correction_bias",
        "{L}.block_sparse_moe.gate.e_score_correction_bias",
    ),
    shared=(shared_expert("{L}.block_sparse_moe.shared_experts.{p}_proj.weight"),),
)
