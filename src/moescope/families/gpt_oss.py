"""GPT-OSS's layout: fused, gate and up interleaved, a bias everywhere; transposed in bf16, not in MXFP4.

Experts are square (F = D), so only the layout determines their orientation.
"""

from moescope.families.layout import Family, LayerTensors, Model, check_shape, every_layer, fused_gate_up
from moescope.types import ExpertStack

FUSED, DOWN = "{L}.mlp.experts.gate_up_proj", "{L}.mlp.experts.down_proj"


def biases(tensors: LayerTensors) -> dict[str, ExpertStack]:
    """Gate at even indices, up at odd ones, as in the weights."""
    info = tensors.info(f"{FUSED}_bias")
    check_shape(info, (tensors.n_experts, "2 * d_ff"))
    both = info.shape[-1]
    width, d_ff = tensors.d_model, both // 2
    return {
        "gate_bias_EF": tensors.slices(f"{FUSED}_bias", lambda part: part[0::2], (both,), (d_ff,)),
        "up_bias_EF": tensors.slices(f"{FUSED}_bias", lambda part: part[1::2], (both,), (d_ff,)),
        "down_bias_ED": tensors.slices(f"{DOWN}_bias", lambda part: part, (width,), (width,)),
    }


GPT_OSS = Family(
    name="gpt_oss",
    models={
        # The softmax is over the chosen only. The config says silu; the code computes (up + 1) gate
        # sigmoid(1.702 gate), clamped.
        "gpt_oss": Model(
            ("num_local_experts",), ("num_experts_per_tok",), every_layer, activation="clamped_swiglu"
        )
    },
    router="{L}.mlp.router.weight",
    markers=(f"{FUSED}_bias",),
    experts=fused_gate_up(FUSED, DOWN, interleaved=True),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
    router_bias="{L}.mlp.router.bias",
    biases=biases,
)
