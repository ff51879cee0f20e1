"""How long the analysis of a layer takes on this machine, from a trial of a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from moescope.spectral.alignment import AlignmentMatrix
from moescope.spectral.decompose import LEADING_VECTORS, make_k_grid
from moescope.spectral.pairing import pairing_test
from moescope.spectral.parallel import count_threads, decompose_each
from moescope.spectral.subspaces import make_subspace_grid, similarities

TRIAL_FLOPS = 5e8  # per expert: smaller matrices would run at another speed than those of a model
MOST_ROWS = 4096  # of anything in a trial, so that a damaged header cannot ask for much
PAIRED = 12  # experts of which all pairs are compared
TESTED = 128  # experts of the permutation test
START = 2.5  # seconds: imports, headers, joining the tables
LAYER = 0.3  # seconds: tables of one layer


def decomposition_flops(d_ff: int, d_model: int) -> float:
    """Gram matrix D F min(D, F), tridiagonal form 4/3 min(D, F)^3."""
    small = min(d_ff, d_model)
    return float(d_ff) * d_model * small + 4 / 3 * float(small) ** 3


@dataclass(frozen=True)
class Trial:
    """Measured seconds per flop of a decomposition, pair of experts, and expert of a permutation test."""

    flop: float
    pair: float
    tested: float

    def layer_seconds(self, n_experts: int, d_ff: int, d_model: int) -> float:
        """Estimated seconds of one layer's analysis: decompositions, pairs of experts, test and tables."""
        pairs = n_experts * (n_experts - 1) / 2
        decompositions = n_experts * decomposition_flops(d_ff, d_model) * self.flop
        return decompositions + pairs * self.pair + n_experts * self.tested + LAYER


def run_trial(n_experts: int, d_ff: int, d_model: int) -> Trial:
    """Time random experts in the proportions of a layer's, as many at once as a scan takes."""
    import torch

    generator = np.random.default_rng(0)
    shrink = min(1.0, (TRIAL_FLOPS / max(decomposition_flops(d_ff, d_model), 1.0)) ** (1 / 3))
    rows, hidden, width = (
        int(min(max(round(size * shrink), 2), MOST_ROWS)) for size in (n_experts, d_ff, d_model)
    )
    small = min(hidden, width)
    count = 2 * count_threads()
    matrices = torch.from_numpy(generator.standard_normal((hidden, width), dtype=np.float32))
    routers = torch.nn.functional.normalize(torch.from_numpy(generator.standard_normal((rows, width))))

    def decompose_some(number: int) -> None:
        experts = ((expert, matrices) for expert in range(number))
        list(decompose_each(experts, number, routers, make_k_grid(small), "fast", 24, "cpu", nullcontext))

    decompose_some(1)  # imports and bindings
    decomposing = seconds(lambda: decompose_some(count)) / count
    compared, D = min(n_experts, PAIRED), min(d_model, MOST_ROWS)
    ks = make_subspace_grid(n_experts, min(d_ff, D), D) or [1]
    leading = [generator.standard_normal((D, LEADING_VECTORS)) for _ in range(max(compared, 2))]
    pairs = len(leading) * (len(leading) - 1) / 2
    paired = seconds(lambda: similarities(leading, ks)) / pairs * d_model / D
    tested, grid = min(max(n_experts, 2), TESTED), make_k_grid(min(d_ff, d_model, MOST_ROWS))
    align_KEE = np.sort(generator.random((len(grid), tested, tested)), axis=0)
    ranks = np.full(tested, max(grid))
    matrix = AlignmentMatrix(grid, align_KEE, ranks, max(d_model, max(grid)))
    testing = seconds(lambda: pairing_test(matrix)) / tested
    return Trial(decomposing / decomposition_flops(hidden, width), paired, testing)


def seconds(work: Callable[[], object]) -> float:
    """The shortest of three times, of the clock or of the processor: other programs may hold it meanwhile."""
    spent = []
    for _ in range(3):
        start, used = time.perf_counter(), time.process_time()
        work()
        spent += [time.perf_counter() - start, time.process_time() - used]
    return min(spent)
