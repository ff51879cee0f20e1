"""Hunyuan 1: router `mlp.gate.wg`; counts may be lists with one entry per layer."""

from moescope.families.layout import Family, Model, every_layer, projections, shared_expert

HUNYUAN = Family(
    name="hunyuan",
    models={"hunyuan_v1_moe": Model(("num_experts",), ("moe_topk",), every_layer)},
    router="{L}.mlp.gate.wg.weight",
    **projections("{L}.mlp"),
    norm="{L}.post_attention_layernorm.weight",
    shared=(shared_expert("{L}.mlp.shared_mlp.{p}_proj.weight"),),
)
