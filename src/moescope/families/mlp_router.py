"""Experts in `mlp.experts` whose router is not `mlp.gate`: Hunyuan, AFMoE, Phi-3.5-MoE in memory."""

from moescope.families.layout import (
    Family,
    Model,
    after_dense,
    every_layer,
    fused_gate_up,
    projections,
    shared_expert,
)

COUNT, TOP_K = ("num_experts",), ("num_experts_per_tok",)
FUSED = "{L}.mlp.experts.gate_up_proj"

# Hunyuan 1; counts may be lists with one entry per layer
HUNYUAN = Family(
    name="hunyuan",
    models={"hunyuan_v1_moe": Model(COUNT, ("moe_topk",), every_layer)},
    router="{L}.mlp.gate.wg.weight",
    **projections("{L}.mlp"),
    norm="{L}.post_attention_layernorm.weight",
    shared=(shared_expert("{L}.mlp.shared_mlp.{p}_proj.weight"),),
)
# Hunyuan 3 and AFMoE
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
# fused experts without biases: Phi-3.5-MoE as transformers holds it in memory
MLP_ROUTER = Family(
    name="mlp_router",
    models={},
    router="{L}.mlp.router.weight",
    markers=(FUSED,),
    experts=fused_gate_up(FUSED, "{L}.mlp.experts.down_proj"),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
)
