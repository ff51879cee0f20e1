import numpy as np
import pytest
import scipy.stats

from moescope.spectral.spectra import spectrum_statistics


@pytest.mark.parametrize("d", [1, 5, 64])
def test_every_rank_of_an_identity_is_its_width(d):
    statistics = spectrum_statistics(np.ones(d))
    assert statistics["stable_rank"] == pytest.approx(d)
    assert statistics["effective_rank"] == pytest.approx(d)
    assert (statistics["rank"], statistics["condition"], statistics["spectral_norm"]) == (d, 1, 1)
    assert statistics["frobenius"] == pytest.approx(np.sqrt(d))


def test_every_rank_of_a_rank_one_matrix_is_one():
    statistics = spectrum_statistics(np.array([7.0]))
    assert [
        statistics[name] for name in ("stable_rank", "effective_rank", "rank", "condition")
    ] == pytest.approx([1, 1, 1, 1])


def test_statistics_of_a_two_value_spectrum_worked_by_hand():
    statistics = spectrum_statistics(np.array([3.0, 1.0]))
    assert statistics["stable_rank"] == pytest.approx(10 / 9)
    assert statistics["effective_rank"] == pytest.approx(4 / 3**0.75)  # shares 3/4 and 1/4
    assert statistics["condition"] == pytest.approx(3)


def test_statistics_agree_with_numpy_and_scipy():
    matrix = np.random.default_rng(0).standard_normal((30, 18))
    values = np.linalg.svd(matrix, compute_uv=False)
    statistics = spectrum_statistics(values)
    assert statistics["frobenius"] == pytest.approx(np.linalg.norm(matrix))
    assert statistics["spectral_norm"] == pytest.approx(np.linalg.norm(matrix, 2))
    assert statistics["condition"] == pytest.approx(np.linalg.cond(matrix))
    assert statistics["rank"] == np.linalg.matrix_rank(matrix)
    assert statistics["stable_rank"] == pytest.approx(
        np.trace(matrix.T @ matrix) / np.linalg.norm(matrix, 2) ** 2
    )
    assert statistics["effective_rank"] == pytest.approx(np.exp(scipy.stats.entropy(values)))


def test_ranks_do_not_depend_on_the_scale_of_the_matrix():
    values = np.array([5.0, 2.0, 0.1])
    small, large = spectrum_statistics(values * 1e-3), spectrum_statistics(values * 1e3)
    for name in ("stable_rank", "effective_rank", "condition"):
        assert small[name] == pytest.approx(large[name])
