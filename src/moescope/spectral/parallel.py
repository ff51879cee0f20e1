"""Decompose several experts in parallel: one thread per expert on a CPU, batches on a GPU.

Half of a decomposition does not profit from a second BLAS thread, and BLAS threads that wait for each other
lose their gain as soon as another program wants a core. Experts are independent, so each gets one thread
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from moescope.spectral.decompose import Decomposition, Item, Result, decompose, submitted
from moescope.spectral.lapack import one_blas_thread, thread_controls

if TYPE_CHECKING:
    from torch import Tensor

MAX_THREADS = 8  # each holds its expert in fp64 and a Gram matrix: 0.6 GB at 4096 x 14336


def matrix_readers(
    read: Callable[[int], Tensor], experts: list[int], device: str
) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Yield each expert and a function that returns its matrix; on a GPU, threads read ahead."""
    if device != "cpu":
        from moescope.spectral.gpu import read_ahead

        return read_ahead(read, experts)
    return ((expert, partial(read, expert)) for expert in experts)


def layer_stream(device: str) -> AbstractContextManager[None]:
    """The context in which a thread analyses one of several layers: a separate stream on a GPU."""
    if device == "cpu":
        return nullcontext()
    from moescope.spectral.gpu import thread_stream

    return thread_stream(device)


def decompose_each(
    experts: Iterable[tuple[int, Tensor]],
    count: int,
    routers_ED: Tensor,
    k_grid: list[int],
    precision: str,
    bits: int,
    device: str,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[int, Decomposition]]:
    """Yield (expert, its decomposition) in input order; `experts` has at most `count` items, stored with
    `bits` significand bits."""
    if device != "cpu":
        from moescope.spectral.gpu import in_batches

        return in_batches(experts, count, routers_ED, k_grid, precision, bits, waiting)

    def solve(matrix_FD: Tensor) -> Decomposition:
        return decompose(matrix_FD, routers_ED, k_grid, precision, bits)

    return map_in_order(solve, experts, count_threads(), waiting)


def count_threads() -> int:
    """How many experts to decompose in parallel: BLAS's thread count, or 1 where it cannot be controlled."""
    controls = thread_controls()
    return min(controls.get(), MAX_THREADS) if controls else 1


def map_in_order(
    work: Callable[[Item], Result],
    items: Iterable[tuple[int, Item]],
    n_threads: int,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[int, Result]]:
    """Yield (expert, work(item)) in input order; this thread fetches at most one item ahead of the
    workers."""
    if n_threads == 1:
        for expert, item in items:
            with waiting():
                result = work(item)
            yield expert, result
        return
    with one_blas_thread(), ThreadPoolExecutor(n_threads) as pool:
        for expert, future in submitted(pool, work, items, n_threads + 1):
            with waiting():
                result = future.result()
            yield expert, result
