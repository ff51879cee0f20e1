import numpy as np
import pytest

from moescope.spectral.bidiagonal import DENSE, BidiagonalSVD, by_bidiagonal_form
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
def test_an_expert_is_decomposed_as_by_lapack(kind, shape):
    generator = np.random.default_rng(3)
    values = planted(kind, min(shape))
    matrix, rows = expert_with_spectrum(generator, *shape, values), unit_rows(generator, 6, shape[1])
    found = by_bidiagonal_form(matrix, rows, 64)
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


def test_what_it_is_given_is_left_as_it_was():
    generator = np.random.default_rng(4)
    matrix, rows = generator.standard_normal((70, 90)), unit_rows(generator, 3, 90)
    before = matrix.copy(), rows.copy()
    by_bidiagonal_form(matrix, rows, 8)
    np.testing.assert_array_equal(matrix, before[0])
    np.testing.assert_array_equal(rows, before[1])
