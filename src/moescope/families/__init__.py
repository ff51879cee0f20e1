"""Disk layouts of MoE checkpoints: one file each, and the list of them."""

from __future__ import annotations

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput
from moescope.families.layout import Family, MoeCheckpoint, read_layout, router_tensors
from moescope.families.mixtral import MIXTRAL
from moescope.families.qwen3_moe import QWEN3_MOE

FAMILIES: list[Family] = [MIXTRAL, QWEN3_MOE]

__all__ = ["FAMILIES", "Family", "MoeCheckpoint", "read_moe"]


def read_moe(checkpoint: Checkpoint) -> MoeCheckpoint:
    """The checkpoint's MoE layers. The layout is told by the tensors' names; the config only breaks a tie.

    A config whose model_type nobody claims still works when its tensors fit a layout; the coverage line names that layout.
    """
    fitting = [family for family in FAMILIES if router_tensors(family, checkpoint)]
    if not fitting:
        looked_for = ", ".join(f"{family.router} ({family.name})" for family in FAMILIES)
        model_type = (checkpoint.config or {}).get("model_type", "unknown")
        raise BadInput(
            f"{checkpoint.path}: no MoE layer found (model_type {model_type}); it may be a dense model, "
            f"or a layout not known yet. Looked for: {looked_for}"
        )
    model_type = (checkpoint.config or {}).get("model_type")
    named = [family for family in fitting if model_type in family.model_types]
    return read_layout((named or fitting)[0], checkpoint)
