"""Models of transformers with routers of the lab: `mlp.gate.router`, fused experts."""

from dataclasses import replace
from functools import partial

from moescope.families.lab import router_state, rowless_router
from moescope.families.layout import Family, Model, fused_gate_up
from moescope.families.mlp_experts import MLP_EXPERTS

KEY = "moescope_replaced"  # model type, and key of config.json that describes the routers
ROUTER = "{L}.mlp.gate.router."
GATE_UP = "{L}.mlp.experts.gate_up_proj"


REPLACED = Family(
    name="replaced",
    models={
        KEY: Model(
            (f"{KEY}.model.experts",),
            (f"{KEY}.model.top_k",),
            lambda config: {int(layer) for layer, _ in config[KEY]["blocks"]},
            activation=("hidden_act", "hidden_activation", "activation_function"),
        )
    },
    router=f"{ROUTER}weight",
    markers=(GATE_UP,),
    experts=fused_gate_up(GATE_UP, "{L}.mlp.experts.down_proj"),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
    correction_bias=(f"{ROUTER}bias_E",),
    shared=MLP_EXPERTS.shared,
    router_state=partial(router_state, ROUTER),
)
ALL_REPLACED = [
    REPLACED,
    replace(REPLACED, name="replaced_keys", models={}, router=f"{ROUTER}direction_ED", correction_bias=()),
    replace(
        REPLACED,
        name="replaced_rowless",
        models={},
        router=None,
        correction_bias=(),
        rowless_router=partial(rowless_router, KEY),
        router_parts=(".mlp.gate.router.", "moescope_shared_router."),
    ),
]
