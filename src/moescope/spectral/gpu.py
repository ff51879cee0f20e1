"""Decompose many experts together on a CUDA device, while the next ones are read."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from moescope.spectral.batched_eigen import PANEL, Reduction, Update, divide_and_conquer, tridiagonalise
from moescope.spectral.decompose import (
    LEADING_VECTORS,
    TOLERANCE,
    Decomposition,
    gram_suffices,
    numerical_rank,
    submitted,
    tensor_bits,
    within_rank,
)
from moescope.types import Array

logger = logging.getLogger("moescope")
ARRAYS_HELD = 14  # n x n arrays per matrix while a batch is solved, at most
MAX_BATCH = 128
READERS = 8  # threads that read experts
AHEAD = 10  # experts that each reader may be ahead
CONSERVED = 1e-12  # per row of the matrix: tolerated change of lengths in the eigenbasis; 1e-14 is typical
ROWS_PER_BLOCK = 2**21  # of leading vectors, for pairs: 2 GB for both sides of 1024 pairs of d = 2048
SQUARINGS = 32  # see largest_eigenvalue


@dataclass
class RecordedReduction:
    """The tridiagonal reduction as a CUDA graph, recorded once per shape: launching its thousands of small
    kernels one by one takes longer than running them.

    The next call of the same shape overwrites the result.
    """

    recorded: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], Reduction]] = field(
        default_factory=dict
    )

    def __call__(self, *tensors: Tensor) -> Reduction:
        if not tensors[0].is_cuda:
            return tridiagonalise(*tensors)
        count, key = len(tensors[0]), tuple(tensor.shape[1:] for tensor in tensors)
        if key not in self.recorded or len(self.recorded[key][1][0]) < count:
            # a recording holds its memory; a checkpoint mostly has experts of one shape
            self.recorded.clear()
            self.recorded[key] = self.record(tensors)
        graph, inputs, output = self.recorded[key]
        for buffer, tensor in zip(inputs, tensors, strict=True):
            buffer[:count].copy_(tensor)  # a smaller batch leaves stale rows, whose results are ignored
        graph.replay()
        return Reduction(*(getattr(output, part.name)[:count] for part in fields(output)))

    def record(self, tensors: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Reduction]:
        inputs = [tensor.clone() for tensor in tensors]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function = warmed_up_reduction(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may read meanwhile
            output = function(*inputs)
        return graph, inputs, output


def warmed_up_reduction(matrices_BNN: Tensor, vectors_BNV: Tensor) -> Callable[..., Reduction]:
    """Return the fused reduction where Triton can compile it, else the one in plain torch; both give the
    same.

    Runs it for a few columns: libraries and compilers initialise at their first call, which cannot be
    recorded.
    """
    try:
        from moescope.spectral.triton_kernels import tridiagonalise_fused

        tridiagonalise_fused(matrices_BNN.clone(), vectors_BNV, columns=PANEL + 1)
    except Exception as error:  # no Triton, no C compiler, an unsupported GPU: each has its own kind of error
        logger.info("moescope: using the plain reduction: the fused one cannot be compiled: %s", error)
        tridiagonalise(matrices_BNN[:, :64, :64].clone(), vectors_BNV[:, :64])
        return tridiagonalise
    return tridiagonalise_fused


@cache
def fused_update() -> Update | None:
    """Return the fused rank-one update where Triton can compile it, else None."""
    try:
        from moescope.spectral.triton_kernels import rank_one_update_fused

        poles = torch.linspace(0, 1, 32, dtype=torch.float64, device="cuda")[None]
        rank_one_update_fused(poles, torch.ones_like(poles), torch.ones_like(poles[:, 0]))
    except Exception as error:  # as above
        logger.info("moescope: using the plain rank-one update: the fused one cannot be compiled: %s", error)
        return None
    return rank_one_update_fused


reduce = RecordedReduction()
solver_lock = threading.Lock()  # several layers may be in progress, and a recording cannot be shared
thread_state = threading.local()


def thread_stream(device: str) -> AbstractContextManager[None]:
    """This thread's stream on the device: its work does not queue behind another layer's decomposition.

    Decompositions themselves share one stream, and with it one pool of memory.
    """
    if getattr(thread_state, "device", None) != device:
        thread_state.device, thread_state.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(thread_state.stream)


def read_ahead(
    read: Callable[[int], Tensor], experts: list[int]
) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Yield each expert and a function that returns `read(expert)` or raises its error; threads read ahead.

    Each read has its own stream, so that using a tensor does not wait for decompositions in progress.
    """
    solver = torch.cuda.default_stream()

    def read_in_stream(expert: int) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            tensor = read(expert)
            torch.cuda.current_stream().synchronize()
            tensor.record_stream(solver)
        return tensor

    with ThreadPoolExecutor(READERS) as pool:
        try:
            items = zip(experts, experts, strict=True)
            for expert, future in submitted(pool, read_in_stream, items, READERS * AHEAD):
                yield expert, future.result
        finally:
            pool.shutdown(cancel_futures=True)


def in_batches(
    experts: Iterable[tuple[int, Tensor]],
    count: int,
    routers_ED: Tensor,
    k_grid: list[int],
    precision: str,
    bits: int,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[int, Decomposition]]:
    """Yield (expert, its decomposition) in input order, in batches as large as the device's memory allows."""
    following = iter(experts)
    while batch := list(islice(following, 1)):
        batch += islice(following, batch_size(count, *sorted(batch[0][1].shape)) - 1)
        numbers, matrices = map(list, zip(*batch, strict=True))
        del batch
        # one stream for all decompositions; without a GPU, as in tests, None, which torch ignores
        stream = torch.cuda.default_stream() if torch.cuda.is_available() else None
        with waiting(), solver_lock, torch.cuda.stream(stream):
            decompositions = decompose_batch(matrices, routers_ED, k_grid, TOLERANCE[precision], bits)
        del matrices
        yield from zip(numbers, decompositions, strict=True)


@cache  # free memory changes, and another size would need a new recording
def batch_size(count: int, side: int, long_side: int) -> int:
    """How many matrices to solve together: batches of one size, the largest that half of the free memory
    holds."""
    free, _ = torch.cuda.mem_get_info()
    bytes_per_matrix = 8 * (ARRAYS_HELD * side * side + 3 * side * long_side)
    room = max(1, min(MAX_BATCH, int(free / 2 / bytes_per_matrix)))
    return math.ceil(count / math.ceil(count / room))


def decompose_batch(
    matrices_FD: list[Tensor],
    routers_ED: Tensor,
    k_grid: list[int],
    tolerance: float,
    bits: int | None = None,
) -> list[Decomposition]:
    """Decompose matrices of one shape together, as `decompose` does; inaccurate ones again, by SVD."""
    shape = matrices_FD[0].shape
    tall, side = shape[0] >= shape[1], min(shape)
    bits = bits or tensor_bits(matrices_FD[0])
    W = torch.stack(matrices_FD).to(torch.float64)
    # Squares of very large or small weights would leave fp64's range; dividing by a power of two rounds
    # nothing.
    scale = torch.exp2(torch.floor(torch.log2(W.abs().amax((1, 2)))))
    W /= scale[:, None, None]
    rows = routers_ED.to(W).T.expand(len(W), -1, -1)
    Y = rows if tall else W @ rows
    gram = W.mT @ W if tall else W @ W.mT
    moments = (W @ Y if tall else W.mT @ Y).square().sum(1)  # y'Gy of every router
    reduced = reduce(gram, Y)
    update = fused_update() if W.is_cuda else None
    eigen = divide_and_conquer(reduced.diagonal_BN, reduced.beside_BN, reduced.vectors_BNV, update)
    squares, coordinates = eigen.values_BN.flip(1), eigen.coordinates_BVN.flip(2)
    # An eigenbasis preserves lengths, and y'Gy = sum of lambda c^2: a wrong one does neither.
    length, energy = Y.square().sum(1), coordinates.square()
    lengths_agree = (energy.sum(2) - length).abs() <= CONSERVED * side * length
    moments_agree = ((energy @ squares[..., None])[..., 0] - moments).abs() <= (
        CONSERVED * side * squares[:, :1] * length
    )
    values = squares.clamp_min(0).sqrt()
    if not tall:
        coordinates = coordinates / values[:, None]
    rank_B = numerical_rank(values, shape, bits)
    ranks = rank_B.tolist()
    accurate = torch.zeros_like(eigen.converged_B)
    for rank in set(ranks):
        same, ks = rank_B == rank, within_rank(k_grid, rank)
        accurate[same] = gram_suffices(squares[same], coordinates[same], shape, ks, tolerance)
    accurate &= eigen.converged_B & lengths_agree.all(1) & moments_agree.all(1)
    leading = reduced.back(eigen.top_vectors(min(LEADING_VECTORS, side)))
    if not tall:
        leading = W.mT @ leading / values[:, None, :LEADING_VECTORS]
    leading = leading * torch.where((W @ leading).mean(1) < 0, -1.0, 1.0)[:, None]
    energy = coordinates.square()
    all_values = (values * scale[:, None]).cpu().numpy()
    return [
        Decomposition(
            all_values[index, :rank], energy[index, :, :rank], leading[index, :, :rank], side, fallback=False
        )
        if suffices
        else decompose_by_svd(matrices_FD[index], routers_ED, bits)
        for index, (rank, suffices) in enumerate(zip(ranks, accurate.tolist(), strict=True))
    ]


def decompose_by_svd(matrix_FD: Tensor, routers_ED: Tensor, bits: int | None = None) -> Decomposition:
    """Decompose one matrix by torch's SVD, which never squares it and takes much longer."""
    matrix = matrix_FD.to(torch.float64)
    scale = torch.exp2(torch.floor(torch.log2(matrix.abs().max())))
    _, values, right = torch.linalg.svd(matrix / scale, full_matrices=False)
    rank = int(numerical_rank(values, matrix.shape, bits or tensor_bits(matrix_FD)))
    vectors = right[:rank].T
    leading = vectors[:, :LEADING_VECTORS]
    return Decomposition(
        singular_values_R=(values[:rank] * scale).cpu().numpy(),
        energy_ER=(routers_ED.to(matrix) @ vectors).square(),
        leading_DK=leading * torch.where((matrix @ leading).mean(0) < 0, -1.0, 1.0),
        full_rank=min(matrix.shape),
        fallback=True,
    )


def pair_similarities(
    leading_EDK: Sequence[Tensor], ks: list[int], of_block: Callable[..., list[tuple[Any, Any, Any]]]
) -> list[list[tuple[Array, ...]]]:
    """`subspaces.block_similarities` for all pairs of experts, in blocks that fit a small GPU."""
    stacked = torch.stack([vectors[:, : max(ks)] for vectors in leading_EDK])
    first, second = torch.triu_indices(len(stacked), len(stacked), 1, device=stacked.device)
    pairs = max(1, ROWS_PER_BLOCK // stacked.shape[1])
    blocks = [
        of_block(stacked[left].mT @ stacked[right], ks, largest_singular_value)
        for left, right in zip(first.split(pairs), second.split(pairs), strict=True)
    ]
    return [[tuple(part.cpu().numpy() for part in of_k) for of_k in block] for block in blocks]


def largest_singular_value(blocks_PKK: Tensor) -> Tensor:
    return largest_eigenvalue(blocks_PKK @ blocks_PKK.mT).clamp_min(0).sqrt()


def largest_eigenvalue(matrices_PKK: Tensor) -> Tensor:
    """[P]: the largest eigenvalue of symmetric positive matrices, by squaring: tr(M^q M) / tr(M^q), q = 2^32.

    With eigenvalues a >= b the error is below (a - b) (b/a)^q <= a / q, so 2e-10 whatever the gap. Only
    matrix products, which the GPU does a thousand times faster than its solver does 64 x 64 eigenvalue
    problems.
    """
    power = matrices_PKK
    for _ in range(SQUARINGS):
        power = power / trace(power)[:, None, None]
        power = power @ power
    return (power * matrices_PKK).sum((-2, -1)) / trace(power)


def trace(matrices_PKK: Tensor) -> Tensor:
    """[P]: traces, never 0, so that dividing a matrix of zeros by its trace gives zeros."""
    return matrices_PKK.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)
