"""The Monitor's alerts in trainings: a planted collapse is raised, a healthy training raises nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lab.tiny_training import tiny_config, tiny_training
from moescope.lab.training import FiniteWatch, Training
from moescope.routing.monitor import LoopMonitor, Thresholds

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
