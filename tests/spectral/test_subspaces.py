import numpy as np
import pytest
import scipy.linalg
import torch

from moescope.spectral.decompose import decompose
from moescope.spectral.subspaces import Similarity, make_subspace_grid, orthogonality, similarities
from spectral.builders import orthonormal, unit_rows


def at_k_one(*cosines: float) -> Similarity:
    values = np.array(cosines)
    return Similarity(1, values, values**2, np.abs(values))


def test_overlap_and_largest_cosine_follow_from_scipys_principal_angles():
    generator = np.random.default_rng(0)
    bases = [orthonormal(generator, 20, 8) for _ in range(4)]
    bases[3][:, :5] = bases[0][:, :5]  # experts 0 and 3 share directions
    bases[3] = np.linalg.qr(bases[3])[0]
    first, second = np.triu_indices(4, k=1)
    for similarity in similarities(bases, [1, 2, 4, 8]):
        k = similarity.k
        for pair, (a, b) in enumerate(zip(first, second, strict=True)):
            cosines = np.cos(scipy.linalg.subspace_angles(bases[a][:, :k], bases[b][:, :k]))
            assert similarity.overlap_P[pair] == pytest.approx((cosines**2).sum() / k, abs=1e-12)
            assert similarity.largest_principal_cosine_P[pair] == pytest.approx(cosines.max(), abs=1e-12)


def test_cosines_exist_at_k_one_only_and_keep_their_sign():
    bases = [np.eye(3)[:, :2], np.array([[-0.6, 0.0], [0.8, 0.0], [0.0, 1.0]])]
    one, two = similarities(bases, [1, 2])
    assert one.cosine_P == pytest.approx([-0.6])
    assert one.largest_principal_cosine_P == pytest.approx([0.6])
    assert one.overlap_P == pytest.approx([0.36])
    assert two.cosine_P is None


def test_equal_subspaces_overlap_fully_and_orthogonal_ones_not_at_all():
    basis = np.eye(6)
    equal, orthogonal = similarities([basis[:, :2], basis[:, [1, 0]], basis[:, 2:4]], [2])[0].overlap_P[
        [0, 1]
    ]
    assert (equal, orthogonal) == (1, 0)


def test_pairs_come_in_the_order_of_the_upper_triangle():
    first, second = np.triu_indices(4, k=1)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
        (2, 3),
    ]
    vectors = [np.array([[np.cos(angle)], [np.sin(angle)]]) for angle in (0, 0.1, 0.3, 0.7)]
    expected = np.cos([0.1, 0.3, 0.7, 0.2, 0.6, 0.4])
    np.testing.assert_allclose(similarities(vectors, [1])[0].cosine_P, expected)


def test_cosines_of_real_experts_do_not_depend_on_the_signs_of_their_singular_vectors():
    """W = U S V' is the same matrix with both signs of a singular pair flipped.

    The cosine must come out of W alone.
    """
    generator = np.random.default_rng(1)
    factors = [
        (orthonormal(generator, 30, 12), np.linspace(3, 1, 12), orthonormal(generator, 12, 12))
        for _ in range(5)
    ]
    rows = torch.from_numpy(unit_rows(generator, 5, 12))

    def cosines(signs: np.ndarray) -> np.ndarray:
        matrices = [
            (left * sign * values) @ (right * sign).T
            for sign, (left, values, right) in zip(signs, factors, strict=True)
        ]
        leading = [decompose(torch.from_numpy(matrix), rows, [1]).leading_DK for matrix in matrices]
        return similarities(leading, [1])[0].cosine_P

    expected = cosines(np.ones((5, 12)))
    oriented = [right[:, 0] * np.sign(left[:, 0].mean()) for left, _, right in factors]
    first, second = np.triu_indices(5, k=1)
    np.testing.assert_allclose(
        expected, [oriented[a] @ oriented[b] for a, b in zip(first, second, strict=True)], atol=1e-9
    )
    np.testing.assert_allclose(cosines(generator.choice([-1.0, 1.0], (5, 12))), expected, atol=1e-9)


def test_the_chance_level_of_the_absolute_cosine_agrees_with_simulation():
    d = 256
    vectors = unit_rows(np.random.default_rng(2), 200, d)[:, :, None]
    statistics = orthogonality(similarities(list(vectors), [1])[0], d)
    assert statistics["chance"] == pytest.approx(np.sqrt(2 / (np.pi * d)))
    assert statistics["mean_abs"] == pytest.approx(statistics["chance"], rel=0.02)


@pytest.mark.parametrize("k", [2, 8])
def test_the_chance_level_of_the_overlap_agrees_with_simulation(k):
    d, generator = 32, np.random.default_rng(3)
    statistics = orthogonality(similarities([orthonormal(generator, d, 8) for _ in range(60)], [k])[0], d)
    assert statistics["chance"] == k / d
    assert statistics["mean"] == pytest.approx(k / d, rel=0.02)


def test_statistics_over_pairs_worked_by_hand():
    statistics = orthogonality(at_k_one(0.8, -0.4, 0.2), d_model=64)
    assert statistics["mean"] == pytest.approx(0.2)
    assert statistics["mean_abs"] == pytest.approx(1.4 / 3)
    assert (statistics["max"], statistics["min"], statistics["max_abs"]) == (0.8, -0.4, 0.8)
    assert statistics["std"] == pytest.approx(
        np.sqrt((0.36 + 0.36 + 0) / 2)
    )  # the sample one: two degrees of freedom


def test_redundant_and_collapsed_pairs_are_counted_whatever_their_sign():
    statistics = orthogonality(at_k_one(0.9, -0.75, 0.7, -0.31, 0.3, 0.0), d_model=64)
    assert statistics["n_pairs_above_0_7"] == 2
    assert statistics["n_pairs_above_0_3"] == 4
    assert statistics["max_abs"] == 0.9


def test_beyond_k_one_statistics_are_of_the_overlap():
    similarity = Similarity(4, None, np.array([0.1, 0.8]), np.array([0.9, 1.0]))
    statistics = orthogonality(similarity, d_model=64)
    assert statistics["mean"] == pytest.approx(0.45)
    assert (statistics["n_pairs_above_0_3"], statistics["chance"]) == (
        None,
        4 / 64,
    )  # counts are of |cos| only


def test_one_pair_has_no_sample_deviation():
    assert np.isnan(orthogonality(at_k_one(0.5), d_model=64)["std"])


@pytest.mark.parametrize(
    ("n_experts", "smallest_rank", "d_model", "expected"),
    [
        (8, 4096, 4096, [1, 2, 4, 8, 16, 32, 64]),
        (32, 64, 128, [1, 2, 4, 8, 16, 32, 64]),
        (32, 64, 64, [1, 2, 4, 8, 16, 32]),  # k = d: every subspace is the whole space
        (33, 4096, 4096, [1, 16, 64]),
        (8, 20, 64, [1, 2, 4, 8, 16]),
        (128, 10, 64, [1]),
    ],
)
def test_the_subspace_grid_stops_at_64_at_the_smallest_rank_and_below_d(
    n_experts, smallest_rank, d_model, expected
):
    assert make_subspace_grid(n_experts, smallest_rank, d_model) == expected
