"""Real Trainer runs under the monitor.

Accumulation, checkpointing, evaluation, two processes and a resumed run count alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from moescope.errors import BadInput
from moescope.routing.trainer_monitor import Monitor
from moescope.run import Run
from moescope.storage import Failpoint
from routing.tiny_training import documents, handed_out, load, model_of, trainer

MONITOR = {"every": 4, "decisions_every": 1, "gradients_every": 4}


def trained(folder: Path, kind: str = "mixtral", **arguments) -> Run:
    trainer(folder, kind, MONITOR, **arguments).train()
    return Run.load(folder / "moescope-1")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        ("mixtral", {"gradient_checkpointing": True}),
        ("mixtral", {"eval_strategy": "steps", "eval_steps": 3}),
        ("mixtral", {"logging_steps": 3, "save_strategy": "steps", "save_steps": 3}),
    ],
    ids=["plain", "accumulation", "checkpointing", "evaluation", "saving"],
)
def test_however_it_is_trained_the_totals_are_those_of_one_document_at_a_time(tmp_path, kind, arguments):
    run = trained(tmp_path, kind, **arguments)
    counts, mass = handed_out(model_of(kind).eval(), documents())  # one epoch; the learning rate is 0
    np.testing.assert_array_equal(load(run), counts)
    np.testing.assert_allclose(load(run, "gate_weight"), mass, rtol=1e-4)
    assert run.info["status"] == "done"
    assert run.table("steps")["tokens"].iloc[-1] == counts.sum() / len(counts) / 2  # k = 2


@pytest.mark.parametrize("write", [1, 3])
def test_a_full_disk_at_the_end_does_not_stop_the_users_training(tmp_path, monkeypatch, caplog, write):
    class Full(Failpoint):
        def reach(self, creates: bool) -> None:
            if any((tmp_path / "moescope-1").glob("*.parquet")):
                super().reach(creates)

    monkeypatch.setattr("moescope.storage.failpoint", Full(f"full:{write}"))
    training = trainer(tmp_path, "mixtral", MONITOR)
    assert training.train().global_step == training.state.max_steps > 0
    assert "moescope: the run is not complete: " in caplog.text
    run = Run.load(tmp_path / "moescope-1")
    assert run.info["status"] == "failed"
    assert "No space left on device" in run.info["error"]
    counts, _ = handed_out(model_of("mixtral").eval(), documents())
    np.testing.assert_array_equal(load(run), counts)  # nothing is lost: the tasks are all there


def test_mixed_precision_counts_every_real_token(tmp_path):
    run = trained(tmp_path, bf16=True)
    tokens = sum(int(row["attention_mask"].sum()) for row in documents())
    assert load(run).sum(1).tolist() == [2 * tokens] * 3
    assert (run.table("router_gradients")["lm_gradient_norm"] > 0).all()


@pytest.mark.slow
def test_two_processes_give_the_totals_of_one(tmp_path):
    """Real torchrun, gloo: each process has half of every batch."""
    script = Path(__file__).parent / "tiny_training.py"
    arguments = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    environment = {
        **os.environ,
        "PYTHONPATH": f"{script.parents[1]}{os.pathsep}{os.environ['PYTHONPATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    launch = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    training = [str(script), str(tmp_path / "two"), json.dumps(arguments), json.dumps(MONITOR)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, *training],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = trained(tmp_path / "one"), Run.load(tmp_path / "two" / "moescope-1")
    pd.testing.assert_frame_equal(one.table("load"), two.table("load"), rtol=1e-5)
    drop = ["low", "high"]
    left, right = (run.table("routing_layers").drop(columns=drop) for run in (one, two))
    pd.testing.assert_frame_equal(left, right, rtol=1e-4)
    # the auxiliary loss is of each half batch, so another
    columns = ["step", "tokens", "train_loss", "lm_loss", "learning_rate"]
    pd.testing.assert_frame_equal(one.table("steps")[columns], two.table("steps")[columns], rtol=1e-3)
    left, right = (run.table("router_gradients") for run in (one, two))
    np.testing.assert_allclose(left["lm_gradient_norm"], right["lm_gradient_norm"], rtol=1e-3)
    assert [path.name for path in (tmp_path / "two").glob("moescope*")] == ["moescope-1"]


def test_a_resumed_run_has_the_tables_of_one_that_never_stopped(tmp_path):
    from transformers import AutoModelForCausalLM

    saved = 3
    arguments = {"learning_rate": 0.01, "save_strategy": "steps", "save_steps": saved, "logging_steps": 1}
    whole = trained(tmp_path / "whole", **arguments)
    first = trainer(tmp_path / "resumed", "mixtral", MONITOR, **arguments)
    first.add_callback(StopAt(saved + 2))
    first.train()
    checkpoint = tmp_path / "resumed" / f"checkpoint-{saved}"
    # Trainer alone does not bring Mixtral's experts back: it looks for the names they have in memory, and
    # files have others.
    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    again = trainer(tmp_path / "resumed", "mixtral", MONITOR, model, **arguments)
    again.train(resume_from_checkpoint=str(checkpoint))
    resumed = Run.load(tmp_path / "resumed" / "moescope-1")
    for name in ("load", "routing_layers", "router_gradients", "alerts"):
        pd.testing.assert_frame_equal(whole.table(name), resumed.table(name))
    timed = ["step_seconds", "tokens_per_second"]
    pd.testing.assert_frame_equal(
        whole.table("steps").drop(columns=timed), resumed.table("steps").drop(columns=timed)
    )
    assert not (tmp_path / "resumed" / "moescope-2").exists()


def StopAt(step: int):  # a class to the Trainer, named like one
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            control.should_training_stop = state.global_step >= step

    return Stop()


def test_a_training_that_failed_leaves_its_tables_and_the_next_one_its_own_folder(tmp_path):
    from transformers import TrainerCallback

    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            if state.global_step == 6:
                raise MemoryError("out of memory")

    broken = trainer(tmp_path, "mixtral", MONITOR)
    broken.add_callback(Fail())
    with pytest.raises(MemoryError):
        broken.train()
    monitor = next(
        callback for callback in broken.callback_handler.callbacks if isinstance(callback, Monitor)
    )
    monitor.run.wait()
    assert Run.load(tmp_path / "moescope-1").table("load")["step"].unique().tolist() == [4]
    trainer(tmp_path, "mixtral", MONITOR).train()
    assert sorted(Run.load(tmp_path / "moescope-2").table("load")["step"].unique()) == [4, 8]


# --- the Trainer's own log


def test_the_numbers_reach_the_tracker_s_file_and_the_trainer_s_history(tmp_path, monkeypatch):
    """TensorBoard for real: the event file is read back."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    run = trainer(
        tmp_path / "out", "mixtral", MONITOR, report_to="tensorboard", eval_strategy="steps", eval_steps=2
    )
    run.train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    names = {name for name in events.Tags()["scalars"] if "moescope" in name}
    assert len(names) == 12
    logged = {entry["step"]: entry for entry in run.state.log_history if "loss" in entry}
    assert list(logged) == [2, 4, 6, 8]
    for name in names - {"train/moescope/lm_gradient_norm_p10"}:
        seen = {event.step: event.value for event in events.Scalars(name)}
        assert seen == pytest.approx(
            {step: entry[name.removeprefix("train/")] for step, entry in logged.items()}
        )
    gradients = events.Scalars("train/moescope/lm_gradient_norm_p10")
    assert [event.step for event in gradients] == [4, 8]
    table = Run.load(tmp_path / "out" / "moescope-1").table("router_gradients").query("step == 8")
    assert gradients[-1].value == pytest.approx(np.percentile(table["lm_gradient_norm"], 10))
    assert not any(
        "moescope" in key for entry in run.state.log_history if "eval_loss" in entry for key in entry
    )


def test_the_steps_table_has_what_the_trainer_logs_and_evaluates(tmp_path):
    run = trainer(tmp_path, "mixtral", MONITOR, eval_strategy="steps", eval_steps=4, learning_rate=0.01)
    run.train()
    steps = Run.load(tmp_path / "moescope-1").table("steps").set_index("step")
    for entry in run.state.log_history:
        if "loss" in entry:
            row = steps.loc[entry["step"]]
            assert row["train_loss"] == pytest.approx(entry["loss"])
            assert row["gradient_norm"] == pytest.approx(entry["grad_norm"])
            assert row["learning_rate"] == pytest.approx(entry["learning_rate"])
            assert row["lm_loss"] == pytest.approx(row["train_loss"] - 0.001 * row["aux_loss"], rel=1e-3)
        if "eval_loss" in entry:
            assert steps.loc[entry["step"], "validation_loss"] == pytest.approx(entry["eval_loss"])
    assert steps.index.tolist() == [2, 4, 6, 8]


def test_logs_made_at_the_end_of_epochs_carry_the_numbers_too(tmp_path):
    run = trainer(tmp_path, "mixtral", MONITOR, logging_strategy="epoch", max_steps=-1, num_train_epochs=2)
    run.train()
    entries = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [8, 16]
    assert all("moescope/cv_p50" in entry for entry in entries)


def test_several_gpus_in_one_process_are_refused_before_training(tmp_path):
    run = trainer(tmp_path, "mixtral", MONITOR)
    run.args._n_gpu = 2
    with pytest.raises(BadInput, match=r"2 GPUs in one process .* start with torchrun"):
        run.callback_handler.on_train_begin(run.args, run.state, run.control)
    assert not (tmp_path / "moescope-1").exists()


def test_training_is_bit_for_bit_what_it_is_without_a_monitor(tmp_path):
    batches = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    arguments = {**batches, "learning_rate": 0.05, "gradient_checkpointing": True}
    weights = []
    for name, monitor in (("seen", MONITOR), ("plain", None)):
        one = trainer(tmp_path / name, "mixtral", monitor, **arguments)
        one.train()
        weights.append(dict(one.model.named_parameters()))
    for name, left in weights[0].items():
        assert torch.equal(left, weights[1][name]), name
