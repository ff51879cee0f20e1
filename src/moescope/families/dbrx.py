"""DBRX: w1 (gate), v1 (up) and w2 (down, transposed) of all experts stacked, [E * F, D] each."""

from moescope.errors import BadInput
from moescope.families.layout import Family, LayerTensors, Model, Stacks, as_stored, check_shape

GATE, UP, DOWN = (f"{{L}}.ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2"))


def stacked(tensors: LayerTensors) -> Stacks:
    info, experts = tensors.info(GATE), tensors.n_experts
    check_shape(info, ("experts * d_ff", tensors.d_model))
    rows, width = info.shape
    if rows % experts:
        raise BadInput(
            f"{info.file}: tensor {info.name} has {rows} rows, not a multiple of {experts} experts; "
            "check how it was saved"
        )
    sides = (rows // experts, width)
    gates, ups = (tensors.slices(name, as_stored, sides, sides, stacked=False) for name in (GATE, UP))
    return gates, ups, tensors.slices(DOWN, lambda part: part.T, sides, sides[::-1], stacked=False)


DBRX = Family(
    name="dbrx",
    models={
        "dbrx": Model(
            ("ffn_config.moe_num_experts",),
            ("ffn_config.moe_top_k",),
            lambda config: set(range(config["n_layers"])),  # the count of layers has another name
            activation=("ffn_config.ffn_act_fn.name",),
        )
    },
    router="{L}.ffn.router.layer.weight",
    markers=(GATE,),
    experts=stacked,
    block="{L}.ffn",
    norm="{L}.norm_attn_norm.norm_2.weight",
)
