"""Encoder and decoder stacks with experts of two matrices, without a gate: NLLB and Switch Transformers."""

from moescope.families.layout import Family, LayerTensors, Model, nllb, per_expert, switch
from moescope.types import ExpertStack

FC1, FC2 = "{L}.ffn.experts.expert_{e}.fc1", "{L}.ffn.experts.expert_{e}.fc2"


def nllb_biases(tensors: LayerTensors) -> dict[str, ExpertStack]:
    """NLLB's experts have biases, and a ReLU between their matrices."""
    return {
        "gate_bias_EF": tensors.each(f"{FC1}.bias", "d_ff"),
        "down_bias_ED": tensors.each(f"{FC2}.bias", tensors.d_model),
    }


NLLB = Family(
    name="nllb",
    models={"nllb-moe": Model(("num_experts",), 2, nllb, activation=("activation_function",))},
    router="{L}.ffn.router.classifier.weight",
    markers=(f"{FC1}.weight",),
    experts=per_expert(f"{FC1}.weight", None, f"{FC2}.weight"),
    block="{L}.ffn",
    norm="{L}.ff_layer_norm.weight",
    router_bias="{L}.ffn.router.classifier.bias",
    biases=nllb_biases,
)

WI = "{L}.layer.{S}.mlp.experts.expert_{e}.wi.weight"

# the MoE is a sublayer {S} of its layer
SWITCH = Family(
    name="switch",
    models={"switch_transformers": Model(("num_experts",), 1, switch, activation=("dense_act_fn",))},
    router="{L}.layer.{S}.mlp.router.classifier.weight",
    markers=(WI,),
    experts=per_expert(WI, None, WI.replace("wi", "wo")),
    block="{L}.layer.{S}.mlp",
    norm="{L}.layer.{S}.layer_norm.weight",
    router_bias="{L}.layer.{S}.mlp.router.classifier.bias",
)
