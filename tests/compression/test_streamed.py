"""Streamed compressions: the numbers of resident ones, resumed where they stopped, in less memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moescope
from execution.test_streamed_memory import save
from moescope.errors import BadInput
from moescope.execution.streamed import FileStates, load_streamed
from routing.tiny_text import save_model, texts, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    save_model(folder / "model", "qwen3_moe")
    write_jsonl(folder / "text.jsonl", texts(40, seed=0))
    return folder


@pytest.fixture(scope="module")
def too_little(place) -> str:
    """Memory for the layers and nothing else."""
    return str(load_streamed(str(place / "model"), "auto", "cpu").expect(0).memory_bytes)


def compress(place: Path, out: Path, **options):
    given = {"method": "reap", "keep": 0.5, "text": place / "text.jsonl", "controls": 1, **options}
    apply = None if given.get("router") == "tie" else out.with_name(f"{out.name}-small")
    return moescope.compress(place / "model", apply=apply, out=out, device="cpu", quiet=True, **given)


def equal_tables(run, other) -> None:
    assert run.tables == other.tables
    for name in run.tables:
        assert run.table(name).equals(other.table(name)), name


@pytest.mark.parametrize("method", ["reap", pytest.param("hc_smoe", marks=pytest.mark.slow)])
def test_calibration_plan_and_judgement_are_those_of_a_resident_run(place, tmp_path, method, too_little):
    """Hidden states are in files; pruned and merged experts are judged by predicted and measured damage."""
    options = {"streamed": {"memory": too_little}, "resident": {}}
    streamed, resident = (
        compress(place, tmp_path / way, method=method, execution=way, **more) for way, more in options.items()
    )
    equal_tables(streamed, resident)
    assert resident.table("damage")["perplexity"].notna().any()
    assert {entry["way"] for entry in streamed.info["execution"]} == {"streamed"}
    assert any(entry["disk_bytes"] for entry in streamed.info["execution"])
    files = [tmp_path / f"{way}-small" / "model.safetensors" for way in options]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_interrupted_calibration_resumes_at_its_layer(place, tmp_path, too_little, monkeypatch):
    own, written = FileStates.put, []

    def interrupted(states, batch, value):
        if states.part == 2:
            raise KeyboardInterrupt
        own(states, batch, value)

    def counted(states, batch, value):
        written.append(states.part)
        own(states, batch, value)

    options = {"execution": "streamed", "memory": too_little, "judge": False}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(FileStates, "put", interrupted)
        compress(place, tmp_path / "run", **options)
    monkeypatch.setattr(FileStates, "put", counted)
    run = compress(place, tmp_path / "run", **options)
    assert min(written) == 2
    equal_tables(run, compress(place, tmp_path / "other", judge=False, execution="resident"))


@pytest.fixture(scope="module")
def resident(place, tmp_path_factory):
    return compress(place, tmp_path_factory.mktemp("runs") / "resident", execution="resident")


def test_layers_larger_than_the_memory_are_rejected_before_calibration(place, tmp_path):
    with pytest.raises(BadInput, match=r"needs at least .* give --memory \d+MB"):
        compress(place, tmp_path / "run", execution="streamed", memory="10KB")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run-small").exists()


@pytest.mark.slow
def test_a_tied_router_is_judged_as_in_a_resident_run(place, tmp_path):
    runs = [
        compress(place, tmp_path / way, method="hc_smoe", router="tie", execution=way)
        for way in ("streamed", "resident")
    ]
    equal_tables(*runs)
    damage = runs[0].table("damage").query("method == 'hc_smoe'")
    assert damage["perplexity"].notna().any()
    assert damage["measured_error"].max() > 0.01


# --- memory: from calibration to judgement less than the model takes


LAYERS = 10
SCRIPT = """
import json, sys, threading
import moescope
tiny, model, ids, out, memory = sys.argv[1:]
held = lambda: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if "RssAnon" in line)
options = {"method": "reap", "keep": 0.5, "token_ids": ids, "device": "cpu", "controls": 1, "quiet": True}
options |= {"execution": "streamed"}
moescope.compress(tiny, apply=out + "-tiny-small", out=out + "-tiny", **options)
before, peak, over = held(), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.005):
        peak = max(peak, held())

thread = threading.Thread(target=watch)
thread.start()
run = moescope.compress(model, apply=out + "-small", out=out, memory=memory, **options)
over.set()
thread.join()
print(json.dumps({"grown": peak - before, "perplexity": run.table("damage")["perplexity"].dropna().tolist()}))
"""


@pytest.mark.slow
def test_a_model_larger_than_the_memory_is_calibrated_planned_applied_and_judged(tmp_path):
    save(tmp_path / "tiny", 1, 16)
    layer = save(tmp_path / "model", LAYERS, 512)
    ids = np.random.default_rng(0).integers(1, 512, (40, 16)).astype(np.int32)
    np.save(tmp_path / "ids.npy", ids)
    words = [str(tmp_path / name) for name in ("tiny", "model", "ids.npy", "run")]
    memory = int(3.2 * layer)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words, str(memory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["perplexity"]) >= 2  # the plan and its control
    assert found["grown"] < memory + layer < LAYERS * layer / 2
    small = sum(file.stat().st_size for file in (tmp_path / "run-small").glob("*.safetensors"))
    assert 0.4 * LAYERS * layer < small < 0.6 * LAYERS * layer
