"""Neuron matching against planted orders and signs, every order of few neurons.

And the function the expert computes.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from geometry.experts import output, random_expert, shuffled
from moescope.errors import BadInput
from moescope.geometry.matching import match_neurons
from moescope.types import ExpertWeights


@pytest.mark.parametrize("seed", range(4))
def test_applying_a_matching_leaves_the_function_as_it_was(seed):
    dominant, member = random_expert(seed), random_expert(seed + 100)
    matching = match_neurons(dominant, member)
    assert (matching.sign_F == -1).any(), "nothing was flipped, so flips were not tested"
    assert (matching.order_F != np.arange(24)).any()
    x = torch.randn(50, 40, dtype=torch.float64)
    torch.testing.assert_close(output(matching.apply(member), x), output(member, x), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("gated", [True, False])
def test_biases_follow_their_neurons_and_nothing_is_flipped(gated):
    dominant, member = (random_expert(seed, gated=gated, biases=True) for seed in (0, 1))
    matching = match_neurons(dominant, member, signed=True)
    assert (matching.sign_F == 1).all()
    applied = matching.apply(member)
    x = torch.randn(50, 40, dtype=torch.float64)
    torch.testing.assert_close(output(applied, x), output(member, x), rtol=1e-12, atol=1e-10)
    assert torch.equal(applied.gate_bias_F, member.gate_bias_F[torch.from_numpy(matching.order_F)])
    assert torch.equal(applied.down_bias_D, member.down_bias_D)


def test_an_expert_without_a_gate_is_matched_unsigned():
    dominant = random_expert(3, gated=False)
    copy, order, _ = shuffled(dominant, 5, flip=False)
    matching = match_neurons(dominant, copy, signed=True)
    assert (matching.sign_F == 1).all()
    assert (order[matching.order_F] == np.arange(24)).all()
    assert matching.score == pytest.approx(2, abs=1e-5)  # gate and down, each of unit norm


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_signed_permutation_is_undone(seed):
    dominant = random_expert(seed, hidden=64)
    copy, order, sign = shuffled(dominant, seed, flip=True)
    matching = match_neurons(dominant, copy)
    assert (order[matching.order_F] == np.arange(64)).all()
    assert (matching.sign_F == sign[matching.order_F]).all()
    restored = matching.apply(copy)
    for name in ("gate_FD", "up_FD", "down_DF"):
        assert torch.equal(getattr(restored, name), getattr(dominant, name))
    assert matching.score == pytest.approx(3, abs=1e-5)


def test_matching_without_signs_recovers_about_half_of_a_signed_permutation():
    dominant = random_expert(0, hidden=256, width=64)
    copy, order, sign = shuffled(dominant, 1, flip=True)
    matching = match_neurons(dominant, copy, signed=False)
    assert (matching.sign_F == 1).all()
    right = order[matching.order_F] == np.arange(256)
    upright = sign[matching.order_F] == 1
    assert right[upright].mean() > 0.95
    assert 0.45 < right.mean() < 0.6


def test_the_matching_is_the_best_of_all_orders_and_signs():
    """Every order of five neurons, with every neuron's better sign.

    Written out by hand from the definition.
    """
    dominant, member = random_expert(7, hidden=5, width=3), random_expert(8, hidden=5, width=3)

    def unit(matrix):
        return (matrix / torch.linalg.norm(matrix)).double().numpy()

    g, u, d = (unit(matrix) for matrix in (dominant.gate_FD, dominant.up_FD, dominant.down_DF))
    g2, u2, d2 = (unit(matrix) for matrix in (member.gate_FD, member.up_FD, member.down_DF))
    for signed in (True, False):

        def total(order, signed=signed):
            terms = [(g[p] @ g2[q], u[p] @ u2[q] + d[:, p] @ d2[:, q]) for p, q in enumerate(order)]
            return sum(fixed + (abs(free) if signed else free) for fixed, free in terms)

        best = max(permutations(range(5)), key=total)
        matching = match_neurons(dominant, member, signed=signed)
        assert tuple(matching.order_F) == best
        assert matching.score == pytest.approx(total(best), abs=1e-6)


def test_projections_left_out_of_the_score_do_not_count():
    dominant = random_expert(0, hidden=48)
    copy, order, _ = shuffled(dominant, 2, flip=True)
    spoiled = ExpertWeights(copy.gate_FD, torch.randn_like(copy.down_DF) * 100, copy.up_FD)
    matching = match_neurons(dominant, spoiled, projections=("gate", "up"))
    assert (order[matching.order_F] == np.arange(48)).all()
    assert matching.score == pytest.approx(2, abs=1e-5)
    assert (match_neurons(dominant, copy, projections=("gate",)).sign_F == 1).all()


def test_scale_and_precision_of_a_projection_change_nothing():
    dominant, member = random_expert(0), random_expert(1)
    scaled = ExpertWeights(member.gate_FD * 1000, member.down_DF * 1e-3, member.up_FD)
    assert (match_neurons(dominant, member).order_F == match_neurons(dominant, scaled).order_F).all()
    half = ExpertWeights(
        *(matrix.bfloat16() for matrix in (dominant.gate_FD, dominant.down_DF, dominant.up_FD))
    )
    assert match_neurons(half, half).score == pytest.approx(3, abs=1e-5)
    assert match_neurons(half, half).apply(half).gate_FD.dtype == torch.bfloat16


def test_a_projection_of_zeros_is_left_to_the_others():
    dominant = random_expert(0)
    copy, order, _ = shuffled(dominant, 1, flip=False)
    dead = ExpertWeights(copy.gate_FD, torch.zeros_like(copy.down_DF), copy.up_FD)
    assert (order[match_neurons(dominant, dead).order_F] == np.arange(24)).all()


def test_bad_experts_and_names_are_refused_in_one_line():
    dominant = random_expert(0)
    with pytest.raises(BadInput, match=r"\(24, 40\) and \(20, 40\)"):
        match_neurons(dominant, random_expert(1, hidden=20))
    with pytest.raises(BadInput, match="unknown projection 'router'"):
        match_neurons(dominant, dominant, projections=("router",))
    with pytest.raises(BadInput, match="no projection"):
        match_neurons(dominant, dominant, projections=())
    broken = ExpertWeights(dominant.gate_FD.clone(), dominant.down_DF, dominant.up_FD)
    broken.gate_FD[0, 0] = float("nan")
    with pytest.raises(BadInput, match="NaN"):
        match_neurons(dominant, broken)
