"""The command line writes the report of a run after it: of every verb, once, and never at the run's cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faults import kill_work
from moescope import cli
from moescope.reporting.verb import OWN_MARK, is_outdated
from moescope.run import Run
from moescope.storage import is_leftover
from moescope.verbs import VERBS, load_verb
from moescope.weights.verb import scan


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    kill_work.prepare(folder)
    return folder


def invoke(*words: object, code: int = 0) -> tuple[str, str]:
    shown = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert shown.exit_code == code, shown.exception
    return shown.stdout, shown.stderr


def command(verb: str, inputs: Path, out: Path) -> list[object]:
    text = ["--text", inputs / "text.jsonl"]
    words: list[object] = {
        "scan": [inputs / "a"],
        "trace": [inputs / "model", *text],
        "compare": [inputs / "a", inputs / "b"],
        "compress": [inputs / "model", "--method", "reap", "--keep", "0.5", *text],
        "train": [inputs / "tiny.toml", "--router", "top2"],
        "study": [inputs / "study.toml"],
    }[verb]
    return [verb, *words, "--out", out, "--device", "cpu", "--quiet"]


@pytest.mark.parametrize(
    "verb", ["scan", "trace", "compare", "compress", "train", pytest.param("study", marks=pytest.mark.slow)]
)
def test_a_verb_writes_its_report_into_the_run_folder(verb, inputs, tmp_path):
    assert invoke(*command(verb, inputs, tmp_path / "run")) == ("", "")
    page = (tmp_path / "run" / "report.html").read_bytes()
    assert OWN_MARK in page
    assert not is_outdated(tmp_path / "run")


def test_every_verb_that_makes_a_run_offers_to_skip_the_report_and_no_other_verb():
    offering = {
        name
        for name, _, _ in VERBS
        if any("--no-report" in item.opts for item in cli.command_of(load_verb(name)).params)
    }
    assert offering == {"demo", *(name for name, _, _ in VERBS if load_verb(name).tables)}
    assert {"scan", "trace", "compare", "compress", "train", "study"} <= offering


def test_no_report_is_written_on_request_and_none_in_python(inputs, tmp_path):
    out, _ = invoke("scan", inputs / "a", "--out", tmp_path / "run", "--no-report", "--json")
    assert json.loads(out)["report"] is None
    scan(inputs / "a", out=tmp_path / "python", quiet=True)
    assert not list(tmp_path.rglob("report.html"))
    out, _ = invoke("scan", inputs / "a", "--out", tmp_path / "run", "--json")  # computes nothing
    assert json.loads(out)["report"] == str(tmp_path / "run" / "report.html")


def test_a_report_is_written_anew_only_where_the_run_or_a_part_of_it_changed(inputs, tmp_path):
    words = command("compare", inputs, tmp_path / "run")
    invoke(*words)
    page = tmp_path / "run" / "report.html"
    files = sorted((tmp_path / "run").rglob("run.json"))
    assert len(files) == 3  # its own, and those of two scans
    for file in files:
        before = page.stat().st_mtime_ns
        os.utime(file, ns=(before, before))
        assert not is_outdated(tmp_path / "run")
        os.utime(file, ns=(before + 1, before + 1))
        assert is_outdated(tmp_path / "run")
        os.utime(file, ns=(before, before))
    invoke(*words)
    assert page.stat().st_mtime_ns == before
    os.utime(page, ns=(0, 0))
    invoke(*words)
    assert page.stat().st_mtime_ns > before


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero\nsecond line"), KeyError("layer")])
def test_a_report_that_fails_is_one_line_and_the_run_is_done(inputs, tmp_path, monkeypatch, error):
    def fail(*given):
        raise error

    monkeypatch.setattr("moescope.reporting.page.page_content", fail)
    out, err = invoke("scan", inputs / "a", "--out", tmp_path / "run")
    said = [line for line in err.splitlines() if type(error).__name__ in line]
    assert len(said) == 1
    assert "Traceback" not in err
    assert f"next: moescope report {tmp_path / 'run'}" in out
    assert Run.load(tmp_path / "run").info["status"] == "done"
    _, err = invoke("scan", inputs / "a", "--out", tmp_path / "run", "--debug")
    assert "in page_content" in err or "in fail" in err


def test_without_plotly_the_run_is_done_and_one_line_says_what_to_install(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("moescope.reporting.verb.find_spec", lambda name: None)
    _, err = invoke("scan", inputs / "a", "--out", tmp_path / "run", "--quiet")
    assert len(err.splitlines()) == 1
    assert "pip install plotly" in err


def test_a_file_of_somebody_else_in_the_report_s_place_is_left_alone(inputs, tmp_path):
    scan(inputs / "a", out=tmp_path / "run", quiet=True)
    (tmp_path / "run" / "report.html").write_text("mine")
    os.utime(tmp_path / "run" / "report.html", ns=(0, 0))
    _, err = invoke("scan", inputs / "a", "--out", tmp_path / "run", "--quiet")
    assert len(err.splitlines()) == 1
    assert (tmp_path / "run" / "report.html").read_text() == "mine"


@pytest.mark.slow
def test_killed_while_it_writes_the_report_nothing_half_written_is_taken_for_one(inputs, tmp_path):
    """kill -9 before the file is created, and when it is written but does not have its name yet."""
    for write in (1, 2):
        folder = tmp_path / f"run-{write}"
        scan(inputs / "a", out=folder, quiet=True)
        words = [str(word) for word in command("scan", inputs, folder)]
        armed = {**os.environ, "MOESCOPE_FAILPOINT": f"kill:{write}"}
        killed = subprocess.run([sys.executable, "-m", "moescope", *words], env=armed, check=False)
        assert killed.returncode == -9
        assert not (folder / "report.html").exists()
        assert len([file for file in folder.iterdir() if is_leftover(file)]) == write - 1
        assert Run.load(folder).info["status"] == "done"
        invoke(*words)
        assert OWN_MARK in (folder / "report.html").read_bytes()
        assert not [file for file in folder.iterdir() if is_leftover(file)]


def test_on_a_terminal_a_line_says_how_to_open_the_report(inputs, tmp_path, command_line, monkeypatch):
    scan(inputs / "a", out=tmp_path / "my run", quiet=True)
    words = ["scan", inputs / "a", "--out", "my run"]
    assert "--open" not in command_line(*words)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "open it: moescope report 'my run' --open" in command_line(*words)[1].splitlines()
