"""Distances against numpy in fp64 and cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moescope.geometry import distances
from moescope.geometry.distances import all_distances, cosine, distance, gram, norm_ratio, relative_l2


def test_hand_worked_pairs():
    a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    assert relative_l2(a, b) == pytest.approx(2**0.5)
    assert cosine(a, b) == 0
    assert norm_ratio(a, b) == pytest.approx(4 / 3)
    assert distance(a, b).change == pytest.approx(5 / 3)
    assert relative_l2(a, -7 * a) == pytest.approx(2)
    assert relative_l2(a, 7 * a) == pytest.approx(0, abs=1e-15)


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
    assert found.change == pytest.approx(np.linalg.norm(x - y) / nx, rel=1e-12)


def test_a_change_in_the_last_digits_is_still_measured():
    """sqrt(2 - 2 cosine) in fp32 would show 0 here."""
    a = torch.randn(200, 300)
    moved = a.clone()
    moved[5, 7] += 1e-3
    expected = np.linalg.norm(
        a.double().numpy() / np.linalg.norm(a.double().numpy())
        - moved.double().numpy() / np.linalg.norm(moved.double().numpy())
    )
    assert expected < 1e-5
    assert relative_l2(a, moved) == pytest.approx(expected, rel=1e-6)
    assert all_distances([a, moved]).relative_l2_EE[0, 1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_all_pairs_agree_with_each_pair(chunk, monkeypatch):
    monkeypatch.setattr(distances, "CHUNK", chunk)
    experts = [torch.randn(9, 14) * scale for scale in (1, 3, 0.5, 10)]
    pairs = all_distances(experts)
    for i, a in enumerate(experts):
        for j, b in enumerate(experts):
            one = distance(a, b)
            assert pairs.relative_l2_EE[i, j] == pytest.approx(one.relative_l2, abs=1e-7)
            assert pairs.cosine_EE[i, j] == pytest.approx(one.cosine, abs=1e-12)
            assert pairs.norm_ratio_EE[i, j] == pytest.approx(one.norm_ratio, rel=1e-12)


def test_the_gram_matrix_of_bfloat16_is_summed_in_fp64():
    experts = [torch.randn(50, 60).bfloat16() for _ in range(3)]
    flat = np.stack([expert.double().numpy().ravel() for expert in experts])
    np.testing.assert_allclose(gram(experts), flat @ flat.T, rtol=1e-12)


def test_a_matrix_of_zeros_has_no_direction():
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    assert np.isnan(relative_l2(zero, one))
    assert np.isnan(cosine(one, zero))
    assert norm_ratio(one, zero) == 0
    assert np.isnan(norm_ratio(zero, one))
    pairs = all_distances([zero, one])
    assert np.isnan(pairs.relative_l2_EE[0, 1])
    assert np.isnan(pairs.relative_l2_EE[0, 0])
    assert pairs.relative_l2_EE[1, 1] == 0
    assert pairs.norm_ratio_EE[1, 0] == 0
    assert np.isnan(pairs.norm_ratio_EE[0, 1])
