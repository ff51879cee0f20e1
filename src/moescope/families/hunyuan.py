"""Hunyuan 1's layout: `mlp.gate.wg` routes; counts may be lists, one entry a layer."""

from moescope.families.layout import PROJECTIONS, Family, Model, every_layer, projections, shared_expert

HUNYUAN = Family(
    name="hunyuan",
    models={"hunyuan_v1_moe": Model(("num_experts",), ("moe_topk",), every_layer)},
    router="{L}.mlp.gate.wg.weight",
    markers=PROJECTIONS,
    experts=projections(),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
    shared=shared_expert("{L}.mlp.shared_mlp.{p}_proj.weight"),
)
