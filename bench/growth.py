"""How the time of moescope grows with the dimension d, the number of routers n and the number of layers;
drawn and fitted.

    python bench/growth.py                     writes docs/growth.svg and prints the figures
    python bench/growth.py --tiny --out x.svg  a few seconds, for a look at the drawing

Experts are 3.5 d x d, Gaussian. Each point is the smallest of its repetitions: growth is asked for, not what
else the
machine does. The fit is a straight line through the upper half of the points in log-log, where the largest
term rules.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import moescope
from moescope.plotting.style import CATEGORICAL, GREY
from moescope.spectral.decompose import decompose, make_k_grid
from weights import random_experts, routers

ORDERS = {
    "d": ("dimension d (8 routers)", 3.0, "product and reduction, both d³"),
    "n": ("routers n, time an expert", 0.0, "n d² beside d³, until n = d/16 and all eigenvectors are formed"),
    "layers": ("layers (8 experts of 512 x 256 each)", 1.0, "one after another"),
}


def fastest(work: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def one_expert(d: int, n: int, repetitions: int) -> float:
    matrix, rows, k_grid = random_experts(1, 7 * d // 2, d)[0], routers(n, d), make_k_grid(d)
    return fastest(lambda: decompose(matrix, rows, k_grid), repetitions)


def whole_scan(layers: int, repetitions: int) -> float:
    """Reading, decomposing, statistics and tables of a checkpoint on disk."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model.safetensors"
        write_checkpoint(checkpoint, layers)
        return fastest(
            lambda: moescope.scan(
                checkpoint, out=Path(folder) / "run", device="cpu", overwrite=True, quiet=True
            ),
            repetitions,
        )


def write_checkpoint(path: Path, layers: int, experts: int = 8, hidden: int = 512, width: int = 256) -> None:
    """Mixtral's names, random weights."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(layers):
        block = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{block}.gate.weight"] = torch.randn(experts, width, generator=generator)
        for expert in range(experts):
            for name, shape in {"w1": (hidden, width), "w2": (width, hidden), "w3": (hidden, width)}.items():
                tensors[f"{block}.experts.{expert}.{name}.weight"] = torch.randn(*shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})


def exponent(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """(slope, intercept) in log-log through the upper half of the points."""
    upper = slice(len(sizes) // 2 - (len(sizes) < 4), None)
    slope, intercept = np.polyfit(np.log(sizes[upper]), np.log(seconds[upper]), 1)
    return float(slope), float(intercept)


def draw(measured: dict[str, tuple[list[int], list[float]]], out: Path) -> None:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = []
    for name, (sizes, seconds) in measured.items():
        titles.append(
            f"{ORDERS[name][0]}<br>fitted {exponent(sizes, seconds)[0]:.2f}, in theory {ORDERS[name][1]:.0f}"
        )
    figure = make_subplots(cols=len(measured), subplot_titles=titles, horizontal_spacing=0.07)
    for column, (name, (sizes, seconds)) in enumerate(measured.items(), start=1):
        slope, intercept = exponent(sizes, seconds)
        fitted = np.exp(intercept) * np.array(sizes, float) ** slope
        theory = seconds[-1] * (np.array(sizes) / sizes[-1]) ** ORDERS[name][1]
        first, shown = column == 1, {"row": 1, "col": column}
        figure.add_scatter(
            x=sizes,
            y=theory,
            mode="lines",
            line={"color": GREY, "dash": "dash"},
            name="in theory",
            showlegend=first,
            **shown,
        )
        figure.add_scatter(
            x=sizes,
            y=fitted,
            mode="lines",
            line={"color": CATEGORICAL[1]},
            name="fitted to the upper half",
            showlegend=first,
            **shown,
        )
        figure.add_scatter(
            x=sizes,
            y=seconds,
            mode="markers",
            marker={"color": CATEGORICAL[0], "size": 9},
            name="measured",
            showlegend=first,
            **shown,
        )
        figure.update_xaxes(type="log", tickvals=sizes, ticktext=[str(size) for size in sizes], **shown)
        ticks = round_numbers(min(seconds) / 4, 4 * max(seconds))
        figure.update_yaxes(
            type="log",
            title="seconds" if first else None,
            tickvals=ticks,
            ticktext=[f"{tick:g}" for tick in ticks],
            **shown,
        )
        if max(seconds) < 10 * min(seconds):  # less than a decade: give it one, or noise looks like growth
            middle = float(np.log10(np.sqrt(min(seconds) * max(seconds))))
            figure.update_yaxes(range=[middle - 0.6, middle + 0.6], **shown)
    figure.update_layout(
        template=go.layout.Template(),
        plot_bgcolor="white",
        paper_bgcolor="white",
        width=1200,
        height=420,
        margin={"t": 70, "b": 80, "l": 70, "r": 20},
        legend={"orientation": "h", "y": -0.18, "x": 0.5, "xanchor": "center"},
        font={"family": "sans-serif", "size": 13},
    )
    figure.update_xaxes(gridcolor="#E5E7EA", linecolor=GREY, ticks="outside")
    figure.update_yaxes(gridcolor="#E5E7EA", linecolor=GREY, ticks="outside")
    figure.write_image(out)


def round_numbers(low: float, high: float) -> list[float]:
    """Powers of ten between the two, and their double and fivefold where that leaves few."""
    steps = (1, 2, 5) if high < 1000 * low else (1,)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--tiny", action="store_true", help="sizes that take seconds")
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--out", type=Path, default=Path("docs/growth.svg"))
    given = arguments.parse_args()
    dimensions = [64, 128, 256] if given.tiny else [512, 724, 1024, 1448, 2048, 2896, 4096]
    counts, depths = ([8, 16, 32], [1, 2]) if given.tiny else ([8, 16, 32, 64, 128, 256], [1, 2, 4, 8, 16])
    width = 256 if given.tiny else 2048
    one_expert(96, 8, 1)  # imports and bindings
    whole_scan(1, 1)
    measured = {
        "d": (dimensions, [one_expert(d, 8, given.repetitions) for d in dimensions]),
        "n": (counts, [one_expert(width, n, given.repetitions) for n in counts]),
        "layers": (depths, [whole_scan(depth, given.repetitions) for depth in depths]),
    }
    for name, (sizes, seconds) in measured.items():
        print(
            f"{name}: fitted {exponent(sizes, seconds)[0]:.2f}, in theory {ORDERS[name][1]:.0f} "
            f"({ORDERS[name][2]})"
        )
        for size, spent in zip(sizes, seconds, strict=True):
            print(f"  {size:5d} {spent:8.3f} s")
    draw(measured, given.out)


if __name__ == "__main__":
    main()
