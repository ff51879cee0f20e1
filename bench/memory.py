"""Peak resident memory of a scan against the size of the checkpoint: written as files of 0.5 GB a layer,
scanned in a process of its own.

    python bench/memory.py                      8 GB: 16 layers of 40 experts, 1024 x 2048
    python bench/memory.py --fused              the same with all experts of a layer in one tensor
    python bench/memory.py --layers 2 --experts 4 --hidden 64 --width 96       a few seconds

The baseline is a process that has imported everything and scanned a tiny checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

ONE_SCAN = """
import resource, sys
from moescope.weights.verb import scan
scan(sys.argv[1], out=sys.argv[2], device="cpu", quiet=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def write_layer(
    folder: Path, layer: int, experts: int, hidden: int, width: int, fused: bool
) -> dict[str, str]:
    generator = torch.Generator().manual_seed(layer)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.bfloat16)

    prefix = f"model.layers.{layer}.mlp"
    tensors = {f"{prefix}.gate.weight": draw(experts, width)}
    if fused:
        tensors[f"{prefix}.experts.gate_up_proj"] = draw(experts, 2 * hidden, width)
        tensors[f"{prefix}.experts.down_proj"] = draw(experts, width, hidden)
    else:
        for expert in range(experts):
            for part, shape in (
                ("gate", (hidden, width)),
                ("up", (hidden, width)),
                ("down", (width, hidden)),
            ):
                tensors[f"{prefix}.experts.{expert}.{part}_proj.weight"] = draw(*shape)
    file = f"layer-{layer:05}.safetensors"
    save_file(tensors, folder / file)
    return dict.fromkeys(tensors, file)


def write_checkpoint(folder: Path, layers: int, experts: int, hidden: int, width: int, fused: bool) -> Path:
    folder.mkdir()
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    where: dict[str, str] = {}
    for layer in range(layers):
        where |= write_layer(folder, layer, experts, hidden, width, fused)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def peak(folder: Path, out: Path) -> int:
    """Bytes of resident memory at the most, of a process that scans that checkpoint."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_SCAN, str(folder), str(out)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 16), ("experts", 40), ("hidden", 1024), ("width", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fused", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        tiny = write_checkpoint(base / "tiny", 2, 4, 16, 24, given.fused)
        baseline = peak(tiny, base / "tiny-run")
        folder = write_checkpoint(
            base / "large", given.layers, given.experts, given.hidden, given.width, given.fused
        )
        size = sum(file.stat().st_size for file in folder.iterdir())
        start = time.perf_counter()
        reached = peak(folder, base / "large-run")
        took = time.perf_counter() - start
    print(
        f"checkpoint {size / 1e9:.2f} GB, {size / given.layers / 1e9:.2f} GB a layer, "
        f"{'fused' if given.fused else 'one tensor an expert'}"
    )
    print(
        f"peak {reached / 1e9:.2f} GB, {(reached - baseline) / 1e9:.2f} GB above the baseline of "
        f"{baseline / 1e9:.2f} GB; {took:.0f} s"
    )


if __name__ == "__main__":
    main()
