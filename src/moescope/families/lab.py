"""The router lab's own layouts: fused experts under `mlp.experts`; router rows, SoME's keys, or neither.

Routers without a row per expert (see `Router.has_rows`) are supported too: their experts are read.
"""

from collections.abc import Callable
from dataclasses import replace

from moescope.errors import BadInput
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
from moescope.types import ExpertStack, RouterState

COUNT, TOP_K = ("num_experts",), ("num_experts_per_tok",)
GATE_UP, UP, DOWN = "{L}.mlp.experts.gate_up", "{L}.mlp.experts.up", "{L}.mlp.experts.down"
ROUTER = "{L}.mlp.router."
KINDS = ("experts", "shared", "table")  # of a router's tensors: types.RouterState
ROUTER_PARTS = (".mlp.router.", "shared_router.")


def router_facts(config: Config) -> Config:
    """Return the facts about the router that a lab checkpoint holds, else those of the router's class."""
    facts = config.get("moescope_router")
    if isinstance(facts, dict) and isinstance(facts.get("state_tensors"), dict):
        return facts
    if "moescope_lab" not in config:
        return {"has_rows": True, "state_tensors": {}}
    from moescope.decoder.routers import facts_of_model

    return facts_of_model(config["moescope_lab"])


def rowless_router(config: Config) -> str | None:
    """Return the router's name where a lab checkpoint's config says that it has no rows, else None."""
    if config.get("model_type") != "moescope_lab" or not isinstance(config.get("moescope_lab"), dict):
        return None
    facts = router_facts(config)
    return None if facts["has_rows"] else str(facts["name"])


def router_state_of(place: str) -> Callable[[LayerTensors], tuple[RouterState, ...]]:
    """Return a reader of the router's tensors besides rows and biases, whose names begin so."""

    def read(tensors: LayerTensors) -> tuple[RouterState, ...]:
        kinds: dict[str, str] = router_facts(tensors.checkpoint.config or {})["state_tensors"]
        for name, kind in kinds.items():
            if kind not in KINDS:
                raise BadInput(
                    f"{tensors.checkpoint.shown}: config.json: moescope_router: the kind of tensor {name} is "
                    f"{kind!r}, not {', '.join(KINDS)}; copy the checkpoint again"
                )
        names = {f"{place}{name}": kind for name, kind in kinds.items()}
        return tuple(tensors.state(name, kind) for name, kind in names.items() if tensors.has(name))

    return read


router_state = router_state_of(ROUTER)


def up_and_down(tensors: LayerTensors) -> Stacks:
    """Experts without a gate, stacked: up [E, F, D] and down [E, D, F]."""
    info = tensors.info(UP)
    check_shape(info, (tensors.n_experts, "d_ff", tensors.d_model))
    d_ff, width = info.shape[1], tensors.d_model
    ups = tensors.slices(UP, lambda part: part, (d_ff, width), (d_ff, width))
    return ups, None, tensors.slices(DOWN, lambda part: part, (width, d_ff), (width, d_ff))


def gelu_biases(tensors: LayerTensors) -> dict[str, ExpertStack]:
    """The biases of both projections, one row per expert."""
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
    router_state=router_state,
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
    router_state=router_state,
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
    router_state=router_state,
)
# SPECTRA with `plain` is a linear router under another name.
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
