"""The rows of the expert-distance chart: pairs of experts of one layer -> distances, and their mean beside
what chance gives.

A series is a name and a way of matching neurons; any pairs will do: the same expert in two checkpoints, or a
cluster's dominant
member and each other one.
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
from moescope.geometry.distances import distance
from moescope.geometry.matching import PROJECTIONS, Matching, match_neurons, projection_matrix
from moescope.geometry.nulls import UNRELATED_L2, Chance, matched_chance
from moescope.geometry.polar import PolarFactor, polar_factor, sv_alignment
from moescope.types import ExpertWeights, LayerWeights

DRAWS = 2000  # of the bootstrap


@dataclass(frozen=True)
class MatchBy:
    """How neurons are matched before experts are compared."""

    signed: bool
    projections: tuple[str, ...]


# None: experts are compared as they lie. held_out: down has no say in its own matching, so what it gains is
# real.
MATCHINGS: dict[str, MatchBy | None] = {
    "none": None,
    "signed": MatchBy(True, PROJECTIONS),
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
    """The rows of `geometry` and `geometry_layers` of one layer: expert pair[0] of `a` against pair[1] of
    `b`, which may be the same layer.

    `series` names each series and its matching: {"m_smoe": "none", "m_smoe_permuted": "signed"}. All series
    share what was read and decomposed: a
    matched R needs no new polar factor. Pairs of one first expert should stand together; then it is read
    once. Memory: two experts and their
    polar factors. `tick` is called after each pair.
    """
    for matching in series.values():
        if matching not in MATCHINGS:
            raise unknown_name("matching", matching, list(MATCHINGS))
    names = [name for name in matrices if name != "up" or a.up_EFD is not None]
    whole = any(MATCHINGS[matching] is not None for matching in series.values())
    rows: list[dict[str, Any]] = []
    first: tuple[int, LoadedExpert] | None = None
    for expert_a, expert_b in pairs:
        if first is None or first[0] != expert_a:
            first = expert_a, LoadedExpert(a, expert_a, names, whole, sv, device)
        second = LoadedExpert(b, expert_b, names, whole, sv, device)
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
    chance = {label: layer_chance(a, MATCHINGS[matching], seed) for label, matching in series.items()}
    return {"geometry": geometry, "geometry_layers": layer_means(geometry, chance, seed)}


class LoadedExpert:
    """One expert read, on the device, with the polar factors that were asked for.

    Whole where neurons are to be matched, else the matrices alone.
    """

    def __init__(
        self, layer: LayerWeights, number: int, matrices: Iterable[str], whole: bool, sv: bool, device: str
    ):
        self.weights = on_device(layer.expert(number), device) if whole else None
        self.matrices: dict[str, Tensor] = {}
        self.factors: dict[str, PolarFactor] = {}
        stacks = {"gate": layer.gate_EFD, "up": layer.up_EFD, "down": layer.down_EDF}
        for name in matrices:
            stack = stacks[name]
            assert stack is not None
            matrix = projection_matrix(self.weights, name) if self.weights else stack.read(number).to(device)
            assert matrix is not None
            if not torch.isfinite(matrix).all():
                raise BadInput(
                    f"{stack.names[number % len(stack.names)]}: expert {number} of layer "
                    f"{layer.layer} holds NaN or infinity; "
                    "leave that layer out with --layers"
                )
            self.matrices[name] = matrix
            if sv:
                self.factors[name] = polar_factor(matrix, device)


def on_device(expert: ExpertWeights, device: str) -> ExpertWeights:
    return replace(
        expert, **{name: tensor.to(device) for name, tensor in vars(expert).items() if tensor is not None}
    )


def pair_rows(
    a: LoadedExpert, b: LoadedExpert, match_by: MatchBy | None, device: str
) -> list[dict[str, Any]]:
    """One row a matrix: distance and R, after matching where asked for."""
    matching: Matching | None = None
    if match_by is not None:
        assert a.weights is not None
        assert b.weights is not None
        matching = match_neurons(a.weights, b.weights, match_by.signed, match_by.projections, device)
    rows = []
    for name, matrix in a.matrices.items():
        other = b.matrices[name] if matching is None else matching.projection(name, b.matrices[name])
        apart = distance(matrix, other)
        row: dict[str, Any] = {"matrix": name, "relative_l2": apart.relative_l2, "cosine": apart.cosine}
        row["norm_ratio"] = apart.norm_ratio
        row["sv_alignment"] = np.nan
        if name in a.factors:
            factor = b.factors[name]
            if matching is not None:
                factor = PolarFactor(matching.projection(name, factor.matrix), factor.rank)
            row["sv_alignment"] = sv_alignment(a.factors[name], factor)
        rows.append(row)
    return rows


def layer_chance(layer: LayerWeights, match_by: MatchBy | None, seed: int = 0) -> dict[str, Chance]:
    """What matching reaches on random experts of the layer's shape.

    Of a series that is not matched, what signed matching would.
    """
    biases = (layer.gate_bias_EF, layer.up_bias_EF, layer.down_bias_ED)
    can_flip = layer.up_EFD is not None and all(bias is None for bias in biases)
    by = match_by or MatchBy(True, PROJECTIONS)
    return matched_chance(
        layer.d_ff, layer.d_model, by.signed and can_flip, layer.up_EFD is not None, by.projections, seed
    )


def layer_means(
    geometry: pd.DataFrame, chance: Mapping[str, Mapping[str, Chance]], seed: int = 0
) -> pd.DataFrame:
    """The rows of `geometry_layers`.

    Means over a layer's pairs with bootstrap intervals, beside what chance gives each series and matrix.
    """
    rows = []
    for keys, pairs in geometry.groupby(["series", "layer", "layer_name", "matrix"], sort=False):
        row: dict[str, Any] = dict(zip(("series", "layer", "layer_name", "matrix"), keys, strict=True))
        for column in ("relative_l2", "sv_alignment"):
            of_mean = bootstrap(pairs[column].to_numpy(float), pairs["expert_a"].to_numpy(), seed)
            row |= {f"{column}_{part}": value for part, value in of_mean.items()}
        drawn = chance.get(row["series"], {}).get(row["matrix"])
        row["null_l2"] = UNRELATED_L2
        row["null_l2_matched"] = drawn.relative_l2 if drawn else np.nan
        row["null_sv_matched"] = drawn.sv_alignment if drawn else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def bootstrap(values: np.ndarray, units: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Mean, sample standard deviation, and the 95 % interval of the mean: percentiles of 2,000 means over
    units drawn with replacement.

    Pairs that share their first expert are one unit, since a dominant expert that lies apart is apart from
    all its members (Davison and Hinkley
    1997, section 3.8). NaN where undefined: sd of one pair, interval of one unit. Percentiles of few units
    are rather too narrow.
    """
    known = np.isfinite(values)
    values, units = values[known], units[known]
    if not len(values):
        return dict.fromkeys(("mean", "sd", "low", "high"), float("nan"))
    found = {
        "mean": float(values.mean()),
        "sd": float(values.std(ddof=1)) if len(values) > 1 else float("nan"),
    }
    _, unit = np.unique(units, return_inverse=True)
    totals, counts = np.bincount(unit, weights=values), np.bincount(unit)
    if len(totals) < 2:
        return found | {"low": float("nan"), "high": float("nan")}
    drawn = np.random.default_rng(seed).multinomial(
        len(totals), np.full(len(totals), 1 / len(totals)), size=DRAWS
    )
    low, high = np.quantile((drawn @ totals) / (drawn @ counts), [0.025, 0.975])
    return found | {"low": float(low), "high": float(high)}
