"""Router `mlp.router.gate`: Hunyuan 3 and AFMoE."""

from moescope.families.layout import Family, Model, after_dense, projections, shared_expert

COUNT, TOP_K = ("num_experts",), ("num_experts_per_tok",)

ROUTER_GATE = Family(
    name="router_gate",
    models={
        "hy_v3": Model(COUNT, TOP_K, after_dense(1), scoring="sigmoid"),
        "afmoe": Model(COUNT, TOP_K, after_dense(1), scoring="sigmoid", norm="{L}.pre_mlp_layernorm.weight"),
    },
    router="{L}.mlp.router.gate.weight",
    **projections("{L}.mlp"),
    norm="{L}.post_attention_layernorm.weight",
    correction_bias=("{L}.mlp.expert_bias",),
    shared=(
        shared_expert("{L}.mlp.shared_mlp.{p}_proj.weight"),
        shared_expert("{L}.mlp.shared_experts.{p}_proj.weight"),
    ),
)
