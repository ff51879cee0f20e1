"""Validation loss, by domain, on rows that never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moescope.decoder.model import LabModel
from moescope.lab.batches import IGNORED, TokenRows


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats of all targets, and of each domain's."""

    step: int
    loss: float
    domains: dict[str, float]
    published: float | None = (
        None  # with padding counted among the targets, as published losses of SoME are; None without padding
    )

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loss": self.loss, "domains": self.domains, "published": self.published}


@torch.no_grad()
def evaluate(
    model: LabModel, rows: TokenRows, step: int, batch_size: int, device: str, dtype: str
) -> Evaluation:
    """The model's loss on these rows, in evaluation mode; the mode it was in is restored."""
    before = model.training
    model.eval()
    sums_D, counts_D = np.zeros(len(rows.domains)), np.zeros(len(rows.domains))
    padded_sum, padded_count = 0.0, 0
    for first in range(0, rows.rows, batch_size):
        batch = rows.batch(np.arange(first, min(first + batch_size, rows.rows)))
        whole = batch.mask_BL.all()
        targets_BL = (
            batch.targets_BL if whole else np.where(batch.targets_BL == IGNORED, rows.pad, batch.targets_BL)
        )
        ids, mask, targets = (
            torch.from_numpy(part).to(device) for part in (batch.ids_BL, batch.mask_BL, targets_BL)
        )
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16"):
            output = model(ids, mask_BL=mask, targets_BL=targets)
        losses_BL = output.token_losses_BL.double().cpu().numpy()
        padded_sum, padded_count = padded_sum + losses_BL.sum(), padded_count + losses_BL.size
        for domain in range(len(rows.domains)):
            own = (batch.domain_B == domain)[:, None] & (batch.targets_BL != IGNORED)
            sums_D[domain] += losses_BL[own].sum()
            counts_D[domain] += own.sum()
    model.train(before)
    by_domain = {
        name: float(sums_D[at] / counts_D[at]) for at, name in enumerate(rows.domains) if counts_D[at]
    }
    padding = padded_count > counts_D.sum()
    published = float(padded_sum / padded_count) if padding else None
    return Evaluation(step, float(sums_D.sum() / counts_D.sum()), by_domain, published)
