"""The router lab's own layouts: fused experts under `mlp.experts`; a router row an expert, SoME's keys in
their place, or neither.

Three routers have no row for each expert: hash is a table of token ids, SPECTRA a state that meets a
projection, dense has nothing to choose. Of such checkpoints the experts are read.
"""

from dataclasses import replace

from moescope.families.lab_router_state import lab_router_state
from moescope.families.layout import (
    Config,
    Family,
    LayerTensors,
    Model,
    Stacks,
    check_shape,
    either,
    every_layer,
    fused_gate_up,
)
from moescope.types import ExpertStack

COUNT, TOP_K = ("num_experts",), ("num_experts_per_tok",)
GATE_UP, UP, DOWN = "{L}.mlp.experts.gate_up", "{L}.mlp.experts.up", "{L}.mlp.experts.down"

ROWLESS = ("hash", "spectra", "dense")  # the lab's routers without a row for each expert
ROUTER_PARTS = (".mlp.router.", "shared_router.")


def rowless_router(config: Config) -> str | None:
    """The router's name in the config of a lab checkpoint that has no rows; None for every other config."""
    said = config.get("moescope_lab")
    if config.get("model_type") != "moescope_lab" or not isinstance(said, dict):
        return None
    return str(said["router"]) if said.get("router") in ROWLESS else None


def up_and_down(tensors: LayerTensors) -> Stacks:
    """Experts without a gate, stacked: up [E, F, D] and down [E, D, F]."""
    info = tensors.info(UP)
    check_shape(info, (tensors.n_experts, "d_ff", tensors.d_model))
    d_ff, width = info.shape[1], tensors.d_model
    ups = tensors.slices(UP, lambda part: part, (d_ff, width), (d_ff, width))
    return ups, None, tensors.slices(DOWN, lambda part: part, (width, d_ff), (width, d_ff))


def gelu_biases(tensors: LayerTensors) -> dict[str, ExpertStack]:
    """The biases of both projections, one row an expert."""
    if not tensors.has(UP):
        return {}
    d_ff, width = tensors.info(UP).shape[1], tensors.d_model
    up_bias, down_bias = f"{UP}_bias", f"{DOWN}_bias"
    return {
        "gate_bias_EF": tensors.slices(up_bias, lambda part: part, (d_ff,), (d_ff,)),
        "down_bias_ED": tensors.slices(down_bias, lambda part: part, (width,), (width,)),
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
    router_state=lab_router_state,
)
LAB_GELU = Family(
    name="lab_gelu",
    models={},
    router="{L}.mlp.router.weight",
    markers=(UP,),
    experts=up_and_down,
    block="{L}.mlp",
    norm=None,  # the norm stands behind the block before, and has a bias
    biases=gelu_biases,
    router_state=lab_router_state,
)
LAB_KEYS = Family(
    name="lab_keys",
    models={},
    router="{L}.mlp.router.direction_ED",
    markers=(GATE_UP, UP),
    experts=either((GATE_UP, fused_gate_up(GATE_UP, DOWN)), (UP, up_and_down)),
    block="{L}.mlp",
    norm=None,
    biases=gelu_biases,
    router_state=lab_router_state,
)
# SPECTRA with everything taken away is a plain linear router under a name of its own.
LINEAR = "{L}.mlp.router.linear.weight"
LAB_LINEAR = replace(LAB, name="lab_linear", models={}, router=LINEAR, correction_bias=())
LAB_LINEAR_GELU = replace(LAB_GELU, name="lab_linear_gelu", router=LINEAR)
LAB_ROWLESS = replace(
    LAB,
    name="lab_rowless",
    models={},
    router=None,
    correction_bias=(),
    rowless_router=rowless_router,
    router_parts=ROUTER_PARTS,
)
LAB_ROWLESS_GELU = replace(
    LAB_GELU, name="lab_rowless_gelu", router=None, rowless_router=rowless_router, router_parts=ROUTER_PARTS
)
