"""Weights scanned while a model is trained are the scan of the checkpoint saved at that step."""

from __future__ import annotations

from functools import partial

import pandas as pd
import pytest
import torch

import moescope
from moescope.errors import BadInput
from routing.tiny_training import batch, documents, model_of

SCANNED = ("alignment", "alignment_layers", "alignment_tests", "orthogonality", "ambiguity")


def test_the_public_monitor_takes_thresholds_by_name():
    limits = {"dead_steps": 7, "max_load": 0.5, "max_unused": 0.2, "min_entropy": 0.05, "max_cv": 0.9}
    assert "Monitor" in dir(moescope)
    assert vars(moescope.Monitor(**limits).thresholds) == limits
    with pytest.raises(BadInput, match="max_load -1"):
        moescope.Monitor(max_load=-1)


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_tables_of_a_scan_in_training_are_those_of_the_checkpoint_saved_then(tmp_path, kind):
    model = model_of(kind)
    settings = {
        "scan_every": 2,
        "scan": partial(moescope.scan_model, matrix="gate,down", router="raw,centered"),
        "gradients_every": 0,
    }
    monitor = moescope.Monitor(tmp_path / "run", every=4, **settings).watch(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(1, 5):
        model(**batch(documents(4))).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        monitor.step()
        if number % 2 == 0:
            model.save_pretrained(tmp_path / f"checkpoint-{number}")
    run = monitor.close()
    assert run.info["timings"]["scan"] > 0
    saved = moescope.scan(
        tmp_path / "checkpoint-2",
        tmp_path / "checkpoint-4",
        matrix="gate,down",
        router="raw,centered",
        out=tmp_path / "scan",
        quiet=True,
    )
    for name in SCANNED:
        names = ["layer_name"]  # which a checkpoint of Mixtral spells otherwise than the model
        pd.testing.assert_frame_equal(
            run.table(name).drop(columns=names), saved.table(name).drop(columns=names), rtol=1e-9
        )
