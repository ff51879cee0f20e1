"""Streamed runs beside resident ones: time, memory, bytes read, and the tokens that are routed alike.

    python bench/execution.py --layers 20 --hidden 512 --most 3GB --tokens 2048       8.7 GB on the CPU
    python bench/execution.py --device cuda --layers 20 --most 8GB                    34 GB on a GPU
    python bench/execution.py --layers 3 --hidden 64 --width 128 --experts 8 --tokens 2048     half a minute

A checkpoint of OLMoE's shape and random weights is written, then each way traces the same tokens in a process
of its own. The time of a streamed pass is compared with the larger of reading the files and computing (the
resident pass), and with loading and computing one after the other. A process traces a tiny model first, so
that no pass contains imports and the start of libraries, and in the end the model again with single tokens,
for the choices that differ; only the run between is timed. `--most` caps the streamed process: on a GPU its
device memory, on a CPU its `--memory`. Files are read once before, so that reading, resident and streamed
runs find them in the page cache alike. Host memory is what the process alone holds (RssAnon), without mapped
files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from transformers import OlmoeConfig

TRACE = """
import json, sys, threading, time
import torch, transformers
import moescope
from moescope.execution.ways import parse_size

folder, tiny, ids, out, device, way, most, batch = sys.argv[1:]
peak, over = 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.02):
        line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
        peak = max(peak, int(line.split()[1]) * 1024)

memory = None
if way == "streamed" and most:
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_size("most", most) / total)
    else:
        memory = most

def trace(model, **more):
    return moescope.trace(model, token_ids=ids, out=out, device=device, execution=way, memory=memory,
                          batch_size=int(batch), overwrite=True, quiet=True, **more)

trace(tiny)
threading.Thread(target=watch, daemon=True).start()
began = time.perf_counter()
run = trace(folder)
seconds = time.perf_counter() - began
over.set()
on_device = torch.cuda.max_memory_allocated() if device == "cuda" else 0
info = json.loads((run.path / "run.json").read_text())
expected = info["execution"][0]
trace(folder, save_tokens=True)
print(json.dumps({"seconds": seconds, "host": peak, "device": on_device,
                  "read": expected.get("bytes_read"), "timings": info["timings"]}))
"""

LOAD = """
import json, sys, time
from moescope.execution.models import quiet_transformers
from moescope.execution.streamed import load_streamed

folder, device = sys.argv[1:]
model = load_streamed(folder, "auto", device)
with quiet_transformers():
    model.weights.load("outer")
    began, busy = time.perf_counter(), time.process_time()
    for layer in range(len(model.weights.layers)):
        model.weights.load(layer)
        model.weights.free(layer)
print(json.dumps({"seconds": time.perf_counter() - began, "processor": time.process_time() - busy}))
"""


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    sizes = {"layers": 20, "experts": 64, "width": 2048, "hidden": 2048, "tokens": 65536, "length": 512}
    for name, size in sizes.items():
        arguments.add_argument(f"--{name}", type=int, default=size)
    arguments.add_argument("--batch", type=int, default=8, help="documents per batch")
    arguments.add_argument("--most", default="", help="memory of the streamed run, such as 8GB")
    arguments.add_argument(
        "--folder", type=Path, help="keep the checkpoint here; default: removed at the end"
    )
    arguments.add_argument("--no-resident", action="store_true", help="for models that do not fit")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = given.folder or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        model = work / "model"
        sizes_of_tiny = {**vars(given), "layers": 2, "experts": 8, "width": 128, "hidden": 64}
        for folder, shape in ((model, given), (work / "tiny", argparse.Namespace(**sizes_of_tiny))):
            if not (folder / "config.json").exists():
                write_model(folder, shape)
        generator = np.random.default_rng(0)
        ids = work / "ids.jsonl"
        with ids.open("w") as file:
            for _ in range(given.tokens // given.length):
                file.write(json.dumps(generator.integers(0, 1000, given.length).tolist()) + "\n")
        files = sorted(model.glob("*.safetensors"))
        stored = sum(file.stat().st_size for file in files)
        read_files(files)
        reading = read_files(files)
        machine = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
        print(
            f"{machine}, torch {torch.__version__}: {stored / 1e9:.1f} GB in {given.layers} layers, "
            f"{given.tokens:,} tokens"
        )
        print(f"reading the files once, from the page cache {reading:8.1f} s")
        loading = child("loading", LOAD, str(model), given.device)
        print(
            f"loading all layers and computing nothing      {loading['seconds']:8.1f} s, "
            f"{loading['processor']:.1f} s of a processor core"
        )
        ways = ["streamed"] if given.no_resident else ["resident", "streamed"]
        found = {way: trace(model, ids, work / way, way, given) for way in ways}
        for way, facts in found.items():
            stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in facts["timings"].items())
            read = f", tensors read {facts['read'] / stored:.3f} x" if facts["read"] else ""
            print(
                f"{way:9} {facts['seconds']:8.1f} s ({stages}); host memory {facts['host'] / 1e9:.2f} GB, "
                f"device memory {facts['device'] / 1e9:.2f} GB{read}"
            )
        streamed = found["streamed"]["timings"]["trace"]
        alone = {"reading": reading}
        if "resident" in found:
            alone["computing"] = found["resident"]["timings"]["trace"]
        most = max(alone.values())
        shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in alone.items())
        serial = (loading["seconds"] + alone.get("computing", 0.0)) / most
        print(f"streamed pass / max({shown}) = {streamed / most:.2f}; without overlap {serial:.2f}")
        loaded = max(loading["seconds"], alone.get("computing", 0.0))  # several threads read there
        print(f"streamed pass / max(loading, computing) = {streamed / loaded:.2f}")
        if "resident" in found:
            agreement(work / "resident", work / "streamed")


def write_model(folder: Path, given: argparse.Namespace) -> None:
    """Write one file per layer, with the names that OLMoE checkpoints have."""
    folder.mkdir(parents=True)
    heads = max(given.width // 128, 1)
    config = OlmoeConfig(
        hidden_size=given.width,
        intermediate_size=given.hidden,
        num_hidden_layers=given.layers,
        num_experts=given.experts,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=1000,
        eos_token_id=1,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["OlmoeForCausalLM"],
    )
    place = given.device

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=place).normal_(std=0.02).cpu()

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.bfloat16)

    torch.manual_seed(0)
    index: dict[str, str] = {}

    def save(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    width, hidden = given.width, given.hidden
    save(
        "outer.safetensors",
        {
            "model.embed_tokens.weight": draw(1000, width),
            "model.norm.weight": ones(width),
            "lm_head.weight": draw(1000, width),
        },
    )
    for layer in range(given.layers):
        at = f"model.layers.{layer}"
        tensors = {f"{at}.self_attn.{part}_proj.weight": draw(width, width) for part in "qkvo"}
        tensors |= {f"{at}.self_attn.{part}_norm.weight": ones(width) for part in "qk"}
        tensors |= {f"{at}.{part}_layernorm.weight": ones(width) for part in ("input", "post_attention")}
        tensors[f"{at}.mlp.gate.weight"] = draw(given.experts, width)
        for expert in range(given.experts):
            for part in ("gate", "up"):
                tensors[f"{at}.mlp.experts.{expert}.{part}_proj.weight"] = draw(hidden, width)
            tensors[f"{at}.mlp.experts.{expert}.down_proj.weight"] = draw(width, hidden)
        save(f"layer-{layer:03}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(folder)  # last: it marks the checkpoint as whole


def read_files(files: list[Path]) -> float:
    buffer = bytearray(2**26)
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - began


def trace(model: Path, ids: Path, out: Path, way: str, given: argparse.Namespace) -> dict:
    words = [
        str(model),
        str(model.with_name("tiny")),
        str(ids),
        str(out),
        given.device,
        way,
        given.most,
        str(given.batch),
    ]
    return child(way, TRACE, *words)


def child(name: str, script: str, *words: str) -> dict:
    """Run a script in a process of its own and return what it prints last."""
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def agreement(first: Path, second: Path) -> None:
    """Print how many choices differ. Columns of tokens: one per choice."""
    a, b = (pd.read_parquet(folder / "tokens.parquet") for folder in (first, second))
    keys = [name for name in ("document", "position", "layer") if name in a]
    a, b = (frame.sort_values(keys, ignore_index=True) for frame in (a, b))
    choices = [np.sort(np.stack(frame["experts"].to_numpy()), axis=1) for frame in (a, b)]
    differ = [len(set(x) - set(y)) for x, y in zip(*choices, strict=True) if (x != y).any()]
    print(
        f"choices that differ: {sum(differ):,} of {choices[0].size:,} ({sum(differ) / choices[0].size:.4%})"
    )


if __name__ == "__main__":
    main()
