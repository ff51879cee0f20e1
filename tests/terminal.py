"""What a command writes to a terminal."""

from __future__ import annotations

import os


def read_terminal(terminal: int) -> bytes:
    """Read until the other end is closed."""
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    return shown
