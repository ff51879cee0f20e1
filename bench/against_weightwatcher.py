"""WeightWatcher and moescope on the same weights: seconds per layer for the spectra of its experts.

Run by `make bench-peer`, which gives WeightWatcher an environment of its own (it brings matplotlib and
scikit-learn).
WeightWatcher finds singular values and fits a power law to each spectrum; moescope finds singular values, the
routers'
coordinates and the leading singular vectors. So the first row compares spectra alone, the second what each
tool does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from moescope.spectral.decompose import decompose, make_k_grid, spectrum_statistics
from moescope.spectral.parallel import count_threads, map_in_order
from weights import random_experts, routers


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        work()
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--shape", default="2048x7168:4", help="F x D : experts")
    arguments.add_argument("--repetitions", type=int, default=3)
    given = arguments.parse_args()
    sides, _, count = given.shape.partition(":")
    hidden, width = map(int, sides.split("x"))
    import weightwatcher

    logging.getLogger("weightwatcher").setLevel(logging.ERROR)
    experts = random_experts(int(count), hidden, width)
    layers = torch.nn.ModuleList(torch.nn.Linear(width, hidden, bias=False) for _ in experts)
    for layer, matrix in zip(layers, experts, strict=True):
        layer.weight.data = matrix.float()
    rows, k_grid = routers(len(experts), width), make_k_grid(min(hidden, width))
    with contextlib.redirect_stdout(io.StringIO()):
        watcher = weightwatcher.WeightWatcher(model=layers)
    numbered = [int(number) for number in watcher.describe()["layer_id"]]

    def spectra() -> list[np.ndarray]:
        return [np.sort(watcher.get_ESD(layer=number))[::-1] for number in numbered]

    def ours() -> list[np.ndarray]:
        at_once = count_threads()
        results = map_in_order(
            lambda matrix: decompose(matrix, rows, k_grid), enumerate(experts), at_once, nullcontext
        )
        found = [one.singular_values_R for _, one in results]
        for values in found:
            spectrum_statistics(values)
        return found

    ways = {"WeightWatcher, spectra": spectra, "WeightWatcher, analyze": watcher.analyze, "moescope": ours}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repetitions):
        for name, way in ways.items():
            spent[name].append(seconds(way))
    apart = max(
        float(np.abs(np.sqrt(esd) / values - 1).max()) for esd, values in zip(spectra(), ours(), strict=True)
    )
    print(
        f"weightwatcher {weightwatcher.__version__}, {len(experts)} experts of {hidden} x "
        f"{width}; singular values differ by {apart:.0e} at most\n"
    )
    print("| way | seconds | times moescope |\n|---|---|---|")
    reference = statistics.median(spent["moescope"])
    for name, figures in spent.items():
        print(f"| {name} | {statistics.median(figures):.2f} | {statistics.median(figures) / reference:.1f} |")


if __name__ == "__main__":
    main()
