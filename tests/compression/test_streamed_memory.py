"""Memory of a streamed compression, from calibration to judgement: less than the model takes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from execution.test_streamed_memory import save

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
