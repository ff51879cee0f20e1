import numpy as np
import pytest

from moescope.spectral import tridiagonal
from moescope.spectral.tridiagonal import bidiagonal_root, by_gram_matrix, leading_eigenvectors
from spectral.builders import expert_with_spectrum, unit_rows

SHAPES = [(300, 200), (200, 300), (150, 150), (40, 90), (3, 2), (1, 4), (4, 1), (1, 1)]
SPECTRA = {
    "flat": lambda size: np.linspace(2, 1, size),
    "power law": lambda size: np.arange(1, size + 1) ** -0.8,
    "repeated": lambda size: np.repeat([3.0, 1.0], [(size + 1) // 2, size // 2]),
    "condition 1e4": lambda size: np.geomspace(1, 1e-4, size),
}


@pytest.fixture(params=["few routers", "more routers than dimensions"])
def n_routers(request):
    """Few routers take the compact form, many take all eigenvectors."""
    return {"few routers": 6, "more routers than dimensions": 310}[request.param]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", SPECTRA)
def test_an_expert_is_decomposed_as_by_lapack(kind, shape, n_routers):
    generator = np.random.default_rng(0)
    values = SPECTRA[kind](min(shape))
    matrix, rows = expert_with_spectrum(generator, *shape, values), unit_rows(generator, n_routers, shape[1])
    found = by_gram_matrix(matrix, rows, 64)
    _, expected, right = np.linalg.svd(matrix, full_matrices=False)
    np.testing.assert_allclose(found.values_R, expected, atol=1e-10)
    ends = np.flatnonzero(np.diff(np.append(values, 0)) < -1e-10)  # where a cut does not part a tie
    ours, theirs = (
        np.cumsum(coordinates**2, axis=1) for coordinates in (found.coordinates_ER, rows @ right.T)
    )
    np.testing.assert_allclose(
        ours[:, ends], theirs[:, ends], atol=1e-7 if kind == "condition 1e4" else 1e-12
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["flat", "power law", "repeated"])
def test_leading_vectors_are_orthonormal_and_stretched_by_their_values(kind, shape, n_routers):
    generator = np.random.default_rng(1)
    matrix = expert_with_spectrum(generator, *shape, SPECTRA[kind](min(shape)))
    found = by_gram_matrix(matrix, unit_rows(generator, n_routers, shape[1]), 64)
    count = min(64, *shape)
    assert found.leading_DK.shape == (shape[1], count)
    np.testing.assert_allclose(found.leading_DK.T @ found.leading_DK, np.eye(count), atol=1e-11)
    stretched = np.linalg.norm(matrix @ found.leading_DK, axis=0)
    np.testing.assert_allclose(stretched, found.values_R[:count], rtol=1e-11)


def test_the_energies_of_a_unit_row_in_a_tall_expert_of_full_rank_sum_to_one(n_routers):
    generator = np.random.default_rng(2)
    matrix, rows = generator.standard_normal((400, 170)), unit_rows(generator, n_routers, 170)
    energy = by_gram_matrix(matrix, rows, 8).coordinates_ER ** 2
    np.testing.assert_allclose(energy.sum(axis=1), 1, atol=1e-12)


def test_both_ways_through_the_tridiagonal_matrix_agree(monkeypatch):
    generator = np.random.default_rng(3)
    matrix, rows = generator.standard_normal((300, 170)), unit_rows(generator, 5, 170)
    compact = by_gram_matrix(matrix, rows, 8)
    monkeypatch.setattr(tridiagonal, "ALL_VECTORS_UP_TO", 1000)
    formed = by_gram_matrix(matrix, rows, 8)
    np.testing.assert_allclose(compact.coordinates_ER**2, formed.coordinates_ER**2, atol=1e-12)
    np.testing.assert_allclose(compact.values_R, formed.values_R, rtol=1e-12)
    np.testing.assert_allclose(np.abs((compact.leading_DK * formed.leading_DK).sum(axis=0)), 1, atol=1e-12)


def test_the_root_of_a_tridiagonal_matrix_gives_it_back():
    generator = np.random.default_rng(4)
    diagonal, beside = generator.uniform(3, 4, 30), generator.uniform(-1, 1, 29)
    roots, above = bidiagonal_root(diagonal, beside)
    root = np.diag(roots) + np.diag(above, 1)
    expected = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    np.testing.assert_allclose(root @ root.T, expected, atol=1e-14)


def test_a_matrix_with_a_negative_eigenvalue_has_no_root():
    with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
        bidiagonal_root(np.ones(3), np.full(2, 2.0))


def test_leading_eigenvectors_of_a_split_tridiagonal_matrix_are_found_largest_first():
    diagonal, beside = np.arange(90.0), np.zeros(89)
    np.testing.assert_allclose(
        np.abs(leading_eigenvectors(diagonal, beside, 5)), np.eye(90)[:-6:-1], atol=1e-14
    )


def test_what_it_is_given_is_left_as_it_was():
    generator = np.random.default_rng(5)
    matrix, rows = generator.standard_normal((90, 70)), unit_rows(generator, 3, 70)
    before = matrix.copy(), rows.copy()
    by_gram_matrix(matrix, rows, 8)
    np.testing.assert_array_equal(matrix, before[0])
    np.testing.assert_array_equal(rows, before[1])
