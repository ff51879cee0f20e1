"""Weights clustering: merge experts with similar weights after neuron matching; needs no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch

from moescope.compression.merging import Grouping, LayerEvidence, average_linkage, merge_by, most_central
from moescope.geometry.matching import match_neurons, matched_chance, projections_of
from moescope.types import Array, ExpertWeights

MOST_PAIRS = 256  # matched per layer; the cost of a match is cubic in the number of neurons
SKETCH = 64  # random directions in which experts' Gram matrices are compared before matching


def weights_clusters(
    experts: Sequence[ExpertWeights],
    keep: int,
    n_groups: int = 1,
    most_pairs: int = MOST_PAIRS,
    device: str = "cpu",
) -> Grouping:
    """Average linkage of distances after signed neuron matching; the dominant is the most central member.

    Heights compare with the distance after matching of the first expert and the last one, randomly rotated:
    matching finds some similarity in any two experts.
    """
    distance_EE, _ = matched_distances(experts, most_pairs, device)
    grouping = average_linkage(distance_EE, keep, most_central(distance_EE), n_groups)
    chances = matched_chance(experts[0], experts[-1], device=device).values()
    unrelated = float(np.sqrt(np.mean([chance.relative_l2**2 for chance in chances])))
    return replace(grouping, unrelated=unrelated)


def matched_distances(
    experts: Sequence[ExpertWeights], most_pairs: int = MOST_PAIRS, device: str = "cpu"
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """[E, E] distances after matching, of at most `most_pairs` pairs, and which pairs were matched.

    sqrt(2 - 2 c), c the mean over projections of the matched matrices' cosine, so that unrelated experts are
    near sqrt 2. The score of a matching is the sum of these cosines.

    Where a layer has more pairs, the most similar by `fingerprint_similarity`, which ignores the order of
    neurons, are matched. The others get the largest distance matched, so that average linkage joins them
    last; groups of more than a few experts then depend on that guess.
    """
    n_experts = len(experts)
    pairs = candidate_pairs(experts, most_pairs, device)
    projections = len(projections_of(experts[0]))
    distance_EE = np.full((n_experts, n_experts), np.nan)
    np.fill_diagonal(distance_EE, 0.0)
    for a, b in pairs:
        matching = match_neurons(experts[a], experts[b], device=device)
        distance = float(np.sqrt(max(2 - 2 * matching.score / projections, 0.0)))
        distance_EE[a, b] = distance_EE[b, a] = distance
    matched_EE = np.isfinite(distance_EE)
    farthest = float(np.nanmax(distance_EE)) if pairs else 0.0
    return np.where(matched_EE, distance_EE, farthest), matched_EE


def candidate_pairs(
    experts: Sequence[ExpertWeights], most_pairs: int, device: str = "cpu"
) -> list[tuple[int, int]]:
    """All pairs if they are at most `most_pairs`; else each expert's nearest by fingerprint, in turn."""
    n_experts = len(experts)
    all_pairs = list(combinations(range(n_experts), 2))
    if len(all_pairs) <= most_pairs:
        return all_pairs
    similarity_EE = fingerprint_similarity(experts, device)
    np.fill_diagonal(similarity_EE, -np.inf)
    nearest = np.argsort(-similarity_EE, axis=1)[:, :-1]  # by rank, without the expert itself
    likeness = np.take_along_axis(similarity_EE, nearest, 1)
    expert = np.argsort(-likeness, axis=0, kind="stable").T  # per rank those most alike their other one first
    other = nearest[expert, np.arange(n_experts - 1)[:, None]]
    ordered = zip(np.minimum(expert, other).flat, np.maximum(expert, other).flat, strict=True)
    return sorted(list(dict.fromkeys((int(a), int(b)) for a, b in ordered))[:most_pairs])


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
            size = torch.linalg.vector_norm(rows_FD).square().clamp(min=1e-30)
            prints.append((rows_FD.T @ (rows_FD @ sketch_DS) / size).flatten().double())
        flat = torch.stack(prints)
        flat = flat - flat.mean(0)
        flat = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-300)
        total += (flat @ flat.T).cpu().numpy()
    return np.asarray(total / len(names))


def group_by_weights(layer: LayerEvidence) -> Grouping:
    experts = [layer.weights.expert(number, finite=True) for number in range(layer.weights.n_experts)]
    return weights_clusters(experts, layer.keep, layer.n_groups, device=layer.device)


SKETCHED = (
    f"neurons were matched for the {MOST_PAIRS} most similar pairs of experts per layer, by a sketch of "
    "their weights; all other pairs get the largest distance of these"
)

METHOD = merge_by(
    group_by_weights,
    "weights",
    "merges experts with similar weights after neuron matching; needs no text",
    matched=True,
    needs_text=False,
    caveats=lambda n_experts: [SKETCHED] if n_experts * (n_experts - 1) // 2 > MOST_PAIRS else [],
)
