import numpy as np
import pytest

from moescope.spectral.lapack import blas, lapack, lapack_with_workspace, product


def test_a_product_comes_out_as_numpy_has_it():
    matrix = np.random.default_rng(0).standard_normal((5, 3))
    gram = np.zeros((3, 3))
    blas("dsyrk", "L", "N", 3, 5, 2.0, matrix, 3, 0.0, gram, 3)
    np.testing.assert_allclose(np.triu(gram), np.triu(2 * matrix.T @ matrix), rtol=1e-14)


@pytest.mark.parametrize(("n", "inner", "columns"), [(4, 5, 6), (1, 5, 1), (7, 1, 3)])
def test_products_are_numpys(n, inner, columns):
    generator = np.random.default_rng(1)
    left, right = generator.standard_normal((n, inner)), generator.standard_normal((inner, columns))
    np.testing.assert_allclose(product(left, right), left @ right, atol=1e-14)
    np.testing.assert_allclose(product(left, right.T, transposed=True), left @ right, atol=1e-14)
    np.testing.assert_allclose(product(left[::-1], right[:, ::-1]), left[::-1] @ right[:, ::-1], atol=1e-14)


def test_workspace_is_asked_for_and_given():
    matrix = np.asfortranarray(np.random.default_rng(0).standard_normal((70, 40)))
    reduced, scales = matrix.copy(order="F"), np.empty(40)
    lapack_with_workspace("dgeqrf", 70, 40, reduced, 70, scales)
    triangle = np.triu(reduced[:40])
    np.testing.assert_allclose(triangle.T @ triangle, matrix.T @ matrix, atol=1e-12)


def test_what_lapack_reports_is_raised():
    with pytest.raises(np.linalg.LinAlgError, match="dpttrf returned info = 2"):
        lapack("dpttrf", 2, np.ones(2), np.full(1, 3.0))


@pytest.mark.parametrize("argument", [np.ones(4)[::2], np.ones(2, np.float32)], ids=["with gaps", "fp32"])
def test_arrays_that_lapack_would_misread_are_refused(argument):
    with pytest.raises(AssertionError):
        lapack("dpttrf", 2, argument, np.ones(1))
