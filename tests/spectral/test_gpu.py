"""The GPU code against the CPU's results. All but the recording of kernels also runs on the CPU, and is
tested there."""

import numpy as np
import pytest
import torch

from moescope.spectral import gpu
from moescope.spectral.alignment import cumulative_energy
from moescope.spectral.decompose import LEADING_VECTORS, decompose, make_k_grid
from moescope.spectral.subspaces import similarities
from spectral.builders import STORED_BITS, orthonormal, stored_low_rank, unit_rows
from spectral.test_decompose import BOUND, SHAPES, expert_and_rows, spectrum

KINDS = [
    "flat",
    "power law",
    "condition 1e4, geometric",
    "condition 1e6, geometric",
    "rank-deficient",
    "rank one",
]


@pytest.mark.parametrize("shape", [*SHAPES.values(), (200, 150), (100, 160)], ids=str)
def test_a_batch_gives_what_each_expert_alone_gives_on_the_cpu(shape):
    made = [expert_and_rows(seed, shape, spectrum(kind, min(shape))) for seed, kind in enumerate(KINDS)]
    matrices, rows = [torch.from_numpy(matrix) for matrix, _ in made], torch.from_numpy(made[1][1])
    k_grid = make_k_grid(min(shape))
    for precision, tolerance in BOUND.items():
        batch = gpu.decompose_batch(matrices, rows, k_grid, tolerance)
        for kind, matrix, theirs in zip(KINDS, matrices, batch, strict=True):
            ours = decompose(matrix, rows, k_grid, precision)
            assert (ours.rank, ours.fallback) == (theirs.rank, theirs.fallback), kind
            np.testing.assert_allclose(ours.singular_values_R, theirs.singular_values_R, atol=1e-9)
            np.testing.assert_allclose(
                cumulative_energy(ours.energy_ER, k_grid),
                cumulative_energy(theirs.energy_ER, k_grid),
                atol=tolerance,
            )
            count = min(LEADING_VECTORS, ours.rank)
            assert theirs.leading_DK.shape == (shape[1], count)
            np.testing.assert_allclose(
                np.abs((ours.leading_DK * theirs.leading_DK.numpy()).sum(0)), 1, atol=1e-5
            )


@pytest.mark.parametrize("shape", [(96, 40), (40, 96), (64, 64)], ids=str)
@pytest.mark.parametrize("dtype", STORED_BITS, ids=str)
def test_a_batch_finds_the_rank_that_the_stored_dtype_allows(dtype, shape):
    """Of one batch: rank 10, rank 20 and full rank, as each alone on the CPU."""
    ranks = [10, 20, min(shape)]
    matrices = [stored_low_rank(rank, shape, rank, dtype).double() for rank in ranks]
    matrices[2] = matrices[2] + 3 * torch.eye(*shape, dtype=torch.float64)  # far from rank-deficient
    rows, k_grid = torch.from_numpy(unit_rows(np.random.default_rng(0), 5, shape[1])), make_k_grid(min(shape))
    bits = STORED_BITS[dtype]
    batch = gpu.decompose_batch(matrices, rows, k_grid, 1e-6, bits)
    for rank, matrix, theirs in zip(ranks, matrices, batch, strict=True):
        ours, one = (decompose(matrix, rows, k_grid, bits=bits), gpu.decompose_by_svd(matrix, rows, bits))
        if rank < min(shape):
            assert ours.rank == rank
        for other in (theirs, one):
            assert (other.rank, other.leading_DK.shape[1]) == (ours.rank, ours.leading_DK.shape[1])
            np.testing.assert_allclose(
                cumulative_energy(other.energy_ER, k_grid),
                cumulative_energy(ours.energy_ER, k_grid),
                atol=1e-6,
            )


def test_weights_far_from_one_are_scaled_without_rounding():
    matrix, rows = map(torch.from_numpy, expert_and_rows(0, (60, 40), spectrum("power law", 40)))
    plain, huge, tiny = gpu.decompose_batch(
        [matrix, matrix * 2.0**600, matrix * 2.0**-600], rows, [1, 8, 40], 1e-9
    )
    for scaled, factor in ((huge, 2.0**600), (tiny, 2.0**-600)):
        np.testing.assert_allclose(scaled.singular_values_R, plain.singular_values_R * factor, rtol=1e-13)
        np.testing.assert_allclose(scaled.energy_ER, plain.energy_ER, atol=1e-13)


@pytest.mark.parametrize("broken", ["lengths", "roots"])
def test_an_eigenbasis_that_is_wrong_is_found_out_and_the_expert_decomposed_again(monkeypatch, broken):
    from dataclasses import replace

    matrix, rows = map(torch.from_numpy, expert_and_rows(0, (60, 40), spectrum("flat", 40)))
    solve = gpu.divide_and_conquer

    def wrong(*given):
        found = solve(*given)
        if broken == "lengths":
            return replace(found, coordinates_BVN=found.coordinates_BVN * (1 + 1e-9))
        return replace(found, converged_B=torch.zeros_like(found.converged_B))

    assert not gpu.decompose_batch([matrix], rows, [1, 40], 1e-6)[0].fallback
    monkeypatch.setattr(gpu, "divide_and_conquer", wrong)
    again = gpu.decompose_batch([matrix], rows, [1, 40], 1e-6)[0]
    assert again.fallback
    np.testing.assert_allclose(again.singular_values_R, spectrum("flat", 40), atol=1e-12)


def test_coordinates_in_the_wrong_order_are_found_out(monkeypatch):
    from dataclasses import replace

    matrix, rows = map(torch.from_numpy, expert_and_rows(0, (60, 40), spectrum("flat", 40)))
    solve = gpu.divide_and_conquer

    def swapped(*arguments):
        eigen = solve(*arguments)
        return replace(eigen, coordinates_BVN=eigen.coordinates_BVN.roll(1, 2))

    monkeypatch.setattr(gpu, "divide_and_conquer", swapped)
    assert gpu.decompose_batch([matrix], rows, [1, 40], 1e-6)[0].fallback


@pytest.mark.parametrize("ks", [[1, 2, 4, 8, 16], [1], [1, 16]])
def test_similarities_of_tensors_equal_those_of_arrays(ks, monkeypatch):
    monkeypatch.setattr(gpu, "ROWS_PER_BLOCK", 200)  # four pairs at a time
    generator = np.random.default_rng(0)
    bases = [orthonormal(generator, 50, 16) for _ in range(7)]
    bases[3] = bases[2]  # one pair that is the same
    for ours, theirs in zip(
        similarities(bases, ks), similarities([torch.from_numpy(b) for b in bases], ks), strict=True
    ):
        assert ours.k == theirs.k
        np.testing.assert_allclose(ours.overlap_P, theirs.overlap_P, atol=1e-12)
        np.testing.assert_allclose(
            ours.largest_principal_cosine_P, theirs.largest_principal_cosine_P, atol=1e-9
        )
        assert (ours.cosine_P is None) == (theirs.cosine_P is None)
        if ours.cosine_P is not None:
            np.testing.assert_allclose(ours.cosine_P, theirs.cosine_P, atol=1e-12)


@pytest.mark.parametrize("second", [1.0, 1 - 1e-12, 0.999999, 0.9, 0.0])
def test_the_largest_eigenvalue_is_right_whatever_the_gap(second):
    basis = torch.from_numpy(orthonormal(np.random.default_rng(0), 12, 12))
    values = torch.tensor([0.7, 0.7 * second, *[0.1] * 10], dtype=torch.float64)
    found = gpu.largest_eigenvalue(((basis * values) @ basis.T)[None])
    np.testing.assert_allclose(found, 0.7, atol=1e-9)


def test_the_largest_eigenvalue_of_nothing_is_nothing():
    assert gpu.largest_eigenvalue(torch.zeros(2, 3, 3, dtype=torch.float64)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("count", "free", "expected"),
    [(8, 1e12, 8), (256, 1e12, 128), (256, 100e9, 52), (100, 1, 1), (130, 1e12, 65)],
)
def test_batches_are_of_one_size_and_fit_the_memory(monkeypatch, count, free, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2 * free))
    gpu.batch_size.cache_clear()
    found = gpu.batch_size(count, 2048, 7168)
    gpu.batch_size.cache_clear()
    assert found == expected


def test_experts_are_solved_in_their_order_batch_by_batch(monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(gpu, "batch_size", lambda *_: 3)
    sizes, solve = [], gpu.decompose_batch
    monkeypatch.setattr(
        gpu, "decompose_batch", lambda matrices, *rest: sizes.append(len(matrices)) or solve(matrices, *rest)
    )
    made = [expert_and_rows(seed, (30, 20), spectrum("flat", 20)) for seed in range(8)]
    rows = torch.from_numpy(made[0][1])
    given = [(10 + number, torch.from_numpy(matrix)) for number, (matrix, _) in enumerate(made)]
    found = list(gpu.in_batches(given, 8, rows, [1, 20], "fast", 53, nullcontext))
    assert sizes == [3, 3, 2]
    assert [number for number, _ in found] == list(range(10, 18))
    for (_, matrix), (_, result) in zip(given, found, strict=True):
        np.testing.assert_allclose(result.singular_values_R, np.linalg.svd(matrix)[1], atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=str)
@pytest.mark.parametrize("kind", ["power law", "condition 1e4, geometric", "rank-deficient"])
def test_one_expert_by_torch_agrees_with_the_cpu_method(kind, shape):
    matrix, rows = map(torch.from_numpy, expert_and_rows(13, shape, spectrum(kind, min(shape))))
    k_grid = make_k_grid(min(shape))
    ours = decompose(matrix, rows, k_grid, "exact")
    theirs = gpu.decompose_by_svd(matrix, rows)  # on the CPU here: torch does not mind
    assert ours.rank == theirs.rank
    assert theirs.fallback
    np.testing.assert_allclose(ours.singular_values_R, theirs.singular_values_R, atol=1e-12)
    np.testing.assert_allclose(
        cumulative_energy(ours.energy_ER, k_grid), cumulative_energy(theirs.energy_ER, k_grid), atol=1e-9
    )
    np.testing.assert_allclose(
        np.abs((ours.leading_DK * theirs.leading_DK.numpy()).sum(axis=0)), 1, atol=1e-8
    )
