import numpy as np
import pytest
import scipy.stats
import torch

from moescope.errors import BadInput
from moescope.spectral import decompose as module
from moescope.spectral.alignment import cumulative_energy
from moescope.spectral.decompose import (
    LEADING_VECTORS,
    decompose,
    gram_suffices,
    make_k_grid,
    numerical_rank,
    random_rank,
    spectrum_statistics,
)
from spectral.builders import STORED_BITS, expert_with_spectrum, lapack_align, stored_low_rank, unit_rows

SHAPES = {"tall": (96, 40), "wide": (40, 96), "square": (48, 48)}
BOUND = {"exact": 1e-9, "fast": 1e-6}


def spectrum(kind: str, size: int) -> np.ndarray:
    one_small_value = np.append(np.linspace(1, 0.5, size - 1), 1e-4)
    return {
        "flat": np.linspace(2, 1, size),
        "power law": np.arange(1, size + 1) ** -0.8,
        "condition 1e4, geometric": np.geomspace(1, 1e-4, size),
        "condition 1e4, linear": np.linspace(1, 1e-4, size),
        "condition 1e4, one small value": one_small_value,
        "condition 1e6, geometric": np.geomspace(1, 1e-6, size),
        "rank-deficient": np.linspace(2, 1, size - 7),
        "rank one": np.ones(1),
    }[kind]


def expert_and_rows(seed: int, shape: tuple[int, int], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The expert, and unit rows with its last right singular vector among them.

    The hardest for a Gram matrix.
    """
    generator = np.random.default_rng(seed)
    matrix = expert_with_spectrum(generator, *shape, values)
    rows = unit_rows(generator, 6, shape[1])
    rows[0] = np.linalg.svd(matrix, full_matrices=False)[2][len(values) - 1]
    return matrix, rows


def largest_error(matrix: np.ndarray, rows: np.ndarray, ks: list[int], precision: str) -> float:
    """Of align at those ks, against LAPACK's SVD in fp64."""
    result = decompose(torch.from_numpy(matrix), torch.from_numpy(rows), ks, precision)
    ours = cumulative_energy(result.energy_ER, ks)[:, : len(ks)]
    return max(
        float(np.abs(ours[:, index] - lapack_align(matrix, rows, k)).max()) for index, k in enumerate(ks)
    )


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "kind",
    [
        "flat",
        "power law",
        "condition 1e4, geometric",
        "condition 1e4, linear",
        "condition 1e4, one small value",
        "condition 1e6, geometric",
        "rank-deficient",
        "rank one",
    ],
)
def test_align_agrees_with_lapack_at_every_k_of_the_grid(kind, shape, precision):
    values = spectrum(kind, min(shape))
    for seed in range(3):
        matrix, rows = expert_and_rows(seed, shape, values)
        k_grid = make_k_grid(min(shape), extra=(3, len(values)))
        assert largest_error(matrix, rows, k_grid, precision) <= BOUND[precision]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_align_agrees_with_lapack_where_k_does_not_cut_a_tie(shape, precision):
    size = min(shape)
    values = np.repeat([3.0, 2.0, 1.0, 0.05], [4, 12, 16, size - 32])
    matrix, rows = expert_and_rows(0, shape, values)
    assert largest_error(matrix, rows, [4, 16, 32, size], precision) <= BOUND[precision]


def test_a_bf16_expert_is_decomposed_in_fp64():
    generator = np.random.default_rng(0)
    matrix = torch.from_numpy(generator.standard_normal((80, 32))).to(torch.bfloat16)
    rows = unit_rows(generator, 4, 32)
    k_grid = make_k_grid(32)
    result = decompose(matrix, torch.from_numpy(rows), k_grid, "exact")
    ours = cumulative_energy(result.energy_ER, k_grid)
    for index, k in enumerate(k_grid):
        np.testing.assert_allclose(ours[:, index], lapack_align(matrix.double().numpy(), rows, k), atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("missing", [1, 7, 30])
def test_rank_is_found_and_rank_deficient_experts_take_the_fallback(shape, missing):
    rank = min(shape) - missing
    matrix, rows = expert_and_rows(2, shape, np.linspace(2, 1, rank))
    result = decompose(torch.from_numpy(matrix), torch.from_numpy(rows), make_k_grid(min(shape)))
    assert (result.rank, result.full_rank, result.fallback) == (rank, min(shape), True)


STORED_SHAPES = [(96, 40), (40, 96), (64, 64), (300, 120), (128, 384)]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", STORED_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", STORED_BITS, ids=str)
def test_rounding_to_the_stored_dtype_does_not_fill_up_a_rank(dtype, shape, precision):
    """Beyond the rank there is nothing: align at every k >= 10 is that of the 10 leading vectors by numpy."""
    stored = stored_low_rank(sum(shape), shape, 10, dtype).double()
    rows = unit_rows(np.random.default_rng(0), 6, shape[1])
    k_grid = make_k_grid(min(shape), extra=(10,))
    result = decompose(stored, torch.from_numpy(rows), k_grid, precision, STORED_BITS[dtype])
    _, values, right = np.linalg.svd(stored.numpy(), full_matrices=False)
    assert result.rank == 10
    np.testing.assert_allclose(result.singular_values_R, values[:10], rtol=1e-10)
    energy = cumulative_energy(result.energy_ER, k_grid)
    for index, k in enumerate(k_grid):
        expected = ((rows @ right[: min(k, 10)].T) ** 2).sum(axis=1)
        np.testing.assert_allclose(energy[:, index], expected, atol=BOUND[precision])
    assert result.leading_DK.shape == (shape[1], 10)


@pytest.mark.parametrize("rank", [1, 10, 64])
@pytest.mark.parametrize("shape", [(96, 128), (300, 120), (256, 256)], ids=str)
def test_a_product_computed_in_fp32_has_the_rank_of_its_factors(shape, rank):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        left = torch.randn(shape[0], rank, generator=generator)
        product = left @ torch.randn(rank, shape[1], generator=generator)
        values = np.linalg.svd(product.double().numpy(), compute_uv=False)
        assert numerical_rank(values, shape, STORED_BITS[torch.float32]) == rank


@pytest.mark.parametrize("shape", [(96, 40), (40, 96), (300, 120), (128, 384)], ids=str)
@pytest.mark.parametrize("dtype", STORED_BITS, ids=str)
def test_a_random_matrix_keeps_its_full_rank_in_every_stored_dtype(dtype, shape):
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        stored = torch.randn(shape, generator=draw).to(dtype).double()
        rows = torch.from_numpy(unit_rows(np.random.default_rng(seed), 4, shape[1]))
        result = decompose(stored, rows, make_k_grid(min(shape)), bits=STORED_BITS[dtype])
        assert result.rank == min(shape)


@pytest.mark.parametrize(
    ("shape", "bits"), [((200, 200), 8), ((200, 200), 4), ((200, 300), 2), ((60, 300), 2)]
)
def test_the_rank_of_random_matrices_is_the_expected_one(shape, bits):
    values = np.linalg.svd(np.random.default_rng(0).standard_normal((40, *shape)), compute_uv=False)
    ranks = numerical_rank(values, shape, bits)
    assert ranks.mean() == pytest.approx(random_rank(shape, bits), abs=0.5)


@pytest.mark.parametrize(("spread", "highest"), [(0.25, [10]), (1.0, [11, 12, 13])])
@pytest.mark.parametrize("side", [(-1, 1), (1, -1)], ids=["rows", "columns"])
def test_uneven_norms_add_up_to_three_directions_of_rounding(side, spread, highest):
    """The stated limit of the tolerance: log-normal norms of rows or columns, rank 10, 512 x 512 in bf16."""
    ranks = []
    for seed in range(5):
        generator = np.random.default_rng(seed)
        weight = generator.standard_normal((512, 10)) @ generator.standard_normal((10, 512))
        weight *= np.exp(spread * generator.standard_normal(512)).reshape(side)
        values = np.linalg.svd(torch.from_numpy(weight).bfloat16().double().numpy(), compute_uv=False)
        ranks.append(int(numerical_rank(values, weight.shape, 8)))
    assert min(ranks) >= 10
    assert max(ranks) in highest


def test_the_tolerance_lies_at_the_norm_of_rounding_errors_worked_by_hand():
    """Singular values 1 and t of a 2 x 8 matrix in bf16: rms sqrt((1 + t^2) / 16), so t counts above
    2^-8 (1/4) (sqrt 2 + sqrt 8) = 0.004143."""
    for t, rank in ((0.0042, 2), (0.0041, 1)):
        matrix = torch.zeros(2, 8, dtype=torch.float64)
        matrix[0, 0], matrix[1, 1] = 1.0, t
        assert decompose(matrix, torch.eye(8, dtype=torch.float64), [1, 2], bits=8).rank == rank
        assert decompose(matrix.float(), torch.eye(8, dtype=torch.float64), [1, 2]).rank == 2


WHERE_THE_GRAM_MATRIX_ERRS = {
    "wide, at full rank": ((40, 96), np.append(np.linspace(1, 0.5, 39), 1e-5), [40], "exact"),
    "wide, very ill-conditioned": ((40, 96), np.append(np.linspace(1, 0.5, 39), 1e-6), [40], "fast"),
    "a narrow gap deep in the spectrum": (
        (96, 40),
        np.r_[np.linspace(1, 0.5, 16), np.linspace(1e-5, 0.8e-5, 24)],
        [24],
        "exact",
    ),
    "the same, wide": (
        (40, 96),
        np.r_[np.linspace(1, 0.5, 16), np.linspace(1e-5, 0.8e-5, 24)],
        [24],
        "exact",
    ),
}


@pytest.mark.parametrize("case", WHERE_THE_GRAM_MATRIX_ERRS.values(), ids=WHERE_THE_GRAM_MATRIX_ERRS)
def test_the_fallback_mends_experts_that_the_gram_matrix_alone_gets_wrong(case, monkeypatch):
    shape, values, ks, precision = case
    experts = [expert_and_rows(seed, shape, values) for seed in range(5)]

    def worst_error() -> float:
        return max(largest_error(matrix, rows, ks, precision) for matrix, rows in experts)

    assert all(decompose(*map(torch.from_numpy, expert), ks, precision).fallback for expert in experts)
    assert worst_error() <= BOUND[precision]
    monkeypatch.setattr(module, "gram_suffices", lambda *_: True)
    assert worst_error() > 10 * BOUND[precision]


def suffices(values, precision, k_grid, tall=True, row=None):
    """Whether the check lets a spectrum pass.

    For a router that lies evenly in all directions unless given.
    """
    squares = torch.from_numpy(values) ** 2
    row = np.ones(len(values)) if row is None else row
    coordinates = torch.from_numpy(row / np.linalg.norm(row))[None]
    shape = (96, len(values)) if tall else (len(values), 96)
    return bool(gram_suffices(squares[None], coordinates[None], shape, k_grid, BOUND[precision]))


def test_exact_is_stricter_than_fast_about_the_same_spectrum():
    values = np.geomspace(1, 1e-5, 40)
    assert suffices(values, "fast", [32])
    assert not suffices(values, "exact", [32])


def test_the_smallest_value_matters_to_wide_experts_only():
    values = np.append(np.linspace(1, 0.5, 39), 1e-5)
    assert suffices(values, "exact", [40])
    assert not suffices(values, "exact", [40], tall=False)


def test_a_narrow_gap_matters_only_to_routers_that_lie_at_it():
    values = np.r_[np.linspace(1, 0.5, 16), np.linspace(1e-4, 0.8e-4, 24)]
    far = np.r_[np.ones(16), np.zeros(24)]
    assert suffices(values, "exact", [24], row=far)
    assert not suffices(values, "exact", [24])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("smallest", [1e-2, 1e-3, 1e-4])
def test_the_bound_holds_where_the_check_passes(smallest, shape):
    """The error really made stays below the tolerance on spectra that are let pass, and they are let pass."""
    k_grid = make_k_grid(min(shape))
    for seed in range(4):
        matrix, rows = expert_and_rows(seed, shape, np.geomspace(1, smallest, min(shape)))
        for precision in BOUND:
            assert largest_error(matrix, rows, k_grid, precision) <= BOUND[precision]
        assert not decompose(torch.from_numpy(matrix), torch.from_numpy(rows), k_grid, "fast").fallback


def test_align_of_a_wide_expert_levels_off_below_one_at_full_rank():
    generator = np.random.default_rng(5)
    matrix, rows = generator.standard_normal((16, 64)), unit_rows(generator, 200, 64)
    result = decompose(torch.from_numpy(matrix), torch.from_numpy(rows), make_k_grid(16))
    plateau = result.energy_ER.sum(axis=1)
    assert plateau.max() < 0.6
    assert plateau.mean() == pytest.approx(16 / 64, rel=0.05)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e307])
def test_the_scale_of_the_weights_changes_singular_values_and_nothing_else(scale):
    matrix, rows = expert_and_rows(3, (50, 30), spectrum("power law", 30))
    plain = decompose(torch.from_numpy(matrix), torch.from_numpy(rows), make_k_grid(30))
    scaled = decompose(torch.from_numpy(matrix * scale), torch.from_numpy(rows), make_k_grid(30))
    np.testing.assert_allclose(scaled.singular_values_R, plain.singular_values_R * scale, rtol=1e-12)
    np.testing.assert_allclose(scaled.energy_ER, plain.energy_ER, atol=1e-12)
    assert not plain.fallback
    assert not scaled.fallback


@pytest.mark.parametrize("shape", [(200, 90), (90, 200), (70, 70), (30, 50)], ids=str)
@pytest.mark.parametrize("kind", ["power law", "condition 1e4, geometric", "rank-deficient"])
def test_leading_vectors_are_orthonormal_singular_vectors_with_positive_mean_output(shape, kind):
    matrix, rows = expert_and_rows(7, shape, spectrum(kind, min(shape)))
    result = decompose(torch.from_numpy(matrix), torch.from_numpy(rows), make_k_grid(min(shape)))
    leading, count = result.leading_DK, min(LEADING_VECTORS, result.rank)
    assert leading.shape == (shape[1], count)
    np.testing.assert_allclose(leading.T @ leading, np.eye(count), atol=1e-12)
    np.testing.assert_allclose(
        np.linalg.norm(matrix @ leading, axis=0), result.singular_values_R[:count], rtol=1e-8
    )
    assert ((matrix @ leading).mean(axis=0) > 0).all()


@pytest.mark.parametrize("shape", [(96, 40), (40, 96)], ids=str)
@pytest.mark.parametrize("kind", ["power law", "rank-deficient"])
def test_leading_vectors_do_not_depend_on_the_signs_the_solver_returns(shape, kind, monkeypatch):
    matrix, rows = expert_and_rows(8, shape, spectrum(kind, min(shape)))

    def leading() -> np.ndarray:
        return decompose(torch.from_numpy(matrix), torch.from_numpy(rows), make_k_grid(min(shape))).leading_DK

    def flipped(route):
        def solve(*arguments):
            found = route(*arguments)
            return found._replace(leading_DK=-found.leading_DK)

        return solve

    as_solved = leading()
    for route in ("solve_gram", "solve_bidiagonal"):
        monkeypatch.setattr(module, route, flipped(getattr(module, route)))
    np.testing.assert_array_equal(leading(), as_solved)


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", [(200, 90), (90, 200), (130, 130)], ids=str)
@pytest.mark.parametrize("condition", [1e4, 1e5, 1e6, 1e8])
def test_align_agrees_with_lapack_at_any_condition_number(condition, shape, precision):
    """Beyond the size up to which all vectors are formed.

    1e-9 is out of any method's reach at 1e8: rounding W moves align more.
    """
    matrix, rows = expert_and_rows(9, shape, np.geomspace(1, 1 / condition, min(shape)))
    bound = max(BOUND[precision], 100 * condition * np.finfo(float).eps)
    assert largest_error(matrix, rows, make_k_grid(min(shape)), precision) <= bound


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2)], ids=str)
def test_the_smallest_experts_are_decomposed_as_by_lapack(shape):
    generator = np.random.default_rng(10)
    matrix, rows = generator.standard_normal(shape), unit_rows(generator, 5, shape[1])
    assert largest_error(matrix, rows, make_k_grid(min(shape)), "exact") <= BOUND["exact"]


@pytest.mark.parametrize("kind", ["power law", "rank-deficient"])
def test_a_transposed_view_is_decomposed_like_a_copy(kind):
    matrix, rows = expert_and_rows(12, (90, 140), spectrum(kind, 90))
    stored = torch.from_numpy(np.ascontiguousarray(matrix.T))  # a down matrix, read as its transpose
    k_grid = make_k_grid(90)
    view, copy = (
        decompose(given, torch.from_numpy(rows), k_grid) for given in (stored.T, torch.from_numpy(matrix))
    )
    np.testing.assert_array_equal(view.energy_ER, copy.energy_ER)


def test_an_unknown_precision_is_rejected_with_the_known_ones():
    with pytest.raises(BadInput, match=r"'half'.*fast, exact"):
        decompose(torch.eye(3), torch.eye(3), [1], "half")


@pytest.mark.parametrize(
    ("full_rank", "named", "expected"),
    [
        (1, (), [1]),
        (8, (), [1, 2, 4, 8]),
        (12, (), [1, 2, 4, 8, 12]),
        (12, (3, 8), [1, 2, 3, 4, 8, 12]),
        (12, (13, 4096), [1, 2, 4, 8, 12]),
        (4096, (), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]),
    ],
)
def test_the_k_grid_doubles_up_to_the_rank_and_takes_named_values(full_rank, named, expected):
    assert make_k_grid(full_rank, named) == expected


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
