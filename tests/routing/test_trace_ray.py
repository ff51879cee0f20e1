"""trace on a real Ray cluster of two workers: the tables of one process, whatever happens to the workers."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import moescope
import ray_work
from moescope import Run
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.execution import workers
from moescope.execution.documents import Window
from moescope.execution.streamed import load_streamed
from moescope.routing import trace as trace_module
from moescope.routing.token_sample import Sample
from routing.tiny_text import save_model, texts, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trace-ray")
    save_model(folder / "mixtral")
    write_jsonl(folder / "a.jsonl", texts(30, seed=0))
    write_jsonl(folder / "b.jsonl", texts(30, seed=1, first=25, words=25))
    return folder


def trace(place: Path, out: Path, **options) -> Run:
    domains = [f"{name}={place / name}.jsonl" for name in "ab"]
    given = {"model": place / "mixtral", "batch_size": 1, "device": "cpu", "quiet": True, **options}
    return moescope.trace(given.pop("model"), domain=domains, out=out, **given)


@pytest.fixture(scope="module")
def here(place, tmp_path_factory) -> Run:
    return trace(place, tmp_path_factory.mktemp("here") / "run", save_tokens=True)


def assert_equal_tables(left: Run, right: Run) -> None:
    """Counts exactly, other numbers to 1e-12."""
    assert left.tables == right.tables
    for name in left.tables:
        pd.testing.assert_frame_equal(left.table(name), right.table(name), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [2, 5])
def test_tables_equal_those_of_one_process_whatever_the_number_of_parts(
    connected, place, here, tmp_path, jobs, monkeypatch
):
    seen = []

    @contextmanager
    def shown(total, done, what, quiet):
        yield lambda label, amount=1, total=None: seen.append((amount, total))

    monkeypatch.setattr(trace_module, "progress", shown)
    run = trace(place, tmp_path / "run", engine="ray", jobs=jobs, save_tokens=True)
    assert_equal_tables(run, here)
    assert run.info["setup"] == here.info["setup"]
    assert run.info["arguments"] == here.info["arguments"]
    assert run.info["execution"][0]["workers"] == jobs
    assert (run.info["engine"], here.info["engine"]) == ("ray", "local")
    tokens = sum(run.info["coverage"][0]["tokens"].values())
    assert [total for _, total in seen if total] == [tokens]
    assert sum(amount for amount, _ in seen) == tokens


@pytest.mark.slow
def test_both_phases_of_several_steps_are_split(connected, place, tmp_path, monkeypatch):
    save_model(tmp_path / "step-2", nudge=0.05)
    (tmp_path / "step-1").symlink_to(place / "mixtral")
    monkeypatch.chdir(tmp_path)
    domains = [f"{name}={place / name}.jsonl" for name in "ab"]
    runs = [
        moescope.trace("step-1", "step-2", domain=domains, phase="both", batch_size=2, quiet=True, **options)
        for options in ({"out": "here"}, {"out": "there", "engine": "ray"})
    ]
    assert_equal_tables(*runs)
    assert set(runs[1].table("load")["phase"]) == {"prefill", "decode"}
    assert [entry["workers"] for entry in runs[1].info["execution"]] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["resident", "streamed"])
def test_a_killed_worker_s_documents_are_counted_once(
    connected, place, here, tmp_path, monkeypatch, execution, capfd
):
    """It is killed in the middle of its part; a streamed one continues at the layer it had reached."""
    marks = tmp_path / "marks"
    marks.mkdir()
    batches = {"resident": 5, "streamed": 2 * 32 + 5}[execution]  # streamed: in the third layer's pass
    options = {"execution": execution, "engine": "ray", "jobs": 2, "save_tokens": True}
    if execution == "streamed":
        options["memory"] = str(load_streamed(str(place / "mixtral"), "auto", "cpu").expect(0).memory_bytes)
    dying = functools.partial(ray_work.die_in_part, str(marks), 1, batches, workers.run_part)
    monkeypatch.setattr(workers, "run_part", dying)
    run = trace(place, tmp_path / "run", **options)
    assert_equal_tables(run, here)
    assert capfd.readouterr() == ("", "")
    assert sorted(mark.name for mark in marks.iterdir()) == ["0-0", "1-0", "1-1"]
    assert int((marks / "1-0").read_text()) == batches
    if execution == "streamed":
        assert int((marks / "1-1").read_text()) < int((marks / "0-0").read_text())
        size = open_checkpoint(place / "mixtral").bytes()
        assert size < run.info["execution"][0]["bytes_read"] <= 2 * 1.02 * size
        assert not (run.path / "streamed").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"jobs": 2}, "--jobs 2: only Ray splits the text"),
    ],
)
def test_options_that_do_not_fit_are_one_line(place, tmp_path, options, line):
    with pytest.raises(BadInput, match=line):
        trace(place, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# --- parts


@pytest.mark.parametrize(
    ("count", "jobs", "parts"), [(1, 4, 1), (3, 3, 3), (17, 2, 2), (60, 7, 7), (60, 99, 60)]
)
def test_parts_are_batches_in_order_each_once_and_of_about_equal_size(count, jobs, parts):
    batches = [[Window(at, 0, 0, np.zeros(5 + at % 7, dtype=np.int64), -1, at, 0.5)] for at in range(count)]
    split = workers.split(batches, jobs)
    assert [rows for part in split for rows in part.batches] == batches
    assert [part.number for part in split] == list(range(parts))
    sizes = [part.padded for part in split]
    assert all(part.batches for part in split)
    assert max(sizes) - min(sizes) <= 2 * 11  # two batches of the longest document


def test_samples_of_two_parts_join_to_that_of_the_whole_text(monkeypatch):
    """Parts of very different size have different thresholds."""
    monkeypatch.setattr("moescope.routing.token_sample.MOST_TOKENS", 100)
    draw = np.random.default_rng(0)
    windows = [Window(at, 0, 0, draw.integers(0, 9, 5), -1, at, draw.random()) for at in range(27)]
    together, parts = Sample([0]), [Sample([0]), Sample([0])]
    for window in windows:
        entry = window, np.zeros((1, 5, 1), dtype=np.int16), window.ids, window.ids
        together.add(*entry)
        parts[window.number >= 24].add(*entry)
    assert parts[0].threshold < parts[1].threshold
    parts[1].join(parts[0])
    assert parts[1].threshold == together.threshold
    assert {entry[0].number for entry in parts[1].windows} == {entry[0].number for entry in together.windows}
