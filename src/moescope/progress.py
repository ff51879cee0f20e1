"""Progress on a terminal, with the time left."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int | None, done: int, what: str, quiet: bool) -> Iterator[Callable[..., None]]:
    """Yield a function to call after each task, with a label and the amount done (default 1).

    Without a total (a text of unknown length) the amount is counted and no time left is shown. Without a
    terminal nothing is printed.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda label, amount=1: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total, completed=done)
        yield lambda label, amount=1: bar.update(task, advance=amount, description=label)


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
