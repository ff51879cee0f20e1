"""An engine beside those of engine.py: a few processes of this machine, each doing one piece of work after
another.

For pieces that write folders of their own and hold state that threads would share: trainings, each with
torch's random numbers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any, ClassVar

from moescope.engine import POLL, Piece, Result, Work, environment
from moescope.errors import BadInput


@dataclass(frozen=True)
class ProcessEngine:
    """Worker processes that start afresh (spawn), so that a GPU may be used in each.

    They end when this process does, however it ends.
    """

    name: ClassVar = "local"
    elsewhere: ClassVar = True
    device: str
    jobs: int

    def run(
        self, work: Work[Piece, Result], pieces: Sequence[Piece], on_tick: Callable[[Piece], None]
    ) -> Iterator[tuple[Piece, Result]]:
        spawning = multiprocessing.get_context("spawn")
        counts, stop = spawning.Array("q", max(len(pieces), 1), lock=False), spawning.Event()
        shown = [0] * len(pieces)
        threads = str(threads_each(self.jobs))
        with (
            environment(OMP_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads),
            ProcessPoolExecutor(
                min(self.jobs, max(len(pieces), 1)), spawning, initializer=begin, initargs=(counts, stop)
            ) as pool,
        ):
            try:
                waiting = {pool.submit(attempt, work, piece, at): at for at, piece in enumerate(pieces)}
                while waiting:
                    finished, _ = wait(waiting, POLL, FIRST_COMPLETED)
                    for at in range(len(pieces)):
                        while shown[at] < counts[at]:
                            shown[at] += 1
                            on_tick(pieces[at])
                    for future in finished:
                        at = waiting.pop(future)
                        yield pieces[at], future.result()
            except BrokenProcessPool:
                raise BadInput(
                    "a worker process died, most likely for want of memory; give fewer than "
                    f"--jobs {self.jobs}, then the same command goes on"
                ) from None
            finally:
                stop.set()  # those under way stop at their next tick
                pool.shutdown(cancel_futures=True)


def threads_each(jobs: int) -> int:
    """How many threads each of so many processes may use for the machine's cores to be shared evenly."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // jobs, 1)


# --- in a worker


class Stopped(Exception):
    """The process that asked for the work wants it no more."""


@dataclass
class Worker:
    """What a worker process was told when it began."""

    counts: Any = None
    stop: Event | None = None


WORKER = Worker()


def begin(counts: Any, stop: Event) -> None:
    """An interruption is for the parent to hear, which then tells us.

    Its death is watched for, since nobody could tell us of it.
    """
    WORKER.counts, WORKER.stop = counts, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()


def die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def attempt(work: Work[Piece, Result], piece: Piece, at: int) -> Result:
    """Do one piece, counting its ticks.

    A pool hands out pieces ahead of time, so one may come when nothing is wanted any more.
    """
    unless_stopped()

    def tick() -> None:
        WORKER.counts[at] += 1
        unless_stopped()

    return work(piece, tick)


def unless_stopped() -> None:
    if WORKER.stop is not None and WORKER.stop.is_set():
        raise Stopped
