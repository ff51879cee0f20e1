"""Links in a run folder: what they point to lies outside the run, and stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moescope.errors import BadInput
from moescope.execution.ways import Execution
from moescope.lab.study import clear_study
from moescope.lab.study_task import prune
from moescope.lab.train import clear_training
from moescope.run import RunWriter, clear_run, open_run, remove_tasks
from moescope.storage import remove
from moescope.verbs import load_verb


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody else, with all names that moescope removes from its own runs."""
    places = [
        "",
        "step-3",
        "step-5",
        "parts",
        "parts/7",
        "trainer",
        "a-seed-1",
        "a-seed-1/checkpoints/step-1",
    ]
    for place in places:
        folder = tmp_path / "outside" / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "load.parquet").write_text("precious")
        (folder / "training_state.pt").write_text("precious")
    for folder in ("outside", "outside/a-seed-1"):
        (tmp_path / folder / "run.json").write_text('{"verb": "train", "status": "done"}')
    return tmp_path / "outside"


def content(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def run_of(verb: str, folder: Path) -> Path:
    folder.mkdir()
    info = {"verb": verb, "status": "done", "schema_version": 2, "arguments": {"base": {}}}
    (folder / "run.json").write_text(json.dumps(info))
    return folder


CLEARED: dict[str, tuple[str, str, str, Callable[[Path], object]]] = {
    # verb of the run, link in it, what of the outside it points to, what clears the run
    "a checkpoint": ("train", "checkpoints/step-3", "step-3", clear_training),
    "all checkpoints": ("train", "checkpoints", ".", clear_training),
    "scan of a training": ("train", "scan", ".", clear_training),
    "state of a training": ("train", "checkpoints/training_state.pt", "training_state.pt", clear_training),
    "a pruned checkpoint": ("train", "checkpoints/step-3", "step-3", lambda run: prune(run, "none")),
    "all pruned checkpoints": ("train", "checkpoints", ".", lambda run: prune(run, "last")),
    "a trained model": ("train", "model", ".", clear_training),
    "state of a Trainer": ("train", "trainer", "trainer", clear_training),
    "a training of a study": ("study", "trainings/a-seed-1", "a-seed-1", clear_study),
    "all trainings of a study": ("study", "trainings", ".", clear_study),
    "text of a study": ("study", "text", ".", clear_study),
    "tasks": ("trace", "parts", "parts", lambda run: clear_run(run, load_verb("trace"))),
    "a task": ("train", "parts/7", "parts/7", lambda run: remove_tasks(run, load_verb("train"))),
    "a table": ("trace", "load.parquet", "load.parquet", lambda run: clear_run(run, load_verb("trace"))),
    "hidden states": ("trace", "streamed", ".", lambda run: clear_run(run, load_verb("trace"))),
}


@pytest.mark.parametrize("case", CLEARED)
def test_nothing_is_removed_through_a_link(case: str, outside: Path, tmp_path: Path):
    verb, name, target, clear = CLEARED[case]
    link = run_of(verb, tmp_path / "run") / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside / target)
    before = content(outside)
    try:
        clear(tmp_path / "run")
    except BadInput as error:
        assert str(outside) in str(error)
        assert link.is_symlink()
    else:
        assert not link.is_symlink()
    assert content(outside) == before


def test_a_link_that_is_removed_alone_goes(outside: Path, tmp_path: Path):
    run = run_of("train", tmp_path / "run")
    for step in (3, 4):
        (run / "checkpoints").mkdir(exist_ok=True)
        (run / f"checkpoints/step-{step}").symlink_to(outside / "step-3")
    clear_training(run)
    assert [*(run / "checkpoints").iterdir()] == []
    assert (outside / "step-3" / "load.parquet").exists()


def test_hidden_states_are_not_stored_behind_a_link(outside: Path, tmp_path: Path):
    run = run_of("trace", tmp_path / "run")
    (run / "streamed").symlink_to(outside)
    with pytest.raises(BadInput, match="streamed"):
        Execution.of_run(RunWriter(run, load_verb("trace"), {}), "streamed", None, True)


def test_leftovers_behind_a_link_stay(tmp_path: Path):
    leftover = tmp_path / "outside" / ".moescope-0123456789abcdef.tmp"
    leftover.mkdir(parents=True)
    (run_of("scan", tmp_path / "run") / "parts").symlink_to(leftover.parent)
    with open_run(tmp_path / "run", load_verb("scan"), {"arguments": {}}, overwrite=True) as writer:
        writer.finish({})
    assert leftover.is_dir()


def test_a_run_folder_that_is_itself_a_link_is_a_run_like_another(tmp_path: Path):
    run_of("trace", tmp_path / "real")
    (tmp_path / "run").symlink_to(tmp_path / "real")
    (tmp_path / "run" / "parts").mkdir()
    remove(tmp_path / "run" / "parts", tmp_path / "run")
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["run.json"]
