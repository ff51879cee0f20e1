"""Monitor's part of the report: load, router diagnostics, router gradients and alerts over training steps."""

from __future__ import annotations

import pandas as pd

from moescope.errors import BadInput
from moescope.plotting.style import RANDOM, counted, listed, named_layers, number
from moescope.reporting.pack import table_payload
from moescope.routing.figures_steps import (
    DROPPED,
    MIDDLE_LAYER,
    MONITOR_FIGURES,
    OVER_STEPS,
    ROUTER_GRADIENT,
    last_value,
    split_diagnostics,
)
from moescope.routing.tables import MONITOR_TABLES
from moescope.run import Run
from moescope.verb import FigureSpec, Finding, KeyNumber, Payload, Section, Selection, Summary, Tables, Verb
from moescope.verbs import load_verb

# tables of the weights that `scan` may add, defined by the verb of that name
SCANNED = ("alignment", "alignment_layers", "alignment_tests", "orthogonality", "ambiguity")
STEP_COLUMNS = [
    "step",
    "tokens",
    "train_loss",
    "lm_loss",
    "aux_loss",
    "validation_loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
]
ALERT_COLUMNS = ["step", "layer", "expert", "kind", "value", "threshold", "message"]
GUIDE = (
    "Load and decisions are counted in the training's own passes; each point covers the steps since the "
    "previous one. Chance levels are those of random routing."
)


def rows_of(run: Run, table: str) -> pd.DataFrame:
    return run.table(table) if table in run.tables else pd.DataFrame()


def can_draw(spec: FigureSpec, tables: Tables) -> bool:
    """Whether the figure's tables have more than one step, and its metrics rows."""
    if not set(spec.needs) <= set(tables):
        return False
    metrics = set(tables["routing_layers"]["metric"].unique())
    return set(spec.metrics) <= metrics and all(tables[name]["step"].nunique() > 1 for name in spec.needs)


def load_section(run: Run, tables: list[Payload]) -> Section:
    """Load and decisions over the steps; `tables` are shown below the figures, after the alerts."""
    frames = {"load": run.table("load"), "routing_layers": run.table("routing_layers")}
    rows, alerts = frames["routing_layers"], rows_of(run, "alerts")
    dropped = ((rows["metric"] == "dropped") & (rows["value"] > 0)).any()
    specs = [*OVER_STEPS, *([DROPPED] if dropped else [])]
    words = "Load balance and routing decisions, counted in every training pass."
    if certain := run.info.get("low_entropy_expected"):
        words += (
            " This router is certain of every token by design, so low routing entropy in "
            f"{named_layers(certain)} raises no alert; uneven load and unused experts do."
        )
    figures = [(spec, frames) for spec in specs if can_draw(spec, frames)]
    if len(alerts):
        tables = [table_payload(MONITOR_TABLES["alerts"], alerts, ALERT_COLUMNS, "Alerts"), *tables]
    return Section("load", "Load balance during training", words, figures, tables)


def diagnostic_sections(run: Run) -> list[Section]:
    """Router diagnostics: figures of those that vary, a sentence on the others."""
    rows = run.table("routing_layers")
    tables: Tables = {"routing_layers": rows}
    constant, varying = split_diagnostics(tables)
    specs = [panel.spec for panel in varying]
    if (rows["metric"] == "key_cosine").any():
        specs += [spec for spec in MIDDLE_LAYER if can_draw(spec, tables)]
    if not specs and not constant:
        return []
    words = "Metrics specific to this router, from its training passes, each with its chance level."
    if constant:
        values = listed([last_value(panel, tables) for panel in constant])
        words += f" Constant at their chance level and not drawn: {values}."
    return [Section("diagnostics", "Router diagnostics", words, [(spec, tables) for spec in specs])]


def gradient_sections(run: Run) -> list[Section]:
    """Gradient norms into each router, where they were measured."""
    tables = {"router_gradients": rows_of(run, "router_gradients")}
    if not ROUTER_GRADIENT.can_draw(tables):
        return []
    words = "A router learns from the text only through its gates; one without gradient learns nothing."
    return [Section("routers", "Router gradients", words, [(ROUTER_GRADIENT, tables)])]


def last_metrics(run: Run) -> pd.DataFrame:
    """Return the routing metrics of the last step, of all domains together."""
    rows = rows_of(run, "routing_layers")
    return rows[(rows["step"] == rows["step"].max()) & (rows["domain"] == "")] if len(rows) else rows


def worst_load(run: Run) -> pd.Series | None:
    """Return the row of the layer with the largest load CV at the last step."""
    rows = last_metrics(run)
    cv = rows[(rows["metric"] == "cv") & rows["value"].notna()] if len(rows) else rows
    return cv.loc[cv["value"].idxmax()] if len(cv) else None


def load_findings(run: Run, reason: str = "") -> list[str]:
    """Load balance at the last step; `reason` says why a router's load is even by construction."""
    worst = worst_load(run)
    if worst is None:
        return []
    rows = last_metrics(run)
    chance = f"({RANDOM}: {number(worst['chance'])})"
    if worst["value"] == 0:
        text = f"Load balance at the end of training: even in every layer{reason}, CV 0 {chance}."
        return [Finding(text, section="load")]
    text = (
        f"Load balance at the end of training: worst in layer {worst['layer']}, CV {number(worst['value'])} "
        f"{chance}."
    )
    findings: list[str] = [Finding(text, section="load", layer=int(worst["layer"]))]
    unused = rows[(rows["metric"] == "unused") & (rows["value"] > 0)]
    if len(unused):
        text = f"Unused experts at the end of training in {named_layers(unused['layer'])}."
        findings.append(Finding(text, section="load", layer=int(unused["layer"].iloc[0])))
    return findings


def alert_findings(run: Run) -> list[str]:
    alerts = rows_of(run, "alerts")
    if not len(alerts):
        return []
    first = alerts.sort_values("step").iloc[0]
    text = f"{counted(len(alerts), 'alert')}; the first: {first['message']}."
    return [Finding(text, section="load", layer=int(first["layer"]))]


def sections(run: Run, selection: Selection) -> list[Section]:
    """Load, router diagnostics and router gradients over the steps."""
    if not len(rows_of(run, "load")):
        raise BadInput(
            f"{run.path}: no table of this training is on disk yet; wait for its first "
            f"{run.info['arguments']['every']} steps"
        )
    steps = rows_of(run, "steps")
    tables = (
        [table_payload(MONITOR_TABLES["steps"], steps, STEP_COLUMNS, "Every point")] if len(steps) else []
    )
    return [load_section(run, tables), *diagnostic_sections(run), *gradient_sections(run)]


def summary(run: Run) -> Summary:
    """Coverage, key numbers and findings of a monitored training."""
    load = rows_of(run, "load")
    steps = f", up to step {int(load['step'].max()):,}" if len(load) else ""
    experts = " or ".join(map(str, sorted(set(run.info["n_experts"]))))
    layers = counted(len(run.info["layers"]), "MoE layer")
    coverage = [f"{run.info['model_type']}: {layers} of {experts} experts, monitored in training{steps}"]
    status = run.info["status"]
    unfinished = [] if status == "done" else [f"This training is {status}; the report shows what is written."]
    return Summary(coverage, [*load_findings(run), *alert_findings(run), *unfinished], key_numbers(run))


def key_numbers(run: Run) -> list[KeyNumber]:
    """Load balance, unused experts and routing entropy at the last step, and the number of alerts."""
    rows = rows_of(run, "routing_layers")
    keys = []
    if len(rows):
        rows = rows[(rows["step"] == rows["step"].max()) & (rows["domain"] == "") & rows["value"].notna()]
        for name, metric, unit in (
            ("Worst load CV in training", "cv", ""),
            ("Unused experts, worst layer", "unused", ""),
            ("Highest routing entropy", "routing_entropy", "nats"),
        ):
            if len(of_metric := rows[rows["metric"] == metric]):
                top = of_metric.loc[of_metric["value"].idxmax()]
                word = f"layer {top['layer']}"
                keys.append(KeyNumber(name, float(top["value"]), float(top["chance"]), unit, word))
    return [*keys, KeyNumber("Alerts", float(len(rows_of(run, "alerts"))))]


MONITOR = Verb(
    "monitor",
    tables={**MONITOR_TABLES, **{name: load_verb("scan").tables[name] for name in SCANNED}},
    figures=[spec for spec in (*OVER_STEPS, *MONITOR_FIGURES) if set(spec.needs) <= set(MONITOR_TABLES)],
    summary=summary,
    sections=sections,
    guide=lambda run: [GUIDE],
    tab="training",
    title=lambda run: f"{run.name}: a monitored training",
    grows=True,
    continues=True,
)
