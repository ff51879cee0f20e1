"""Monitor: routing and, where asked, weights of a model while it is trained, into a run folder."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from moescope.arguments import names
from moescope.routing.alerts import Thresholds
from moescope.routing.trainer_monitor import TrainerMonitor
from moescope.weights.layer import scan_model
from moescope.weights.views import MATRICES, ROUTERS


class Monitor(TrainerMonitor):
    """Watches the routing of a model in training.

        Trainer(..., callbacks=[moescope.Monitor()])         # transformers

        monitor = moescope.Monitor().watch(model)            # or any loop
        monitor.step()                                       # after each optimiser step

    `out` is the run folder (by default moescope-1 in the Trainer's output folder, or runs/monitor-...).
    Tables are made and alerts
    judged every `every` steps; logits are looked at every `decisions_every`, gradients into routers every
    `gradients_every` (0:
    never), and every `scan_every` steps the weights are scanned as `moescope scan` does, on the first rank
    while the others wait.
    """

    def __init__(
        self,
        out: str | Path | None = None,
        every: int = 100,
        decisions_every: int = 10,
        gradients_every: int = 500,
        scan_every: int = 0,
        scan_matrix: str | Iterable[str] = "gate",
        scan_router: str | Iterable[str] = "raw",
        coactivation: bool = False,
        dead_steps: int = Thresholds.dead_steps,
        max_load: float = Thresholds.max_load,
        max_unused: float = Thresholds.max_unused,
        min_entropy: float = Thresholds.min_entropy,
        overwrite: bool = False,
    ):
        matrix, router = names("matrix", scan_matrix, MATRICES), names("router", scan_router, ROUTERS)
        super().__init__(
            out,
            every,
            decisions_every,
            gradients_every,
            scan_every,
            partial(scan_model, matrix=matrix, router=router),
            coactivation,
            Thresholds(dead_steps, max_load, max_unused, min_entropy),
            overwrite,
        )
