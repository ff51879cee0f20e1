"""Rows of the tables `geometry` and `geometry_layers`: distances of pairs of experts, their means and chance
levels.

A series is a name and a way to match neurons. Pairs are arbitrary: the same expert in two checkpoints, or a
cluster's dominant member and each other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moescope.errors import BadInput, unknown_name
from moescope.geometry.distances import PolarFactor, distance, polar_factor, sv_alignment
from moescope.geometry.matching import (
    PROJECTIONS,
    UNRELATED_L2,
    Chance,
    Matching,
    match_neurons,
    matched_chance,
    projection_matrix,
)
from moescope.types import ExpertWeights, LayerWeights

RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True)
class MatchBy:
    """How neurons are matched before experts are compared."""

    signed: bool
    projections: tuple[str, ...]


MATCHED = MatchBy(True, PROJECTIONS)  # also the chance level of pairs in stored order
# none: in stored order. held_out: the distance of down is unbiased, because down is not part of the score.
MATCHINGS: dict[str, MatchBy | None] = {
    "none": None,
    "signed": MATCHED,
    "unsigned": MatchBy(False, PROJECTIONS),
    "held_out": MatchBy(True, ("gate", "up")),
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
    for matching in series.values():
        if matching not in MATCHINGS:
            raise unknown_name("matching", matching, list(MATCHINGS))
    names = [name for name in matrices if name != "up" or a.up_EFD is not None]
    all_weights = any(MATCHINGS[matching] is not None for matching in series.values())
    rows: list[dict[str, Any]] = []
    first: tuple[int, LoadedExpert] | None = None
    levels: dict[MatchBy, dict[str, Chance]] = {}
    for expert_a, expert_b in pairs:
        needed = all_weights or not levels
        if first is None or first[0] != expert_a:
            first = expert_a, LoadedExpert(a, expert_a, names, needed, sv, device)
        second = LoadedExpert(b, expert_b, names, needed, sv, device)
        if not levels:
            objectives = {MATCHINGS[matching] or MATCHED for matching in series.values()}
            levels = {by: pair_chance(first[1], second, by, seed, device) for by in objectives}
        for label, matching in series.items():
            keys = {"series": label, "layer": a.layer, "layer_name": a.layer_name}
            pair = {"expert_a": expert_a, "expert_b": expert_b, "matched": matching != "none"}
            rows += [
                {**keys, **row, **pair} for row in pair_rows(first[1], second, MATCHINGS[matching], device)
            ]
        tick()
    geometry = pd.DataFrame(rows)
    if geometry.empty:
        return {"geometry": geometry, "geometry_layers": geometry}
    chance = {label: levels[MATCHINGS[matching] or MATCHED] for label, matching in series.items()}
    return {"geometry": geometry, "geometry_layers": layer_means(geometry, chance, seed)}


class LoadedExpert:
    """One expert on the device: its matrices, their polar factors if `sv`, all weights if `all_weights`."""

    def __init__(
        self,
        layer: LayerWeights,
        number: int,
        matrices: Iterable[str],
        all_weights: bool,
        sv: bool,
        device: str,
    ):
        self.weights = on_device(layer.expert(number), device) if all_weights else None
        self.matrices: dict[str, Tensor] = {}
        self.factors: dict[str, PolarFactor] = {}
        for name in matrices:
            stack = layer.projections[name]
            matrix = projection_matrix(self.weights, name) if self.weights else stack.read(number).to(device)
            assert matrix is not None
            if not torch.isfinite(matrix).all():
                raise BadInput(
                    f"{stack.names[number % len(stack.names)]}: expert {number} of layer {layer.layer} "
                    "holds NaN or infinity; exclude that layer with --layers"
                )
            self.matrices[name] = matrix
            if sv:
                self.factors[name] = polar_factor(matrix, device, stack.significand_bits)


def on_device(expert: ExpertWeights, device: str) -> ExpertWeights:
    tensors = {name: tensor.to(device) for name, tensor in vars(expert).items() if tensor is not None}
    return replace(expert, **tensors)


def pair_rows(
    a: LoadedExpert, b: LoadedExpert, match_by: MatchBy | None, device: str
) -> list[dict[str, Any]]:
    """One row per matrix: distance and R, after matching where `match_by` is set."""
    matching: Matching | None = None
    if match_by is not None:
        assert a.weights is not None
        assert b.weights is not None
        matching = match_neurons(a.weights, b.weights, match_by.signed, match_by.projections, device)
    rows = []
    for name, matrix in a.matrices.items():
        other = b.matrices[name] if matching is None else matching.projection(name, b.matrices[name])
        row: dict[str, Any] = {"matrix": name, **vars(distance(matrix, other)), "sv_alignment": np.nan}
        if name in a.factors:
            factor = b.factors[name]
            if matching is not None:
                factor = PolarFactor(matching.projection(name, factor.matrix), factor.rank)
            row["sv_alignment"] = sv_alignment(a.factors[name], factor)
        rows.append(row)
    return rows


def router_drift(a: LayerWeights, b: LayerWeights, series: str, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Rows of `geometry` and `geometry_layers` with matrix "router": row e of `a` against row e of `b`.

    Unrelated rows have cosine 0 and relative L2 sqrt 2. Rows have no singular vectors, so no R. A vector
    added to all rows turns each of them without changing a softmax. Both routers must have one row per
    expert.
    """
    routers = []
    for layer in (a, b):
        if layer.router_ED is None:
            raise BadInput(
                f"{layer.layer_name}: its router has no row per expert; remove router from --matrix"
            )
        routers.append(layer.router_ED.read())
        if not bool(routers[-1].isfinite().all()):
            raise BadInput(
                f"{layer.router_ED.name}: holds NaN or infinity; exclude layer {layer.layer} with --layers"
            )
    keys = {"series": series, "layer": a.layer, "layer_name": a.layer_name, "matrix": "router"}
    rows = [
        {
            **keys,
            "expert_a": expert,
            "expert_b": expert,
            **vars(distance(*(rows[expert] for rows in routers))),
        }
        for expert in range(a.n_experts)
    ]
    geometry = pd.DataFrame(rows).assign(sv_alignment=np.nan, matched=False)
    return {"geometry": geometry, "geometry_layers": layer_means(geometry, {}, seed)}


def pair_chance(
    a: LoadedExpert, b: LoadedExpert, match_by: MatchBy, seed: int, device: str
) -> dict[str, Chance]:
    """What matching reaches on the pair after random rotations; none where a projection that is not compared
    holds NaN or infinity."""
    assert a.weights is not None
    assert b.weights is not None
    tensors = [*vars(a.weights).values(), *vars(b.weights).values()]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None):
        return {}
    factors = (a.factors, b.factors)
    by = (match_by.signed, match_by.projections)
    return matched_chance(a.weights, b.weights, *by, factors, seed, device)


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
        matched = chance.get(row["series"], {}).get(row["matrix"])
        row["null_l2"] = UNRELATED_L2
        row["null_l2_matched"] = matched.relative_l2 if matched else np.nan
        row["null_sv_matched"] = matched.sv_alignment if matched else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def bootstrap(values: np.ndarray, units: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Mean, sample standard deviation, and the 95 % percentile interval of 2,000 means over resampled units.

    Pairs that share their first expert are one unit: a dominant expert far from one member is far from all
    (Davison and Hinkley 1997, section 3.8). NaN where undefined: sd of one pair, interval of one unit.
    Percentiles of few units are too narrow.
    """
    known = np.isfinite(values)
    values, units = values[known], units[known]
    statistics = dict.fromkeys(("mean", "sd", "low", "high"), float("nan"))
    if not len(values):
        return statistics
    statistics["mean"] = float(values.mean())
    if len(values) > 1:
        statistics["sd"] = float(values.std(ddof=1))
    _, unit = np.unique(units, return_inverse=True)
    totals, counts = np.bincount(unit, weights=values), np.bincount(unit)
    n = len(totals)
    if n > 1:
        draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
        low, high = np.quantile((draws @ totals) / (draws @ counts), [0.025, 0.975])
        statistics |= {"low": float(low), "high": float(high)}
    return statistics
