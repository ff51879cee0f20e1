"""One layer's alignment by the usual way, by a Gram matrix with all its eigenvectors, and by moescope, side
by side.

    python bench/decompose.py                                     the figures of docs/benchmarks.md
    python bench/decompose.py --shapes 64x96:4 --error-shapes 64x96 --repetitions 1      a few seconds

Each shape is F x D : experts. Ways alternate, so that what else the machine does falls on all of them alike;
medians are
given. The errors are of align on the k_grid, against an SVD in fp64.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from moescope.spectral import alignment
from moescope.spectral.decompose import decompose, make_k_grid
from moescope.spectral.parallel import count_threads, map_in_order
from weights import SPECTRA, expert, random_experts, routers

SHUFFLES = 200
Way = Callable[[list[Tensor], Tensor], np.ndarray]


def usual_way(experts: list[Tensor], rows: Tensor) -> np.ndarray:
    """align [K, router, expert]: an fp32 SVD an expert, squared cosines cumulated over k, then shuffled
    pairings as the null.

    Wide experts are handed over transposed, which few would think of: torch takes more than twice as long
    otherwise.
    """
    k_grid = make_k_grid(min(experts[0].shape))
    columns = []
    for matrix in experts:
        if matrix.shape[0] >= matrix.shape[1]:
            right = torch.linalg.svd(matrix.float(), full_matrices=False).Vh.T
        else:
            right = torch.linalg.svd(matrix.float().T, full_matrices=False).U
        energy = (rows.float() @ right) ** 2
        columns.append(energy.cumsum(1)[:, [k - 1 for k in k_grid]])
    align = torch.stack(columns, dim=-1).permute(1, 0, 2).numpy()
    generator, n = np.random.default_rng(0), len(experts)
    if len(rows) == n:  # the null is the cheap part: all pairings are in the table already
        pooled = [align[:, generator.permutation(n), np.arange(n)] for _ in range(SHUFFLES)]
        np.mean(pooled), np.std(pooled)
    return align


def all_eigenvectors(experts: list[Tensor], rows: Tensor) -> np.ndarray:
    """The same in fp64 from the smaller Gram matrix and all its eigenvectors.

    With the null in closed form.
    """
    k_grid = make_k_grid(min(experts[0].shape))
    columns = []
    for given in experts:
        matrix = given.double()
        tall = matrix.shape[0] >= matrix.shape[1]
        squares, basis = torch.linalg.eigh(matrix.T @ matrix if tall else matrix @ matrix.T)
        squares, basis = squares.flip(0), basis.flip(1)
        coordinates = rows @ basis if tall else (rows @ matrix.T) @ basis / squares.clamp_min(0).sqrt()
        columns.append(alignment.cumulative_energy(coordinates.square().numpy(), k_grid)[:, :-1])
    align = np.stack(columns, axis=-1).transpose(1, 0, 2)
    alignment.shuffle_null(align)
    return align


def moescope_way(experts: list[Tensor], rows: Tensor) -> np.ndarray:
    """As a scan does it: experts at once on the cores there are, and the leading vectors found besides."""
    k_grid = make_k_grid(min(experts[0].shape))
    at_once = count_threads()
    results = map_in_order(
        lambda matrix: decompose(matrix, rows, k_grid), enumerate(experts), at_once, nullcontext
    )
    found = [one for _, one in results]
    align = np.stack([alignment.cumulative_energy(one.energy_ER, k_grid)[:, :-1] for one in found], axis=-1)
    align = align.transpose(1, 0, 2)
    alignment.shuffle_null(align)
    return align


WAYS: dict[str, Way] = {"usual": usual_way, "all eigenvectors": all_eigenvectors, "moescope": moescope_way}


def measured(
    experts: list[Tensor], rows: Tensor, repetitions: int, ways: dict[str, Way] = WAYS
) -> dict[str, float]:
    """Way -> median seconds of alternating repetitions."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            start = time.perf_counter()
            way(experts, rows)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent) for name, spent in seconds.items()}


def true_align(matrix: Tensor, rows: Tensor) -> np.ndarray:
    """[K, router] by numpy's SVD in fp64."""
    _, values, right = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    right = right[values > max(matrix.shape) * np.finfo(float).eps * values[0]]
    sums = np.cumsum((rows.numpy() @ right.T) ** 2, axis=1)
    return np.stack([sums[:, min(k, len(right)) - 1] for k in make_k_grid(min(matrix.shape))])


def parsed(shape: str) -> tuple[int, int, int]:
    sides, _, count = shape.partition(":")
    hidden, width = map(int, sides.split("x"))
    return hidden, width, int(count or 1)


def warm_up() -> None:
    """Imports, thread pools and lazy bindings, so that the first way measured does not pay for them."""
    for way in WAYS.values():
        way(random_experts(2, 96, 80), routers(2, 80))


def machine() -> str:
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__} with "
        f"{torch.get_num_threads()} threads{load}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--shapes", nargs="*", default=["2048x7168:8", "14336x4096:2"])
    arguments.add_argument("--error-shapes", nargs="*", default=["2048x7168", "3584x1024"])
    arguments.add_argument("--routers", type=int, default=8)
    arguments.add_argument("--repetitions", type=int, default=2)
    given = arguments.parse_args()
    warm_up()
    print(machine(), flush=True)
    print(
        (
            "\n| experts | usual, s | all eigenvectors, s | moescope, s | usual / moescope "
            "|\n|---|---|---|---|---|"
        ),
        flush=True,
    )
    for hidden, width, count in map(parsed, given.shapes):
        spent = measured(
            random_experts(count, hidden, width), routers(given.routers, width), given.repetitions
        )
        ratio = spent["usual"] / spent["moescope"]
        figures = " | ".join(f"{spent[name]:.2f}" for name in WAYS)
        print(f"| {count} of {hidden} x {width} | {figures} | {ratio:.1f} |", flush=True)
    print(machine(), flush=True)
    print(
        "\n| expert | spectrum | usual: error | all eigenvectors: error | moescope: error | "
        "usual / moescope | second route |\n|---|---|---|---|---|---|---|"
    )
    for hidden, width, _ in map(parsed, given.error_shapes):
        rows = routers(given.routers, width)
        for kind in SPECTRA:
            matrix = expert(kind, hidden, width)
            truth = true_align(matrix, rows)
            errors = [
                np.abs(np.nan_to_num(way([matrix], rows)[:, :, 0], nan=np.inf) - truth).max()
                for way in WAYS.values()
            ]
            spent = measured(
                [matrix], rows, given.repetitions, {name: WAYS[name] for name in ("usual", "moescope")}
            )
            second = decompose(matrix, rows, make_k_grid(min(hidden, width))).fallback
            figures = " | ".join(f"{error:.0e}" for error in errors)
            ratio = spent["usual"] / spent["moescope"]
            print(
                f"| {hidden} x {width} | {kind} | {figures} | {ratio:.1f} | {'yes' if second else 'no'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
