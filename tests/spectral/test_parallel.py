import threading
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from moescope.spectral import lapack, parallel
from moescope.spectral.lapack import ThreadControls, one_blas_thread, thread_controls
from moescope.spectral.parallel import MAX_THREADS, count_threads, map_in_order
from moescope.weights.layer import ScanSettings, analyse_layer
from spectral.builders import random_weights


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_given(workers):
    later = [threading.Event() for _ in range(6)]

    def slow_at_first(number: int) -> int:
        if workers > 1 and number % 2 == 0:  # each even one ends after the odd one behind it
            assert later[number].wait(20)
        elif workers > 1:
            later[number - 1].set()
        return number * number

    found = list(map_in_order(slow_at_first, enumerate(range(6)), workers, nullcontext))
    assert found == [(number, number * number) for number in range(6)]


def test_only_one_expert_more_than_are_worked_on_is_held():
    taken = []

    def items():
        for number in range(10):
            taken.append(number)
            yield number, number

    results = map_in_order(lambda number: number, items(), 2, nullcontext)
    next(results)
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_goes_wrong_in_the_work_or_the_reading_is_raised_and_blas_gets_its_threads_back(workers):
    def items():
        yield 0, 1
        raise ValueError("unreadable")

    before = thread_controls().get()
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda number: 1 // number, enumerate([1, 0, 1]), workers, nullcontext))
    with pytest.raises(ValueError, match="unreadable"):
        list(map_in_order(lambda number: number, items(), workers, nullcontext))
    assert thread_controls().get() == before


def test_the_time_spent_waiting_is_taken():
    entered = []

    @contextmanager
    def waiting():
        entered.append(threading.current_thread())
        yield

    list(map_in_order(lambda number: number, enumerate(range(3)), 2, waiting))
    assert entered == [threading.current_thread()] * 3


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (2, 2), (64, MAX_THREADS)])
def test_as_many_experts_at_once_as_blas_has_threads_within_reason(threads, expected, monkeypatch):
    monkeypatch.setattr(parallel, "thread_controls", lambda: ThreadControls(lambda: threads, lambda _: None))
    assert count_threads() == expected


def test_a_blas_that_cannot_be_told_is_left_alone_and_experts_go_one_by_one(monkeypatch):
    for module in (parallel, lapack):
        monkeypatch.setattr(module, "thread_controls", lambda *_: None)
    assert count_threads() == 1
    with one_blas_thread():
        pass


def test_a_layer_comes_out_the_same_whether_experts_go_one_by_one_or_at_once(monkeypatch):
    generator = np.random.default_rng(0)
    gates = list(generator.standard_normal((5, 120, 90)))
    gates[3][:, 40:] = 0  # one that takes the second route
    weights = random_weights(0, n=5, hidden=120, width=90, gates=gates)
    frames = {}
    for workers in (1, 3):
        monkeypatch.setattr(parallel, "count_threads", lambda workers=workers: workers)
        with one_blas_thread():
            frames[workers] = analyse_layer(weights, ScanSettings(router=("raw",))).frames
    assert frames[1]["spectra"]["fallback"].tolist() == [False, False, False, True, False]
    for name, frame in frames[1].items():
        assert frame.equals(frames[3][name]), name


@pytest.mark.parametrize("package", ["numpy", "scipy"])
def test_the_blas_of_either_package_has_one_thread_and_then_as_many_as_before(package):
    controls = thread_controls(package)
    assert controls is not None
    before = controls.get()
    controls.set(2)
    try:
        with one_blas_thread(package):
            assert controls.get() == 1
        assert controls.get() == 2
    finally:
        controls.set(before)
