"""Time of a sweep over all experts of one layer, against a whole pass per expert.

    python bench/intervene.py                      # 16 layers, 8 experts, layer 8 changed: under a minute
    python bench/intervene.py --layer 12 --experts 16

The sweep may take at most 1.15 x (layers before the changed one once + the others per expert), in units of
whole passes with the same measurements.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from moescope.execution.documents import Document
from moescope.execution.models import TracedModel, runner_of
from moescope.intervention.changes import parse_change
from moescope.intervention.passes import Passes

BAR = 1.15


def tiny_mixtral(layers: int, experts: int) -> TracedModel:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = MixtralConfig(
        **sizes,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=2,
        vocab_size=512,
        max_position_embeddings=256,
    )
    model = MixtralForCausalLM(config).eval()
    return TracedModel("tiny", model, runner_of(model), None, "cpu")


def sweep_seconds(model: TracedModel, texts: list[Document], layer: int, experts: int, first: int) -> float:
    """Untouched once, then every expert, from layer `first` on; the first, checking pass is not timed."""
    with Passes(model, texts[:1]) as warm:
        warm.run_untouched(0)
    start = time.process_time()
    with Passes(model, texts) as passes:
        passes.capture.blocks = warm.capture.blocks
        passes.run_untouched(first)
        for expert in range(experts):
            passes.judge([parse_change(f"layer={layer} expert={expert} ablate")])
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer", type=int, default=8)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    model = tiny_mixtral(given.layers, given.experts)
    draw = np.random.default_rng(0)
    texts = [Document(at, 0, draw.integers(3, 512, 200)) for at in range(given.documents)]
    torch.set_num_threads(1)
    pairs = [
        [sweep_seconds(model, texts, given.layer, given.experts, first) for first in (given.layer, 0)]
        for _ in range(given.repeats)
    ]
    reused, whole = np.median(pairs, axis=0)
    passes = whole / (given.experts + 1)  # of one whole pass
    expected = passes * (given.layer + (given.layers - given.layer) * (given.experts + 1)) / given.layers
    print(f"{given.experts} experts of layer {given.layer} of {given.layers}: {reused:.2f} s of CPU time")
    print(f"whole passes: {whole:.2f} s, {whole / reused:.2f} times as long")
    print(f"ratio to prefix once + suffix per expert: {reused / expected:.3f} (bar {BAR})")


if __name__ == "__main__":
    main()
