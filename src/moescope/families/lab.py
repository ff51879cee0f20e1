"""The router lab's own layouts: fused experts under `mlp.experts`; router rows, SoME's keys, or neither.

Routers without a row per expert (see `Router.has_rows`) are supported too: their experts are read.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from moescope.errors import BadInput
from moescope.families.layout import (
    Config,
    Family,
    LayerTensors,
    Model,
    Stacks,
    as_stored,
    check_shape,
    either,
    every_layer,
    fused_gate_up,
)
from moescope.types import ExpertStack, RouterState

COUNT, TOP_K = ("num_experts",), ("num_experts_per_tok",)
GATE_UP, UP, DOWN = "{L}.mlp.experts.gate_up", "{L}.mlp.experts.up", "{L}.mlp.experts.down"
ROUTER = "{L}.mlp.router."
KINDS = ("experts", "shared", "table")  # of a router's tensors: types.RouterState


def router_facts(config: Config) -> Config:
    """Return the facts about the router that a lab checkpoint holds, else those of the router's class."""
    facts = config.get("moescope_router")
    if isinstance(facts, dict) and isinstance(facts.get("state_tensors"), dict):
        return facts
    if "moescope_lab" not in config:
        return {"has_rows": True, "state_tensors": {}}
    from moescope.decoder.routers import facts_of_model

    return facts_of_model(config["moescope_lab"])


def rowless_router(kind: str, config: Config) -> str | None:
    """Return the router's name where a config of that model type says that it has no rows, else None."""
    if config.get("model_type") != kind or not isinstance(config.get(kind), dict):
        return None
    facts = router_facts(config)
    return None if facts["has_rows"] else str(facts["name"])


def router_state(place: str, tensors: LayerTensors) -> tuple[RouterState, ...]:
    """Return the router's tensors besides rows and biases; their names begin with `place`."""
    kinds: dict[str, str] = router_facts(tensors.checkpoint.config or {})["state_tensors"]
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise BadInput(
                f"{tensors.checkpoint.shown}: config.json: moescope_router: the kind of tensor {name} is "
                f"{kind!r}, not {', '.join(KINDS)}; copy the checkpoint again"
            )
    return tuple(
        tensors.state(f"{place}{name}", kind) for name, kind in kinds.items() if tensors.has(f"{place}{name}")
    )


def up_and_down(tensors: LayerTensors) -> Stacks:
    """Experts without a gate, stacked: up [E, F, D] and down [E, D, F]."""
    info = tensors.info(UP)
    check_shape(info, (tensors.n_experts, "d_ff", tensors.d_model))
    d_ff, width = info.shape[1], tensors.d_model
    ups = tensors.slices(UP, as_stored, (d_ff, width), (d_ff, width))
    return ups, None, tensors.slices(DOWN, as_stored, (width, d_ff), (width, d_ff))


def gelu_biases(tensors: LayerTensors) -> dict[str, ExpertStack]:
    """The biases of both projections, one row per expert."""
    if not tensors.has(UP):
        return {}
    d_ff, width = tensors.info(UP).shape[1], tensors.d_model
    return {
        "gate_bias_EF": tensors.slices(f"{UP}_bias", as_stored, (d_ff,), (d_ff,)),
        "down_bias_ED": tensors.slices(f"{DOWN}_bias", as_stored, (width,), (width,)),
    }


LAB = Family(
    name="lab",
    models={
        "moescope_lab": Model(COUNT, TOP_K, every_layer),
        "moescope_lab_sigmoid": Model(COUNT, TOP_K, every_layer, scoring="sigmoid"),
    },
    router="{L}.mlp.router.weight",
    markers=(GATE_UP,),
    experts=fused_gate_up(GATE_UP, DOWN),
    block="{L}.mlp",
    norm="{L}.post_attention_layernorm.weight",
    correction_bias=("{L}.mlp.router.bias_E",),
    router_state=partial(router_state, ROUTER),
)
LAB_GELU = Family(
    name="lab_gelu",
    models={},
    router="{L}.mlp.router.weight",
    markers=(UP,),
    experts=up_and_down,
    block="{L}.mlp",
    norm=None,  # the norm follows the block before, and has a bias
    biases=gelu_biases,
    router_state=partial(router_state, ROUTER),
)
# SPECTRA with `plain` is a linear router under another name.
LINEAR = "{L}.mlp.router.linear.weight"
ROWLESS: dict[str, Any] = {
    "router": None,
    "rowless_router": partial(rowless_router, "moescope_lab"),
    "router_parts": (".mlp.router.", "shared_router."),
}
LABS = [
    LAB,
    LAB_GELU,
    replace(
        LAB_GELU,
        name="lab_keys",
        router="{L}.mlp.router.direction_ED",
        markers=(GATE_UP, UP),
        experts=either((GATE_UP, LAB.experts), (UP, up_and_down)),
    ),
    replace(LAB, name="lab_linear", models={}, router=LINEAR, correction_bias=()),
    replace(LAB_GELU, name="lab_linear_gelu", router=LINEAR),
    replace(LAB, name="lab_rowless", models={}, correction_bias=(), **ROWLESS),
    replace(LAB_GELU, name="lab_rowless_gelu", **ROWLESS),
]
