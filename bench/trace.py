"""What tracing costs: a model's forward passes with `trace`'s hooks and counts and without, alternating, on a
Mixtral of random weights.

    PYTHONPATH=src python bench/trace.py                     on the CPU: a minute
    PYTHONPATH=src python bench/trace.py --device cuda       width 2048, 8 layers, 8 experts

Both ways feed the same batches through the same code; one has hooks on the model. The last lines are of a
whole trace: up to its tables (with the check of the first batch, the words it predicts, the places it keeps
and the experts it runs once more), then of its tables with their maps, against the model as anybody would run
it, its head included. On a CPU the time is the process's own, so that what else the machine does does not
count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moescope.execution.capture import Capture
from moescope.execution.collect import run_batch
from moescope.execution.documents import Batch, Document, batches, windows
from moescope.execution.models import TracedModel, runner_of
from moescope.routing.collectors import trace_model
from moescope.routing.counts import Counts

SIZES = {  # width, hidden width of an expert, layers, experts, batch, length
    "cpu": (256, 512, 4, 8, 4, 256),
    "cuda": (2048, 4096, 8, 8, 8, 2048),
}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    names = ("width", "hidden", "layers", "experts", "batch", "length")
    for name in names:
        arguments.add_argument(f"--{name}", type=int)
    arguments.add_argument("--k", type=int, default=2)
    arguments.add_argument("--passes", type=int, default=5, help="passes of a block")
    arguments.add_argument("--rounds", type=int, default=10)
    given = arguments.parse_args()
    for name, size in zip(names, SIZES[given.device], strict=True):
        if getattr(given, name) is None:
            setattr(given, name, size)
    config = MixtralConfig(
        vocab_size=8192,
        hidden_size=given.width,
        intermediate_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=max(given.width // 64, 1),
        num_key_value_heads=max(given.width // 64, 1),
        num_local_experts=given.experts,
        num_experts_per_tok=given.k,
        max_position_embeddings=given.length,
    )
    torch.manual_seed(0)
    cuda = given.device == "cuda"
    model = MixtralForCausalLM(config).to(given.device, torch.bfloat16 if cuda else torch.float32).eval()
    traced = TracedModel("random", model, runner_of(model), None, given.device)
    generator = np.random.default_rng(0)
    documents = [Document(at, 0, generator.integers(0, 8192, given.length)) for at in range(given.batch)]
    batch = Batch.of(next(iter(batches(windows(documents, given.length), given.batch))), 0)
    clock = time.perf_counter if cuda else time.process_time

    def block(capture: Any) -> float:
        if cuda:
            torch.cuda.synchronize()
        start = clock()
        for _ in range(given.passes):
            run_batch(traced, capture, batch, "prefill")
        if cuda:
            torch.cuda.synchronize()
        return clock() - start

    counter, nobody = Counts(), SimpleNamespace(tokens=None)
    plain, seen = [], []
    with torch.no_grad():
        capture = Capture(model, counter.consume, runner=traced.runner)
        with capture:
            block(capture)  # the check of the first batch is no part of it
        block(nobody)
        for _ in range(given.rounds):
            plain.append(block(nobody))
            with capture:
                seen.append(block(capture))
        plain.append(block(nobody))
    ratios = [seen[at] / ((plain[at] + plain[at + 1]) / 2) for at in range(given.rounds)]
    assert (
        sum(counts.sums("tokens").sum() for counts in counter.layers())
        == given.layers * (given.rounds + 1) * given.passes * batch.real_BL.sum()
    )
    machine = torch.cuda.get_device_name() if cuda else "CPU"
    print(
        f"{machine}, torch {torch.__version__}: width {given.width}, {given.layers} layers, "
        f"{given.experts} experts of {given.hidden}, {given.k} per token, batch {given.batch} x "
        f"{given.length}"
    )
    print(f"a plain pass     {1000 * statistics.median(plain) / given.passes:9.2f} ms")
    print(f"a traced pass    {1000 * statistics.median(seen) / given.passes:9.2f} ms")
    print(
        f"more             {statistics.median(ratios) - 1:9.2%}   (from {min(ratios) - 1:.2%} to "
        f"{max(ratios) - 1:.2%})"
    )
    many = [
        Document(at, 0, generator.integers(0, 8192, given.length)) for at in range(given.batch * given.passes)
    ]

    def whole() -> float:
        nonlocal result
        begin()
        result = trace_model(traced, ["text"], many, ("prefill",), given.batch)
        return ended()

    def tables() -> float:
        begin()
        result.tables(0, 0, ("pca", "tsne"))
        return ended()

    def as_it_is() -> float:
        begin()
        with torch.no_grad():
            for rows in batches(windows(many, given.length), given.batch):
                model(input_ids=torch.from_numpy(Batch.of(rows, 0).ids_BL).to(given.device), use_cache=False)
        return ended()

    def begin() -> None:
        nonlocal started
        if cuda:
            torch.cuda.synchronize()
        started = clock()

    def ended() -> float:
        if cuda:
            torch.cuda.synchronize()
        return clock() - started

    started, result = 0.0, None
    whole(), as_it_is(), tables()
    pairs = [(whole(), as_it_is()) for _ in range(3)]
    tokens = given.batch * given.passes * given.length
    print(
        f"a whole trace of {tokens:,} tokens "
        f"{statistics.median(a / b for a, b in pairs) - 1:.2%} more than the model with its head   "
        f"(each: {', '.join(f'{a / b - 1:.1%}' for a, b in pairs)})"
    )
    seconds = min(tables() for _ in range(3))
    print(
        f"tables {seconds:.2f} s, {seconds / statistics.median(b for _, b in pairs):.1%} of the model with "
        "its head"
    )


if __name__ == "__main__":
    main()
