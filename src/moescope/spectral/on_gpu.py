"""The decomposition of many experts at once, on a CUDA device, while the next ones are read."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from moescope.spectral.batched_eigen import PANEL, Reduction, Update, divide_and_conquer, tridiagonalise
from moescope.spectral.decompose import (
    LEADING_VECTORS,
    TOLERANCE,
    Decomposition,
    decompose_on_gpu,
    gram_suffices,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.spectral.arrays import Array

logger = logging.getLogger("moescope")
ARRAYS_HELD = 14  # of n x n numbers a matrix, at the most, while a batch is solved
MOST_AT_ONCE = 128
READERS = 8  # threads that read experts, and how many experts each may be ahead
AHEAD = 10
CONSERVED = 1e-12  # a row of the matrix: how far lengths may stray in the eigenbasis; seen are 1e-14
ROWS_AT_ONCE = (
    2**21
    # of the experts' leading vectors, gathered for pairs of them: 2 GB for both sides of 1024 pairs of d =
    # 2048
)
SQUARINGS = 32  # of a matrix whose largest eigenvalue is wanted; see largest_eigenvalue


@dataclass
class Replayed:
    """The reduction, whose thousands of small kernels are recorded once for a shape and then replayed as one.

    Started one by one they take longer than they run. What comes out is overwritten by the next call of the
    same shape.
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
        for kept, tensor in zip(inputs, tensors, strict=True):
            kept[:count].copy_(tensor)  # a smaller batch leaves the rest as it was: nobody looks at it
        graph.replay()
        return Reduction(*(getattr(output, part.name)[:count] for part in fields(output)))

    def record(self, tensors: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Reduction]:
        inputs = [tensor.clone() for tensor in tensors]
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            function = ready_reduction(*inputs)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may read meanwhile
            output = function(*inputs)
        return graph, inputs, output


def ready_reduction(matrices_BNN: Tensor, vectors_BNV: Tensor) -> Callable[..., Reduction]:
    """The reduction in two kernels a column where Triton can compile it, the one in plain torch elsewhere;
    both give the same.

    Has been run for a few columns: libraries and compilers set themselves up at their first call, which
    cannot be recorded.
    """
    try:
        from moescope.spectral.fused_reduction import tridiagonalise_fused

        tridiagonalise_fused(matrices_BNN.clone(), vectors_BNV, columns=PANEL + 1)
    except (
        Exception
    ) as error:  # no Triton, no C compiler for it, a GPU it does not know: each has its own kind of error
        logger.info("moescope: the plain reduction is used, for the fused one cannot be compiled: %s", error)
        tridiagonalise(matrices_BNN[:, :64, :64].clone(), vectors_BNV[:, :64])
        return tridiagonalise
    return tridiagonalise_fused


@cache
def ready_update() -> Update | None:
    """Divide and conquer's step in three kernels where Triton can compile them, tried once.

    None elsewhere.
    """
    try:
        from moescope.spectral.fused_roots import rank_one_update_fused

        poles = torch.linspace(0, 1, 32, dtype=torch.float64, device="cuda")[None]
        rank_one_update_fused(poles, torch.ones_like(poles), torch.ones_like(poles[:, 0]))
    except Exception as error:  # as above
        logger.info(
            "moescope: the plain rank-one update is used, for the fused one cannot be compiled: %s", error
        )
        return None
    return rank_one_update_fused


reduce = Replayed()
one_at_a_time = threading.Lock()  # two layers may be under way, and a recording is not to be shared


of_thread = threading.local()


def own_stream(device: str) -> AbstractContextManager[None]:
    """A stream of this thread's own on the device: what it computes there does not queue behind another
    layer's decomposition.

    Decompositions themselves share one stream, and with it one pool of memory.
    """
    if getattr(of_thread, "device", None) != device:
        of_thread.device, of_thread.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(of_thread.stream)


def solver_stream() -> torch.cuda.Stream | None:
    """None, which changes nothing, where there is no GPU: everything here is tested without one."""
    return torch.cuda.default_stream() if torch.cuda.is_available() else None


def read_ahead(
    read: Callable[[int], Tensor], experts: list[int]
) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Each expert and how to get what `read` gives for it, or raises; threads read on while earlier ones are
    worked on.

    Reading goes through streams of its own, so that looking at a tensor does not wait for the decompositions
    under way.
    """
    here = torch.cuda.default_stream()  # where experts are decomposed

    def aside(expert: int) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            tensor = read(expert)
            torch.cuda.current_stream().synchronize()
            tensor.record_stream(here)
        return tensor

    waiting: deque[tuple[int, Future[Tensor]]] = deque()
    left = iter(experts)
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for expert in left:
                waiting.append((expert, pool.submit(aside, expert)))
                if len(waiting) >= READERS * AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def in_batches(
    experts: Iterable[tuple[int, Tensor]],
    count: int,
    routers_ED: Tensor,
    ladder: list[int],
    precision: str,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[int, Decomposition]]:
    """(expert, its decomposition) in the order given, as many at once as the device's memory allows."""
    batch: list[tuple[int, Tensor]] = []
    room = 0

    def solve() -> Iterator[tuple[int, Decomposition]]:
        with waiting(), one_at_a_time, torch.cuda.stream(solver_stream()):
            numbers, matrices = zip(*batch, strict=True)
            found = decompose_batch(list(matrices), routers_ED, ladder, TOLERANCE[precision])
        batch.clear()
        yield from zip(numbers, found, strict=True)

    for expert, matrix in experts:
        room = room or batch_size(count, min(matrix.shape), max(matrix.shape))
        batch.append((expert, matrix))
        if len(batch) == room:
            yield from solve()
    if batch:
        yield from solve()


@cache  # free memory changes, and another size would have to be recorded anew
def batch_size(count: int, side: int, long_side: int) -> int:
    """How many matrices are solved at once.

    Batches of one size, the largest that half of the free memory holds.
    """
    free, _ = torch.cuda.mem_get_info()
    each = 8 * (ARRAYS_HELD * side * side + 3 * side * long_side)
    room = max(1, min(MOST_AT_ONCE, int(free / 2 / each)))
    batches = -(-count // room)
    return -(-count // batches)


def decompose_batch(
    matrices_FD: list[Tensor], routers_ED: Tensor, ladder: list[int], tolerance: float
) -> list[Decomposition]:
    """What `decompose` gives, for matrices of one shape together.

    Those whose result is not to be trusted go through an SVD, one by one.
    """
    hidden, width = matrices_FD[0].shape
    tall, side = hidden >= width, min(hidden, width)
    W = torch.stack(matrices_FD).to(torch.float64)
    # Squares of very large or small weights would leave fp64's range; a power of two is taken out without
    # rounding.
    scale = torch.exp2(torch.floor(torch.log2(W.abs().amax((1, 2)))))
    W /= scale[:, None, None]
    rows = routers_ED.to(W).T.expand(len(W), -1, -1)
    Y = rows if tall else W @ rows
    gram = W.mT @ W if tall else W @ W.mT
    moments = (W @ Y if tall else W.mT @ Y).square().sum(1)  # y'Gy of every router
    solved = reduce(gram, Y)
    update = ready_update() if W.is_cuda else None
    eigen = divide_and_conquer(solved.diagonal_BN, solved.beside_BN, solved.vectors_BNV, update)
    squares, coordinates = eigen.values_BN.flip(1), eigen.coordinates_BVN.flip(2)
    # An eigenbasis keeps lengths, and y'Gy = sum of lambda c^2: two things that no wrong one does.
    length, energy = Y.square().sum(1), coordinates.square()
    kept = (energy.sum(2) - length).abs() <= CONSERVED * side * length
    felt = ((energy @ squares[..., None])[..., 0] - moments).abs() <= CONSERVED * side * squares[
        :, :1
    ] * length
    values = squares.clamp_min(0).sqrt()
    if not tall:
        coordinates = coordinates / values[:, None]
    trusted = gram_suffices(squares, coordinates, max(hidden, width), tall, ladder, tolerance)
    trusted &= eigen.converged_B & kept.all(1) & felt.all(1)
    leading = solved.back(eigen.top_vectors(min(LEADING_VECTORS, side)))
    if not tall:
        leading = W.mT @ leading / values[:, None, :LEADING_VECTORS]
    leading = leading * torch.where((W @ leading).mean(1) < 0, -1.0, 1.0)[:, None]
    energy = coordinates.square()
    all_values, all_trusted = (values * scale[:, None]).cpu().numpy(), trusted.tolist()
    return [
        Decomposition(all_values[index], energy[index], leading[index], side, fallback=False)
        if all_trusted[index]
        else replace(decompose_on_gpu(matrices_FD[index], routers_ED, ladder, tolerance), fallback=True)
        for index in range(len(W))
    ]


def pair_similarities(leading_EDK: Sequence[Tensor], ks: list[int]) -> list[tuple[Array, ...]]:
    """What `subspaces.row_similarities` gives, for all pairs of experts.

    A few thousand at a time, all would fill a small GPU.
    """
    stacked = torch.stack([vectors[:, : max(ks)] for vectors in leading_EDK])
    first, second = torch.triu_indices(len(stacked), len(stacked), 1, device=stacked.device)
    at_once = max(1, ROWS_AT_ONCE // stacked.shape[1])
    blocks = [
        block_similarities(stacked[some].mT @ stacked[others], ks)
        for some, others in zip(first.split(at_once), second.split(at_once), strict=True)
    ]
    return [
        tuple(np.concatenate(parts) for parts in zip(*of_k, strict=True))
        for of_k in zip(*blocks, strict=True)
    ]


def block_similarities(products_PKK: Tensor, ks: list[int]) -> list[tuple[Array, ...]]:
    found = []
    for k in ks:
        block = products_PKK[:, :k, :k]
        squared = block @ block.mT
        overlap = squared.diagonal(dim1=-2, dim2=-1).sum(-1) / k
        parts = block[:, 0, 0], overlap, largest_eigenvalue(squared).clamp_min(0).sqrt()
        found.append(tuple(part.cpu().numpy() for part in parts))
    return found


def largest_eigenvalue(matrices_PKK: Tensor) -> Tensor:
    """[P] of symmetric positive matrices, by squaring: tr(M^q M) / tr(M^q) with q = 2^32.

    With eigenvalues a >= b the error is below (a - b) (b/a)^q <= a / q, so 2e-10 whatever the gap; no
    iteration to watch, only products of
    matrices, which the GPU does a thousand times faster than its solver does 64 x 64 eigenvalue problems.
    """
    power = matrices_PKK
    for _ in range(SQUARINGS):
        power = power / trace(power)[:, None, None]
        power = power @ power
    return (power * matrices_PKK).sum((-2, -1)) / trace(power)


def trace(matrices_PKK: Tensor) -> Tensor:
    """[P], never 0: a matrix of zeros stays one when divided by it."""
    return matrices_PKK.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)
