"""Batched eigenvalues against LAPACK's, on the matrices that are known to break such solvers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moescope.spectral import batched_eigen
from moescope.spectral.batched_eigen import divide_and_conquer, householder, rank_one_update, tridiagonalise
from spectral.builders import TRIDIAGONAL, check_eigenbasis


@pytest.mark.parametrize("kind", TRIDIAGONAL)
def test_eigenvectors_are_orthonormal_and_belong_to_their_eigenvalues(kind):
    check_eigenbasis(*TRIDIAGONAL[kind])


@pytest.mark.parametrize("size", [1, 2, 3, 31, 32, 33, 63, 64, 65, 96, 127, 129])
def test_every_size_is_split_and_padded_rightly(size):
    draw = np.random.default_rng(size)
    check_eigenbasis(draw.standard_normal(size), draw.standard_normal(size - 1))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 70).flatmap(
        lambda size: st.tuples(
            st.lists(
                st.sampled_from([0.0, 1.0, 1 + 1e-15, -1.0, 0.5, 1e-9, 3.7]), min_size=size, max_size=size
            ),
            st.lists(
                st.sampled_from([0.0, 1.0, -1.0, 1e-16, 1e-8, 0.3]), min_size=size - 1, max_size=size - 1
            ),
        )
    )
)
def test_ties_and_vanishing_couplings_in_any_order_do_no_harm(entries):
    check_eigenbasis(np.array(entries[0]), np.array(entries[1]))


def test_a_matrix_that_does_not_converge_is_reported_and_its_neighbour_is_not():
    """42 rows, all but two coupled by nothing: the caller decomposes such a matrix by other means."""
    diagonal, beside = np.zeros(42), np.zeros(41)
    diagonal[21], beside[20], beside[21] = 1.0, 1.0, 1e-8
    draw = np.random.default_rng(0)
    pair = [np.stack([diagonal, draw.standard_normal(42)]), np.stack([beside, draw.standard_normal(41)])]
    eye = torch.eye(42, dtype=torch.float64).expand(2, 42, 42).contiguous()
    found = divide_and_conquer(*(torch.from_numpy(part) for part in pair), eye)
    assert found.converged_B.tolist() == [False, True]


def test_matrices_of_one_batch_do_not_touch_each_other():
    pairs = [
        TRIDIAGONAL[kind]
        for kind in ("second differences, two equal halves", "falls apart", "falling by 16 orders")
    ]
    diagonal, beside = (torch.from_numpy(np.stack(parts)) for parts in zip(*pairs, strict=True))
    vectors = torch.randn(3, 200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together = divide_and_conquer(diagonal, beside, vectors)
    for index in range(3):
        one = slice(index, index + 1)
        alone = divide_and_conquer(diagonal[one], beside[one], vectors[one])
        np.testing.assert_allclose(together.values_BN[one], alone.values_BN, atol=1e-14)
        np.testing.assert_allclose(
            together.coordinates_BVN[one].abs(), alone.coordinates_BVN.abs(), atol=1e-12
        )


def gram_matrices(batch: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    W = torch.randn(batch, rows, columns, dtype=torch.float64, generator=draw)
    return W @ W.mT


@pytest.mark.parametrize("rows", [1, 2, 3, 32, 33, 34, 64, 65, 100])
def test_the_reduction_is_a_similarity_that_leaves_three_diagonals(rows):
    G = gram_matrices(3, rows, 120)
    eye = torch.eye(rows, dtype=torch.float64).expand(3, rows, rows)
    found = tridiagonalise(G.clone(), eye)
    Q = found.back(eye)
    T = (
        torch.diag_embed(found.diagonal_BN)
        + torch.diag_embed(found.beside_BN, 1)
        + torch.diag_embed(found.beside_BN, -1)
    )
    norm = float(G.abs().max())
    assert float((Q.mT @ Q - eye).abs().max()) <= 1e-13
    assert float((Q.mT @ G @ Q - T).abs().max()) / norm <= 1e-13
    np.testing.assert_allclose(found.vectors_BNV, Q.mT, atol=1e-13)


@pytest.mark.parametrize("rows", [5, 40])
def test_matrices_that_are_already_diagonal_or_zero_are_reduced_like_any_other(rows):
    G = torch.stack(
        [torch.zeros(rows, rows), torch.diag(torch.arange(1.0, rows + 1)), torch.eye(rows)]
    ).double()
    eye = torch.eye(rows, dtype=torch.float64).expand(3, rows, rows)
    found = tridiagonalise(G.clone(), eye)
    Q = found.back(eye)
    assert float((Q.mT @ Q - eye).abs().max()) <= 1e-13
    np.testing.assert_allclose(
        found.diagonal_BN.sort().values, torch.stack([g.diagonal() for g in G]), atol=1e-13
    )


def test_a_householder_vector_sends_a_column_to_the_first_axis():
    columns = torch.randn(4, 7, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns[1] = 0
    columns[2, 1:] = 0
    beta = torch.zeros(4, dtype=torch.float64)
    v, tau = householder(columns.clone(), beta)
    H = torch.eye(7, dtype=torch.float64) - tau * v @ v.mT
    expected = torch.zeros(4, 7, dtype=torch.float64)
    expected[:, 0] = beta
    np.testing.assert_allclose((H @ columns)[..., 0], expected, atol=1e-14)
    np.testing.assert_allclose(H @ H, torch.eye(7).expand(4, 7, 7), atol=1e-14)


def test_the_whole_chain_agrees_with_lapack_on_heavy_tailed_gram_matrices():
    draw = torch.Generator().manual_seed(1)
    W = torch.randn(3, 150, 220, dtype=torch.float64, generator=draw) * (torch.arange(220) + 1.0) ** -1.1
    G, Y = W @ W.mT, torch.randn(3, 150, 6, dtype=torch.float64, generator=draw)
    reduced = tridiagonalise(G.clone(), Y)
    eigen = divide_and_conquer(reduced.diagonal_BN, reduced.beside_BN, reduced.vectors_BNV)
    values, Q = torch.linalg.eigh(G)
    np.testing.assert_allclose(eigen.values_BN, values, atol=1e-13 * float(values.max()))
    top = reduced.back(eigen.top_vectors(10))
    np.testing.assert_allclose((top * Q.flip(-1)[..., :10]).sum(1).abs(), 1, atol=1e-10)
    ours, theirs = eigen.coordinates_BVN.square().flip(2).cumsum(2), (Y.mT @ Q).square().flip(2).cumsum(2)
    np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_a_root_that_was_not_found_is_said(monkeypatch):
    monkeypatch.setattr(batched_eigen, "ITERATIONS", 1)
    draw = torch.Generator().manual_seed(0)
    poles = torch.randn(1, 40, dtype=torch.float64, generator=draw).sort(-1).values
    _, _, found = rank_one_update(
        poles, torch.ones(1, 40, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    )
    assert not bool(found.all())
