"""Where independent pieces of work execute: in this process, or on Ray.

A piece is a small picklable description; `work(piece, tick)` does it and calls `tick()` after each step that
progress counts.
`engine.run(work, pieces, on_tick)` gives every piece with its result, as they finish, and calls
`on_tick(piece)` as often as its work
ticked. Results come to the process that asked for them, which alone writes: wherever pieces run, nothing is
written twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any, ClassVar, TypeVar

from moescope.errors import BadInput, unknown_name

ENGINES = ("local", "ray")
# how often a piece is done again after its worker died; a piece too large for its machine must not loop
RETRIES = 3
PIECES_BESIDE_A_GPU = 3  # the GPU works for one, another's weights are read, statistics are made of the third
POLL = 0.2  # seconds between two looks at the progress of workers

Piece = TypeVar("Piece")
Result = TypeVar("Result")
Tick = Callable[[], None]
Work = Callable[[Piece, Tick], Result]


@dataclass(frozen=True)
class LocalEngine:
    """In this process.

    One piece after the other, or a few in threads where each keeps the processor and a GPU busy by turns.
    """

    name: ClassVar = "local"
    elsewhere: ClassVar = False
    device: str  # where each piece should compute
    at_once: int = 1

    def run(
        self, work: Work[Piece, Result], pieces: Sequence[Piece], on_tick: Callable[[Piece], None]
    ) -> Iterator[tuple[Piece, Result]]:
        if self.at_once == 1:
            for piece in pieces:
                yield piece, work(piece, partial(on_tick, piece))
            return
        left, under_way = iter(pieces), {}
        with ThreadPoolExecutor(self.at_once) as pool:
            try:
                for piece in islice(left, self.at_once):
                    under_way[pool.submit(work, piece, partial(on_tick, piece))] = piece
                while under_way:
                    future = next(as_completed(under_way))
                    done = under_way.pop(future)
                    result = future.result()
                    for piece in islice(left, 1):  # before the result is handed on: writing it takes a while
                        under_way[pool.submit(work, piece, partial(on_tick, piece))] = piece
                    yield done, result
            finally:
                pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class RayEngine:
    """Each piece a Ray task, in worker processes that share nothing with this one but files."""

    name: ClassVar = "ray"
    elsewhere: ClassVar = True
    device: str
    cpus: float  # that each piece asks for
    gpus: int
    environment: dict[str, str]  # of the workers

    def run(
        self, work: Work[Piece, Result], pieces: Sequence[Piece], on_tick: Callable[[Piece], None]
    ) -> Iterator[tuple[Piece, Result]]:
        import ray

        runtime_env = {"env_vars": self.environment}
        counter = ray.remote(TickCounter).options(num_cpus=0, max_restarts=-1).remote()
        task = ray.remote(attempt).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES, runtime_env=runtime_env
        )
        waiting = {task.remote(work, piece, index, counter): index for index, piece in enumerate(pieces)}
        shown = [0] * len(pieces)

        def show(index: int, ticks: int) -> None:
            """Progress never goes back.

            A piece begun anew is silent until it is past the point it had reached.
            """
            while shown[index] < ticks:
                shown[index] += 1
                on_tick(pieces[index])

        asked = counter.ticks.remote()
        try:
            while waiting:
                finished, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL)
                for ref in finished:
                    index = waiting.pop(ref)
                    outcome = fetch(ref)
                    show(index, outcome.ticks)
                    if outcome.refusal is not None:
                        raise outcome.refusal
                    yield pieces[index], outcome.result
                if ray.wait([asked], timeout=0)[0]:
                    with suppress(
                        ray.exceptions.RayError
                    ):  # its machine went away; it starts again elsewhere
                        for index, ticks in ray.get(asked).items():
                            show(index, ticks)
                    asked = counter.ticks.remote()
        finally:
            for ref in waiting:
                ray.cancel(ref, force=True)
            ray.kill(counter)


Engine = LocalEngine | RayEngine


@dataclass(frozen=True)
class Outcome:
    """What comes back of a piece: its result, or the one line why it cannot be done.

    Ray would wrap an error in a traceback of its own.
    """

    ticks: int
    result: Any = None
    refusal: BadInput | None = None


def attempt(work: Work[Piece, Result], piece: Piece, index: int, counter: Any) -> Outcome:
    """Do one piece in a Ray worker, telling the counter how far it is, a few times a second at most."""
    ticks, told = 0, 0.0

    def tick() -> None:
        nonlocal ticks, told
        ticks += 1
        if time.monotonic() - told >= POLL:
            told = time.monotonic()
            counter.tell.remote(index, ticks)

    try:
        result = work(piece, tick)
    except BadInput as error:
        return Outcome(ticks, refusal=error)
    return Outcome(ticks, result)


class TickCounter:
    """How far each piece is, told by the workers and asked for by the process that shows progress."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}

    def tell(self, index: int, ticks: int) -> None:
        self.told[index] = ticks

    def ticks(self) -> dict[int, int]:
        return self.told


def fetch(ref: Any) -> Outcome:
    from ray import exceptions, get

    try:
        return get(ref)
    except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError, exceptions.NodeDiedError):
        raise BadInput(
            f"Ray's workers died {RETRIES + 1} times over the same piece of work, most likely "
            "for want of memory; fewer pieces at a "
            "time need less of it: set OMP_NUM_THREADS higher, then the same command goes on"
        ) from None
    except exceptions.RuntimeEnvSetupError as error:
        raise BadInput(
            f"Ray could not prepare a worker ({first_sentence(error)}); use --engine local"
        ) from None


# --- opening


def check_engine(engine: str, address: str | None, device: str) -> None:
    """Refuse what cannot work before any file is opened."""
    if engine not in ENGINES:
        raise unknown_name("engine", engine, list(ENGINES))
    if engine == "local":
        if address is not None:
            raise BadInput(f"--address {address}: only Ray has an address; give --engine ray with it")
        return
    if find_spec("ray") is None:
        raise BadInput("--engine ray: Ray is not installed; pip install 'moescope[ray]'")
    if device.startswith("cuda:"):
        raise BadInput(
            f"--device {device}: Ray hands out GPUs by itself; give --device cuda with --engine ray"
        )
    if device not in ("auto", "cpu", "cuda"):
        raise unknown_name("device", device, ["auto", "cpu", "cuda"])


@contextmanager
def open_engine(engine: str, address: str | None, device: str) -> Iterator[Engine]:
    """The engine of that name, closed afterwards.

    Ray without an address is a cluster of this machine alone, gone when the work is done.
    """
    if engine == "local":
        yield LocalEngine(device, at_once=1 if device == "cpu" else PIECES_BESIDE_A_GPU)
        return
    import ray

    with ExitStack() as stack:
        if not ray.is_initialized():
            stack.enter_context(own_cluster() if address is None else joined_cluster(address))
        elif address is not None:
            raise BadInput(
                f"--address {address}: this process is connected to Ray already; leave the address out"
            )
        yield ray_engine(device, [node["Resources"] for node in ray.nodes() if node["Alive"]])


def ray_engine(device: str, machines: list[dict[str, float]]) -> RayEngine:
    """What each piece asks of a cluster of such machines: as many CPUs as it uses threads, and a GPU where
    there are any.

    BLAS sums in another order with another number of threads, so the last digits of a result depend on it.
    Workers are therefore given
    the number this process has, and OMP_NUM_THREADS sets both.
    """
    most_cpus = max((machine.get("CPU", 0) for machine in machines), default=0)
    gpus = any(machine.get("GPU", 0) >= 1 for machine in machines)
    if most_cpus == 0:
        raise BadInput("no machine of the Ray cluster has a CPU to give; add one, or use --engine local")
    if device == "cuda" and not gpus:
        raise BadInput("device cuda: no machine of the Ray cluster has a GPU to give; use --device cpu")
    place = "cuda" if gpus and device != "cpu" else "cpu"
    environment = thread_variables()
    cpus = min(
        int(environment["OMP_NUM_THREADS"]), most_cpus
    )  # what no machine has would be waited for forever
    return RayEngine(place, cpus if place == "cpu" else 1, int(place == "cuda"), environment)


def thread_variables() -> dict[str, str]:
    """The environment in which torch and numpy use as many threads as they do in this process."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for_numpy = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or str(cores)
    return {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OPENBLAS_NUM_THREADS": for_numpy}


@contextmanager
def own_cluster() -> Iterator[None]:
    """A cluster of this machine alone, without dashboard, logs on the terminal.

    Files left behind or word to anybody.
    """
    folder = tempfile.mkdtemp(
        prefix="ray-", dir="/tmp" if os.path.isdir("/tmp") else None
    )  # sockets need short paths
    try:
        with connection(address="local", include_dashboard=False, _temp_dir=folder):
            yield
    except RayRefused as error:
        raise BadInput(f"Ray cannot be started here ({error}); use --engine local") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """A connection to a cluster that is there already."""
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "/" not in host:  # Ray itself would go on trying for half a minute
            socket.create_connection((host, int(port)), timeout=10).close()
        with connection(address=address):
            yield
    except (RayRefused, OSError, OverflowError) as error:
        remedy = (
            "start one with `ray start --head`, set RAY_AUTH_MODE=token if it asks for a token, or "
            "leave --address out"
        )
        raise BadInput(
            f"--address {address}: no Ray cluster there ({first_sentence(error)}); {remedy}"
        ) from None


class RayRefused(Exception):
    """Ray could not be started or joined, in the first sentence of its own words."""


@contextmanager
def connection(**options: Any) -> Iterator[None]:
    import ray

    main_thread = threading.current_thread() is threading.main_thread()
    on_stop = signal.getsignal(signal.SIGTERM)
    try:
        with environment(RAY_USAGE_STATS_ENABLED="0"):
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, ValueError, ImportError) as error:  # a ConnectionError is an OSError
        ray.shutdown()
        raise RayRefused(first_sentence(error)) from None
    finally:
        if main_thread and on_stop is not None:
            signal.signal(signal.SIGTERM, on_stop)  # Ray takes it for itself
    try:
        with hushed():
            yield
    finally:
        ray.shutdown()


@contextmanager
def hushed() -> Iterator[None]:
    """No news of dead workers on stdout, where Ray prints them whatever it is told.

    What is printed there may be read as JSON.
    """
    from ray._private import worker

    before = getattr(
        worker, "_worker_logs_enabled", True
    )  # Ray's debugger sets it for the same end; there is no public way
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


@contextmanager
def environment(**defaults: str) -> Iterator[None]:
    """These environment variables, where the user has not set them.

    Ray's processes take them over when they start.
    """
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def first_sentence(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split(". ")[0].rstrip(".")
