"""The estimate of a scan's time: what it adds up, that it stays quick, and that it is right within 2."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints import tiny_checkpoint
from moescope.families.inspect import LAYER, Trial, run_trial


def test_a_layer_takes_its_decompositions_its_pairs_its_test_and_its_tables():
    trial = Trial(flop=1e-9, pair=0.01, tested=0.1)
    flops = 20 * 10 * 10 + 4 / 3 * 10**3  # one expert of 20 x 10
    assert trial.layer_seconds(4, 20, 10) == pytest.approx(4 * flops * 1e-9 + 6 * 0.01 + 4 * 0.1 + LAYER)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 10**9, 2), (2, 2, 10**9), (10**6, 10**6, 10**6)])
def test_no_shape_makes_a_trial_long(shape):
    run_trial(2, 2, 2)  # imports
    start = time.process_time()
    trial = run_trial(*shape)
    assert time.process_time() - start < 10
    assert 0 < trial.layer_seconds(*shape) < float("inf")


def cpu_seconds(*words: str | Path) -> tuple[str, float]:
    """What a command prints and the processor's seconds: other programs do not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "moescope", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=280)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "d_ff"), [(8, 1536), (64, 256), (128, 256)])
def test_the_estimate_is_within_a_factor_of_2(experts, d_ff, tmp_path):
    model = tiny_checkpoint(tmp_path / "model", layers=1, experts=experts, d_model=512, d_ff=d_ff)
    estimate = json.loads(cpu_seconds("inspect", model, "--json")[0])["scan_estimate"]["seconds"]
    scan = ("scan", model, "--out", tmp_path / "run", "--device", "cpu", "--quiet", "--no-report")
    _, measured = cpu_seconds(*scan)
    assert measured / 2 < estimate < 2 * measured
