"""Where independent tasks execute: in this process, in worker processes of this machine, or on Ray.

A task is a small picklable description; `work(task, tick)` does it and calls `tick()` after each step that
progress counts. `engine.run(work, tasks, on_tick)` yields every task with its result, as they finish, and
calls `on_tick(task)` once per tick. Results return to the calling process, which alone writes: nothing is
written twice.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeVar

from moescope.errors import BadInput, unknown_name
from moescope.processor import count_cores

EngineName = Literal["local", "ray"]
RETRIES = 3  # of a task whose worker died; a task too large for its machine must not loop
TASKS_PER_GPU = 3  # the GPU computes one, another's weights are read, the third's statistics are made
POLL = 0.2  # seconds between two progress updates

Task = TypeVar("Task")
Result = TypeVar("Result")
Tick = Callable[[], None]
Work = Callable[[Task, Tick], Result]


@dataclass(frozen=True)
class LocalEngine:
    """In this process: one task after the other, or a few in threads that share a GPU."""

    name: ClassVar = "local"
    remote: ClassVar = False
    device: str  # where each task computes
    n_threads: int = 1

    def run(
        self, work: Work[Task, Result], tasks: Sequence[Task], on_tick: Callable[[Task], None]
    ) -> Iterator[tuple[Task, Result]]:
        if self.n_threads == 1:
            for task in tasks:
                yield task, work(task, partial(on_tick, task))
            return
        queue = iter(tasks)
        with ThreadPoolExecutor(self.n_threads) as pool:

            def submit(count: int) -> dict[Future[Result], Task]:
                some = islice(queue, count)
                return {pool.submit(work, task, partial(on_tick, task)): task for task in some}

            try:
                pending = submit(self.n_threads)
                while pending:
                    future = next(as_completed(pending))
                    task, result = pending.pop(future), future.result()
                    pending |= submit(1)  # before the result is yielded: writing it takes a while
                    yield task, result
            finally:
                pool.shutdown(cancel_futures=True)


def tick_counter(tasks: Sequence[Task], on_tick: Callable[[Task], None]) -> Callable[[int, int], None]:
    """Return show(index, ticks), which calls `on_tick` until the task's total is reached.

    Progress never goes back: a restarted task is silent until it passes the point it had reached.
    """
    shown = [0] * len(tasks)

    def show(index: int, ticks: int) -> None:
        while shown[index] < ticks:
            shown[index] += 1
            on_tick(tasks[index])

    return show


# --- processes


@dataclass(frozen=True)
class ProcessEngine:
    """In spawned processes of this machine, each of which may use a GPU. They end when this process does.

    For tasks that write their own folders and hold state that threads would share: trainings, with torch's
    random numbers.
    """

    name: ClassVar = "local"
    remote: ClassVar = True
    device: str
    jobs: int

    def run(
        self, work: Work[Task, Result], tasks: Sequence[Task], on_tick: Callable[[Task], None]
    ) -> Iterator[tuple[Task, Result]]:
        spawning = multiprocessing.get_context("spawn")
        n = max(len(tasks), 1)
        counts, stop = spawning.Array("q", n, lock=False), spawning.Event()
        show = tick_counter(tasks, on_tick)
        threads = str(threads_per_job(self.jobs))
        with (
            environment(OMP_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads),
            ProcessPoolExecutor(
                min(self.jobs, n), spawning, initializer=start_worker, initargs=(counts, stop)
            ) as pool,
        ):
            try:
                pending = {pool.submit(run_in_process, work, task, at): at for at, task in enumerate(tasks)}
                while pending:
                    finished, _ = wait(pending, POLL, FIRST_COMPLETED)
                    for at in range(len(tasks)):
                        show(at, counts[at])
                    for future in finished:
                        at = pending.pop(future)
                        yield tasks[at], future.result()
            except BrokenProcessPool:
                raise BadInput(
                    "a worker process died, most likely out of memory; resume with the same command "
                    f"and fewer than --jobs {self.jobs}"
                ) from None
            finally:
                stop.set()  # running tasks stop at their next tick
                pool.shutdown(cancel_futures=True)


def threads_per_job(jobs: int) -> int:
    """Threads per process when `jobs` processes share the machine's cores evenly."""
    return max(count_cores() // jobs, 1)


class Stopped(Exception):
    """The parent process no longer wants the result."""


WORKER = SimpleNamespace()  # what a worker process shares with its parent: counts, stop


def start_worker(counts: Any, stop: Event) -> None:
    """Leave interrupts to the parent, which sets `stop`, and watch for the parent's death."""
    WORKER.counts, WORKER.stop = counts, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_in_process(work: Work[Task, Result], task: Task, index: int) -> Result:
    """Do one task and count its ticks; a pool submits tasks ahead of time, so one may start after the
    stop."""

    def tick(steps: int = 1) -> None:
        WORKER.counts[index] += steps
        if WORKER.stop.is_set():
            raise Stopped

    tick(0)
    return work(task, tick)


# --- Ray


@dataclass(frozen=True)
class RayEngine:
    """Each task a Ray task, in worker processes that share only files with this one."""

    name: ClassVar = "ray"
    remote: ClassVar = True
    device: str
    cpus: float  # per task
    gpus: int
    environment: dict[str, str]  # of the workers
    slots: int = 1  # tasks that run at a time
    per_machine: int = 1  # of them at most

    def run(
        self, work: Work[Task, Result], tasks: Sequence[Task], on_tick: Callable[[Task], None]
    ) -> Iterator[tuple[Task, Result]]:
        import ray
        from ray import exceptions

        runtime_env = {"env_vars": self.environment}
        counter = ray.remote(TickCounter).options(num_cpus=0, max_restarts=-1).remote()
        remote = ray.remote(run_on_ray).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES, runtime_env=runtime_env
        )
        pending = {remote.remote(work, task, index, counter): index for index, task in enumerate(tasks)}
        show = tick_counter(tasks, on_tick)
        request = counter.update.remote({})
        try:
            while pending:
                finished, _ = ray.wait(list(pending), num_returns=1, timeout=POLL)
                for ref in finished:
                    index = pending.pop(ref)
                    ticks, result, bad_input = ray.get(ref)
                    show(index, ticks)
                    if bad_input is not None:
                        raise bad_input
                    yield tasks[index], result
                if ray.wait([request], timeout=0)[0]:
                    with suppress(exceptions.RayError):  # its machine is gone; it restarts on another
                        for index, ticks in ray.get(request).items():
                            show(index, ticks)
                    request = counter.update.remote({})
        except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError, exceptions.NodeDiedError):
            raise BadInput(
                f"Ray workers died {RETRIES + 1} times on the same task, most likely out of memory; "
                "set OMP_NUM_THREADS higher so that fewer tasks share a machine, then run the command again"
            ) from None
        except exceptions.RuntimeEnvSetupError as error:
            why = first_sentence(error)
            raise BadInput(f"Ray could not prepare a worker ({why}); use --engine local") from None
        except exceptions.RayTaskError:  # of our own code
            raise
        except exceptions.RayError as error:
            raise BadInput(f"Ray failed ({first_sentence(error)}); give the same command to resume") from None
        finally:
            with suppress(Exception):  # Ray's own processes may be dead
                for ref in pending:
                    ray.cancel(ref, force=True)
                ray.kill(counter)


Engine = LocalEngine | RayEngine


def run_on_ray(
    work: Work[Task, Result], task: Task, index: int, counter: Any
) -> tuple[int, Result | None, BadInput | None]:
    """Do one task in a Ray worker and report its ticks to the counter, a few times per second at most.

    Returns (ticks, result, input error): Ray would wrap the error in a traceback of its own.
    """
    ticks, reported = 0, 0.0

    def tick() -> None:
        nonlocal ticks, reported
        ticks += 1
        if time.monotonic() - reported >= POLL:
            reported = time.monotonic()
            counter.update.remote({index: ticks})

    try:
        result = work(task, tick)
    except BadInput as error:
        return ticks, None, error
    return ticks, result, None


class TickCounter:
    """Ticks per task, set by the workers and read by the process that shows progress."""

    def __init__(self) -> None:
        self.ticks: dict[int, int] = {}

    def update(self, ticks: dict[int, int]) -> dict[int, int]:
        self.ticks.update(ticks)
        return self.ticks


# --- opening an engine


def check_engine(engine: str, address: str | None, device: str) -> None:
    """Reject invalid combinations before any file is opened."""
    if engine == "local":
        if address is not None:
            raise BadInput(f"--address {address}: only Ray has an address; use --engine ray")
        return
    if find_spec("ray") is None:
        raise BadInput("--engine ray: Ray is not installed; pip install 'moescope[ray]'")
    if device.startswith("cuda:"):
        raise BadInput(f"--device {device}: Ray assigns GPUs itself; use --device cuda with --engine ray")
    if device not in ("auto", "cpu", "cuda"):
        raise unknown_name("device", device, ["auto", "cpu", "cuda"])


def check_jobs(engine: str, jobs: int | None) -> None:
    """Reject a number of parts that only Ray could run."""
    if jobs is not None and engine != "ray":
        raise BadInput(f"--jobs {jobs}: only Ray splits the text; use --engine ray, or omit it")


@contextmanager
def open_engine(engine: str, address: str | None, device: str) -> Iterator[Engine]:
    """Open the engine of that name and close it afterwards. Ray without an address starts a local cluster."""
    if engine == "local":
        yield LocalEngine(device, n_threads=1 if device == "cpu" else TASKS_PER_GPU)
        return
    import ray

    with ExitStack() as stack:
        if not ray.is_initialized():
            stack.enter_context(ray_cluster(address))
        elif address is not None:
            raise BadInput(f"--address {address}: this process is connected to Ray already; omit --address")
        yield ray_engine(device, [node["Resources"] for node in ray.nodes() if node["Alive"]])


def ray_engine(device: str, machines: list[dict[str, float]]) -> RayEngine:
    """Request as many CPUs per task as it uses threads, or a GPU where the cluster has any.

    BLAS sums in another order with another number of threads, which changes the last digits. Workers
    therefore get the thread count of this process; OMP_NUM_THREADS sets both.
    """
    most_cpus = max((machine.get("CPU", 0) for machine in machines), default=0)
    gpus = any(machine.get("GPU", 0) >= 1 for machine in machines)
    if most_cpus == 0:
        raise BadInput("no machine of the Ray cluster has a CPU to give; add one, or use --engine local")
    if device == "cuda" and not gpus:
        raise BadInput("--device cuda: no machine of the Ray cluster has a GPU to give; use --device cpu")
    place = "cuda" if gpus and device != "cpu" else "cpu"
    environment = thread_variables()
    if place == "cuda":
        cpus: float = 1
        slots = [int(machine.get("GPU", 0)) for machine in machines]
    else:
        cpus = min(int(environment["OMP_NUM_THREADS"]), most_cpus)  # Ray would wait forever for more
        slots = [int(machine.get("CPU", 0) // cpus) for machine in machines]
    return RayEngine(place, cpus, int(place == "cuda"), environment, max(sum(slots), 1), max(slots))


def thread_variables() -> dict[str, str]:
    """The environment in which torch and numpy use as many threads as in this process."""
    import torch

    set_here = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    openblas = set_here or str(count_cores())
    return {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OPENBLAS_NUM_THREADS": openblas}


@contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Join the cluster at the address, or start one of this machine alone: no dashboard, no leftover files.

    Ray prints nothing meanwhile: its messages about dead workers would go to stdout, which may be parsed as
    JSON.
    """
    import ray
    from ray._private import worker

    host, _, port = (address or "").rpartition(":")
    main_thread = threading.current_thread() is threading.main_thread()
    on_stop = signal.getsignal(signal.SIGTERM)
    place = "/tmp" if os.path.isdir("/tmp") else None  # sockets need short paths
    with tempfile.TemporaryDirectory(prefix="ray-", dir=place, ignore_cleanup_errors=True) as folder:
        own = {"address": "local", "include_dashboard": False, "_temp_dir": folder}
        try:
            if host and port.isdecimal() and "/" not in host:  # Ray itself would retry for half a minute
                socket.create_connection((host, int(port)), timeout=10).close()
            with environment(RAY_USAGE_STATS_ENABLED="0"):
                options: dict[str, Any] = own if address is None else {"address": address}
                ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:  # Ray raises nothing narrower where its processes start too slowly
            ray.shutdown()
            why = first_sentence(error)
            if address is None:
                raise BadInput(f"Ray cannot be started here ({why}); use --engine local") from None
            raise BadInput(
                f"--address {address}: no Ray cluster there ({why}); start one with `ray start --head`, set "
                "RAY_AUTH_MODE=token if it asks for a token, or omit --address"
            ) from None
        finally:
            if main_thread and on_stop is not None:
                signal.signal(signal.SIGTERM, on_stop)  # Ray replaces the handler
        # Ray's debugger sets it for the same purpose; there is no public way
        before = getattr(worker, "_worker_logs_enabled", True)
        worker._worker_logs_enabled = False
        try:
            yield
        finally:
            worker._worker_logs_enabled = before
            ray.shutdown()


@contextmanager
def environment(**defaults: str) -> Iterator[None]:
    """Set these environment variables, unless the user has; child processes inherit them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def first_sentence(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".")
