"""What runs of several verbs show together: ambiguity of layers against their routing, and what predicts the
effect of removing an expert. Reads tables only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moescope.plotting.style import CATEGORICAL, base_layout, grey_line, number, span, values_of
from moescope.reporting import predictors
from moescope.run import Run
from moescope.verb import Figure, FigureSpec, Section, Tables

FEWEST_LAYERS = 5
VIEW = ["step", "matrix", "fold_norm"]
UNIFORM = "uniform router"
RANDOM = "random routing"


class Metric(NamedTuple):
    """A routing metric that is drawn against ambiguity: its name and its chance level."""

    name: str
    chance: str


METRICS = {
    "confidence": Metric("confidence", UNIFORM),
    "routing_entropy": Metric("routing entropy", UNIFORM),
    "cv": Metric("load imbalance (CV)", RANDOM),
}


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rho; NaN under 5 layers or where one of the two is constant.

    It has no interval and no p-value: neighbouring layers are alike, and too few for a permutation of blocks.
    """
    if len(x) < FEWEST_LAYERS or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(pd.Series(x).rank(), pd.Series(y).rank())[0, 1])


def paired(tables: Tables, metric: str) -> pd.DataFrame:
    """Return one row per router variant and layer: absolute ambiguity, metric, the metric's chance level."""
    ambiguity = tables["ambiguity"][["router", "layer", "absolute_score"]]
    rows: pd.DataFrame = values_of(tables, metric).merge(ambiguity, on="layer")
    return rows.dropna(subset=["absolute_score"])


def against(metric: str) -> FigureSpec:
    """Return the figure of a metric per layer against the layer's ambiguity, of every router variant."""
    name, chance = METRICS[metric]

    def draw(tables: Tables) -> Figure:
        rows = paired(tables, metric)
        data: list[dict[str, Any]] = []
        coefficients = []
        for color, (router, part) in zip(CATEGORICAL, rows.groupby("router", sort=False), strict=False):
            x, y = part["absolute_score"].to_numpy(float), part["value"].to_numpy(float)
            coefficients.append(f"{number(rank_correlation(x, y))} ({router})")
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers+text" if len(part) <= 32 else "markers",
                    "name": f"{router} router",
                    "x": x,
                    "y": y,
                    "text": [str(layer) for layer in part["layer"]],
                    "textposition": "top center",
                    "cliponaxis": False,
                    "marker": {"size": 10, "color": color},
                    "hovertemplate": "layer %{text}<br>ambiguity %{x:.3g}<br>%{y:.4g}",
                }
            )
        ends = [float(rows["absolute_score"].min()), float(rows["absolute_score"].max())]
        level = grey_line(ends, [float(rows["chance"].mean())] * 2, f"{chance}: {span(rows['chance'])}")
        caption = (
            f"Rank correlation over {rows['layer'].nunique()} layers: {', '.join(coefficients)}. Layers of "
            "one model are few and resemble their neighbours: no claim follows."
        )
        title = f"Ambiguity and {name} per layer"
        layout = base_layout("absolute ambiguity", name, showlegend=True)
        columns = ("absolute_score", metric, "chance")
        return Figure(spec.name, title, caption, columns, [*data, level], layout)

    spec = FigureSpec(
        f"ambiguity_against_{metric}",
        ("ambiguity", "routing_layers"),
        draw,
        metrics=(metric,),
        description=f"{name} of each layer against its absolute ambiguity.",
    )
    return spec


FIGURES = [against(metric) for metric in METRICS]


def same_checkpoint(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Return whether both records are of the same weights: by header hash, by place where one has none."""
    if not one or not other:
        return False
    key = "header_hash" if one.get("header_hash") and other.get("header_hash") else "path"
    return bool(one[key] == other[key])


def checkpoint_at(run: Run, step: int) -> dict[str, Any] | None:
    return next((item for item in run.info.get("checkpoints", []) if item.get("step") == step), None)


def joint_sections(runs: list[Run]) -> list[Section]:
    """Return what runs say together: scans with traces, distances of all series, predictors of effects."""
    distances = [*distance_sections(runs), *predictor_sections(runs)]
    scans = [run for run in runs if "ambiguity" in run.tables]
    traces = [run for run in runs if {"routing_layers", "vocabulary"} <= set(run.tables)]
    if not scans or not traces:
        return distances
    parts = [part for scan in scans for trace in traces for part in joint_parts(scan, trace)]
    text = "" if parts else "Not available: no scan and trace here are of the same checkpoint."
    return [
        *distances,
        Section("together", "Weights and routing together", text, sections=parts, tab="routing"),
    ]


def predictor_sections(runs: list[Run]) -> list[Section]:
    """Return, per sweep of experts, how scores of the same checkpoint's scan and compression predict it."""
    sections = []
    for run in runs:
        if "intervention_experts" not in run.tables or run.table("intervention_experts").empty:
            continue
        tables = {"intervention_experts": run.table("intervention_experts")}
        missing = []
        if (aligned := alignment_of(run, runs)) is not None:
            tables["alignment"] = aligned
        else:
            missing.append("`moescope scan`")
        saliency = [other for other in runs if "saliency" in other.tables and same_model(run, other)]
        if saliency:
            tables["saliency"] = saliency[0].table("saliency")
        else:
            missing.append("`moescope compress`")
        text = "Scores of experts against the loss when each is removed, within layers."
        if missing:
            text += (
                f" More scores: report this run with one of {' and '.join(missing)} of the same checkpoint."
            )
        figures = [(spec, tables) for spec in predictors.FIGURES if spec.can_draw(tables)]
        found = predictors.findings(predictors.expert_scores(tables))
        anchor, title = f"predictors-{run.name}", "What predicts the effect of an expert"
        sections.append(Section(anchor, title, text, figures, findings=found, tab="interventions"))
    return sections


def same_model(one: Run, other: Run) -> bool:
    return same_checkpoint(checkpoint_at(one, 0), checkpoint_at(other, 0))


def alignment_of(run: Run, runs: list[Run]) -> pd.DataFrame | None:
    """Return every expert's alignment at its layer's k* in a scan of the run's checkpoint: the first view,
    of raw router rows where there are any."""
    for scan in runs:
        if not {"alignment", "ambiguity"} <= set(scan.tables):
            continue
        for step in scan.table("ambiguity")["step"].unique():
            if same_checkpoint(checkpoint_at(run, 0), checkpoint_at(scan, step)):
                ambiguity, alignment = (
                    rows[rows["step"] == step] for rows in map(scan.table, ("ambiguity", "alignment"))
                )
                raw = ambiguity[ambiguity["router"] == "raw"]
                first = (raw if len(raw) else ambiguity).iloc[0]
                view = ["matrix", "router", "fold_norm"]
                ambiguity, alignment = (
                    rows[(rows[view] == first[view]).all(axis=1)] for rows in (ambiguity, alignment)
                )
                return predictors.at_k_star(alignment, ambiguity)
    return None


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
    return (
        [Section("distances", "Distances between experts, all runs", "", figures, tab="weights")]
        if figures
        else []
    )


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
    """Return one section per matrix of the scan and step of the trace that are of the same checkpoint."""
    routing = trace.table("routing_layers")
    phase = next(phase for phase in ("prefill", "decode") if phase in set(routing["phase"]))
    sections: list[Section] = []
    for (step, matrix, fold_norm), ambiguity in scan.table("ambiguity").groupby(VIEW, sort=False):
        for traced_step in sorted(routing["step"].unique()):
            if not same_checkpoint(checkpoint_at(scan, step), checkpoint_at(trace, traced_step)):
                continue
            rows = routing[(routing["step"] == traced_step) & (routing["phase"] == phase)]
            tables = {"ambiguity": ambiguity, "routing_layers": rows}
            layers = {metric: paired(tables, metric)["layer"].nunique() for metric in METRICS}
            figures = [
                (spec, tables)
                for spec in FIGURES
                if spec.can_draw(tables) and layers[spec.metrics[0]] >= FEWEST_LAYERS
            ]
            missing = (
                f"Not available: {max(layers.values())} layers in both runs, {FEWEST_LAYERS} are needed."
            )
            title = f"{matrix}{', norm folded in' if fold_norm else ''}"
            title += f", step {traced_step}" if routing["step"].nunique() > 1 else ""
            anchor = f"joint-{len(sections)}-{scan.name}-{trace.name}"
            sections.append(Section(anchor, title, "" if figures else missing, figures))
    return sections
