"""The layout most families share: `mlp.gate` routes, `mlp.experts` holds gate_proj, up_proj and down_proj, one by one or fused."""

from moescope.families.experts import either, fused_gate_up, per_expert, shared_expert
from moescope.families.layout import Family, LayerTensors, Model
from moescope.families.sparsity import after_dense, by_step, every_layer, in_window, listed_or_after_dense
from moescope.types import SharedExpert

COUNT, TOP_K = ("num_experts", "num_local_experts"), ("num_experts_per_tok",)
ROUTED = ("n_routed_experts", "num_local_experts")
EACH, FUSED = "{L}.mlp.experts.{e}.gate_proj.weight", "{L}.mlp.experts.gate_up_proj"


def one_or_several_shared(tensors: LayerTensors) -> SharedExpert | None:
    """Qwen names it `shared_expert` and puts a gate in front, DeepSeek `shared_experts` without one."""
    with_gate = shared_expert("{L}.mlp.shared_expert.{p}_proj.weight", gate="{L}.mlp.shared_expert_gate.weight")
    return with_gate(tensors) or shared_expert("{L}.mlp.shared_experts.{p}_proj.weight")(tensors)


MLP_EXPERTS = Family(
    name="mlp_experts",
    models={
        "qwen2_moe": Model(COUNT, TOP_K, by_step),
        "qwen3_moe": Model(COUNT, TOP_K, by_step),
        "qwen3_next": Model(COUNT, TOP_K, by_step, norm_offset=1.0),
        "qwen3_5_moe": Model(COUNT, TOP_K, every_layer, norm_offset=1.0),
        "qwen3_5_moe_text": Model(COUNT, TOP_K, every_layer, norm_offset=1.0),
        "qwen3_vl_moe": Model(COUNT, TOP_K, by_step),
        "qwen3_vl_moe_text": Model(COUNT, TOP_K, by_step),
        "olmoe": Model(COUNT, TOP_K, every_layer),
        "deepseek_v2": Model(ROUTED, TOP_K, listed_or_after_dense),
        "deepseek_v3": Model(ROUTED, TOP_K, listed_or_after_dense, scoring="sigmoid"),
        "kimi_k2": Model(ROUTED, TOP_K, after_dense, scoring="sigmoid"),
        "glm4_moe": Model(ROUTED, TOP_K, listed_or_after_dense, scoring="sigmoid"),
        "ernie4_5_moe": Model(("moe_num_experts",), ("moe_k",), in_window),
    },
    router="{L}.mlp.gate.weight",
    markers=(EACH, FUSED),
    experts=either(
        (EACH, per_expert(EACH, EACH.replace("gate_proj", "up_proj"), EACH.replace("gate_proj", "down_proj"))),
        (FUSED, fused_gate_up(FUSED, "{L}.mlp.experts.down_proj")),
    ),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
    correction_bias=("{L}.mlp.gate.e_score_correction_bias", "{L}.mlp.moe_statics.e_score_correction_bias"),
    shared=one_or_several_shared,
)
