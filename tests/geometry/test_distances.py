"""Distances against numpy in fp64 and cases worked by hand; polar factors against scipy's SVD; R against its
definition."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from geometry.experts import random_expert
from moescope.errors import BadInput
from moescope.geometry import distances
from moescope.geometry.distances import (
    by_eigenvectors,
    by_newton_schulz,
    by_svd,
    distance,
    has_full_rank,
    polar_factor,
    sv_alignment,
)
from moescope.geometry.matching import match_neurons
from spectral.builders import STORED_BITS, stored_low_rank


def test_hand_worked_pairs():
    a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    assert distance(a, b).relative_l2 == pytest.approx(2**0.5)
    assert distance(a, b).cosine == 0
    assert distance(a, b).norm_ratio == pytest.approx(4 / 3)
    assert distance(a, -7 * a).relative_l2 == pytest.approx(2)
    assert distance(a, 7 * a).relative_l2 == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_pairs_agree_with_numpy_however_they_are_cut(chunk, monkeypatch):
    monkeypatch.setattr(distances, "CHUNK", chunk)
    a, b = torch.randn(13, 11), torch.randn(13, 11)
    x, y = a.double().numpy(), b.double().numpy()
    nx, ny = np.linalg.norm(x), np.linalg.norm(y)
    found = distance(a, b)
    assert found.relative_l2 == pytest.approx(np.linalg.norm(x / nx - y / ny), rel=1e-12)
    assert found.cosine == pytest.approx((x * y).sum() / nx / ny, rel=1e-12)
    assert found.norm_ratio == pytest.approx(ny / nx, rel=1e-12)


def test_a_change_in_the_last_digits_is_still_measured():
    """sqrt(2 - 2 cosine) in fp32 would show 0 here."""
    a = torch.randn(200, 300)
    changed = a.clone()
    changed[5, 7] += 1e-3
    expected = np.linalg.norm(
        a.double().numpy() / np.linalg.norm(a.double().numpy())
        - changed.double().numpy() / np.linalg.norm(changed.double().numpy())
    )
    assert expected < 1e-5
    assert distance(a, changed).relative_l2 == pytest.approx(expected, rel=1e-6)


def test_a_matrix_of_zeros_has_no_direction():
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    assert np.isnan(distance(zero, one).relative_l2)
    assert np.isnan(distance(one, zero).cosine)
    assert distance(one, zero).norm_ratio == 0
    assert np.isnan(distance(zero, one).norm_ratio)


# --- polar factors


def oracle(matrix: torch.Tensor, rank: int | None = None) -> np.ndarray:
    left, _, right = scipy.linalg.svd(matrix.double().numpy(), full_matrices=False)
    return left[:, :rank] @ right[:rank]


SHAPES = [(20, 50), (50, 20), (30, 30), (1, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_polar_factor_is_that_of_the_svd(shape):
    weight = torch.randn(shape)
    factor = polar_factor(weight)
    np.testing.assert_allclose(factor.matrix.numpy(), oracle(weight), atol=1e-5)
    assert factor.rank == min(shape)
    by_definition, rank = by_svd(weight, bits=24)
    np.testing.assert_allclose(by_definition.numpy(), oracle(weight), atol=1e-12)
    assert rank == min(shape)


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (40, 44)])
def test_newton_schulz_steps_arrive_at_the_same_factors(shape):
    weights = torch.stack([torch.randn(shape) * scale for scale in (1, 1e-6, 1e6)])
    factors, converged = by_newton_schulz(weights)
    assert converged.all()
    for weight, factor in zip(weights, factors, strict=True):
        np.testing.assert_allclose(factor.numpy(), oracle(weight), atol=2e-5)


def test_newton_schulz_steps_say_that_they_did_not_arrive():
    low = torch.randn(20, 5) @ torch.randn(5, 40)
    steep = torch.from_numpy(oracle(torch.randn(20, 40))).float() * torch.logspace(0, -5, 20)[:, None]
    _, converged = by_newton_schulz(torch.stack([low, torch.zeros(20, 40), steep, torch.randn(20, 40)]))
    assert converged.tolist() == [False, False, False, True]


@pytest.mark.parametrize("tall", [True, False])
def test_low_rank_gives_a_partial_isometry(tall):
    weight = stored_low_rank(0, (30, 50), 6, torch.float32)
    weight = weight.T if tall else weight
    factor = by_eigenvectors(weight, bits=24)
    assert factor.rank == 6
    np.testing.assert_allclose(factor.matrix.numpy(), oracle(weight, 6), atol=1e-5)
    assert sv_alignment(factor, factor) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (40, 40), (200, 120)], ids=str)
@pytest.mark.parametrize("dtype", STORED_BITS, ids=str)
def test_rounding_to_the_stored_dtype_does_not_fill_up_a_polar_factor(dtype, shape):
    stored = stored_low_rank(1, shape, 10, dtype)
    factor = polar_factor(stored.double(), bits=STORED_BITS[dtype])
    assert factor.rank == 10
    np.testing.assert_allclose(factor.matrix.numpy(), oracle(stored, 10), atol=2e-5)
    random = torch.randn(shape[0], 3 * shape[0]).to(dtype).float()
    assert polar_factor(random, bits=STORED_BITS[dtype]).rank == shape[0]


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (200, 120)], ids=str)
def test_converged_newton_schulz_steps_are_checked_for_the_stored_rank(shape):
    """They make a full isometry of low-rank weights stored in bf16: its noise is within their reach."""
    low, full = stored_low_rank(2, shape, 10, torch.bfloat16).float(), torch.randn(shape).bfloat16().float()
    factors, converged = by_newton_schulz(torch.stack([low, full]))
    assert converged.all()
    assert [has_full_rank(*pair, bits=8) for pair in zip((low, full), factors, strict=True)] == [False, True]
    assert has_full_rank(low, factors[0], bits=24)


def test_ill_conditioned_matrices_keep_their_full_rank():
    other = torch.from_numpy(oracle(torch.randn(40, 60)))
    weight = torch.logspace(0, -4, 40, dtype=torch.float64)[:, None] * other
    factor = by_eigenvectors(weight, bits=24)
    assert factor.rank == 40
    np.testing.assert_allclose(factor.matrix.numpy(), other.numpy(), atol=1e-5)


def test_r_is_its_definition_by_singular_vectors():
    a, b = torch.randn(12, 30), torch.randn(12, 30)
    (left_a, _, right_a), (left_b, _, right_b) = (
        scipy.linalg.svd(m.numpy(), full_matrices=False) for m in (a, b)
    )
    by_definition = ((left_a.T @ left_b) * (right_a @ right_b.T)).sum() / 12
    assert sv_alignment(polar_factor(a), polar_factor(b)) == pytest.approx(by_definition, abs=1e-6)


def test_r_of_different_ranks_is_divided_by_their_geometric_mean():
    wide = torch.eye(8)
    narrow = torch.diag(torch.tensor([1.0, 5, 0, 0, 0, 0, 0, 0]))
    found = sv_alignment(polar_factor(wide), polar_factor(narrow))
    assert found == pytest.approx(2 / np.sqrt(8 * 2), abs=1e-6)


def test_r_ignores_singular_values_and_signs_follow():
    a = torch.randn(16, 24)
    stretched = torch.from_numpy(oracle(a)).float()
    assert sv_alignment(polar_factor(a), polar_factor(stretched)) == pytest.approx(1, abs=1e-5)
    assert sv_alignment(polar_factor(a), polar_factor(-a)) == pytest.approx(-1, abs=1e-5)


def test_a_permuted_expert_needs_no_new_decomposition():
    """polar(P W) = P polar(W).

    R of matched experts from the factors alone equals R of the matched experts.
    """
    dominant, member = random_expert(0), random_expert(1)
    matching = match_neurons(dominant, member)
    applied = matching.apply(member)
    for name, before, after in (
        ("gate", member.gate_FD, applied.gate_FD),
        ("up", member.up_FD, applied.up_FD),
        ("down", member.down_DF, applied.down_DF),
    ):
        matched = matching.projection(name, polar_factor(before).matrix)
        np.testing.assert_allclose(matched.numpy(), polar_factor(after).matrix.numpy(), atol=1e-5)


def test_zeros_have_no_alignment_and_nan_is_rejected():
    assert np.isnan(sv_alignment(polar_factor(torch.zeros(3, 4)), polar_factor(torch.ones(3, 4))))
    with pytest.raises(BadInput, match="NaN"):
        polar_factor(torch.full((3, 4), float("nan")))
