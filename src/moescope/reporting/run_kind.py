"""What a verb's run adds to the report, and to the terminal's summary.

One `RunKind` a verb, beside scans and traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moescope.plotting.style import FigureSpec, Tables
from moescope.run import Run


@dataclass(frozen=True)
class Section:
    """One part of the page: words, then figures, then tables that are folded until they are wanted."""

    anchor: str  # its id in the page; unique within a run
    title: str
    words: str
    figures: list[tuple[FigureSpec, Tables]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)  # made by `table_payload`


@dataclass(frozen=True)
class RunKind:
    """How the runs of one verb are told: `sections` are drawn from the run's tables alone, without torch."""

    verb: str
    tables: tuple[str, ...]  # whose columns the page explains
    findings: Callable[[Run], list[str]]  # sentences, each number with what chance gives
    sections: Callable[[Run], list[Section]]
    command: Callable[[Run], str]  # that makes the run again
    coverage: Callable[[Run], list[str]]  # what was looked at
    reading: str = ""  # a paragraph on how to read it
    title: Callable[[Run], str] | None = (
        None  # the page's, where its checkpoints' names do not say what it is about
    )
    parts: Callable[[Run], list[Run]] = (
        lambda run: []
    )  # scans and traces it holds, shown as such in the same page


def kind_summary(run: Run, kind: RunKind) -> dict[str, Any]:
    """Everything worth printing of a run, as plain data."""
    return {
        "run": str(run.path),
        "verb": run.info["verb"],
        "status": run.info["status"],
        "checkpoints": run.info["checkpoints"],
        "coverage": kind.coverage(run),
        "findings": kind.findings(run),
        "warnings": run.info.get("warnings", []),
        "timings": run.info["timings"],
        "tables": run.tables,
    }
