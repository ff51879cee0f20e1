"""Disk layouts of MoE checkpoints, those with similar names in one file, and the list of them."""

import re

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput
from moescope.families.dbrx import DBRX
from moescope.families.encoder_decoder import NLLB, SWITCH
from moescope.families.feed_forward import FEED_FORWARD, LFM2
from moescope.families.gpt_oss import GPT_OSS
from moescope.families.granite import GRANITE, GRANITE_FUSED
from moescope.families.lab import LABS
from moescope.families.layout import Family, Model
from moescope.families.mixtral import MIXTRAL
from moescope.families.mlp_experts import MLP_EXPERTS
from moescope.families.mlp_router import HUNYUAN, MLP_ROUTER, ROUTER_GATE
from moescope.families.reading import MoeCheckpoint, find_layers, fits, known_kind, read_layout
from moescope.families.replaced import ALL_REPLACED

# The first layout that fits is used: GPT_OSS requires more tensors than MLP_ROUTER.
FAMILIES: list[Family] = [
    MIXTRAL, MLP_EXPERTS, GPT_OSS, MLP_ROUTER, ROUTER_GATE, HUNYUAN, FEED_FORWARD, LFM2, DBRX, GRANITE,
    GRANITE_FUSED, NLLB, SWITCH, *LABS, *ALL_REPLACED,
]  # fmt: skip
# By model_type, independent of the layout: transformers may save Mixtral in Qwen's layout.
MODELS: dict[str, Model] = {kind: model for family in FAMILIES for kind, model in family.models.items()}

__all__ = ["FAMILIES", "MODELS", "Family", "MoeCheckpoint", "read_moe"]


def read_moe(checkpoint: Checkpoint) -> MoeCheckpoint:
    """Return the checkpoint's MoE layers. Tensor names decide the layout; the config only breaks a tie.

    An unknown model_type works if its tensors fit a layout; the coverage line then names the layout.
    """
    matching = [family for family in FAMILIES if find_layers(family, checkpoint)]
    if not matching:
        if checkpoint.one_file and re.search(r"-of-\d+", checkpoint.name):
            raise BadInput(
                f"{checkpoint.shown}: no router of an MoE layer in this shard; give the checkpoint's folder"
            )
        looked_for = ", ".join(f"{family.router} ({family.name})" for family in FAMILIES if family.router)
        raise BadInput(
            f"{checkpoint.shown}: no MoE layer found (model_type "
            f"{(checkpoint.config or {}).get('model_type', 'unknown')}); it may be a dense model (moescope "
            f"train --base gives it experts), or its layout is not supported. Looked for: {looked_for}"
        )
    fitting = [family for family in matching if fits(family, checkpoint)] or matching
    kind = known_kind(MODELS, checkpoint.config)
    named = [family for family in fitting if kind in family.models]
    return read_layout((named or fitting)[0], MODELS[kind] if kind else None, checkpoint)
