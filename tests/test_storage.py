"""Writes: exclusive random names, nothing left behind, and failures of the disk as one line."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from checkpoints import tiny_checkpoint
from moescope import run as run_module
from moescope import storage
from moescope.cli import app
from moescope.errors import BadInput
from moescope.execution.ways import Execution
from moescope.lab.study import clear_study
from moescope.lab.study_task import prune
from moescope.lab.train import clear_training
from moescope.reporting.verb import OWN_MARK, report
from moescope.routing.monitor import LoopMonitor
from moescope.run import Run, RunWriter, clear_run, open_run, remove_tasks
from moescope.storage import (
    Failpoint,
    atomic_file,
    is_leftover,
    leftover_name,
    remove,
    remove_leftovers,
    without_absolute_paths,
)
from moescope.verbs import load_verb
from moescope.weights.verb import scan
from report_payloads import page_text
from routing.tiny_training import batch, documents, model_of


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    storage.failpoint = None


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scanned")
    return scan(tiny_checkpoint(folder / "model", layers=1), out=folder / "run", quiet=True).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- names


def test_a_link_at_a_temporary_name_is_not_followed(scanned, tmp_path, blank_page):
    victim = tmp_path / "precious"
    victim.write_text("precious")
    for name in ("report.html.tmp", "report.tmp", "run.tmp", "alignment.tmp"):
        (scanned / name).symlink_to(victim)
    report(scanned)
    with atomic_file(scanned / "alignment.parquet.copy") as partial:
        assert partial.parent == scanned
        assert not partial.is_symlink()
        partial.write_text("new")
    assert victim.read_text() == "precious"
    for name in ("report.html.tmp", "report.tmp", "run.tmp", "alignment.tmp", "alignment.parquet.copy"):
        (scanned / name).unlink()


def test_a_link_at_the_target_is_replaced_and_its_file_stays(tmp_path):
    victim = tmp_path / "precious"
    victim.write_text("precious")
    (tmp_path / "table").symlink_to(victim)
    with atomic_file(tmp_path / "table") as partial:
        partial.write_text("new")
    assert (tmp_path / "table").read_text() == "new"
    assert victim.read_text() == "precious"


def test_a_name_that_is_taken_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.secrets, "token_hex", lambda count: "0" * 16)
    victim = tmp_path / "precious"
    victim.write_text("precious")
    leftover_name(tmp_path).symlink_to(victim)
    with pytest.raises(BadInput, match="cannot be written"), atomic_file(tmp_path / "table"):
        pass
    assert victim.read_text() == "precious"


def test_a_link_at_a_lock_does_not_empty_its_file(scanned, tmp_path):
    victim = tmp_path / "precious"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(victim)
    with pytest.raises(BadInput), open_run(tmp_path / "run", load_verb("scan"), {"arguments": {}}):
        pass
    assert victim.read_text() == "precious"


WAITING = """
    import sys
    from pathlib import Path
    from moescope.storage import atomic_file, atomic_folder
    with atomic_file(Path(sys.argv[1]) / "file"), atomic_folder(Path(sys.argv[1]) / "folder") as partial:
        (partial / "content").write_text("half")
        print("midway", flush=True)
        sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    (tmp_path / "draft.tmp").write_text("the user's")
    code = "\n".join(line[4:] for line in WAITING.splitlines())
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"midway\n"
        remove_leftovers(tmp_path)
        assert sum(map(is_leftover, tmp_path.iterdir())) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sum(map(is_leftover, tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["draft.tmp"]


# --- after the run is done


@pytest.mark.parametrize("command", ["scan", "report"])
def test_the_next_command_removes_what_a_stop_after_done_left(command, tmp_path, monkeypatch, blank_page):
    model = tiny_checkpoint(tmp_path / "model", layers=1)

    def stop(path: Path, run: Path) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("moescope.run.remove", stop)
    with pytest.raises(KeyboardInterrupt):
        scan(model, out=tmp_path / "run", quiet=True)
    monkeypatch.undo()
    monkeypatch.setattr("moescope.reporting.page.page_content", lambda *given: {})
    monkeypatch.setattr("moescope.reporting.page.render", lambda content: OWN_MARK.decode())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"
    assert any((tmp_path / "run").glob("parts/*/*.parquet"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.parquet")}
    scan(model, out=tmp_path / "run", quiet=True) if command == "scan" else report(tmp_path / "run")
    assert not (tmp_path / "run" / "parts").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.parquet")} == before


# --- a disk that fails


def monitored(out: Path, first: int, last: int) -> Run | None:
    model, rows = model_of("mixtral"), documents()
    monitor = LoopMonitor(out, every=2, overwrite=first == 0).watch(model, step=first)
    for number in range(first, last):
        model(**batch(rows[4 * number : 4 * number + 4])).loss.backward()
        monitor.step()
    try:
        return monitor.close()
    finally:
        monitor.stop()


def tables(run: Run) -> dict[str, pd.DataFrame]:
    measured = ["seconds", "step_seconds", "tokens_per_second"]
    return {name: run.table(name).drop(columns=measured, errors="ignore") for name in run.tables}


class FullWhileJoining(Failpoint):
    """A disk that is full from the n-th joined table on."""

    def __init__(self, folder: Path, left: int):
        self.folder, self.kind, self.left, self.joined = folder, "full", left, False

    def reach(self, creates: bool) -> None:
        if any(self.folder.glob("*.parquet")):
            self.joined = True
            super().reach(creates)


@pytest.mark.parametrize("write", [1, 3, 5])
def test_a_monitored_training_whose_joining_failed_resumes_with_every_row_once(write, tmp_path):
    """Joined tables count only when the run is done: some of them exist here beside the tasks' own."""
    torch.manual_seed(0)
    whole = monitored(tmp_path / "whole", 0, 4)
    storage.failpoint = full = FullWhileJoining(tmp_path / "run", write)
    with pytest.raises(BadInput, match="No space left on device"):
        monitored(tmp_path / "run", 0, 4)
    storage.failpoint = None
    assert full.joined, "nothing was joined, so nothing is shown"
    assert Run.load(tmp_path / "run").info["status"] == "failed"  # removed joined tables leave room for it
    resumed = monitored(tmp_path / "run", 4, 4)
    for name, frame in tables(whole).items():
        pd.testing.assert_frame_equal(frame, tables(resumed)[name], check_exact=True)


@pytest.mark.parametrize("write", [1, 3, 9, 40])
def test_a_full_disk_is_one_line_and_the_run_resumes(write, tmp_path):
    model = tiny_checkpoint(tmp_path / "model", layers=2)
    storage.failpoint = Failpoint(f"full:{write}")
    with pytest.raises(BadInput, match=r"cannot be written \(No space left on device\)") as caught:
        scan(model, out=tmp_path / "run", quiet=True)
    assert "\n" not in str(caught.value)
    storage.failpoint = None
    assert not [path for path in tmp_path.rglob("*") if is_leftover(path)]
    if not (tmp_path / "run").exists():  # nothing had been computed: nothing is left behind
        assert names(tmp_path) == ["model"]
    run = scan(model, out=tmp_path / "run", quiet=True)
    whole = scan(model, out=tmp_path / "whole", quiet=True)
    for name in whole.tables:
        pd.testing.assert_frame_equal(run.table(name), whole.table(name), check_exact=True)


def test_files_that_may_not_grow_are_one_line(tmp_path):
    """A real limit of the kernel: whoever writes, parquet included, is refused after 5,000 bytes."""
    model = tiny_checkpoint(tmp_path / "model", layers=1)
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from moescope.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))\n"
        f"sys.argv = ['moescope', 'scan', {str(model)!r}, '--out', {str(tmp_path / 'run')!r}, '--quiet']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "File too large" in done.stderr
    assert names(tmp_path) == ["model"]


def call(*words: str | Path) -> str:
    """Run a command that must fail, in this process, and return its one line."""
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(outcome.exception, BadInput), outcome.exception
    return str(outcome.exception)


def test_a_name_that_is_too_long_is_one_line(scanned, tmp_path, blank_page):
    long, model = tmp_path / ("x" * 300), scanned.parent / "model"
    assert "File name too long" in call("scan", model, "--out", long)
    assert "no such folder or file" in call("scan", long, "--out", tmp_path / "run")
    assert "File name too long" in call("report", scanned, "--out", long)
    assert "File name too long" in call("report", long)
    assert names(tmp_path) == []
    report(scanned, out=tmp_path / ("x" * 250 + ".html"))  # as long as a name may be
    assert len(names(tmp_path)) == 1


DEEP = "[" * 100_000


def test_deep_json_in_a_run_is_one_line_and_overwrite_replaces_it(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", layers=1)
    run = scan(model, out=tmp_path / "run", quiet=True)
    (run.path / "run.json").write_text(DEEP)
    assert "run.json: not valid JSON" in call("report", run.path)
    assert "run.json: not valid JSON" in call("scan", model, "--out", run.path)
    assert scan(model, out=run.path, overwrite=True, quiet=True).info["status"] == "done"


# --- what run.json says


def test_a_run_says_what_machine_and_code_made_it(scanned):
    told = Run.load(scanned).info
    assert told["machine"]["cpu"] in Path("/proc/cpuinfo").read_text() + platform.machine()
    assert told["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert told["machine"]["threads"] == torch.get_num_threads()
    assert len(told["machine"]["gpus"]) == torch.cuda.device_count()
    assert {"python", "torch", "numpy", "pyarrow", "tokenizers"} <= told["versions"].keys()
    assert told["versions"]["numpy"] == np.__version__
    command = ["git", "-C", str(Path(run_module.__file__).parent), "log", "-1", "--format=%H", "--", "."]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    assert (told["package_commit"] or "") == shown


def strings(value):
    """Every text of nested dicts and lists, keys among them."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for item in inner for text in strings(item)]


def test_no_text_of_an_anonymous_page_holds_a_path_or_what_cannot_be_seen(scanned, tmp_path):
    """Of a run whose texts are all paths, commands or sentences with an apostrophe."""
    run = shutil.copytree(scanned, tmp_path / "secret" / "it's \u202egnp")
    info = json.loads((run / "run.json").read_text())
    del info["fields"]
    place = str(tmp_path / "secret")
    info["command"] = f"moescope scan {place}/model --set checkpoint={place}/a:{place}/b"
    info["warnings"] = [f"moescope can't read {place}/a, {place}/b ({place}/c)", f"x={place}/d \u202e"]
    info["versions"] |= {"more": {"list": [f"{place}/e", ("code=" + place)]}}
    info["checkpoints"][0]["path"] = f"{place}/It's/model"
    run_module.write_json(run / "run.json", info)
    for anonymous in (False, True):
        html = report(run, out=tmp_path / "a.html", anonymous=anonymous).read_text()
        texts = strings(json.loads(page_text(html)))
        assert not [text for text in texts if "\u202e" in text]
        assert any("[U+202E]" in text for text in texts)
        assert any(place in text for text in texts) != anonymous


def test_the_removed_option_names_what_replaces_it():
    outcome = CliRunner().invoke(app, ["scan", "model", "--anonymous"])
    assert outcome.exit_code == 2
    assert "moescope report RUN --anonymous" in outcome.stderr


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("/home/me/model", "model"),
        ("/home/me/My Models/x y", "x y"),
        ("code=/home/me/code.txt", "code=code.txt"),
        ("moescope scan '/home/me/My Models/a' --out /tmp/b", "moescope scan a --out b"),
        ("moescope can't read /home/me/a; give another", "moescope can't read a; give another"),
        ("layers=0 expert=1:/home/me/a", "layers=0 expert=1:a"),
        ("/home/me/a.txt: no such file; give another", "a.txt: no such file; give another"),
        ("skipped: /home/me/a, /home/me/b (damaged)", "skipped: a, b (damaged)"),
        ("https://host/a/b", "https://host/a/b"),
        ("owner/name@main", "owner/name@main"),
        ("model.layers.0.mlp", "model.layers.0.mlp"),
        ("3 / 4 experts and/or layers", "3 / 4 experts and/or layers"),
    ],
)
def test_absolute_paths_become_names(text, hidden):
    assert without_absolute_paths(text) == hidden


@pytest.mark.parametrize("left", [0, 3])
def test_a_table_that_lost_rows_is_one_line(scanned, tmp_path, left):
    """A valid file, with fewer rows than were written."""
    folder = shutil.copytree(scanned, tmp_path / "copy")
    whole = pq.read_table(folder / "spectra.parquet")
    assert len(Run.load(folder).table("spectra")) == whole.num_rows > left
    pq.write_table(whole.slice(0, left), folder / "spectra.parquet")
    words = rf"spectra.parquet: {left} rows, {whole.num_rows} were written; .*--overwrite"
    with pytest.raises(BadInput, match=words):
        Run.load(folder).table("spectra")


# --- links in a run folder: what they point to lies outside the run, and stays


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
