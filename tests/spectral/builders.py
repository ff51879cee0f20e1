"""Experts, routers and layers with a known structure, for the tests of this folder."""

from collections.abc import Sequence

import numpy as np
import torch

from moescope.spectral.alignment import AlignmentMatrix
from moescope.spectral.batched_eigen import divide_and_conquer
from moescope.types import ExpertStack, LayerWeights, LazyTensor


def orthonormal(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return np.linalg.qr(generator.standard_normal((rows, columns)))[0]


def unit_rows(generator: np.random.Generator, n: int, d: int) -> np.ndarray:
    rows = generator.standard_normal((n, d))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def expert_with_spectrum(
    generator: np.random.Generator, hidden: int, width: int, values: Sequence[float]
) -> np.ndarray:
    """[hidden, width] with exactly these singular values, the rest zero."""
    values = np.asarray(values, float)
    return (orthonormal(generator, hidden, len(values)) * values) @ orthonormal(
        generator, width, len(values)
    ).T


STORED_BITS = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}


def stored_low_rank(seed: int, shape: tuple[int, int], rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A product of Gaussian factors in fp64, stored in `dtype`."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn(*sides, generator=draw, dtype=torch.float64)
        for sides in ((shape[0], rank), (rank, shape[1]))
    )
    return (left @ right).to(dtype)


def lapack_align(matrix_FD: np.ndarray, rows_ED: np.ndarray, k: int) -> np.ndarray:
    """[E]: the energy of each unit row in the first k right singular vectors, straight from the
    definition."""
    _, values, right = np.linalg.svd(matrix_FD.astype(np.float64), full_matrices=False)
    rank = int((values > 1e-12 * values[0]).sum())
    return ((rows_ED @ right[: min(k, rank)].T) ** 2).sum(axis=1)


def random_layer(generator: np.random.Generator, n: int, d: int) -> AlignmentMatrix:
    """M(k) of unrelated routers and experts, without the cost of decomposing weights."""
    rows, ks = unit_rows(generator, n, d), [2**power for power in range(d.bit_length())]
    bases = np.linalg.qr(generator.standard_normal((n, d, d)))[0]
    energy = (rows[None] @ bases) ** 2  # expert, router, singular vector
    align = np.cumsum(energy, axis=2)[:, :, [k - 1 for k in ks]].transpose(2, 1, 0)
    return AlignmentMatrix(ks, np.clip(align, 0, 1), np.full(n, float(d)), d)


def matrix_of(*tables: np.ndarray, ks: Sequence[int] | None = None, d_model: int = 1000) -> AlignmentMatrix:
    """Those n x n tables as M(k), k = 1, 2, ... unless named."""
    return AlignmentMatrix(
        list(ks or range(1, len(tables) + 1)),
        np.stack(tables),
        np.full(len(tables[0]), float(d_model)),
        d_model,
    )


def layer_weights(
    router: np.ndarray,
    gates: Sequence[np.ndarray],
    ups: Sequence[np.ndarray] | None = None,
    downs: Sequence[np.ndarray] | None = None,
    norm: np.ndarray | None = None,
    norm_offset: float = 0.0,
    scoring: str = "softmax",
) -> LayerWeights:
    """A layer held in memory, whose expert e lives in file shard-e."""

    def stack(name: str, matrices: Sequence[np.ndarray]) -> ExpertStack:
        tensors = [torch.from_numpy(np.ascontiguousarray(matrix)) for matrix in matrices]
        return ExpertStack(
            names=tuple(f"experts.{expert}.{name}" for expert in range(len(tensors))),
            shape=(len(tensors), *tensors[0].shape),
            dtype="F64",
            files=tuple(f"shard-{expert}" for expert in range(len(tensors))),
            read=tensors.__getitem__,
        )

    def lazy(name: str, array: np.ndarray) -> LazyTensor:
        return LazyTensor(
            name, array.shape, "F64", "shard-router", lambda: torch.from_numpy(np.ascontiguousarray(array))
        )

    return LayerWeights(
        layer=3,
        layer_name="model.layers.3.moe",
        router_ED=lazy("router.weight", router),
        gate_EFD=stack("w1", gates),
        up_EFD=None if ups is None else stack("w3", ups),
        down_EDF=stack("w2", [gate.T for gate in gates] if downs is None else downs),
        norm_D=None if norm is None else lazy("norm.weight", norm),
        norm_offset=norm_offset,
        top_k=2,
        scoring=scoring,
        activation="silu",
    )


def random_weights(
    seed: int, n: int = 5, hidden: int = 20, width: int = 12, **overrides: object
) -> LayerWeights:
    """A layer of independent Gaussian tensors; `overrides` go to layer_weights."""
    generator = np.random.default_rng(seed)
    parts = {
        "router": generator.standard_normal((n, width)),
        "gates": list(generator.standard_normal((n, hidden, width))),
        "ups": list(generator.standard_normal((n, hidden, width))),
        "downs": list(generator.standard_normal((n, width, hidden))),
        "norm": generator.uniform(0.5, 2.0, width),
    }
    return layer_weights(**(parts | overrides))


def wilkinson(half: int) -> tuple[np.ndarray, np.ndarray]:
    """W+ of 2 half + 1 rows.

    Its large eigenvalues come in pairs that agree to rounding, and are not equal.
    """
    return np.abs(np.arange(-half, half + 1.0)), np.ones(2 * half)


def glued(copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Wilkinson matrices tied by 1e-8: clusters of nearly equal eigenvalues, the classic trap."""
    diagonal, beside = wilkinson(20)
    joined = np.concatenate([np.append(beside, 1e-8)] * copies)[:-1]
    return np.tile(diagonal, copies), joined


def tridiagonal_matrices() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Diagonals and entries beside them of the matrices that are known to break eigenvalue solvers."""
    draw = np.random.default_rng(0)
    falling = 10.0 ** (-np.arange(200) / 12)
    return {
        "random": (draw.standard_normal(300), draw.standard_normal(299)),
        "second differences, two equal halves": (np.full(200, 2.0), np.full(199, -1.0)),
        "wilkinson": wilkinson(20),
        "glued wilkinson": glued(6),
        "falling by 16 orders": (falling, 0.3 * falling[:-1]),
        "rising by 16 orders": (falling[::-1].copy(), 0.3 * falling[:0:-1]),
        "all equal": (np.ones(100), np.zeros(99)),
        "zero": (np.zeros(100), np.zeros(99)),
        "falls apart": (draw.standard_normal(200), (draw.random(199) > 0.5).astype(float)),
        "huge": (1e150 * draw.standard_normal(80), 1e150 * draw.standard_normal(79)),
        "tiny": (1e-150 * draw.standard_normal(80), 1e-150 * draw.standard_normal(79)),
    }


TRIDIAGONAL = tridiagonal_matrices()


def check_eigenbasis(diagonal: np.ndarray, beside: np.ndarray, device: str = "cpu", update=None) -> None:
    """All eigenvectors, as the coordinates of the unit vectors.

    Orthonormal, and T s = lambda s, both to rounding.
    """
    size = len(diagonal)
    T = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    norm = np.abs(T).max() or 1.0
    eye = torch.eye(size, dtype=torch.float64, device=device)[None]
    given = (torch.from_numpy(part)[None].to(device) for part in (diagonal, beside))
    found = divide_and_conquer(*given, eye, update)
    S, values = found.coordinates_BVN[0].cpu().numpy(), found.values_BN[0].cpu().numpy()
    assert bool(found.converged_B.all())
    assert np.abs(S.T @ S - np.eye(size)).max() <= 1e-13
    assert np.abs(T @ S - S * values).max() / norm <= 16 * size * np.finfo(float).eps
    assert np.abs(values - np.linalg.eigvalsh(T)).max() / norm <= 16 * size * np.finfo(float).eps
    top = found.top_vectors(min(5, size))[0].cpu().numpy()
    np.testing.assert_allclose(top, S[:, ::-1][:, :5], atol=1e-14)
