"""Checkpoints read lazily (headers first, one tensor when asked) and written whole or not at all."""

from moescope.checkpoint.headers import TensorInfo
from moescope.checkpoint.source import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
