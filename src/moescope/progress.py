"""Progress with the time left: a live bar on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MINUTE = 60.0  # seconds after which a line is printed, whatever happens
BURST = 0.1  # seconds: what is reported together is one group
GROUPS = 3  # of work, before a time left is shown
SPACING = 2.0  # least seconds between the lines of two labels


@contextmanager
def progress(
    total: int | None, done: int, what: str, quiet: bool, line_per_label: bool = True
) -> Iterator[Callable[..., None]]:
    """Yield a function to call after each task, with a label and the amount done (default 1).

    Without a total (a text of unknown length) the amount is counted and no time left is shown; a call may
    give the total once it is known. Without a terminal a line is printed per minute, and per label (a layer,
    a model) unless labels say how it goes.
    """
    if quiet:
        yield lambda label, amount=1, total=None: None
        return
    if not sys.stderr.isatty():
        lines = ProgressLines(total, done, what, line_per_label)
        ended = threading.Event()
        clock = threading.Thread(target=lines.print_every_minute, args=(ended,), daemon=True)
        clock.start()
        try:
            yield lines.advance
            lines.end_label()
        finally:
            ended.set()
            clock.join()
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        *("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), what),
        *(rich.TimeElapsedColumn(), "elapsed{task.fields[left]}"),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, pace = bar.add_task("starting", total=total, completed=done, left=""), Pace()

        def advance(label: str, amount: int = 1, total: int | None = None) -> None:
            pace.add(amount)
            of = bar.tasks[0]
            left = pace.left((total or of.total or 0) - of.completed - amount)
            bar.update(task, total=total, advance=amount, description=label, left=left)

        yield advance


class Pace:
    """How long a unit of work takes: the median over groups, as the first ones are slow."""

    def __init__(self) -> None:
        self.last, self.amount = time.monotonic(), 0
        self.seconds: list[float] = []  # per unit, of each group

    def add(self, amount: int) -> None:
        now = time.monotonic()
        self.amount += amount
        if self.amount and now - self.last >= BURST:
            self.seconds.append((now - self.last) / self.amount)
            self.last, self.amount = now, 0

    def left(self, units: float) -> str:
        """Return the time left in words; nothing before three groups, or where the total is unknown."""
        if len(self.seconds) < GROUPS or units < 0:
            return ""
        return f", about {duration(statistics.median(self.seconds) * units)} left"


class ProgressLines:
    """Prints to stderr how far the work is."""

    def __init__(self, total: int | None, done: int, what: str, line_per_label: bool):
        self.total, self.first, self.done, self.what = total, done, done, what
        self.line_per_label = line_per_label
        self.label, self.pace = "starting", Pace()
        self.began = self.printed = time.monotonic()
        self.lock = threading.Lock()

    def advance(self, label: str, amount: int = 1, total: int | None = None) -> None:
        self.total = total or self.total
        if label != self.label and self.done > self.first:
            self.end_label()
        self.label = label
        self.done += amount
        self.pace.add(amount)

    def end_label(self) -> None:
        """Print a line for the label that is done, unless one was printed just now."""
        if self.line_per_label and time.monotonic() - self.printed >= SPACING:
            self.print_line()

    def print_every_minute(self, ended: threading.Event) -> None:
        """Print a line a minute after the last one, also while a model loads, until the work has ended."""
        while not ended.wait(max(self.printed + MINUTE - time.monotonic(), 0.01)):
            if time.monotonic() - self.printed >= MINUTE:
                self.print_line()

    def print_line(self) -> None:
        with self.lock:
            self.printed = time.monotonic()
            of, left = (
                (f" of {self.total:,}", self.pace.left(self.total - self.done)) if self.total else ("", "")
            )
            elapsed = duration(self.printed - self.began)
            line = f"{self.label}: {self.done:,}{of} {self.what}, {elapsed} elapsed{left}"
            print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return a time as people write it: 42 s, 10 min, 2.0 h."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def unsaid_alerts(unsaid: bool = True) -> Iterator[None]:
    """Keep the Monitor's alerts in its tables only; do not print them."""
    logger = logging.getLogger("moescope")
    before = logger.level
    if unsaid:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
