"""SPECTRA's options: each changes what it should, and only that; what makes no sense is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoder.routers.builders import noise, tokens
from decoder.routers.test_spectra import R, made, travelled
from moescope.decoder.routers.spectra import ABLATIONS, Spectra

LOSSES = ("orthogonality", "entropy", "speciality")
DOWN_FROM = {  # what follows from a changed part
    "similarity": {"similarity", "logits", "chosen", "dropped", "evaluated", "entropy"},
    "logits": {"logits", "chosen", "dropped", "evaluated", "entropy"},
}
CHANGES = [
    ({"gru": False}, {"trajectories"} | DOWN_FROM["similarity"]),
    ({"expression": False}, {"expressions", "gram", "orthogonality", "speciality"} | DOWN_FROM["similarity"]),
    ({"repulsion": "none"}, DOWN_FROM["logits"]),
    ({"repulsion": "published"}, DOWN_FROM["logits"]),
    ({"repulsion_weight": 2.0}, DOWN_FROM["logits"]),
    ({"penalty_sign": "published"}, DOWN_FROM["logits"]),
    ({"saturation_weight": 50.0}, DOWN_FROM["logits"]),
    ({"saturation_start": 0.0}, DOWN_FROM["logits"]),
    ({"epsilon": 0.5}, DOWN_FROM["logits"]),
    ({"iterations": 1}, {"chosen", "dropped"}),
    ({"quota": False}, {"chosen", "dropped"}),
    ({"capacity_factor": 0.7}, {"chosen", "dropped"}),
    ({"evaluation": "published"}, {"evaluated"}),
    ({"direction_decay": 0.5}, {"gram", "orthogonality", "logits", "chosen", "dropped", "entropy"}),
    ({"potential_decay": 0.5}, set()),  # of what one step leaves behind only
    ({"orthogonality_weight": 0.0}, {"orthogonality"}),
    ({"entropy_weight": 0.0}, {"entropy"}),
    ({"speciality_weight": 0.0}, {"speciality"}),
]


def reading(router: Spectra) -> dict[str, Any]:
    """What every part gives on the same tokens, in training and in evaluation."""
    given = tokens(torch.cat([noise(90) + 1, 3 * noise(6)]), carried_TR=noise(96, R))
    router.train()
    h = router.trajectories(router.depth_state(given))
    v = router.expressions(given.x_TD)
    routed = router(given)
    gram = router.gram(router.sum_expressions(given.x_TD, given.mask_T), given.mask_T.sum())
    router.accumulated.clear()
    evaluated = router.eval()(given)
    parts = {
        "trajectories": h,
        "expressions": v,
        "similarity": router.similarity(h, v),
        "gram": gram,
        "logits": routed.logits_TE,
        "chosen": routed.chosen_TK,
        "dropped": routed.dropped_T,
        "evaluated": evaluated.chosen_TK,
        **{name: routed.losses.get(name) for name in LOSSES},
    }
    return {name: None if part is None else part.detach() for name, part in parts.items()}


@pytest.mark.parametrize(("option", "expected"), CHANGES, ids=[str(option) for option, _ in CHANGES])
def test_every_option_changes_what_it_should_and_only_that(option, expected):
    # similarities of random weights are small, so the penalty on large ones must begin early to be seen
    usual, changed = travelled(saturation_start=0.05), made(**{"saturation_start": 0.05, **option})
    own = changed.state_dict()
    fitting = {
        name: value
        for name, value in usual.state_dict().items()
        if name in own and own[name].shape == value.shape
    }
    changed.load_state_dict(fitting, strict=False)
    if usual.shared is not None and changed.shared is not None:
        changed.shared.load_state_dict(usual.shared.state_dict())
    before, after = reading(usual), reading(changed)
    different = {name for name in before if not same(before[name], after[name])}
    may_stay = {
        "chosen",
        "dropped",
        "evaluated",
    }  # choices follow from changed logits, but need not all change
    assert different <= expected
    assert expected - different <= may_stay
    if expected and expected <= may_stay:
        assert different & expected


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def test_every_option_stands_in_the_list_of_changes_or_has_a_test_of_its_own():
    assert {name for option, _ in CHANGES for name in option} | {"router_dim", "plain"} == set(
        Spectra.OPTIONS
    )


def test_a_faster_average_of_potentials_follows_faster():
    slow, fast = made(), made(potential_decay=0.5)
    for router in (slow, fast):
        router(tokens(noise(64) + 1))
        router.after_step()
    torch.testing.assert_close(fast.potential_E, 5 * slow.potential_E)
    torch.testing.assert_close(fast.direction_ER, slow.direction_ER)


def test_router_dim_is_the_width_of_state_and_expressions():
    router = made(router_dim=96)
    assert router(tokens(noise(3))).carried_TR.shape == (3, 96)
    assert router.expressions(noise(3)).shape == (3, 4, 96)


def test_taken_all_away_a_linear_softmax_top_k_without_balancing_is_left():
    router = made(plain=True)
    assert router.shared is None
    assert [name for name, _ in router.named_parameters()] == ["linear.weight"]
    assert not list(router.buffers())
    x = noise(50) + 1
    logits = x @ router.linear.weight.T
    routed = router(tokens(x))
    top = logits.softmax(-1).topk(2)
    assert torch.equal(routed.chosen_TK, top.indices)
    torch.testing.assert_close(routed.gates_TK, top.values / top.values.sum(-1, keepdim=True))
    assert routed.losses == {}
    assert routed.dropped_T is None
    router.after_step()
    torch.testing.assert_close(router.eval()(tokens(x)).gates_TK, routed.gates_TK)


def test_each_ablation_builds_and_names_an_option_that_differs_from_its_default():
    for options in ABLATIONS.values():
        assert all(Spectra.OPTIONS[name] != value for name, value in options.items())
        made(**options)(tokens(noise(8)))
