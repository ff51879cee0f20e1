"""Disk layouts of MoE checkpoints: one file each, and the list of them."""

from __future__ import annotations

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput
from moescope.families.layout import Family
from moescope.families.mixtral import MIXTRAL
from moescope.families.mlp_experts import MLP_EXPERTS
from moescope.families.reading import MoeCheckpoint, fits, read_layout, routers

FAMILIES: list[Family] = [MIXTRAL, MLP_EXPERTS]

__all__ = ["FAMILIES", "Family", "MoeCheckpoint", "read_moe"]


def read_moe(checkpoint: Checkpoint) -> MoeCheckpoint:
    """The checkpoint's MoE layers. The layout is told by the tensors' names; the config only breaks a tie.

    A config whose model_type nobody claims still works when its tensors fit a layout; the coverage line names that layout.
    """
    with_router = [family for family in FAMILIES if routers(family, checkpoint)]
    if not with_router:
        looked_for = ", ".join(f"{family.router} ({family.name})" for family in FAMILIES)
        model_type = (checkpoint.config or {}).get("model_type", "unknown")
        raise BadInput(
            f"{checkpoint.path}: no MoE layer found (model_type {model_type}); it may be a dense model, "
            f"or a layout not known yet. Looked for: {looked_for}"
        )
    fitting = [family for family in with_router if fits(family, checkpoint)] or with_router
    model_type = (checkpoint.config or {}).get("model_type")
    named = [family for family in fitting if model_type in family.models]
    return read_layout((named or fitting)[0], checkpoint)
