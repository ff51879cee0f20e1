"""HC-SMoE: merge experts with similar mean outputs (Chen et al. 2025, "Retraining-free merging")."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.spatial.distance import pdist, squareform
from torch import Tensor

from moescope.compression.calibration import Sums, add_to_layer, named_sums, real_tokens
from moescope.compression.grouping import Grouping, average_linkage, most_used, nearest_centre
from moescope.compression.merging import LayerEvidence, merge_by
from moescope.compression.method import Evidence
from moescope.errors import unknown_name
from moescope.execution.adapters import Block, ungated_output
from moescope.types import Array, Routing

MEASURES = ("euclidean", "cosine")
DOMINANTS = ("usage", "centre")
CHUNK = 2048  # tokens per call of an expert


class ExpertMeans:
    """Collector of the sum of every expert's ungated output over all tokens, routed to it or not: [E, D].

    Every expert sees every token, one expert and a few thousand tokens at a time, which costs n / top_k times
    a layer's usual work.
    """

    def __init__(self) -> None:
        self.output: dict[int, Tensor] = {}
        self.tokens: dict[int, Tensor] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.x_TD is not None
        x_TD = routing.x_TD[real_tokens(routing)]
        total_ED = torch.zeros(routing.n_experts, x_TD.shape[1], dtype=torch.float64, device=x_TD.device)
        for chunk_TD in torch.split(x_TD, CHUNK):
            for expert in range(routing.n_experts):
                total_ED[expert] += ungated_output(block, chunk_TD, expert).sum(0, dtype=torch.float64)
        add_to_layer(self.output, routing.layer, total_ED)
        add_to_layer(self.tokens, routing.layer, torch.tensor(len(x_TD)))

    def sums(self) -> Sums:
        return named_sums("output_sum_ED", self.output) | named_sums("output_tokens", self.tokens)


def hc_smoe(
    mean_output_ED: Array,
    usage_E: Array,
    keep: int,
    measure: str = "euclidean",
    n_groups: int = 1,
    dominant: str = "usage",
) -> Grouping:
    """Group one layer's experts by average linkage of their mean outputs.

    The feature of an expert is the mean of its ungated output over all calibration tokens. A mean hides what
    an expert does differently at different tokens: two experts may share one and still differ.

    The dominant member is the most used one, or, as in the authors' code, the one nearest to the centre of
    its group's outputs (`dominant="centre"`). The most used one is the default: it has the largest share of
    the merged expert, and both members of a pair are equally near to its centre.
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, list(MEASURES))
    # an output of zeros has no direction: distance 1
    distance_EE = np.nan_to_num(squareform(pdist(mean_output_ED, measure)), nan=1.0)
    choose = nearest_centre(mean_output_ED, usage_E) if dominant == "centre" else most_used(usage_E)
    grouping = average_linkage(distance_EE, keep, choose, n_groups)
    return replace(grouping, unrelated=unrelated_distance(mean_output_ED) if measure == "euclidean" else 1.0)


def unrelated_distance(mean_output_ED: Array) -> float:
    """Mean over pairs of sqrt(|a|^2 + |b|^2): the distance of orthogonal outputs of these sizes."""
    squares = np.square(mean_output_ED).sum(1)
    a, b = np.triu_indices(len(squares), 1)
    return float(np.sqrt(squares[a] + squares[b]).mean()) if len(a) else 0.0


def group_by_outputs(evidence: Evidence, layer: LayerEvidence) -> Grouping:
    mean_ED = (layer.sums["output_sum_ED"] / layer.sums["output_tokens"].clamp(min=1)).double().numpy()
    assert layer.usage_E is not None
    dominant = layer.settings.dominant
    return hc_smoe(mean_ED, layer.usage_E, layer.keep, layer.measure(MEASURES), layer.n_groups, dominant)


METHOD = merge_by(
    group_by_outputs,
    "hc_smoe",
    "merges experts with similar mean outputs",
    matched=False,
    collectors=(ExpertMeans,),
    distances=MEASURES,
    dominants=DOMINANTS,
)
PERMUTED = merge_by(
    group_by_outputs,
    "hc_smoe_permuted",
    "hc_smoe with the members' neurons matched first",
    matched=True,
    collectors=(ExpertMeans,),
    distances=MEASURES,
    dominants=DOMINANTS,
)
