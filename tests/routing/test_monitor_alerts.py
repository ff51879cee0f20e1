"""Alerts come with step and layer when a threshold is first crossed, and not by luck."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moescope.errors import BadInput
from moescope.routing.counts import SUMS, LayerCounts
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


def test_max_load_is_raised_above_five_times_the_mean_and_not_at_it():
    assert kinds(watch(max_unused=1.0), window([500, 50, 50, 50, 50, 50, 50, 0])) == []  # exactly 5
    assert kinds(watch(max_unused=1.0), window([508, 50, 50, 50, 50, 50, 42, 0])) == [
        ("max_load", None, 5.08)
    ]
    assert kinds(watch(max_load=4.0), window([500, 50, 50, 50, 50, 50, 50, 0])) == [("max_load", None, 5.0)]


def test_unused_is_raised_above_thirty_per_cent():
    assert kinds(watch(), window([200, 100, 100, 100, 100, 200, 0, 0])) == []  # 25 %
    assert kinds(watch(), window([200, 200, 100, 100, 200, 0, 0, 0])) == [("unused", None, 0.375)]


def test_loads_of_a_few_tokens_are_not_judged():
    few = [FEWEST_LOAD * 8 - 1, 0, 0, 0, 0, 0, 0, 0]
    assert kinds(watch(), window(few)) == []
    assert {kind for kind, *_ in kinds(watch(), window([few[0] + 1, *few[1:]]))} == {"max_load", "unused"}


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
    assert {kind for kind, *_ in kinds(sure, collapsed, 2)} == {"max_load", "unused"}
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
    kinds(watcher, window([100, 0, *EVEN[2:]], nan=True), 10)
    other = watch(dead_steps=5)
    other.restore(json.loads(json.dumps(watcher.state())))
    assert other.active == watcher.active == {(7, 1, "dead"), (7, None, "nan")}
    assert kinds(other, window([100, 0, *EVEN[2:]], nan=True), 20) == []


@pytest.mark.parametrize("bad", [{"dead_steps": 0}, {"max_load": -1.0}, {"min_entropy": float("nan")}])
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

    alerts = train(tmp_path / "run", collapse, dead_steps=4, max_load=1.9).table("alerts")
    layer_1 = alerts[alerts["layer"] == 1]
    first = layer_1[layer_1["step"] == 4].set_index("kind")
    assert set(first.index) == {"max_load", "unused", "entropy"}
    assert first.loc["max_load", "value"] == 2.0  # n/k: all tokens take the same two of four
    assert first.loc["unused", "value"] == 0.5
    dead = layer_1[layer_1["kind"] == "dead"]
    assert dead[["step", "expert"]].to_numpy().tolist() == [[6, 2], [6, 3]]
    assert set(alerts["layer"]) == {1}
    assert set(alerts["layer_name"]) == {"model.layers.1.mlp"}
    assert "step 4, layer 1: 50% of its experts have no token (limit 30%)" in caplog.text


def test_nan_weights_are_raised_in_the_layer_and_those_behind_it(tmp_path):
    alerts = train(tmp_path / "run", lambda block: block.gate.weight.fill_(float("nan"))).table("alerts")
    nan = alerts[alerts["kind"] == "nan"]
    assert nan[["step", "layer"]].to_numpy().tolist() == [[4, 1], [4, 2]]
    assert nan["value"].isna().all()
