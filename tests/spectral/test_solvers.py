import numpy as np
import pytest

from moescope.spectral import decompose as solvers
from moescope.spectral.decompose import (
    DENSE,
    BidiagonalSVD,
    bidiagonal_root,
    leading_eigenvectors,
    solve_bidiagonal,
    solve_gram,
)
from spectral.builders import expert_with_spectrum, unit_rows

SIZES = [1, 2, 3, DENSE, DENSE + 1, 200]
SHAPES = [(300, 200), (200, 300), (150, 150), (40, 90), (3, 2), (1, 4), (4, 1), (1, 1)]


def bidiagonal(size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    diagonal, above = generator.standard_normal(size), generator.standard_normal(size - 1)
    return diagonal, above, np.diag(diagonal) + np.diag(above, 1)


@pytest.mark.parametrize("size", SIZES)
def test_singular_values_of_a_bidiagonal_matrix_agree_with_lapack(size):
    diagonal, above, matrix = bidiagonal(size)
    expected = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(BidiagonalSVD(diagonal, above).values_R, expected, atol=1e-13 * expected[0])


@pytest.mark.parametrize("size", SIZES)
def test_coordinates_are_those_in_the_left_singular_vectors(size):
    diagonal, above, matrix = bidiagonal(size)
    rows = unit_rows(np.random.default_rng(1), 5, size)
    found = BidiagonalSVD(diagonal, above).left_coordinates(rows)
    expected = rows @ np.linalg.svd(matrix)[0]
    np.testing.assert_allclose(found**2, expected**2, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_right_vectors_are_orthonormal_and_stretched_by_their_values(size):
    diagonal, above, matrix = bidiagonal(size)
    svd, count = BidiagonalSVD(diagonal, above), min(size, 7)
    vectors = svd.right_vectors(count)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(count), atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(matrix @ vectors, axis=0), svd.values_R[:count], rtol=1e-12)


@pytest.mark.parametrize(
    "zeros", ["all of it", "half of the diagonal", "half above the diagonal", "last rows"]
)
def test_zeros_in_the_bidiagonal_matrix_do_no_harm(zeros):
    size = 150
    diagonal, above, _ = bidiagonal(size)
    if zeros == "all of it":
        diagonal[:], above[:] = 0, 0
        diagonal[0] = 1
    elif zeros == "last rows":
        diagonal[40:], above[39:] = 0, 0
    else:
        (diagonal if zeros == "half of the diagonal" else above)[::2] = 0
    matrix = np.diag(diagonal) + np.diag(above, 1)
    rows = unit_rows(np.random.default_rng(2), 4, size)
    svd = BidiagonalSVD(diagonal, above)
    left, values, _ = np.linalg.svd(matrix)
    np.testing.assert_allclose(svd.values_R, values, atol=1e-13 * values[0])
    rank = int((values > 1e-12).sum())
    energy = (svd.left_coordinates(rows)[:, :rank] ** 2).sum(axis=1)
    np.testing.assert_allclose(energy, ((rows @ left[:, :rank]) ** 2).sum(axis=1), atol=1e-12)


def planted(kind: str, size: int) -> np.ndarray:
    return {
        "flat": np.linspace(2, 1, size),
        "repeated": np.repeat([3.0, 1.0], [(size + 1) // 2, size // 2]),
        "condition 1e8": np.geomspace(1, 1e-8, size),
        "rank-deficient": np.linspace(2, 1, max(1, size - 7)),
        "rank one": np.ones(1),
    }[kind]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["flat", "repeated", "condition 1e8", "rank-deficient", "rank one"])
def test_the_bidiagonal_method_agrees_with_lapack(kind, shape):
    generator = np.random.default_rng(3)
    values = planted(kind, min(shape))
    matrix, rows = expert_with_spectrum(generator, *shape, values), unit_rows(generator, 6, shape[1])
    found = solve_bidiagonal(matrix, rows, 64)
    _, expected, right = np.linalg.svd(matrix, full_matrices=False)
    np.testing.assert_allclose(found.values_R, expected, atol=1e-13 * expected[0])
    ends = np.flatnonzero(np.diff(np.append(values, 0)) < -1e-10)  # where a cut does not part a tie
    ours, theirs = (
        np.cumsum(coordinates**2, axis=1) for coordinates in (found.coordinates_ER, rows @ right.T)
    )
    np.testing.assert_allclose(ours[:, ends], theirs[:, ends], atol=1e-8)
    leading = found.leading_DK[:, : len(values)]
    np.testing.assert_allclose(leading.T @ leading, np.eye(leading.shape[1]), atol=1e-12)
    stretched = np.linalg.norm(matrix @ leading, axis=0)
    np.testing.assert_allclose(stretched, expected[: leading.shape[1]], atol=1e-13 * expected[0])


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
def test_the_gram_method_agrees_with_lapack(kind, shape, n_routers):
    generator = np.random.default_rng(0)
    values = SPECTRA[kind](min(shape))
    matrix, rows = expert_with_spectrum(generator, *shape, values), unit_rows(generator, n_routers, shape[1])
    found = solve_gram(matrix, rows, 64)
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
def test_leading_vectors_of_the_gram_method_are_orthonormal_and_stretched_by_their_values(
    kind, shape, n_routers
):
    generator = np.random.default_rng(1)
    matrix = expert_with_spectrum(generator, *shape, SPECTRA[kind](min(shape)))
    found = solve_gram(matrix, unit_rows(generator, n_routers, shape[1]), 64)
    count = min(64, *shape)
    assert found.leading_DK.shape == (shape[1], count)
    np.testing.assert_allclose(found.leading_DK.T @ found.leading_DK, np.eye(count), atol=1e-11)
    stretched = np.linalg.norm(matrix @ found.leading_DK, axis=0)
    np.testing.assert_allclose(stretched, found.values_R[:count], rtol=1e-11)


def test_the_energies_of_a_unit_row_in_a_tall_expert_of_full_rank_sum_to_one(n_routers):
    generator = np.random.default_rng(2)
    matrix, rows = generator.standard_normal((400, 170)), unit_rows(generator, n_routers, 170)
    energy = solve_gram(matrix, rows, 8).coordinates_ER ** 2
    np.testing.assert_allclose(energy.sum(axis=1), 1, atol=1e-12)


def test_both_ways_through_the_tridiagonal_matrix_agree(monkeypatch):
    generator = np.random.default_rng(3)
    matrix, rows = generator.standard_normal((300, 170)), unit_rows(generator, 5, 170)
    compact = solve_gram(matrix, rows, 8)
    monkeypatch.setattr(solvers, "ROUTERS_PER_DIMENSION", 0)
    formed = solve_gram(matrix, rows, 8)
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


@pytest.mark.parametrize("solve", [solve_bidiagonal, solve_gram])
def test_inputs_are_not_modified(solve):
    generator = np.random.default_rng(4)
    matrix, rows = generator.standard_normal((70, 90)), unit_rows(generator, 3, 90)
    before = matrix.copy(), rows.copy()
    solve(matrix, rows, 8)
    np.testing.assert_array_equal(matrix, before[0])
    np.testing.assert_array_equal(rows, before[1])
