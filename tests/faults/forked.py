"""What forked processes call; imports nothing heavy, since the parent process imports it too."""

from __future__ import annotations

from typing import Any


def call(function: str, *arguments: Any) -> None:
    from faults import kill_work

    getattr(kill_work, function)(*arguments)
