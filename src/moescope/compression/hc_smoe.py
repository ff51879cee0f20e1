"""HC-SMoE: merge experts with similar mean outputs (Chen et al. 2025, "Retraining-free merging")."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import torch
from scipy.spatial.distance import pdist, squareform

from moescope.compression.calibration import SumCollector, real_tokens
from moescope.compression.merging import Grouping, LayerEvidence, average_linkage, merge_both, most_used
from moescope.execution.adapters import Block, ungated_output
from moescope.types import Array, Routing

CHUNK = 2048  # tokens per call of an expert


class ExpertMeans(SumCollector):
    """The sum of every expert's ungated output over all tokens, routed to it or not: [E, D].

    Every expert sees every token, one expert and a few thousand tokens at a time, which costs n / top_k times
    a layer's usual work.
    """

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.x_TD is not None
        x_TD = routing.x_TD[real_tokens(routing)]
        total_ED = torch.zeros(routing.n_experts, x_TD.shape[1], dtype=torch.float64, device=x_TD.device)
        for chunk_TD in torch.split(x_TD, CHUNK):
            for expert in range(routing.n_experts):
                total_ED[expert] += ungated_output(block, chunk_TD, expert).sum(0, dtype=torch.float64)
        self.add(routing.layer, output_sum_ED=total_ED, output_tokens=torch.tensor(len(x_TD)))


def hc_smoe(mean_output_ED: Array, usage_E: Array, keep: int, n_groups: int = 1) -> Grouping:
    """Group one layer's experts by average linkage of their mean outputs.

    The feature of an expert is the mean of its ungated output over all calibration tokens. A mean hides what
    an expert does differently at different tokens: two experts may share one and still differ.

    The dominant member is the most used one, which has the largest share of the merged expert. The authors'
    code takes the one nearest to the centre of its group's outputs; both members of a pair are equally near.
    """
    distance_EE = squareform(pdist(mean_output_ED))
    grouping = average_linkage(distance_EE, keep, most_used(usage_E), n_groups)
    # orthogonal outputs of these sizes are sqrt(|a|^2 + |b|^2) apart
    sizes = [np.hypot(a, b) for a, b in combinations(np.linalg.norm(mean_output_ED, axis=1), 2)]
    return replace(grouping, unrelated=float(np.mean(sizes)) if sizes else 0.0)


def group_by_outputs(layer: LayerEvidence) -> Grouping:
    mean_ED = (layer.sums["output_sum_ED"] / layer.sums["output_tokens"].clamp(min=1)).double().numpy()
    assert layer.usage_E is not None
    return hc_smoe(mean_ED, layer.usage_E, layer.keep, layer.n_groups)


METHOD, PERMUTED = merge_both(
    group_by_outputs, "hc_smoe", "merges experts with similar mean outputs", (ExpertMeans,)
)
