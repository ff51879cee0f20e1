"""Counts of routing by share of the batches, and their totals: the same on one worker and on many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moescope.execution.shares import ByShare
from moescope.routing.tally import SUMS, LayerCounts, Tally
from moescope.statistics import BUCKETS
from moescope.types import Integers


@dataclass(frozen=True)
class ShareCounts:
    """One layer's counts of one share of the batches: of the cells that have tokens only, so M = 1, B = C."""

    share: int
    cells_C: Integers
    counts: LayerCounts

    @classmethod
    def of(cls, share: int, counts: LayerCounts) -> ShareCounts:
        cells_C = np.flatnonzero(counts.sums("tokens"))

        def cut(values_MBX: Any) -> Any:
            return values_MBX.reshape(1, -1, values_MBX.shape[-1])[:, cells_C]

        probability_MBE = counts.probability_MBE
        held = replace(
            counts,
            counts_MBE=cut(counts.counts_MBE),
            gate_weight_MBE=cut(counts.gate_weight_MBE),
            sums_MBS=cut(counts.sums_MBS),
            probability_MBE=None if probability_MBE is None else cut(probability_MBE),
        )
        return cls(share, cells_C, held)


class CountsByShare(ByShare[Tally]):
    """Counts of all layers and phases, added share by share. A `Collector`.

    Floating-point sums depend on the order of addition; that of shares is the same on one worker and on many.
    With `apart`, shares are not added: another process does that.
    """

    def __init__(self, n_domains: int = 1, apart: bool = False):
        super().__init__(lambda: Tally(n_domains))
        self.n_domains, self.apart = n_domains, apart
        self.parts: list[ShareCounts] = []
        self.totals: dict[tuple[Any, ...], LayerCounts] = {}

    def take(self, share: int, collector: Tally) -> None:
        for counts in collector.to_cpu():
            self.add(ShareCounts.of(share, counts))

    def add(self, part: ShareCounts) -> None:
        if self.apart:
            self.parts.append(part)
            return
        counts = part.counts
        key = (counts.phase, counts.layer, counts.n_experts, counts.k)
        total = self.totals.get(key) or self.zeros(counts)
        if total.probability_MBE is None and counts.probability_MBE is not None:
            total = replace(total, probability_MBE=np.zeros_like(total.gate_weight_MBE))
        self.totals[key] = total
        for name in ("counts_MBE", "gate_weight_MBE", "sums_MBS", "probability_MBE"):
            values_MBX = getattr(counts, name)
            if values_MBX is not None:
                total_MBX = getattr(total, name)
                total_MBX.reshape(-1, total_MBX.shape[-1])[part.cells_C] += values_MBX[0]
        for name in ("pairs_EE", "first_ME"):
            getattr(total, name)[...] += getattr(counts, name)

    def zeros(self, counts: LayerCounts) -> LayerCounts:
        shape = (self.n_domains, BUCKETS)
        return replace(
            counts,
            counts_MBE=np.zeros((*shape, counts.n_experts), dtype=np.int64),
            gate_weight_MBE=np.zeros((*shape, counts.n_experts)),
            sums_MBS=np.zeros((*shape, len(SUMS))),
            pairs_EE=np.zeros_like(counts.pairs_EE),
            first_ME=np.zeros_like(counts.first_ME),
            probability_MBE=None,
        )

    def to_cpu(self) -> list[LayerCounts]:
        """Return everything counted so far, by phase and layer."""
        self.close()
        return sorted(self.totals.values(), key=lambda counts: (counts.phase, counts.layer))

    def layer_state(self, layer: int) -> list[dict[str, Any]]:
        """Return one layer's counts as plain data."""
        self.close()
        held = self.parts or [ShareCounts.of(0, counts) for counts in self.totals.values()]
        return [
            {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in {**vars(part.counts), "share": part.share, "cells": part.cells_C}.items()
            }
            for part in held
            if part.counts.layer == layer
        ]

    def restore_layer(self, layer: int, state: list[dict[str, Any]]) -> None:
        for counts in state:
            arrays: dict[str, Any] = {
                name: value.numpy() if isinstance(value, Tensor) else value for name, value in counts.items()
            }
            self.add(ShareCounts(arrays.pop("share"), arrays.pop("cells"), LayerCounts(**arrays)))
