"""Work in several real processes: every result once, every tick shown, nobody left behind."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from pathlib import Path

import pytest

import processes_work
from moescope.errors import BadInput
from moescope.processes import ProcessEngine, threads_each


def test_every_piece_comes_back_once_with_its_ticks_from_other_processes():
    ticks: list[int] = []
    found = dict(ProcessEngine("cpu", 2).run(processes_work.squared, [3, 1, 4], ticks.append))
    assert {piece: result for piece, (result, _) in found.items()} == {3: 9, 1: 1, 4: 16}
    assert sorted(ticks) == [1, 3, 3, 3, 4, 4, 4, 4]
    assert os.getpid() not in {process for _, process in found.values()}


def test_a_refusal_comes_through_in_its_own_words_and_a_death_as_one_line():
    with pytest.raises(BadInput, match="piece 7 cannot be done; leave it out"):
        list(ProcessEngine("cpu", 1).run(processes_work.refusing, [7], lambda piece: None))
    with pytest.raises(
        BadInput, match="a worker process died, most likely for want of memory; give fewer than --jobs 2"
    ):
        list(ProcessEngine("cpu", 2).run(processes_work.dying, [1], lambda piece: None))
    assert multiprocessing.active_children() == []


def test_workers_stop_at_their_next_tick_when_nobody_wants_their_results(tmp_path: Path):
    seen: list[int] = []

    def tired(piece: int) -> None:
        seen.append(piece)
        if len(list(tmp_path.glob("began-*"))) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(ProcessEngine("cpu", 2).run(partial(processes_work.endless, tmp_path), [1, 2, 3], tired))
    assert {file.read_text() for file in tmp_path.glob("stopped-*")} == {"Stopped"}
    assert not (tmp_path / "began-3").exists()
    assert multiprocessing.active_children() == []


def test_cores_are_shared_evenly_and_everybody_has_one():
    cores = len(os.sched_getaffinity(0))
    assert threads_each(1) == cores
    assert threads_each(10 * cores) == 1
