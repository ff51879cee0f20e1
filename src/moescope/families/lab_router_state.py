"""What the lab's routers keep beside rows and biases: thresholds, keys' strengths, projections, tables."""

from __future__ import annotations

from moescope.families.layout import LayerTensors
from moescope.types import RouterState

ROUTER = "{L}.mlp.router."
OF_EXPERTS = (
    "midpoints_E",  # expert_choice: thresholds
    *("strength_E", "usage_E"),  # some: keys are directions times these strengths
    *("direction_ER", "potential_E"),  # spectra
    *(
        "expand.weight",
        "expand.bias",
        "express.weight",
        "express.bias",
    ),  # spectra: as many rows an expert as its state is wide
)
SHARED = ("steps", "wide.weight", "wide.bias", "narrow.weight", "narrow.bias", "state.weight", "state.bias")
TABLES = ("table_VK",)  # hash


def lab_router_state(tensors: LayerTensors) -> tuple[RouterState, ...]:
    """All of these that the layer has.

    SPECTRA without expression has one projection for all experts, which belongs to none.
    """
    common: tuple[str, ...] = SHARED
    if tensors.has(f"{ROUTER}expand.weight") and tensors.has(f"{ROUTER}express.weight"):
        expand, express = (
            tensors.checkpoint.tensors[tensors.name(f"{ROUTER}{part}.weight")].shape
            for part in ("expand", "express")
        )
        if express[0] != expand[0]:
            common = (*SHARED, "express.weight", "express.bias")
    kinds = (
        dict.fromkeys(OF_EXPERTS, "experts")
        | dict.fromkeys(common, "shared")
        | dict.fromkeys(TABLES, "table")
    )
    return tuple(
        tensors.state(ROUTER + name, kind) for name, kind in kinds.items() if tensors.has(ROUTER + name)
    )
