"""A running model's weights as a checkpoint: what reads files reads them too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.files import Index, Stored
from moescope.checkpoint.headers import TensorInfo
from moescope.checkpoint.source import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor, nn

DTYPES = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


@dataclass(frozen=True)
class WeightsInMemory:
    """A running model's weights in place of a checkpoint's files.

    So that families read them as they read those.
    """

    weights: dict[str, Tensor]
    named: str
    at_once: int = 1

    def label(self, name: str) -> str:
        return self.named

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
            tensor: Stored(DTYPES[str(value.dtype)], tuple(value.shape), 0, 0)
            for tensor, value in self.weights.items()
        }

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        found = self.weights[tensor] if index is None else self.weights[tensor][index]
        return found.detach().to("cpu", copy=True)

    def release(self) -> None:
        """Nothing is held that the model does not hold anyway."""


def in_memory(model: nn.Module, named: str) -> Checkpoint:
    """The model's floating-point tensors, shared with it and not copied; `named` is what messages call it."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if str(tensor.dtype) in DTYPES}
    files = WeightsInMemory(weights, named)
    tensors = {
        name: TensorInfo(name, place.shape, place.dtype, named) for name, place in files.headers("").items()
    }
    config: Any = getattr(model, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else None  # without one the names of tensors tell
    return Checkpoint(named, named, "model", known, tensors, {}, tensors, files)
