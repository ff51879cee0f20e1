"""Counts of one layer, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from moescope.routing.counts import SUMS, LayerCounts


def counted(loads_MBE: np.ndarray, tokens: int, layer: int = 0, k: int = 1, **more: Any) -> LayerCounts:
    """A layer's counts (domains, groups of documents, experts) with gates of 1."""
    sums = np.zeros((*loads_MBE.shape[:2], len(SUMS)))
    share = loads_MBE.sum(-1) / max(loads_MBE.sum(), 1)
    sums[..., SUMS.index("tokens")] = share * tokens
    return LayerCounts(layer, "moe", "prefill", k, loads_MBE, loads_MBE.astype(float), sums, **more)
