"""SoME: every update by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from decoder.routers.builders import SecondRank, noise, small_router, tokens
from moescope.decoder.routers.some import SoME, key_cosine, quantile_of_used


def made(seed: int = 0, **changes: Any) -> SoME:
    router = small_router("some", seed, **changes)
    assert isinstance(router, SoME)
    return router


def flat(**changes: Any) -> SoME:
    """Three experts in two dimensions, keys at 0, 90 and 180 degrees; queries are handed in by `step`."""
    router = made(d_model=2, experts=3, **changes)
    router.direction_ED.copy_(torch.tensor([[1.0, 0], [0, 1], [-1, 0]]))
    return router


def step(router: SoME, queries: list[list[float]], chosen: list[list[int]]) -> None:
    router.remember(torch.tensor(queries), torch.tensor(chosen))
    router.after_step()


DIAGONAL = [0.6, 0.8]


# --- the choice


def test_scores_are_cosines_and_gates_a_softmax_at_temperature_over_the_chosen():
    router, x = made(), noise(7)
    routed = router(tokens(x))
    q = router.narrow(torch.nn.functional.gelu(router.wide(x))).detach().numpy()
    q = q / np.linalg.norm(q, axis=1, keepdims=True)
    scores = q @ router.direction_ED.numpy().T
    best = np.argsort(-scores, axis=1)[:, :2]
    assert np.array_equal(routed.chosen_TK, best)
    top = np.exp(np.take_along_axis(scores, best, 1) / 0.8)
    np.testing.assert_allclose(routed.gates_TK.detach(), top / top.sum(1, keepdims=True), rtol=1e-5)


def test_with_one_expert_a_token_its_gate_is_its_probability_among_all():
    routed = made(top_k=1)(tokens(noise(5)))
    torch.testing.assert_close(
        routed.gates_TK, (routed.selection_TE / 0.8).softmax(-1).amax(-1, keepdim=True)
    )


def test_a_weak_key_scores_less():
    router, x = made().eval(), noise(5)
    before = router(tokens(x)).selection_TE
    router.strength_E[1] = 0.5
    after = router(tokens(x)).selection_TE
    torch.testing.assert_close(after, before * torch.tensor([1, 0.5, 1, 1]))


def test_temperature_is_the_same_in_evaluation_unless_published_which_changes_gates_only():
    x = noise(9)
    for published, training, temperature in [(False, False, 0.8), (True, True, 0.8), (True, False, 0.5)]:
        routed = made(published_temperature=published).train(training)(tokens(x))
        chosen_scores = routed.selection_TE.gather(1, routed.chosen_TK)
        torch.testing.assert_close(routed.gates_TK, (chosen_scores / temperature).softmax(-1))
        assert torch.equal(routed.chosen_TK, made()(tokens(x)).chosen_TK)


def test_keys_begin_as_unit_vectors_that_point_anywhere():
    router = made(experts=200, d_model=64)
    torch.testing.assert_close(router.keys_ED.norm(dim=-1), torch.ones(200))
    cosines = router.keys_ED @ router.keys_ED.T
    off = cosines[~torch.eye(200, dtype=torch.bool)]
    assert off.mean().abs() < 0.01
    torch.testing.assert_close(off.std(), torch.tensor(1 / 8), rtol=0.05, atol=0)  # 1/sqrt(D)


def test_the_query_network_learns_from_the_text_and_keys_have_no_gradient():
    router = made()
    (router(tokens(noise(32))).gates_TK * noise(32, 2)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in router.parameters())
    assert {name for name, _ in router.named_parameters()} == {
        "wide.weight",
        "wide.bias",
        "narrow.weight",
        "narrow.bias",
    }


# --- usage


def test_usage_is_an_average_of_counts_and_bias_corrected_it_starts_at_them():
    router = flat()
    step(router, [DIAGONAL] * 3, [[0, 1], [0, 1], [0, 2]])
    torch.testing.assert_close(router.usage_E, torch.tensor([0.03, 0.02, 0.01]))
    torch.testing.assert_close(router.corrected_usage(), torch.tensor([3.0, 2, 1]))
    step(router, [DIAGONAL], [[0, 1]])
    torch.testing.assert_close(router.usage_E, torch.tensor([0.0397, 0.0298, 0.0099]))
    torch.testing.assert_close(router.corrected_usage(), torch.tensor([3.97, 2.98, 0.99]) / 1.99)


def test_counts_of_micro_batches_and_ranks_are_one_steps_counts():
    router = flat()
    router.ranks = SecondRank()
    router.remember(torch.tensor([DIAGONAL]), torch.tensor([[0, 1]]))
    step(router, [DIAGONAL], [[0, 2]])
    torch.testing.assert_close(router.corrected_usage(), torch.tensor([4.0, 2, 2]))
    whole = flat()
    step(whole, [DIAGONAL] * 4, [[0, 1], [0, 2]] * 2)
    torch.testing.assert_close(router.keys_ED, whole.keys_ED)


# --- attraction and peer pull, worked by hand


def test_attraction_pulls_each_chosen_key_towards_its_queries():
    router = flat(attraction=0.3, peer_pull=0.0)
    step(router, [DIAGONAL, [0.8, 0.6]], [[0, 1], [0, 1]])
    # u = 2, 2, 0: rate 0.3/3. K_0 = (1, 0) + 0.1 [(-0.4, 0.8) + (-0.2, 0.6)]; K_1 = (0, 1) + 0.1 [(0.6, -0.2)
    # + (0.8, -0.4)]
    expected = normalize(torch.tensor([[0.94, 0.14], [0.14, 0.94], [-1, 0]]), dim=-1)
    torch.testing.assert_close(router.keys_ED, expected)


def test_published_usage_is_not_corrected_so_that_the_first_step_overshoots():
    router = flat(attraction=0.3, peer_pull=0.0, published_usage=True)
    step(router, [DIAGONAL, [0.8, 0.6]], [[0, 1], [0, 1]])
    rate = 0.3 / 1.02  # u = 0.02
    expected = torch.tensor([[1 - 0.6 * rate, 1.4 * rate], [1.4 * rate, 1 - 0.6 * rate], [-1, 0]])
    torch.testing.assert_close(router.keys_ED, normalize(expected, dim=-1))
    torch.testing.assert_close(router.usage_E, torch.tensor([0.02, 0.02, 0]))


@pytest.mark.parametrize(("published", "beside_one", "beside_two"), [(False, 4, 4), (True, 3, 2)])
def test_peers_pull_each_other_by_the_more_used_one_or_the_less_used_one_as_published(
    published, beside_one, beside_two
):
    router = flat(attraction=0.0, peer_pull=0.6, published_peers=published)
    step(router, [DIAGONAL] * 3, [[0, 1], [0, 1], [0, 2]])  # u = 3, 2, 1; pairs 01 twice, 02 once
    one, two = 2 * 0.6 / beside_one, 0.6 / beside_two
    k = torch.tensor([[1.0, 0], [0, 1], [-1, 0]])
    expected = torch.stack(
        [
            k[0] + one * (k[1] - k[0]) + two * (k[2] - k[0]),
            k[1] + one * (k[0] - k[1]),
            k[2] + two * (k[0] - k[2]),
        ]
    )
    torch.testing.assert_close(router.keys_ED, normalize(expected, dim=-1))


def test_both_moves_start_from_the_keys_as_they_were():
    router = flat(attraction=0.3, peer_pull=0.6)
    step(router, [DIAGONAL], [[0, 1]])  # u = 1, 1: rates 0.15 and 0.3
    k0 = torch.tensor([1 - 0.15 * 0.4 - 0.3, 0.15 * 0.8 + 0.3])
    k1 = torch.tensor([0.15 * 0.6 + 0.3, 1 - 0.15 * 0.2 - 0.3])
    torch.testing.assert_close(router.keys_ED[:2], normalize(torch.stack([k0, k1]), dim=-1))


def test_sums_move_keys_as_one_token_at_a_time_would():
    router, x = made(experts=6, top_k=3, attraction=0.2, peer_pull=0.1), noise(40)
    before = router.keys_ED.double().numpy().copy()
    routed = router(tokens(x))
    q = router.query(x).detach().double().numpy()
    router.after_step()
    usage = np.bincount(routed.chosen_TK.flatten(), minlength=6).astype(float)
    moved = before.copy()
    for query, experts in zip(q, routed.chosen_TK.tolist(), strict=True):
        for i in experts:
            moved[i] += 0.2 / (1 + usage[i]) * (query - before[i])
            for j in experts:
                if j != i:
                    moved[i] += 0.1 / max(1 + usage[i], 1 + usage[j]) * (before[j] - before[i])
    np.testing.assert_allclose(
        router.keys_ED, moved / np.linalg.norm(moved, axis=1, keepdims=True), atol=1e-6
    )


# --- strength


def strengths(steps: int, start: list[float] | None = None, **options: Any) -> torch.Tensor:
    """Experts 0 and 1 are chosen in every step, 2 in the first one only."""
    router = flat(decay=0.1, **options)
    if start:
        router.strength_E.copy_(torch.tensor(start))
    for at in range(steps):
        step(router, [DIAGONAL] * 2, [[0, 1], [0, 2 if at == 0 else 1]])
    return router.strength_E


def test_after_the_given_steps_the_strength_of_hardly_used_keys_decays():
    torch.testing.assert_close(strengths(3, decay_after=3), torch.ones(3))
    torch.testing.assert_close(
        strengths(5, decay_after=3, decay_percentile=40.0), torch.tensor([1, 1, 0.9**2])
    )


def test_used_keys_grow_back_and_never_beyond_one():
    found = strengths(1, [0.5, 0.95, 1], decay_after=0, decay_percentile=0.0)
    torch.testing.assert_close(found, torch.tensor([0.5 / 0.9, 1, 1]))


def test_a_key_never_used_decays_and_the_percentile_is_that_of_the_used():
    router = made(d_model=2, experts=5, decay_after=0, decay=0.1, decay_percentile=50.0)
    step(router, [DIAGONAL] * 6, [[0, 1], [0, 1], [0, 2], [0, 1], [0, 2], [0, 1]])
    # counts 6, 4, 2, 0, 0: the median of the used is 4, of all it would be 2
    torch.testing.assert_close(router.strength_E, torch.tensor([1, 1, 0.9, 0.9, 0.9]))


def test_moves_turn_a_weak_key_without_strengthening_it():
    router = flat(attraction=0.3, peer_pull=0.0)
    router.strength_E[0] = 0.5
    step(router, [DIAGONAL], [[0, 1]])
    expected = torch.tensor([0.5, 0]) + 0.15 * (torch.tensor(DIAGONAL) - torch.tensor([0.5, 0]))
    torch.testing.assert_close(router.keys_ED[0], 0.5 * normalize(expected, dim=0))


def test_in_published_order_the_decay_does_nothing():
    torch.testing.assert_close(
        strengths(5, decay_after=3, decay_percentile=40.0, published_order=True), torch.ones(3)
    )


def test_keys_too_weak_begin_anew_where_a_token_asked_if_respawn_is_on():
    for respawn in (True, False):
        router = made(respawn=respawn, attraction=0.0, peer_pull=0.0)
        router.strength_E[2] = 0.05
        x, mask = noise(12), torch.arange(12) % 2 > 0
        before = router.direction_ED.clone()
        router(tokens(x, mask))
        router.after_step()
        asked = (router.query(x[mask]) @ router.direction_ED[2]).max()
        assert (asked > 1 - 1e-5) == respawn, "the new key must be one of the real tokens' queries"
        torch.testing.assert_close(router.strength_E, torch.tensor([1, 1, 1.0 if respawn else 0.05, 1]))
        torch.testing.assert_close(router.direction_ED[[0, 1, 3]], before[[0, 1, 3]])


def test_respawned_keys_are_not_all_the_same_query():
    router = made(respawn=True, attraction=0.0, peer_pull=0.0)
    router.strength_E.fill_(0.05)
    router(tokens(noise(40)))
    router.after_step()
    assert (router.direction_ED @ router.direction_ED.T).fill_diagonal_(0).max() < 0.999


# --- controls


def test_frozen_keys_stay_while_usage_is_counted():
    router = made(frozen_keys=True, decay_after=0, decay=0.5)
    before = router.keys_ED.clone()
    for _ in range(3):
        router(tokens(noise(20)))
        router.after_step()
    assert torch.equal(router.keys_ED, before)
    assert router.usage_E.sum() > 0


def test_without_peer_pull_only_queries_move_keys():
    for beta, moves in [(0.0, False), (0.5, True)]:
        router = flat(attraction=0.0, peer_pull=beta)
        before = router.keys_ED.clone()
        step(router, [DIAGONAL], [[0, 1]])
        assert torch.equal(router.keys_ED, before) != moves


def test_peer_pull_drives_keys_together_where_attraction_to_scattered_queries_does_not():
    found = {}
    for beta in (0.0, 0.05):
        router = made(experts=8, d_model=32, peer_pull=beta)
        for at in range(150):
            router(tokens(noise(64, 32, seed=at)))
            router.after_step()
        cosines = router.direction_ED @ router.direction_ED.T
        found[beta] = float(cosines.fill_diagonal_(0).sum() / 56)
    assert found[0.05] > found[0.0] + 0.3


def test_the_mean_cosine_of_keys_is_noted_whatever_their_strength():
    router = made(experts=6)
    router.strength_E[3] = 0.2
    note = router(tokens(noise(4))).diagnostics["key_cosine"]
    cosine, spread = key_cosine(router.keys_ED.numpy())
    assert float(note.value) == pytest.approx(cosine, abs=1e-6)
    assert note[1:] == (0.0, 1.0, pytest.approx(spread))


def test_strengths_are_noted_and_the_share_of_weak_keys_beside_what_the_percentile_takes():
    router = made(experts=8, decay_after=5, decay_percentile=20.0)
    router.strength_E[2:4] = torch.tensor([0.5, 0.9])
    diagnostics = router(tokens(noise(4))).diagnostics
    assert float(diagnostics["key_strength"].value) == pytest.approx((6 + 0.5 + 0.9) / 8)
    assert float(diagnostics["weakened_keys"].value) == 0.25
    assert float(diagnostics["weakened_keys"].chance) == 0, "the decay has not begun"
    router.steps.fill_(6)
    usage = torch.rand(8) + 0.1
    below = (usage < torch.quantile(usage, 0.2)).float().mean()
    assert float(below) == 0.25
    assert float(router(tokens(noise(4))).diagnostics["weakened_keys"].chance) == float(below)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 513])
@pytest.mark.parametrize("unused", [0.0, 0.4, 1.0])
def test_the_quantile_of_used_keys_is_torch_s_own_bit_for_bit(n: int, unused: float):
    generator = torch.Generator().manual_seed(n)
    usage = torch.rand(n, generator=generator) * 100
    usage[torch.rand(n, generator=generator) < unused] = 0
    for share in (0.0, 0.05, 0.37, 1.0):
        expected = torch.nanquantile(torch.where(usage > 0, usage, torch.nan), share)
        found = quantile_of_used(usage, share)
        assert torch.equal(found, expected) or (found.isnan() and expected.isnan())


# --- padding, evaluation


def test_pads_move_nothing_and_are_counted_nowhere_unless_published():
    x, mask = noise(30), torch.arange(30) % 3 > 0
    found = {}
    for name, options, given in [
        ("alone", {}, tokens(x[mask])),
        ("among", {}, tokens(x, mask)),
        ("published", {"published_pads": True}, tokens(x, mask)),
        ("as text", {}, tokens(x)),
    ]:
        router = made(**options)
        routed = router(given)
        router.after_step()
        found[name] = (router.keys_ED, router.usage_E)
        assert (routed.chosen_TK[~given.mask_T] == -1).all()
        assert (routed.gates_TK[~given.mask_T] == 0).all()
    torch.testing.assert_close(found["among"], found["alone"])
    torch.testing.assert_close(found["published"], found["as text"])
    assert not torch.allclose(found["published"][0], found["among"][0], atol=1e-4)


def test_a_batch_of_pads_alone_moves_nothing():
    router = made(respawn=True)
    before = router.keys_ED.clone()
    router(tokens(noise(4), torch.zeros(4, dtype=torch.bool)))
    router.after_step()
    torch.testing.assert_close(router.keys_ED, before)


# --- soME's options: each changes what it should, and only that; what makes no sense is refused

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
