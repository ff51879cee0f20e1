"""CPU seconds, wall seconds and peak memory of whole commands, of one version or of several side by side.

    python bench/commands.py                                     the code at hand, some minutes
    python bench/commands.py --source ../old/src --source src    alternating; ratios to the first
    python bench/commands.py --tiny --only scan,trace,deploy     deploy reads what trace wrote

Every command runs in a process of its own on a Mixtral of random weights and on text of the Python
installation, with one thread, reports included. CPU seconds hardly depend on what else the machine does; the
fastest of the repetitions counts. `start` is `inspect`: what any command spends before its work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {"width": 512, "hidden": 1024, "layers": 6, "experts": 16, "tokens": 40_000}
TINY = {"width": 32, "hidden": 32, "layers": 2, "experts": 4, "tokens": 2_000}


def save_model(folder: Path, size: dict[str, int]) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(letters),
        hidden_size=size["width"],
        intermediate_size=size["hidden"],
        num_hidden_layers=size["layers"],
        num_local_experts=size["experts"],
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_texts(folder: Path) -> list[str]:
    """Two domains of forty documents; return the options that name them."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    options = []
    for name, files in (("a", modules[::2]), ("b", modules[1::2])):
        (folder / name).mkdir(parents=True)
        for file in files:
            (folder / name / f"{file.stem}.txt").write_text(file.read_text(encoding="utf-8")[:4000])
        options += ["--domain", f"{name}={folder / name}"]
    return options


def commands_of(base: Path, size: dict[str, int]) -> dict[str, list[str]]:
    """Name -> words, in an order in which later commands find what earlier ones wrote below OUT."""
    model, text = str(save_model(base / "model", size)), save_texts(base / "text")
    limit = ["--max-tokens", str(size["tokens"]), "--device", "cpu"]
    (base / "train.toml").write_text("[data]\nmax_bytes = 200_000\n[train]\nsteps = 100\n")
    return {
        "start": ["inspect", model],
        "scan": ["scan", model, "--device", "cpu", "--out", "OUT/scan"],
        "trace": ["trace", model, *text, *limit, "--save-tokens", "--out", "OUT/trace"],
        "compress": ["compress", model, "--keep", "0.5", *text, *limit, "--out", "OUT/compress"],
        "intervene": [
            "intervene",
            model,
            "--sweep",
            "layers",
            "--set",
            "expert=1 ablate",
            *text,
            *limit,
            "--out",
            "OUT/intervene",
        ],
        "deploy": ["deploy", "OUT/trace", "--out", "OUT/deploy"],
        "report": ["report", "OUT/scan", "OUT/trace", "--out", "OUT/report.html"],
        "train": ["train", str(base / "train.toml"), "--out", "OUT/train"],
    }


def measure(words: list[str], source: str, out: Path) -> tuple[float, float, float]:
    """Return CPU seconds, wall seconds and peak resident GB of one command, children included."""
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "moescope", *(word.replace("OUT", str(out)) for word in words)]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(line, env=environment, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            log.seek(0)
            sys.exit(f"{' '.join(line)}\n{log.read().decode()}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - start, used.ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", action="append", help="a version's src folder; the first is the reference"
    )
    parser.add_argument("--only", default="", help="commands, separated by commas")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    sources = [str(Path(one).resolve()) for one in given.source or [Path(__file__).parents[1] / "src"]]
    print(f"{'command':10s} {'CPU s':>7s} {'wall s':>7s} {'GB':>5s}  ratio of CPU  source")
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        commands = commands_of(base, TINY if given.tiny else SIZES)
        for name in given.only.split(",") if given.only else commands:
            best: dict[str, tuple[float, float, float]] = {}
            for repetition in range(given.repetitions):
                for at, source in enumerate(sources):
                    one = measure(commands[name], source, base / f"{at}-{repetition}")
                    best[source] = min(one, best.get(source, one))
            for source, (cpu, wall, memory) in best.items():
                ratio = cpu / best[sources[0]][0]
                print(f"{name:10s} {cpu:7.1f} {wall:7.1f} {memory:5.2f}  {ratio:12.2f}  {source}", flush=True)


if __name__ == "__main__":
    main()
