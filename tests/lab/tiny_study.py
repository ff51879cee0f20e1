"""A study of seconds: two arms that learn and one that cannot, on two small domains."""

from __future__ import annotations

import json
import random
from pathlib import Path

SEEDS = (3, 5)
WORDS = ("barley", "copper", "flax", "iron", "linen", "rope", "salt", "timber", "wool", "wax")
STUDY = """
reference = "top2"
seeds = [3, 5]
[base.model]
d_model = 16
layers = 2
heads = 2
d_ff = 16
experts = 4
max_positions = 64
[base.data]
validation_share = 0.4
domains = {{ words = "{folder}/words.jsonl", sums = "{folder}/sums.jsonl" }}
[base.train]
steps = 6
batch_size = 4
sequence_length = 16
learning_rate = 0.01
warmup = 2
evaluate_every = 1
checkpoint_every = 2
evaluation_rows = 8
[arms.top2]
model = {{ router = "top2" }}
[arms.unbalanced]
model = {{ router = "top2", router_options = {{ balance = 0.0 }} }}
question = "sweep"
[arms.broken]
model = {{ router = "switch_top1" }}
train = {{ learning_rate = 1e30, clip = 0.0 }}
"""


def write_study(folder: Path) -> Path:
    """The TOML file, and beside it the texts it reads."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    texts = {
        "words": [" ".join(draw.choices(WORDS, k=30)) for _ in range(40)],
        "sums": [
            "\n".join(
                f"{a} + {b} = {a + b}"
                for a, b in zip(draw.choices(range(99), k=12), draw.choices(range(99), k=12), strict=True)
            )
            for _ in range(40)
        ],
    }
    for name, documents in texts.items():
        lines = [json.dumps({"text": text}) for text in documents]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "study.toml"
    path.write_text(STUDY.format(folder=folder))
    return path
