"""The most common layout: router `mlp.gate`; gate_proj, up_proj, down_proj in `mlp.experts`."""

from moescope.families.layout import (
    Family,
    Model,
    after_dense,
    by_step,
    every_layer,
    in_window,
    projections,
    shared_expert,
)

COUNT, TOP_K = ("num_experts", "num_local_experts"), ("num_experts_per_tok", "num_experts_per_token")
ROUTED = ("n_routed_experts", "num_local_experts", "num_experts")


def like_deepseek(dense: int) -> Model:
    """Sigmoid scores; `dense` dense layers first unless the config says otherwise."""
    return Model(ROUTED, TOP_K, after_dense(dense), scoring="sigmoid")


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
        "flex_olmo": Model(COUNT, TOP_K, every_layer, norm=None),  # its norms follow the blocks
        "mellum": Model(COUNT, TOP_K, after_dense(0)),
        "deepseek_v2": Model(ROUTED, TOP_K, after_dense(0)),
        "mistral4": Model(ROUTED, TOP_K, after_dense(0)),
        "deepseek_v3": like_deepseek(3),
        "deepseek_v32": like_deepseek(3),
        "kimi_k2": like_deepseek(1),
        "kimi_k25": like_deepseek(1),
        "glm4_moe": like_deepseek(1),
        "glm4_moe_lite": like_deepseek(1),
        "glm4v_moe": like_deepseek(1),
        "glm4v_moe_text": like_deepseek(1),
        "glm_moe_dsa": like_deepseek(3),
        "dots1": like_deepseek(0),
        "solar_open": like_deepseek(0),
        "axk1": like_deepseek(1),
        "bailing_hybrid": like_deepseek(2),
        "exaone_moe": like_deepseek(1),
        "laguna": like_deepseek(1),
        "mimo_v2_flash": like_deepseek(1),
        "ernie4_5_moe": Model(("moe_num_experts",), ("moe_k",), in_window),
    },
    router="{L}.mlp.gate.weight",
    **projections("{L}.mlp"),
    norm="{L}.post_attention_layernorm.weight",
    correction_bias=(
        "{L}.mlp.gate.e_score_correction_bias",
        "{L}.mlp.e_score_correction_bias",
        "{L}.mlp.experts.e_score_correction_bias",
        "{L}.mlp.gate.expert_bias",
        "{L}.mlp.moe_statics.e_score_correction_bias",
        "{L}.mlp.gate.moe_statics.e_score_correction_bias",
    ),
    shared=(  # Qwen: one with a gate; DeepSeek: several in one, without
        shared_expert("{L}.mlp.shared_expert.{p}_proj.weight", gate="{L}.mlp.shared_expert_gate.weight"),
        shared_expert("{L}.mlp.shared_experts.{p}_proj.weight"),
    ),
)
