"""nano learns, by a margin that a broken router does not reach."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from lab.tiny_training import tiny_training, trained
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS, Routed, RouterInput
from moescope.decoder.routers.topk import Top2
from moescope.decoder.vocabulary import Bytes
from moescope.lab.batches import TokenRows, unigram_loss
from moescope.lab.config import LabConfig, preset_config
from moescope.lab.corpus import embedded_corpus
from moescope.lab.training import Data, Training

SHORT, WHOLE = 0.45, 1.65  # nats below the unigram model, of 60 small steps and of the preset itself


class AtRandom(Top2):
    """Broken: whom a token is sent to has nothing to do with it."""

    name = "at_random"

    def forward(self, given: RouterInput) -> Routed:
        routed = super().forward(given)
        return replace(routed, chosen_TK=torch.randint_like(routed.chosen_TK, 0, self.config.experts))


class Nowhere(Top2):
    """Broken: no token is sent to anyone."""

    name = "nowhere"

    def forward(self, given: RouterInput) -> Routed:
        routed = super().forward(given)
        return replace(routed, chosen_TK=torch.full_like(routed.chosen_TK, -1), gates_TK=0 * routed.gates_TK)


@pytest.fixture(autouse=True)
def broken_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTERS, "at_random", AtRandom)
    monkeypatch.setitem(ROUTERS, "nowhere", Nowhere)


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


@pytest.mark.slow
@pytest.mark.parametrize(("router", "learns"), [("top2", True), ("at_random", False), ("nowhere", False)])
def test_nano_itself_beats_the_unigram_model_only_with_a_router_that_works(router: str, learns: bool):
    config = with_router(preset_config("nano"), router)
    corpus = embedded_corpus()
    rows = [
        TokenRows.of(side, Bytes(), config.train.sequence_length)
        for side in (corpus.train, corpus.validation)
    ]
    torch.manual_seed(0)
    training = Training(config, LabModel(config.model), Data(rows[0], rows[1].sample(60)))
    from moescope.lab.evaluation import evaluate
    from moescope.lab.training import FiniteWatch

    watch = FiniteWatch(training.model)
    training.evaluations.append(asdict(evaluate(training.model, rows[1].sample(60), 0, 16, "cpu", "float32")))
    training.model.train()
    for _ in range(config.train.steps):
        training.one_step(watch)
    watch.check()
    training.evaluations.append(
        asdict(evaluate(training.model, rows[1].sample(60), 300, 16, "cpu", "float32"))
    )
    assert (below_unigram(training) > WHOLE) == learns
