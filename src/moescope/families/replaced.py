"""Models of transformers with routers of the lab: `mlp.gate.router`, fused experts.

GPT-2's experts have no gate, but biases; their tensors are named as the lab's.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from moescope.families.lab import LAB_GELU, router_state, rowless_router
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
WITH_ROUTERS = [
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
GELU: dict[str, Any] = {
    "markers": LAB_GELU.markers,
    "experts": LAB_GELU.experts,
    "biases": LAB_GELU.biases,
    "norm": "{L}.ln_2.weight",
    "models": {},
}
ALL_REPLACED = WITH_ROUTERS + [replace(family, name=f"{family.name}_gelu", **GELU) for family in WITH_ROUTERS]
