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
from moescope.lab.training import load_state
from moescope.routing.monitor import LoopMonitor

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


@pytest.mark.parametrize("router", ["top2", "spectra"])
def test_a_step_that_cannot_be_captured_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, router: str
):
    """A capture that fails half way, after routers have added to their sums, changes no number."""

    def failing(model: LabModel, update: object, batch: tuple[torch.Tensor, ...], watch: object) -> None:
        model.forward(batch[0], mask_BL=batch[1], targets_BL=batch[2])
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(training, "StepGraph", failing)
    plain, failed = (tiny_training(tiny_config(router)) for _ in range(2))
    failed.capturable = True
    found = [trained(one, tmp_path / str(at)) for at, one in enumerate((plain, failed))]
    columns = ["step", "lm_loss", "aux_loss", "gradient_norm", "validation_loss"]
    pd.testing.assert_frame_equal(*(run.table("steps")[columns] for run in found), check_exact=True)
    messages = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert messages == ["moescope: steps run without a CUDA graph: CUDA error: out of memory"]


@pytest.mark.parametrize(
    ("capability", "hip", "waits"),
    [((9, 0), None, False), ((8, 9), None, True), ((12, 0), None, True), ((9, 4), "6.4", True)],
)
def test_only_gpus_with_a_kernel_for_grouped_products_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, waits: bool
):
    experts = tiny_training(tiny_config()).model.blocks[0].mlp.experts
    assert experts.waits(torch.bfloat16)  # a CPU's is a loop too
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("moescope.decoder.model.grouped_mm_runs", lambda rows, weight: True)
    weight = torch.empty(0, 0, 0)
    monkeypatch.setattr(type(experts), "parameters", lambda self: iter([OnGpu(weight)]))
    assert experts.waits(torch.bfloat16) == waits


class OnGpu:
    """A weight that says it is on a GPU."""

    def __init__(self, weight: torch.Tensor):
        self.dim, self.new_empty, self.device = weight.dim, weight.new_empty, torch.device("cuda")


REPEATABLE = sorted(set(ROUTERS) - {"expert_choice"})  # whose sums are not
CASES = [(router, dtype, "packed", False) for router in REPEATABLE for dtype in ("float32", "bfloat16")]
CASES += [(router, "bfloat16", "documents", False) for router in REPEATABLE]
CASES += [(router, "bfloat16", "packed", True) for router in ("dense", "top2", "spectra", "some")]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("router", "dtype", "layout", "compiled"), CASES)
def test_captured_steps_are_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: str, dtype: str, layout: str, compiled: bool
):
    """Against steps that Python runs: losses, gradient norms, weights, load. Measured gradients interrupt.

    Experts in float32 are a loop: no such step is captured.
    """
    found = {}
    for way, warm in (("captured", 1), ("plain", 10**9)):
        monkeypatch.setattr(training, "WARM_STEPS", warm)
        config = tiny_config(router, dtype=dtype)
        config = replace(config, model=replace(config.model, d_model=64, heads=2))
        sides = tiny_corpus().train, tiny_corpus().validation
        rows = [TokenRows.of(side, Bytes(), 32, layout) for side in sides]
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LabModel(config.model, compiled)
        one = training.Training(config, model, training.Data(rows[0], rows[1].sample(20)), "cuda")
        run = trained(one, tmp_path / way, gradients_every=5)
        assert (one.graph is not None) == (way == "captured" and (dtype == "bfloat16" or router == "dense"))
        steps = run.table("steps")[["step", "lm_loss", "aux_loss", "gradient_norm", "validation_loss"]]
        found[way] = steps, run.table("load")[LOADS], model.state_dict()
    for captured, plain in zip(found["captured"][:2], found["plain"][:2], strict=True):
        pd.testing.assert_frame_equal(captured, plain, check_exact=True)
    for name, weight in found["plain"][2].items():
        assert torch.equal(found["captured"][2][name], weight), name


def test_a_training_of_a_gpu_continues_on_a_cpu(tmp_path: Path):
    """AdamW's choice of kernels belongs to the device: a saved one does not come back."""
    whole, first = (tiny_training(tiny_config(steps=steps, learning_rate=1e-3)) for steps in (12, 12))
    expected = trained(whole, tmp_path / "whole").table("steps").set_index("step")["lm_loss"]
    watch = training.FiniteWatch(first.model.train())
    for _ in range(4):
        first.one_step(watch)
    watch.close()
    first.save_state(tmp_path / "states")
    state = load_state(tmp_path / "states")
    assert state is not None
    for group in state["optimiser"]["param_groups"]:  # as a GPU's are saved
        group |= {"fused": True, "capturable": True, "lr": torch.tensor(1e-3)}
    second = tiny_training(tiny_config(steps=12, learning_rate=1e-3))
    second.restore(state)
    for flag in ("fused", "capturable"):
        assert not any(group[flag] for group in second.optimiser.param_groups)
    second.evaluations = [{"loss": 0.0, "published": 0.0, "domains": {}, "step": 4}]
    found = trained(second, tmp_path / "rest").table("steps").set_index("step")["lm_loss"]
    pd.testing.assert_series_equal(found.loc[8:], expected.loc[8:], rtol=1e-6)
