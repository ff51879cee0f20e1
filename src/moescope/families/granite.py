"""Granite: input_linear and output_linear as published, gate_up_proj and down_proj as in transformers."""

from dataclasses import replace

from moescope.families.layout import Family, Model, every_layer, fused_gate_up, shared_gate_up

LINEAR, FUSED = "{L}.block_sparse_moe.input_linear.weight", "{L}.block_sparse_moe.experts.gate_up_proj"
# the softmax is over the chosen only
PLAIN = Model(("num_local_experts",), ("num_experts_per_tok",), every_layer)

GRANITE = Family(
    name="granite",
    models={"granitemoe": PLAIN, "granitemoeshared": PLAIN, "granitemoehybrid": PLAIN},
    router="{L}.block_sparse_moe.router.layer.weight",
    markers=(LINEAR,),
    experts=fused_gate_up(LINEAR, "{L}.block_sparse_moe.output_linear.weight"),
    block="{L}.block_sparse_moe",
    norm="{L}.post_attention_layernorm.weight",
    shared=(shared_gate_up("{L}.shared_mlp.input_linear.weight", "{L}.shared_mlp.output_linear.weight"),),
)
GRANITE_FUSED = replace(
    GRANITE,
    name="granite_fused",
    models={"granitemoe_swa": PLAIN},
    router="{L}.block_sparse_moe.router.weight",
    markers=(FUSED,),
    experts=fused_gate_up(FUSED, "{L}.block_sparse_moe.experts.down_proj"),
)
