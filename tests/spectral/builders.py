"""Experts, routers and layers with a known structure, for the tests of this folder."""

from collections.abc import Sequence

import numpy as np
import torch

from moescope.spectral.alignment import AlignmentMatrix
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
