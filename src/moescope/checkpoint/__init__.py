"""Checkpoints read lazily (headers first, one tensor when asked) and written whole or not at all."""

from moescope.checkpoint.source import Checkpoint, TensorInfo, open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
