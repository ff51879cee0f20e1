"""The decomposition on a real GPU, held to LAPACK's results."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from moescope.spectral import gpu
from moescope.spectral.alignment import cumulative_energy
from moescope.spectral.batched_eigen import divide_and_conquer, tridiagonalise
from moescope.spectral.decompose import LEADING_VECTORS, decompose, make_k_grid
from moescope.weights.verb import scan
from planted import write_planted
from spectral.builders import STORED_BITS, TRIDIAGONAL, check_eigenbasis, stored_low_rank
from spectral.test_decompose import expert_and_rows, spectrum

pytestmark = pytest.mark.gpu
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
KINDS = [
    "flat",
    "power law",
    "condition 1e4, geometric",
    "condition 1e6, geometric",
    "rank-deficient",
    "rank one",
]


def gram_matrices(batch: int, rows: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows)
    W = torch.randn(batch, rows, 2 * rows, dtype=torch.float64, generator=draw)
    W[-1] *= (torch.arange(2 * rows) + 1.0) ** -1.1  # one with a heavy tail
    return (W @ W.mT).cuda()


@needs_triton
@pytest.mark.parametrize("rows", [1, 2, 3, 33, 127, 128, 129, 300, 768])
def test_two_kernels_per_column_give_the_tridiagonal_form_of_each_matrix(rows):
    from moescope.spectral.triton_kernels import tridiagonalise_fused

    G = gram_matrices(3, rows)
    eye = torch.eye(rows, dtype=torch.float64, device="cuda").expand(3, rows, rows)
    found = tridiagonalise_fused(G.clone(), eye)
    Q = found.back(eye)
    T = (
        torch.diag_embed(found.diagonal_BN)
        + torch.diag_embed(found.beside_BN, 1)
        + torch.diag_embed(found.beside_BN, -1)
    )
    norm = float(G.abs().max())
    assert float((Q.mT @ Q - eye).abs().max()) <= 1e-12
    assert float((Q.mT @ G @ Q - T).abs().max()) / norm <= 1e-12
    np.testing.assert_allclose(found.vectors_BNV.cpu(), Q.mT.cpu(), atol=1e-12)


@needs_triton
def test_matrices_that_are_already_diagonal_or_zero_are_reduced_like_any_other():
    from moescope.spectral.triton_kernels import tridiagonalise_fused

    G = torch.stack([torch.zeros(70, 70), torch.diag(torch.arange(1.0, 71)), torch.eye(70)]).double().cuda()
    found = tridiagonalise_fused(G.clone(), G)
    np.testing.assert_allclose(
        found.diagonal_BN.sort().values.cpu(), torch.stack([g.diagonal() for g in G]).cpu(), atol=1e-12
    )
    assert float(found.beside_BN.abs().max()) <= 1e-12


@needs_triton
def test_a_recording_is_made_of_the_two_kernels_and_can_be_replayed_with_fewer_matrices():
    from moescope.spectral.triton_kernels import tridiagonalise_fused

    G, Y = gram_matrices(4, 200), torch.randn(4, 200, 5, dtype=torch.float64, device="cuda")
    assert gpu.warmed_up_reduction(G, Y) is tridiagonalise_fused
    reduce = gpu.RecordedReduction()
    for count in (4, 3, 4):
        found, plain = reduce(G[:count], Y[:count]), tridiagonalise(G[:count].clone(), Y[:count])
        values = [
            divide_and_conquer(r.diagonal_BN, r.beside_BN, r.vectors_BNV).values_BN for r in (found, plain)
        ]
        np.testing.assert_allclose(*(value.cpu() for value in values), atol=1e-12 * float(G.abs().max()))
    assert len(reduce.recorded) == 1


@needs_triton
@pytest.mark.parametrize("kind", TRIDIAGONAL)
def test_three_kernels_per_merge_give_eigenvectors_that_are_orthonormal_and_belong_to_their_eigenvalues(kind):
    from moescope.spectral.triton_kernels import rank_one_update_fused

    assert gpu.fused_update() is rank_one_update_fused
    check_eigenbasis(*TRIDIAGONAL[kind], "cuda", rank_one_update_fused)


@needs_triton
@pytest.mark.parametrize("size", [33, 65, 127, 129, 1000])
def test_merges_of_every_size_are_made_rightly(size):
    from moescope.spectral.triton_kernels import rank_one_update_fused

    draw = np.random.default_rng(size)
    check_eigenbasis(
        draw.standard_normal(size), draw.standard_normal(size - 1), "cuda", rank_one_update_fused
    )


def test_without_triton_the_plain_reduction_is_recorded(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "moescope.spectral.triton_kernels", None)
    G, Y = gram_matrices(2, 100), torch.randn(2, 100, 5, dtype=torch.float64, device="cuda")
    assert gpu.warmed_up_reduction(G, Y) is tridiagonalise
    found = gpu.RecordedReduction()(G, Y)
    eigen = divide_and_conquer(found.diagonal_BN, found.beside_BN, found.vectors_BNV)
    np.testing.assert_allclose(
        eigen.values_BN.cpu(), torch.linalg.eigvalsh(G.cpu()), atol=1e-12 * float(G.abs().max())
    )


@pytest.mark.parametrize("shape", [(300, 200), (130, 260), (64, 64)], ids=str)
def test_a_batch_on_the_gpu_gives_what_each_expert_gives_on_the_cpu(shape):
    made = [expert_and_rows(seed, shape, spectrum(kind, min(shape))) for seed, kind in enumerate(KINDS)]
    matrices, rows = [torch.from_numpy(matrix) for matrix, _ in made], torch.from_numpy(made[1][1])
    k_grid = make_k_grid(min(shape))
    batch = gpu.decompose_batch([matrix.cuda() for matrix in matrices], rows.cuda(), k_grid, 1e-6)
    for kind, matrix, theirs in zip(KINDS, matrices, batch, strict=True):
        ours = decompose(matrix, rows, k_grid)
        assert (ours.rank, ours.fallback) == (theirs.rank, theirs.fallback), kind
        np.testing.assert_allclose(ours.singular_values_R, theirs.singular_values_R, atol=1e-9)
        np.testing.assert_allclose(
            cumulative_energy(ours.energy_ER, k_grid), cumulative_energy(theirs.energy_ER, k_grid), atol=1e-6
        )
        count = min(LEADING_VECTORS, ours.rank)
        assert theirs.leading_DK.shape == (shape[1], count)
        agreement = np.abs((ours.leading_DK * theirs.leading_DK.cpu().numpy()).sum(0))
        np.testing.assert_allclose(agreement, 1, atol=1e-5)


@pytest.mark.parametrize("shape", [(300, 200), (130, 260), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", STORED_BITS, ids=str)
def test_a_batch_on_the_gpu_finds_the_rank_that_the_stored_dtype_allows(dtype, shape):
    matrices = [stored_low_rank(seed, shape, 10, dtype).double() for seed in range(3)]
    matrices.append(torch.randn(shape).to(dtype).double())
    rows, bits, k_grid = torch.randn(6, shape[1]).double(), STORED_BITS[dtype], make_k_grid(min(shape))
    rows /= rows.norm(dim=1, keepdim=True)
    batch = gpu.decompose_batch([matrix.cuda() for matrix in matrices], rows.cuda(), k_grid, 1e-6, bits)
    alone = [decompose(matrix, rows, k_grid, bits=bits) for matrix in matrices]
    assert [result.rank for result in batch[:3]] == [10, 10, 10]
    for ours, theirs in zip(alone, batch, strict=True):
        assert ours.rank == theirs.rank
        np.testing.assert_allclose(
            cumulative_energy(ours.energy_ER, k_grid), cumulative_energy(theirs.energy_ER, k_grid), atol=1e-6
        )


def test_a_scan_on_the_gpu_has_the_tables_of_one_on_the_cpu(tmp_path):
    write_planted(tmp_path / "model", seed=0)
    runs = {
        device: scan(tmp_path / "model", out=tmp_path / device, device=device, quiet=True)
        for device in ("cpu", "cuda")
    }
    assert runs["cuda"].info["device"] == "cuda"
    for name in runs["cpu"].tables:
        ours, theirs = (run.table(name) for run in runs.values())
        assert list(ours.columns) == list(theirs.columns)
        for column in ours.select_dtypes("number"):
            np.testing.assert_allclose(
                ours[column].astype(float),
                theirs[column].astype(float),
                atol=2e-6,
                rtol=1e-5,
                err_msg=f"{name}.{column}",
            )
