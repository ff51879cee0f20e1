"""Models of transformers with routers of the lab: `mlp.gate.router`, fused experts.

GPT-2's experts have no gate, but biases; their tensors are named as the lab's.
"""

from dataclasses import replace

from moescope.families.lab import LAB_GELU, router_facts, router_state_of
from moescope.families.layout import Config, Family, Model, fused_gate_up
from moescope.families.mlp_experts import MLP_EXPERTS

KEY = "moescope_replaced"  # model type, and key of config.json that describes the routers
ROUTER = "{L}.mlp.gate.router."
GATE_UP = "{L}.mlp.experts.gate_up_proj"


def replaced_layers(config: Config) -> set[int]:
    return {int(layer) for layer, _ in config[KEY]["blocks"]}


def rowless_router(config: Config) -> str | None:
    """Return the router's name where the config says that it has no rows, else None."""
    if config.get("model_type") != KEY:
        return None
    facts = router_facts(config)
    return None if facts["has_rows"] else str(facts["name"])


REPLACED = Family(
    name="replaced",
    models={
        KEY: Model(
            (f"{KEY}.model.experts",),
            (f"{KEY}.model.top_k",),
            replaced_layers,
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
    router_state=router_state_of(ROUTER),
)
REPLACED_KEYS = replace(
    REPLACED, name="replaced_keys", models={}, router=f"{ROUTER}direction_ED", correction_bias=()
)
REPLACED_ROWLESS = replace(
    REPLACED,
    name="replaced_rowless",
    models={},
    router=None,
    correction_bias=(),
    rowless_router=rowless_router,
    router_parts=(".mlp.gate.router.", "moescope_shared_router."),
)
GELU = {
    "markers": LAB_GELU.markers,
    "experts": LAB_GELU.experts,
    "biases": LAB_GELU.biases,
    "norm": "{L}.ln_2.weight",
}
REPLACED_GELU = replace(REPLACED, name="replaced_gelu", models={}, **GELU)  # type: ignore[arg-type]
REPLACED_KEYS_GELU = replace(REPLACED_KEYS, name="replaced_keys_gelu", **GELU)  # type: ignore[arg-type]
REPLACED_ROWLESS_GELU = replace(REPLACED_ROWLESS, name="replaced_rowless_gelu", **GELU)  # type: ignore[arg-type]
