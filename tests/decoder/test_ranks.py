"""One process: nothing is copied, nobody is asked.

What two really do together is in test_shared_training.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoder.routers.builders import SecondRank, noise, small_router, tokens
from moescope.decoder.ranks import ALONE, Ranks, check_gpus
from moescope.decoder.routers import ROUTERS
from moescope.errors import BadInput

WHOLE_BATCH = [
    ("expert_choice", {}),
    ("spectra", {}),
    ("top2", {"capacity_factor": 0.8}),
    ("switch_top1", {"capacity_factor": 0.8, "top_k": 1}),
]


class Silence(Ranks):
    """Ranks that must not be asked."""

    def sum(self, amount: Tensor) -> Tensor:
        raise AssertionError("a collective that not every rank would join")

    gather_rows = sum_with_gradients = broadcast = tokens_per_rank = sum


def test_alone_every_answer_is_what_was_given():
    rows = noise(6)
    for answer in (
        ALONE.sum(rows),
        ALONE.sum_with_gradients(rows),
        ALONE.gather_rows(rows),
        ALONE.local_rows(rows),
        ALONE.broadcast(rows),
    ):
        assert answer is rows
    assert torch.equal(ALONE.select_rows(rows, torch.tensor([4, 1])), rows[[4, 1]])
    assert ALONE.tokens_per_rank(torch.tensor([True, True, False])) == 2
    assert ALONE.tokens_per_rank(torch.tensor([False])) == 1


def test_more_processes_than_gpus_are_refused_with_the_number_that_would_do():
    check_gpus(1, 2)
    with pytest.raises(
        BadInput, match=r"more processes than this machine's 1 GPU; pass --nproc-per-node 1, or --device cpu"
    ):
        check_gpus(1, 1)


def test_tokens_per_rank_are_of_all_ranks_and_never_0():
    assert SecondRank().tokens_per_rank(torch.tensor([True, False])) == 1
    assert Ranks.tokens_per_rank(SecondRank(), torch.tensor([False])) == 0.5  # never 0


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in ROUTERS), ("spectra", {"evaluation": "published"})]
)
def test_evaluation_asks_no_other_rank(name: str, options: dict[str, str]):
    fixed = {"top_k": ROUTERS[name].fixed_top_k or 2}
    router = small_router(name, **fixed, **options).eval()
    router.ranks = Silence(0, 2)
    router(tokens(noise(12)))


@pytest.mark.parametrize(("name", "options"), WHOLE_BATCH)
def test_training_asks_them(name: str, options: dict[str, float]):
    router = small_router(name, **options).train()
    router.ranks = Silence(0, 2)
    with pytest.raises(AssertionError, match="a collective"):
        router(tokens(noise(12)))


@pytest.mark.parametrize(("name", "options"), WHOLE_BATCH)
def test_beside_a_rank_with_the_same_tokens_a_router_decides_as_on_the_batch_twice(
    name: str, options: dict[str, float]
):
    x = noise(24) + 1
    shared, alone = (small_router(name, **options).train() for _ in range(2))
    shared.ranks = SecondRank()
    ours, whole = shared(tokens(x)), alone(tokens(torch.cat([x, x])))
    torch.testing.assert_close(ours.gates_TK, whole.gates_TK[:24])
    assert torch.equal(ours.chosen_TK, whole.chosen_TK[:24])
    assert {name: float(loss.detach()) for name, loss in ours.losses.items()} == pytest.approx(
        {name: float(loss.detach()) for name, loss in whole.losses.items()}
    )
