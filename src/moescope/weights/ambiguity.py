"""Rank layers by how hard their experts are to tell apart: accuracy, margin and z at each layer's k*."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.spectral.alignment import AlignmentMatrix, hit_shares, shuffle_null, z_ceiling
from moescope.spectral.pairing import paired_means, pairings

HIGH, MEDIUM = 0.7, 0.4
WEIGHTS = (0.4, 0.3, 0.3)  # of accuracy, margin and z
CHANCE = ("absolute_chance", "accuracy_chance", "margin_chance", "z_chance")
CHANCE_PAIRINGS = 2000  # beyond 8 experts, whose pairings are all evaluated


def choose_k_star(layer: pd.DataFrame, allow_full_rank: bool = False) -> int | None:
    """k* of a layer: the k of the largest alignment margin in its rows of alignment_layers; None without one.

    Degenerate ks are excluded unless `allow_full_rank` (the older rule).
    """
    usable = layer if allow_full_rank else layer[~layer["degenerate"]]
    return None if usable.empty else int(usable.loc[usable["alignment_margin"].idxmax(), "k"])


def ambiguity_ranking(layers: pd.DataFrame, allow_full_rank: bool = False) -> pd.DataFrame:
    """Rank, score and its terms for each layer of one view, most ambiguous first.

    score = a (1 - accuracy) + b (1 - margin') + g (1 - z'), margin and z min-max scaled over these layers. It
    is null for a single layer, or where all margins or all z are equal.
    absolute = a (1 - accuracy) + b (1 - clip(margin/align, 0, 1)) + g (1 - clip(z/sqrt(n-1), 0, 1)) needs no
    other layer; `chance_at_k_star` gives its chance level.
    """
    a, b, g = WEIGHTS
    at_star = []
    for layer, rows in layers.groupby("layer", sort=True):
        k = choose_k_star(rows, allow_full_rank)
        at_star.append(pd.Series({"layer": layer}) if k is None else rows[rows["k"] == k].iloc[0])
    chosen = pd.DataFrame(at_star).reset_index(drop=True)
    names = ("argmax_accuracy", "alignment_margin", "z_vs_shuffle", "align", "z_ceiling")
    values = chosen.reindex(columns=list(names)).astype(float)
    accuracy, margin, z, align, ceiling = (values[name] for name in names)
    result = chosen.reindex(columns=["layer", "layer_name"]).astype({"layer": int})
    terms = {
        "accuracy_term": a * (1 - accuracy),
        "margin_term": b * (1 - min_max(margin)),
        "z_term": g * (1 - min_max(z)),
    }
    score = terms["accuracy_term"] + terms["margin_term"] + terms["z_term"]
    relative_margin, relative_z = (margin / align.where(align > 0)).clip(0, 1), (z / ceiling).clip(0, 1)
    result = result.assign(
        ambiguity_score=score,
        absolute_score=a * (1 - accuracy) + b * (1 - relative_margin) + g * (1 - relative_z),
        k_star=chosen["k"].astype("Int64") if "k" in chosen else pd.NA,
        argmax_accuracy=accuracy,
        alignment_margin=margin,
        z_score=z,
        **terms,
        level=[level(value) for value in score],
        rank=score.rank(ascending=False, method="first").astype("Int64"),
    )
    return result.sort_values(["rank", "layer"], ignore_index=True)


def chance_at_k_star(matrix: AlignmentMatrix, seed: int = 0) -> dict[str, float]:
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
    usable = np.flatnonzero(~matrix.degenerate_K)
    if not len(usable):
        return dict.fromkeys(CHANCE, float("nan"))
    at_P = usable[margin_KP[usable].argmax(axis=0)]
    align, margin, accuracy, z = (
        values_KP[at_P, np.arange(len(at_P))] for values_KP in (align_KP, margin_KP, accuracy_KP, z_KP)
    )
    a, b, g = WEIGHTS
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
