"""Run damaged inputs through the command line, in this process: `python -m faults.fuzz --seed 1 -n 20000`.

A case passes if the command ends with exit code 0, or with exit code 2 and one line. It counts if it got to
the function of the verb that reads the damaged input; cases go on until as many counted as asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.targets import TARGETS, Bases, Target
from moescope import cli

SECONDS = 10  # of CPU time of one case at most
WAITING = 120  # seconds of one case at most, whatever else the machine does: it waits for something
GIGABYTES = 2.0  # of all cases together, beyond what was taken before them
ALLOCATED = 6 * 2**30  # address space of one case: what asks for more fails, and is a failure of the case
LONGEST = 401  # characters of the line, its end included
ATTEMPTS = 6  # cases per counted case at most
SIGNS_OF_MEMORY = ("DefaultCPUAllocator", "MemoryError", "Unable to allocate", "Cannot allocate", "bad_alloc")


class Hang(BaseException):
    """Not an Exception, so that nothing but the fuzzer catches it."""


@dataclass
class Outcome:
    """How the cases of one target ended."""

    cases: int = 0
    counted: int = 0
    accepted: int = 0  # exit code 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0

    def line(self, target: Target) -> str:
        share = self.counted / max(self.cases, 1)
        return (
            f"{target.name:17} {self.counted:6} counted of {self.cases:6} ({share:4.0%}), "
            f"{self.accepted:5} accepted, {len(self.failures)} failed, {self.seconds:6.1f} s, "
            f"slowest {self.slowest:.1f} s"
        )


@contextlib.contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count calls of the targets' readers, in every module that imported them."""
    calls = Counter[str]()
    replaced: list[tuple[Any, str, Any]] = []
    for reader in {target.reader for target in TARGETS}:
        module, name = reader.split(":")
        function = getattr(importlib.import_module(module), name)
        for holder in [value for key, value in sys.modules.items() if key.startswith("moescope")]:
            for key, value in list(vars(holder).items()):
                if value is function:
                    setattr(holder, key, counting(function, reader, calls))
                    replaced.append((holder, key, function))
    try:
        yield calls
    finally:
        for holder, key, function in replaced:
            setattr(holder, key, function)


def counting(function: Any, reader: str, calls: Counter[str]) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        calls[reader] += 1
        return function(*args, **options)

    return wrapper


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Bound the time and the address space of one case."""

    def stop(*_: Any) -> None:
        raise Hang

    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    previous = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ALLOCATED, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_command(command: list[str]) -> str | None:
    """Run a command line; return None for exit code 0, "" for one line and code 2, else what went wrong."""
    out, err = io.StringIO(), io.StringIO()
    given, stdin, interrupted = sys.argv, sys.stdin, signal.getsignal(signal.SIGTERM)
    sys.argv, sys.stdin = ["moescope", *command], io.StringIO()
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limits():
            cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    except Hang:
        return f"no end after {SECONDS} s of CPU time or {WAITING} s"
    except BaseException:
        return traceback.format_exc(limit=-7)
    finally:
        sys.argv, sys.stdin = given, stdin
        signal.signal(signal.SIGTERM, interrupted)
    message = err.getvalue()
    if code == 0:
        return None
    one_line = message.startswith("moescope: ") and message.count("\n") == 1 and len(message) <= LONGEST
    if code != 2 or not one_line or any(sign in message for sign in SIGNS_OF_MEMORY):
        return f"exit code {code}: {message}"
    return ""


def run_case(
    target: Target, seed: str, bases: Bases, place: Path, outcome: Outcome, calls: Counter[str]
) -> str | None:
    """Run one case, which `seed` alone decides; return how the command ended."""
    chance = random.Random(f"{target.name} {seed}")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    command = [str(part) for part in target.make(chance, bases, place)]
    started = time.perf_counter()
    before = calls[target.reader]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fault = run_command(command)
    taken = time.perf_counter() - started
    outcome.cases += 1
    outcome.counted += calls[target.reader] > before
    outcome.accepted += fault is None
    left = [name for name in ("out", "small", "report.html") if (place / name).exists()]
    if fault == "" and left:
        fault = f"left behind: {', '.join(left)}"
    outcome.seconds += taken
    outcome.slowest = max(outcome.slowest, taken)
    if fault:
        outcome.failures.append(f"{target.name}, case {seed}\n{fault}")
    return fault


def peak() -> float:
    """Return the peak resident memory of this process in gigabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def fuzz(seed: int, cases: int, bases: Bases, place: Path, only: str = "") -> dict[str, Outcome]:
    """Run cases of every target until as many counted as its share of `cases` is."""
    outcomes = {}
    total = sum(target.cases for target in TARGETS)
    with counted_calls() as calls, without_syncing():
        for target in TARGETS:
            if only in ("", target.name):
                wanted = -(-target.cases * cases // total)
                outcome = outcomes[target.name] = Outcome()
                memory = peak()
                while outcome.counted < wanted and outcome.cases < ATTEMPTS * wanted:
                    case = f"{seed}-{outcome.cases}"
                    run_case(target, case, bases, place / "case", outcome, calls)
                    if peak() - memory > GIGABYTES:
                        outcome.failures.append(f"{target.name}, case {case}: {peak() - memory:.1f} GB")
                        memory = peak()
                print(outcome.line(target), flush=True)
    return outcomes


@contextlib.contextmanager
def without_syncing() -> Iterator[None]:
    """Do not wait for the disk: what is written is thrown away."""
    sync = os.fsync
    os.fsync = lambda _: None
    try:
        yield
    finally:
        os.fsync = sync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=5000, help="cases that count")
    parser.add_argument("--only", default="", help="name of one target")
    parser.add_argument("--case", help="run and show one case, such as 0-17 (with --only)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bases = Bases.make(Path(folder) / "bases")
        if given.case:
            target = next(target for target in TARGETS if target.name == given.only)
            with counted_calls() as calls:
                print(run_case(target, given.case, bases, Path(folder) / "case", Outcome(), calls))
            return
        outcomes = fuzz(given.seed, given.n, bases, Path(folder), given.only)
    failures = [failure for outcome in outcomes.values() for failure in outcome.failures]
    print(f"{sum(outcome.counted for outcome in outcomes.values())} counted, peak {peak():.1f} GB")
    print("\n\n".join(failures[:50]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
