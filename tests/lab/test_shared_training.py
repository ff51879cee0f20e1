"""Two processes that torchrun started against one with the same batch.

Every router, capacities, padding, micro-batches, resuming.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.shared_training import CASES, WHOLE, curve, training_of, whole
from lab.tiny_training import LOSSES
from moescope.decoder.ranks import ALONE
from moescope.lab.evaluation import evaluate
from moescope.lab.training import load_state
from moescope.run import Run

pytestmark = pytest.mark.slow

RTOL = 2e-4


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left: the curves of all cases, and some whole trainings."""
    folder = tmp_path_factory.mktemp("together")
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2"
    command = [sys.executable, *launch.split(), Path(__file__).with_name("shared_training.py"), folder]
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def curves(folder: Path, kind: str, name: str) -> list[np.ndarray]:
    found = json.loads((folder / "curves.json").read_text())[kind][name]
    return [np.array(step) for step in found]


def apart(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest relative difference of two curves."""
    return max(
        float((np.abs(a - b) / np.maximum(np.abs(b), 1e-6)).max(initial=0))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_train_as_one_does(name: str, together: Path):
    one = [np.array(step) for step in curve(CASES[name], ALONE)]
    two = curves(together, "right", name)
    assert apart(two[:-1], one[:-1]) < RTOL
    assert (
        apart(two[-1:], one[-1:]) < 5 * RTOL
    )  # of two tokens that are equally sure, rounding decides who is taken


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.control])
def test_processes_that_look_at_their_own_rows_alone_would_be_noticed(name: str, together: Path):
    assert apart(curves(together, "own rows alone", name), curves(together, "right", name)) > 10 * RTOL


@pytest.mark.parametrize("name", list(WHOLE))
def test_the_tables_of_two_processes_are_those_of_one(name: str, together: Path, tmp_path: Path):
    one, two = whole(WHOLE[name], ALONE, tmp_path), Run.load(together / "whole" / name / "run")
    assert one is not None
    np.testing.assert_allclose(
        two.table("steps")[LOSSES].to_numpy(float), one.table("steps")[LOSSES].to_numpy(float), rtol=RTOL
    )
    assert two.table("load")["tokens"].tolist() == one.table("load")["tokens"].tolist()
    gradients = [
        run.table("router_gradients").set_index(["step", "layer"])["lm_gradient_norm"] for run in (one, two)
    ]
    assert len(gradients[0]) == 2 * 3
    if WHOLE[name].layout == "packed":  # elsewhere it is the mean of the processes' means
        np.testing.assert_allclose(gradients[1], gradients[0], rtol=10 * RTOL)


@pytest.mark.parametrize("name", list(WHOLE))
def test_two_processes_that_were_killed_go_on_bit_for_bit(name: str, together: Path):
    through, resumed = (
        Run.load(together / kind / name / "run").table("steps") for kind in ("whole", "resumed")
    )
    assert resumed["step"].tolist() == [0, 3, 6]
    assert resumed[LOSSES].equals(through[LOSSES])
    states = [load_state(together / kind / name / "states") for kind in ("whole", "resumed")]
    assert states[0] is not None
    assert states[1] is not None
    assert all(torch.equal(tensor, states[1]["model"][key]) for key, tensor in states[0]["model"].items())
    saved = torch.load(together / "resumed" / name / "saved.pt")
    assert all(torch.equal(tensor, saved[key]) for key, tensor in states[0]["model"].items())


@pytest.mark.parametrize("name", ["expert_choice", "spectra, micro-batches"])
def test_one_process_goes_on_where_two_stopped(name: str, together: Path):
    state = load_state(together / "whole" / name / "states")
    assert state is not None
    training = training_of(WHOLE[name], ALONE)
    training.restore(state)
    again = evaluate(training.model, training.data.validation, 6, 8, "cpu", "float32")
    assert again.loss == pytest.approx(state["evaluations"][-1]["loss"], rel=1e-6)
