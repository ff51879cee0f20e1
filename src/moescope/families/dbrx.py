"""DBRX: w1 (gate), v1 (up) and w2 (down, transposed) of all experts stacked, [E * F, D] each."""

from moescope.errors import BadInput
from moescope.families.layout import Family, LayerTensors, Model, Stacks, check_shape, every_block

GATE, UP, DOWN = (f"{{L}}.ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2"))


def stacked(tensors: LayerTensors) -> Stacks:
    width, experts = tensors.d_model, tensors.n_experts
    info = tensors.info(GATE)
    check_shape(info, ("experts * d_ff", width))
    rows = info.shape[0]
    if rows % experts:
        raise BadInput(
            f"{info.file}: tensor {info.name} has {rows} rows, not a multiple of {experts} experts; "
            "check how it was saved"
        )
    for template in (UP, DOWN):
        check_shape(tensors.info(template), (rows, width))
    d_ff = rows // experts
    return (
        tensors.row_blocks(GATE, lambda part: part, (d_ff, width)),
        tensors.row_blocks(UP, lambda part: part, (d_ff, width)),
        tensors.row_blocks(DOWN, lambda part: part.T, (width, d_ff)),
    )


DBRX = Family(
    name="dbrx",
    models={
        "dbrx": Model(
            ("ffn_config.moe_num_experts",),
            ("ffn_config.moe_top_k",),
            every_block,
            activation=("ffn_config.ffn_act_fn.name",),
        )
    },
    router="{L}.ffn.router.layer.weight",
    markers=(GATE,),
    experts=stacked,
    block="{L}.ffn",
    norm="{L}.norm_attn_norm.norm_2.weight",
)
