"""Tasks for tests with a real Ray cluster, in a file that its workers import.

And who is left when it is gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from moescope.errors import BadInput

Tick = Callable[[], None]


def square(task: int, tick: Tick) -> int:
    for _ in range(task):
        tick()
    return task * task


def worker_facts(task: int, tick: Tick) -> dict[str, Any]:
    import torch

    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        **{name: os.environ.get(name) for name in names},
    }


def refuse_three(task: int, tick: Tick) -> int:
    if task == 3:
        raise BadInput("three: not wanted; give another number")
    return task


def fail(task: int, tick: Tick) -> int:
    raise ZeroDivisionError("a mistake of our own")


def die_over(marks: str, number: int, deaths: int, task: int, tick: Tick) -> int:
    """Square, but the worker is killed outright that many times over that number, three ticks into it."""
    attempt = len(list(Path(marks).glob(f"{task}-*")))
    (Path(marks) / f"{task}-{attempt}").touch()
    if task == number and attempt < deaths:
        for _ in range(3):
            tick()
        time.sleep(0.5)  # so that the ticks are on their way
        os.kill(os.getpid(), signal.SIGKILL)
    return square(task, tick)


def die_over_layer(
    marks: str, number: int, real: Callable[..., Any], device: str, task: Any, tick: Tick
) -> Any:
    """Analyse a layer, but the worker is killed outright at the end of the first attempt at that layer."""
    analysed = real(device, task, tick)
    first = not (Path(marks) / f"{task.name}-0").exists()
    (Path(marks) / f"{task.name}-{0 if first else 1}").touch()
    if task.layer == number and first:
        os.kill(os.getpid(), signal.SIGKILL)
    return analysed


def die_in_part(
    marks: str,
    number: int,
    batches: int,
    real: Callable[..., Any],
    work: Callable[..., Any],
    request: Any,
    how: Any,
    part: Any,
    tick: Tick,
) -> Any:
    """Run a part, but the worker is killed outright after that many batches of the first attempt at it."""
    attempt = len(list(Path(marks).glob(f"{part.number}-*")))
    mark = Path(marks) / f"{part.number}-{attempt}"
    mark.touch()
    done = 0

    def dying(traced: Any, part: Any, advance: Callable[[int], None]) -> Any:
        def count(tokens: int) -> None:
            nonlocal done
            done += 1
            mark.write_text(str(done))
            advance(tokens)
            if part.number == number and attempt == 0 and done == batches:
                os.kill(os.getpid(), signal.SIGKILL)

        return work(traced, part, count)

    return real(dying, request, how, part, tick)


def wait_beyond(last: int, real: Callable[..., Any], device: str, task: Any, tick: Tick) -> Any:
    """Analyse the layers up to the last one; wait for ever over those beyond it."""
    while task.layer > last:
        time.sleep(0.1)
    return real(device, task, tick)


def survivors(family: list[psutil.Process], seconds: float = 60) -> list[psutil.Process]:
    """Those still running after that time at most; dead ones that nobody has collected yet do not count."""

    def lives(member: psutil.Process) -> bool:
        try:
            return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while (left := [member for member in family if lives(member)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
