"""Monitor's part of the report: load, router diagnostics, router gradients and alerts over training steps."""

from __future__ import annotations

import pandas as pd

from moescope.errors import BadInput
from moescope.plotting.style import counted, named_layers, number, span
from moescope.reporting.findings import Number, Said, say_all, verdict_of
from moescope.reporting.findings import key_numbers as numbers_of
from moescope.reporting.pack import table_payload
from moescope.reporting.views import drawable
from moescope.routing.figures import MONITORED, STEPS, TRAINING
from moescope.routing.metrics import DIAGNOSTICS
from moescope.routing.tables import MONITOR_TABLES
from moescope.run import Run
from moescope.verb import Drawable, Finding, KeyNumber, Payload, Section, Selection, Summary, Tables, Verb
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
NUMBERS = [
    Number("routing_layers", "cv", name="Worst load CV"),
    Number("routing_layers", "unused", name="Unused experts, worst layer"),
    Number("routing_layers", "routing_entropy", pick="largest", name="Highest routing entropy"),
]
FINDINGS = [
    Said(
        "routing_layers",
        "cv",
        text="Load balance at the end of training: worst in {place}, CV {value} ({chance}).",
        tab="training",
        figure="balance_by_step",
    ),
    Said(
        "routing_layers",
        "unused",
        where="value > 0",
        text="Unused experts at the end of training: in {rows}; a share of {value} in {place} ({chance}).",
        tab="training",
        figure="balance_by_step",
    ),
]
VERDICT = [
    Said(
        "routing_layers",
        "cv",
        only="beyond",
        text="Load is {degree}, worst in {place}.",
        otherwise="Load is as even as random routing.",
        figure="balance_by_step",
    ),
    Said(
        "routing_layers",
        "cv",
        where="extreme_limit.isna() and low.isna()",
        text="Worst load CV: {value}, {place} ({chance}).",
        figure="balance_by_step",
    ),
]
GUIDE = (
    "Load and decisions are counted in the training's own passes; each point covers the steps since the "
    "previous one. Chance levels are those of random routing."
)


def rows_of(run: Run, table: str) -> pd.DataFrame:
    return run.table(table) if table in run.tables else pd.DataFrame()


def load_section(run: Run, tables: list[Payload]) -> Section:
    """Load and decisions over the steps; `tables` are shown below the figures, after the alerts."""
    frames = {name: rows_of(run, name) for name in ("load_totals", "routing_layers")}
    alerts = rows_of(run, "alerts")
    words = "Load balance and routing decisions, counted in every training pass."
    if certain := run.info.get("low_entropy_expected"):
        words += (
            " This router is certain of every token by design, so low routing entropy in "
            f"{named_layers(certain)} raises no alert; uneven load and unused experts do."
        )
    if len(alerts):
        tables = [table_payload(MONITOR_TABLES["alerts"], alerts, ALERT_COLUMNS, "Alerts"), *tables]
    return Section("load", "Load balance during training", words, drawable(STEPS, frames), tables)


def diagnostic_sections(run: Run) -> list[Section]:
    """Router diagnostics over the steps, and their values at the last one."""
    rows = rows_of(run, "routing_layers")
    if rows.empty or (rows := rows[rows["metric"].isin(DIAGNOSTICS)]).empty:
        return []
    words = "Metrics specific to this router, from its training passes, each with its chance level."
    last = rows[rows["step"] == rows["step"].max()]
    facts = {}
    for name, metric in DIAGNOSTICS.items():
        if len(mine := last[(last["metric"] == name) & last["value"].notna()]):
            level = f"{metric.column.chance_label}: {span(mine['chance'])}"
            facts[f"{metric.title}, last step"] = f"{span(mine['value'])} ({level})"
    figures = drawable(TRAINING[:1], {"routing_layers": rows})
    return [Section("diagnostics", "Router diagnostics", words, figures, facts=facts)]


def gradient_sections(run: Run) -> list[Section]:
    """Gradient norms into each router, where they were measured."""
    figures = drawable(TRAINING[1:], {"router_gradients": rows_of(run, "router_gradients")})
    words = "A router learns from the text only through its gates; one without gradient learns nothing."
    return [Section("routers", "Router gradients", words, figures)] if figures else []


def last_metrics(run: Run) -> pd.DataFrame:
    """Return the routing metrics of the last step, of all domains together."""
    rows = rows_of(run, "routing_layers")
    return rows[(rows["step"] == rows["step"].max()) & (rows["domain"] == "")] if len(rows) else rows


def last_tables(run: Run) -> Tables:
    rows = last_metrics(run)
    return {"routing_layers": rows} if len(rows) else {}


def worst_load(run: Run) -> pd.Series | None:
    """Return the row of the layer with the largest load CV at the last step."""
    rows = last_metrics(run)
    cv = rows[(rows["metric"] == "cv") & rows["value"].notna()] if len(rows) else rows
    return cv.loc[cv["value"].idxmax()] if len(cv) else None


def load_findings(run: Run, reason: str = "") -> list[str]:
    """Load balance at the last step; `reason` says why a router's load is even by construction."""
    worst = worst_load(run)
    if worst is not None and worst["value"] == 0:
        chance = f"{MONITOR_TABLES['routing_layers'].quantity('cv').chance_label}: {number(worst['chance'])}"
        text = f"Load balance at the end of training: even in every layer{reason}, CV 0 ({chance})."
        return [Finding(text, section="load")]
    return say_all(FINDINGS, last_tables(run), MONITOR_TABLES)


def load_verdict(run: Run) -> Finding:
    """Say how even the load is at the last step."""
    return verdict_of(VERDICT, last_tables(run), MONITOR_TABLES)


def load_figures(run: Run) -> list[tuple[Drawable, Tables]]:
    """Return load balance over the steps."""
    return drawable(STEPS[:1], {"routing_layers": rows_of(run, "routing_layers")})


def alert_findings(run: Run) -> list[str]:
    alerts = rows_of(run, "alerts")
    if not len(alerts):
        return []
    collapsed = alerts[alerts["kind"] == "collapsed"].sort_values("step")
    first = (collapsed if len(collapsed) else alerts.sort_values("step")).iloc[0]
    word = "the first collapse" if len(collapsed) else "the first"
    text = f"{counted(len(alerts), 'alert')}; {word}: {first['message']}."
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
    findings = [*load_findings(run), *alert_findings(run), *unfinished]
    lead = [Section("lead", "", figures=load_figures(run))]
    return Summary(coverage, findings, key_numbers(run), verdict=load_verdict(run), lead=lead)


def key_numbers(run: Run) -> list[KeyNumber]:
    """Load balance, unused experts and routing entropy at the last step, and the number of alerts."""
    numbers = numbers_of(NUMBERS, last_tables(run), MONITOR_TABLES)
    alerts = rows_of(run, "alerts")
    collapsed = alerts[alerts["kind"] == "collapsed"]["layer"].nunique() if len(alerts) else 0
    word = f"{counted(collapsed, 'layer')} collapsed" if collapsed else ""
    return [*numbers, KeyNumber("Alerts", float(len(alerts)), word=word)]


MONITOR = Verb(
    "monitor",
    tables={**MONITOR_TABLES, **{name: load_verb("scan").tables[name] for name in SCANNED}},
    figures=MONITORED,
    summary=summary,
    sections=sections,
    guide=lambda run: [GUIDE],
    tab="training",
    title=lambda run: f"{run.name}: a monitored training",
    grows=True,
    continues=True,
)
