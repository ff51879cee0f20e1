"""Questions across verbs: do ambiguous layers route less surely or less evenly? Reads tables only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    base_layout,
    grey_line,
    layer_colorbar,
    layer_colors,
    number,
    span,
    values_of,
)
from moescope.run import Run
from moescope.verb import Figure, FigureSpec, Section, Tables

FEWEST_LAYERS = 5
VIEW = ["step", "matrix", "router", "fold_norm"]
UNIFORM = "uniform router"
RANDOM = "random routing"


class Question(NamedTuple):
    """A routing metric to compare with ambiguity: its name, what more and less mean, its chance level."""

    name: str
    more: str
    less: str
    chance: str


QUESTIONS = {
    "confidence": Question("confidence", "more confidently", "less confidently", UNIFORM),
    "routing_entropy": Question(
        "routing entropy", "less decidedly (higher entropy)", "more decidedly (lower entropy)", UNIFORM
    ),
    "cv": Question("cv", "less evenly", "more evenly", RANDOM),
}


class Correlation(NamedTuple):
    """Spearman's rank correlation over layers with its 95 % interval; chance is 0."""

    layers: int
    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def rank_correlation(x: np.ndarray, y: np.ndarray) -> Correlation | None:
    """Return Spearman's rho with the interval of Bonett and Wright (2000).

    The interval is tanh(atanh(rho) ± 1.96 sqrt((1 + rho²/2)/(n − 3))). At ±1 it would have no width; it is
    then taken at the next value that n layers can have, 1 − 12/(n (n² − 1)), and its far end at ±1. It
    assumes independent layers; neighbours are not, so it is too narrow. None under 5 layers or of a constant.
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
    """Return one row per layer of both tables: ambiguity score, metric, and the metric's chance level."""
    ambiguity = tables["ambiguity"][["layer", "ambiguity_score"]]
    rows: pd.DataFrame = values_of(tables, metric).merge(ambiguity, on="layer")
    return rows.dropna(subset=["ambiguity_score"])


def correlation_of(tables: Tables, metric: str) -> Correlation | None:
    rows = paired(tables, metric)
    return rank_correlation(rows["ambiguity_score"].to_numpy(float), rows["value"].to_numpy(float))


def answer(metric: str, correlation: Correlation | None, layers: int) -> str:
    """Return the answer in a sentence, with its interval, or why there is none."""
    question = QUESTIONS[metric]
    if correlation is None:
        why = "one of the two is the same in every layer"
        if layers < FEWEST_LAYERS:
            why = f"{layers} layers in both runs, {FEWEST_LAYERS} are needed"
        return f"Ambiguity and {question.name}: not available ({why})"
    numbers = (
        f"rank correlation of ambiguity with {question.name} {number(correlation.value)} "
        f"[{number(correlation.low)}, {number(correlation.high)}], {correlation.layers} layers (chance: 0)"
    )
    if not correlation.excludes_zero:
        return f"Ambiguous layers do not measurably differ in {question.name}: {numbers}"
    return (
        f"More ambiguous layers route {question.more if correlation.value > 0 else question.less}: {numbers}"
    )


def against(metric: str) -> FigureSpec:
    """Return the figure of a metric per layer against the layer's ambiguity."""

    def draw(tables: Tables) -> Figure:
        rows = paired(tables, metric)
        layers = [int(layer) for layer in rows["layer"]]
        colors = layer_colors(sorted(layers))
        chance = f"{QUESTIONS[metric].chance}: {span(rows['chance'])}"
        ends = [float(rows["ambiguity_score"].min()), float(rows["ambiguity_score"].max())]
        data: list[dict[str, Any]] = [
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
            grey_line(ends, [float(rows["chance"].mean())] * 2, chance),
        ]
        if len(rows) > 32:
            data.append(layer_colorbar(layers))
        caption = (
            f"{answer(metric, correlation_of(tables, metric), len(rows))}. The interval assumes independent "
            "layers and is too narrow; a correlation over the layers of one model says nothing about causes."
        )
        title = f"Ambiguity and {QUESTIONS[metric].name} per layer"
        layout = base_layout("ambiguity score", QUESTIONS[metric].name, showlegend=True)
        return Figure(spec.name, title, caption, ("ambiguity_score", metric, "chance"), data, layout)

    spec = FigureSpec(
        f"ambiguity_against_{metric}",
        ("ambiguity", "routing_layers"),
        draw,
        metrics=(metric,),
        description=f"{QUESTIONS[metric].name} of each layer against its ambiguity score.",
    )
    return spec


FIGURES = [against(metric) for metric in QUESTIONS]


def same_checkpoint(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Return whether both records are of the same weights: by header hash, by place where one has none."""
    if not one or not other:
        return False
    key = "header_hash" if one.get("header_hash") and other.get("header_hash") else "path"
    return bool(one[key] == other[key])


def checkpoint_at(run: Run, step: int) -> dict[str, Any] | None:
    return next((item for item in run.info.get("checkpoints", []) if item.get("step") == step), None)


def joint_sections(runs: list[Run]) -> list[Section]:
    """Return what the runs of several verbs say together: scans with traces, distances of all series."""
    distances = distance_sections(runs)
    scans = [run for run in runs if "ambiguity" in run.tables]
    traces = [run for run in runs if {"routing_layers", "vocabulary"} <= set(run.tables)]
    if not scans or not traces:
        return distances
    parts = [part for scan in scans for trace in traces for part in joint_parts(scan, trace)]
    text = "" if parts else "Not available: no scan and trace here are of the same checkpoint."
    return [*distances, Section("together", "Weights and routing together", text, sections=parts)]


def distance_sections(runs: list[Run]) -> list[Section]:
    """Return the expert distances of runs of several verbs in one chart per projection."""
    holders = [run for run in runs if "geometry_layers" in run.tables]
    rows = series_of_runs(holders)
    if rows is None or len({run.verb.name for run in holders}) < 2:
        return []
    specs = [spec for run in holders for spec in run.verb.figures if spec.needs == ("geometry_layers",)]
    tables = {"geometry_layers": rows}
    drawable = {spec.name: spec for spec in specs if spec.can_draw(tables)}
    figures = [(spec, tables) for spec in drawable.values()]
    return [Section("distances", "Distances between experts, all runs", "", figures)] if figures else []


def series_of_runs(runs: list[Run]) -> pd.DataFrame | None:
    """Return `geometry_layers` of several runs; None for one run or different layers.

    A series that several runs have is named after its run.
    """
    frames = [(run, run.table("geometry_layers")) for run in runs if "geometry_layers" in run.tables]
    if len(frames) < 2 or len({tuple(sorted(set(rows["layer"]))) for _, rows in frames}) > 1:
        return None
    times = pd.Series([name for _, rows in frames for name in rows["series"].unique()]).value_counts()
    parts = [
        rows.assign(series=[f"{name} ({run.name})" if times[name] > 1 else name for name in rows["series"]])
        for run, rows in frames
    ]
    return pd.concat(parts, ignore_index=True)


def joint_parts(scan: Run, trace: Run) -> list[Section]:
    """Return one section per view of the scan and step of the trace that are of the same checkpoint."""
    routing = trace.table("routing_layers")
    phase = next(phase for phase in ("prefill", "decode") if phase in set(routing["phase"]))
    sections: list[Section] = []
    for keys, ambiguity in scan.table("ambiguity").groupby(VIEW, sort=False):
        step, matrix, router, fold_norm = keys
        for traced_step in sorted(routing["step"].unique()):
            if not same_checkpoint(checkpoint_at(scan, step), checkpoint_at(trace, traced_step)):
                continue
            rows = routing[(routing["step"] == traced_step) & (routing["phase"] == phase)]
            tables = {"ambiguity": ambiguity, "routing_layers": rows}
            counts = {metric: len(paired(tables, metric)) for metric in QUESTIONS}
            lines = [
                f"{answer(metric, correlation_of(tables, metric), count)}."
                for metric, count in counts.items()
                if count
            ]
            missing = "Not available: the runs have no layer in common, or ambiguity has no value in any."
            title = f"{matrix}, {router} router{', norm folded in' if fold_norm else ''}"
            title += f", step {traced_step}" if routing["step"].nunique() > 1 else ""
            figures = [
                (spec, tables)
                for spec in FIGURES
                if spec.can_draw(tables) and counts[spec.metrics[0]] >= FEWEST_LAYERS
            ]
            anchor = f"joint-{len(sections)}-{scan.name}-{trace.name}"
            sections.append(Section(anchor, title, "", figures, findings=lines or [missing]))
    return sections
