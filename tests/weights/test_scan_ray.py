"""scan on a real Ray cluster.

The same tables as here, through killed workers, killed drivers and bad weights.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch

import ray_work
from checkpoints import edit_json, tiny_checkpoint, tiny_config, tiny_tensors, write_checkpoint
from moescope import Run, scan
from moescope.errors import BadInput
from moescope.weights import layer as layer_module
from moescope.weights import verb as scan_module
from moescope.weights.tables import TABLES
from planted import write_planted
from spectral.builders import stored_low_rank

pytestmark = pytest.mark.slow
LAYERS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("ray") / "model", layers=LAYERS, experts=6, d_model=48, d_ff=64
    )


@pytest.fixture(scope="module")
def here(model) -> Run:
    """The same work done by the local engine."""
    return scan(model, out=model.parent / "here", matrix="gate,down", router="raw,centered")


def assert_equal_tables(left: Run, right: Run) -> None:
    """Bit for bit, and no row twice."""
    for name, spec in ((name, TABLES[name]) for name in TABLES):
        frame = left.table(name)
        pd.testing.assert_frame_equal(frame, right.table(name), check_exact=True)
        assert not frame.duplicated(list(spec.keys)).any()


def on_ray(model: Path, out: Path, **options) -> Run:
    choices = {"matrix": "gate,down", "router": "raw,centered", "quiet": True, **options}
    return scan(model, out=out, engine="ray", **choices)


def test_workers_know_the_stored_dtype(connected, tmp_path):
    tensors = tiny_tensors(d_model=48, d_ff=64, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = stored_low_rank(0, tuple(tensor.shape), 10, torch.bfloat16)
    write_checkpoint(tmp_path / "low", tensors, tiny_config())
    run = on_ray(tmp_path / "low", tmp_path / "run")
    assert set(run.table("spectra")["rank"]) == {10}


def test_tables_are_equal_bit_for_bit(connected, tmp_path, model, here):
    run = on_ray(model, tmp_path / "run")
    assert_equal_tables(run, here)
    assert (run.info["engine"], here.info["engine"]) == ("ray", "local")
    assert run.info["device"] == "cpu"
    assert run.info["arguments"] == here.info["arguments"], (
        "where it was computed is no part of what was asked"
    )
    assert [{**setup, "seconds": 0} for setup in run.info["setup"]] == [
        {**setup, "seconds": 0} for setup in here.info["setup"]
    ]
    assert {"read", "decompose", "statistics", "write", "join"} <= set(run.info["timings"])


def test_tables_are_equal_bit_for_bit_where_threads_change_the_last_digits(connected, tmp_path):
    """256 dimensions are enough for two threads to sum in another order than one."""
    write_planted(tmp_path / "model")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [
            scan(tmp_path / "model", out=tmp_path / name, layers="1", engine=name)
            for name in ("local", "ray")
        ]
    finally:
        torch.set_num_threads(before)
    assert_equal_tables(*runs)


def test_a_killed_worker_s_layer_is_done_again_and_nothing_twice(
    connected, tmp_path, model, here, monkeypatch, capfd
):
    marks = tmp_path / "marks"
    marks.mkdir()
    dying = functools.partial(ray_work.die_over_layer, str(marks), 1, scan_module.analyse_elsewhere)
    monkeypatch.setattr(scan_module, "analyse_elsewhere", dying)
    assert_equal_tables(on_ray(model, tmp_path / "run"), here)
    assert capfd.readouterr() == ("", ""), "Ray's news of the dead worker would spoil --json"
    attempts = sorted(mark.name for mark in marks.iterdir())
    assert attempts == sorted([*(f"step0-layer{layer}-0" for layer in range(LAYERS)), "step0-layer1-1"])


def test_a_worker_that_finds_no_checkpoint_says_where(connected, tmp_path, monkeypatch):
    model = tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr(scan_module.Step, "location", property(lambda _: str(tmp_path / "elsewhere")))
    with pytest.raises(
        BadInput, match=r"elsewhere: no such folder or file; .*as the worker on .* sees it; all machines"
    ):
        on_ray(model, tmp_path / "run")


def test_a_process_opens_a_checkpoint_once_until_it_changes(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    before = scan_module.open_checkpoint(model).header_hash()
    assert layer_module.opened_once(str(model), before) is layer_module.opened_once(str(model), before)
    edit_json(model / "config.json", note="changed")
    after = scan_module.open_checkpoint(model).header_hash()
    assert layer_module.opened_once(str(model), after).checkpoint.config["note"] == "changed"


# --- as a user meets it: real processes and signals


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the command line; what a failed test leaves running is killed, and its Ray goes with it."""
    started: list[subprocess.Popen] = []

    def begin(model: Path, out: Path, last: int, *options: str) -> subprocess.Popen:
        process = waiting_scan(model, out, last, *options)
        started.append(process)
        deadline = time.monotonic() + 120
        while len(pieces(out)) < last + 1:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the first layers did not come"
            time.sleep(0.02)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def waiting_scan(model: Path, out: Path, last: int, *options: str) -> subprocess.Popen:
    """The command line in a process group of its own.

    Which analyses the layers up to the last and waits over the others.
    """
    source = (
        "import functools, ray_work\n"
        "from moescope import cli\n"
        "from moescope.weights import verb as scan\n"
        f"scan.analyse_elsewhere = functools.partial(ray_work.wait_beyond, {last}, scan.analyse_elsewhere)\n"
        "cli.main()\n"
    )
    views = ["--matrix", "gate,down", "--router", "raw,centered"]
    scanning = ["scan", str(model), "--out", str(out), "--engine", "ray", "--quiet", *views, *options]
    tests = str(Path(ray_work.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], tests])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", source, *scanning]
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def pieces(out: Path) -> list[str]:
    return sorted(task.name for task in out.glob("parts/*") if task.suffix != ".tmp")


@pytest.fixture
def analysed(monkeypatch) -> list[int]:
    """The layers that the local engine really worked on."""
    layers: list[int] = []
    real = layer_module.analyse_layer
    monkeypatch.setattr(
        layer_module,
        "analyse_layer",
        lambda weights, *rest: layers.append(weights.layer) or real(weights, *rest),
    )
    return layers


def test_an_interrupted_scan_stops_ray_and_is_finished_on_another_cluster(
    connected, start, tmp_path, model, here
):
    process = start(model, tmp_path / "run", 0)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in member.name() for member in family), "no cluster of its own to be stopped"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    shown, complaints = process.communicate(timeout=120)
    assert (process.returncode, shown) == (130, "")
    assert complaints.startswith("moescope: interrupted")
    assert complaints.count("\n") == 1
    assert ray_work.survivors(family) == []
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    assert pieces(tmp_path / "run") == ["step0-layer0"]
    run = on_ray(model, tmp_path / "run")
    assert_equal_tables(run, here)
    assert run.info["engine"] == "ray"


def test_an_address_without_a_cluster_is_one_line_and_exit_code_2(tmp_path, model):
    """In one process of its own, since this one may be connected to a cluster that is there."""
    addresses = ["127.0.0.1:1", "nonsense", "no.such.host.example:6379"]
    source = (
        "import sys\n"
        "from moescope import cli\n"
        f"for address in {addresses}:\n"
        f"    sys.argv = ['moescope', 'scan', {str(model)!r}, '--engine', 'ray', '--address', address]\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as stop:\n"
        "        print(stop.code)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True
    )
    assert shown.stdout.split() == ["2"] * len(addresses)
    lines = shown.stderr.splitlines()
    assert len(lines) == len(addresses), shown.stderr
    for line, address in zip(lines, addresses, strict=True):
        assert line.startswith(f"moescope: --address {address}: no Ray cluster there (")
        assert "start one with `ray start --head`" in line
    assert list(tmp_path.iterdir()) == []
