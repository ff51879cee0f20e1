"""A monitored training's part of the report: load balance, router diagnostics and gradients by step."""

from __future__ import annotations

from typing import Any

import pandas as pd

from moescope.errors import BadInput
from moescope.plotting.style import counted, listed, named_layers, number
from moescope.reporting.pack import table_payload
from moescope.routing.figures_diagnostics import in_words, told_and_drawn
from moescope.routing.figures_monitor import DROPPED, ROUTER_GRADIENT, USAGE_BY_STEP
from moescope.routing.figures_steps import OVER_STEPS
from moescope.routing.tables import TABLES
from moescope.run import Run
from moescope.verb import FigureSpec, Section, Selection, Summary, Tables, Verb

STEP_COLUMNS = [
    *("step", "tokens", "train_loss", "lm_loss", "aux_loss", "validation_loss"),
    *("learning_rate", "gradient_norm", "tokens_per_second"),
]
ALERT_COLUMNS = ["step", "layer", "expert", "kind", "value", "threshold", "message"]
VIEW = (
    "Load balance and routing decisions come from the training passes, one point per window of steps; the "
    "chance level is random routing."
)


def rows_of(run: Run, table: str) -> pd.DataFrame:
    return run.table(table) if table in run.tables else pd.DataFrame()


def sections(run: Run, selection: Selection) -> list[Section]:
    """Return the sections: load balance, diagnostics, router gradients."""
    if not len(rows_of(run, "load")):
        raise BadInput(
            f"{run.path}: no table of this training is on disk yet; wait for its first "
            f"{run.info['arguments']['every']} steps"
        )
    steps = rows_of(run, "steps")
    more = [table_payload(TABLES["steps"], steps, STEP_COLUMNS, "All steps")] if len(steps) else []
    return [load_section(run, more), *diagnostic_sections(run), *gradient_sections(run)]


def load_section(run: Run, tables: list[dict[str, Any]]) -> Section:
    """Return load balance by step with its alerts, dropped tokens where there are any, and `tables`."""
    rows = run.table("routing_layers")
    watched: Tables = {"load": run.table("load"), "routing_layers": rows}
    dropped = (rows["metric"] == "dropped") & (rows["value"] > 0)
    specs = [*OVER_STEPS, *([DROPPED] if dropped.any() else [])]
    alerts = rows_of(run, "alerts")
    shown = [table_payload(TABLES["alerts"], alerts, ALERT_COLUMNS, "Alerts")] if len(alerts) else []
    words = "Tokens per expert and routing entropy, counted in every training pass."
    if layers := run.info.get("low_entropy_expected"):
        words += (
            " This router is near-certain by design, so low routing entropy in "
            f"{named_layers(layers)} raises no alert; uneven load and unused experts do."
        )
    figures = [(spec, watched) for spec in specs if can_draw(spec, watched)]
    return Section("load", "Load balance in training", words, figures, [*shown, *tables])


def diagnostic_sections(run: Run) -> list[Section]:
    """Return router diagnostics: figures of those that change, a sentence for the others; usage of keys."""
    rows = run.table("routing_layers")
    tables: Tables = {"routing_layers": rows}
    model = run.info["arguments"].get("model")
    if model is not None:
        tables["shape"] = pd.DataFrame([{name: model[name] for name in ("experts", "d_model")}])
    still, moving = told_and_drawn(tables)
    specs = [panel.spec() for panel in moving]
    if (rows["metric"] == "key_cosine").any():
        specs += [spec for spec in USAGE_BY_STEP if can_draw(spec, tables)]
    if not specs and not still:
        return []
    words = "Metrics specific to this router, from its training passes, with their reference values."
    if still:
        words += f" Constant at their reference: {listed([in_words(panel, tables) for panel in still])}."
    return [Section("diagnostics", "Router diagnostics", words, [(spec, tables) for spec in specs])]


def gradient_sections(run: Run) -> list[Section]:
    gradients = rows_of(run, "router_gradients")
    if not len(gradients) or gradients["lm_gradient_norm"].isna().all():
        return []
    words = "A router learns from the text only through its gates."
    return [
        Section("routers", "Router gradients", words, [(ROUTER_GRADIENT, {"router_gradients": gradients})])
    ]


def can_draw(spec: FigureSpec, tables: Tables) -> bool:
    """Return whether the figure's tables have its metrics and more than one step."""
    if not set(spec.needs) <= set(tables):
        return False
    metrics = set(tables["routing_layers"]["metric"].unique())
    return set(spec.metrics) <= metrics and all(tables[name]["step"].nunique() > 1 for name in spec.needs)


def summary(run: Run) -> Summary:
    findings = [*load_findings(run), *alert_findings(run)]
    if run.info["status"] != "done":
        findings.append(f"This training is {run.info['status']}; the report shows what is written.")
    return Summary(coverage(run), findings)


def alert_findings(run: Run) -> list[str]:
    alerts = rows_of(run, "alerts")
    if not len(alerts):
        return []
    first = alerts.sort_values("step").iloc[0]
    return [f"{counted(len(alerts), 'alert')}; the first: {first['message']}."]


def load_findings(run: Run, why_equal: str = "") -> list[str]:
    """Return sentences about the load balance in the last window of training."""
    if "routing_layers" not in run.tables:
        return []
    rows = run.table("routing_layers")
    rows = rows[(rows["step"] == rows["step"].max()) & (rows["domain"] == "")]
    even = rows[rows["metric"] == "cv"]
    if not len(even) or not even["value"].notna().any():
        return []
    worst = even.loc[even["value"].idxmax()]
    if worst["value"] == 0:
        return [f"Load balance: CV 0 in every layer{why_equal} (random routing: {number(worst['chance'])})."]
    found = [
        f"Load balance: worst in {named_layers([worst['layer']])}, CV {number(worst['value'])} "
        f"(random routing: {number(worst['chance'])})."
    ]
    unused = rows[(rows["metric"] == "unused") & (rows["value"] > 0)]
    if len(unused):
        found.append(f"Unused experts at the end of training: {named_layers(unused['layer'])}.")
    return found


def coverage(run: Run) -> list[str]:
    steps = rows_of(run, "load")
    upto = f", up to step {int(steps['step'].max()):,}" if len(steps) else ""
    experts = sorted(set(run.info["n_experts"]))
    return [
        (
            f"{run.info['model_type']}: {counted(len(run.info['layers']), 'MoE layer')} of "
            f"{' or '.join(map(str, experts))} experts, monitored in training{upto}"
        )
    ]


MONITOR = Verb(
    "monitor",
    tables={name: TABLES[name] for name in ("steps", "load", "routing_layers", "router_gradients", "alerts")},
    figures=[DROPPED, ROUTER_GRADIENT, *USAGE_BY_STEP],
    summary=summary,
    sections=sections,
    guide=lambda run: [VIEW],
    title=lambda run: f"{run.name}: monitored training",
    grows=True,
)
