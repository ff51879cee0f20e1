"""`inspect`'s estimate of a gate scan against the time that the scan takes, on checkpoints made here.

    python bench/estimate.py           8, 64 and 128 experts per layer, some minutes
    python bench/estimate.py --tiny    a fraction of the size

Run it with OMP_NUM_THREADS=1 on a busy machine: CPU seconds are then what the scan takes alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from growth import write_checkpoint

# layers, experts per layer, d_ff, d_model
SHAPES = [(2, 8, 3584, 1024), (2, 64, 512, 1024), (2, 128, 384, 1024)]
TINY = [(2, 8, 512, 256), (1, 64, 128, 256), (1, 128, 96, 256)]


def command(*words: str | Path) -> tuple[str, float, float]:
    """Run the command line; return what it printed, its seconds and its CPU seconds."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    line = [sys.executable, "-m", "moescope", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, time.perf_counter() - start, used


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--tiny", action="store_true", help="sizes that take seconds")
    given = arguments.parse_args()
    print("layers experts  d_ff d_model  estimate      took       CPU  estimate / took   / CPU  inspect CPU")
    for layers, experts, hidden, width in TINY if given.tiny else SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model.safetensors"
            write_checkpoint(model, layers, experts, hidden, width)
            facts, _, inspecting = command("inspect", model, "--json")
            estimate = json.loads(facts)["scan_estimate"]["seconds"]
            out = Path(folder) / "run"
            _, took, used = command("scan", model, "--out", out, "--device", "cpu", "--quiet", "--no-report")
        shape = f"{layers:6d} {experts:7d} {hidden:5d} {width:7d}"
        times = f"{estimate:7.1f} s {took:7.1f} s {used:7.1f} s"
        ratios = f"{estimate / took:16.2f} {estimate / used:7.2f}"
        print(f"{shape} {times} {ratios} {inspecting:10.1f} s", flush=True)


if __name__ == "__main__":
    main()
