"""Engines: the same work, here and in the workers of a real Ray cluster."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

import ray_work
from moescope.engine import (
    RETRIES,
    Engine,
    LocalEngine,
    check_engine,
    open_engine,
    ray_engine,
    thread_variables,
)
from moescope.errors import BadInput


def done(engine: Engine, work, pieces) -> tuple[dict, Counter]:
    """(piece -> result, piece -> ticks), each piece having come once."""
    ticks: Counter = Counter()
    results = list(engine.run(work, pieces, lambda piece: ticks.update([piece])))
    assert len(results) == len({piece for piece, _ in results})
    return dict(results), ticks


def test_here_pieces_are_done_in_order_each_when_it_is_asked_for():
    begun = []

    def work(piece, tick):
        begun.append(piece)
        return ray_work.square(piece, tick)

    results = LocalEngine("cpu").run(work, [3, 1, 2], lambda piece: None)
    assert next(results) == (3, 9)
    assert begun == [3]
    assert list(results) == [(1, 1), (2, 4)]


def test_both_engines_give_the_same_results_and_ticks(connected):
    pieces = [4, 0, 2, 7]
    with open_engine("local", None, "cpu") as here, open_engine("ray", None, "cpu") as there:
        assert (here.elsewhere, there.elsewhere) == (False, True)
        assert done(here, ray_work.square, pieces) == done(there, ray_work.square, pieces)
        assert done(there, ray_work.square, pieces) == (
            {4: 16, 0: 0, 2: 4, 7: 49},
            Counter({7: 7, 4: 4, 2: 2}),
        )


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


def test_more_threads_than_any_machine_has_cpus_are_not_waited_for(connected, monkeypatch):
    monkeypatch.setattr(
        "moescope.engine.thread_variables", lambda: {**thread_variables(), "OMP_NUM_THREADS": "9"}
    )
    with open_engine("ray", None, "cpu") as engine:
        facts, _ = done(engine, ray_work.worker_facts, [0])
    assert facts[0]["OMP_NUM_THREADS"] == "9"


def test_a_piece_whose_worker_is_killed_is_done_again_and_counted_once(connected, tmp_path):
    work = functools.partial(ray_work.die_over, str(tmp_path), 5, 1)
    with open_engine("ray", None, "cpu") as engine:
        assert done(engine, work, [4, 5, 6]) == ({4: 16, 5: 25, 6: 36}, Counter({4: 4, 5: 5, 6: 6}))
    assert len(list(tmp_path.glob("5-*"))) == 2


def test_a_piece_that_kills_every_worker_is_given_up_in_one_line(connected, tmp_path):
    work = functools.partial(ray_work.die_over, str(tmp_path), 5, 99)
    with (
        open_engine("ray", None, "cpu") as engine,
        pytest.raises(BadInput, match="died 4 times over the same piece"),
    ):
        done(engine, work, [5])
    assert len(list(tmp_path.glob("5-*"))) == RETRIES + 1


def test_bad_input_in_a_worker_is_the_same_bad_input_here(connected):
    with open_engine("ray", None, "cpu") as engine, pytest.raises(BadInput) as caught:
        done(engine, ray_work.refuse_three, [1, 2, 3])
    assert type(caught.value) is BadInput
    assert str(caught.value) == "three: not wanted; give another number"


def test_a_mistake_of_our_own_in_a_worker_keeps_its_traceback(connected):
    with (
        open_engine("ray", None, "cpu") as engine,
        pytest.raises(ZeroDivisionError, match=r"ray_work\.py") as caught,
    ):
        done(engine, ray_work.fail, [1])
    assert "a mistake of our own" in str(caught.value)


def test_a_stop_by_the_batch_system_still_comes_to_whom_it_came_before(connected):
    handler = signal.getsignal(signal.SIGTERM)
    assert "ray" not in str(getattr(handler, "__module__", "")), (
        "Ray takes this signal for itself unless it is given back"
    )


def test_an_address_beside_a_connection_is_refused(connected):
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
def test_a_piece_asks_for_a_gpu_where_there_are_any_else_for_as_many_cpus_as_threads(
    monkeypatch, device, machines, asked
):
    monkeypatch.setattr("moescope.engine.thread_variables", lambda: {"OMP_NUM_THREADS": "2"})
    engine = ray_engine(device, machines)
    assert (engine.device, engine.cpus, engine.gpus) == asked


def test_a_cluster_without_a_cpu_is_refused_not_waited_for():
    with pytest.raises(BadInput, match="no machine of the Ray cluster has a CPU to give"):
        ray_engine("auto", [{"memory": 1e9}])


def test_a_gpu_that_no_machine_has_is_refused_not_waited_for(connected):
    with (
        pytest.raises(BadInput, match="no machine of the Ray cluster has a GPU"),
        open_engine("ray", None, "cuda"),
    ):
        pass


@pytest.mark.parametrize(
    ("engine", "address", "device", "line"),
    [
        ("spark", None, "auto", "unknown engine 'spark'; known: local, ray"),
        ("local", "auto", "auto", "--address auto: only Ray has an address; give --engine ray with it"),
        (
            "ray",
            None,
            "cuda:1",
            "--device cuda:1: Ray hands out GPUs by itself; give --device cuda with --engine ray",
        ),
        ("ray", None, "tpu", "unknown device 'tpu'; known: auto, cpu, cuda"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(engine, address, device, line):
    with pytest.raises(BadInput) as caught:
        check_engine(engine, address, device)
    assert str(caught.value) == line


def test_without_ray_the_line_names_the_extra():
    """`-S` leaves out all installed packages, Ray among them."""
    command = [
        sys.executable,
        "-S",
        "-c",
        "from moescope.engine import check_engine; check_engine('ray', None, 'cpu')",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.stderr.strip().endswith("--engine ray: Ray is not installed; pip install 'moescope[ray]'")


def test_the_next_piece_is_under_way_while_a_result_is_being_written():
    import threading

    begun = {piece: threading.Event() for piece in range(4)}

    def work(piece, tick):
        begun[piece].set()
        return piece

    for done, _ in LocalEngine("cuda", at_once=1 + 1).run(work, range(4), lambda piece: None):
        if done == 0:
            assert begun[2].wait(30)  # nobody asked for the next result yet
