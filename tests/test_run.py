"""Run folders: tasks are flushed completely or not at all, and unfinished runs resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import moescope
from moescope import run as run_module
from moescope.errors import BadInput
from moescope.run import DamagedRun, Run, clear_run, default_folder, finished_run, open_run, place_run
from moescope.storage import is_leftover
from moescope.tables import SCHEMA_VERSION
from moescope.verbs import load_verb

SCAN = load_verb("scan")
IDENTITY = {
    "arguments": {"layers": None, "matrix": ("gate",), "seed": 0},
    "checkpoints": [{"path": "/models/a", "header_hash": "1"}],
}


def frame(layer: int, mean: float = 0.5) -> pd.DataFrame:
    return pd.DataFrame([{"step": 0, "layer": layer, "matrix": "gate", "k": k, "mean": mean} for k in (1, 2)])


def flush(writer, layer: int) -> None:
    writer.flush_task(f"layer{layer}", {"orthogonality": frame(layer)}, {"layer": layer})


def finish(writer) -> Run:
    return writer.finish({"orthogonality": writer.joined("orthogonality")})


def leave_unfinished(
    folder: Path, error: BaseException, layers: tuple[int, ...] = (0,), identity: dict = IDENTITY
) -> None:
    with pytest.raises(type(error)), open_run(folder, SCAN, identity) as writer:
        for layer in layers:
            flush(writer, layer)
        raise error


def made(folder: Path, identity: dict = IDENTITY, **options: bool) -> Run:
    with open_run(folder, SCAN, identity, **options) as writer:
        flush(writer, 0)
        return finish(writer)


def info(folder: Path) -> dict:
    told = json.loads((folder / "run.json").read_text())
    return {key: value for key, value in told.items() if key != "fields"}  # which describes the others


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- tasks


def test_a_finished_run_holds_its_tables_and_nothing_of_its_making(tmp_path):
    run = made(tmp_path / "run")
    assert listing(tmp_path / "run") == ["orthogonality.parquet", "run.json"]
    assert run.info == info(tmp_path / "run")
    assert run.tables == ["orthogonality"]
    assert run.table("orthogonality")["k"].tolist() == [1, 2]
    assert run.table("orthogonality").columns.tolist() == list(SCAN.tables["orthogonality"].columns)


def test_tables_are_joined_from_all_tasks_and_sorted_by_their_keys(tmp_path):
    with open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        for layer in (10, 2, 1):
            flush(writer, layer)
        run = finish(writer)
    assert run.table("orthogonality")[["layer", "k"]].to_numpy().tolist() == [
        [1, 1],
        [1, 2],
        [2, 1],
        [2, 2],
        [10, 1],
        [10, 2],
    ]


def test_a_task_whose_writing_fails_is_not_done(tmp_path):
    with open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        flush(writer, 0)
        with pytest.raises(ValueError, match="may not be null"):
            writer.flush_task("layer1", {"orthogonality": frame(1), "similarity": frame(1)[["layer"]]}, {})
        assert writer.done_tasks() == {"layer0"}
        assert writer.joined("orthogonality")["layer"].unique().tolist() == [0]
        flush(writer, 1)  # what the failure left half-written is not in the way
        assert writer.done_tasks() == {"layer0", "layer1"}


def test_a_task_appears_by_one_rename_when_everything_in_it_is_on_disk(tmp_path, monkeypatch):
    seen = []

    def watch(writer_path):
        real = run_module.write_json

        def watched(path, value):
            seen.append((path.name, sorted(piece.name for piece in (writer_path / "parts").iterdir())))
            real(path, value)

        return watched

    with open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        monkeypatch.setattr(run_module, "write_json", watch(tmp_path / "run"))
        flush(writer, 0)
        monkeypatch.undo()
        assert [name for name, _ in seen] == ["setup.json"]
        assert [is_leftover(Path(name)) for name in seen[0][1]] == [True]
        assert writer.done_tasks() == {"layer0"}
        finish(writer)


def test_a_disk_that_is_nearly_full_is_refused_before_the_task_and_the_run_resumes_later(
    tmp_path, monkeypatch
):
    full = shutil._ntuple_diskusage(10**9, 10**9 - 5_000_000, 5_000_000)
    refused = pytest.raises(BadInput, match=r"5 MB of disk left, 34 MB needed; free some space")
    with refused, open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        flush(writer, 0)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
        flush(writer, 1)
    monkeypatch.undo()
    with open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        assert writer.done_tasks() == {"layer0"}


def test_a_table_that_fails_to_be_written_leaves_the_old_one_whole(tmp_path):
    path = tmp_path / "orthogonality.parquet"
    run_module.write_table(SCAN.tables["orthogonality"], frame(0), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="no column"):
        run_module.write_table(SCAN.tables["orthogonality"], frame(0).assign(surprise=1), path)
    assert path.read_bytes() == before


def test_a_crash_between_tables_and_done_loses_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with pytest.raises(OSError, match="full"), open_run(folder, SCAN, IDENTITY) as writer:
        flush(writer, 0)
        monkeypatch.setattr(writer, "save_info", lambda **_: (_ for _ in ()).throw(OSError("disk full")))
        try:
            finish(writer)
        finally:
            monkeypatch.undo()
    assert info(folder)["status"] == "failed"
    with open_run(folder, SCAN, IDENTITY) as writer:
        assert writer.done_tasks() == {"layer0"}
        assert finish(writer).info["status"] == "done"


# --- resuming


def test_an_unfinished_run_resumes_where_it_stopped(tmp_path):
    leave_unfinished(tmp_path / "run", KeyboardInterrupt(), layers=(0, 1))
    with open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        assert writer.done_tasks() == {"layer0", "layer1"}
        flush(writer, 2)
        run = finish(writer)
    assert run.table("orthogonality")["layer"].unique().tolist() == [0, 1, 2]


def test_a_resumed_run_keeps_its_start_and_adds_up_its_timings(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        writer.timings["decompose"] = 100.0
        flush(writer, 0)
        raise KeyboardInterrupt
    started = info(tmp_path / "run")["started"]
    with open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        writer.add_timings({"decompose": 1.0})
        run = finish(writer)
    assert run.info["started"] == started
    assert run.info["timings"]["decompose"] == 101.0


@pytest.mark.parametrize("status", ["done", "interrupted"])
def test_what_killed_processes_left_is_gone_after_the_same_command(tmp_path, status):
    folder = tmp_path / "run"
    if status == "done":
        made(folder)
    else:
        leave_unfinished(folder, KeyboardInterrupt())
    (folder / "exports").mkdir()
    tmp = ".moescope-0123456789abcdef.tmp"
    left = [folder / ".lock", folder / tmp, folder / "exports" / tmp]
    for file in left:
        file.touch()
    if place_run(SCAN, folder, "a", IDENTITY, overwrite=False)[1] is None:
        with open_run(folder, SCAN, IDENTITY) as writer:
            finish(writer)
    assert not [file for file in left if file.exists()]


def test_a_verb_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"verb": ["scan"], "schema_version": 2, "status": "done"}))
    with pytest.raises(DamagedRun, match="field verb is another, not text"):
        Run.load(tmp_path)


def test_run_json_stays_while_a_run_is_replaced_and_goes_alone(tmp_path):
    """A process killed in between leaves a folder that can be resumed or overwritten."""
    made(tmp_path / "run")
    clear_run(tmp_path / "run", SCAN)
    assert listing(tmp_path / "run") == ["run.json"]
    assert info(tmp_path / "run")["status"] == "interrupted"
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(RuntimeError), open_run(tmp_path / "run", SCAN, IDENTITY, overwrite=True):
        raise RuntimeError
    assert info(tmp_path / "run")["status"] == "failed"  # with checkpoints in it, it must be known as a run


def test_a_run_that_was_resumed_and_finished_tells_of_no_error(tmp_path):
    leave_unfinished(tmp_path / "run", RuntimeError("boom"))
    assert info(tmp_path / "run")["error"] == "RuntimeError: boom"
    with open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        finish(writer)
    assert "error" not in info(tmp_path / "run")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arguments": {**IDENTITY["arguments"], "seed": 1}}, r"other arguments \(seed\)"),
        (
            {"arguments": {**IDENTITY["arguments"], "seed": 1, "matrix": ["up"]}},
            r"other arguments \(matrix, seed\)",
        ),
        ({"arguments": {**IDENTITY["arguments"], "k": [3]}}, r"other arguments \(k\)"),
        ({"checkpoints": [{"path": "/models/a", "header_hash": None}]}, "other checkpoints"),
        ({"checkpoints": [{"path": "/models/a", "header_hash": "2"}]}, "other checkpoints"),
    ],
)
def test_other_arguments_are_refused_by_the_word_that_differs(tmp_path, finished, change, words):
    folder = tmp_path / "run"
    if finished:
        made(folder)
    else:
        leave_unfinished(folder, KeyboardInterrupt())
    before = {name: (folder / name).read_bytes() for name in listing(folder) if (folder / name).is_file()}
    with (
        pytest.raises(BadInput, match=f"{words}; give another --out, or --overwrite to replace it"),
        open_run(folder, SCAN, {**IDENTITY, **change}),
    ):
        pass
    assert {
        name: (folder / name).read_bytes() for name in listing(folder) if (folder / name).is_file()
    } == before


def test_a_copy_of_the_checkpoint_resumes_the_run_and_reuses_it(tmp_path):
    leave_unfinished(tmp_path / "run", KeyboardInterrupt())
    copy = {**IDENTITY, "checkpoints": [{"path": "/elsewhere/copy", "header_hash": "1"}]}
    with open_run(tmp_path / "run", SCAN, copy) as writer:
        assert writer.done_tasks() == {"layer0"}
        finish(writer)
    assert finished_run(tmp_path / "run", copy) is not None
    unknown = {**IDENTITY, "checkpoints": [{"path": "/elsewhere/copy", "header_hash": None}]}
    assert finished_run(tmp_path / "run", unknown) is None


def test_a_run_of_another_schema_version_is_not_continued(tmp_path):
    leave_unfinished(tmp_path / "run", KeyboardInterrupt())
    changed = {**info(tmp_path / "run"), "schema_version": SCHEMA_VERSION + 1}
    (tmp_path / "run" / "run.json").write_text(json.dumps(changed))
    with pytest.raises(BadInput, match="other schema version"), open_run(tmp_path / "run", SCAN, IDENTITY):
        pass


# --- whose folder it is


def test_overwrite_removes_our_own_files_and_no_one_else_s(tmp_path):
    folder = tmp_path / "run"
    made(folder)
    (folder / "report.html").write_text("ours")
    theirs = ["notes.txt", "draft.tmp", "mine.parquet", "checkpoints/model.safetensors", "figures/a.svg"]
    for name in theirs:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("theirs")
    other = {**IDENTITY, "checkpoints": []}
    run = made(folder, other, overwrite=True)
    assert not (folder / "report.html").exists()
    assert all((folder / name).read_text() == "theirs" for name in theirs)
    assert run.info["checkpoints"] == []


def test_overwrite_drops_the_tasks_of_the_run_before(tmp_path):
    leave_unfinished(tmp_path / "run", KeyboardInterrupt(), layers=(0, 1))
    with open_run(tmp_path / "run", SCAN, IDENTITY, overwrite=True) as writer:
        assert writer.done_tasks() == set()
        flush(writer, 5)
        assert finish(writer).table("orthogonality")["layer"].unique().tolist() == [5]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_holds_something_else_is_refused_untouched(tmp_path, overwrite):
    (tmp_path / "thesis.txt").write_text("years of work")
    with (
        pytest.raises(BadInput, match="not empty and not a run folder; give another --out"),
        open_run(tmp_path, SCAN, IDENTITY, overwrite),
    ):
        pass
    assert listing(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_json_of_another_tool_is_refused_untouched(tmp_path, overwrite):
    (tmp_path / "run.json").write_text('{"experiment": 7}')
    with (
        pytest.raises(BadInput, match=r"run\.json: not written by moescope"),
        open_run(tmp_path, SCAN, IDENTITY, overwrite),
    ):
        pass
    assert (tmp_path / "run.json").read_text() == '{"experiment": 7}'


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with (
        pytest.raises(BadInput, match="a file is in the way; give another --out"),
        open_run(tmp_path / "run", SCAN, IDENTITY),
    ):
        pass
    with (
        pytest.raises(BadInput, match="cannot be written"),
        open_run(tmp_path / "run" / "below", SCAN, IDENTITY),
    ):
        pass
    assert (tmp_path / "run").read_text() == "a file"


def test_a_folder_that_cannot_be_made_is_refused():
    with (
        pytest.raises(BadInput, match="cannot be written"),
        open_run(Path("/proc/no/such"), SCAN, IDENTITY),
    ):
        pass


# --- status


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), "interrupted"), (RuntimeError("boom"), "failed"), (BadInput("x"), "failed")],
)
def test_a_run_that_stops_after_its_first_task_says_how_it_stopped(tmp_path, error, status):
    leave_unfinished(tmp_path / "run", error)
    assert info(tmp_path / "run")["status"] == status
    assert listing(tmp_path / "run") == [
        "parts",
        "parts/layer0",
        "parts/layer0/orthogonality.parquet",
        "parts/layer0/setup.json",
        "run.json",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom"), BadInput("x")])
@pytest.mark.parametrize("place", ["run", "runs/deep/run"])
def test_a_failure_before_the_first_task_leaves_nothing_behind(tmp_path, error, place):
    leave_unfinished(tmp_path / place, error, layers=())
    assert listing(tmp_path) == []


def test_an_error_after_the_run_is_done_does_not_undo_it(tmp_path):
    with pytest.raises(RuntimeError), open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        flush(writer, 0)
        finish(writer)
        raise RuntimeError("the printer is on fire")
    assert Run.load(tmp_path / "run").info["status"] == "done"


# --- loading


def test_loading_refuses_what_is_no_finished_run(tmp_path):
    with pytest.raises(BadInput, match="no such folder; give a folder that a moescope command has written"):
        Run.load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"no run\.json in it"):
        Run.load(tmp_path)
    leave_unfinished(tmp_path / "run", KeyboardInterrupt())
    with pytest.raises(BadInput, match="this run is interrupted; give its command again to finish it"):
        Run.load(tmp_path / "run")


def test_an_absent_table_is_refused_with_those_that_are_there(tmp_path):
    run = made(tmp_path / "run")
    with pytest.raises(BadInput, match=r"unknown table in .*'alignment'; known: orthogonality"):
        run.table("alignment")
    assert repr(run) == f"Run({str(tmp_path / 'run')!r}, scan, tables: orthogonality)"
    assert run.name == "run"


# --- two writers


HOLD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from moescope.run import open_run
from moescope.verbs import load_verb
import pandas as pd
identity = {identity!r}
with open_run(Path(sys.argv[1]), load_verb("scan"), identity) as writer:
    frame = pd.DataFrame([{{"step": 0, "layer": 0, "matrix": "gate", "k": 1}}])
    writer.flush_task("layer0", {{"orthogonality": frame}}, {{}})
    print("holding", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process in the midst of writing tmp_path/run."""
    source = HOLD.format(tests=str(Path(__file__).parent), identity=json.loads(json.dumps(IDENTITY)))
    process = subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()


def test_a_second_writer_is_kept_out_and_the_lock_of_a_killed_process_is_no_lock(tmp_path, holder):
    before = listing(tmp_path / "run")
    for overwrite in (False, True):
        refused = pytest.raises(BadInput, match="another moescope process is writing this run")
        with refused, open_run(tmp_path / "run", SCAN, IDENTITY, overwrite):
            pass
        assert listing(tmp_path / "run") == before
        assert info(tmp_path / "run")["status"] == "running"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert info(tmp_path / "run")["status"] == "running", "it had no time to say anything else"
    with open_run(tmp_path / "run", SCAN, IDENTITY) as writer:
        assert writer.done_tasks() == {"layer0"}
        assert writer.info["process"] == os.getpid()
        finish(writer)
    assert listing(tmp_path / "run") == ["orthogonality.parquet", "run.json"]


# --- default folders


def test_default_folders_are_numbered_from_one(tmp_path):
    assert default_folder("scan", "tiny", IDENTITY, tmp_path / "runs") == tmp_path / "runs" / "scan-tiny-1"
    made(tmp_path / "runs" / "scan-tiny-1")
    assert default_folder("scan", "tiny", IDENTITY, tmp_path / "runs").name == "scan-tiny-2"
    made(tmp_path / "runs" / "scan-tiny-10")
    assert default_folder("scan", "tiny", IDENTITY, tmp_path / "runs").name == "scan-tiny-11"
    assert default_folder("scan", "other", IDENTITY, tmp_path / "runs").name == "scan-other-1"


def test_the_default_folder_of_unfinished_equal_work_is_that_work_s_own(tmp_path):
    leave_unfinished(tmp_path / "scan-tiny-1", KeyboardInterrupt())
    assert default_folder("scan", "tiny", IDENTITY, tmp_path).name == "scan-tiny-1"
    other = {**IDENTITY, "arguments": {}}
    assert default_folder("scan", "tiny", other, tmp_path).name == "scan-tiny-2"


def test_a_default_folder_whose_run_json_is_damaged_is_skipped(tmp_path):
    made(tmp_path / "scan-tiny-1")
    (tmp_path / "scan-tiny-1" / "run.json").write_text("{")
    assert default_folder("scan", "tiny", IDENTITY, tmp_path).name == "scan-tiny-2"


@pytest.mark.parametrize(
    ("name", "folder"),
    [("a b/c", "scan-a_b_c-1"), ("../x", "scan-.._x-1"), ("", "scan-model-1"), ("modèle", "scan-mod_le-1")],
)
def test_a_model_s_name_cannot_lead_out_of_the_runs_folder(tmp_path, name, folder):
    assert default_folder("scan", name, IDENTITY, tmp_path) == tmp_path / folder


# --- run.json


def test_run_json_tells_what_was_run_with_what(tmp_path):
    run = made(tmp_path / "run")
    assert run.info["schema_version"] == SCHEMA_VERSION
    assert run.info["verb"] == "scan"
    assert run.info["arguments"] == {"layers": None, "matrix": ["gate"], "seed": 0}
    assert {"python", "moescope", "torch", "numpy", "pandas", "pyarrow"} <= set(run.info["versions"])
    for moment in ("started", "finished"):
        time.strptime(run.info[moment], "%Y-%m-%dT%H:%M:%S%z")


def test_the_git_commit_is_that_of_the_folder_one_works_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_module.git_commit() is None
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *command], check=True)
    shown = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert run_module.git_commit() == shown.stdout.strip()


# --- versions


def test_a_run_of_another_version_names_the_command_that_makes_it_again(tmp_path):
    made(tmp_path / "run")
    old = {**info(tmp_path / "run"), "schema_version": 1, "command": "moescope scan '/models/a b'"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(old))
    with pytest.raises(
        BadInput, match=r"schema version 1, this moescope uses 2; .* --overwrite: moescope scan '/models/a b'"
    ):
        Run.load(tmp_path / "run")


def test_a_part_that_cannot_be_opened_is_not_shown(planted_run, tmp_path):
    shutil.copytree(planted_run.path, tmp_path / "run")
    for name, text in {"damaged": "{", "foreign": '{"experiment": 7}'}.items():
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "run.json").write_text(text)
    shutil.copytree(planted_run.path, tmp_path / "run" / "scan")
    assert list(Run.load(tmp_path / "run").parts) == ["scan"]


# --- notebooks


def test_a_run_lists_and_draws_its_figures(planted_run):
    names = planted_run.figures()
    assert len(names) > 15
    assert all(line and "\n" not in line for line in names.values())
    drawn = planted_run.figure("align_by_k", layer=3)
    assert type(drawn).__module__.startswith("plotly.")
    assert {trace.name for trace in drawn.data if trace.name.startswith("layer ")} == {"layer 3"}
    everything = planted_run.figure("align_by_k")
    assert len({trace.name for trace in everything.data if trace.name.startswith("layer ")}) == 5
    other = planted_run.figure("align_by_k", layer=3, router="centered")
    assert list(other.data[0].y) != list(drawn.data[0].y)


def test_a_figure_that_is_not_there_is_an_error_with_the_nearest_name(planted_run):
    with pytest.raises(BadInput, match=r"unknown figure of .*'alignments'; did you mean 'alignment_by_k'"):
        planted_run.figure("alignments")
    with pytest.raises(BadInput, match="unknown column to select by in figure alignment_by_k 'layr'"):
        planted_run.figure("alignment_by_k", layr=3)
    with pytest.raises(BadInput, match="nothing to draw in figure alignment_by_k of layer=99"):
        planted_run.figure("alignment_by_k", layer=99)


def test_a_notebook_shows_key_numbers_with_chance_and_escapes_names(planted_run):
    html = planted_run._repr_html_()
    assert "chance" in html
    assert "<table>" in html
    assert str(planted_run.path) in html
    assert moescope.open(planted_run.path).info == planted_run.info
