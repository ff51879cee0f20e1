"""trace on a real Ray cluster of two workers: the tables of one process, whatever happens to the workers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import moescope
from moescope import Run
from moescope.execution.shares import SHARE
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
    """Bit for bit, floating-point columns included."""
    assert left.tables == right.tables
    for name in left.tables:
        pd.testing.assert_frame_equal(left.table(name), right.table(name), check_exact=True)


@pytest.mark.parametrize("jobs", [2, 5])
def test_tables_equal_those_of_one_process_whatever_the_number_of_parts(
    connected, place, here, tmp_path, jobs
):
    run = trace(place, tmp_path / "run", engine="ray", jobs=jobs, save_tokens=True)
    assert_equal_tables(run, here)
    assert 5 * SHARE < 60
    assert run.info["execution"][0]["workers"] == jobs
    assert (run.info["engine"], here.info["engine"]) == ("ray", "local")
