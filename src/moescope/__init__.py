"""moescope: see what happens inside Mixture-of-Experts models.

`moescope.scan(...)`, `moescope.trace(...)`, `moescope.compare(...)`, `moescope.compress(...)`, `moescope.train(...)`,
`moescope.study(...)`, `moescope.report(...)` and `moescope.demo(...)` are the verbs of the command line; a verb returns a `Run`.
`moescope.Monitor()` watches a model in training.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moescope.errors import BadInput
    from moescope.run import Run
    from moescope.workflows.compare import compare
    from moescope.workflows.compress import compress
    from moescope.workflows.demo import demo
    from moescope.workflows.inspect import inspect
    from moescope.workflows.monitor import Monitor
    from moescope.workflows.report import report
    from moescope.workflows.scan import scan
    from moescope.workflows.study import study
    from moescope.workflows.trace import trace
    from moescope.workflows.train import train

__all__ = [
    "BadInput",
    "Monitor",
    "Run",
    "compare",
    "compress",
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
    "Monitor": "moescope.workflows.monitor",
    "Run": "moescope.run",
    "compare": "moescope.workflows.compare",
    "compress": "moescope.workflows.compress",
    "demo": "moescope.workflows.demo",
    "inspect": "moescope.workflows.inspect",
    "report": "moescope.workflows.report",
    "scan": "moescope.workflows.scan",
    "study": "moescope.workflows.study",
    "trace": "moescope.workflows.trace",
    "train": "moescope.workflows.train",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # imported when first used: `moescope --help` must not wait for torch
    if name not in _HOME:
        raise AttributeError(f"module 'moescope' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
