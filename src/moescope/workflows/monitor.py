"""Monitor: routing and, where asked, weights of a model while it is trained, into a run folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint import Checkpoint, TensorInfo
from moescope.checkpoint.files import Index, Stored
from moescope.families import read_moe
from moescope.routing.alerts import Thresholds
from moescope.routing.trainer_monitor import TrainerMonitor
from moescope.spectral.layer import ScanSettings, analyse_layer
from moescope.spectral.readings import MATRICES, ROUTERS
from moescope.workflows.arguments import names
from moescope.workflows.scan import q_values, rank_layers

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

SCANNED = ("alignment", "alignment_layers", "alignment_tests", "orthogonality", "ambiguity")
IN_TRAINING = "the model in training"
DTYPES = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class Monitor(TrainerMonitor):
    """Watches the routing of a model in training.

        Trainer(..., callbacks=[moescope.Monitor()])         # transformers

        monitor = moescope.Monitor().watch(model)            # or any loop
        monitor.step()                                       # after each optimiser step

    `out` is the run folder (by default moescope-1 in the Trainer's output folder, or runs/monitor-...). Tables are made and alerts
    judged every `every` steps; logits are looked at every `decisions_every`, gradients into routers every `gradients_every` (0:
    never), and every `scan_every` steps the weights are scanned as `moescope scan` does, on the first rank while the others wait.
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
            out, every, decisions_every, gradients_every, scan_every, lambda model, step: scan_model(model, step, settings),
            coactivation, Thresholds(dead_steps, max_load, max_unused, min_entropy), overwrite,
        )  # fmt: skip


@dataclass(frozen=True)
class WeightsInMemory:
    """A running model's weights in place of a checkpoint's files, so that families read them as they read those."""

    weights: dict[str, Tensor]
    at_once: int = 1

    def label(self, name: str) -> str:
        return IN_TRAINING

    def names(self) -> list[str]:
        return []

    def exists(self, name: str) -> bool:
        return False

    def raw(self, name: str) -> bytes | None:
        return None

    def size(self, name: str) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def stamp(self, name: str) -> str:
        return ""

    def headers(self, name: str) -> dict[str, Stored]:
        return {
            tensor: Stored(DTYPES[str(value.dtype)], tuple(value.shape), 0, 0) for tensor, value in self.weights.items()
        }

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        found = self.weights[tensor] if index is None else self.weights[tensor][index]
        return found.detach().to("cpu", copy=True)

    def release(self) -> None:
        """Nothing is held that the training does not hold anyway."""


def in_memory(model: nn.Module) -> Checkpoint:
    weights = {name: tensor for name, tensor in model.state_dict().items() if str(tensor.dtype) in DTYPES}
    files = WeightsInMemory(weights)
    tensors = {
        name: TensorInfo(name, place.shape, place.dtype, IN_TRAINING) for name, place in files.headers("").items()
    }
    config: Any = getattr(model, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else None  # without one the tensors' names tell
    return Checkpoint(IN_TRAINING, IN_TRAINING, "model", known, tensors, {}, tensors, files)


def scan_model(model: nn.Module, step: int, settings: ScanSettings) -> dict[str, pd.DataFrame]:
    """Alignment, identification, orthogonality and ambiguity of every layer of a running model, as `scan` tables of that step."""
    import pandas as pd

    moe = read_moe(in_memory(model))
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in SCANNED if name != "ambiguity"}
    device = next(model.parameters()).device
    for weights in moe.layers.values():
        frames = analyse_layer(
            weights, settings, str(device) if device.type == "cuda" else "cpu", keep_going=True
        ).frames
        for name, kept in parts.items():
            kept.append(frames[name])
    joined = {name: pd.concat(kept, ignore_index=True).assign(step=step) for name, kept in parts.items()}
    joined["alignment_tests"]["q_value"] = q_values(joined["alignment_tests"])
    joined["ambiguity"] = rank_layers(joined["alignment_layers"], settings)
    return joined
