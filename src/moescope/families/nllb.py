"""NLLB: encoder and decoder stacks, experts of two matrices with biases and a ReLU."""

from moescope.families.layout import Family, LayerTensors, Model, nllb, per_expert
from moescope.types import ExpertStack

FIRST, SECOND = "{L}.ffn.experts.expert_{e}.fc1", "{L}.ffn.experts.expert_{e}.fc2"


def biases(tensors: LayerTensors) -> dict[str, ExpertStack]:
    return {
        "gate_bias_EF": tensors.each(f"{FIRST}.bias", "d_ff"),
        "down_bias_ED": tensors.each(f"{SECOND}.bias", tensors.d_model),
    }


NLLB = Family(
    name="nllb",
    models={"nllb-moe": Model(("num_experts",), 2, nllb, activation=("activation_function",))},
    router="{L}.ffn.router.classifier.weight",
    markers=(f"{FIRST}.weight",),
    experts=per_expert(f"{FIRST}.weight", None, f"{SECOND}.weight"),
    block="{L}.ffn",
    norm="{L}.ff_layer_norm.weight",
    router_bias="{L}.ffn.router.classifier.bias",
    biases=biases,
)
