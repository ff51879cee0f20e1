"""Weights clustering: merge experts with similar weights after neuron matching; needs no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moescope.compression.grouping import Grouping, average_linkage, most_central
from moescope.compression.merging import LayerEvidence, merge_by
from moescope.compression.method import Evidence
from moescope.errors import unknown_name
from moescope.geometry.distances import PolarFactor, polar_factor, sv_alignment
from moescope.geometry.matching import Matching, match_neurons, matched_chance
from moescope.types import Array, ExpertWeights

MEASURES = ("l2", "sv")
MOST_PAIRS = 256  # matched per layer; the cost of a match is cubic in the number of neurons
SKETCH = 64  # random directions in which experts' Gram matrices are compared before matching


@dataclass(frozen=True)
class WeightDistances:
    """Distances of a layer's experts after matching; pairs that were not matched have the largest of them."""

    distance_EE: Array
    matched_EE: npt.NDArray[np.bool_]


def weights_clusters(
    experts: Sequence[ExpertWeights],
    keep: int,
    measure: str = "l2",
    n_groups: int = 1,
    most_pairs: int = MOST_PAIRS,
    device: str = "cpu",
    bits: Mapping[str, int] | None = None,
) -> tuple[Grouping, WeightDistances]:
    """Average linkage of distances after signed neuron matching; the dominant is the most central member.
    `bits`: significand bits of each stored projection (those of the tensors' dtypes unless given).

    Compare the heights with `random_distance`: matching finds some similarity in any two experts.
    """
    distances = matched_distances(experts, measure, most_pairs, device, bits)
    grouping = average_linkage(distances.distance_EE, keep, most_central(distances.distance_EE), n_groups)
    return replace(grouping, unrelated=random_distance(experts, measure, device, bits)), distances


def random_distance(
    experts: Sequence[ExpertWeights], measure: str, device: str = "cpu", bits: Mapping[str, int] | None = None
) -> float:
    """The distance after matching of the first expert and the last one, randomly rotated."""
    first, last = (
        {
            name: polar_factor(matrix, device, (bits or {}).get(name))
            for name, matrix in projections_of(expert).items()
            if measure == "sv"
        }
        for expert in (experts[0], experts[-1])
    )
    chances = matched_chance(experts[0], experts[-1], factors=(first, last), device=device).values()
    if measure == "sv":
        return 1 - float(np.mean([chance.sv_alignment for chance in chances]))
    return float(np.sqrt(np.mean([chance.relative_l2**2 for chance in chances])))


def matched_distances(
    experts: Sequence[ExpertWeights],
    measure: str = "l2",
    most_pairs: int = MOST_PAIRS,
    device: str = "cpu",
    bits: Mapping[str, int] | None = None,
) -> WeightDistances:
    """Distances after matching, of at most `most_pairs` pairs.

    l2: sqrt(2 - 2 c), c the mean over projections of the matched matrices' cosine, so that unrelated experts
    are near sqrt 2. sv: 1 - R, R the mean over projections of the matched polar factors' alignment.

    Where a layer has more pairs, the most similar by `fingerprint_similarity`, which ignores the order of
    neurons, are matched. The others get the largest distance matched, so that average linkage joins them
    last; groups of more than a few experts then depend on that guess.
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, list(MEASURES))
    n_experts = len(experts)
    pairs = candidate_pairs(experts, most_pairs, device)
    between = l2_after_matching if measure == "l2" else sv_after_matching(experts, device, bits or {})
    distance_EE = np.full((n_experts, n_experts), np.nan)
    np.fill_diagonal(distance_EE, 0.0)
    for a, b in pairs:
        matching = match_neurons(experts[a], experts[b], device=device)
        distance_EE[a, b] = distance_EE[b, a] = between(experts, a, b, matching)
    matched_EE = np.isfinite(distance_EE)
    farthest = float(np.nanmax(distance_EE)) if pairs else 0.0
    return WeightDistances(np.where(matched_EE, distance_EE, farthest), matched_EE)


def l2_after_matching(experts: Sequence[ExpertWeights], a: int, b: int, matching: Matching) -> float:
    """From the matching's score, which is the sum over projections of the cosines."""
    projections = 2 if experts[a].up_FD is None else 3
    return float(np.sqrt(max(2 - 2 * matching.score / projections, 0.0)))


def sv_after_matching(
    experts: Sequence[ExpertWeights], device: str, bits: Mapping[str, int]
) -> Callable[[Sequence[ExpertWeights], int, int, Matching], float]:
    """1 - mean R. polar(P W) = P polar(W), so each expert is decomposed once."""
    factors: dict[tuple[int, str], PolarFactor] = {}

    def factor(expert: int, name: str) -> PolarFactor:
        if (expert, name) not in factors:
            matrix = projections_of(experts[expert])[name]
            factors[expert, name] = polar_factor(matrix, device, bits.get(name))
        return factors[expert, name]

    def between(experts: Sequence[ExpertWeights], a: int, b: int, matching: Matching) -> float:
        alignments = []
        for name in projections_of(experts[a]):
            other = factor(b, name)
            permuted = PolarFactor(matching.projection(name, other.matrix), other.rank)
            alignments.append(sv_alignment(factor(a, name), permuted))
        return 1 - float(np.mean(alignments))

    return between


def projections_of(expert: ExpertWeights) -> dict[str, Tensor]:
    projections = {"gate": expert.gate_FD, "up": expert.up_FD, "down": expert.down_DF}
    return {name: matrix for name, matrix in projections.items() if matrix is not None}


def candidate_pairs(
    experts: Sequence[ExpertWeights], most_pairs: int, device: str = "cpu"
) -> list[tuple[int, int]]:
    """All pairs if they are at most `most_pairs`; else each expert's nearest by fingerprint, in turn."""
    n_experts = len(experts)
    all_pairs = [(a, b) for a in range(n_experts) for b in range(a + 1, n_experts)]
    if len(all_pairs) <= most_pairs:
        return all_pairs
    similarity_EE = fingerprint_similarity(experts, device)
    np.fill_diagonal(similarity_EE, -np.inf)
    nearest = np.argsort(-similarity_EE, axis=1)
    pairs: set[tuple[int, int]] = set()
    for rank in range(n_experts - 1):
        for expert in sorted(
            range(n_experts), key=lambda expert: -similarity_EE[expert, nearest[expert, rank]]
        ):
            other = int(nearest[expert, rank])
            if len(pairs) < most_pairs:
                pairs.add((min(expert, other), max(expert, other)))
    return sorted(pairs)


def fingerprint_similarity(experts: Sequence[ExpertWeights], device: str = "cpu") -> Array:
    """[E, E] mean over projections of the cosine of G - mean G, with G = W'W (down: WW').

    G ignores the order and signs of neurons. <G_a, G_b> is estimated from G S, S a fixed random matrix of 64
    columns: E tr(S' G_a G_b S) = 64 <G_a, G_b>. The layer's mean is subtracted so that common directions do
    not make all experts look alike.
    """
    total = np.zeros((len(experts), len(experts)))
    names = list(projections_of(experts[0]))
    d_model = experts[0].gate_FD.shape[1]
    generator = torch.Generator().manual_seed(0)
    sketch_DS = torch.randn(d_model, min(SKETCH, d_model), generator=generator).to(device)
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


def group_by_weights(evidence: Evidence, layer: LayerEvidence) -> Grouping:
    experts = [layer.weights.expert(number, finite=True) for number in range(layer.weights.n_experts)]
    measure = layer.measure(MEASURES)
    bits = {name: stack.significand_bits for name, stack in layer.weights.projections.items()}
    return weights_clusters(experts, layer.keep, measure, layer.n_groups, device=layer.device, bits=bits)[0]


def sketch_warnings(n_experts: int) -> list[str]:
    if n_experts * (n_experts - 1) // 2 <= MOST_PAIRS:
        return []
    return [
        f"neurons were matched for the {MOST_PAIRS} most similar pairs of experts per layer, by a sketch of "
        "their weights; all other pairs get the largest distance of these"
    ]


METHOD = merge_by(
    group_by_weights,
    "weights",
    "merges experts with similar weights after neuron matching; needs no text",
    matched=True,
    needs_text=False,
    distances=MEASURES,
    caveats=sketch_warnings,
)
