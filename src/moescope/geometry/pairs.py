"""Rows of the tables `geometry` and `geometry_layers`: distances of pairs of experts, their means and chance
levels.

A series is a name and a way to match neurons. Pairs are arbitrary: the same expert in two checkpoints, or a
cluster's dominant member and each other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moescope.arguments import one_of
from moescope.errors import BadInput
from moescope.geometry.distances import PolarFactor, distance, polar_factor, sv_alignment
from moescope.geometry.matching import (
    PROJECTIONS,
    UNRELATED_L2,
    Chance,
    Matching,
    match_neurons,
    matched_chance,
    projections_of,
)
from moescope.statistics import TAILS, resampled_sums
from moescope.types import ExpertWeights, LayerWeights

MatchBy = tuple[
    bool, tuple[str, ...]
]  # how neurons are matched before experts are compared: signed, projections
MATCHED: MatchBy = (True, PROJECTIONS)  # also the chance level of pairs in stored order
# none: in stored order. held_out: the distance of down is unbiased, because down is not part of the score.
MATCHINGS: dict[str, MatchBy | None] = {
    "none": None,
    "signed": MATCHED,
    "unsigned": (False, PROJECTIONS),
    "held_out": (True, ("gate", "up")),
}


def layer_geometry(
    a: LayerWeights,
    b: LayerWeights,
    pairs: Sequence[tuple[int, int]],
    series: Mapping[str, str],
    matrices: Sequence[str] = PROJECTIONS,
    sv: bool = True,
    device: str = "cpu",
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, pd.DataFrame]:
    """Rows of `geometry` and `geometry_layers` of one layer: expert pair[0] of `a` against pair[1] of `b`.

    `a` and `b` may be the same layer. `series` maps each series to its matching: {"m_smoe": "none",
    "m_smoe_permuted": "signed"}. All series share the weights and polar factors (a matched R needs no new
    one). Consecutive pairs with the same first expert read it once. Memory: two experts and their polar
    factors. The chance level of matching is that of the first pair. `tick` is called after each pair.
    """
    objectives = {label: MATCHINGS[one_of("matching", by, tuple(MATCHINGS))] for label, by in series.items()}
    names = [name for name in matrices if name != "up" or a.up_EFD is not None]
    rows: list[dict[str, Any]] = []
    first: tuple[int, LoadedExpert] | None = None
    levels: dict[MatchBy, dict[str, Chance]] = {}
    for expert_a, expert_b in pairs:
        needed = any(objectives.values()) or not levels
        if first is None or first[0] != expert_a:
            first = expert_a, LoadedExpert(a, expert_a, names, needed, sv, device)
        second = LoadedExpert(b, expert_b, names, needed, sv, device)
        if not levels:
            distinct = {by or MATCHED for by in objectives.values()}
            levels = {by: pair_chance(first[1], second, by, seed, device) for by in distinct}
        for label, by in objectives.items():
            keys = {"series": label, "layer": a.layer, "layer_name": a.layer_name}
            pair = {"expert_a": expert_a, "expert_b": expert_b, "matched": by is not None}
            rows += [{**keys, **row, **pair} for row in pair_rows(first[1], second, by, device)]
        tick()
    geometry = pd.DataFrame(rows)
    if geometry.empty:
        return {"geometry": geometry, "geometry_layers": geometry}
    chance = {label: levels[by or MATCHED] for label, by in objectives.items()}
    return {"geometry": geometry, "geometry_layers": layer_means(geometry, chance, seed)}


class LoadedExpert:
    """One expert on the device: the matrices named, their polar factors if `sv`, all weights if `whole`."""

    def __init__(
        self, layer: LayerWeights, number: int, names: list[str], whole: bool, sv: bool, device: str
    ):
        self.weights: ExpertWeights | None = None
        if whole:
            tensors = {name: part for name, part in vars(layer.expert(number)).items() if part is not None}
            self.weights = ExpertWeights(**{name: part.to(device) for name, part in tensors.items()})
        self.matrices: dict[str, Tensor] = {}
        self.factors: dict[str, PolarFactor] = {}
        for name in names:
            stack, there = layer.projections[name], projections_of(self.weights) if self.weights else {}
            matrix = there[name] if there else stack.read(number).to(device)
            if not torch.isfinite(matrix).all():
                raise BadInput(
                    f"{stack.names[number % len(stack.names)]}: expert {number} of layer {layer.layer} "
                    "holds NaN or infinity; exclude that layer with --layers"
                )
            self.matrices[name] = matrix
            if sv:
                self.factors[name] = polar_factor(matrix, device, stack.significand_bits)

    @property
    def expert(self) -> ExpertWeights:
        assert self.weights is not None
        return self.weights


def pair_rows(
    a: LoadedExpert, b: LoadedExpert, match_by: MatchBy | None, device: str
) -> list[dict[str, Any]]:
    """One row per matrix: distance and R, after matching where `match_by` is set."""
    matching: Matching | None = None
    if match_by is not None:
        matching = match_neurons(a.expert, b.expert, *match_by, device)
    rows = []
    for name, matrix in a.matrices.items():
        other, factor = b.matrices[name], b.factors.get(name)
        if matching is not None:
            other = matching.projection(name, other)
            factor = factor and replace(factor, matrix=matching.projection(name, factor.matrix))
        aligned = sv_alignment(a.factors[name], factor) if factor else np.nan
        rows.append({"matrix": name, **vars(distance(matrix, other)), "sv_alignment": aligned})
    return rows


def router_drift(a: LayerWeights, b: LayerWeights, series: str, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Rows of `geometry` and `geometry_layers` with matrix "router": row e of `a` against row e of `b`.

    Unrelated rows have cosine 0 and relative L2 sqrt 2. Rows have no singular vectors, so no R. A vector
    added to all rows turns each of them without changing a softmax. Both routers must have one row per
    expert.
    """
    routers = []
    for layer in (a, b):
        assert layer.router_ED is not None
        routers.append(layer.router_ED.read())
        if not bool(routers[-1].isfinite().all()):
            raise BadInput(
                f"{layer.router_ED.name}: holds NaN or infinity; exclude layer {layer.layer} with --layers"
            )
    geometry = pd.DataFrame([vars(distance(*rows)) for rows in zip(*routers, strict=True)])
    keys = {"series": series, "layer": a.layer, "layer_name": a.layer_name, "matrix": "router"}
    pair = {"expert_a": geometry.index, "expert_b": geometry.index}
    geometry = geometry.assign(**keys, **pair, sv_alignment=np.nan, matched=False)
    return {"geometry": geometry, "geometry_layers": layer_means(geometry, {}, seed)}


def pair_chance(
    a: LoadedExpert, b: LoadedExpert, match_by: MatchBy, seed: int, device: str
) -> dict[str, Chance]:
    """What matching reaches on the pair after random rotations; none where a projection that is not compared
    holds NaN or infinity."""
    tensors = [*vars(a.expert).values(), *vars(b.expert).values()]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None):
        return {}
    return matched_chance(a.expert, b.expert, *match_by, (a.factors, b.factors), seed, device)


def layer_means(
    geometry: pd.DataFrame, chance: Mapping[str, Mapping[str, Chance]], seed: int = 0
) -> pd.DataFrame:
    """Rows of `geometry_layers`: means over a layer's pairs with bootstrap intervals and chance levels."""
    rows = []
    keys = ["series", "layer", "layer_name", "matrix"]
    for values, pairs in geometry.groupby(keys, sort=False):
        row: dict[str, Any] = dict(zip(keys, values, strict=True))
        for column in ("relative_l2", "sv_alignment"):
            statistics = bootstrap(pairs[column].to_numpy(float), pairs["expert_a"].to_numpy(), seed)
            row |= {f"{column}_{part}": value for part, value in statistics.items()}
        matched = chance.get(row["series"], {}).get(row["matrix"], Chance(np.nan, np.nan))
        null = {"null_l2_matched": matched.relative_l2, "null_sv_matched": matched.sv_alignment}
        of_series = bool(pairs["matched"].iloc[0])
        levels = matched if of_series else Chance(np.nan, np.nan)
        row |= {"matched": of_series, "matched_l2": levels.relative_l2, "matched_sv": levels.sv_alignment}
        row |= spread("norm_ratio", pairs["norm_ratio"]) | {"norm_ratio_median": pairs["norm_ratio"].median()}
        rows.append({**row, "null_l2": UNRELATED_L2, **null})
    return pd.DataFrame(rows)


def spread(name: str, values: pd.Series) -> dict[str, float]:
    return {f"{name}_least": values.min(), f"{name}_most": values.max()}


def series_means(geometry: pd.DataFrame, layers: pd.DataFrame) -> pd.DataFrame:
    """Rows of `geometry_series`: means over all pairs of a matrix, and of all projections (matrix empty)."""
    rows = []
    whole = [frame[frame["matrix"] != "router"].assign(matrix="") for frame in (geometry, layers)]
    keys = ["series", "matrix"]
    of_layers = dict(list(pd.concat([whole[1], layers]).groupby(keys, sort=False)))
    for (series, matrix), pairs in pd.concat([whole[0], geometry]).groupby(keys, sort=False):
        means = of_layers[series, matrix].groupby("layer").mean(numeric_only=True)
        matched = bool(pairs["matched"].iloc[0])
        rows.append(
            {
                **{"series": series, "matrix": matrix, "matched": matched},
                "pairs": int(pairs["relative_l2"].notna().sum()),
                "relative_l2": pairs["relative_l2"].mean(),
                **spread("l2", means["relative_l2_mean"]),
                "l2_chance": means["matched_l2"].mean() if matched else UNRELATED_L2,
                "sv_alignment": pairs["sv_alignment"].mean(),
                **spread("sv", means["sv_alignment_mean"]),
                "sv_chance": means["matched_sv"].mean() if matched else 0.0,
                "cosine_median": pairs["cosine"].median(),
                "cosine_least": pairs["cosine"].min(),
                **spread("norm_ratio", pairs["norm_ratio"]),
            }
        )
    return pd.DataFrame(rows)


def expert_changes(geometry: pd.DataFrame) -> pd.DataFrame:
    """Rows of `expert_changes`: each expert in stored order, with the medians of its layer and of all."""
    rows = geometry[~geometry["matched"].astype(bool)]
    place = ["layer", "layer_name", "expert_a"]
    by_matrix = rows.pivot_table(index=place, columns="matrix", values="relative_l2")
    routers = rows[rows["matrix"] == "router"].set_index(place)
    frame = by_matrix.rename(columns=lambda name: f"{name}_l2")
    of_experts = rows[rows["matrix"] != "router"].groupby(place)
    frame = frame.reindex(rows.set_index(place).index.unique())
    l2 = of_experts["relative_l2"].mean().reindex(frame.index)
    of_layer, of_all = l2.groupby("layer").transform("median"), l2.median()
    frame = frame.assign(
        relative_l2=l2,
        of_all=l2 / of_all,
        of_layer=l2 / of_layer,
        lowest_sv=of_experts["sv_alignment"].min(),
        router_cosine=routers["cosine"],
        changed=l2 > 0,
        with_layer=(of_layer**2 >= l2 * of_all) & (of_layer > of_all),
    )
    return frame.reset_index().rename(columns={"expert_a": "expert"})


def bootstrap(values: np.ndarray, units: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Mean, sample standard deviation, and the 95 % percentile interval of 2,000 means over resampled units.

    Pairs that share their first expert are one unit: a dominant expert far from one member is far from all
    (Davison and Hinkley 1997, section 3.8). NaN where undefined: sd of one pair, interval of one unit.
    Percentiles of few units are too narrow.
    """
    known = pd.Series(values, index=units).dropna()
    statistics = {"mean": known.mean(), "sd": known.std(), "low": np.nan, "high": np.nan}
    by_unit = known.groupby(level=0).agg(["sum", "count"])
    if len(by_unit) > 1:
        totals, counts = resampled_sums(list(by_unit.to_numpy().T), np.random.default_rng(seed))
        statistics["low"], statistics["high"] = np.quantile(totals / counts, TAILS)
    return statistics
