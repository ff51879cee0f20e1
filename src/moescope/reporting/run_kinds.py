"""The verbs whose runs tell themselves through a `RunKind`: one line each."""

from moescope.reporting.compression_section import COMPRESSION
from moescope.reporting.geometry_section import COMPARE
from moescope.reporting.monitor_section import WATCHED
from moescope.reporting.run_kind import RunKind
from moescope.reporting.study_section import STUDY
from moescope.reporting.training_section import TRAINING
from moescope.run import Run

KINDS: list[RunKind] = [
    COMPARE,
    COMPRESSION,
    TRAINING,
    STUDY,
    WATCHED,
]


def kind_of(run: Run) -> RunKind | None:
    """The kind of that run; None for scans and traces, which the page knows itself."""
    return next((kind for kind in KINDS if kind.verb == run.info["verb"]), None)
