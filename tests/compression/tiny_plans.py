"""Tiny models on disk, read and planned for: what tests of applying and damage start from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from families.tiny_models import TinyModel, tiny_model
from moescope.checkpoint import open_checkpoint
from moescope.compression.calibration import Gating, LayerStates, StateSample, calibrate, find_gating
from moescope.compression.plan import Fits, LayerFit, checkpoint_mark
from moescope.compression.pruning import keep_best
from moescope.execution.adapters import Block
from moescope.execution.documents import Document
from moescope.execution.models import TracedModel, runner_of
from moescope.families import MoeCheckpoint, read_moe
from moescope.types import LayerPlan, Plan

# the families whose compressed files are held to be loadable, and the forms in which they lie on disk
FAMILIES = [
    ("mixtral", "saved"),
    ("mixtral", "memory"),
    ("qwen3_moe", "saved"),
    ("qwen3_moe", "memory"),
    ("olmoe", "saved"),
    ("deepseek_v3", "saved"),
    ("gpt_oss", "saved"),
    ("granitemoe", "saved"),
]


def traced(model: object, name: str = "model") -> TracedModel:
    return TracedModel(name, model, runner_of(model), None, "cpu")  # type: ignore[arg-type]


def saved(
    folder: Path, kind: str, form: str = "saved", dtype: torch.dtype = torch.float32
) -> tuple[TinyModel, MoeCheckpoint]:
    tiny = tiny_model(kind)
    if dtype != torch.float32:
        tiny.model.to(dtype)
    return tiny, read_moe(open_checkpoint(tiny.save(folder, form)))


def documents(count: int = 30, seed: int = 0, longest: int = 20) -> list[Document]:
    generator = np.random.default_rng(seed)
    return [
        Document(number, 0, generator.integers(3, 64, generator.integers(2, longest)))
        for number in range(count)
    ]


def calibrated(
    model: TracedModel, most: int = 200
) -> tuple[dict[int, LayerStates], dict[int, Gating], dict[int, Block]]:
    """States of a model, how each of its layers chooses where it has logits, and its blocks."""
    sample = StateSample(most=most)
    blocks = calibrate(model, documents(20), [sample]).blocks
    scorings = {layer: block.scoring for layer, block in blocks.items() if block.scoring is not None}
    gating = {layer: find_gating(sample.states[layer], scoring) for layer, scoring in scorings.items()}
    return sample.states, gating, blocks


def pruning_plan(moe: MoeCheckpoint, count: int, seed: int = 0) -> Plan:
    scores = {
        layer: np.random.default_rng((seed, layer)).permutation(weights.n_experts).astype(float)
        for layer, weights in moe.layers.items()
    }
    layers = keep_best(dict.fromkeys(moe.layers, count), scores, moe)
    return Plan("reap", checkpoint_mark(moe.checkpoint), layers, "none", "slice", None, {})


def merging_plan(
    moe: MoeCheckpoint, groups: tuple[tuple[int, ...], ...] = ((0, 2), (3,), (1,))
) -> tuple[Plan, Fits]:
    """Experts 0 and 2 merged after a random signed (where allowed) reordering; router rows by weight."""
    layers, fits = [], {}
    for number, weights in moe.layers.items():
        shares = tuple((0.25, 0.75) if len(group) == 2 else (1.0,) for group in groups)
        layers.append(
            LayerPlan(number, weights.n_experts, groups, tuple(group[-1] for group in groups), shares)
        )

        def rows(lazy, groups=groups, shares=shares):
            if lazy is None:
                return None
            own = lazy.read().float()
            return torch.stack(
                [
                    sum(w * own[e] for e, w in zip(g, s, strict=True))
                    for g, s in zip(groups, shares, strict=True)
                ]
            )

        generator = torch.Generator().manual_seed(number)
        order = torch.randperm(weights.d_ff, generator=generator)
        flips = weights.up_EFD is not None and weights.gate_bias_EF is None
        sign = (
            torch.randint(0, 2, (weights.d_ff,), generator=generator) * 2 - 1
            if flips
            else torch.ones(weights.d_ff)
        )
        fits[number] = LayerFit(
            rows(weights.router_ED),
            rows(weights.router_bias_E),
            rows(weights.correction_bias_E),
            {groups[0][0]: order} if len(groups[0]) == 2 else {},
            {groups[0][0]: sign} if len(groups[0]) == 2 else {},
        )
    plan = Plan("weights", checkpoint_mark(moe.checkpoint), tuple(layers), "signed", "fold", None, {})
    return plan, fits
