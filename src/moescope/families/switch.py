"""Switch Transformers: encoder and decoder stacks, the MoE a sublayer, experts of two matrices, no gate."""

from moescope.families.layout import Family, Model, per_expert, switch

FIRST = "{L}.layer.{S}.mlp.experts.expert_{e}.wi.weight"

SWITCH = Family(
    name="switch",
    models={"switch_transformers": Model(("num_experts",), 1, switch, activation=("dense_act_fn",))},
    router="{L}.layer.{S}.mlp.router.classifier.weight",
    markers=(FIRST,),
    experts=per_expert(FIRST, None, FIRST.replace("wi", "wo")),
    block="{L}.layer.{S}.mlp",
    norm="{L}.layer.{S}.layer_norm.weight",
    router_bias="{L}.layer.{S}.mlp.router.classifier.bias",
)
