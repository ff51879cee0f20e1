"""A plain loop under the monitor.

What is counted is what experts were handed, and training is as if nobody watched.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from moescope.errors import BadInput
from moescope.routing.metrics import METRICS
from moescope.routing.monitor import LoopMonitor, Thresholds
from moescope.run import Run
from routing.tiny_training import batch, documents, handed_out, load, model_of


def loop(
    model: nn.Module,
    monitor: LoopMonitor | None,
    first: int = 0,
    steps: int = 8,
    rate: float = 0.0,
    micro: int = 1,
) -> list[dict[str, float]]:
    """Steps of four documents each, in so many micro-batches; what each step returned."""
    optimiser, returned, rows = torch.optim.SGD(model.parameters(), lr=rate), [], documents()
    for number in range(first, steps):
        mine = rows[4 * number : 4 * number + 4]
        for part in range(micro):
            size = 4 // micro
            (model(**batch(mine[part * size : (part + 1) * size])).loss / micro).backward()
        optimiser.step()
        optimiser.zero_grad()
        if monitor is not None:
            returned.append(monitor.step())
    return returned


def watched(folder: Path, kind: str = "mixtral", micro: int = 1, **settings) -> Run:
    model = model_of(kind)
    monitor = LoopMonitor(
        folder, **{"every": 4, "decisions_every": 1, "gradients_every": 0, **settings}
    ).watch(model)
    loop(model, monitor, micro=micro)
    run = monitor.close()
    assert run is not None
    return run


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "llama4_text"])
def test_tokens_and_gate_weight_are_what_experts_were_handed_one_document_at_a_time(tmp_path, kind):
    run = watched(tmp_path / "run", kind)
    if kind == "llama4_text":  # its experts are handed every token, so the oracle does not know it
        tokens = sum(int(row["attention_mask"].sum()) for row in documents())
        assert (load(run).sum(1) == tokens * model_of(kind).config.num_experts_per_tok).all()
        return
    counts, mass = handed_out(model_of(kind).eval(), documents())
    np.testing.assert_array_equal(load(run), counts)
    np.testing.assert_allclose(load(run, "gate_weight"), mass, rtol=1e-4)


def test_an_encoder_decoder_with_dropout_is_counted_by_each_stack_s_own_mask_and_not_checked(tmp_path):
    model = model_of("switch_transformers")
    assert any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
    monitor = LoopMonitor(tmp_path / "run", every=1).watch(model)
    rows = batch(documents(4))
    short = torch.ones(4, 12, dtype=torch.long)
    short[:, 3:] = 0
    ids, mask = rows["input_ids"], rows["attention_mask"]
    model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=short, labels=ids)
    monitor.step()
    run = monitor.close()
    assert "dropout makes experts random" in run.info["warnings"][0]
    value = run.table("routing_layers").set_index(["layer_name", "metric"])["value"]
    for name, tokens in run.table("load").groupby("layer_name")["tokens"].sum().items():
        real = mask.sum() if "encoder" in name.split(".") else short.sum()
        assert tokens == round(int(real) * (1 - value[name, "dropped"]))  # capacity takes some


def test_the_metrics_of_a_window_are_in_the_glossary_and_equal_their_formulas(tmp_path):
    run = watched(tmp_path / "run", coactivation=True)
    metrics = run.table("routing_layers")
    assert set(metrics["metric"]) <= set(METRICS)
    assert not {"sequential_consistency", "adjacent_jaccard"} & set(metrics["metric"])
    for (step, layer), rows in run.table("load").groupby(["step", "layer"]):
        value = metrics[(metrics["step"] == step) & (metrics["layer"] == layer)].set_index("metric")["value"]
        tokens = rows["tokens"].to_numpy()
        assert value["cv"] == pytest.approx(np.std(tokens) / np.mean(tokens))
        assert value["max_over_mean"] == pytest.approx(tokens.max() / tokens.mean())
        assert 0 < value["routing_entropy"] < np.log(4)
        pairs = run.table("coactivation").query("step == @step and layer == @layer")
        assert pairs["tokens"].sum() == tokens.sum()  # k = 2: every token is in one pair, counted both ways


def test_entropy_is_the_mean_over_real_tokens_of_the_model_s_own_probabilities(tmp_path):
    run = watched(tmp_path / "run", every=8)
    model = model_of().eval()
    sums, count = np.zeros(3), 0
    for row in documents():
        n = int(row["attention_mask"].sum())
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"][None, :n]).router_logits
        p = [one.softmax(-1).numpy() for one in logits]
        sums += [-(one * np.log(one)).sum() for one in p]
        count += n
    rows = run.table("routing_layers").query("metric == 'routing_entropy'")
    np.testing.assert_allclose(rows["value"], sums / count, rtol=1e-4)


def test_micro_batches_give_the_totals_of_one_batch(tmp_path):
    whole, parts = watched(tmp_path / "whole"), watched(tmp_path / "parts", micro=4)
    pd.testing.assert_frame_equal(whole.table("load"), parts.table("load"), rtol=1e-5)
    left, right = (run.table("routing_layers").drop(columns=["low", "high"]) for run in (whole, parts))
    pd.testing.assert_frame_equal(left, right, rtol=1e-4)
    np.testing.assert_allclose(whole.table("steps")["lm_loss"], parts.table("steps")["lm_loss"], rtol=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_nothing_twice(tmp_path, reentrant):
    model = model_of()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    monitor = LoopMonitor(tmp_path / "run", every=4, gradients_every=0).watch(model)
    recomputed = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *given: recomputed.append(1))
    loop(model, monitor)
    hook.remove()
    assert len(recomputed) == 16  # each of eight passes ran twice
    np.testing.assert_array_equal(load(monitor.close()), handed_out(model_of().eval(), documents())[0])


def test_training_is_bit_for_bit_what_it_is_without_a_monitor(tmp_path):
    plain, seen = model_of(), model_of()
    monitor = LoopMonitor(
        tmp_path / "run", every=3, decisions_every=2, gradients_every=2, coactivation=True
    ).watch(seen)
    loop(plain, None, rate=0.5)
    loop(seen, monitor, rate=0.5)
    for (name, left), (_, right) in zip(plain.named_parameters(), seen.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    monitor.close()
    hooks = [
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        for model in (plain, seen)
    ]
    assert hooks[0] == hooks[1]  # transformers hangs up some of its own


def test_the_first_pass_is_checked_as_closely_as_its_precision_allows(tmp_path):
    """Experts that give 1 % more when run again: too much in full precision, rounding in mixed precision."""

    def first_pass(mixed: bool) -> None:
        model = model_of()
        monitor = LoopMonitor(tmp_path / str(mixed), every=1).watch(model)
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_hook(
                lambda module, args, output: output * 1.01 if monitor.capture.busy else output
            )
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                model(**batch(documents(4)))
        finally:
            monitor.abandon()

    first_pass(mixed=True)
    with pytest.raises(BadInput, match=r"do not give the output of layer 0 .*off by 1\.\d%"):
        first_pass(mixed=False)


def test_passes_in_evaluation_mode_are_not_counted(tmp_path):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=8).watch(model)
    loop(model, monitor, steps=4)
    model.eval()
    with torch.no_grad():
        model(**batch(documents(seed=5)))
    model.train()
    loop(model, monitor, first=4)
    np.testing.assert_array_equal(load(monitor.close()), handed_out(model_of().eval(), documents())[0])


def test_a_pass_that_broke_off_leaves_nothing_behind(tmp_path):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=8).watch(model)
    loop(model, monitor, steps=4)

    def fail(*given):
        raise MemoryError

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        model(**batch(documents(4)))
    hook.remove()
    loop(model, monitor, first=4)
    np.testing.assert_array_equal(load(monitor.close()), handed_out(model_of().eval(), documents())[0])


def test_a_step_returns_at_most_twelve_finite_numbers_every_so_many_steps(tmp_path):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=4, gradients_every=4).watch(model)
    returned = loop(model, monitor)
    assert [bool(numbers) for numbers in returned] == [False, False, False, True] * 2
    for numbers in (returned[3], returned[7]):
        assert len(numbers) == 12
        assert all(name.startswith("moescope/") and np.isfinite(value) for name, value in numbers.items())
    assert monitor.run is not None
    monitor.run.wait()
    loads = load(Run.load(tmp_path / "run"))  # read while it grows
    assert loads.sum() == 2 * sum(int(row["attention_mask"].sum()) for row in documents()) * 3
    late = Run.load(tmp_path / "run").table("load").query("step == 8").groupby("layer")["tokens"]
    assert returned[7]["moescope/cv_p50"] == pytest.approx(np.median(late.std(ddof=0) / late.mean()))
    monitor.close()


def test_the_steps_table_has_losses_tokens_and_what_the_loop_told(tmp_path):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=1).watch(model)
    output = model(**batch(documents(4)))
    monitor.step(learning_rate=0.25, validation_loss=3.0)
    steps = monitor.close().table("steps")
    assert steps["tokens"].tolist() == [int(batch(documents(4))["attention_mask"].sum())]
    assert steps["train_loss"][0] == pytest.approx(output.loss.item())
    assert steps["aux_loss"][0] == pytest.approx(output.aux_loss.item())
    coefficient = model.config.router_aux_loss_coef
    assert steps["lm_loss"][0] == pytest.approx(output.loss.item() - coefficient * output.aux_loss.item())
    assert (steps["learning_rate"][0], steps["validation_loss"][0]) == (0.25, 3.0)
    assert steps["peak_memory_bytes"].isna().all()


# --- folders, crashes, going on


@pytest.mark.parametrize(("finished", "saved"), [(True, 3), (False, 4), (False, 6)])
def test_a_resumed_run_has_the_tables_of_one_that_never_stopped(tmp_path, finished, saved):
    def begin(folder: str, step: int = 0) -> tuple[nn.Module, LoopMonitor]:
        model = model_of()
        thresholds = Thresholds(
            dead_steps=1, max_load=0.1, max_cv=0.1, min_entropy=2.0
        )  # so that alerts stand
        settings = {"every": 4, "decisions_every": 2, "gradients_every": 4, "thresholds": thresholds}
        return model, LoopMonitor(tmp_path / folder, **settings).watch(model, step)

    model, monitor = begin("whole")
    loop(model, monitor, steps=saved)
    monitor.flush()
    loop(model, monitor, first=saved)
    whole = monitor.close()

    model, monitor = begin("resumed")
    loop(model, monitor, steps=saved)
    monitor.flush()
    loop(model, monitor, first=saved, steps=7)  # trained beyond the checkpoint, then stopped
    monitor.close() if finished else monitor.abandon()
    model, monitor = begin("resumed", step=saved)
    loop(model, monitor, first=saved)
    resumed = monitor.close()

    assert len(whole.table("alerts"))
    for name in ("load", "routing_layers", "router_gradients", "alerts"):
        pd.testing.assert_frame_equal(whole.table(name), resumed.table(name))
    timed = ["step_seconds", "tokens_per_second"]
    left, right = whole.table("steps").drop(columns=timed), resumed.table("steps").drop(columns=timed)
    pd.testing.assert_frame_equal(left[left["step"] > saved], right[right["step"] > saved])
    assert resumed.info["status"] == "done"


def test_a_new_training_never_writes_over_an_old_one(tmp_path):
    watched(tmp_path / "run")
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*.parquet")}
    with pytest.raises(BadInput, match=r"holds a run already; give another out, or overwrite=True"):
        LoopMonitor(tmp_path / "run", every=4, decisions_every=1, gradients_every=0).watch(model_of())
    assert before == {file: file.read_bytes() for file in (tmp_path / "run").rglob("*.parquet")}
    watched(tmp_path / "run", overwrite=True)
    for number in (1, 2):
        monitor = LoopMonitor().watch(model_of(), base=tmp_path)
        assert monitor.folder == tmp_path / f"monitor-mixtral-{number}"
        monitor.abandon()


def test_a_monitor_that_is_forgotten_leaves_a_readable_interrupted_run(tmp_path):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=2).watch(model)
    loop(model, monitor, steps=3)
    del monitor, model
    gc.collect()
    run = Run.load(tmp_path / "run")
    assert run.info["status"] == "interrupted"
    assert run.table("load")["step"].unique().tolist() == [2]


def cannot(*given: object) -> None:
    raise ValueError("a table that nobody thought of")


def test_tables_that_cannot_be_made_are_said_and_training_goes_on(tmp_path, monkeypatch, caplog):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=2, gradients_every=0).watch(model)
    with monkeypatch.context() as broken:
        broken.setattr("moescope.routing.monitor.window_tables", cannot)
        loop(model, monitor, steps=2)
    loop(model, monitor, first=2, steps=6)
    lost = "tables could not be written and are lost: ValueError: a table that nobody thought of"
    assert lost in caplog.text
    run = monitor.close()
    assert run.info["warnings"] == [lost]
    assert run.table("load")["step"].unique().tolist() == [4, 6]
    counts, _ = handed_out(model, documents()[8:24])
    np.testing.assert_array_equal(load(run), counts)


def test_tables_lost_at_the_very_end_are_said_too(tmp_path, monkeypatch, caplog):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=2, gradients_every=0).watch(model)
    monkeypatch.setattr("moescope.routing.monitor.window_tables", cannot)
    loop(model, monitor, steps=2)
    monitor.stop()
    assert "ValueError: a table that nobody thought of" in caplog.text
    assert Run.load(tmp_path / "run").info["status"] == "interrupted"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 1.5}, "every 1.5: must be a whole number from 1"),
        ({"gradients_every": -1}, "gradients_every -1: must be a whole number from 0"),
        ({"scan_every": 5}, "scan_every 5: .*moescope.scan_model"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, message):
    with pytest.raises(BadInput, match=message):
        LoopMonitor(**settings)


def test_a_model_without_experts_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(BadInput, match="no experts module in it"):
        LoopMonitor(tmp_path / "run").watch(nn.Linear(2, 2))
    assert not (tmp_path / "run").exists()


def test_routers_are_hooked_only_in_steps_whose_logits_are_looked_at(tmp_path):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=6, decisions_every=3, gradients_every=0).watch(model)
    capture, routers = monitor.capture, [block.router for block in monitor.blocks]
    hooked = []  # transformers has hooks of its own there
    for start in range(6):
        hooked.append((len(capture.router_hooks), bool(capture.check_hooks)))
        model(**batch(documents(8)[start : start + 2])).loss.backward()
        monitor.step()
    assert [hooks for hooks, _ in hooked] == [3, 0, 3, 0, 0, 3]
    assert [checked for _, checked in hooked] == [True, *[False] * 5]  # the first pass is checked
    run = monitor.close()
    assert [capture.hooks, capture.router_hooks, capture.check_hooks] == [[], [], []]
    assert (run.table("routing_layers")["metric"] == "routing_entropy").sum() == len(routers)


@pytest.mark.slow
def test_a_forgotten_monitor_can_be_collected_while_a_thread_is_being_started(tmp_path):
    """The finaliser runs wherever the collector does, also under the lock that joining a thread needs."""
    script = f"""
import contextlib, sys, threading, torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from routing.tiny_training import batch, documents, model_of
import moescope
model = model_of("mixtral")
monitor = moescope.Monitor(out={str(tmp_path / "run")!r}, every=1).watch(model)
model(**batch(documents()[:2])).loss.backward()
monitor.step()
monitor.run.writing.result()
finaliser = monitor.abandon
with getattr(threading, "_shutdown_locks_lock", contextlib.nullcontext()):  # Python 3.13 has no such lock
    finaliser()
print("collected")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "collected\n", done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
