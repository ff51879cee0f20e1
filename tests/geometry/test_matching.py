"""Neuron matching against planted orders and signs and every order of few neurons; chance against sampled
experts."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from geometry.experts import output, random_expert, shuffled
from moescope.errors import BadInput
from moescope.geometry import matching as matching_module
from moescope.geometry.distances import PolarFactor, distance, polar_factor, sv_alignment
from moescope.geometry.matching import PROJECTIONS, Rotation, match_neurons, matched_chance, projections_of
from moescope.types import ExpertWeights


@pytest.mark.parametrize("seed", range(4))
def test_applying_a_matching_preserves_the_function(seed):
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


def test_projections_held_out_of_the_score_do_not_count():
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


def test_bad_experts_and_names_are_rejected():
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


# --- chance


def sampled_pair(
    hidden: int, width: int, seed: int, signed: bool
) -> dict[str, tuple[float, float, float, float]]:
    """Projection -> (L2, R) in stored order and (L2, R) matched, of two random experts, by the definition."""
    dominant, member = (random_expert(seed + number, hidden, width) for number in (0, 1000))
    matching = match_neurons(dominant, member, signed)
    found = {}
    for name in PROJECTIONS:
        a, b = projections_of(dominant)[name], projections_of(member)[name]
        factor_a, factor_b = polar_factor(a), polar_factor(b)
        matched = PolarFactor(matching.projection(name, factor_b.matrix), factor_b.rank)
        found[name] = (
            distance(a, b).relative_l2,
            sv_alignment(factor_a, factor_b),
            distance(a, matching.projection(name, b)).relative_l2,
            sv_alignment(factor_a, matched),
        )
    return found


def chance_of(dominant, member, signed=True, projections=PROJECTIONS, **more):
    factors = tuple(
        {name: polar_factor(projections_of(expert)[name]) for name in projections}
        for expert in (dominant, member)
    )
    return matched_chance(dominant, member, signed, projections, factors, **more)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(192, 512), (256, 256), (384, 127)])
def test_chance_of_gaussian_experts_is_what_independent_ones_give(hidden, width, signed):
    chance = chance_of(random_expert(0, hidden, width), random_expert(1000, hidden, width), signed)
    pairs = [sampled_pair(hidden, width, seed, signed) for seed in range(3)]
    for name in PROJECTIONS:
        l2, r, l2_matched, r_matched = np.mean([pair[name] for pair in pairs], axis=0)
        assert l2 == pytest.approx(2**0.5, abs=0.01)
        assert r == pytest.approx(0, abs=0.01)
        assert chance[name].relative_l2 == pytest.approx(l2_matched, abs=0.008)
        assert chance[name].sv_alignment == pytest.approx(r_matched, abs=0.008)
        assert chance[name].sv_alignment > 0.03, "too small to tell it from no matching at all"


def uneven_expert(seed: int, hidden: int, width: int) -> ExpertWeights:
    """Neurons whose norms are log-normal, each the same in gate, up and down."""
    expert = random_expert(seed, hidden, width)
    norm_F = torch.exp(0.7 * torch.randn(hidden, generator=torch.Generator().manual_seed(seed)))
    return ExpertWeights(
        expert.gate_FD * norm_F[:, None], expert.down_DF * norm_F, expert.up_FD * norm_F[:, None]
    )


def test_chance_of_uneven_neurons_is_what_independent_uneven_experts_give():
    """And not what even ones give: 0.074 in the cosine at 256 x 512."""
    chance = chance_of(uneven_expert(0, 256, 512), uneven_expert(1, 256, 512))
    found = {name: [] for name in PROJECTIONS}
    for seed in range(8):
        dominant, member = uneven_expert(10 + seed, 256, 512), uneven_expert(100 + seed, 256, 512)
        matched = match_neurons(dominant, member).apply(member)
        for name in PROJECTIONS:
            a, b = projections_of(dominant)[name], projections_of(matched)[name]
            found[name].append((distance(a, b).cosine, sv_alignment(polar_factor(a), polar_factor(b))))
    cosine, r = np.mean([np.mean(values, axis=0) for values in found.values()], axis=0)
    assert cosine < 0.066
    assert np.mean([1 - level.relative_l2**2 / 2 for level in chance.values()]) == pytest.approx(
        cosine, abs=0.004
    )
    assert np.mean([level.sv_alignment for level in chance.values()]) == pytest.approx(r, abs=0.004)


@pytest.mark.parametrize("width", [64, 97])
def test_a_rotation_keeps_norms_and_angles_and_forgets_directions(width):
    rows = torch.randn(400, width)
    rotation = Rotation(width, np.random.default_rng(0))
    np.testing.assert_allclose((rotation(rows) @ rotation(rows).T), rows @ rows.T, atol=1e-3)
    matrix = rotation(torch.eye(width))
    # Entries of a Haar matrix have variance 1/d and, times sqrt d, a kurtosis of 3 d / (d + 2)
    kurtosis = float((matrix**4).mean() * width**2)
    assert kurtosis == pytest.approx(3 * width / (width + 2), abs=0.25)


def test_a_rotated_copy_of_an_expert_is_unrelated_to_it():
    expert = random_expert(0, 192, 512)
    same, other = chance_of(expert, expert), chance_of(expert, random_expert(1, 192, 512))
    for name in PROJECTIONS:
        assert same[name].relative_l2 == pytest.approx(other[name].relative_l2, abs=0.008)


@pytest.mark.slow
def test_the_published_figures_for_768_by_2048_come_out():
    """Unsigned 1.386 and 0.035, signed 1.385 and 0.037, each +- 0.003."""
    pair = random_expert(0, 768, 2048), random_expert(1, 768, 2048)
    for signed, l2, r in ((False, 1.386, 0.035), (True, 1.385, 0.037)):
        for level in chance_of(*pair, signed).values():
            assert level.relative_l2 == pytest.approx(l2, abs=0.003)
            assert level.sv_alignment == pytest.approx(r, abs=0.003)


@pytest.mark.slow
def test_the_acceptance_figures_on_drawn_experts_of_768_by_2048():
    for signed, l2, r in ((False, 1.386, 0.035), (True, 1.385, 0.037)):
        for distances in sampled_pair(768, 2048, 0, signed).values():
            assert distances[0] == pytest.approx(1.414, abs=0.002)
            assert distances[1] == pytest.approx(0, abs=0.002)
            assert distances[2] == pytest.approx(l2, abs=0.003)
            assert distances[3] == pytest.approx(r, abs=0.003)
    expert, noise = torch.randn(768, 2048), torch.randn(768, 2048)
    changed = expert + 0.1 * noise
    assert sv_alignment(polar_factor(expert), polar_factor(changed)) == pytest.approx(0.994, abs=0.001)
    assert distance(expert, changed).relative_l2 == pytest.approx(0.10, abs=0.002)


@pytest.mark.slow
def test_a_square_matrix_feels_noise_more():
    """Its smallest singular values are drowned first: R 0.98 at 10 % noise."""
    expert = torch.randn(1024, 1024)
    changed = expert + 0.1 * torch.randn(1024, 1024)
    assert sv_alignment(polar_factor(expert), polar_factor(changed)) == pytest.approx(0.98, abs=0.005)


def test_noise_at_a_tenth_of_the_size_at_the_same_aspect():
    """What 768 x 2048 gives, at 192 x 512: R depends on the aspect, not on the size."""
    expert = torch.randn(192, 512)
    changed = expert + 0.1 * torch.randn(192, 512)
    assert sv_alignment(polar_factor(expert), polar_factor(changed)) == pytest.approx(0.994, abs=0.002)
    assert distance(expert, changed).relative_l2 == pytest.approx(0.10, abs=0.003)


def test_a_projection_held_out_of_the_matching_stays_unrelated():
    chance = chance_of(random_expert(0, 192, 256), random_expert(1, 192, 256), projections=("gate", "up"))
    assert chance["down"].relative_l2 == pytest.approx(2**0.5)
    assert chance["down"].sv_alignment == 0
    assert chance["gate"].relative_l2 < 1.39


def test_experts_without_a_gate_have_no_up_and_without_factors_there_is_no_r():
    pair = random_expert(0, 64, 64, gated=False), random_expert(1, 64, 64, gated=False)
    chance = matched_chance(*pair)
    assert set(chance) == {"gate", "down"}
    assert np.isnan(chance["gate"].sv_alignment)


@pytest.mark.parametrize("make", [random_expert, uneven_expert])
def test_blocks_extrapolate_to_what_matching_all_neurons_reaches(make, monkeypatch):
    """1,024 neurons from blocks of 128 to 512, the mean over projections."""
    pair = make(0, 1024, 256), make(1, 1024, 256)
    whole = chance_of(*pair)
    monkeypatch.setattr(matching_module, "FITTED_NEURONS", (128, 256, 512))
    blocks = chance_of(*pair)
    for column, relative in (("relative_l2", 0.005), ("sv_alignment", 0.06)):
        ours, theirs = (
            np.mean([getattr(level, column) for level in found.values()]) for found in (blocks, whole)
        )
        assert ours == pytest.approx(theirs, rel=relative)


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_expert, uneven_expert])
def test_beyond_1024_neurons_the_line_in_log_f_meets_what_is_matched(make, monkeypatch):
    """3,072 neurons: the cosine, whose square is what L2 shows, within 4 % of a match of all."""
    pair = make(0, 3072, 256), make(1, 3072, 256)
    blocks = matched_chance(*pair)
    monkeypatch.setattr(matching_module, "FITTED_NEURONS", (3072,))
    whole = matched_chance(*pair)
    ours, theirs = (
        np.mean([1 - level.relative_l2**2 / 2 for level in found.values()]) for found in (blocks, whole)
    )
    assert ours == pytest.approx(theirs, rel=0.04)
