"""Tiny lab models, trained a few steps so that biases.

Keys and moving averages are no longer what they began as.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from moescope.decoder.config import ModelConfig
from moescope.decoder.model import LabModel
from moescope.lab.config import LabConfig, with_router
from moescope.types import Routing

VOCABULARY = 61
TINY = ModelConfig(
    vocabulary=VOCABULARY, d_model=32, layers=3, heads=2, d_ff=16, experts=8, top_k=2, max_positions=64
)


def tiny(router: str, **changes: object) -> ModelConfig:
    """A tiny config of that router; SoME gets the block and the frozen experts it is made for."""
    config = with_router(LabConfig(TINY), router).model
    if router == "some":
        config = replace(config, block="some", frozen_experts=True)
    return replace(config, **changes)  # type: ignore[arg-type]


def text(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(rows: int, length: int) -> torch.Tensor:
    """Each row one token shorter than the one before, but never empty."""
    return torch.arange(length)[None] < (length - torch.arange(rows) % (length - 1))[:, None]


def trained(config: ModelConfig, steps: int = 4, seed: int = 0) -> LabModel:
    """Trained on noise with large steps: what matters is that everything has moved."""
    torch.manual_seed(seed)
    model = LabModel(config).train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in range(steps):
        train_step(model, optimiser, text(6, 16, seed=100 + step))
    return model


def train_step(model: LabModel, optimiser: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    loss = model(ids[:, :-1], targets_BL=ids[:, 1:]).loss
    assert loss is not None
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    model.after_step()


@dataclass
class Pass:
    """Logits and every layer's decision of a pass."""

    logits: torch.Tensor
    layers: list[Routing] = field(default_factory=list)

    def sets(self) -> torch.Tensor:
        """Which experts each token has, as 0 and 1: bool [layers, B, L, E]. Slots have no order."""
        rows, length = self.logits.shape[:2]
        per_layer = []
        for routing in self.layers:
            has = torch.zeros(rows * length, routing.n_experts + 1, dtype=torch.bool)
            slots = routing.chosen_TK
            has.scatter_(1, torch.where(slots < 0, routing.n_experts, slots), True)
            per_layer.append(has[:, :-1].view(rows, length, -1))
        return torch.stack(per_layer)

    def sure(self) -> torch.Tensor:
        """Where every layer's choice was far enough from being another that rounding cannot change it.

        Bool [B, L].
        """
        rows, length = self.logits.shape[:2]
        sure = torch.ones(rows * length, dtype=torch.bool)
        for routing in self.layers:
            if routing.selection_TE is None:
                continue
            slots = routing.chosen_TK.shape[1]
            if slots == routing.n_experts:  # taken where the score is at least 0
                margin = routing.selection_TE.abs().amin(-1)
            else:
                best = routing.selection_TE.topk(slots + 1, dim=-1).values
                margin = best[:, -2] - best[:, -1]
            sure &= margin >= 1e-4
        return sure.view(rows, length)


def run(model: LabModel, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: object) -> Pass:
    with torch.no_grad():
        layers: list[Routing] = []
        logits = model(ids, mask, consume=layers.append, **more).logits_BLV  # type: ignore[arg-type]
    assert logits is not None
    return Pass(logits, layers)
