"""Checkpoints: read lazily (headers first, single tensors on request), written completely or not at all."""

from moescope.checkpoint.files import TensorInfo
from moescope.checkpoint.source import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
