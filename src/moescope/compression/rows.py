"""The rows of compression's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from moescope.compression.calibration import Sums
from moescope.compression.ean import ean
from moescope.compression.frequency import frequency
from moescope.compression.gate_weight import gate_weight
from moescope.compression.grouping import Grouping
from moescope.compression.reap import reap
from moescope.compression.saliency import Score, layer_sums, score_experts
from moescope.families import MoeCheckpoint
from moescope.geometry.pairs import layer_geometry
from moescope.statistics import FEWEST_DOCUMENTS
from moescope.types import Array, Plan

MOST_PAIRS = 32  # compared per layer: matching and decomposing more would take longer than planning
RESAMPLED = 1000
CONFIDENCE = 0.95
# what `judging.judged_differences` gives per model; the last six of controls only
JUDGED = (
    *("perplexity", "loss_increase", "loss_increase_low", "loss_increase_high"),
    *("js_divergence", "js_divergence_low", "js_divergence_high"),
    *("loss_above_plan", "loss_above_plan_low", "loss_above_plan_high"),
    *("js_above_plan", "js_above_plan_low", "js_above_plan_high"),
)


def cluster_rows(plan: Plan, layer_names: Mapping[int, str]) -> pd.DataFrame:
    """The table `clusters`: what becomes of every expert."""
    rows = []
    for layer in plan.layers:
        cluster = {expert: number for number, group in enumerate(layer.groups) for expert in group}
        weight = {
            expert: share
            for group, shares in zip(layer.groups, layer.weights, strict=True)
            for expert, share in zip(group, shares, strict=True)
        }
        rows += [
            {
                "method": plan.method,
                "layer": layer.layer,
                "layer_name": layer_names[layer.layer],
                "expert": expert,
                "cluster": cluster.get(expert),
                "dominant": expert in layer.dominants,
                "weight": weight.get(expert),
                "kept": expert in cluster,
                "chance_alone": alone_by_chance(len(cluster), len(layer.groups)),
            }
            for expert in range(layer.n_experts)
        ]
    return pd.DataFrame(rows).astype({"cluster": "Int64"})


def alone_by_chance(n_experts: int, groups: int) -> float:
    """Expected groups of one when each of n - K others joins one of K at random: K (1 - 1/K)^(n - K)."""
    return groups * (1 - 1 / groups) ** (n_experts - groups) if groups else 0.0


def merge_rows(
    method: str, groupings: Mapping[int, Grouping], layer_names: Mapping[int, str]
) -> pd.DataFrame | None:
    """The table `merges`; None where no merges led to the groups."""
    rows = [
        {
            "method": method,
            "layer": layer,
            "layer_name": layer_names[layer],
            "merge": number,
            "left": merge.left,
            "right": merge.right,
            "height": merge.height,
            "chance_height": grouping.unrelated,
            "size": merge.size,
            "done": merge.done,
        }
        for layer, grouping in groupings.items()
        for number, merge in enumerate(grouping.merges)
    ]
    return pd.DataFrame(rows) if rows else None


def damage_rows(
    plan: Plan,
    layer_names: Mapping[int, str],
    predicted: Mapping[str, Mapping[str, Any]],
    judged: Mapping[str, Mapping[str, Any]],
    perplexity_original: float | None,
    judged_documents: int | None,
    bytes_after_before: tuple[int | None, int | None],
) -> pd.DataFrame:
    """The table `damage`: one row per layer and one for the whole model, of the plan and of every control."""
    after, before = bytes_after_before
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys([plan.method, *predicted, *judged]):
        measured = judged.get(method, {})
        for layer, name in layer_names.items():
            error, kl = predicted.get(method, {}).get(str(layer), (None, None))
            rows.append(
                {
                    "method": method,
                    "layer": layer,
                    "layer_name": name,
                    "predicted_error": error,
                    "measured_error": measured.get("errors", {}).get(str(layer)),
                    "router_kl": kl,
                }
            )
        rows.append(
            {
                "method": method,
                "layer": None,
                "layer_name": None,
                **{name: measured.get(name) for name in JUDGED},
                "perplexity_original": perplexity_original,
                "judged_documents": judged_documents,
                "bytes": after,  # a control keeps as many experts, so it is as large as the plan
                "bytes_original": before,
            }
        )
    integers = ("layer", "judged_documents", "bytes", "bytes_original")
    floats = ("predicted_error", "measured_error", "router_kl", "perplexity_original", *JUDGED)
    return pd.DataFrame(rows).astype(dict.fromkeys(integers, "Int64") | dict.fromkeys(floats, "float64"))


def saliency_rows(
    sums: Sums, layer_names: Mapping[int, str], ranked_by: Score, documents: int, seed: int
) -> pd.DataFrame:
    """The table `saliency`: every expert's scores, and the interval of its rank by the score that decides."""
    frames = []
    for layer, layer_name in layer_names.items():
        low, high = rank_intervals(sums, layer, ranked_by, documents, seed)
        tokens = score_experts(sums, layer, frequency).astype(np.int64)
        columns: dict[str, Any] = {
            "layer": layer,
            "layer_name": layer_name,
            "expert": range(len(tokens)),
            "tokens": tokens,
            "gate_weight": score_experts(sums, layer, gate_weight),
            "ean": score_experts(sums, layer, ean),
            "reap": score_experts(sums, layer, reap),
            "rank_low": low,
            "rank_high": high,
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def rank_intervals(sums: Sums, layer: int, score: Score, documents: int, seed: int) -> tuple[Array, Array]:
    """95 % intervals of each expert's rank (1: the most salient): percentile bootstrap over document buckets.

    Tied experts share the mean of their ranks. NaN under 20 documents.
    """
    totals = layer_sums(sums, layer)
    used = totals["tokens_BE"].any(1)
    n, n_experts = int(used.sum()), totals["tokens_BE"].shape[1]
    if documents < FEWEST_DOCUMENTS or n < 2:
        return np.full(n_experts, np.nan), np.full(n_experts, np.nan)
    drawn_NB = np.random.default_rng((seed, layer)).multinomial(n, np.full(n, 1 / n), size=RESAMPLED)
    resampled = {name: drawn_NB @ value[used] for name, value in totals.items()}
    ranks_NE = stats.rankdata(-score(resampled), axis=1)
    low, high = np.quantile(ranks_NE, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], axis=0)
    return low, high


def cluster_pairs(plan: Plan, seed: int) -> dict[int, list[tuple[int, int]]]:
    """Layer -> (dominant, other member) of every group of two or more; at most 32, drawn at random."""
    layers = {}
    for layer in plan.layers:
        pairs = [
            (dominant, member)
            for group, dominant in zip(layer.groups, layer.dominants, strict=True)
            for member in group
            if member != dominant
        ]
        if len(pairs) > MOST_PAIRS:
            drawn = np.random.default_rng((seed, layer.layer)).choice(len(pairs), MOST_PAIRS, replace=False)
            pairs = [pairs[index] for index in sorted(drawn)]
        if pairs:
            layers[layer.layer] = pairs
    return layers


def cluster_geometry(moe: MoeCheckpoint, plan: Plan, device: str, seed: int) -> dict[str, pd.DataFrame]:
    """The tables of the expert-distance chart of a plan's groups, without and with matching."""
    base = plan.method.removesuffix("_permuted")
    series = {base: "none", f"{base}_permuted": "unsigned" if plan.matching == "unsigned" else "signed"}
    parts: dict[str, list[pd.DataFrame]] = {"geometry": [], "geometry_layers": []}
    for layer, pairs in cluster_pairs(plan, seed).items():
        weights = moe.layers[layer]
        for name, frame in layer_geometry(weights, weights, pairs, series, device=device, seed=seed).items():
            parts[name].append(frame)
    return {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items() if frames}
