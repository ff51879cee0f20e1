"""Chance levels against experts that were really drawn, and the published figures for 768 x 2048."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geometry.experts import random_expert
from moescope.geometry.distances import relative_l2
from moescope.geometry.matching import PROJECTIONS, match_neurons, projection_matrix
from moescope.geometry.nulls import drawn_cosines, matched_chance, own_share
from moescope.geometry.polar import PolarFactor, polar_factor, sv_alignment


def drawn_pair(
    hidden: int, width: int, seed: int, signed: bool
) -> dict[str, tuple[float, float, float, float]]:
    """Projection -> (L2, R) as they lie and (L2, R) matched, of two random experts, by the slow road."""
    dominant, member = (random_expert(seed + number, hidden, width) for number in (0, 1000))
    matching = match_neurons(dominant, member, signed)
    found = {}
    for name in PROJECTIONS:
        a, b = projection_matrix(dominant, name), projection_matrix(member, name)
        factor_a, factor_b = polar_factor(a), polar_factor(b)
        moved = PolarFactor(matching.projection(name, factor_b.matrix), factor_b.rank)
        found[name] = (
            relative_l2(a, b),
            sv_alignment(factor_a, factor_b),
            relative_l2(a, matching.projection(name, b)),
            sv_alignment(factor_a, moved),
        )
    return found


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(192, 512), (256, 256), (384, 128)])
def test_chance_is_what_random_experts_of_the_same_shape_give(hidden, width, signed):
    chance = matched_chance(hidden, width, signed)
    pairs = [drawn_pair(hidden, width, seed, signed) for seed in range(3)]
    for name in PROJECTIONS:
        l2, r, l2_matched, r_matched = np.mean([pair[name] for pair in pairs], axis=0)
        assert l2 == pytest.approx(2**0.5, abs=0.01)
        assert r == pytest.approx(0, abs=0.01)
        assert chance[name].relative_l2 == pytest.approx(l2_matched, abs=0.008)
        assert chance[name].sv_alignment == pytest.approx(r_matched, abs=0.008)
        assert chance[name].sv_alignment > 0.03, "too small to tell it from no matching at all"


def test_the_published_figures_for_768_by_2048_come_out():
    """Unsigned 1.386 and 0.035, signed 1.385 and 0.037, each +- 0.003."""
    unsigned, signed = matched_chance(768, 2048, signed=False), matched_chance(768, 2048, signed=True)
    for name in PROJECTIONS:
        assert unsigned[name].relative_l2 == pytest.approx(1.386, abs=0.003)
        assert unsigned[name].sv_alignment == pytest.approx(0.035, abs=0.003)
        assert signed[name].relative_l2 == pytest.approx(1.385, abs=0.003)
        assert signed[name].sv_alignment == pytest.approx(0.037, abs=0.003)


@pytest.mark.slow
def test_the_acceptance_figures_on_drawn_experts_of_768_by_2048():
    for signed, l2, r in ((False, 1.386, 0.035), (True, 1.385, 0.037)):
        for as_it_lies in drawn_pair(768, 2048, 0, signed).values():
            assert as_it_lies[0] == pytest.approx(1.414, abs=0.002)
            assert as_it_lies[1] == pytest.approx(0, abs=0.002)
            assert as_it_lies[2] == pytest.approx(l2, abs=0.003)
            assert as_it_lies[3] == pytest.approx(r, abs=0.003)
    expert, noise = torch.randn(768, 2048), torch.randn(768, 2048)
    moved = expert + 0.1 * noise
    assert sv_alignment(polar_factor(expert), polar_factor(moved)) == pytest.approx(0.994, abs=0.001)
    assert relative_l2(expert, moved) == pytest.approx(0.10, abs=0.002)


@pytest.mark.slow
def test_a_square_matrix_feels_noise_more():
    """Its smallest singular values are drowned first: R 0.98 at 10 % noise."""
    expert = torch.randn(1024, 1024)
    moved = expert + 0.1 * torch.randn(1024, 1024)
    assert sv_alignment(polar_factor(expert), polar_factor(moved)) == pytest.approx(0.98, abs=0.005)


def test_noise_at_a_tenth_of_the_size_at_the_same_aspect():
    """What 768 x 2048 gives, at 192 x 512: R depends on the aspect, not on the size."""
    expert = torch.randn(192, 512)
    moved = expert + 0.1 * torch.randn(192, 512)
    assert sv_alignment(polar_factor(expert), polar_factor(moved)) == pytest.approx(0.994, abs=0.002)
    assert relative_l2(expert, moved) == pytest.approx(0.10, abs=0.003)


def test_a_projection_held_out_of_the_matching_stays_unrelated():
    chance = matched_chance(192, 256, projections=("gate", "up"))
    assert chance["down"].relative_l2 == pytest.approx(2**0.5)
    assert chance["down"].sv_alignment == 0
    assert chance["gate"].relative_l2 < 1.39


def test_experts_without_a_gate_have_no_up():
    assert set(matched_chance(64, 64, signed=False, gated=False)) == {"gate", "down"}


def test_the_cosine_falls_as_one_over_the_root_of_the_width():
    narrow, wide = (drawn_cosines(256, width, True, True, PROJECTIONS, 0) for width in (256, 1024))
    for name in PROJECTIONS:
        assert narrow[name] / wide[name] == pytest.approx(2, abs=0.1)


@pytest.mark.slow
def test_beyond_2048_neurons_the_line_in_log_f_meets_what_is_drawn():
    """The mean over projections, since one draw of one projection scatters by 1 %."""
    chance = matched_chance(4096, 1024)
    drawn = drawn_cosines(4096, 1024, True, True, PROJECTIONS, 5)
    predicted = np.mean([1 - chance[name].relative_l2 ** 2 / 2 for name in PROJECTIONS])
    assert predicted == pytest.approx(np.mean(list(drawn.values())), rel=0.015)


@pytest.mark.parametrize("shape", [(200, 200), (200, 400), (200, 2000)])
def test_a_gaussian_matrix_s_share_in_its_polar_factor_follows_the_law_of_its_singular_values(shape):
    values = np.linalg.svd(np.random.default_rng(0).standard_normal(shape), compute_uv=False)
    assert own_share(shape[0] / shape[1]) == pytest.approx(
        values.sum() ** 2 / (len(values) * (values**2).sum()), abs=0.005
    )


def test_the_share_of_a_square_matrix_is_known_exactly():
    assert own_share(1.0) == pytest.approx((8 / (3 * np.pi)) ** 2, abs=1e-6)
