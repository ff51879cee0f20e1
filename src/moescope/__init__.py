"""moescope: see what happens inside Mixture-of-Experts models.

`moescope.scan(...)`, `moescope.trace(...)`, `moescope.compare(...)`, `moescope.compress(...)`,
`moescope.train(...)`,
`moescope.study(...)`, `moescope.report(...)` and `moescope.demo(...)` are the verbs of the command line; a
verb returns a `Run`.
`moescope.Monitor()` watches a model in training.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moescope.comparison.verb import compare
    from moescope.compression.verb import compress
    from moescope.demo.verb import demo
    from moescope.errors import BadInput
    from moescope.families.inspect import inspect
    from moescope.lab.study import study
    from moescope.lab.train import count_parameters, train
    from moescope.reporting.verb import report
    from moescope.routing.monitor import Monitor
    from moescope.routing.trace import trace
    from moescope.run import Run
    from moescope.weights.verb import scan

__all__ = [
    "BadInput",
    "Monitor",
    "Run",
    "compare",
    "compress",
    "count_parameters",
    "demo",
    "inspect",
    "report",
    "scan",
    "study",
    "trace",
    "train",
]

_HOME = {
    "BadInput": "moescope.errors",
    "Monitor": "moescope.routing.monitor",
    "Run": "moescope.run",
    "compare": "moescope.comparison.verb",
    "compress": "moescope.compression.verb",
    "count_parameters": "moescope.lab.train",
    "demo": "moescope.demo.verb",
    "inspect": "moescope.families.inspect",
    "report": "moescope.reporting.verb",
    "scan": "moescope.weights.verb",
    "study": "moescope.lab.study",
    "trace": "moescope.routing.trace",
    "train": "moescope.lab.train",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # imported when first used: `moescope --help` must not wait for torch
    if name not in _HOME:
        raise AttributeError(f"module 'moescope' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
