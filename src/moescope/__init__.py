"""moescope: see what happens inside Mixture-of-Experts models.

`moescope.scan(...)`, `trace`, `compare`, `compress`, `intervene`, `deploy`, `train`, `study`, `report`,
`demo` and `inspect` are the verbs of the command line; a verb returns a `Run`. `moescope.open(path)` opens a
run folder, `moescope.Monitor()` watches a model in training, and `moescope.modified(model, ...)` changes one
in memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moescope.comparison.verb import compare
    from moescope.compression.verb import compress
    from moescope.demo.verb import demo
    from moescope.deployment.verb import deploy
    from moescope.errors import BadInput
    from moescope.families.inspect import inspect
    from moescope.intervention.changes import modified
    from moescope.intervention.verb import intervene
    from moescope.lab.study import study
    from moescope.lab.train import count_parameters, train
    from moescope.reporting.verb import report
    from moescope.routing.trace import trace
    from moescope.routing.trainer_monitor import Monitor
    from moescope.run import Run, open
    from moescope.weights.layer import scan_model
    from moescope.weights.verb import scan

__version__ = "0.2.0"
_HOME = {
    "BadInput": "moescope.errors",
    "Monitor": "moescope.routing.trainer_monitor",
    "Run": "moescope.run",
    "count_parameters": "moescope.lab.train",
    "modified": "moescope.intervention.changes",
    "open": "moescope.run",
    "scan_model": "moescope.weights.layer",
}
__all__ = [
    "BadInput",
    "Monitor",
    "Run",
    "compare",
    "compress",
    "count_parameters",
    "demo",
    "deploy",
    "inspect",
    "intervene",
    "modified",
    "open",
    "report",
    "scan",
    "scan_model",
    "study",
    "trace",
    "train",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:  # imported when first used: `moescope --help` must not wait for torch
    from moescope.verbs import VERBS

    homes = _HOME | {verb: place.partition(":")[0] for verb, _, place in VERBS}
    if name not in homes:
        raise AttributeError(f"module 'moescope' has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
