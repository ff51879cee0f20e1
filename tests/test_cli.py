"""The command line as a user meets it: its exit codes, and what it prints where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import (
    tiny_checkpoint,
    write_checkpoint,
)
from moescope import __version__, cli
from moescope.errors import BadInput
from moescope.verbs import VERBS


def moescope(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "moescope", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


# --- help


def test_an_interruption_inside_a_finaliser_is_not_lost():
    code = (
        "import os, signal, time\n"
        "from moescope import cli\n"
        "class Finalised:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(1)\n"
        "def app():\n"
        "    Finalised()\n"
        "    for _ in range(100):\n"
        "        time.sleep(0.05)\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "moescope: interrupted; give the same command again to resume\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_names_every_verb(command_line, flag):
    code, out, err = command_line(flag)
    assert (code, err) == (0, "")
    assert "Usage" in out
    for verb, _, _ in VERBS:
        assert re.search(rf"\b{verb}\b", out)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import moescope as package

    with pytest.raises(AttributeError, match="module 'moescope' has no attribute 'scam'"):
        _ = package.scam


def test_version_prints_the_version(command_line):
    assert command_line("--version") == (0, f"moescope {__version__}\n", "")


# --- bad input


def dense(folder: Path) -> list[str]:
    write_checkpoint(
        folder / "model", {"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, {"model_type": "llama"}
    )
    return ["model: no MoE layer found (model_type llama)", "Looked for"]


def nothing_there(folder: Path) -> list[str]:
    return ["model: no such folder or file"]


def name_with_a_line_break(folder: Path) -> list[str]:
    (folder / "model").mkdir()
    save_file(
        {"1.mlp.gate.weight": torch.ones(2, 2), "a\nb": torch.ones(2)}, folder / "model" / "a\nb.safetensors"
    )
    return ["is missing; download"]


BAD = {prepare.__name__: prepare for prepare in (dense, nothing_there, name_with_a_line_break)}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_on_stderr_exit_code_2_and_no_folder(tmp_path, command_line, name):
    parts = BAD[name](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command_line("scan", "model")
    assert (code, out) == (2, "")
    assert_one_line(err, *parts)
    assert sorted(tmp_path.rglob("*")) == before


def assert_one_line(err: str, *parts: str) -> None:
    assert err.startswith("moescope: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_process_ends_with_exit_code_2_and_one_line(tmp_path):
    shown = moescope("scan", "model", cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert_one_line(shown.stderr, "model: no such folder or file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named", "help_of"),
    [
        (["scan", "--nonsense"], "--nonsense", "moescope scan --help"),
        (["scan", "x", "--seed", "many"], "--seed", "moescope scan --help"),
        (["frobnicate"], "frobnicate", "moescope --help"),
        (["compress"], "MODEL", "moescope compress --help"),
        (["trace", "model", "--max-tokens"], "--max-tokens", "--help"),
    ],
)
def test_a_command_line_that_is_wrong_is_one_plain_line(command_line, words, named, help_of):
    code, _, err = command_line(*words)
    assert code == 2
    assert_one_line(err, named)
    assert err.endswith(f"{help_of}\n")
    assert err.isascii()  # no box


@pytest.mark.parametrize("length", [300, 500, 100_000])
def test_an_error_line_is_short_and_keeps_its_beginning_and_its_remedy(monkeypatch, command_line, length):
    def fail(*_):
        raise BadInput(f"model/config.json: broken at {'x' * length}; download the file again")

    monkeypatch.setattr("moescope.families.inspect.open_checkpoint", fail)
    code, _, line = command_line("inspect", "model")
    assert code == 2
    assert len(line) <= 401  # with its line end
    assert line.startswith("moescope: model/config.json: broken at xxx")
    assert line.endswith("xxx; download the file again\n")


def test_control_characters_in_an_error_are_spelled_out():
    assert str(BadInput("model_type \x1b[2Jx\x07\ny")) == "model_type \\x1b[2Jx\\x07 y"


@pytest.mark.parametrize("verb", ["inspect", "scan", "trace", "compress", "report"])
def test_debug_shows_the_whole_cause_before_the_line(tmp_path, command_line, verb):
    folder = tiny_checkpoint(tmp_path / "model")
    (folder / "config.json").write_text("{broken")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{broken")
    (tmp_path / "text.txt").write_text("a b c")
    arguments = {"trace": ["--text", "text.txt"], "compress": ["--keep", "2", "--text", "text.txt"]}
    words = [verb, "run" if verb == "report" else "model", *arguments.get(verb, [])]
    code, _, line = command_line(*words)
    assert code == 2
    assert "Traceback" not in line
    code, _, shown = command_line(*words, "--debug")
    assert code == 2
    assert shown.startswith("Traceback")
    assert "JSONDecodeError" in shown, "the cause that the line replaces"
    assert shown.endswith(line)


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("moescope.weights.verb.open_steps", lambda *_: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["moescope", "scan", "model"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


# --- success


def test_scan_prints_coverage_findings_and_the_folder(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    shown = moescope("scan", model, "--out", "run", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("mixtral: 2 MoE layers of 2 expected, 4 experts per layer")
    assert lines[-2:] == ["run: run", "report: run/report.html"]
    assert lines[1].startswith("Routers ")  # the verdict
    assert 3 <= sum(line.startswith("  ") for line in lines) <= 5  # key numbers
    assert 1 <= sum(line.startswith("- ") for line in lines) <= 5
    assert max(map(len, lines)) <= 120
    facts = json.loads(moescope("scan", model, "--out", "run", "--json", cwd=tmp_path).stdout)
    every = moescope("scan", model, "--out", "run", "--verbose", cwd=tmp_path).stdout.splitlines()
    assert facts["verdict"] in every
    assert [line[2:] for line in every if line.startswith("- ")] == facts["findings"]
    assert "Traceback" not in shown.stderr
    assert (tmp_path / "run" / "alignment.parquet").exists()


def test_json_prints_the_summary_and_nothing_else(tmp_path, command_line):
    tiny_checkpoint(tmp_path / "model")
    code, out, _ = command_line("scan", "model", "--out", "run", "--json", "--no-report")
    facts = json.loads(out)
    assert code == 0
    assert {"coverage", "findings", "warnings"} <= set(facts)
    assert all(isinstance(line, str) for line in [*facts["coverage"], *facts["findings"], *facts["warnings"]])


def test_quiet_prints_nothing(tmp_path, command_line):
    tiny_checkpoint(tmp_path / "model")
    assert command_line("scan", "model", "--out", "run", "--quiet") == (0, "", "")


def test_warnings_go_to_stderr(tmp_path, command_line):
    tiny_checkpoint(tmp_path / "model")
    code, out, err = command_line("scan", "model", "--out", "run", "--k", "999", "--no-report")
    assert code == 0
    assert "warning: k = 999 skipped: no matrix has a rank above 16\n" in err
    assert "warning" not in out


def test_every_option_of_scan_reaches_the_run(tmp_path, command_line):
    tiny_checkpoint(tmp_path / "model")
    options = (
        "--layers 1 --matrix up,down --router raw,centered --k 3 --fold-norm --device cpu --precision exact "
        "--keep-going --seed 3 --quiet --no-report"
    )
    assert command_line("scan", "model", "--out", "run", *options.split())[0] == 0
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["arguments"] == {
        "layers": [[1]],
        "matrix": ["up", "down"],
        "router": ["raw", "centered"],
        "fold_norm": True,
        "k": [3],
        "precision": "exact",
        "seed": 3,
    }
    assert (info["device"], info["keep_going"]) == ("cpu", True)


def test_train_prints_counts_without_training_and_what_came_of_a_training(trained_run, command_line):
    code, out, _ = command_line("train", "--dry-run")
    assert code == 0
    assert "parameters: 887,872 in total, 887,872 trained" in out
    assert command_line("train", "--dry-run", "--quiet")[1] == ""
    assert json.loads(command_line("train", "--dry-run", "--quiet", "--json")[1])["steps"] == 300
    config = trained_run.path.parent / "tiny.toml"
    words = ("train", config, "--router", "top2", "--out", trained_run.path, "--device", "cpu")
    code, out, err = command_line(*words)
    assert code == 0, err
    assert "unigram baseline" in out
    assert f"report: {trained_run.path / 'report.html'}" in out
