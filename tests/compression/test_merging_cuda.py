"""Merging plans made on a CUDA device are those made on the CPU; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import moescope
from families.tiny_models import tiny_model
from moescope.compression.plan import read_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize(
    ("kind", "method", "more"),
    [
        ("mixtral", "hc_smoe_permuted", {}),
        ("olmoe", "m_smoe_permuted", {}),
        ("deepseek_v3", "m_smoe", {}),
        ("gpt_oss", "weights", {}),
        ("mixtral", "m_smoe_permuted", {"router": "tie"}),
    ],
)
def test_a_gpu_makes_the_cpu_s_plan(tmp_path, kind, method, more):
    model = tiny_model(kind).save(tmp_path / "model", "saved")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 60, (30, 20)))
    runs = [
        moescope.compress(
            model,
            method=method,
            keep=3,
            token_ids=tmp_path / "ids.npy",
            out=tmp_path / device,
            quiet=True,
            judge=False,
            controls=1,
            device=device,
            **more,
        )
        for device in ("cpu", "cuda")
    ]
    ours, theirs = (run.table("clusters") for run in runs)
    assert ours["cluster"].tolist() == theirs["cluster"].tolist()
    assert ours["weight"].to_numpy() == pytest.approx(theirs["weight"].to_numpy(), abs=0.02)
    damage, other = (run.table("damage").query("layer.notna()") for run in runs)
    assert damage["predicted_error"].to_numpy() == pytest.approx(
        other["predicted_error"].to_numpy(), rel=0.05
    )
    for layer, fit in read_plan(runs[0].path)[1].items():
        rows = read_plan(runs[1].path)[1][layer].router_KD
        assert (fit.router_KD is None) == (rows is None)
        if rows is not None:
            assert rows.numpy() == pytest.approx(fit.router_KD.numpy(), rel=0.05, abs=0.02)
