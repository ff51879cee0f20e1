"""Killed at any write and started again, a run has the tables of an undisturbed one."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from faults.forked import call
from moescope.run import Run

MEASURED = [  # differ from run to run
    *("seconds", "step_seconds", "tokens_per_second", "relative_speed", "peak_memory_bytes", "peak_memory_gb")
]
VERBS = (
    *("scan", "compare", "trace", "recorded", "compress", "intervene", "deploy", "train", "base", "study"),
    *("monitor", "continued", "scan_over", "train_over", "base_over", "study_over"),
)
RAY = ("ray_trace", "ray_compress")
WATCHED = dict.fromkeys(("study", "study_over"), "trainings/top2-seed-3")  # the run inside that is recorded
FIRST = 30  # writes in which a finished run is cleared
OTHERS = 6  # kills per verb outside the joining
MOMENTS = 4  # kills per verb at random moments
LAYERS = (30, 20)  # writes of a streamed trace in its third layer and in its second
PASSES = ("held_out_states", "reference", "judged-0", "judged-1")  # of a judgement: tasks of a run
Start = Callable[..., int | None]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run a function of kill_work in a fork of a process that has imported everything; its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.kill_work"])
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), before])

    def run(function: str, *arguments: Any, seconds: float | None = None) -> int | None:
        process = context.Process(target=call, args=(function, *arguments))
        process.start()
        process.join(600 if seconds is None else seconds)
        if process.is_alive():
            process.kill()
            process.join()
            if seconds is None:
                pytest.fail(f"{function} {arguments}: still running after 600 s")
        return process.exitcode

    assert run("prepare", tmp_path_factory.mktemp("none")) == 0
    os.environ["PYTHONPATH"] = before
    return run


@pytest.fixture(scope="session")
def inputs(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    assert start("prepare", folder) == 0
    assert start("prepare_earlier", folder) == 0
    return folder


@pytest.fixture(scope="session")
def undisturbed(start: Start, inputs: Path) -> Callable[[str], tuple[Run, list[bool]]]:
    """A verb -> its run, and at which of its writes joined tables and parts are both on disk."""
    made: dict[str, tuple[Run, list[bool]]] = {}

    def run(verb: str) -> tuple[Run, list[bool]]:
        if verb not in made:
            out = inputs / f"undisturbed-{verb}"
            assert start("record", verb, inputs, out, out / WATCHED.get(verb, ".")) == 0
            made[verb] = Run.load(out), json.loads(out.with_name(f"{out.name}.json").read_text())
        return made[verb]

    return run


def all_runs(folder: Path) -> dict[str, Run]:
    found = {str(file.parent.relative_to(folder)): Run.load(file.parent) for file in folder.rglob("run.json")}
    assert {run.info["status"] for run in found.values()} == {"done"}
    return found


def assert_equal_tables(folder: Path, other: Path) -> None:
    """Compare every table of the run and of the runs inside it, row by row, but for times and memory."""
    runs, others = all_runs(folder), all_runs(other)
    assert runs.keys() == others.keys()
    for place, run in runs.items():
        assert run.tables == others[place].tables
        for name in set(run.tables) - {"overhead"}:  # times of parts of a step
            left, right = (
                of[place].table(name).drop(columns=MEASURED, errors="ignore") for of in (runs, others)
            )
            pd.testing.assert_frame_equal(left, right, check_exact=True, obj=f"{place} {name}")
        leftovers = [path for path in run.path.rglob("*") if path.suffix in (".tmp", ".lock")]
        assert leftovers == []


def kill_and_resume(
    start: Start,
    verb: str,
    inputs: Path,
    undisturbed: Path,
    out: Path,
    write: int,
    seconds: float | None = None,
) -> None:
    ended = start("attempt", verb, inputs, out, f"kill:{write}", seconds=seconds)
    assert ended == -signal.SIGKILL or seconds, f"{verb} at {write}"
    assert start("attempt", verb, inputs, out, None) == 0, f"{verb} at {write} did not resume"
    try:
        assert_equal_tables(undisturbed, out)
    except Exception as error:
        raise AssertionError(f"{verb} killed at write {write}") from error


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_killed_run_resumes_with_the_tables_of_an_undisturbed_one(
    start, inputs, undisturbed, verb, torture, tmp_path
):
    """At every write while tables are joined, at some others and at random moments; a part without --torture.

    `*_over` replaces a finished run of other settings: also at every write while that is cleared.
    """
    if verb == "continued":
        undisturbed("monitor")  # what it continues
    run, joining = undisturbed(verb)
    window = {write + near for write, both in enumerate(joining, 1) if both for near in (-1, 0, 1)}
    window &= set(range(1, len(joining) + 1))
    assert len(window) > 5
    others = sorted(set(range(1, len(joining) + 1)) - window)
    draw = random.Random(verb)
    cleared = {*range(1, FIRST + 1)} if verb.endswith("_over") else set()
    writes = sorted({*window, *cleared, *draw.sample(others, min(OTHERS, len(others)))})
    some = draw.sample(sorted(cleared or window), 1 if {"steps", "study_runs"} & {*run.tables} else 2)
    for write in writes if torture else some:
        kill_and_resume(start, verb, inputs, run.path, tmp_path / f"run{write}", write)
    for number in range(MOMENTS if torture else 0):
        place = tmp_path / f"moment{number}"
        kill_and_resume(start, verb, inputs, run.path, place, 10**9, seconds=draw.uniform(0.1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("verb", RAY)
def test_a_killed_run_on_ray_resumes_with_the_tables_of_an_undisturbed_one(
    start, inputs, undisturbed, verb, torture, tmp_path
):
    if not torture:
        pytest.skip("a cluster per attempt; runs with --torture")
    run, joining = undisturbed(verb)
    for write in random.Random(verb).sample(range(1, len(joining) + 1), 5):
        kill_and_resume(start, verb, inputs, run.path, tmp_path / f"run{write}", write)


@pytest.mark.slow
def test_a_streamed_trace_killed_twice_has_the_tables_of_an_undisturbed_one(start, inputs, torture, tmp_path):
    """At two layers and at random writes, most of them of hidden states, and again while it resumes."""
    whole, draw, reached = inputs / "undisturbed-streamed", random.Random("streamed"), set()
    assert start("record", "streamed", inputs, whole, whole) == 0
    writes = len(json.loads(whole.with_name(f"{whole.name}.json").read_text()))
    for number, write in enumerate([*LAYERS, *draw.sample(range(1, writes), 18 if torture else 1)]):
        out = tmp_path / f"run{number}"
        assert start("attempt", "streamed", inputs, out, f"kill:{write}") == -signal.SIGKILL
        manifest = out / "streamed" / "manifest.json"
        reached |= {json.loads(manifest.read_text())["part"]} if manifest.exists() else set()
        again = start("attempt", "streamed", inputs, out, f"kill:{draw.randint(1, 10)}")
        assert again in (0, -signal.SIGKILL)  # it may end before that write
        assert start("attempt", "streamed", inputs, out, None) == 0
        assert_equal_tables(whole, out)
    assert len(reached) > 1  # runs resumed at several layers


@pytest.mark.slow
def test_a_streamed_compression_killed_while_it_judges_resumes_at_the_pass_and_layer_reached(
    start, inputs, torture, tmp_path
):
    """At random writes of the judgement: hidden states, manifests, results of passes, the control's files."""
    whole, draw, reached = inputs / "undisturbed-streamed_compress", random.Random("judging"), set()
    assert start("attempt", "streamed_compress", inputs, whole, None) == 0
    writes = sorted(draw.sample(range(1, 120), 8))
    for number, write in enumerate(writes if torture else writes[:2] + writes[-1:]):
        out = tmp_path / f"run{number}"
        assert start("judge_until", inputs, out, write) == -signal.SIGKILL
        manifest, tasks = out / "streamed" / "manifest.json", out / "parts"
        part = json.loads(manifest.read_text())["part"] if manifest.exists() else 0
        done = sum((tasks / task).exists() for task in PASSES)
        assert start("judge_on", inputs, out) == 0
        passes = json.loads(out.with_name(f"{out.name}.json").read_text())
        assert len(passes) == 4 - done
        assert passes[:1] == [part][: len(passes)]
        reached.add((done, part))
        assert_equal_tables(whole, out)
    assert len({done for done, _ in reached}) > 2
    assert any(part for _, part in reached)
