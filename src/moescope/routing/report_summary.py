"""What a trace says as a whole: the same sentences for the terminal, --json and the report's first page."""

from __future__ import annotations

from typing import Any

from moescope.plotting.style import listed
from moescope.routing.report import trace_coverage
from moescope.routing.report_findings import routing_findings, step_findings
from moescope.routing.report_views import TraceTables, load_trace, routing_views
from moescope.run import Run

STEPS_NAMED = 6


def trace_findings(trace: TraceTables) -> list[str]:
    """The last step's findings in the main phase, and what changed over the steps."""
    views = [view for view in routing_views([trace], {trace.run.path: ""}) if view.main]
    last = max(views, key=lambda view: view.step)
    return [*step_findings(trace), *routing_findings(last)]


def which_findings(trace: TraceTables) -> str:
    """ "step 200, the last of 0, 100 and 200; prefill", where there is more than one of either.

    Empty else.
    """
    steps, words = trace.steps, []
    if len(steps) > 1:
        some = steps if len(steps) <= STEPS_NAMED else [*steps[: STEPS_NAMED - 2], "…", steps[-1]]
        words.append(f"step {steps[-1]}, the last of {listed([str(step) for step in some])}")
    if len(trace.phases) > 1:
        words.append(trace.phases[0])
    return "; ".join(words)


def trace_summary(run: Run) -> dict[str, Any]:
    """Everything worth printing of a trace, as plain data."""
    trace = load_trace(run)
    of = which_findings(trace)
    return {
        "run": str(run.path),
        "verb": run.info["verb"],
        "status": run.info["status"],
        "checkpoints": run.info["checkpoints"],
        "coverage": trace_coverage(run),
        "findings": [*([f"Findings of {of}:"] if of else []), *trace_findings(trace)],
        "warnings": run.info.get("warnings", []),
        "timings": run.info["timings"],
        "tables": run.tables,
    }
