"""The decomposition of many experts at once, on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from moescope.spectral.batched_eigen import Reduction, tridiagonalise

if TYPE_CHECKING:
    from torch import Tensor

ARRAYS_HELD = 14  # of n x n numbers a matrix, at the most, while a batch is solved
SQUARINGS = 32  # of a matrix whose largest eigenvalue is wanted; see largest_eigenvalue


@dataclass
class Replayed:
    """A function of tensors whose thousands of small kernels are recorded once for a shape and then replayed as one.

    Started one by one they take longer than they run. What comes out is overwritten by the next call of the same shape.
    """

    function: Callable[..., Reduction]
    recorded: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], Reduction]] = field(
        default_factory=dict
    )

    def __call__(self, *tensors: Tensor) -> Reduction:
        key = tuple(tensor.shape for tensor in tensors)
        if key not in self.recorded:
            self.recorded.clear()  # a recording holds its memory; a checkpoint mostly has experts of one shape
            inputs = [tensor.clone() for tensor in tensors]
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # libraries set themselves up at their first call, which cannot be recorded
                self.function(*(tensor[:, :64, :64].clone() for tensor in inputs))
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self.function(*inputs)
            self.recorded[key] = graph, inputs, output
        graph, inputs, output = self.recorded[key]
        for kept, tensor in zip(inputs, tensors, strict=True):
            kept.copy_(tensor)
        graph.replay()
        return output


reduce = Replayed(tridiagonalise)


def batch_size(count: int, side: int, device: torch.device) -> int:
    """How many matrices of that side are solved at once: all of them, or what half of the free memory holds."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(count, int(free / 2 / (ARRAYS_HELD * 8 * side * side))))


def largest_eigenvalue(matrices_PKK: Tensor) -> Tensor:
    """[P] of symmetric positive matrices, by squaring: tr(M^q M) / tr(M^q) with q = 2^32.

    With eigenvalues a >= b the error is below (a - b) (b/a)^q <= a / q, so 2e-10 whatever the gap; no iteration to watch, only products of
    matrices, which the GPU does a thousand times faster than its solver does 64 x 64 eigenvalue problems.
    """
    power = matrices_PKK
    for _ in range(SQUARINGS):
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        power = power @ power
    return (power * matrices_PKK).sum((-2, -1)) / power.diagonal(dim1=-2, dim2=-1).sum(-1)
