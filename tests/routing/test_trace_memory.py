"""Memory of a trace does not grow with the text: two million tokens take what two hundred thousand take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

LENGTH = 512  # tokens a document
SCRIPT = """
import json, resource, sys
from moescope.routing import token_sample as sample
sample.MOST_TOKENS = 100_000  # the sample is bounded by itself; here both texts fill it
from moescope.routing.trace import trace
model, ids, out, tokens = sys.argv[1:]
run = trace(model, token_ids=ids, max_tokens=int(tokens), out=out, device="cpu", batch_size=32, quiet=True)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
tokens, sampled = run.info["coverage"][0]["tokens"]["text"], run.info["setup"][0]["sample_tokens"]
print(json.dumps({"peak": peak, "tokens": tokens, "sampled": sampled}))
"""


def tiny(folder: Path) -> Path:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        pad_token_id=0,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_two_million_tokens_take_no_more_memory_than_two_hundred_thousand(tmp_path):
    model = tiny(tmp_path / "model")
    ids = np.random.default_rng(0).integers(1, 512, (2_000_000 // LENGTH + 1, LENGTH)).astype(np.int32)
    np.save(tmp_path / "ids.npy", ids)
    found = []
    for tokens in (200_000, 2_000_000):
        command = [
            sys.executable,
            "-c",
            SCRIPT,
            str(model),
            str(tmp_path / "ids.npy"),
            str(tmp_path / str(tokens)),
            str(tokens),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    small, large = found
    assert (small["tokens"], large["tokens"]) == (200_000, 2_000_000)
    assert 25_000 < large["sampled"] <= 100_000
    # 1.8 million more tokens: kept one by one they would take 8 bytes for each id alone, 14 MB, and some 100
    # bytes with choices and gates
    assert large["peak"] - small["peak"] < 30, f"MB resident: {small['peak']:.0f} and {large['peak']:.0f}"
