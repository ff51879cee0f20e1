"""Rank layers by how hard their experts are to tell apart: accuracy, margin and z at each layer's k*."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.errors import BadInput
from moescope.spectral.alignment import AlignmentMatrix, hit_shares, shuffle_null, z_ceiling
from moescope.spectral.pairing import paired_means, pairings

HIGH, MEDIUM = 0.7, 0.4
DEFAULT_WEIGHTS = (0.4, 0.3, 0.3)
FIXED_K_STAR = (128, 256, 512)
CHANCE = ("absolute_chance", "accuracy_chance", "margin_chance", "z_chance")
CHANCE_PAIRINGS = 2000  # beyond 8 experts, whose pairings are all evaluated


def check_settings(k_star: str | int, weights: tuple[float, float, float]) -> None:
    if k_star != "max_margin" and k_star not in FIXED_K_STAR:
        raise BadInput(
            f"k_star {k_star!r} is not a rule; known: max_margin, {', '.join(map(str, FIXED_K_STAR))}"
        )
    if len(weights) != 3 or min(weights) < 0 or not abs(sum(weights) - 1) <= 1e-9:  # NaN fails too
        raise BadInput(f"ambiguity weights {tuple(weights)} must be three numbers >= 0 that sum to 1")


def choose_k_star(
    layer: pd.DataFrame, rule: str | int = "max_margin", allow_full_rank: bool = False
) -> int | None:
    """k* of a layer from its rows of alignment_layers; None if no k qualifies.

    max_margin: the k with the largest alignment margin, degenerate ks excluded unless `allow_full_rank` (the
    older rule). A number: that k, or the largest usable one below it.
    """
    usable = layer if allow_full_rank else layer[~layer["degenerate"]]
    if usable.empty:
        return None
    if rule == "max_margin":
        return int(usable.loc[usable["alignment_margin"].idxmax(), "k"])
    below = usable[usable["k"] <= rule]
    return int(below["k"].max()) if len(below) else None


def ambiguity_ranking(
    layers: pd.DataFrame,
    k_star: str | int = "max_margin",
    allow_full_rank: bool = False,
    weights: tuple[float, float, float] = DEFAULT_WEIGHTS,
) -> pd.DataFrame:
    """Rank, score and its terms for each layer of one view, most ambiguous first.

    score = a (1 - accuracy) + b (1 - margin') + g (1 - z'), margin and z min-max scaled over these layers. It
    is null for a single layer, or where all margins or all z are equal.
    absolute = a (1 - accuracy) + b (1 - clip(margin/align, 0, 1)) + g (1 - clip(z/sqrt(n-1), 0, 1)) needs no
    other layer; `chance_at_k_star` gives its chance level.
    """
    check_settings(k_star, weights)
    a, b, g = weights
    at_star = []
    for layer, rows in layers.groupby("layer", sort=True):
        k = choose_k_star(rows, k_star, allow_full_rank)
        fixed = {"layer": layer, "n_experts": rows["n_experts"].iloc[0] if "n_experts" in rows else np.nan}
        at_star.append(pd.Series(fixed) if k is None else rows[rows["k"] == k].iloc[0])
    chosen = pd.DataFrame(at_star).reset_index(drop=True)
    accuracy, margin, z = (
        chosen[name].astype(float) for name in ("argmax_accuracy", "alignment_margin", "z_vs_shuffle")
    )
    terms = pd.DataFrame(
        {
            "accuracy_term": a * (1 - accuracy),
            "margin_term": b * (1 - min_max(margin)),
            "z_term": g * (1 - min_max(z)),
        }
    )
    result = pd.DataFrame({"layer": chosen["layer"].astype(int)})
    if "layer_name" in chosen:
        result["layer_name"] = chosen["layer_name"]
    result["ambiguity_score"] = terms.sum(axis=1, skipna=False)
    if {"align", "z_ceiling", "n_experts"} <= set(chosen):
        align = chosen["align"].astype(float)
        relative_margin = (margin / align.where(align > 0)).clip(0, 1)
        relative_z = (z / chosen["z_ceiling"].astype(float)).clip(0, 1)
        result["absolute_score"] = a * (1 - accuracy) + b * (1 - relative_margin) + g * (1 - relative_z)
    result["k_star"] = chosen["k"].astype("Int64") if "k" in chosen else pd.NA
    result["argmax_accuracy"], result["alignment_margin"], result["z_score"] = accuracy, margin, z
    result = pd.concat([result, terms], axis=1)
    result["level"] = [level(score) for score in result["ambiguity_score"]]
    result["rank"] = result["ambiguity_score"].rank(ascending=False, method="first").astype("Int64")
    return result.sort_values(["rank", "layer"], ignore_index=True)


def chance_at_k_star(
    matrix: AlignmentMatrix,
    k_star: str | int = "max_margin",
    allow_full_rank: bool = False,
    weights: tuple[float, float, float] = DEFAULT_WEIGHTS,
    seed: int = 0,
) -> dict[str, float]:
    """Chance levels of a layer's absolute score, accuracy, margin and z: means over its random pairings.

    Each pairing is judged at its own k*, chosen as for the stored one. NaN where no k qualifies.
    """
    M_KEE, n = matrix.align_KEE, matrix.n_experts
    pairings_EP, exact = pairings(n, seed)
    pairings_EP = pairings_EP if exact else pairings_EP[:, :CHANCE_PAIRINGS]
    first_KE, second_KE = -np.partition(-M_KEE, 1, axis=2)[:, :, :2].transpose(2, 0, 1)
    is_first_KEE = np.arange(n) == M_KEE.argmax(axis=2)[:, :, None]
    best_other_KEE = np.where(is_first_KEE, second_KE[:, :, None], first_KE[:, :, None])
    align_KP, margin_KP, accuracy_KP = (
        paired_means(values_KEE, pairings_EP)
        for values_KEE in (M_KEE, M_KEE - best_other_KEE, hit_shares(M_KEE))
    )
    mean_K, std_K = shuffle_null(M_KEE)
    z_KP = (align_KP - mean_K[:, None]) / np.where(std_K > 1e-12, std_K, np.inf)[:, None]
    usable = np.flatnonzero(allow_full_rank | ~matrix.degenerate_K)
    if k_star != "max_margin":
        usable = usable[[matrix.ks[index] <= int(k_star) for index in usable]][-1:]
    if not len(usable):
        return dict.fromkeys(CHANCE, float("nan"))
    at_P = usable[margin_KP[usable].argmax(axis=0)]
    align, margin, accuracy, z = (
        values_KP[at_P, np.arange(len(at_P))] for values_KP in (align_KP, margin_KP, accuracy_KP, z_KP)
    )
    a, b, g = weights
    relative_margin = np.clip(margin / np.where(align > 0, align, np.nan), 0, 1)
    scores = a * (1 - accuracy) + b * (1 - relative_margin) + g * (1 - np.clip(z / z_ceiling(n), 0, 1))
    means = (scores.mean(), accuracy.mean(), margin.mean(), z.mean())
    return dict(zip(CHANCE, map(float, means), strict=True))


def min_max(values: pd.Series) -> pd.Series:
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else pd.Series(np.nan, index=values.index)


def level(score: float) -> str | None:
    if score != score:  # NaN: undefined
        return None
    return "high" if score > HIGH else "medium" if score >= MEDIUM else "low"
