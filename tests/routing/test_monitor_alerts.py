"""Alerts come with step and layer when a threshold is first crossed, and not by luck."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lab.tiny_training import tiny_config, tiny_training
from moescope.errors import BadInput
from moescope.lab.training import FiniteWatch, Training
from moescope.routing.counts import SUMS, LayerCounts
from moescope.routing.load_balance import cv
from moescope.routing.monitor import FEWEST_LOAD, AlertState, LoopMonitor, Thresholds
from moescope.routing.monitor_capture import Window
from moescope.run import Run
from routing.tiny_training import batch, documents, model_of

EVEN = [100, 100, 100, 100, 100, 100, 100, 100]


def window(loads: list[int], k: int = 1, entropy: float | None = None, nan: bool = False) -> Window:
    """One layer's window; gates are 1."""
    counts_MBE, sums = np.array([[loads]]), dict.fromkeys(SUMS, 0.0)
    gate_weight_MBE = counts_MBE.astype(float)
    sums["tokens"] = sum(loads) // k
    if nan:
        gate_weight_MBE[0, 0, 0] = np.nan
    if entropy is not None:
        sums |= {"decided": 10, "routing_entropy": 10 * entropy}
    sums_MBS = np.array([[list(sums.values())]], dtype=float)
    return Window([LayerCounts(7, "mlp", "prefill", k, counts_MBE, gate_weight_MBE, sums_MBS)])


def watch(**thresholds) -> AlertState:
    return AlertState(Thresholds(**thresholds), [7], [8], 0)


def kinds(watcher: AlertState, seen: Window, step: int = 1) -> list[tuple[str, int | None, float | None]]:
    alerts = watcher.new_alerts(seen, step)
    assert all((alert["step"], alert["layer"]) == (step, 7) for alert in alerts)
    assert all(alert["message"].startswith(f"step {step}, layer 7: ") for alert in alerts)
    return [(alert["kind"], alert["expert"], alert["value"]) for alert in alerts]


def test_even_loads_raise_nothing():
    assert kinds(watch(), window(EVEN, entropy=1.0)) == []


@pytest.mark.parametrize(("n", "k"), [(16, 8), (16, 4), (8, 1), (32, 1), (64, 2)])
def test_a_collapse_is_raised_in_the_second_window_whatever_n_over_k_is(n, k):
    """k experts get 99.5 % of the choices, the others share the rest, so none is unused."""
    tokens = 20_000
    loads = [round(0.995 * tokens)] * k + [round(0.005 * tokens * k / (n - k))] * (n - k)
    watcher = AlertState(Thresholds(), [7], [n], 0)
    assert kinds(watcher, window(loads, k), 100) == []
    spread = float(cv(np.array(loads, float)))
    assert 0.98 < spread / (n / k - 1) ** 0.5 < 1
    (alert,) = watcher.new_alerts(window(loads, k), 200)
    assert (alert["kind"], alert["value"]) == ("collapsed", spread)
    assert "collapsed onto" in alert["message"]
    assert alert["threshold"] == pytest.approx(0.95 * (n / k - 1) ** 0.5, rel=1e-2)
    assert watcher.collapsed == 1
    assert kinds(watcher, window([tokens * k // n] * n, k), 300) == []
    assert watcher.collapsed == 0
    assert kinds(watcher, window(loads, k), 400) == []  # two windows again
    assert kinds(watcher, window(loads, k), 500) == [("collapsed", None, spread)]


def test_an_uneven_load_in_single_windows_is_no_collapse():
    watcher, one = watch(max_load=1, max_unused=1), [793, 1, 1, 1, 1, 1, 1, 1]
    for step in range(100, 2000, 200):
        assert kinds(watcher, window(one), step) == []
        assert kinds(watcher, window(EVEN), step + 100) == []


@pytest.mark.parametrize(
    ("kind", "loads", "value", "below"),
    [
        ("max_load", [770, 15, 15, 0, 0, 0, 0, 0], 7.7, [700, 70, 10, 10, 10, 0, 0, 0]),
        ("unused", [2000, 2000, 2000, 1980, 0, 9, 9, 2], 0.5, [2000, 2000, 1000, 1000, 1980, 9, 9, 2]),
    ],
)
def test_uneven_loads_are_raised_when_they_have_lasted_dead_steps(kind, loads, value, below):
    limits = {"max_cv": 1, "max_load": 1, "max_unused": 1, kind: 0.95, f"max_{kind}": 0.45}
    watcher = watch(dead_steps=300, **{name: limits[name] for name in ("max_cv", "max_load", "max_unused")})
    found = {}
    for step, seen in ((100, loads), (200, loads), (300, loads), (400, below), (500, loads)):
        found[step] = [alert for alert in kinds(watcher, window(seen), step) if alert[0] != "dead"]
    assert found == {100: [], 200: [], 300: [(kind, None, pytest.approx(value))], 400: [], 500: []}


def test_loads_of_a_few_tokens_are_not_judged():
    few = [FEWEST_LOAD * 8 - 1, 0, 0, 0, 0, 0, 0, 0]
    for loads, found in ((few, []), ([few[0] + 1, *few[1:]], ["collapsed"])):
        watcher = watch()
        kinds(watcher, window(loads), 1)
        assert [kind for kind, *_ in kinds(watcher, window(loads), 2)] == found


def test_every_expert_for_every_token_is_no_collapse():
    watcher = AlertState(Thresholds(dead_steps=1), [7], [4], 0)
    for step in (1, 2, 3):
        assert kinds(watcher, window([500] * 4, k=4), step) == []


def test_entropy_is_raised_below_its_limit_where_logits_were_looked_at():
    assert kinds(watch(), window(EVEN)) == []
    assert kinds(watch(), window(EVEN, entropy=0.11)) == []
    assert kinds(watch(), window(EVEN, entropy=0.09)) == [("entropy", None, pytest.approx(0.09))]


def test_one_expert_is_certain_of_every_token_and_that_is_no_news():
    alone = AlertState(Thresholds(), [7], [1], 0)
    assert kinds(alone, window([800], entropy=0.0)) == []
    assert kinds(AlertState(Thresholds(), [7], [2], 0), window([400, 400], entropy=0.0)) == [
        ("entropy", None, 0.0)
    ]


def test_low_entropy_by_design_raises_no_alert_but_collapse_does():
    sure = AlertState(Thresholds(), [7], [8], 0, certain=[7])
    assert kinds(sure, window(EVEN, entropy=0.01)) == []
    collapsed = window([800, 0, 0, 0, 0, 0, 0, 0], entropy=0.01)
    assert kinds(sure, collapsed, 2) == []
    assert [kind for kind, *_ in kinds(sure, collapsed, 3)] == ["collapsed"]
    other = AlertState(Thresholds(), [7], [8], 0, certain=[3])
    assert [kind for kind, *_ in kinds(other, window(EVEN, entropy=0.01))] == ["entropy"]


def test_gates_or_logits_that_are_no_numbers_are_raised():
    assert kinds(watch(), window(EVEN, nan=True)) == [("nan", None, None)]
    assert kinds(watch(), window(EVEN, entropy=float("nan"))) == [("nan", None, None)]


def test_an_expert_is_dead_after_so_many_steps_without_a_token_and_not_before():
    watcher, without = watch(dead_steps=20), [100, 0, *EVEN[2:]]
    assert kinds(watcher, window(EVEN), 10) == []
    assert kinds(watcher, window(without), 20) == []
    assert kinds(watcher, window(without), 30) == [("dead", 1, 20.0)]
    assert kinds(watcher, window(without), 40) == []  # it stands
    assert kinds(watcher, window(EVEN), 50) == []
    assert kinds(watcher, window(without), 60) == []
    assert kinds(watcher, window(without), 70) == [("dead", 1, 20.0)]  # and again


def test_state_survives_json():
    import json

    watcher = watch(dead_steps=5)
    kinds(watcher, window([800, 0, *[1] * 6], nan=True), 10)
    other = watch(dead_steps=5)
    other.restore(json.loads(json.dumps(watcher.state())))
    assert other.active == watcher.active
    assert {(7, 1, "dead"), (7, None, "nan")} <= other.active
    again = kinds(other, window([800, 0, *[1] * 6], nan=True), 20)
    assert [kind for kind, *_ in again] == ["collapsed"]  # the second window


@pytest.mark.parametrize(
    "bad",
    [
        {"dead_steps": 0},
        {"max_load": -1.0},
        {"max_load": 5.0},
        {"max_cv": 1.1},
        {"min_entropy": float("nan")},
    ],
)
def test_thresholds_that_cannot_be_are_refused_by_name(bad):
    with pytest.raises(BadInput, match=f"{next(iter(bad))} .*: must be "):
        Thresholds(**bad)


# --- in a real training


def train(folder, change, steps: int = 8, **thresholds) -> Run:
    """Eight steps; `change(model)` is done before the third."""
    model = model_of()
    monitor = LoopMonitor(
        folder, every=2, decisions_every=1, gradients_every=0, thresholds=Thresholds(**thresholds)
    ).watch(model)
    for number in range(steps):
        if number == 2:
            with torch.no_grad():
                change(model.model.layers[1].mlp)
        model(**batch(documents()[4 * number : 4 * number + 4]))
        monitor.step()
    run = monitor.close()
    assert run is not None
    return run


def test_a_router_that_collapses_in_one_layer_is_raised_there_at_the_next_tables(tmp_path, caplog):
    def collapse(block) -> None:
        block.gate.register_forward_pre_hook(lambda module, given: (given[0].abs(),))
        block.gate.weight.copy_(torch.tensor([9.0, 3.0, -3.0, -9.0])[:, None].expand_as(block.gate.weight))

    alerts = train(tmp_path / "run", collapse, dead_steps=4).table("alerts")
    layer_1 = alerts[alerts["layer"] == 1]
    assert set(layer_1[layer_1["step"] == 4]["kind"]) == {"entropy"}
    later = layer_1[(layer_1["step"] == 6) & layer_1["expert"].isna()].set_index("kind")
    assert set(later.index) == {"collapsed", "max_load", "unused"}
    assert later.loc["collapsed", "value"] == 1.0  # sqrt(n/k - 1): all tokens take the same two of four
    assert later.loc["max_load", "value"] == 2.0
    assert later.loc["unused", "value"] == 0.5
    dead = layer_1[layer_1["kind"] == "dead"]
    assert dead[["step", "expert"]].to_numpy().tolist() == [[6, 2], [6, 3]]
    assert set(alerts["layer"]) == {1}
    assert set(alerts["layer_name"]) == {"model.layers.1.mlp"}
    assert "step 6, layer 1: collapsed onto 2 of 4 experts" in caplog.text


def test_nan_weights_are_raised_in_the_layer_and_those_behind_it(tmp_path):
    alerts = train(tmp_path / "run", lambda block: block.gate.weight.fill_(float("nan"))).table("alerts")
    nan = alerts[alerts["kind"] == "nan"]
    assert nan[["step", "layer"]].to_numpy().tolist() == [[4, 1], [4, 2]]
    assert nan["value"].isna().all()


# --- the Monitor's alerts in trainings: a planted collapse is raised, a healthy training raises nothing

STEPS, EVERY = 200, 10
RATIOS = (2, 4, 8, 32)  # n/k
HEALTHY = ("topk", "switch_top1", "loss_free", "spectra", "hash")


def training_of(router: str, ratio: int) -> Training:
    """A training with n/k = ratio: k = 2, or 1 where the router takes one expert per token."""
    k = 1 if router == "switch_top1" else 2
    options = {"of": "occurrence"} if router == "hash" else {}  # some bytes do not occur in the text
    config = tiny_config(router, options, batch_size=8, steps=STEPS, learning_rate=1e-3, warmup=30)
    return tiny_training(replace(config, model=replace(config.model, experts=ratio * k, top_k=k)))


def run_steps(training: Training, monitor: LoopMonitor, steps: int) -> list[dict[str, float]]:
    """Train; return the numbers for a tracker, of every window."""
    watch, logged = FiniteWatch(training.model), []
    for _ in range(steps):
        training.one_step(watch, monitor)
        logged.append(monitor.step())
    watch.close()
    return [numbers for numbers in logged if numbers]


def collapse(router: nn.Module) -> None:
    """Let every token but one in 200 choose the first k experts; the others as they chose before."""
    forward = router.forward

    def collapsed(inputs: Any) -> Any:
        routed = forward(inputs)
        first_TK = torch.arange(routed.chosen_TK.shape[1]).expand_as(routed.chosen_TK)
        own_T = torch.arange(len(first_TK)) % 200 == 0
        return replace(routed, chosen_TK=torch.where(own_T[:, None], routed.chosen_TK, first_TK))

    router.forward = collapsed


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_planted_collapse_is_raised_within_two_windows(tmp_path, ratio):
    training = training_of("topk", ratio)
    monitor = LoopMonitor(tmp_path / "run", every=EVERY, gradients_every=0).watch(training.model)
    training.model.train()
    (before,) = run_steps(training, monitor, EVERY)
    collapse(training.model.routers[1])
    first, second = run_steps(training, monitor, 2 * EVERY)
    names = ("moescope/alerts", "moescope/collapsed")
    assert [[numbers[name] for name in names] for numbers in (before, first, second)] == [
        [0, 0],
        [0, 0],
        [1, 1],
    ]
    alerts = monitor.close().table("alerts")
    assert alerts[["step", "layer", "kind"]].to_numpy().tolist() == [[3 * EVERY, 1, "collapsed"]]
    assert "collapsed" in alerts["message"][0]


@pytest.mark.parametrize(
    ("router", "ratio"),
    [
        pytest.param(router, ratio, marks=[] if (router, ratio) == ("topk", 4) else [pytest.mark.slow])
        for router in HEALTHY
        for ratio in RATIOS
    ],
)
def test_a_healthy_training_raises_nothing_to_its_end(tmp_path, router, ratio):
    """Warm-up included. Dead experts and the like must last half of the training: 500 of 1,000 steps."""
    training = training_of(router, ratio)
    monitor = LoopMonitor(
        tmp_path / "run", every=EVERY, gradients_every=0, thresholds=Thresholds(dead_steps=STEPS // 2)
    ).watch(training.model)
    training.model.train()
    last = run_steps(training, monitor, STEPS)[-1]
    run = monitor.close()
    rows = run.table("routing_layers").query("metric == 'cv'")
    assert rows["step"].max() == STEPS
    assert run.table("alerts")["message"].tolist() == []
    assert (last["moescope/alerts"], last["moescope/collapsed"]) == (0, 0)
