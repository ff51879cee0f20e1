"""Trainings that several processes may share.

As a script it is what each process that torchrun starts does: all of CASES, into one file.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.tiny_training import TINY
from moescope.decoder.model import LabModel
from moescope.decoder.ranks import Ranks, process_group
from moescope.decoder.vocabulary import Bytes
from moescope.lab.batches import TokenRows
from moescope.lab.config import LabConfig, with_router
from moescope.lab.training import Data, FiniteWatch, Training, load_state
from moescope.routing.monitor import LoopMonitor
from moescope.run import Run
from moescope.verbs import load_verb

STEPS = 6
WORDS = [
    "for",
    "in",
    "the",
    "while",
    "of",
    "one",
    "a",
    "to",
    "let",
    "be",
    "not",
    "with",
    "expert",
    "token",
    "route",
    "return",
    "print",
    "import",
    "def",
    "3",
    "14",
    "159",
    "(",
    ")",
    "=",
    "+",
    ":",
    "\n",
]


@dataclass(frozen=True)
class Case:
    router: str
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "packed"
    micro_batches: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    control: bool = False  # whether it is trained by ranks that look at their own rows alone, too


PADDED = "documents"
FROZEN = {"experts": 8, "block": "some", "frozen_experts": True}
CASES = {
    "switch_top1": Case("switch_top1"),
    "top2": Case("top2"),
    "loss_free": Case("loss_free"),
    "hash": Case("hash"),
    "dense": Case("dense"),
    "some": Case("some"),
    "expert_choice": Case("expert_choice", control=True),
    "spectra": Case("spectra", control=True),
    "switch_top1, capacity": Case("switch_top1", {"capacity_factor": 0.9}, control=True),
    "topk of 3, capacity": Case("topk", {"capacity_factor": 1.0}, model={"top_k": 3}),
    "top2, padded": Case("top2", {"balance": 1.0, "z": 0.1}, PADDED, control=True),
    "top2, capacity, padded, micro-batches": Case("top2", {"capacity_factor": 0.9}, PADDED, 2),
    "expert_choice, padded, micro-batches": Case("expert_choice", {}, PADDED, 2),
    "expert_choice that takes nearly everybody": Case("expert_choice", {"capacity_factor": 1.9}, PADDED),
    "spectra, padded, micro-batches": Case("spectra", {}, PADDED, 2),
    "spectra, losses alone, padded": Case(
        "spectra",
        {
            "orthogonality_weight": 10.0,
            "entropy_weight": 0.3,
            "speciality_weight": 1.0,
            "quota": False,
            "repulsion": "none",
        },
        PADDED,
        control=True,
    ),
    "spectra of 1 without GRU": Case("spectra", {"gru": False, "repulsion": "published"}, model={"top_k": 1}),
    "spectra, plain": Case("spectra", {"plain": True}),
    "some, padded, micro-batches, respawn": Case(
        "some",
        {"respawn": True, "decay": 0.96, "decay_after": 1, "decay_percentile": 60.0},
        PADDED,
        2,
        FROZEN,
        control=True,
    ),
    "top2, tied embeddings, padded, micro-batches": Case("top2", {}, PADDED, 2, {"tie_embeddings": True}),
    "some, frozen experts": Case("some", {}, model={**FROZEN, "frozen_dtype": "bfloat16", "experts": 5}),
}


@dataclass(frozen=True)
class OwnRowsAlone(Ranks):
    """What must not be.

    Sums over ranks after a step, but choices and means of a pass from every rank's own rows.
    """

    def sum(self, amount: Tensor) -> Tensor:
        return amount if torch.is_grad_enabled() else super().sum(amount)

    def sum_with_gradients(self, amount: Tensor) -> Tensor:
        return amount

    def gather_rows(self, rows_T: Tensor) -> Tensor:
        return rows_T

    def local_rows(self, whole_T: Tensor) -> Tensor:
        return whole_T

    def select_rows(self, rows_T: Tensor, numbers_N: Tensor) -> Tensor:
        return rows_T[numbers_N]

    def tokens_a_rank(self, mask_T: Tensor) -> Tensor:
        return mask_T.sum().clamp(min=1)


def texts() -> dict[str, list[str]]:
    """Sentences of very different lengths, so that padded rows are, too."""
    draw = random.Random(5)
    return {
        domain: [" ".join(draw.choices(words, k=draw.choice((1, 2, 3, 12)))) for _ in range(150)]
        for domain, words in (("a", WORDS), ("b", WORDS[12:]))
    }


def config_of(case: Case) -> LabConfig:
    config = with_router(TINY, case.router)
    model = replace(config.model, router_options=case.options, **case.model)
    rhythm = {"steps": STEPS, "checkpoint_every": 3, "evaluate_every": 3}
    train = replace(config.train, micro_batches=case.micro_batches, **rhythm)
    return replace(config, model=model, train=train)


def training_of(case: Case, ranks: Ranks) -> Training:
    config = config_of(case)
    rows = TokenRows.of(texts(), Bytes(), config.train.sequence_length, case.layout)
    torch.manual_seed(0)
    return Training(config, LabModel(config.model), Data(rows, rows.sample(20)), ranks=ranks)


def curve(case: Case, ranks: Ranks, own_rows_alone: bool = False) -> list[list[float]]:
    """Language-model loss, auxiliary loss and gradient norm of every step.

    Then the sums of squares of what routers have learned.
    """
    training = training_of(case, ranks)
    if own_rows_alone:
        for router in training.model.routers:
            router.ranks = OwnRowsAlone(ranks.rank, ranks.world)
    training.model.train()
    watch = FiniteWatch(training.model)
    for _ in range(STEPS):
        training.one_step(watch)
    watch.check()
    watch.close()
    steps = ranks.sum(torch.stack(training.logged).double()).tolist()
    learned = [tensor for router in training.model.routers for tensor in router.state_dict().values()]
    return [*steps, [float(tensor.double().square().sum()) for tensor in learned]]


# --- a whole training, with its Monitor, evaluations and checkpoints


class Killed(Exception):
    pass


def whole(case: Case, ranks: Ranks, folder: Path, killed_after: int = 0) -> Run | None:
    """The run, on the first rank.

    One that is killed leaves its last state, which the next call goes on from.
    """
    training = training_of(case, ranks)
    if state := load_state(folder / "states"):
        training.restore(state)
    ranks.wait()  # nobody writes a state that another has still to look for

    def advance(label: str, amount: int) -> None:
        if training.step == killed_after:
            raise Killed

    monitor = LoopMonitor(folder / "run", every=3, gradients_every=2, overwrite=state is None)
    monitor.watch(training.model, training.step, verb=load_verb("train"), identity={"arguments": {}})
    try:
        training.run(
            monitor,
            folder / "states",
            lambda model, step: torch.save(model.state_dict(), folder / "saved.pt"),
            advance,
        )
        return monitor.close()
    except Killed:
        return None
    finally:
        monitor.stop()


WHOLE = {
    "expert_choice": Case("expert_choice"),
    "spectra": Case(
        "spectra", {"evaluation": "published"}
    ),  # Sinkhorn in evaluation, too, which the first rank does alone
    "top2, padded": Case("top2", {"capacity_factor": 0.9}, PADDED, 2),
    "spectra, micro-batches": Case("spectra", micro_batches=2),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with process_group("cpu") as ranks:
        found = {name: curve(case, ranks) for name, case in CASES.items()}
        wrong = {name: curve(case, ranks, True) for name, case in CASES.items() if case.control}
        for name, case in WHOLE.items():
            whole(case, ranks, folder / "whole" / name)
            whole(case, ranks, folder / "resumed" / name, killed_after=4)
            torch.manual_seed(99)  # whatever the process has drawn since
            whole(case, ranks, folder / "resumed" / name)
        if ranks.first:
            (folder / "curves.json").write_text(json.dumps({"right": found, "own rows alone": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
