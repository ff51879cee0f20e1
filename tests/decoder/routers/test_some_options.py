"""SoME's options: each changes what it should, and only that; what makes no sense is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoder.routers.builders import noise, tokens
from decoder.routers.test_some import made
from moescope.decoder.routers.some import SoME

CHANGES = [
    ({"temperature": 0.3}, {"gates", "evaluated"}),
    ({"attraction": 0.1}, {"directions"}),
    ({"peer_pull": 0.0}, {"directions"}),
    ({"usage_decay": 0.5}, {"usage", "directions", "strengths"}),  # who is hardly used follows from usage
    ({"decay": 0.1}, {"strengths"}),
    ({"decay_after": 100}, {"strengths"}),
    ({"decay_percentile": 90.0}, {"strengths"}),
    ({"respawn": True}, {"directions", "strengths"}),
    ({"frozen_keys": True}, {"directions", "strengths"}),
    ({"published_usage": True}, {"directions"}),
    ({"published_peers": True}, {"directions"}),
    ({"published_order": True}, {"strengths"}),
    ({"published_pads": True}, {"usage", "directions"}),
    ({"published_temperature": True}, {"evaluated"}),
]


def one_step(**options: Any) -> dict[str, torch.Tensor]:
    """Choices, gates and state of one training step with padding, late in a training.

    And gates of the evaluation before it.
    """
    router = made(experts=8, **{"decay_after": 0, "decay_percentile": 30.0, **options})
    router.usage_E.copy_(torch.arange(8) ** 2 / 10)
    router.strength_E.copy_(torch.tensor([0.05, 0.8, 0.9, 1, 1, 1, 1, 1]))
    router.steps.fill_(50)
    given = tokens(noise(30), torch.arange(30) % 3 > 0)
    evaluated = router.eval()(given)
    routed = router.train()(given)
    router.after_step()
    return {
        "chosen": routed.chosen_TK,
        "gates": routed.gates_TK,
        "evaluated": evaluated.gates_TK,
        "usage": router.usage_E,
        "directions": router.direction_ED,
        "strengths": router.strength_E,
    }


@pytest.mark.parametrize(("option", "expected"), CHANGES, ids=[next(iter(option)) for option, _ in CHANGES])
def test_every_option_changes_what_it_should_and_only_that(option, expected):
    usual, changed = one_step(), one_step(**option)
    assert {name for name in usual if not torch.equal(usual[name], changed[name])} == expected


def test_every_option_stands_in_the_list_of_changes():
    assert [next(iter(option)) for option, _ in CHANGES] == list(SoME.OPTIONS)
