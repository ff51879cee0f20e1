"""Training steps of a small model on a GPU: as one CUDA graph against launched kernel by kernel, per router.

    PYTHONPATH=src python bench/captured.py [--routers top2,spectra] [--compile] [--steps 100]

Whole steps of `moescope train` with its Monitor: width 128, 6 layers, 16 experts of 256, batch 32 x 256,
bf16. Both start from the same weights; the largest difference of their losses is printed beside the times.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from moescope.lab import training
from moescope.lab.config import LabConfig, settle
from moescope.lab.corpus import read_corpus, training_vocabulary
from moescope.lab.training import initial_model
from moescope.routing.monitor import LoopMonitor

SKIPPED = 10  # steps before the clock starts: libraries, compiling, capture
NEVER = 10**9


def config_of(router: str, given: argparse.Namespace) -> LabConfig:
    model = {"vocabulary": 8192, "d_model": 128, "layers": 6, "heads": 4, "d_ff": 256, "experts": 16}
    rates = {"steps": given.steps, "learning_rate": 0.002, "warmup": 10, "compile": given.compile}
    text = {"batch_size": 32, "sequence_length": 256, "dtype": "bfloat16"}
    table = {"model": {**model, "router": router}, "train": {**rates, **text}}
    return settle({**table, "data": {"vocabulary": "bpe", "max_bytes": 1_000_000}}, None, None, None, 0)


def trained(config: LabConfig, data: training.Data, warm: int) -> tuple[float, torch.Tensor]:
    """Return milliseconds per step, and the loss of every step."""
    training.WARM_STEPS = warm
    model = initial_model(config, None, "cuda").train()
    one = training.Training(config, model, data, "cuda")
    watch = training.FiniteWatch(model)
    with tempfile.TemporaryDirectory() as folder:
        monitor = LoopMonitor(Path(folder) / "run", every=20, gradients_every=0).watch(model)
        for step in range(config.train.steps):
            if step == SKIPPED:
                torch.cuda.synchronize()
                began = time.perf_counter()
            one.one_step(watch, monitor)
            monitor.step()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        monitor.close()
    watch.close()
    return 1000 * took / (config.train.steps - SKIPPED), torch.stack(one.logged)[:, 0].cpu()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routers", default="dense,hash,top2,expert_choice,loss_free,spectra,some")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    routers = given.routers.split(",")
    first = config_of(routers[0], given)
    corpus = read_corpus(first.data)
    data = training.Data.of(first, corpus, training_vocabulary(first, corpus))
    print(f"{'':16}{'launched, ms':>14}{'captured, ms':>14}{'ratio':>8}{'loss differs by':>17}", flush=True)
    for router in routers:
        config = config_of(router, given)
        (slow, plain), (fast, captured) = (trained(config, data, warm) for warm in (NEVER, 3))
        gap = float((plain - captured).abs().max())
        print(f"{router:16}{slow:14.1f}{fast:14.1f}{slow / fast:8.1f}{gap:17.2g}", flush=True)


if __name__ == "__main__":
    main()
