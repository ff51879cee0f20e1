"""The Monitor in loops that wrap the model: Accelerate, torch.compile, FSDP2 in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import moescope
from moescope.errors import BadInput
from moescope.run import Run
from routing.tiny_training import batch, documents, handed_out, load, model_of

SETTINGS = {"every": 4, "decisions_every": 3, "gradients_every": 4}


def plain_run(folder: Path) -> Run:
    return run_loop(folder, lambda model: model)


def run_loop(folder: Path, wrap: Callable[[nn.Module], nn.Module], warm: int = 0) -> Run:
    """Eight steps of four documents with the wrapped model, after some that nobody watches."""
    model = wrap(model_of())
    for number in range(warm):
        model(**batch(documents()[4 * number : 4 * number + 4]))
    monitor = moescope.Monitor(folder, **SETTINGS).watch(model)
    for number in range(8):
        model(**batch(documents()[4 * number : 4 * number + 4])).loss.backward()
        monitor.step()
    run = monitor.close()
    assert run is not None
    return run


def assert_same_tables(run: Run, reference: Run) -> None:
    for name in ("load", "routing_layers", "router_gradients", "alerts"):
        if name in reference.tables:
            pd.testing.assert_frame_equal(run.table(name), reference.table(name), rtol=1e-4)
    losses = ["step", "tokens", "train_loss", "lm_loss", "aux_loss"]
    pd.testing.assert_frame_equal(run.table("steps")[losses], reference.table("steps")[losses], rtol=1e-4)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning")  # torch's own about its tracing
@pytest.mark.parametrize(
    ("wrap", "warm"),
    [(lambda model: torch.compile(model, backend="eager"), 0), (in_place, 1)],
    ids=["function", "method-already-compiled"],
)
def test_a_compiled_model_has_the_tables_of_a_plain_one_and_hooks_are_not_traced(tmp_path, wrap, warm):
    """The backend runs each graph as it is: what can change counts is where graphs are cut."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    torch._dynamo.reset()
    clear_compilation_metrics()
    try:
        assert_same_tables(run_loop(tmp_path / "compiled", wrap, warm), plain_run(tmp_path / "plain"))
        files = {str(frame.co_filename) for frame in get_compilation_metrics()}
    finally:
        torch._dynamo.reset()
    assert any("mixtral" in file for file in files), files
    assert not [file for file in files if "moescope" in file]


def test_accelerate_with_accumulated_gradients_counts_every_micro_batch(tmp_path):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="no")
    model = model_of()
    loader = DataLoader(documents(), batch_size=2)
    model, optimiser, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0), loader)
    monitor = moescope.Monitor(tmp_path / "run", **SETTINGS).watch(model)
    for rows in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**rows).loss)
            optimiser.step()
            optimiser.zero_grad()
        if accelerator.sync_gradients:
            monitor.step()
    run = monitor.close()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    counts, gate_weight = handed_out(model_of().eval(), documents())
    np.testing.assert_array_equal(load(run), counts)
    np.testing.assert_allclose(load(run, "gate_weight"), gate_weight, rtol=1e-4)
    assert run.table("steps")["step"].tolist() == [4, 8]
    assert run.table("steps")["tokens"].iloc[-1] == counts[0].sum() / 2  # k = 2


@pytest.mark.slow
def test_sharded_weights_in_two_processes_give_the_tables_of_one(tmp_path):
    """Real torchrun, gloo, fully_shard per layer; each process has half of every batch."""
    launch = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    tests = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([tests, os.environ["PYTHONPATH"]]),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, __file__, str(tmp_path / "two")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = plain_run(tmp_path / "one"), Run.load(tmp_path / "two")
    assert two.info["status"] == "done"
    for name in ("load", "routing_layers"):
        pd.testing.assert_frame_equal(two.table(name), one.table(name), rtol=1e-4)
    assert two.table("steps")["tokens"].tolist() == one.table("steps")["tokens"].tolist()
    assert two.table("router_gradients").empty  # the graph holds no sharded weight
    assert done.stderr.count("router gradients cannot be measured") == 1
    assert "scan_every 4: the weights are sharded" in done.stdout


def train_sharded(folder: Path) -> None:
    """One of two processes: halves of the batches of `run_loop`, then a scan that cannot be."""
    from torch.distributed import fsdp

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = model_of()
    for layer in model.model.layers:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    monitor = moescope.Monitor(folder, **SETTINGS).watch(model)
    optimiser = torch.optim.SGD(model.parameters(), 0.0)
    for number in range(8):
        first = 4 * number + 2 * rank
        model(**batch(documents()[first : first + 2])).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        monitor.step()
    monitor.close()
    try:
        moescope.Monitor(folder / "scan", scan_every=4, scan=moescope.scan_model).watch(model)
    except BadInput as error:
        print(error)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import logging

    logging.basicConfig()
    train_sharded(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter
