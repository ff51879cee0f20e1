"""Several experts at once on the CPU, one BLAS thread each, and the next one read meanwhile.

Half of a decomposition does not profit from a second thread, and BLAS threads that wait for each other lose
all they won
as soon as another program wants a core. Experts are independent, so threads are given to experts instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from moescope.spectral.decompose import Decomposition, decompose
from moescope.spectral.lapack import one_blas_thread, thread_controls

if TYPE_CHECKING:
    from torch import Tensor

MOST_AT_ONCE = 8  # each holds its expert in fp64 and a Gram matrix: 0.6 GB at 4096 x 14336
Item = TypeVar("Item")
Result = TypeVar("Result")


def reads(
    read: Callable[[int], Tensor], experts: list[int], device: str
) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Each expert and how to get its matrix.

    On a GPU threads have read it by then; on a CPU they have better things to do.
    """
    if device != "cpu":
        from moescope.spectral.on_gpu import read_ahead

        return read_ahead(read, experts)
    return ((expert, partial(read, expert)) for expert in experts)


def beside_others(device: str) -> AbstractContextManager[None]:
    """Where a layer is analysed while others are: on a GPU in a stream of its thread's own."""
    if device == "cpu":
        return nullcontext()
    from moescope.spectral.on_gpu import own_stream

    return own_stream(device)


def decompose_each(
    experts: Iterable[tuple[int, Tensor]],
    count: int,
    routers_ED: Tensor,
    ladder: list[int],
    precision: str,
    device: str,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[int, Decomposition]]:
    """(expert, its decomposition) in the order given: a thread an expert on a CPU, whole batches on a GPU.

    `count`: how many there may be.
    """
    if device != "cpu":
        from moescope.spectral.on_gpu import in_batches

        return in_batches(experts, count, routers_ED, ladder, precision, waiting)

    def solve(matrix_FD: Tensor) -> Decomposition:
        return decompose(matrix_FD, routers_ED, ladder, precision)

    return in_order(solve, experts, experts_at_once(device), waiting)


def experts_at_once(device: str) -> int:
    """As many as BLAS would use threads.

    1 where its threads cannot be told apart, or it was told to use one, or on a GPU.
    """
    controls = thread_controls()
    return min(controls.get(), MOST_AT_ONCE) if device == "cpu" and controls else 1


def in_order(
    work: Callable[[Item], Result],
    items: Iterable[tuple[int, Item]],
    at_once: int,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[int, Result]]:
    """(expert, work(item)) in the order given.

    One item more than are worked on is taken from `items`, by this thread.
    """
    if at_once == 1:
        for expert, item in items:
            with waiting():
                result = work(item)
            yield expert, result
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    under_way: deque[tuple[int, Future[Result]]] = deque()

    def oldest() -> tuple[int, Result]:
        expert, future = under_way.popleft()
        with waiting():
            return expert, future.result()

    with one_blas_thread(), ThreadPoolExecutor(at_once) as pool:
        for expert, item in items:
            under_way.append((expert, pool.submit(work, item)))
            del item  # held by its work alone, so that memory is given back when that is done
            if len(under_way) > at_once:
                yield oldest()
        while under_way:
            yield oldest()
