"""Engines: the same work in this process, in worker processes and on a real Ray cluster."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

import processes_work
import ray_work
from moescope.engine import (
    RETRIES,
    Engine,
    LocalEngine,
    ProcessEngine,
    RayEngine,
    check_engine,
    open_engine,
    ray_engine,
    thread_variables,
    threads_per_job,
)
from moescope.errors import BadInput


def done(engine: Engine, work, tasks) -> tuple[dict, Counter]:
    """(task -> result, task -> ticks), with every task yielded once."""
    ticks: Counter = Counter()
    results = list(engine.run(work, tasks, lambda task: ticks.update([task])))
    assert len(results) == len({task for task, _ in results})
    return dict(results), ticks


def test_local_tasks_run_in_order_each_when_it_is_requested():
    begun = []

    def work(task, tick):
        begun.append(task)
        return ray_work.square(task, tick)

    results = LocalEngine("cpu").run(work, [3, 1, 2], lambda task: None)
    assert next(results) == (3, 9)
    assert begun == [3]
    assert list(results) == [(1, 1), (2, 4)]


def test_both_engines_give_the_same_results_and_ticks(connected):
    tasks = [4, 0, 2, 7]
    with open_engine("local", None, "cpu") as here, open_engine("ray", None, "cpu") as there:
        assert (here.remote, there.remote) == (False, True)
        assert done(here, ray_work.square, tasks) == done(there, ray_work.square, tasks)
        assert done(there, ray_work.square, tasks) == (
            {4: 16, 0: 0, 2: 4, 7: 49},
            Counter({7: 7, 4: 4, 2: 2}),
        )


@pytest.mark.slow
def test_workers_are_other_processes_with_the_threads_of_this_one(connected, monkeypatch):
    import torch

    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with open_engine("ray", None, "auto") as engine:
            facts, _ = done(engine, ray_work.worker_facts, [0, 1])
    finally:
        torch.set_num_threads(before)
    assert engine.cpus == 2
    for fact in facts.values():
        assert fact["pid"] != os.getpid()
        assert (fact["threads"], fact["OMP_NUM_THREADS"], fact["OPENBLAS_NUM_THREADS"]) == (2, "2", "3")


@pytest.mark.slow
def test_more_threads_than_any_machine_has_cpus_are_not_waited_for(connected, monkeypatch):
    monkeypatch.setattr(
        "moescope.engine.thread_variables", lambda: {**thread_variables(), "OMP_NUM_THREADS": "9"}
    )
    with open_engine("ray", None, "cpu") as engine:
        facts, _ = done(engine, ray_work.worker_facts, [0])
    assert facts[0]["OMP_NUM_THREADS"] == "9"


@pytest.mark.slow
def test_a_task_whose_worker_is_killed_is_repeated_and_counted_once(connected, tmp_path):
    work = functools.partial(ray_work.die_over, str(tmp_path), 5, 1)
    with open_engine("ray", None, "cpu") as engine:
        assert done(engine, work, [4, 5, 6]) == ({4: 16, 5: 25, 6: 36}, Counter({4: 4, 5: 5, 6: 6}))
    assert len(list(tmp_path.glob("5-*"))) == 2


@pytest.mark.slow
def test_a_task_that_kills_every_worker_is_an_error(connected, tmp_path):
    work = functools.partial(ray_work.die_over, str(tmp_path), 5, 99)
    with (
        open_engine("ray", None, "cpu") as engine,
        pytest.raises(BadInput, match="died 4 times on the same task"),
    ):
        done(engine, work, [5])
    assert len(list(tmp_path.glob("5-*"))) == RETRIES + 1


def test_bad_input_in_a_worker_is_the_same_bad_input_here(connected):
    with open_engine("ray", None, "cpu") as engine, pytest.raises(BadInput) as caught:
        done(engine, ray_work.refuse_three, [1, 2, 3])
    assert type(caught.value) is BadInput
    assert str(caught.value) == "three: not wanted; give another number"


def test_a_dead_raylet_is_one_line(ray_cluster, monkeypatch):
    """Also where stopping what was started fails, since it is asked of the dead process."""
    import ray  # after the cluster has its token, which Ray reads once
    from ray import exceptions

    dead = exceptions.RaySystemError("raylet died")
    for name in ("wait", "cancel", "kill"):
        monkeypatch.setattr(ray, name, Mock(side_effect=dead))
    monkeypatch.setattr(ray, "remote", MagicMock())
    with pytest.raises(BadInput, match=r"Ray failed \(.*raylet died.*\); give the same command to resume"):
        done(RayEngine("cpu", 1, 0, {}), ray_work.square, [1, 2])


def test_a_cluster_that_starts_too_slowly_is_one_line(ray_cluster, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", Mock(return_value=False))
    monkeypatch.setattr(ray, "shutdown", Mock())  # other tests use the cluster
    monkeypatch.setattr(ray, "init", Mock(side_effect=Exception("The current node timed out. Or not.")))
    slow = r"Ray cannot be started here \(The current node timed out\); use --engine local"
    with pytest.raises(BadInput, match=slow), open_engine("ray", None, "cpu"):
        pass


def test_a_programming_error_in_a_worker_keeps_its_traceback(connected):
    with (
        open_engine("ray", None, "cpu") as engine,
        pytest.raises(ZeroDivisionError, match=r"ray_work\.py") as caught,
    ):
        done(engine, ray_work.fail, [1])
    assert "a mistake of our own" in str(caught.value)


def test_the_handler_of_sigterm_is_restored(connected):
    handler = signal.getsignal(signal.SIGTERM)
    assert "ray" not in str(getattr(handler, "__module__", "")), (
        "Ray takes this signal for itself unless it is given back"
    )


def test_an_address_with_an_open_connection_is_rejected(connected):
    with pytest.raises(BadInput, match="connected to Ray already"), open_engine("ray", connected, "cpu"):
        pass


@pytest.mark.parametrize(
    ("device", "machines", "asked"),
    [
        ("auto", [{"CPU": 8}], ("cpu", 2, 0)),
        ("auto", [{"CPU": 8}, {"CPU": 8, "GPU": 4}], ("cuda", 1, 1)),
        ("cuda", [{"CPU": 8, "GPU": 4}], ("cuda", 1, 1)),
        ("cpu", [{"CPU": 8, "GPU": 4}], ("cpu", 2, 0)),
        ("cpu", [{"memory": 1e9}, {"CPU": 1}], ("cpu", 1, 0)),
    ],
)
def test_a_task_requests_a_gpu_if_there_is_one_else_as_many_cpus_as_threads(
    monkeypatch, device, machines, asked
):
    monkeypatch.setattr("moescope.engine.thread_variables", lambda: {"OMP_NUM_THREADS": "2"})
    engine = ray_engine(device, machines)
    assert (engine.device, engine.cpus, engine.gpus) == asked


def test_a_cluster_without_a_cpu_is_rejected_at_once():
    with pytest.raises(BadInput, match="no machine of the Ray cluster has a CPU to give"):
        ray_engine("auto", [{"memory": 1e9}])


def test_a_gpu_that_no_machine_has_is_rejected_at_once(connected):
    with (
        pytest.raises(BadInput, match="no machine of the Ray cluster has a GPU"),
        open_engine("ray", None, "cuda"),
    ):
        pass


@pytest.mark.parametrize(
    ("engine", "address", "device", "line"),
    [
        ("local", "auto", "auto", "--address auto: .* --engine ray"),
        ("ray", None, "cuda:1", "--device cuda:1: .* --device cuda "),
        ("ray", None, "tpu", "unknown device 'tpu'; did you mean 'cpu'. known: auto, cpu, cuda"),
    ],
)
def test_invalid_combinations_are_rejected(engine, address, device, line):
    with pytest.raises(BadInput, match=line):
        check_engine(engine, address, device)


def test_without_ray_the_error_names_the_extra():
    """`-S` leaves out all installed packages, Ray among them."""
    command = [
        sys.executable,
        "-S",
        "-c",
        "from moescope.engine import check_engine; check_engine('ray', None, 'cpu')",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.stderr.strip().endswith("--engine ray: Ray is not installed; pip install 'moescope[ray]'")


def test_the_next_task_runs_while_a_result_is_written():
    import threading

    begun = {task: threading.Event() for task in range(4)}

    def work(task, tick):
        begun[task].set()
        return task

    for done, _ in LocalEngine("cuda", n_threads=2).run(work, range(4), lambda task: None):
        if done == 0:
            assert begun[2].wait(120)  # nobody asked for the next result yet


# --- processes


def test_processes_return_every_task_once_with_its_ticks():
    ticks: list[int] = []
    found = dict(ProcessEngine("cpu", 2).run(processes_work.squared, [3, 1, 4], ticks.append))
    assert {task: result for task, (result, _) in found.items()} == {3: 9, 1: 1, 4: 16}
    assert sorted(ticks) == [1, 3, 3, 3, 4, 4, 4, 4]
    assert os.getpid() not in {process for _, process in found.values()}


def test_an_input_error_keeps_its_words_and_a_dead_worker_is_an_error():
    with pytest.raises(BadInput, match="task 7 is invalid"):
        list(ProcessEngine("cpu", 1).run(processes_work.invalid, [7], lambda task: None))
    with pytest.raises(BadInput, match=r"worker process died.*--jobs 2"):
        list(ProcessEngine("cpu", 2).run(processes_work.dying, [1], lambda task: None))
    assert multiprocessing.active_children() == []


def test_workers_stop_at_their_next_tick_after_an_interrupt(tmp_path: Path):
    seen: list[int] = []

    def tired(task: int) -> None:
        seen.append(task)
        if len(list(tmp_path.glob("began-*"))) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(
            ProcessEngine("cpu", 2).run(functools.partial(processes_work.endless, tmp_path), [1, 2, 3], tired)
        )
    assert {file.read_text() for file in tmp_path.glob("stopped-*")} == {"Stopped"}
    assert not (tmp_path / "began-3").exists()
    assert multiprocessing.active_children() == []


def test_cores_are_shared_evenly_with_one_at_least():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_job(1) == cores
    assert threads_per_job(10 * cores) == 1
