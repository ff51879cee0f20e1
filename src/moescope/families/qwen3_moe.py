"""Qwen3-MoE's layout: gate_proj, up_proj and down_proj an expert, under `mlp`; some layers may be dense."""

from moescope.families.layout import Config, Family


def moe_layers(config: Config) -> set[int]:
    dense = set(config.get("mlp_only_layers") or ())
    stride = config.get("decoder_sparse_step", 1)
    return {layer for layer in range(config["num_hidden_layers"]) if layer not in dense and (layer + 1) % stride == 0}


QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    router="{L}.mlp.gate.weight",
    gate="{L}.mlp.experts.{e}.gate_proj.weight",
    up="{L}.mlp.experts.{e}.up_proj.weight",
    down="{L}.mlp.experts.{e}.down_proj.weight",
    norm="{L}.post_attention_layernorm.weight",
    block="{L}.mlp",
    expert_count_fields=("num_experts", "num_local_experts"),
    moe_layers=moe_layers,
)
