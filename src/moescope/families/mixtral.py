"""Mixtral's layout: w1 is the gate, w3 is up, w2 is down, under `block_sparse_moe`; every layer is MoE."""

from moescope.families.layout import Config, Family


def moe_layers(config: Config) -> set[int]:
    return set(range(config["num_hidden_layers"]))


MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    router="{L}.block_sparse_moe.gate.weight",
    gate="{L}.block_sparse_moe.experts.{e}.w1.weight",
    up="{L}.block_sparse_moe.experts.{e}.w3.weight",
    down="{L}.block_sparse_moe.experts.{e}.w2.weight",
    norm="{L}.post_attention_layernorm.weight",
    block="{L}.block_sparse_moe",
    expert_count_fields=("num_local_experts",),
    moe_layers=moe_layers,
)
