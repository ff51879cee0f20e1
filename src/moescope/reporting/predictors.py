"""Do alignment, ambiguity, load and REAP saliency predict the effect of removing an expert? Tables only.

Correlations are taken within layers and averaged over layers, so that differences between layers are no part
of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    base_layout,
    capital,
    grey_line,
    layer_axis,
    layer_colorbar,
    layer_colors,
    number,
)
from moescope.statistics import CONFIDENCE, RESAMPLES, false_discovery_rates, split_half_ceiling
from moescope.verb import Figure, FigureSpec, Tables, Trace

FEWEST_CLAIMED = 12  # layers
FEWEST_EXPERTS = 4  # of a layer
PERMUTATIONS = 1999
LEVEL = 0.05
LOAD = "load"
NATS = "nats per token"


class Predictor(NamedTuple):
    """A score of an expert: the table it comes from, its column, its sign and its name."""

    table: str
    column: str
    sign: int
    name: str
    meaning: str


PREDICTORS = {
    LOAD: Predictor(
        "intervention_experts", "load", 1, "load", "share of the layer's choices on calibration documents"
    ),
    "alignment": Predictor(
        "alignment", "align", 1, "alignment", "of the router row with its own expert, at the layer's k*"
    ),
    "ambiguity": Predictor(
        "alignment",
        "margin",
        -1,
        "ambiguity",
        "alignment with the best other expert minus the own one, at k*",
    ),
    "reap": Predictor("saliency", "reap", 1, "REAP saliency", "mean gate weight times output norm"),
}


@dataclass(frozen=True)
class Correlation:
    """Mean over layers of a rank correlation with the effect, within layers.

    `chance` is the largest size that 95 % of permutations of experts within layers stay below; `ceiling` what
    a perfect predictor would reach, from two halves of the documents. Interval and p are NaN under 12 layers.
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
    for name, (table, column, sign, _, _) in PREDICTORS.items():
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

    With `given` the partial correlation: both ranks lose what the ranks of `given` explain. Chance and p come
    from permutations of the experts' (residual) effects within layers, the interval from layers drawn with
    replacement. The ceiling is √(2r/(1 + r)), r the mean correlation of the effects on two halves of the
    documents (Spearman-Brown).
    """
    generator = np.random.default_rng(seed)
    layers, found, halves = [], [], []
    permuted = np.zeros(PERMUTATIONS)
    for layer, rows in scores.groupby("layer"):
        rows = rows.dropna(subset=[name for name in (predictor, given, "loss_difference") if name])
        if len(rows) < FEWEST_EXPERTS:
            continue
        control = None if given is None else rows[given]
        x, y = residual_ranks(rows[predictor], control), residual_ranks(rows["loss_difference"], control)
        if x is None or y is None:
            continue
        layers.append(int(layer))
        found.append(float(x @ y))
        permuted += generator.permuted(np.tile(y, (PERMUTATIONS, 1)), axis=1) @ x
        a, b = (residual_ranks(rows[half], control) for half in ("half_a", "half_b"))
        if a is not None and b is not None and rows[["half_a", "half_b"]].notna().all(axis=None):
            halves.append(float(a @ b))
    if not found:
        nan = float("nan")
        return Correlation(nan, nan, nan, nan, nan, nan, (), np.array([]))
    by_layer, permuted = np.array(found), np.abs(permuted / len(found))
    value, enough = float(by_layer.mean()), len(found) >= FEWEST_CLAIMED
    p = (1 + int((permuted >= abs(value) - 1e-12).sum())) / (PERMUTATIONS + 1)
    low, high = bootstrap_mean(by_layer, generator) if enough else (float("nan"), float("nan"))
    return Correlation(
        value,
        low,
        high,
        p if enough else float("nan"),
        float(np.quantile(permuted, CONFIDENCE)),
        split_half_ceiling(halves),
        tuple(layers),
        by_layer,
    )


def bootstrap_mean(values: np.ndarray, generator: np.random.Generator) -> tuple[float, float]:
    """Return a 95 % interval of a mean over layers, layers drawn with replacement.

    The limits are the percentiles that a normal distribution has at Student's quantile, and of n layers n - 1
    are drawn, as in `statistics.bootstrap_interval`.
    """
    from scipy.special import ndtr, stdtrit

    n = len(values)
    means = values[generator.integers(n, size=(RESAMPLES, n - 1))].mean(1)
    tail = ndtr(stdtrit(n - 1, 0.5 - CONFIDENCE / 2))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def correlations(scores: pd.DataFrame) -> dict[tuple[str, bool], Correlation]:
    """Return the correlation of every predictor, plain and (True) given load."""
    plain = {(name, False): correlate(scores, name) for name in held(scores)}
    return plain | {(name, True): correlate(scores, name, LOAD) for name in held(scores) if name != LOAD}


# --- words


def size_words(found: Correlation) -> str:
    """ "0.31 [0.2, 0.4]"."""
    ends = f" [{number(found.low)}, {number(found.high)}]" if np.isfinite(found.low) else ""
    return number(found.value) + ends


def findings(scores: pd.DataFrame) -> list[str]:
    """What each predictor says about the effect; no claim under 12 layers."""
    found = correlations(scores)
    layers = max((len(item.layers) for item in found.values()), default=0)
    if layers < FEWEST_CLAIMED:
        return [f"No claim about predictors: {layers} layers, {FEWEST_CLAIMED} are needed."]
    tested = [key for key, item in found.items() if np.isfinite(item.p)]
    q = dict(zip(tested, false_discovery_rates(np.array([found[key].p for key in tested])), strict=True))
    sentences = []
    for name in held(scores):
        plain, partial = found[name, False], found.get((name, True))
        words = f"rank correlation {size_words(plain)} {verdict(q.get((name, False)))}"
        if partial is not None:
            words += f"; given load {size_words(partial)} {verdict(q.get((name, True)))}"
        sentences.append(
            f"{capital(PREDICTORS[name].name)} and the effect of removing an expert: {words}. Permuted "
            f"experts: at most {number(plain.chance)}; ceiling {number(plain.ceiling)}; "
            f"{len(plain.layers)} layers."
        )
    return sentences


def verdict(q: float | None) -> str:
    if q is None:
        return "(not tested)"
    return f"(q = {number(q)})" if q < LEVEL else f"(not beyond chance, q = {number(q)})"


# --- figures

COLUMNS = ("loss_difference", "half_a")
HOW = (
    "Spearman's correlation within each layer, averaged over layers. Given load: both ranks lose what the "
    "rank of load explains. Grey: 95 % of permutations of experts within layers. Ceiling: what a perfect "
    "predictor would reach, √(2r/(1 + r)) with r the correlation of effects on two halves of the documents. "
    "Intervals: layers drawn with replacement, from 12 layers on."
)


def no_claim(found: Mapping[Any, Correlation]) -> str:
    layers = max((len(item.layers) for item in found.values()), default=0)
    return "" if layers >= FEWEST_CLAIMED else f" No claim: {layers} layers, {FEWEST_CLAIMED} are needed."


def effect_predictors(tables: Tables) -> Figure:
    """Rank correlation of every predictor with the effect of removing an expert, plain and given load."""
    found = correlations(expert_scores(tables))
    names = list(dict.fromkeys(name for name, _ in found))
    data: list[Trace] = []
    for partial, label, color, symbol in (
        (False, "rank correlation", CATEGORICAL[0], "circle"),
        (True, "given load", CATEGORICAL[1], "diamond"),
    ):
        shown = [name for name in names if (name, partial) in found]
        items = [found[name, partial] for name in shown]
        if not items:
            continue
        at = [names.index(name) + (0.12 if partial else -0.12) for name in shown]
        value, low, high, chance, ceiling = (
            np.array([getattr(item, field) for item in items])
            for field in ("value", "low", "high", "chance", "ceiling")
        )
        bars = {"array": high - value, "arrayminus": value - low}
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label,
                "x": at,
                "y": value,
                "marker": {"size": 10, "color": color, "symbol": symbol},
                "error_y": {"type": "data", "symmetric": False, "thickness": 1.5, "width": 4, **bars},
                "hovertemplate": f"{label}<br>%{{y:.3f}}<extra></extra>",
            }
        )
        for name, y, style in (
            ("permuted experts, 95 %", np.concatenate([chance, -chance]), "line-ew"),
            ("ceiling", ceiling, "triangle-down"),
        ):
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": at * (2 if style == "line-ew" else 1),
                    "y": y,
                    "showlegend": not partial,
                    "marker": {
                        "size": 12,
                        "symbol": style,
                        "color": GREY,
                        "line": {"width": 2, "color": GREY},
                    },
                    "hovertemplate": f"{name}<br>%{{y:.3f}}<extra></extra>",
                }
            )
    data.append(grey_line([-0.5, len(names) - 0.5], [0.0, 0.0], "none"))
    sizes = [f"{PREDICTORS[name].name} {size_words(found[name, False])}" for name in names]
    words = f"Rank correlation with the effect: {', '.join(sizes)}.{no_claim(found)}"
    ticks = {"tickvals": list(range(len(names))), "ticktext": [PREDICTORS[name].name for name in names]}
    layout = base_layout(
        "predictor",
        "rank correlation",
        xaxis={**ticks, "range": [-0.5, len(names) - 0.5]},
        yaxis={"range": [-1.05, 1.1]},
    )
    return Figure(
        "effect_predictors", "What predicts an expert's effect", words, COLUMNS, data, layout, details=HOW
    )


def effect_predictors_by_layer(tables: Tables) -> Figure:
    """The same correlation in every layer, one line per predictor."""
    scores = expert_scores(tables)
    found = {name: correlate(scores, name) for name in held(scores)}
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": PREDICTORS[name].name,
            "x": list(item.layers),
            "y": item.by_layer,
            "line": {"color": CATEGORICAL[index], "width": 2},
            "marker": {"size": 6},
            "hovertemplate": f"{PREDICTORS[name].name}<br>layer %{{x}}<br>%{{y:.3f}}<extra></extra>",
        }
        for index, (name, item) in enumerate(found.items())
    ]
    layers = sorted(int(layer) for layer in scores["layer"].unique())
    experts = scores.groupby("layer")["expert"].size().reindex(layers).to_numpy(float)
    reach = 1.96 / np.sqrt(experts - 1)  # standard deviation of Spearman's correlation of permuted ranks
    data.append(grey_line(layers, reach, "permuted experts, 95 %", "dot"))
    data.append({**grey_line(layers, -reach, "permuted experts, 95 %", "dot"), "showlegend": False})
    widest = max(found, key=lambda name: float(np.ptp(found[name].by_layer)))
    low, high = float(found[widest].by_layer.min()), float(found[widest].by_layer.max())
    words = (
        f"{capital(PREDICTORS[widest].name)} varies most over layers: "
        f"{number(low)} to {number(high)} (permuted experts: ±{number(float(reach.mean()))})."
    )
    layout = base_layout(
        "layer", "rank correlation", xaxis=layer_axis(layers), yaxis={"range": [-1.05, 1.05]}
    )
    title = "What predicts an expert's effect, by layer"
    return Figure("effect_predictors_by_layer", title, words, COLUMNS, data, layout, details=HOW)


def effect_against(predictor: str) -> FigureSpec:
    """Return the figure of the effect of every expert against the rank of a predictor in its layer."""
    table, _, _, name, meaning = PREDICTORS[predictor]

    def draw(tables: Tables) -> Figure:
        scores = expert_scores(tables).dropna(subset=[predictor, "loss_difference"])
        share = scores.groupby("layer")[predictor].rank(pct=True)
        mean = scores["loss_difference"].abs().groupby(scores["layer"]).transform("mean")
        times = (scores["loss_difference"] / mean.where(mean > 0)).to_numpy(float)
        layers = sorted(int(layer) for layer in scores["layer"].unique())
        colors = layer_colors(layers)
        points: Trace = {
            "type": "scatter",
            "mode": "markers",
            "name": "experts",
            "showlegend": False,
            "x": share.to_numpy(float),
            "y": times,
            "customdata": scores["loss_difference"].to_numpy(float),
            "text": [f"L{row.layer} E{row.expert}" for row in scores.itertuples()],
            "marker": {
                "size": 6,
                "opacity": 0.75,
                "color": [colors[int(layer)] for layer in scores["layer"]],
            },
            "hovertemplate": f"%{{text}}<br>{name}, rank %{{x:.0%}}<br>%{{customdata:.4g}} {NATS}"
            "<extra></extra>",
        }
        found = {False: correlate(scores, predictor)}
        words = f"Mean rank correlation over {len(found[False].layers)} layers: {size_words(found[False])}"
        if predictor != LOAD:
            found[True] = correlate(scores, predictor, LOAD)
            words += f", given load {size_words(found[True])}"
        words += f" (permuted: ±{number(found[False].chance)}; ceiling: {number(found[False].ceiling)})."
        layout = base_layout(
            f"rank of {name} in its layer, low to high",
            "loss difference, × layer mean",
            xaxis={"tickformat": ".0%", "range": [0, 1.03]},
        )
        data = [points, *([layer_colorbar(layers)] if len(layers) > 1 else [])]
        title = f"Effect of removing experts and {name}"
        details = f"{capital(name)}: {meaning}. {HOW}"
        return Figure(spec.name, title, words + no_claim(found), COLUMNS, data, layout, details=details)

    spec = FigureSpec(
        f"effect_against_{predictor}",
        tuple(dict.fromkeys(("intervention_experts", table))),
        draw,
        description=f"Effect of removing each expert against its {name}.",
    )
    return spec


FIGURES = [
    FigureSpec("effect_predictors", ("intervention_experts",), effect_predictors),
    FigureSpec("effect_predictors_by_layer", ("intervention_experts",), effect_predictors_by_layer),
    *(effect_against(name) for name in PREDICTORS),
]


def at_k_star(alignment: pd.DataFrame, ambiguity: pd.DataFrame) -> pd.DataFrame:
    """Return the alignment of every expert at its layer's k*; both tables are of one view."""
    ks = ambiguity[["layer", "k_star"]].rename(columns={"k_star": "k"}).dropna()
    return alignment.merge(ks.astype({"k": "int64"}), on=["layer", "k"])
