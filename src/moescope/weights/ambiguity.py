"""Which layers are ambiguous: a ranking from accuracy, margin and z at each layer's k*."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.errors import BadInput

HIGH, MEDIUM = 0.7, 0.4
DEFAULT_WEIGHTS = (0.4, 0.3, 0.3)
FIXED_K_STAR = (128, 256, 512)


def check_settings(k_star: str | int, weights: tuple[float, float, float]) -> None:
    if k_star != "max_margin" and k_star not in FIXED_K_STAR:
        raise BadInput(
            f"k_star {k_star!r} is not a rule; known: max_margin, {', '.join(map(str, FIXED_K_STAR))}"
        )
    if len(weights) != 3 or min(weights) < 0 or not abs(sum(weights) - 1) <= 1e-9:  # NaN fails too
        raise BadInput(f"ambiguity weights {tuple(weights)} must be three numbers >= 0 that sum to 1")


def choose_k_star(
    rungs: pd.DataFrame, rule: str | int = "max_margin", allow_full_rank: bool = False
) -> int | None:
    """The k at which a layer is judged, from its rows of alignment_layers; None where no k qualifies.

    max_margin: the k of the largest alignment margin, degenerate ks left out (`allow_full_rank` lets them in,
    the older
    rule); a number: that k, or the largest usable one below it.
    """
    usable = rungs if allow_full_rank else rungs[~rungs["degenerate"]]
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
    """Rank, score and its parts for each layer of one reading (one step, matrix and router), most ambiguous
    first.

    score = a (1 - accuracy) + b (1 - margin') + g (1 - z'), margin and z min-maxed over the layers given, so
    it is relative
    to them: with one layer, or where all margins or all z are equal, it is undefined and left null.
    absolute = a (1 - accuracy) + b (1 - clip(margin/align, 0, 1)) + g (1 - clip(z/sqrt(n-1), 0, 1)) needs no
    other layer.
    """
    check_settings(k_star, weights)
    a, b, g = weights
    chosen = []
    for layer, rungs in layers.groupby("layer", sort=True):
        k = choose_k_star(rungs, k_star, allow_full_rank)
        if k is not None:
            chosen.append(rungs[rungs["k"] == k].iloc[0])
        else:
            chosen.append(pd.Series({"layer": layer}))
    at_star = pd.DataFrame(chosen).reset_index(drop=True)
    accuracy = at_star["argmax_accuracy"].astype(float)
    margin, z = at_star["alignment_margin"].astype(float), at_star["z_vs_shuffle"].astype(float)
    terms = pd.DataFrame(
        {
            "accuracy_term": a * (1 - accuracy),
            "margin_term": b * (1 - min_max(margin)),
            "z_term": g * (1 - min_max(z)),
        }
    )
    result = pd.DataFrame({"layer": at_star["layer"].astype(int)})
    if "layer_name" in at_star:
        result["layer_name"] = at_star["layer_name"]
    result["ambiguity_score"] = terms.sum(axis=1, skipna=False)
    if {"align", "z_ceiling"} <= set(at_star.columns):
        align = at_star["align"].astype(float)
        relative_margin = (margin / align.where(align > 0)).clip(0, 1)
        relative_z = (z / at_star["z_ceiling"].astype(float)).clip(0, 1)
        result["absolute_score"] = a * (1 - accuracy) + b * (1 - relative_margin) + g * (1 - relative_z)
    result["k_star"] = at_star["k"].astype("Int64") if "k" in at_star else pd.NA
    result["argmax_accuracy"], result["alignment_margin"], result["z_score"] = accuracy, margin, z
    result = pd.concat([result, terms], axis=1)
    result["level"] = [level(score) for score in result["ambiguity_score"]]
    result["rank"] = result["ambiguity_score"].rank(ascending=False, method="first").astype("Int64")
    return result.sort_values(["rank", "layer"], ignore_index=True)


def min_max(values: pd.Series) -> pd.Series:
    low, high = values.min(), values.max()
    if not high > low:
        return pd.Series(np.nan, index=values.index)
    return (values - low) / (high - low)


def level(score: float) -> str | None:
    if score != score:  # NaN: undefined
        return None
    return "high" if score > HIGH else "medium" if score >= MEDIUM else "low"
