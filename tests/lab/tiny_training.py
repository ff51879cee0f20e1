"""A training of seconds: a model, a text and a loop small enough for every test to run its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moescope.decoder.config import ModelConfig
from moescope.decoder.model import LabModel
from moescope.decoder.vocabulary import Bytes
from moescope.lab.batches import TokenRows
from moescope.lab.config import DataConfig, LabConfig, TrainConfig, with_router
from moescope.lab.corpus import Corpus, embedded_corpus
from moescope.lab.training import Data, Training
from moescope.routing.monitor import LoopMonitor
from moescope.run import Run
from moescope.verbs import load_verb

TINY = LabConfig(
    ModelConfig(d_model=32, layers=2, heads=2, d_ff=32, experts=4, max_positions=64),
    DataConfig(max_bytes=150_000),
    TrainConfig(
        steps=12,
        batch_size=8,
        sequence_length=32,
        learning_rate=0.01,
        warmup=3,
        evaluate_every=4,
        checkpoint_every=4,
        evaluation_rows=20,
    ),
)
SHAPE: dict[str, Any] = {
    "d_model": 16,
    "layers": 2,
    "heads": 2,
    "d_ff": 16,
    "experts": 4,
    "max_positions": 64,
}
OF_LOSSES = "train_loss lm_loss aux_loss validation_loss learning_rate gradient_norm"
LOSSES = ["step", "tokens", *OF_LOSSES.split()]
STEPS = {"steps": 2, "batch_size": 4, "sequence_length": 16, "evaluate_every": 1, "checkpoint_every": 2}
TOML = """
[model]
d_model = 32
layers = 2
heads = 2
d_ff = 32
experts = 4
max_positions = 64
[data]
max_bytes = 150_000
[train]
steps = {steps}
batch_size = 8
sequence_length = 32
learning_rate = 0.01
warmup = 3
evaluate_every = 4
checkpoint_every = 4
evaluation_rows = 20
"""
_CORPUS: list[Corpus] = []


def tiny_corpus() -> Corpus:
    if not _CORPUS:
        _CORPUS.append(embedded_corpus(30_000))
    return _CORPUS[0]


def tiny_config(router: str = "top2", options: dict[str, Any] | None = None, **train: Any) -> LabConfig:
    config = with_router(TINY, router)
    model = replace(config.model, router_options=options or {})
    return replace(config, model=model, train=replace(config.train, **train))


def tiny_training(config: LabConfig) -> Training:
    rows = [
        TokenRows.of(side, Bytes(), config.train.sequence_length)
        for side in (tiny_corpus().train, tiny_corpus().validation)
    ]
    torch.manual_seed(config.train.seed)
    return Training(
        config, LabModel(config.model), Data(rows[0], rows[1].sample(config.train.evaluation_rows))
    )


def trained(training: Training, folder: Path, **monitor: Any) -> Run:
    watching = LoopMonitor(folder / "run", every=4, **monitor).watch(
        training.model, training.step, verb=load_verb("train"), identity={"arguments": {}}
    )
    try:
        training.run(watching, folder / "states", lambda model, step: None)
        run = watching.close()
    finally:
        watching.stop()
    assert run is not None
    return run
