"""Gate scans on one GPU: generated checkpoints of real shapes, the whole verb timed, and where the time goes.

    python bench/gpu.py qwen3 --layers 48      48 x 128 experts of 768 x 2048 (Qwen3-30B-A3B)
    python bench/gpu.py mixtral                one layer of 8 experts of 14336 x 4096
    python bench/gpu.py deepseek               one layer of 256 experts of 2048 x 7168 (DeepSeek-V3)

A scan of one layer shows the start-up (libraries, kernels compiled and recorded), scans of half the layers
and of all what a further
layer takes; then comes the command in a process of its own, and a scan with the files out of the page cache.
Beside it: reading alone, the solver of torch for the same experts one after the other, and the error of align
against torch's fp64 SVD.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from moescope.checkpoint import open_checkpoint
from moescope.families import read_moe
from moescope.spectral import gpu
from moescope.spectral.decompose import make_k_grid
from moescope.weights.verb import scan

SHAPES = {
    "qwen3": (128, 768, 2048, 8),
    "mixtral": (8, 14336, 4096, 2),
    "deepseek": (256, 2048, 7168, 8),
    "tiny": (8, 48, 64, 2),
}


def write_checkpoint(folder: Path, name: str, layers: int, device: str) -> Path:
    """One file a layer.

    Up and down are holes in the file: a gate scan does not read them, and they would fill the disk.
    """
    experts, hidden, width, top_k = SHAPES[name]
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
    }
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    generator = torch.Generator(device=device).manual_seed(0)
    for layer in range(layers):
        shapes = {f"model.layers.{layer}.mlp.gate.weight": (experts, width)}
        for part, shape in (("gate", (hidden, width)), ("up", (hidden, width)), ("down", (width, hidden))):
            shapes |= {
                f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight": shape for e in range(experts)
            }
        header, end = {}, 0
        for tensor, shape in shapes.items():
            begin, end = end, end + 2 * shape[0] * shape[1]
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = f"layer-{layer:05}.safetensors"
        where |= dict.fromkeys(shapes, file)
        with (folder / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            for tensor, shape in shapes.items():
                if "up_proj" in tensor:
                    break
                data = torch.randn(shape, generator=generator, device=device).to(torch.bfloat16).cpu()
                opened.write(memoryview(data.view(torch.uint8).numpy()))
            opened.truncate(8 + len(text) + end)
            os.fsync(opened.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def out_of_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(function, *arguments):  # type: ignore[no-untyped-def]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def read_all(folder: Path, device: str) -> None:
    moe = read_moe(open_checkpoint(folder))
    for weights in moe.layers.values():
        if device == "cpu":
            for expert in range(weights.n_experts):
                weights.gate_EFD.read(expert)
        else:
            for _, get in gpu.read_ahead(
                lambda e, w=weights: w.gate_EFD.read(e).to(device), list(range(weights.n_experts))
            ):
                get()
        moe.checkpoint.release()


def stages(folder: Path, device: str) -> dict[str, float]:
    """Seconds of each step of the solver for one batch, each waited for."""
    weights = next(iter(read_moe(open_checkpoint(folder)).layers.values()))
    matrices = [weights.gate_EFD.read(e).to(device) for e in range(min(weights.n_experts, gpu.MAX_BATCH))]
    rows = torch.nn.functional.normalize(weights.router_ED.read().double()).to(device)
    side = min(matrices[0].shape)
    k_grid = make_k_grid(side)
    gpu.decompose_batch(matrices, rows, k_grid, 1e-6)
    total, _ = seconds(gpu.decompose_batch, matrices, rows, k_grid, 1e-6)
    W = torch.stack(matrices).double()
    tall = W.shape[1] >= W.shape[2]
    gram_time, G = seconds(lambda: W.mT @ W if tall else W @ W.mT)
    Y = rows.T.expand(len(W), -1, -1) if tall else W @ rows.T
    reduce_time, solved = seconds(gpu.reduce, G, Y)
    reduce_time, solved = seconds(gpu.reduce, G, Y)
    kernel_by_kernel, _ = seconds(gpu.tridiagonalise, G.clone(), Y)
    conquer_time, eigen = seconds(
        gpu.divide_and_conquer,
        solved.diagonal_BN,
        solved.beside_BN,
        solved.vectors_BNV,
        gpu.fused_update(),
    )
    leading_time, _ = seconds(lambda: solved.back(eigen.top_vectors(min(64, side))))
    one_by_one, _ = seconds(lambda: [torch.linalg.eigh(g) for g in G[:8]])
    return {
        "experts": len(W),
        "batch": total,
        "gram": gram_time,
        "reduction": reduce_time,
        "divide and conquer": conquer_time,
        "leading vectors": leading_time,
        "checks and rest": total - gram_time - reduce_time - conquer_time - leading_time,
        "(reduction not recorded but started kernel by kernel)": kernel_by_kernel,
        "torch.linalg.eigh one after the other": one_by_one / min(8, len(G)) * len(W),
    }


def own_process(folder: Path, out: Path) -> None:
    command = [sys.executable, "-m", "moescope", "scan", str(folder), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    took, _ = seconds(lambda: subprocess.run(command, env=environment, check=True, capture_output=True))
    timings = json.loads((out / "run.json").read_text())["timings"]
    print(
        f"the command in a process of its own, files in the page cache: {took:.2f} s; {timings}", flush=True
    )


def largest_error(folder: Path, run, device: str) -> float:  # type: ignore[no-untyped-def]
    """Of align, over three experts of the first layer and every router, against an fp64 SVD."""
    weights = next(iter(read_moe(open_checkpoint(folder)).layers.values()))
    rows = torch.nn.functional.normalize(weights.router_ED.read().double()).to(device)
    table = run.table("alignment")
    table = table[(table["layer"] == 0)]
    worst = 0.0
    for expert in {0, weights.n_experts // 2, weights.n_experts - 1}:
        right = torch.linalg.svd(weights.gate_EFD.read(expert).to(device).double(), full_matrices=False)[2]
        sums = (rows[expert] @ right.T).square().cumsum(0).cpu()
        for k, align in table[table["expert"] == expert][["k", "align"]].itertuples(index=False):
            worst = max(worst, abs(float(sums[k - 1]) - align))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument(
        "--brief", action="store_true", help="neither the command in a process of its own nor the stages"
    )
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        base = Path(scratch)
        took, folder = seconds(write_checkpoint, base / given.shape, given.shape, given.layers, device)
        print(
            (
                f"{given.shape}: {given.layers} layers x {SHAPES[given.shape][0]} experts written in "
                f"{took:.1f} s"
            ),
            flush=True,
        )
        took, _ = seconds(lambda: scan(folder, layers=0, out=base / "warm", device=device, quiet=True))
        print(
            f"start-up, with one layer: {took:.2f} s (kernels compiled or fetched, and recorded)", flush=True
        )
        half = max(given.layers // 2, 1)
        took_half, _ = seconds(
            lambda: scan(folder, layers=range(half), out=base / "half", device=device, quiet=True)
        )
        took, run = seconds(lambda: scan(folder, out=base / "warm-cache", device=device, quiet=True))
        print(f"scan, files in the page cache: {took:.2f} s; {run.info['timings']}", flush=True)
        if half < given.layers:
            print(f"  a further layer: {(took - took_half) / (given.layers - half):.2f} s", flush=True)
        if not given.brief:
            own_process(folder, base / "process")
        out_of_cache(folder)
        took, run = seconds(lambda: scan(folder, out=base / "cold", device=device, quiet=True))
        print(
            f"scan, files from disk: {took:.2f} s; fallbacks {run.info['fallbacks']}; {run.info['timings']}",
            flush=True,
        )
        out_of_cache(folder)
        reading, _ = seconds(read_all, folder, device)
        print(f"reading alone, from disk: {reading:.2f} s; scan / reading: {took / reading:.2f}", flush=True)
        if device != "cpu" and not given.brief:
            for name, value in stages(folder, device).items():
                print(f"  {name}: {value:.4g}" + ("" if name == "experts" else " s"))
        print(f"largest error of align against an fp64 SVD: {largest_error(folder, run, device):.1e}")


if __name__ == "__main__":
    main()
