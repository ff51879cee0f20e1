"""Memory of a streamed run: a few layers, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

LAYERS = 10
SCRIPT = """
import json, sys, threading
import moescope
tiny, model, ids, out = sys.argv[1:]
held = lambda: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if "RssAnon" in line)
options = {"token_ids": ids, "device": "cpu", "execution": "streamed", "quiet": True}
moescope.trace(tiny, out=out + "-tiny", **options)
before, peak, over = held(), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.005):
        peak = max(peak, held())

thread = threading.Thread(target=watch)
thread.start()
run = moescope.trace(model, out=out, **options)
over.set()
thread.join()
print(json.dumps({"grown": peak - before, "expected": run.info["execution"][0]["memory_bytes"]}))
"""


def save(folder: Path, layers: int, width: int) -> int:
    """A random Mixtral; returns the bytes of one layer."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        pad_token_id=0,
    )
    model = MixtralForCausalLM(config)
    model.save_pretrained(folder)
    return sum(weight.nbytes for weight in model.model.layers[0].parameters())


@pytest.mark.slow
def test_a_streamed_run_holds_a_few_layers(tmp_path):
    save(tmp_path / "tiny", 1, 16)
    layer = save(tmp_path / "model", LAYERS, 512)
    ids = np.random.default_rng(0).integers(1, 512, (8, 64)).astype(np.int32)
    np.save(tmp_path / "ids.npy", ids)
    words = [str(tmp_path / name) for name in ("tiny", "model", "ids.npy", "run")]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["expected"] < 3.2 * layer
    assert layer < found["grown"] < found["expected"] + layer / 2  # of 10 layers; half of one for activations
