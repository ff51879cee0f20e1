"""Reading checkpoints lazily: headers first, one tensor when asked."""

from moescope.checkpoint.headers import TensorInfo
from moescope.checkpoint.source import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
