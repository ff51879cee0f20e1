"""A processor that lists AMX but dies of it: tried in a child process before the first bf16 product."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from moescope import processor
from moescope.processor import VARIABLE, avoid_broken_amx

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def children(monkeypatch, tmp_path):
    """A machine that lists AMX and kills who uses it; the commands of the child processes so far."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n\n")
    started = []
    really_run = subprocess.run

    def run(command, **options):
        if command[0] == sys.executable:  # git is asked for the commit
            started.append(command)
        return really_run(command, **options)

    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    monkeypatch.setattr(processor, "TRIAL", DIES)
    monkeypatch.setattr(processor.subprocess, "run", run)
    monkeypatch.setenv(VARIABLE, "")  # so that the test's end restores what it was
    monkeypatch.delenv(VARIABLE)
    return started


def test_a_killed_trial_restricts_onednn_with_one_warning(children, caplog):
    with caplog.at_level(logging.WARNING):
        avoid_broken_amx("cpu", True)
        avoid_broken_amx("cpu", True)
    assert os.environ[VARIABLE] == "AVX512_CORE_BF16"
    assert len(children) == 1
    assert len(caplog.records) == 1
    assert "AMX" in caplog.text


def test_a_trial_that_succeeds_leaves_onednn_free_and_is_not_repeated_in_children(
    children, caplog, monkeypatch
):
    monkeypatch.setattr(processor, "TRIAL", "pass")
    with caplog.at_level(logging.WARNING):
        avoid_broken_amx("cpu", True)
        avoid_broken_amx("cpu", True)
    assert os.environ[VARIABLE] == "DEFAULT"  # oneDNN's word for no restriction
    assert len(children) == 1
    assert not caplog.records


@pytest.mark.parametrize("flags", ["fpu avx512_bf16", "fpu amx_bf16x amx_tile", None], ids=str)
def test_without_amx_no_child_is_started(children, flags):
    processor.CPUINFO.unlink()
    if flags is not None:
        processor.CPUINFO.write_text(f"flags\t\t: {flags}\n")
    avoid_broken_amx("cpu", True)
    assert not children
    assert VARIABLE not in os.environ


def test_the_user_s_own_setting_is_respected(children, monkeypatch):
    monkeypatch.setenv(VARIABLE, "AVX2")
    avoid_broken_amx("cpu", True)
    assert not children
    assert os.environ[VARIABLE] == "AVX2"


@pytest.mark.parametrize(("device", "half"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_a_gpu_and_full_precision_need_no_trial(children, device, half):
    avoid_broken_amx(device, half)
    assert not children


def test_onednn_obeys_the_variable_although_torch_is_imported_already(tmp_path):
    """The smallest instruction set stands for any: this machine may have no AMX."""
    (tmp_path / "cpuinfo").write_text("flags : amx_bf16")
    script = f"""
import torch
from pathlib import Path
from moescope import processor

processor.CPUINFO, processor.WITHOUT_AMX, processor.TRIAL = Path("cpuinfo"), "SSE41", {DIES!r}
processor.avoid_broken_amx("cpu", True)
torch.ones(64, 64).to_mkldnn().relu()
"""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["ONEDNN_VERBOSE"] = "1"
    child = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert "isa:Intel SSE4.1" in child.stdout, child


# --- which verbs try


def test_a_lab_model_in_bf16_is_tried_too(children, trained_run):
    from moescope.execution.lab_models import load_any_model

    checkpoint = str(next((trained_run.path / "checkpoints").glob("step-*")))
    load_any_model(checkpoint, "auto", "cpu")
    assert not children
    load_any_model(checkpoint, "bfloat16", "cpu")
    assert len(children) == 1
