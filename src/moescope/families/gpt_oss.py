"""GPT-OSS's layout: fused and transposed, gate and up interleaved, a bias everywhere.

Its experts are square (F = D), so only the layout can say which way round they lie.
"""

from moescope.errors import BadInput
from moescope.families.experts import either, fused_gate_up
from moescope.families.layout import Family, LayerTensors, Model, Stacks
from moescope.families.sparsity import every_layer
from moescope.types import ExpertStack

FUSED, DOWN = "{L}.mlp.experts.gate_up_proj", "{L}.mlp.experts.down_proj"
PACKED = "{L}.mlp.experts.gate_up_proj_blocks"


def refuse_packed(tensors: LayerTensors) -> Stacks:
    info = tensors.info(PACKED)
    raise BadInput(
        f"{info.file}: tensor {info.name} is quantised (MXFP4), which cannot be read yet; give a checkpoint in bf16"
    )


def biases(tensors: LayerTensors) -> dict[str, ExpertStack]:
    """Gate at the even places, up at the odd ones, as in the weights."""
    both = tensors.info(f"{FUSED}_bias").shape[-1]
    width, d_ff = tensors.d_model, both // 2
    return {
        "gate_bias_EF": tensors.slices(f"{FUSED}_bias", lambda part: part[0::2], (both,), (d_ff,)),
        "up_bias_EF": tensors.slices(f"{FUSED}_bias", lambda part: part[1::2], (both,), (d_ff,)),
        "down_bias_ED": tensors.slices(f"{DOWN}_bias", lambda part: part, (width,), (width,)),
    }


GPT_OSS = Family(
    name="gpt_oss",
    models={
        # The softmax is over the chosen only. The config says silu; the code computes (up + 1) gate sigmoid(1.702 gate), clamped.
        "gpt_oss": Model(("num_local_experts",), ("num_experts_per_tok",), every_layer, activation="clamped_swiglu"),
    },
    router="{L}.mlp.router.weight",
    markers=(PACKED, f"{FUSED}_bias"),
    experts=either((PACKED, refuse_packed), (FUSED, fused_gate_up(FUSED, DOWN, interleaved=True))),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
    router_bias="{L}.mlp.router.bias",
    biases=biases,
)
