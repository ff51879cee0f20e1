"""Monitor: routing and, where asked, weights of a model while it is trained, into a run folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.arguments import names
from moescope.checkpoint.source import in_memory
from moescope.families import read_moe
from moescope.routing.alerts import Thresholds
from moescope.routing.trainer_monitor import TrainerMonitor
from moescope.weights.layer import ScanSettings, analyse_layer
from moescope.weights.verb import q_values, rank_layers
from moescope.weights.views import MATRICES, ROUTERS

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

SCANNED = ("alignment", "alignment_layers", "alignment_tests", "orthogonality", "ambiguity")
IN_TRAINING = "the model in training"


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
        settings = ScanSettings(names("matrix", scan_matrix, MATRICES), names("router", scan_router, ROUTERS))
        super().__init__(
            out,
            every,
            decisions_every,
            gradients_every,
            scan_every,
            lambda model, step: scan_model(model, step, settings),
            coactivation,
            Thresholds(dead_steps, max_load, max_unused, min_entropy),
            overwrite,
        )


def scan_model(model: nn.Module, step: int, settings: ScanSettings) -> dict[str, pd.DataFrame]:
    """Alignment, identification, orthogonality and ambiguity of every layer of a running model.

    As `scan` tables of that step.
    """
    import pandas as pd

    moe = read_moe(in_memory(model, IN_TRAINING))
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in SCANNED if name != "ambiguity"}
    device = next(model.parameters()).device
    for weights in moe.layers.values():
        frames = analyse_layer(
            weights, settings, str(device) if device.type == "cuda" else "cpu", keep_going=True
        ).frames
        for name, kept in parts.items():
            kept += (
                [frames[name]] if name in frames else []
            )  # a router without rows leaves those of experts alone
    joined = {
        name: pd.concat(kept, ignore_index=True).assign(step=step) for name, kept in parts.items() if kept
    }
    if "alignment_tests" in joined:
        joined["alignment_tests"]["q_value"] = q_values(joined["alignment_tests"])
        joined["ambiguity"] = rank_layers(joined["alignment_layers"], settings)
    return joined
