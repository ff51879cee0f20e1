"""Hunyuan 1's layout: `mlp.gate.wg` routes; counts may be lists, one entry a layer."""

from moescope.families.experts import either, fused_gate_up, per_expert, shared_expert
from moescope.families.layout import Family, Model
from moescope.families.sparsity import every_layer

EACH, FUSED = "{L}.mlp.experts.{e}.gate_proj.weight", "{L}.mlp.experts.gate_up_proj"

HUNYUAN = Family(
    name="hunyuan",
    models={"hunyuan_v1_moe": Model(("num_experts",), ("moe_topk",), every_layer)},
    router="{L}.mlp.gate.wg.weight",
    markers=(EACH, FUSED),
    experts=either(
        (EACH, per_expert(EACH, EACH.replace("gate_proj", "up_proj"), EACH.replace("gate_proj", "down_proj"))),
        (FUSED, fused_gate_up(FUSED, "{L}.mlp.experts.down_proj")),
    ),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
    shared=shared_expert("{L}.mlp.shared_mlp.{p}_proj.weight"),
)
