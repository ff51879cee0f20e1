"""A watched training's part of the report: load, decisions and the pull on routers over its steps."""

from __future__ import annotations

import pandas as pd

from moescope.errors import BadInput
from moescope.lab.figures_training import PULL
from moescope.lab.report_training import (
    ALERT_COLUMNS,
    STEP_COLUMNS,
    TABLES,
    load_figures,
    load_findings,
    load_words,
    note_sections,
)
from moescope.plotting.style import counted
from moescope.reporting.pack import table_payload
from moescope.reporting.run_kind import RunKind, Section
from moescope.run import Run

VIEW = (
    "Load and decisions are of the training's own passes, each point a stretch of steps; chances are "
    "those of random routing."
)


def rows_of(run: Run, table: str) -> pd.DataFrame:
    return run.table(table) if table in run.tables else pd.DataFrame()


def sections(run: Run) -> list[Section]:
    """Did experts share the work, and what taught the routers."""
    if not len(rows_of(run, "load")):
        raise BadInput(
            f"{run.path}: no table of this training is on disk yet; wait for its first "
            f"{run.info['arguments']['every']} steps"
        )
    watched = {"load": run.table("load"), "routing_layers": run.table("routing_layers")}
    alerts, steps, gradients = (rows_of(run, name) for name in ("alerts", "steps", "router_gradients"))
    told = [table_payload("alerts", alerts, ALERT_COLUMNS, "Alerts")] if len(alerts) else []
    told += [table_payload("steps", steps, STEP_COLUMNS, "Every point")] if len(steps) else []
    found = [
        Section("load", "Load while it learned", load_words(run), load_figures(watched), told),
        *note_sections(run),
    ]
    if len(gradients) and gradients["lm_gradient_norm"].notna().any():
        words = "A router learns from the text through its gates alone; here is how strongly."
        found.append(
            Section("routers", "What taught the routers", words, [(PULL, {"router_gradients": gradients})])
        )
    return found


def findings(run: Run) -> list[str]:
    found = load_findings(run)
    alerts = rows_of(run, "alerts")
    if len(alerts):
        first = alerts.sort_values("step").iloc[0]
        found.append(
            f"{counted(len(alerts), 'alert')}, the first at step {first['step']}: {first['message']}"
        )
    if run.info["status"] != "done":
        found.append(f"this training is {run.info['status']}: what was written so far is shown")
    return found


def coverage(run: Run) -> list[str]:
    steps = rows_of(run, "load")
    upto = f", up to step {int(steps['step'].max()):,}" if len(steps) else ""
    experts = sorted(set(run.info["n_experts"]))
    return [
        (
            f"{run.info['model_type']}: {counted(len(run.info['layers']), 'MoE layer')} of "
            f"{' or '.join(map(str, experts))} experts, watched in training{upto}"
        )
    ]


def command(run: Run) -> str:
    return f"moescope.Monitor(out={str(run.path)!r})"


WATCHED = RunKind(
    "monitor",
    TABLES,
    findings,
    sections,
    command,
    coverage,
    VIEW,
    lambda run: f"{run.name}: a training watched",
)
