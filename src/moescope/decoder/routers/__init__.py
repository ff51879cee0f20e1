"""The routers: one file each, one line here."""

from collections.abc import Mapping
from typing import Any

from moescope.decoder.config import ModelConfig, override
from moescope.decoder.routers.contract import Routed, Router, RouterInput, TokenContext, to_routing
from moescope.decoder.routers.dense import Dense
from moescope.decoder.routers.expert_choice import ExpertChoice
from moescope.decoder.routers.hash import Hash
from moescope.decoder.routers.loss_free import LossFree
from moescope.decoder.routers.some import SoME
from moescope.decoder.routers.spectra import Spectra
from moescope.decoder.routers.topk import SwitchTop1, Top2, TopK
from moescope.errors import unknown_name

ROUTERS: dict[str, type[Router]] = {
    "switch_top1": SwitchTop1,
    "top2": Top2,
    "topk": TopK,
    "expert_choice": ExpertChoice,
    "hash": Hash,
    "loss_free": LossFree,
    "spectra": Spectra,
    "some": SoME,
    "dense": Dense,
}


def router_class(name: str) -> type[Router]:
    if name not in ROUTERS:
        raise unknown_name("router", name, list(ROUTERS))
    return ROUTERS[name]


def facts_of_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the router of a [model] table, such as run.json and config.json hold."""
    config = override(ModelConfig(), model, "moescope_lab")
    return router_class(config.router).facts(config)


__all__ = [
    "ROUTERS",
    "Routed",
    "Router",
    "RouterInput",
    "TokenContext",
    "facts_of_model",
    "router_class",
    "to_routing",
]
