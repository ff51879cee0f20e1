"""Steps that run as a CUDA graph: the same numbers as steps that Python runs, and the Monitor sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from lab.tiny_training import tiny_config, tiny_corpus, tiny_training, trained
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS
from moescope.decoder.vocabulary import Bytes
from moescope.lab import training
from moescope.lab.batches import TokenRows
from moescope.routing.monitor import LoopMonitor

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
LOADS = ["step", "layer", "expert", "tokens"]


@pytest.mark.parametrize("router", ["top2", "spectra", "expert_choice", "hash"])
def test_a_pass_without_hooks_counts_like_a_pass_with_them(tmp_path: Path, router: str):
    tables = {}
    for way in ("hooks", "handed on"):
        model = tiny_training(tiny_config(router)).model.train()
        monitor = LoopMonitor(tmp_path / way, every=3, decisions_every=2).watch(model)
        draws = torch.Generator().manual_seed(0)
        for _ in range(3):
            ids = torch.randint(0, 256, (4, 32), generator=draws)
            given = {"mask_BL": torch.arange(32) < torch.tensor([[32], [20], [7], [1]])}
            targets = ids.roll(-1, 1)
            with torch.no_grad():
                if way == "hooks":
                    model(ids, targets_BL=targets, **given)
                else:
                    routings: list = []
                    output = model.forward(ids, targets_BL=targets, consume=routings.append, **given)
                    monitor.add_pass((ids,), given, routings, output)
            monitor.step()
        run = monitor.close()
        assert run is not None
        tables[way] = {name: run.table(name) for name in ("load", "routing_layers", "steps")}
    assert tables["hooks"]["load"]["tokens"].sum() > 0
    times = ["step_seconds", "tokens_per_second", "peak_memory_bytes"]
    for name, expected in tables["hooks"].items():
        found = tables["handed on"][name]
        pd.testing.assert_frame_equal(
            found.drop(columns=times, errors="ignore"), expected.drop(columns=times, errors="ignore")
        )


@on_a_gpu
@pytest.mark.parametrize("router", sorted(set(ROUTERS) - {"expert_choice"}))  # whose sums are not repeatable
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # float32 experts are a loop: no step is captured
def test_captured_steps_are_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: str, dtype: str
):
    """Against steps that Python runs: losses, gradient norms, weights, load. Measured gradients interrupt."""
    found = {}
    for way, warm in (("captured", 1), ("plain", 10**9)):
        monkeypatch.setattr(training, "WARM_STEPS", warm)
        config = tiny_config(router, dtype=dtype)
        config = replace(config, model=replace(config.model, d_model=64, heads=2))
        rows = [TokenRows.of(side, Bytes(), 32) for side in (tiny_corpus().train, tiny_corpus().validation)]
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LabModel(config.model)
        one = training.Training(config, model, training.Data(rows[0], rows[1].sample(20)), "cuda")
        run = trained(one, tmp_path / way, gradients_every=5)
        assert (one.graph is not None) == (way == "captured" and (dtype == "bfloat16" or router == "dense"))
        steps = run.table("steps")[["step", "lm_loss", "aux_loss", "gradient_norm", "validation_loss"]]
        found[way] = steps, run.table("load")[LOADS], model.state_dict()
    for captured, plain in zip(found["captured"][:2], found["plain"][:2], strict=True):
        pd.testing.assert_frame_equal(captured, plain, check_exact=True)
    for name, weight in found["plain"][2].items():
        assert torch.equal(found["captured"][2][name], weight), name
