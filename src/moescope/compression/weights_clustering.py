"""Clusters from weights alone, for when there is no text.

Experts that are alike once their neurons are put into one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moescope.compression.grouping import Grouping, average_linkage, most_central
from moescope.errors import unknown_name
from moescope.geometry.distances import PolarFactor, polar_factor, sv_alignment
from moescope.geometry.matching import Matching, can_flip, match_neurons, matched_chance
from moescope.types import ExpertWeights

Array = npt.NDArray[np.float64]
MEASURES = ("l2", "sv")
MOST_PAIRS = 256  # matched a layer; matching takes the neurons' number cubed
SKETCH = 64  # random directions in which experts' Gram matrices are compared beforehand


@dataclass(frozen=True)
class WeightDistances:
    """Distances of a layer's experts after matching.

    Pairs that were not matched stand at the largest distance found.
    """

    distance_EE: Array
    matched_EE: npt.NDArray[np.bool_]

    @property
    def approximate(self) -> bool:
        return not bool(self.matched_EE.all())


def weights_clusters(
    experts: Sequence[ExpertWeights],
    keep: int,
    measure: str = "l2",
    n_groups: int = 1,
    most_pairs: int = MOST_PAIRS,
    device: str = "cpu",
) -> tuple[Grouping, WeightDistances]:
    """Average linkage of distances after signed neuron matching; the dominant of a group is its most central
    member.

    Read the heights beside what random experts of the same shape reach: matching finds some likeness in any
    two (`matched_chance`).
    """
    distances = matched_distances(experts, measure, most_pairs, device)
    grouping = average_linkage(distances.distance_EE, keep, most_central(distances.distance_EE), n_groups)
    return replace(grouping, unrelated=random_distance(experts[0], measure)), distances


def random_distance(expert: ExpertWeights, measure: str) -> float:
    """The distance that matching leaves between random experts of this one's shape."""
    d_ff, d_model = expert.gate_FD.shape
    drawn = matched_chance(d_ff, d_model, can_flip(expert), expert.up_FD is not None).values()
    if measure == "sv":
        return 1 - float(np.mean([chance.sv_alignment for chance in drawn]))
    return float(np.sqrt(np.mean([chance.relative_l2**2 for chance in drawn])))


def matched_distances(
    experts: Sequence[ExpertWeights], measure: str = "l2", most_pairs: int = MOST_PAIRS, device: str = "cpu"
) -> WeightDistances:
    """l2: sqrt(2 - 2 c), c the mean over projections of the matched matrices' cosine, so that unrelated
    experts lie near sqrt 2.
    sv: 1 - R, R the mean over projections of the matched polar factors' alignment.

    Up to `most_pairs` pairs are matched. Where a layer has more, those are chosen by a likeness that no order
    of neurons changes
    (`fingerprint_likeness`): every expert's nearest ones first. The rest are taken to lie as far apart as the
    farthest pair matched, so
    that average linkage joins them last; groups of more than a few experts then rest on that guess.
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, list(MEASURES))
    n_experts = len(experts)
    pairs = candidate_pairs(experts, most_pairs, device)
    between = l2_after_matching if measure == "l2" else sv_after_matching(experts, device)
    distance_EE = np.full((n_experts, n_experts), np.nan)
    np.fill_diagonal(distance_EE, 0.0)
    for a, b in pairs:
        matching = match_neurons(experts[a], experts[b], device=device)
        distance_EE[a, b] = distance_EE[b, a] = between(experts, a, b, matching)
    matched_EE = np.isfinite(distance_EE)
    farthest = float(np.nanmax(distance_EE)) if pairs else 0.0
    return WeightDistances(np.where(matched_EE, distance_EE, farthest), matched_EE)


def l2_after_matching(experts: Sequence[ExpertWeights], a: int, b: int, matching: Matching) -> float:
    """From the matching's own score, which is the sum over projections of the cosines."""
    projections = 2 if experts[a].up_FD is None else 3
    return float(np.sqrt(max(2 - 2 * matching.score / projections, 0.0)))


def sv_after_matching(
    experts: Sequence[ExpertWeights], device: str
) -> Callable[[Sequence[ExpertWeights], int, int, Matching], float]:
    """1 - mean R.

    A permuted polar factor is the polar factor of the permuted matrix, so each expert is decomposed once.
    """
    factors: dict[tuple[int, str], PolarFactor] = {}

    def factor(expert: int, name: str) -> PolarFactor:
        if (expert, name) not in factors:
            matrix = projections_of(experts[expert])[name]
            factors[expert, name] = polar_factor(matrix, device)
        return factors[expert, name]

    def between(experts: Sequence[ExpertWeights], a: int, b: int, matching: Matching) -> float:
        alike = []
        for name in projections_of(experts[a]):
            other = factor(b, name)
            moved = PolarFactor(matching.projection(name, other.matrix), other.rank)
            alike.append(sv_alignment(factor(a, name), moved))
        return 1 - float(np.mean(alike))

    return between


def projections_of(expert: ExpertWeights) -> dict[str, Tensor]:
    found = {"gate": expert.gate_FD, "up": expert.up_FD, "down": expert.down_DF}
    return {name: matrix for name, matrix in found.items() if matrix is not None}


def candidate_pairs(
    experts: Sequence[ExpertWeights], most_pairs: int, device: str = "cpu"
) -> list[tuple[int, int]]:
    """All pairs where they are few enough.

    Else each expert's nearest by fingerprint, in turn, until `most_pairs` are found.
    """
    n_experts = len(experts)
    everything = [(a, b) for a in range(n_experts) for b in range(a + 1, n_experts)]
    if len(everything) <= most_pairs:
        return everything
    likeness_EE = fingerprint_likeness(experts, device)
    np.fill_diagonal(likeness_EE, -np.inf)
    nearest = np.argsort(-likeness_EE, axis=1)
    found: dict[tuple[int, int], None] = {}
    for place in range(n_experts - 1):
        by_likeness = sorted(
            range(n_experts), key=lambda expert: -likeness_EE[expert, nearest[expert, place]]
        )
        for expert in by_likeness:
            other = int(nearest[expert, place])
            if len(found) < most_pairs:
                found[min(expert, other), max(expert, other)] = None
    return sorted(found)


def fingerprint_likeness(experts: Sequence[ExpertWeights], device: str = "cpu") -> Array:
    """[E, E] mean over projections of the cosine of G - mean G, where G = W'W (down: WW') has no order of
    neurons and no signs in it.

    <G_a, G_b> is estimated from G S, S a fixed random matrix of 64 columns: E tr(S' G_a G_b S) = 64 <G_a,
    G_b>. What all experts of the
    layer share is subtracted, so that their common directions do not make all look alike.
    """
    total = np.zeros((len(experts), len(experts)))
    names = list(projections_of(experts[0]))
    d_model = experts[0].gate_FD.shape[1]
    sketch_DS = torch.randn(d_model, min(SKETCH, d_model), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    for name in names:
        prints = []
        for expert in experts:
            matrix = projections_of(expert)[name].to(device, torch.float32)
            rows_FD = matrix.T if name == "down" else matrix
            print_DS = rows_FD.T @ (rows_FD @ sketch_DS)
            size = torch.linalg.vector_norm(rows_FD).square().clamp(min=1e-30)
            prints.append((print_DS / size).flatten().double())
        flat = torch.stack(prints)
        flat = flat - flat.mean(0)
        flat = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-300)
        total += (flat @ flat.T).cpu().numpy()
    return np.asarray(total / len(names))
