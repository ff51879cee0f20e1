"""The verbs whose runs tell themselves through a `RunKind`: one line each."""

from moescope.comparison.report import COMPARE
from moescope.compression.report import COMPRESSION
from moescope.lab.report_study import STUDY
from moescope.lab.report_training import TRAINING
from moescope.reporting.run_kind import RunKind
from moescope.routing.report_monitor import MONITORED
from moescope.run import Run

KINDS: list[RunKind] = [
    COMPARE,
    COMPRESSION,
    TRAINING,
    STUDY,
    MONITORED,
]


def kind_of(run: Run) -> RunKind | None:
    """The kind of that run; None for scans and traces, which the page knows itself."""
    return next((kind for kind in KINDS if kind.verb == run.info["verb"]), None)
