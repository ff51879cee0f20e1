"""Models that interventions are tested on: every family of transformers and every router of the lab."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoder.tiny_lab import run as run_lab
from decoder.tiny_lab import text, tiny, trained
from families.tiny_models import output_of, tiny_model
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS
from moescope.execution.adapters import Block, find_blocks
from moescope.execution.lab_models import lab_blocks
from moescope.families import MODELS
from moescope.families.lab import LAB
from moescope.families.replaced import REPLACED

FAMILIES = sorted(
    set(MODELS) - {"kimi_k2", "nllb-moe", *LAB.models, *REPLACED.models}
)  # transformers runs NLLB's wrongly
LAB_ROUTERS = [f"lab {name}" for name, router in ROUTERS.items() if router.routes]
# One of each way to route and to call experts; the rest is slow by its number.
DIFFERENT = ["mixtral", "deepseek_v3", "llama4_text", "switch_transformers", "dbrx", "gpt_oss", "phimoe"]
DIFFERENT += ["ernie4_5_moe", "afmoe", *LAB_ROUTERS]
REST = [name for name in FAMILIES if name not in (*DIFFERENT, "kimi_linear")]
KINDS = [name for name in DIFFERENT if name in FAMILIES]  # blocks alone
KINDS += [pytest.param(name, marks=pytest.mark.slow) for name in (*REST, "kimi_linear")]
# Kimi's takes seconds per pass; its blocks are DeepSeek V3's, and tested alone.
NAMES = [*DIFFERENT, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]


@functools.cache
def model_named(name: str) -> Any:
    """A shared model: tests must leave it as it is."""
    if not name.startswith("lab "):
        return tiny_model(name).model
    return trained(tiny(name.removeprefix("lab "))).eval()


def blocks_of(model: nn.Module) -> dict[int, Block]:
    blocks = lab_blocks(model) if isinstance(model, LabModel) else find_blocks(model)
    return {block.layer: block for block in blocks}


def logits_of(model: nn.Module) -> Tensor:
    if isinstance(model, LabModel):
        return run_lab(model, text(2, 12)).logits
    return output_of(model)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Every tensor's bits and identity, every hook, every attribute that a module has of its own."""
    state = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        state[name] = (id(tensor), hashlib.sha256(bits).hexdigest())
    for name, module in model.named_modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        state[f"{name} hooks"] = [len(getattr(module, kind)) for kind in kinds]
        state[f"{name} attributes"] = sorted(vars(module))
        state[f"{name} values"] = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, int | float | str)
        ]
    return state
