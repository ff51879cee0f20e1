"""Calibration on a real Ray cluster of two workers: the sums, the plan and the tables of one process."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import moescope
import ray_work
from moescope import Run
from moescope.errors import BadInput
from moescope.execution import workers
from routing.tiny_text import save_model, texts, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compress-ray")
    save_model(folder / "model", "qwen3_moe")
    write_jsonl(folder / "text.jsonl", texts(60, seed=0))
    return folder


def compress(place: Path, out: Path, **options) -> Run:
    given = {"keep": 0.5, "text": place / "text.jsonl", "batch_size": 1, "controls": 1, **options}
    return moescope.compress(place / "model", out=out, device="cpu", quiet=True, **given)


def assert_equal_runs(left: Run, right: Run) -> None:
    """Counts and groups exactly, other numbers to 1e-12: sums, plan, fitted rows, tables."""
    plans = [json.loads((run.path / "plan.json").read_text()) for run in (left, right)]
    weights = [[layer.pop("weights") for layer in plan["layers"]] for plan in plans]
    for mine, other in zip(*weights, strict=True):
        for group, expected in zip(mine, other, strict=True):
            assert group == pytest.approx(expected, rel=1e-12)
    hashes = [plan.pop("arrays_sha256") for plan in plans]
    assert (hashes[0] is None) == (hashes[1] is None)
    assert plans[0] == plans[1]
    stored = [sorted(file.name for file in run.path.glob("*.safetensors")) for run in (left, right)]
    assert stored[0] == stored[1]
    for name in stored[0]:
        arrays = [load_file(run.path / name) for run in (left, right)]
        assert arrays[0].keys() == arrays[1].keys()
        for key, array in arrays[0].items():
            tolerance = 1e-12 if array.dtype == torch.float64 else 0
            torch.testing.assert_close(array, arrays[1][key], rtol=tolerance, atol=tolerance)
    assert left.tables == right.tables
    for name in left.tables:
        pd.testing.assert_frame_equal(left.table(name), right.table(name), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "jobs"), [("hc_smoe", 3), ("m_smoe", 2)])
def test_sums_and_plan_do_not_depend_on_the_number_of_workers(connected, place, tmp_path, method, jobs):
    here = compress(place, tmp_path / "here", method=method)
    there = compress(place, tmp_path / "there", method=method, engine="ray", jobs=jobs)
    assert_equal_runs(there, here)
    assert [entry["workers"] for entry in there.info["execution"]] == [jobs, 1]


@pytest.mark.slow
def test_a_killed_worker_s_documents_are_counted_once(connected, place, tmp_path, monkeypatch):
    """Pruned, written and judged; a worker is killed in the middle of its streamed part."""
    here = compress(place, tmp_path / "here", apply=tmp_path / "small-here")
    marks = tmp_path / "marks"
    marks.mkdir()
    dying = functools.partial(ray_work.die_in_part, str(marks), 0, 30, workers.run_part)
    monkeypatch.setattr(workers, "run_part", dying)
    options = {"engine": "ray", "jobs": 2, "execution": "streamed"}
    there = compress(place, tmp_path / "there", apply=tmp_path / "small-there", **options)
    assert_equal_runs(there, here)
    assert sorted(mark.name for mark in marks.iterdir()) == ["0-0", "0-1", "1-0"]
    assert there.table("damage")["perplexity"].notna().any()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"jobs": 2}, "--jobs 2: only Ray splits the text"),
        ({"engine": "ray", "method": "random", "text": ()}, "--engine ray: there is no text"),
    ],
)
def test_options_that_do_not_fit_are_one_line(place, tmp_path, options, line):
    with pytest.raises(BadInput, match=line):
        compress(place, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
