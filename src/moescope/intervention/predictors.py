"""Do alignment, ambiguity, load and REAP saliency predict the effect of removing an expert?

Correlations are taken within layers and averaged over layers, so that differences between layers are no part
of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from moescope.intervention.tables import LOAD
from moescope.plotting.colour import BOUND
from moescope.statistics import LEVEL, false_discovery_rates, mean_correlation, split_half_ceiling
from moescope.verb import Tables

FEWEST_CLAIMED = 12  # layers
FEWEST_EXPERTS = 4  # of a layer
PREDICTORS = {  # score of an expert -> its table, column and sign
    LOAD: ("intervention_experts", "load", 1),
    "alignment": ("alignment", "align", 1),
    "ambiguity": ("alignment", "margin", -1),
    "reap": ("saliency", "reap", 1),
}


@dataclass(frozen=True)
class Correlation:
    """Mean over layers of a rank correlation with the effect, within layers.

    `chance` is the largest size that 95 % of permutations of experts within layers stay below; `ceiling` what
    a perfect predictor would reach, from two halves of the documents. Interval and p are NaN under 12 layers,
    and with chance for a partial correlation.
    """

    value: float
    low: float
    high: float
    p: float
    chance: float
    ceiling: float
    layers: tuple[int, ...]
    by_layer: np.ndarray


def expert_scores(tables: Tables) -> pd.DataFrame:
    """Return one row per layer and expert: effect, its halves, and every predictor that the tables hold."""
    columns = ["layer", "expert", "loss_difference", "half_a", "half_b"]
    rows = tables["intervention_experts"][columns].copy()
    for name, (table, column, sign) in PREDICTORS.items():
        if table in tables:
            score = tables[table][["layer", "expert"]].assign(**{name: sign * tables[table][column]})
            rows = rows.merge(score, on=["layer", "expert"], how="left")
    return rows


def held(scores: pd.DataFrame) -> list[str]:
    """Predictors with a value for some expert."""
    return [name for name in PREDICTORS if name in scores and scores[name].notna().any()]


def residual_ranks(values: pd.Series, given: pd.Series | None) -> np.ndarray | None:
    """Ranks of zero mean and unit length, less what ranks of `given` explain; None where nothing is left."""
    ranks = centred_ranks(values)
    if given is not None:
        other = centred_ranks(given)
        size = float(other @ other)
        ranks = ranks - other * (float(ranks @ other) / size) if size else ranks
    length = float(np.sqrt(ranks @ ranks))
    return ranks / length if length > 1e-9 * len(ranks) else None


def centred_ranks(values: pd.Series) -> np.ndarray:
    ranks = values.rank().to_numpy(float)
    return np.asarray(ranks - ranks.mean())


def correlate(scores: pd.DataFrame, predictor: str, given: str | None = None, seed: int = 0) -> Correlation:
    """Return the mean over layers of Spearman's correlation of a predictor with the effect.

    Chance and p come from permutations of the experts' effects within layers, the interval from layers drawn
    with replacement. The ceiling is √(2r/(1 + r)), r the mean correlation of the effects on two halves of the
    documents (Spearman-Brown).

    With `given` the partial correlation: both ranks lose what the ranks of `given` explain. It has no test:
    where score and effect follow load and nothing else, but not linearly in its ranks, a correlation remains.
    In 200 simulated sweeps of each of twelve such cases permutations reject in 0.07 to 0.99, and within
    strata of 4 experts of like load, after a cubic in the ranks of load, still in up to 0.60.
    """
    layers, pairs, halves = [], [], []
    for layer, rows in scores.groupby("layer"):
        rows = rows.dropna(subset=[name for name in (predictor, given, "loss_difference") if name])
        if len(rows) < FEWEST_EXPERTS:
            continue
        control = None if given is None else rows[given]
        x, y = residual_ranks(rows[predictor], control), residual_ranks(rows["loss_difference"], control)
        if x is None or y is None:
            continue
        layers.append(int(layer))
        pairs.append((x, y))
        a, b = (residual_ranks(rows[half], control) for half in ("half_a", "half_b"))
        if a is not None and b is not None and rows[["half_a", "half_b"]].notna().all(axis=None):
            halves.append(float(a @ b))
    if not pairs:
        nan = float("nan")
        return Correlation(nan, nan, nan, nan, nan, nan, (), np.array([]))
    by_layer = np.array([float(x @ y) for x, y in pairs])
    value, low, high, p, chance = float(by_layer.mean()), *[float("nan")] * 4
    if given is None:
        value, low, high, p, chance = mean_correlation(pairs, FEWEST_CLAIMED, seed)
    return Correlation(value, low, high, p, chance, split_half_ceiling(halves), tuple(layers), by_layer)


def correlations(scores: pd.DataFrame) -> dict[tuple[str, bool], Correlation]:
    """Return the correlation of every predictor, plain and (True) given load."""
    plain = {(name, False): correlate(scores, name) for name in held(scores)}
    return plain | {(name, True): correlate(scores, name, LOAD) for name in held(scores) if name != LOAD}


def predictor_tables(tables: Tables) -> Tables:
    """Return the tables `expert_scores` and `predictors` of a sweep of experts.

    Parameters
    ----------
    tables : dict of DataFrame
        `intervention_experts`; of the same checkpoint also the alignment at k* and `saliency`.
    """
    scores = expert_scores(tables)
    parts = [scores_of(scores, name) for name in held(scores)]
    found = correlations(scores)
    rows = pd.DataFrame(
        [
            {
                "predictor": name,
                "given": LOAD if partial else "",
                "correlation": each.value,
                "correlation_low": each.low,
                "correlation_high": each.high,
                "permuted": each.chance,
                "permuted_std": each.chance / BOUND,
                "ceiling": each.ceiling,
                "p": each.p,
                "layers": len(each.layers),
            }
            for (name, partial), each in found.items()
        ]
    )
    rows["q"], tested = np.nan, rows["p"].notna()
    rows.loc[tested, "q"] = false_discovery_rates(rows.loc[tested, "p"].to_numpy(float))
    return {
        "expert_scores": pd.concat(parts, ignore_index=True),
        "predictors": rows.assign(claimed=rows["q"] < LEVEL),
    }


def scores_of(scores: pd.DataFrame, predictor: str) -> pd.DataFrame:
    """Return a predictor's rows of the table `expert_scores`."""
    rows = scores.dropna(subset=[predictor, "loss_difference"])
    layer, effect = rows["layer"], rows["loss_difference"]
    mean = effect.abs().groupby(layer).transform("mean")
    ranks = rows.groupby("layer")[predictor].rank(pct=True)
    return rows[["layer", "expert"]].assign(
        predictor=predictor,
        score=rows[predictor],
        rank_share=ranks,
        effect_times=effect / mean.where(mean > 0),
    )
