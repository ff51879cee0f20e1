"""Disk layouts of MoE checkpoints: one file each, and the list of them."""

from __future__ import annotations

import re

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput
from moescope.families.dbrx import DBRX
from moescope.families.feed_forward import FEED_FORWARD
from moescope.families.gpt_oss import GPT_OSS
from moescope.families.granite import GRANITE, GRANITE_FUSED
from moescope.families.hunyuan import HUNYUAN
from moescope.families.lab import (
    LAB,
    LAB_GELU,
    LAB_KEYS,
    LAB_LINEAR,
    LAB_LINEAR_GELU,
    LAB_ROWLESS,
    LAB_ROWLESS_GELU,
)
from moescope.families.layout import Family, Model
from moescope.families.lfm2 import LFM2
from moescope.families.mixtral import MIXTRAL
from moescope.families.mlp_experts import MLP_EXPERTS
from moescope.families.mlp_router import MLP_ROUTER
from moescope.families.nllb import NLLB
from moescope.families.reading import MoeCheckpoint, fits, found_layers, known_kind, read_layout
from moescope.families.router_gate import ROUTER_GATE
from moescope.families.switch import SWITCH

# Where two layouts fit the same tensors, the first counts: GPT_OSS asks for more than MLP_ROUTER.
FAMILIES: list[Family] = [
    MIXTRAL,
    MLP_EXPERTS,
    GPT_OSS,
    MLP_ROUTER,
    ROUTER_GATE,
    HUNYUAN,
    FEED_FORWARD,
    LFM2,
    DBRX,
    GRANITE,
    GRANITE_FUSED,
    NLLB,
    SWITCH,
    LAB,
    LAB_GELU,
    LAB_KEYS,
    LAB_LINEAR,
    LAB_LINEAR_GELU,
    LAB_ROWLESS,
    LAB_ROWLESS_GELU,
]
# A model is told by its config in whatever layout it lies: transformers holds Mixtral as it holds Qwen.
MODELS: dict[str, Model] = {kind: model for family in FAMILIES for kind, model in family.models.items()}

__all__ = ["FAMILIES", "MODELS", "Family", "MoeCheckpoint", "read_moe"]


def read_moe(checkpoint: Checkpoint) -> MoeCheckpoint:
    """The checkpoint's MoE layers. The layout is told by the tensors' names; the config only breaks a tie.

    A config whose model_type nobody claims still works when its tensors fit a layout; the coverage line names
    that layout.
    """
    found = [family for family in FAMILIES if found_layers(family, checkpoint)]
    if not found:
        if checkpoint.one_file and re.search(r"-of-\d+", checkpoint.name):
            raise BadInput(
                f"{checkpoint.shown}: no router of an MoE layer in this shard; give the folder "
                "of the whole checkpoint"
            )
        looked_for = ", ".join(f"{family.router} ({family.name})" for family in FAMILIES if family.router)
        model_type = (checkpoint.config or {}).get("model_type", "unknown")
        raise BadInput(
            f"{checkpoint.shown}: no MoE layer found (model_type {model_type}); it may be a dense model, "
            f"or a layout not known yet. Looked for: {looked_for}"
        )
    fitting = [family for family in found if fits(family, checkpoint)] or found
    kind = known_kind(MODELS, checkpoint.config)
    named = [family for family in fitting if kind in family.models]
    return read_layout((named or fitting)[0], MODELS[kind] if kind else None, checkpoint)
