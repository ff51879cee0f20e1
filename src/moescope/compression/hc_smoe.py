"""HC-SMoE: experts that give the same output on average belong together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import pdist, squareform

from moescope.compression.grouping import Grouping, average_linkage, most_used
from moescope.errors import unknown_name

Array = npt.NDArray[np.float64]
MEASURES = ("euclidean", "cosine")


def hc_smoe(
    mean_output_ED: Array, usage_E: Array, keep: int, measure: str = "euclidean", n_groups: int = 1
) -> Grouping:
    """One layer's groups by average linkage of the experts' mean outputs (Chen et al. 2025, "Retraining-free
    merging").

    The feature of an expert is the mean of its ungated output over all calibration tokens, whether they were
    sent to it or not. A mean
    hides what an expert does differently at different tokens: two experts may share one and not be alike.
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, list(MEASURES))
    distance_EE = np.nan_to_num(
        squareform(pdist(mean_output_ED, measure)), nan=1.0
    )  # an output of zeros has no direction
    grouping = average_linkage(distance_EE, keep, most_used(usage_E), n_groups)
    return replace(grouping, unrelated=unrelated_distance(mean_output_ED) if measure == "euclidean" else 1.0)


def unrelated_distance(mean_output_ED: Array) -> float:
    """Mean over pairs of sqrt(|a|^2 + |b|^2).

    How far outputs of these sizes lie apart when their directions have nothing in common.
    """
    squares = np.square(mean_output_ED).sum(1)
    a, b = np.triu_indices(len(squares), 1)
    return float(np.sqrt(squares[a] + squares[b]).mean()) if len(a) else 0.0
