"""What is said while work goes on, and what is not."""

from __future__ import annotations

import logging
import os
import pty
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpoints import tiny_checkpoint
from moescope import progress as progress_module
from moescope.progress import progress, unsaid_alerts
from moescope.weights.verb import scan
from routing.tiny_text import save_model, texts, write_jsonl
from terminal import read_terminal


@pytest.fixture
def lines_of(monkeypatch, command_line):
    """Runs the command line here, without a terminal; returns its lines of progress."""

    def run(spacing: float, minute: float, *words: object) -> list[str]:
        monkeypatch.setattr(progress_module, "SPACING", spacing)
        monkeypatch.setattr(progress_module, "MINUTE", minute)
        code, _, err = command_line(*words, "--device", "cpu", "--no-report")
        assert code == 0, err
        assert "\x1b" not in err
        return [line for line in err.splitlines() if " elapsed" in line]

    return run


def test_a_scan_prints_one_line_per_layer(tmp_path: Path, lines_of):
    model = tiny_checkpoint(tmp_path / "model", layers=3, experts=4)
    lines = lines_of(0, 1e9, "scan", model, "--out", tmp_path / "run")
    assert [line.split(",")[0] for line in lines] == [
        f"layer {layer}: {4 * (layer + 1)} of 12 experts" for layer in range(3)
    ]


def test_models_that_read_text_print_a_line_per_model_and_per_minute(tmp_path: Path, lines_of):
    model, text = save_model(tmp_path / "model"), write_jsonl(tmp_path / "text.jsonl", texts(60))
    lines = lines_of(0, 1e9, "trace", model, "--text", text, "--out", tmp_path / "trace")
    assert [line.split(":")[0] for line in lines] == ["model"]
    often = lines_of(
        1e9, 0.01, "trace", model, "--text", text, "--out", tmp_path / "again", "--batch-size", "1"
    )
    assert often[0].startswith("starting: 0 tokens")  # while the model loads
    method = ("--method", "reap", "--keep", "0.5", "--controls", "1", "--apply", tmp_path / "small")
    lines = lines_of(0, 1e9, "compress", model, "--text", text, *method, "--out", tmp_path / "compress")
    labels = [line.split(":")[0] for line in lines]
    assert [re.sub("writing .*", "writing", label) for label in labels] == [
        "calibrating",
        "writing",
        "judging 1 of 3 models (the original)",
        "judging 2 of 3 models (reap)",
        "judging 3 of 3 models (random (seed 1))",
    ]


def test_lines_are_apart_and_say_how_long_it_takes(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    with progress(40, 10, "experts", quiet=False) as advance:
        for layer in range(3):
            for _ in range(10):
                now += 0.9  # 9 s per layer
                advance(f"layer {layer}")
    assert capsys.readouterr().err.splitlines() == [
        "layer 0: 20 of 40 experts, 10 s elapsed, about 18 s left",  # known when the next layer has a result
        "layer 1: 30 of 40 experts, 19 s elapsed, about 9 s left",
        "layer 2: 40 of 40 experts, 27 s elapsed, about 1 s left",
    ]
    with progress(50, 0, "experts", quiet=False) as advance:
        for seconds, layer in ((60, 0), (3, 1), (3, 2), (3, 3), (3, 4)):  # the first group is slow
            now += seconds
            advance(f"layer {layer}", 10)
    assert capsys.readouterr().err.splitlines() == [  # no time left before three groups
        "layer 0: 10 of 50 experts, 63 s elapsed",
        "layer 1: 20 of 50 experts, 66 s elapsed",
        "layer 2: 30 of 50 experts, 69 s elapsed, about 6 s left",
        "layer 3: 40 of 50 experts, 72 s elapsed, about 3 s left",
    ]
    with progress(None, 0, "tokens", quiet=False) as advance:
        for model in range(100):
            now += 0.1
            advance(f"model {model}", 7)
    assert len(capsys.readouterr().err.splitlines()) == 4  # 10 s, a line per 2 s at most
    with progress(None, 0, "tokens", quiet=True) as advance:
        now += 600
        advance("model")
    assert capsys.readouterr().err == ""


def test_on_a_terminal_the_bar_lives_and_no_line_stays(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(progress_module, "SPACING", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    model = tiny_checkpoint(tmp_path / "model", layers=3)
    terminal, end = pty.openpty()
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(read_terminal, terminal)
        with os.fdopen(end, "w") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            scan(model, out=tmp_path / "run")
    assert b"\x1b[" in shown.result()
    assert b"experts" in shown.result()
    assert not re.search(rb"layer \d: \d+ of", shown.result())


@pytest.mark.parametrize("unsaid", [True, False])
def test_alerts_are_unsaid_only_where_that_was_asked_and_only_for_so_long(
    unsaid: bool, caplog: pytest.LogCaptureFixture
):
    logger = logging.getLogger("moescope")
    with unsaid_alerts(unsaid):
        logger.warning("step 3, layer 0: an alert")
        logger.error("what is an error is always said")
    logger.warning("after it")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        *([] if unsaid else ["step 3, layer 0: an alert"]),
        "what is an error is always said",
        "after it",
    ]
