"""What scan and trace of one checkpoint say together.

Whether ambiguous layers route less surely or less evenly.
"""

from __future__ import annotations

from typing import Any

from moescope.figures import TOGETHER
from moescope.plotting.style import Tables
from moescope.reporting.joint_figures import FEWEST_LAYERS, QUESTIONS, answer, correlation_of, paired
from moescope.routing.figures_metrics import can_draw
from moescope.routing.report import Keep
from moescope.routing.report_views import View
from moescope.weights.report import drawn
from moescope.weights.report_findings import View as WeightsView


def same_checkpoint(reading: WeightsView, view: View) -> bool:
    """Whether both are of the same weights.

    By the hash of their headers and files, or by place where one is unknown.
    """
    steps = {item["step"]: item for item in reading.run.info["checkpoints"]}
    scanned, traced = steps.get(reading.keys["step"]), view.checkpoint
    if not scanned or not traced:
        return False
    key = "header_hash" if scanned.get("header_hash") and traced.get("header_hash") else "path"
    return bool(scanned[key] == traced[key])


def joint_tables(reading: WeightsView, view: View) -> Tables:
    return {"ambiguity": reading.tables["ambiguity"], "routing_layers": view.tables["routing_layers"]}


def joint_entries(found: list[WeightsView], views: list[View], keep: Keep) -> list[dict[str, Any]]:
    """One entry a reading and view of the same checkpoint.

    The answers in words, and figures where there are layers enough.
    """
    entries: list[dict[str, Any]] = []
    for reading in (reading for reading in found if reading.has_rows):
        for view in (view for view in views if view.main and same_checkpoint(reading, view)):
            tables = joint_tables(reading, view)
            number = len(entries)
            metrics = [metric for metric in QUESTIONS if len(paired(tables, metric))]
            words = [
                f"{answer(metric, correlation_of(tables, metric), len(paired(tables, metric)))}."
                for metric in metrics
            ]
            enough = [
                spec
                for spec in TOGETHER
                if can_draw(spec, tables) and len(paired(tables, spec.metrics[0])) >= FEWEST_LAYERS
            ]
            label = f"{reading.label} · {view.label}"
            entries.append(
                {
                    "label": label,
                    "words": words
                    or [
                        (
                            "Not available: the two runs have no layer in common, or ambiguity has "
                            "no value in any."
                        )
                    ],
                    "figures": [
                        keep(f"j{number}-{spec.name}", drawn(spec, tables, label)) for spec in enough
                    ],
                }
            )
    return entries


def joint_missing(found: list[WeightsView], views: list[View]) -> str:
    """Why there is nothing to say together, where both kinds of run were given."""
    if not any(reading.has_rows for reading in found) or not views:
        return ""  # ambiguity is of router rows; that there are none is said where the weights are told
    return "Not available: no scan and trace here are of the same checkpoint."
