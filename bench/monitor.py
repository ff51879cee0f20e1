"""What Monitor costs: training steps with and without it, alternating, on a Mixtral of random weights.

    PYTHONPATH=src python bench/monitor.py                     tiny, on the CPU: a minute
    PYTHONPATH=src python bench/monitor.py --device cuda       d 512, 10 layers, 64 experts, batch 32 x 768

A block is `--every` steps, so that each block under the Monitor has its share of everything that is done now
and then: logits every
10 steps, tables once, in its middle. Blocks with and without alternate, and a block's ratio is taken to the
mean of its two neighbours, so that a
machine that slows down does not count. Since single blocks may be off by more than the Monitor costs, the
same is given from the median
step of each kind: an ordinary one, one whose logits are looked at, one that ends a window, and the one after
it, beside which tables are made. Gradients into routers are taken every 500 steps by default, so a step with
them is timed
alone and divided by 500.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moescope.routing.monitor import LoopMonitor

SIZES = {  # width, hidden width of an expert, layers, experts, batch, length
    "cpu": (64, 64, 3, 8, 4, 64),
    "cuda": (512, 512, 10, 64, 32, 768),
}
GRADIENTS_EVERY = 500
DECISIONS_EVERY = 10  # LoopMonitor's own default


def build(given: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """The model, and a function that makes one training step."""
    config = MixtralConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.width,
        intermediate_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=max(given.width // 64, 1),
        num_key_value_heads=max(given.width // 64, 1),
        num_local_experts=given.experts,
        num_experts_per_tok=given.k,
        max_position_embeddings=given.length,
        output_router_logits=True,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).to(given.device).train()
    if given.implementation:
        model.set_experts_implementation(given.implementation)
    cuda = given.device == "cuda"
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    ids = torch.randint(0, given.vocabulary, (given.batch, given.length), device=given.device)
    mask = torch.ones_like(ids)
    mask[:, -given.length // 8 :] = 0  # some padding, which has to be kept out

    def step() -> None:
        with torch.autocast(given.device, torch.bfloat16, enabled=cuda):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return model, step


def seconds(work: Callable[[], object], device: str) -> float:
    """On a CPU the process's own time, the disk's thread included.

    So that what else the machine does does not count.
    """
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def kind_of(step: int, every: int) -> str:
    """What a Monitor does in that step beyond counting."""
    if step % every == 0:
        return "window"
    if step % every == 1:
        return "after"
    return "decisions" if step % DECISIONS_EVERY == 0 else "ordinary"


def from_medians(kinds: dict[str, list[float]], every: int) -> float:
    """How much more a step takes, on average over a window of so many steps.

    From the median step of each kind.
    """
    plain = statistics.median(kinds["plain"])
    steps = [kind_of(step, every) for step in range(1, every + 1)]
    return statistics.mean(statistics.median(kinds[kind] or kinds["ordinary"]) for kind in steps) / plain - 1


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name in ("width", "hidden", "layers", "experts", "batch", "length"):
        arguments.add_argument(f"--{name}", type=int)
    arguments.add_argument("--k", type=int, default=2)
    arguments.add_argument("--vocabulary", type=int, default=8192)
    arguments.add_argument("--every", type=int, default=100, help="steps between tables, and of a block")
    arguments.add_argument("--rounds", type=int, default=5, help="blocks under the Monitor; one more without")
    arguments.add_argument(
        "--implementation", help="transformers' experts implementation: eager, grouped_mm, batched_mm"
    )
    given = arguments.parse_args()
    for name, size in zip(
        ("width", "hidden", "layers", "experts", "batch", "length"), SIZES[given.device], strict=True
    ):
        if getattr(given, name) is None:
            setattr(given, name, size)
    model, step = build(given)

    kinds: dict[str, list[float]] = {
        kind: [] for kind in ("plain", "ordinary", "decisions", "window", "after")
    }
    with tempfile.TemporaryDirectory() as folder:
        monitor = LoopMonitor(Path(folder) / "run", every=given.every, gradients_every=0).watch(model)
        capture = monitor.capture
        assert capture is not None

        def with_monitor() -> None:
            for _ in range(given.every):
                coming = monitor.now + 1
                kind = kind_of(coming, given.every)
                kinds[kind].append(seconds(lambda: (step(), monitor.step()), given.device))

        def without() -> None:
            for _ in range(given.every):
                kinds["plain"].append(seconds(step, given.device))

        # To warm up; half a block more, so that tables are made amid a block, and not written while the next
        # one is timed.
        for _ in range(given.every + given.every // 2):
            step()
            monitor.step()
        plain, watched = [], []
        for number in range(2 * given.rounds + 1):
            if number % 2:
                with capture:
                    watched.append(seconds(with_monitor, given.device))
            else:
                capture.__exit__(None, None, None)
                plain.append(seconds(without, given.device))
        ratios = [watched[at] / ((plain[at] + plain[at + 1]) / 2) for at in range(given.rounds)]
        usual = statistics.median(plain) / given.every

        with capture:
            monitor.gradients_every = 1
            taken = []
            for _ in range(3):
                monitor.prepare()
                taken.append(seconds(step, given.device))
            gradients = statistics.median(taken) - usual
        run = monitor.run
        assert run is not None
        run.wait()
        timings = {
            stage: f"{1000 * run.writer.timings[stage] / (given.rounds + 1):.1f} ms"
            for stage in ("tables", "write")
        }
        assert monitor.abandon is not None
        monitor.abandon()

    machine = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(
        f"{machine}, torch {torch.__version__}: width {given.width}, {given.layers} layers, "
        f"{given.experts} experts of {given.hidden}, {given.k} per token, batch {given.batch} x "
        f"{given.length}"
    )
    print(f"a step without Monitor            {1000 * usual:9.2f} ms")
    print(f"a step under Monitor              {1000 * statistics.median(watched) / given.every:9.2f} ms")
    print(
        f"more, median of {given.rounds} blocks of {given.every:<4}      "
        f"{statistics.median(ratios) - 1:9.2%}   (each: "
        f"{', '.join(f'{ratio - 1:.2%}' for ratio in ratios)})"
    )
    for every in sorted({given.every, 100}):
        print(f"more, from median steps, tables every {every:<4} {from_medians(kinds, every):9.2%}")
    middle = {kind: f"{1000 * statistics.median(took):.2f} ms" for kind, took in kinds.items() if took}
    print(f"median steps: {', '.join(f'{kind} {took}' for kind, took in middle.items())}")
    print(
        f"gradients, every {GRADIENTS_EVERY} steps        "
        f"{gradients / usual / GRADIENTS_EVERY:9.2%}   ({1000 * gradients:.0f} ms each time)"
    )
    print(
        f"of a block: {', '.join(f'{stage} {took}' for stage, took in timings.items())} (writing "
        "is beside training)"
    )


if __name__ == "__main__":
    main()
