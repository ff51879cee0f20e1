"""The rows of compression's tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from moescope.compression.calibration import Sums
from moescope.compression.merging import Grouping
from moescope.compression.method import Method
from moescope.compression.pruning import (
    Score,
    ean,
    frequency,
    gate_weight,
    layer_sums,
    reap,
    score_experts,
)
from moescope.compression.tables import PER_LAYER
from moescope.families import MoeCheckpoint
from moescope.geometry.pairs import layer_geometry
from moescope.statistics import FEWEST_DOCUMENTS, LEVEL, TAILS, resampled_sums
from moescope.types import Array, Plan

MOST_PAIRS = 32  # compared per layer: matching and decomposing more would take longer than planning
RESAMPLED = 1000
FEWEST_EXPECTED = 5.0  # tokens that would choose both of a pair: fewer are not judged
# what `judged_differences` gives per model; the last two of controls only, and each with its interval
COMPARED = ("loss_increase", "js_divergence", "loss_above_plan", "js_above_plan")
SIZES = ("1", "2", "3", "4", "5+")  # of groups
Kept = Mapping[int, Collection[int]]
JUDGED = ("perplexity", *(f"{name}{end}" for name in COMPARED for end in ("", "_low", "_high")))


def cluster_rows(plan: Plan, layer_names: Mapping[int, str]) -> pd.DataFrame:
    """The table `clusters`: what becomes of every expert."""
    rows = []
    for layer in plan.layers:
        pairs = zip(layer.groups, layer.weights, strict=True)
        members = {
            expert: (number, share)
            for number, (group, shares) in enumerate(pairs)
            for expert, share in zip(group, shares, strict=True)
        }
        keys = {"method": plan.method, "layer": layer.layer, "layer_name": layer_names[layer.layer]}
        keys["chance_alone"] = alone_by_chance(len(members), len(layer.groups))
        for expert in range(layer.n_experts):
            cluster, weight = members.get(expert, (None, None))
            of_cluster = {"cluster": cluster, "dominant": expert in layer.dominants, "weight": weight}
            rows.append({**keys, "expert": expert, **of_cluster, "kept": expert in members})
    frame = pd.DataFrame(rows).astype({"cluster": "Int64"})
    sizes = frame.groupby(["layer", "cluster"])["expert"].transform("size")
    return frame.assign(members=sizes.fillna(0).astype(int))


def group_size_rows(clusters: pd.DataFrame) -> pd.DataFrame | None:
    """The table `group_sizes`: how many groups of a layer have how many members; None without merges."""
    if (clusters["members"] < 2).all():
        return None
    groups = clusters[clusters["dominant"] & clusters["kept"]]
    size = groups["members"].clip(upper=len(SIZES)).map(dict(enumerate(SIZES, start=1))).rename("size")
    counts = groups.groupby(["layer", "layer_name", size]).size().unstack(fill_value=0)
    present = [name for name in SIZES if name == SIZES[0] or name in counts]
    counts = counts.reindex(columns=pd.Index(present, name="size"), fill_value=0)
    frame = counts.stack().rename("groups").reset_index()
    by_layer = clusters.groupby("layer").agg(largest=("members", "max"), alone=("chance_alone", "first"))
    frame = frame.merge(by_layer, on="layer")
    return frame.assign(groups_chance=frame.pop("alone").where(frame["size"] == SIZES[0]))


def alone_by_chance(n_experts: int, groups: int) -> float:
    """Expected groups of one when each of n - K others joins one of K at random: K (1 - 1/K)^(n - K)."""
    return groups * (1 - 1 / groups) ** (n_experts - groups) if groups else 0.0


def merge_rows(
    method: str, groupings: Mapping[int, Grouping], layer_names: Mapping[int, str]
) -> pd.DataFrame | None:
    """The table `merges`; None where no merges led to the groups."""
    rows = [
        {"layer": layer, "merge": number, "chance_height": grouping.unrelated, **vars(merge)}
        for layer, grouping in groupings.items()
        for number, merge in enumerate(grouping.merges)
    ]
    names = [layer_names[row["layer"]] for row in rows]
    return pd.DataFrame(rows).assign(method=method, layer_name=names) if rows else None


def merge_pair_rows(
    groupings: Mapping[int, Grouping], chosen: Mapping[int, Array], layer_names: Mapping[int, str]
) -> pd.DataFrame | None:
    """The table `merge_pairs`; None where no distances led to the groups.

    `chosen` holds the experts [T, K] of a sample of tokens per layer: co-activation is the count of tokens
    that chose both, over that of independent tokens that choose k of n experts as often.
    """
    parts = []
    for layer, grouping in groupings.items():
        if grouping.distance_EE is None:
            continue
        n = grouping.n_experts
        a, b = np.triu_indices(n, 1)
        similarity = 1 - grouping.distance_EE[a, b] / (grouping.unrelated or np.nan)
        part = {"layer": layer, "layer_name": layer_names[layer], "expert_a": a, "expert_b": b}
        part |= {"similarity": similarity, "coactivation": np.nan, "coactivation_noise": np.nan}
        if layer in chosen and (k := chosen[layer].shape[1]) > 1:
            on_TE = (chosen[layer][:, :, None] == np.arange(n)).any(1).astype(float)
            both_EE, load_E = on_TE.T @ on_TE, on_TE.sum(0)
            expected = load_E[a] * load_E[b] / max(len(on_TE), 1) * n * (k - 1) / (k * (n - 1))
            enough = expected >= FEWEST_EXPECTED
            part["coactivation"] = np.where(enough, both_EE[a, b] / np.maximum(expected, 1e-9), np.nan)
            part["coactivation_noise"] = np.where(enough, np.maximum(expected, 1e-9) ** -0.5, np.nan)
        parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True) if parts else None


def damage_rows(plan: Plan, layer_names: Mapping[int, str], record: Mapping[str, Any]) -> pd.DataFrame:
    """The table `damage`: one row per layer and one for the whole model, of the plan and of every control.

    `record` holds what the tasks found.
    """
    after, before = record["bytes"]
    predicted, judged = record.get("predicted", {}), record.get("models", {})
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys([plan.method, *predicted, *judged]):
        measured = judged.get(method, {})
        errors, damage = measured.get("errors", {}), predicted.get(method, {})
        rows += [
            {
                "method": method,
                "layer": layer,
                "layer_name": name,
                "predicted_error": damage.get(str(layer), (None, None))[0],
                "measured_error": errors.get(str(layer)),
                "router_kl": damage.get(str(layer), (None, None))[1],
            }
            for layer, name in layer_names.items()
        ]
        rows.append(
            {
                "method": method,
                **{name: measured.get(name) for name in JUDGED},
                "perplexity_original": record.get("perplexity_original"),
                "judged_documents": record.get("facts", {}).get("judged_documents"),
                "bytes": after,  # a control keeps as many experts, so it is as large as the plan
                "bytes_original": before,
            }
        )
    integers = ("layer", "judged_documents", "bytes", "bytes_original")
    floats = ("predicted_error", "measured_error", "router_kl", "perplexity_original", *JUDGED)
    frame = pd.DataFrame(rows, columns=["method", "layer_name", *integers, *floats])
    frame = frame.astype(dict.fromkeys(integers, "Int64") | dict.fromkeys(floats, "float64"))
    return beside_controls(frame.assign(role=np.where(frame["method"] == plan.method, "plan", "control")))


def beside_controls(damage: pd.DataFrame) -> pd.DataFrame:
    """Add what the plan's rows are compared with: mean and range of the controls, and who is better."""
    plan, controls = (damage[damage["role"] == role] for role in ("plan", "control"))
    for name in PER_LAYER:
        for end, how in (("", "mean"), ("_low", "min"), ("_high", "max")):
            levels = controls.groupby("layer")[name].agg(how)
            damage[f"{name}_controls{end}"] = plan["layer"].map(levels).astype("float64")
    low, high = damage["loss_above_plan_low"], damage["loss_above_plan_high"]
    unknown = low.isna() | high.isna()
    judged = (damage["role"] == "control") & ~unknown
    p = p_of_draws(damage.loc[judged, "loss_above_plan"], (high - low)[judged])
    return damage.assign(
        p_random=np.where(judged, p, np.nan),
        beyond_random=judged.astype("boolean").mask(~judged | np.isnan(p)) & (p < LEVEL),
        plan_better=(low > 0).astype("boolean").mask(unknown),
        plan_worse=(high < 0).astype("boolean").mask(unknown),
        bytes_share=(damage["bytes"] / damage["bytes_original"]).astype("float64"),
    )


def p_of_draws(above_plan: pd.Series, widths: pd.Series) -> float:
    """Return the probability that another random draw is as far below the mean of the draws as the plan.

    One-sided, of Student's t with m - 1 degrees of freedom for m draws. The variance is that of the draws,
    times 1 + 1/m, and that over documents, from the widths of the differences' 95 % intervals. Null for one
    draw.
    """
    m = len(above_plan)
    if m < 2:
        return float("nan")
    over_documents = (widths / (2 * stats.norm.ppf(TAILS[1]))).pow(2).mean()
    error = np.sqrt(above_plan.var() * (1 + 1 / m) + over_documents)
    return float(stats.t.sf(above_plan.mean() / error, m - 1)) if error else float("nan")


def saliency_rows(
    sums: Sums, layer_names: Mapping[int, str], method: Method, documents: int, seed: int, kept: Kept
) -> pd.DataFrame:
    """The table `saliency`: every expert's scores, and the interval of its rank by the score that decides.

    `kept` is layer -> the experts that the plan does not drop. Without a score of the method REAP ranks.
    """
    name_of = method.name if method.score is not None else "reap"
    ranked_by = method.score or reap
    scores = {"tokens": frequency, "gate_weight": gate_weight, "ean": ean, "reap": reap}
    frames = []
    for layer, layer_name in layer_names.items():
        columns: dict[str, Any] = {name: score_experts(sums, layer, score) for name, score in scores.items()}
        frame = pd.DataFrame(columns).astype({"tokens": np.int64})
        low, high = rank_intervals(sums, layer, ranked_by, documents, seed)
        score = score_experts(sums, layer, ranked_by)
        dropped = ~frame.index.isin(kept[layer])
        cut = (~dropped).sum() + 0.5 if dropped.any() and method.score is not None else np.nan
        columns = {
            **{"layer": layer, "layer_name": layer_name, "expert": frame.index, "score": name_of},
            **{"rank_low": low, "rank_high": high, "rank": stats.rankdata(-score), "cut": cut},
            **{"times_mean": times_mean(score), "tokens_times_mean": times_mean(columns["tokens"])},
            **{"dropped": dropped, "undecided": (low < cut) & (high > cut)},
            "fate": np.where(dropped, "dropped", "kept"),
        }
        frames.append(frame.assign(**columns))
    return pd.concat(frames, ignore_index=True)


def times_mean(score: Array) -> Array:
    """Scores over their mean; 1 where all are 0."""
    return np.asarray(score / score.mean() if score.any() else np.ones(len(score)))


def rank_intervals(sums: Sums, layer: int, score: Score, documents: int, seed: int) -> tuple[Array, Array]:
    """95 % intervals of each expert's rank (1: the most salient): percentile bootstrap over document buckets.

    Tied experts share the mean of their ranks. NaN under 20 documents.
    """
    totals = layer_sums(sums, layer)
    used = totals["tokens_BE"].any(1)
    if documents < FEWEST_DOCUMENTS or used.sum() < 2:
        unknown = np.full(totals["tokens_BE"].shape[1], np.nan)
        return unknown, unknown
    generator = np.random.default_rng((seed, layer))
    resampled = resampled_sums([value[used] for value in totals.values()], generator, RESAMPLED)
    ranks_NE = stats.rankdata(-score(dict(zip(totals, resampled, strict=True))), axis=1)
    low, high = np.quantile(ranks_NE, TAILS, axis=0)
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
    series = {base: "none", f"{base}_permuted": "signed"}
    found = [
        layer_geometry(moe.layers[layer], moe.layers[layer], pairs, series, device=device, seed=seed)
        for layer, pairs in cluster_pairs(plan, seed).items()
    ]
    names = found[0] if found else ()
    return {name: pd.concat([frames[name] for frames in found], ignore_index=True) for name in names}
