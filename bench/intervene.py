"""Time of a sweep over all experts of one layer, against plain passes of the model.

    python bench/intervene.py                      # 16 layers, 8 experts, layers 2, 8 and 14: two minutes
    python bench/intervene.py --at 12 --experts 16

Plain passes of transformers, without any measurement, are timed at the input of the changed layer: what
comes before it is the prefix, the other layers, norm and head are the suffix. The sweep (untouched model and
every expert, with losses, divergences and routing) may take at most 1.15 x (prefix once + suffix per pass).
The vocabulary is 24 times the width, as OLMoE's, so that head and divergence have their usual share.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from moescope.execution.collect import prefill_inputs
from moescope.execution.documents import Document
from moescope.execution.models import TracedModel, runner_of
from moescope.intervention.changes import parse_change
from moescope.intervention.passes import Passes
from moescope.intervention.steps import TOGETHER

BAR = 1.15
WIDTH = 512
VOCABULARY = 24 * WIDTH


def tiny_mixtral(layers: int, experts: int) -> TracedModel:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = MixtralConfig(
        **heads,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )
    model = MixtralForCausalLM(config).eval()
    return TracedModel("tiny", model, runner_of(model), None, "cpu")


@torch.no_grad()
def plain_seconds(model: TracedModel, texts: list[Document], layer: int) -> tuple[float, float]:
    """CPU time before the layer, and from it to the logits, of one pass of transformers over all batches."""
    reached: list[float] = []
    module = model.model.model.layers[layer]
    hook = module.register_forward_pre_hook(lambda *_: reached.append(time.process_time()))
    prefix = suffix = 0.0
    try:
        for batch in Passes(model, texts).batches:
            inputs = prefill_inputs(model, batch)
            start = time.process_time()
            model.model(**inputs)
            prefix, suffix = prefix + reached[-1] - start, suffix + time.process_time() - reached[-1]
    finally:
        hook.remove()
    return prefix, suffix


def sweep_seconds(model: TracedModel, texts: list[Document], layer: int, experts: int) -> float:
    """Untouched once, then every expert; the first, checking pass is not timed."""
    with Passes(model, texts[:1]) as warm:
        warm.run_untouched(0)
    changes = [[parse_change(f"layer={layer} expert={expert} ablate")] for expert in range(experts)]
    start = time.process_time()
    with Passes(model, texts) as passes:
        passes.capture.blocks = warm.capture.blocks
        passes.run_untouched(layer)
        for at in range(0, experts, TOGETHER):
            passes.judge(changes[at : at + TOGETHER])
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--at", type=int, nargs="+", default=[2, 8, 14], help="changed layers")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_mixtral(given.layers, given.experts)
    draw = np.random.default_rng(0)
    texts = [Document(at, 0, draw.integers(3, VOCABULARY, 150)) for at in range(given.documents)]
    plain_seconds(model, texts, 0)
    passes = given.experts + 1
    print("layer  prefix s  suffix s  sweep s  full passes s  ratio to prefix once + suffix per pass")
    for layer in given.at:
        timed = [
            [*plain_seconds(model, texts, layer), sweep_seconds(model, texts, layer, given.experts)]
            for _ in range(given.repeats)
        ]
        prefix, suffix, sweep = np.median(timed, axis=0)
        ratio = sweep / (prefix + passes * suffix)
        full = passes * (prefix + suffix)
        print(f"{layer:5}{prefix:10.3f}{suffix:10.3f}{sweep:9.2f}{full:15.2f}{ratio:8.3f} (bar {BAR})")


if __name__ == "__main__":
    main()
