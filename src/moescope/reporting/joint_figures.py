"""What weights and routing say together.

Do layers whose experts are hard to tell apart route less surely or less evenly?
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    RANDOM,
    UNIFORM,
    Figure,
    FigureSpec,
    Tables,
    base_layout,
    between,
    grey_line,
    layer_colorbar,
    layer_colors,
    number,
    values_of,
)

FEWEST_LAYERS = 5


class Correlation(NamedTuple):
    """Spearman's rank correlation over layers with its 95 % interval; chance is 0."""

    layers: int
    value: float
    low: float
    high: float

    @property
    def shown(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def rank_correlation(x: np.ndarray, y: np.ndarray) -> Correlation | None:
    """Spearman's rho with the interval tanh(atanh(rho) ± 1.96 sqrt((1 + rho²/2)/(n − 3))) of Bonett and
    Wright; None under 5 layers or of a constant.

    At ±1 that interval has no width, which is no certainty: it is then taken at the next value n layers can
    have, 1 − 12/(n (n² − 1)), and its far
    end at ±1. It takes layers for independent; neighbours are not, so it is rather too narrow.
    """
    both = np.isfinite(x) & np.isfinite(y)
    x, y, n = x[both], y[both], int(both.sum())
    if n < FEWEST_LAYERS or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    value = float(np.clip(np.corrcoef(pd.Series(x).rank(), pd.Series(y).rank())[0, 1], -1, 1))
    edge = 1 - 12 / (n * (n * n - 1))
    at = float(np.clip(value, -edge, edge))
    reach = 1.96 * np.sqrt((1 + at * at / 2) / (n - 3))
    low, high = float(np.tanh(np.arctanh(at) - reach)), float(np.tanh(np.arctanh(at) + reach))
    return Correlation(n, value, -1.0 if value < -edge else low, 1.0 if value > edge else high)


def paired(tables: Tables, metric: str) -> pd.DataFrame:
    """One row a layer that both runs have: the ambiguity score, the metric, and the metric's references."""
    ambiguity = tables["ambiguity"][["layer", "ambiguity_score"]]
    found: pd.DataFrame = (
        values_of(tables, metric).merge(ambiguity, on="layer").dropna(subset=["ambiguity_score"])
    )
    return found


def correlation_of(tables: Tables, metric: str) -> Correlation | None:
    rows = paired(tables, metric)
    return rank_correlation(rows["ambiguity_score"].to_numpy(float), rows["value"].to_numpy(float))


# metric, what a higher value means in words, chance's name
QUESTIONS = {
    "confidence": ("more confidently", "less confidently", UNIFORM),
    "routing_entropy": ("less decidedly (higher entropy)", "more decidedly (lower entropy)", UNIFORM),
    "cv": ("less evenly", "more evenly", RANDOM),
}


def answer(metric: str, found: Correlation | None, layers: int) -> str:
    """The answer in a sentence, with its interval, or why there is none."""
    name = metric.replace("_", " ")
    if found is None:
        why = (
            f"{layers} layers in both runs, {FEWEST_LAYERS} are needed"
            if layers < FEWEST_LAYERS
            else "one of the two is the same in every layer"
        )
        return f"Ambiguity against {name}: not available ({why})"
    numbers = (
        f"rank correlation of ambiguity with {name} {number(found.value)} ({number(found.low)} to "
        f"{number(found.high)}, {found.layers} layers); chance is 0"
    )
    if not found.shown:
        return f"Not shown that ambiguous layers differ in {name}: {numbers}"
    return f"More ambiguous layers route {QUESTIONS[metric][0 if found.value > 0 else 1]}: {numbers}"


def against(metric: str) -> FigureSpec:
    """The metric of each layer against its ambiguity."""

    def draw(tables: Tables) -> Figure:
        rows = paired(tables, metric)
        layers = [int(layer) for layer in rows["layer"]]
        colors = layer_colors(sorted(layers))
        floor_name = QUESTIONS[metric][2]
        ends = [float(rows["ambiguity_score"].min()), float(rows["ambiguity_score"].max())]
        data = [
            {
                "type": "scatter",
                "mode": "markers+text" if len(rows) <= 32 else "markers",
                "name": "layers",
                "showlegend": False,
                "x": rows["ambiguity_score"].to_numpy(float),
                "y": rows["value"].to_numpy(float),
                "text": [str(layer) for layer in layers],
                "textposition": "top center",
                "cliponaxis": False,
                "marker": {"size": 10, "color": [colors[layer] for layer in layers]},
                "hovertemplate": "layer %{text}<br>ambiguity %{x:.3g}<br>%{y:.4g}<extra></extra>",
            },
            grey_line(ends, [float(rows["chance"].mean())] * 2, f"{floor_name}: {between(rows['chance'])}"),
        ]
        if len(rows) > 32:
            data.append(layer_colorbar(layers))
        return Figure(
            f"ambiguity_against_{metric}",
            answer(metric, correlation_of(tables, metric), len(rows)),
            (
                "One point a layer, named by its number. Spearman's rank correlation; its interval "
                "(Bonett and Wright) takes layers for independent, and "
                "neighbouring layers are not, so it is rather too narrow. A correlation over layers "
                "of one model says nothing of causes."
            ),
            ("ambiguity_score", metric, "routing_layers.chance"),
            data,
            base_layout("ambiguity score (weights)", f"{metric.replace('_', ' ')} (text)"),
        )

    return FigureSpec(f"ambiguity_against_{metric}", ("ambiguity", "routing_layers"), draw, metrics=(metric,))


TOGETHER = [against(metric) for metric in QUESTIONS]
