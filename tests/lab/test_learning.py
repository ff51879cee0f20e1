"""nano learns, by a margin that a broken router does not reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.tiny_training import tiny_training, trained
from moescope.decoder.routers import ROUTERS, Routed, RouterInput
from moescope.decoder.routers.topk import Top2
from moescope.decoder.vocabulary import Bytes
from moescope.lab.batches import unigram_loss
from moescope.lab.config import LabConfig, preset_config
from moescope.lab.training import Training

SHORT = 0.45  # nats below the unigram model


class AtRandom(Top2):
    """Broken: whom a token is sent to has nothing to do with it."""

    name = "at_random"

    def forward(self, given: RouterInput) -> Routed:
        routed = super().forward(given)
        return replace(routed, chosen_TK=torch.randint_like(routed.chosen_TK, 0, self.config.experts))


@pytest.fixture(autouse=True)
def broken_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTERS, "at_random", AtRandom)


def with_router(config: LabConfig, router: str) -> LabConfig:
    return replace(config, model=replace(config.model, router=router))


def below_unigram(training: Training) -> float:
    unigram = unigram_loss(training.data.train, training.data.validation, Bytes().size)[""]
    first, last = training.evaluations[0]["loss"], training.evaluations[-1]["loss"]
    assert last < first - 2  # an untrained model is at log 260
    return float(unigram - last)


@pytest.mark.parametrize(("router", "learns"), [("top2", True), ("at_random", False)])
def test_sixty_small_steps_of_nano_beat_the_unigram_model_only_with_a_router_that_works(
    router: str, learns: bool, tmp_path: Path
):
    nano = with_router(preset_config("nano"), router)
    few = replace(
        nano.train,
        steps=60,
        batch_size=8,
        sequence_length=64,
        warmup=10,
        evaluate_every=60,
        checkpoint_every=60,
        evaluation_rows=60,
    )
    training = tiny_training(replace(nano, train=few))
    trained(training, tmp_path)
    assert (below_unigram(training) > SHORT) == learns
