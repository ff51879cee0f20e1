"""Router `mlp.router` over fused experts without biases: Phi-3.5-MoE as transformers holds it in memory."""

from moescope.families.layout import Family, fused_gate_up

FUSED = "{L}.mlp.experts.gate_up_proj"

MLP_ROUTER = Family(
    name="mlp_router",
    models={},
    router="{L}.mlp.router.weight",
    markers=(FUSED,),
    experts=fused_gate_up(FUSED, "{L}.mlp.experts.down_proj"),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
)
