"""Work for worker processes to do in tests; a module, so that they can import it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from moescope.errors import BadInput


def squared(task: int, tick: Callable[[], None]) -> tuple[int, int]:
    for _ in range(task):
        tick()
    return task * task, os.getpid()


def invalid(task: int, tick: Callable[[], None]) -> int:
    raise BadInput(f"task {task} is invalid")


def dying(task: int, tick: Callable[[], None]) -> int:
    os._exit(9)


def endless(folder: Path, task: int, tick: Callable[[], None]) -> None:
    """Never ends by itself; says when it began and why it stopped."""
    (folder / f"began-{task}").touch()
    try:
        while True:
            tick()
            time.sleep(0.01)
    except BaseException as error:
        (folder / f"stopped-{task}").write_text(type(error).__name__)
        raise
