"""SPECTRA: every part by hand or against an oracle."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from scipy.stats import entropy
from torch._dynamo.testing import CompileCounter

from decoder.routers.builders import SecondRank, noise, small_config, small_router, tokens
from moescope.decoder.model import LabModel, MoE
from moescope.decoder.routers import contract, spectra
from moescope.decoder.routers.spectra import ABLATIONS, Spectra, column_error

R = 64
QUIET = {"orthogonality_weight": 0.0, "entropy_weight": 0.0, "speciality_weight": 0.0}


def made(seed: int = 0, **changes: Any) -> Spectra:
    router = small_router("spectra", seed, **changes)
    assert isinstance(router, Spectra)
    return router


def travelled(**changes: Any) -> Spectra:
    """A router whose moving averages are no longer 0."""
    router = made(**changes)
    for step in range(5):
        router(tokens(noise(64, seed=step) + 1))
        router.after_step()
    return router


# --- the cost, by hand


def test_cost_of_a_case_worked_by_hand():
    router = made(epsilon=1.0, repulsion_weight=0.5, saturation_weight=0.5, saturation_start=0.7, experts=2)
    s = torch.tensor([[0.9, 0.9 - math.log(3)]])  # p = 3/4, 1/4
    gram = torch.tensor([[1.0, -0.6], [-0.6, 1]])
    # C_0 = -0.9 + 0.5 * 0.36 / 4 + 0.5 * 0.2^2, C_1 = 0.1986 + 0.5 * 0.36 * 3/4 (|s_1| = 0.1986 is below tau)
    expected = [0.9 - 0.045 - 0.02, (0.9 - np.log(3)) - 0.135]
    torch.testing.assert_close(router.logits(s, gram), torch.tensor([expected], dtype=torch.float32))


def test_a_similarity_near_minus_one_costs_as_much_more_as_one_near_one():
    router = made(epsilon=1.0, saturation_weight=0.5, saturation_start=0.7, experts=2)
    logits = router.logits(
        torch.tensor([[0.9, -0.9]]), torch.eye(2)
    )  # equal to no other expert: no repulsion
    torch.testing.assert_close(logits, torch.tensor([[0.9 - 0.02, -0.9 - 0.02]]))


def test_published_repulsion_is_one_factor_an_expert():
    router = made(epsilon=1.0, repulsion="published", saturation_weight=0.0, experts=3)
    s = torch.tensor([[0.4, -0.6, 0.2]])
    gram = torch.tensor([[1, 0.5, 0], [0.5, 1, 0.1], [0, 0.1, 1]])
    expected = s - 0.5 * s.abs() * torch.tensor([0.25, 0.26, 0.01]) / 2
    torch.testing.assert_close(router.logits(s, gram), expected)


def test_epsilon_divides_the_cost():
    s, gram = torch.tensor([[0.3, -0.1, 0.2, 0]]), torch.eye(4)
    torch.testing.assert_close(made().logits(s, gram), 20 * made(epsilon=1.0).logits(s, gram))


# --- the sign of repulsion


@pytest.mark.parametrize(("sign", "gap"), [("cost", 0.6 + 0.5), ("published", 0.6 - 0.5)])
def test_of_two_experts_with_equal_directions_the_less_wanted_gives_way(sign, gap):
    router = made(penalty_sign=sign, saturation_weight=0.0)
    gram = torch.eye(4)
    gram[0, 1] = gram[1, 0] = 1
    logits = router.logits(torch.tensor([[0.6, 0.0, -0.9, -0.9]]), gram) * router.options["epsilon"]
    torch.testing.assert_close(logits[0, 0] - logits[0, 1], torch.tensor(gap), atol=1e-4, rtol=0)


def change_of_cosine(seed: int, **options: Any) -> float:
    """By how much experts 0 and 1, which begin nearly equal.

    Come nearer in a step of descent that wants tokens sent to either.
    """
    router = made(seed, **QUIET, **options)
    with torch.no_grad():
        weight, bias = router.express.weight.view(4, R, 16), router.express.bias.view(4, R)
        bias += torch.randn(1, R)
        weight[1] = weight[0] + 0.1 * torch.randn(R, 16)
        bias[1] = bias[0] + 0.5 * torch.randn(R)
    x = noise(64, seed=seed + 5)

    def cosine() -> float:
        return float(router.gram(router.expressions(x).sum(0), torch.tensor(64))[0, 1].detach())

    before = cosine()
    scores_TE = router(tokens(x)).scores_TE
    assert scores_TE is not None
    (-scores_TE[:, :2].sum(-1).log().mean()).backward()
    with torch.no_grad():
        for parameter in router.parameters():
            assert parameter.grad is not None
            parameter -= 0.01 * parameter.grad
    return cosine() - before


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_step_makes_two_nearly_equal_experts_less_equal_and_more_equal_with_the_published_sign(seed):
    with_repulsion, without = change_of_cosine(seed), change_of_cosine(seed, repulsion="none")
    with_published_sign = change_of_cosine(seed, penalty_sign="published")
    assert with_repulsion < 0 < with_published_sign
    assert with_repulsion < without < with_published_sign


# --- similarity, directions, losses


def test_similarity_is_the_cosine_of_each_experts_two_vectors():
    router = made()
    x = noise(3)
    h = router.trajectories(router.depth_state(tokens(x)))
    v = router.expressions(x)
    expected = [
        [np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(*pair, strict=True)]
        for pair in zip(h.detach().numpy(), v.detach().numpy(), strict=True)
    ]
    np.testing.assert_allclose(router.similarity(h, v).detach(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("training", "weights", "autocast", "expected"),
    [
        (True, torch.float32, False, torch.float32),
        (True, torch.float32, True, torch.bfloat16),
        (True, torch.bfloat16, False, torch.bfloat16),
        (False, torch.float32, True, torch.float32),
        (False, torch.bfloat16, False, torch.float32),
    ],
)
def test_only_the_training_of_a_bfloat16_model_rounds_projections_and_nothing_else(
    training, weights, autocast, expected
):
    torch.manual_seed(0)
    config = small_config("spectra")
    block = MoE(config, 0, Spectra.shared_parts(config)).train(training)
    block.experts.to(weights)
    seen: list[torch.dtype] = []
    for part in (block.router.expand, block.router.express):
        part.register_forward_hook(lambda _, given, out: seen.append(out.dtype))
    x, mask = noise(40).to(weights), torch.ones(40, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, routed = block(x, torch.arange(40), mask)
    assert seen == [expected] * 2
    for part in (routed.logits_TE, routed.scores_TE, routed.gates_TK, routed.carried_TR):
        assert part.dtype == torch.float32
    exact = block.router(tokens(x.float()))
    assert torch.equal(exact.carried_TR, routed.carried_TR)
    assert torch.equal(exact.logits_TE, routed.logits_TE) == (expected == torch.float32)


def test_the_cosine_of_rounded_projections_is_not_rounded():
    router, x = made(), noise(50)
    state = router.depth_state(tokens(x)).detach()
    h = router.trajectories(state, torch.bfloat16).detach()
    v = router.expressions(x, torch.bfloat16).detach()
    a, b = h.double().numpy(), v.double().numpy()
    cosines = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(router.similarity(h, v), cosines, atol=1e-6)
    # 64 products of numbers with 8 bits: far less than 2^-8 remains of the rounding
    exact = router.similarity(router.trajectories(state), router.expressions(x)).detach()
    assert 0 < np.abs(exact.numpy() - cosines).max() < 2**-8


def test_the_projector_begins_orthogonal_so_that_it_changes_no_length():
    weight = made().express.weight.detach()  # 256 x 16
    torch.testing.assert_close(weight.T @ weight, torch.eye(16), atol=1e-5, rtol=0)


def test_x_and_minus_x_are_not_routed_alike():
    router = made().eval()
    x = noise(8)
    assert not torch.allclose(router(tokens(x)).logits_TE, router(tokens(-x)).logits_TE, atol=0.1)


def test_the_depth_state_starts_at_zero_and_is_handed_from_layer_to_layer_through_one_cell():
    config = small_config("spectra")
    cell = Spectra.shared_parts(config)
    assert isinstance(cell, torch.nn.GRUCell)
    first, second = Spectra(config, 0, cell), Spectra(config, 1, cell)
    x = noise(4)
    one = first(tokens(x))
    two = second(tokens(2 * x, carried_TR=one.carried_TR))
    torch.testing.assert_close(one.carried_TR, cell(x, torch.zeros(4, R)))
    torch.testing.assert_close(two.carried_TR, cell(2 * x, cell(x, torch.zeros(4, R))))
    assert not torch.allclose(two.logits_TE, second(tokens(2 * x)).logits_TE)  # it matters what was handed on
    assert "cell" not in "".join(first.state_dict()), "the shared cell must be saved once, by the model"


def test_directions_mix_the_average_with_the_mean_over_real_tokens():
    router = travelled()
    x, mask = noise(6), torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)
    v = router.expressions(x).detach()
    sums = router.sum_expressions(x, mask).detach()
    torch.testing.assert_close(sums, v[mask].sum(0))
    mixed = 0.9 * router.direction_ER.numpy() + 0.1 * v[mask].mean(0).numpy()
    unit = mixed / np.linalg.norm(mixed, axis=1, keepdims=True)
    np.testing.assert_allclose(router.gram(sums, mask.sum()), unit @ unit.T, atol=1e-5)
    average = torch.nn.functional.normalize(router.direction_ER, dim=-1)
    torch.testing.assert_close(router.eval().gram(sums, mask.sum()), average @ average.T)


def test_losses_equal_their_formulas():
    router, x, mask = made(), noise(12), torch.arange(12) % 4 > 0
    routed = router(tokens(x, mask))
    v = torch.nn.functional.normalize(router.expressions(x), dim=-1).detach().double().numpy()
    gram = router.gram(router.expressions(x)[mask].sum(0), mask.sum()).detach().numpy()
    per_token = [np.square(one @ one.T - np.eye(4)).sum() / 12 for one in v[mask]]
    expected = {
        "orthogonality": 0.01 * np.square(gram - np.eye(4)).sum() / 12,
        "entropy": 1e-3 * entropy(routed.logits_TE[mask].softmax(-1).detach(), axis=1).mean(),
        "speciality": 0.01 * np.mean(per_token),
    }
    assert list(routed.losses) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(routed.losses[name].detach(), value, rtol=1e-4)


@pytest.mark.parametrize("experts", [3, 80])
def test_speciality_is_the_same_by_either_gram_matrix(experts):
    v = torch.randn(5, experts, R)
    router = made(experts=experts, orthogonality_weight=0.0, entropy_weight=0.0)
    unit = torch.nn.functional.normalize(v, dim=-1)
    expected = (
        (unit @ unit.mT - torch.eye(experts)).square().sum((-1, -2)).mean() / (experts * (experts - 1)) * 0.01
    )
    found = router.losses(torch.zeros(5, experts), torch.eye(experts), v, torch.ones(5, dtype=torch.bool))[
        "speciality"
    ]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("experts", "width"), [(5, 7), (9, 4)])
def test_overlaps_have_the_gradient_that_autograd_finds_in_the_plain_formula(experts, width):
    torch.manual_seed(0)
    v, weight = torch.randn(6, experts, width, requires_grad=True), torch.randn(6)
    found = torch.autograd.grad(spectra.overlaps(v) @ weight, v)[0]
    plain = v.detach().double().requires_grad_()
    unit = plain / plain.norm(dim=-1, keepdim=True)
    squares = (unit @ unit.mT - torch.eye(experts)).square().sum((-1, -2))
    torch.testing.assert_close(spectra.overlaps(v).double(), squares, atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad(squares @ weight.double(), plain)[0]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


# --- choosing, quota, gates


def test_no_expert_exceeds_the_quota_and_what_it_refuses_is_counted():
    router = made(iterations=1, capacity_factor=1.0)
    x = noise(1).repeat(24, 1) + 0.05 * noise(24)  # everybody wants the same
    routed = router(tokens(x))
    load = torch.bincount(routed.chosen_TK[routed.chosen_TK >= 0], minlength=4)
    assert load.max() <= 24 * 2 / 4
    assert routed.dropped_T.sum() == 24 * 2 - load.sum() > 0
    assert (routed.gates_TK[routed.chosen_TK < 0] == 0).all()


def test_the_quota_keeps_the_best_of_each_expert():
    router = made(capacity_factor=1.0, experts=2, top_k=1)
    selection = torch.tensor([[3.0, 0], [5, 0], [4, 0], [0, 1]])
    chosen = torch.tensor([[0], [0], [0], [1]])
    kept = router.admit(chosen, selection, torch.ones(4, dtype=torch.bool))  # 4 tokens, 2 experts: two each
    assert kept[:, 0].tolist() == [False, True, True, True]


def test_an_overfull_expert_is_an_error_not_a_warning(monkeypatch):
    monkeypatch.setattr(spectra, "within_capacity", lambda chosen_TK, *_: chosen_TK >= 0)
    router = made()
    crowd = torch.zeros(8, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="more tokens than its quota"):
        router.admit(crowd, torch.zeros(8, 4), torch.ones(8, dtype=torch.bool))


def test_gates_are_a_softmax_over_what_survived_without_potentials():
    router = travelled(iterations=1, capacity_factor=0.6)
    routed = router(tokens(noise(40)))
    assert {0, 1, 2} == set((routed.chosen_TK >= 0).sum(-1).tolist()), (
        "the case should have tokens with none, one and two experts"
    )
    for logits, chosen, gates in zip(routed.logits_TE, routed.chosen_TK, routed.gates_TK, strict=True):
        kept = chosen >= 0
        torch.testing.assert_close(gates[kept], logits[chosen[kept]].softmax(0))
        assert (gates[~kept] == 0).all()


def test_with_one_expert_a_token_its_gate_is_its_probability_among_all():
    routed = made(top_k=1)(tokens(noise(16)))
    kept = routed.chosen_TK >= 0
    expected = routed.logits_TE.softmax(-1).gather(-1, routed.chosen_TK.clamp(min=0))
    torch.testing.assert_close(routed.gates_TK[kept], expected[kept])
    assert routed.gates_TK.max() < 1


def test_a_batch_of_pads_alone_routes_nothing_and_makes_no_nan():
    router = made()
    routed = router(tokens(noise(4), torch.zeros(4, dtype=torch.bool)))
    sum(routed.losses.values(), routed.gates_TK.sum()).backward()
    router.after_step()
    assert all(p.grad is None or p.grad.isfinite().all() for p in router.parameters())
    assert (routed.chosen_TK == -1).all()
    assert (routed.gates_TK == 0).all()
    assert all(buffer.isfinite().all() for buffer in router.buffers())


# --- evaluation, moving averages


def test_published_evaluation_sends_every_single_token_to_the_same_experts():
    router = travelled(evaluation="published").eval()
    with torch.no_grad():
        router.potential_E.zero_()
    plan = router(tokens(noise(1))).selection_TE
    torch.testing.assert_close(plan.exp(), torch.full((1, 4), 0.25))


def test_evaluation_moves_no_average_and_training_moves_them_by_hand_worked_amounts():
    router = travelled()
    before = {name: buffer.clone() for name, buffer in router.named_buffers()}
    router.eval()
    router(tokens(noise(20)))
    router.after_step()
    assert all(torch.equal(buffer, before[name]) for name, buffer in router.named_buffers())
    router.train()
    small, large, mask = noise(10, seed=3), noise(30, seed=4), torch.arange(30) % 2 > 0
    routed = [router(tokens(small)), router(tokens(large, mask))]  # two micro-batches
    router.after_step()
    v = router.expressions(torch.cat([small, large[mask]])).mean(0)
    torch.testing.assert_close(router.direction_ER, 0.9 * before["direction_ER"] + 0.1 * v.detach())
    potentials = [
        one.selection_TE[-1] - one.logits_TE[-1].detach() for one in routed
    ]  # with the row's own constant
    mean = sum(one - one.mean() for one in potentials) / 2
    torch.testing.assert_close(
        router.potential_E, 0.9 * before["potential_E"] + 0.1 * mean, atol=1e-5, rtol=1e-4
    )


def test_averages_are_made_of_sums_over_ranks():
    router = made()
    router.ranks = SecondRank()
    twin = made()
    for one in (router, twin):
        one(tokens(noise(20)))
        one.after_step()
    torch.testing.assert_close(router.direction_ER, twin.direction_ER)
    torch.testing.assert_close(router.potential_E, twin.potential_E)


def test_the_average_of_potentials_comes_to_balance_evaluation():
    router = made(potential_decay=0.5)
    x = noise(400) + 1
    for _ in range(20):
        routed = router(tokens(x))
        router.after_step()
    load = torch.bincount(router.eval()(tokens(x)).chosen_TK.flatten(), minlength=4)
    unbalanced = torch.bincount(routed.logits_TE.topk(2).indices.flatten(), minlength=4)
    assert load.max() < 1.15 * 200 < unbalanced.max()


def test_the_text_teaches_every_part():
    router = travelled()
    cell = router.shared
    assert cell is not None
    routed = router(tokens(noise(32), carried_TR=noise(32, R)))
    (routed.gates_TK * noise(32, 2)).sum().backward()
    for parameter in [*router.parameters(), *cell.parameters()]:
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_layers_and_steps_of_a_compiled_model_share_two_functions_without_a_break(monkeypatch):
    counter = CompileCounter()
    whole = cache(lambda function: torch.compile(function, backend=counter, fullgraph=True, dynamic=False))
    monkeypatch.setattr(contract, "compiled_function", whole)
    torch._dynamo.reset()
    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = LabModel(small_config("spectra", layers=3)).train()
        for router in model.routers:
            router.compiles = compiles
        ids = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            loss = model(ids[:, :-1], targets_BL=ids[:, 1:]).loss
            loss.backward()
            model.after_step()
        gradients = [weight.grad for weight in model.parameters()]
        losses.append([loss.detach(), *gradients, *model.buffers()])
        assert counter.frame_count == 2 * compiles
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    model.eval()(ids)
    assert counter.frame_count == 2, "evaluation is not compiled"


def test_the_column_error_is_noted_beside_what_the_costs_alone_would_leave():
    router, mask = travelled(), torch.arange(60) % 4 > 0
    routed = router(tokens(noise(60), mask))
    note, real = routed.diagnostics["column_error"], int(mask.sum())
    sums = routed.logits_TE.detach()[mask].double().softmax(-1).sum(0).numpy()
    assert float(note.chance) == pytest.approx(np.abs(sums * 4 / real - 1).max(), rel=1e-4)
    left = routed.selection_TE[mask].double().exp().sum(0).numpy()
    assert float(note.value) == pytest.approx(np.abs(left * 4 / real - 1).max(), rel=1e-3)
    assert float(note.value) < float(note.chance)
    assert note.collapse == 3.0
    assert "column_error" not in router.eval()(tokens(noise(60), mask)).diagnostics, "nothing was balanced"


def test_the_overlap_of_directions_is_noted_beside_that_of_random_ones():
    router = travelled().eval()
    directions = router.direction_ER.numpy() / np.linalg.norm(
        router.direction_ER.numpy(), axis=1, keepdims=True
    )
    squares = (directions @ directions.T) ** 2
    note = router(tokens(noise(5))).diagnostics["direction_overlap"]
    assert float(note.value) == pytest.approx((squares.sum() - 4) / 12, rel=1e-4)
    assert (note.chance, note.collapse) == (1 / 64, 1.0)
    assert np.isnan(note.chance_spread)
    random = np.random.default_rng(0).standard_normal((400, 64))
    random /= np.linalg.norm(random, axis=1, keepdims=True)
    assert (((random @ random.T) ** 2).sum() - 400) / (400 * 399) == pytest.approx(note.chance, rel=0.02)


def test_only_the_plain_ablation_is_not_built_to_be_sure():
    assert made().expects_low_entropy
    assert not made(plain=True).expects_low_entropy


# --- sPECTRA's options: each changes what it should, and only that; what makes no sense is refused

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


# --- sinkhorn's iteration against two others that share no code with it


class Balanced(NamedTuple):
    log_plan_TE: torch.Tensor
    potential_E: torch.Tensor
    column_error: torch.Tensor


def balance(*given) -> Balanced:
    return Balanced(*spectra.balance(*given))


N, E = 40, 5
EVERYONE = torch.ones(N, dtype=torch.bool)
FLAT = torch.zeros(E)


@pytest.fixture
def logits_TE() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(N, E) * 2 + torch.tensor(
        [4.0, 2, 0, 0, -3]
    )  # everybody wants expert 0, nobody expert 4


def converged(logits: np.ndarray) -> np.ndarray:
    """The log plan whose rows sum to 1 and columns to N/n.

    Alternating normalisation in float64 until nothing moves.
    """
    rows, columns = np.zeros(len(logits)), np.zeros(logits.shape[1])
    for _ in range(20_000):
        before = columns
        rows = -logsumexp(logits + columns, axis=1)
        columns = np.log(len(logits) / logits.shape[1]) - logsumexp(logits + rows[:, None], axis=0)
        if np.abs(columns - before).max() < 1e-14:
            break
    return logits + rows[:, None] + columns


def test_many_iterations_reach_the_plan_that_numpy_converges_to(logits_TE):
    found = balance(logits_TE, EVERYONE, FLAT, 300)
    np.testing.assert_allclose(
        found.log_plan_TE.exp(), np.exp(converged(logits_TE.double().numpy())), atol=1e-5
    )
    assert found.column_error < 1e-5


def test_three_iterations_are_three_of_rows_and_columns_and_rows_once_more(logits_TE):
    plan = np.exp(logits_TE.double().numpy())
    for _ in range(3):
        plan /= plan.sum(1, keepdims=True)
        plan *= N / E / plan.sum(0)
    plan /= plan.sum(1, keepdims=True)
    np.testing.assert_allclose(balance(logits_TE, EVERYONE, FLAT, 3).log_plan_TE.exp(), plan, atol=1e-5)


def test_its_potentials_minimise_the_dual(logits_TE):
    logits = logits_TE.double().numpy()

    def dual(g):  # sum_t logsumexp(L_t + g) - N/n sum g, whose gradient is what columns have too much
        return logsumexp(logits + g, axis=1).sum() - N / E * g.sum(), softmax(logits + g, axis=1).sum(
            0
        ) - N / E

    best = minimize(dual, np.zeros(E), jac=True, method="BFGS", options={"gtol": 1e-9}).x
    np.testing.assert_allclose(
        balance(logits_TE, EVERYONE, FLAT, 300).potential_E, best - best.mean(), atol=1e-4
    )


def test_after_three_iterations_rows_are_exact_and_the_column_error_is_what_is_left(logits_TE):
    found = balance(logits_TE, EVERYONE, FLAT, 3)
    plan = found.log_plan_TE.exp()
    torch.testing.assert_close(plan.sum(1), torch.ones(N))
    left = (plan.sum(0) / (N / E) - 1).abs().max()
    torch.testing.assert_close(found.column_error, left)
    assert (
        0.01 < left < (logits_TE.softmax(-1).sum(0) / (N / E) - 1).abs().max()
    )  # not there yet, but nearer than the start


def test_starting_from_the_potentials_it_had_found_three_iterations_are_enough(logits_TE):
    start = balance(logits_TE, EVERYONE, FLAT, 300).potential_E
    assert balance(logits_TE, EVERYONE, start, 3).column_error < 1e-5


def test_potentials_have_mean_zero_and_a_constant_in_the_start_changes_nothing(logits_TE):
    found = balance(logits_TE, EVERYONE, FLAT, 3)
    lifted = balance(logits_TE, EVERYONE, FLAT + 7, 3)
    assert found.potential_E.mean().abs() < 1e-6
    torch.testing.assert_close(found.log_plan_TE, lifted.log_plan_TE)


def test_pads_change_nothing_for_the_others(logits_TE):
    mask = torch.arange(N) % 3 > 0
    alone = balance(logits_TE[mask], EVERYONE[mask], FLAT, 3)
    among = balance(logits_TE, mask, FLAT, 3)
    torch.testing.assert_close(among.log_plan_TE[mask], alone.log_plan_TE)
    torch.testing.assert_close(among.potential_E, alone.potential_E)
    torch.testing.assert_close(among.column_error, alone.column_error)


def test_a_batch_of_pads_keeps_the_start_and_makes_no_nan(logits_TE):
    start = torch.tensor([1.0, -1, 0, 0, 0])
    found = balance(logits_TE, ~EVERYONE, start, 3)
    torch.testing.assert_close(found.potential_E, start)
    assert found.log_plan_TE.isfinite().all()


def test_one_token_alone_is_spread_evenly_which_is_why_evaluation_cannot_use_it():
    found = balance(torch.tensor([[5.0, 1, 0, -2]]), torch.ones(1, dtype=torch.bool), torch.zeros(4), 3)
    torch.testing.assert_close(found.log_plan_TE.exp(), torch.full((1, 4), 0.25))


def test_columns_of_one_expert_alone_are_off_by_all_the_others_and_even_ones_by_nothing():
    mask = torch.arange(N) % 3 > 0
    alone = torch.zeros(N, E)
    alone[:, 2] = 1
    assert float(column_error(alone, mask)) == pytest.approx(E - 1)
    assert float(column_error(torch.full((N, E), 1 / E), mask)) == pytest.approx(0, abs=1e-6)
