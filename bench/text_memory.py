"""Peak resident memory of `trace --max-tokens 2000` on one line of 100 MB, above that on a line of 100 kB.

    python bench/text_memory.py                 plain text
    python bench/text_memory.py --jsonl         as one JSON line, which is rejected: over 32 MiB
    python bench/text_memory.py --megabytes 20 --jsonl

The model is tiny and has a byte-level BPE tokenizer, so memory is that of reading and tokenizing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ONE_TRACE = """
import resource, sys
from moescope.errors import BadInput
from moescope.routing.trace import trace
try:
    run = trace(sys.argv[1], text=sys.argv[2], out=sys.argv[3], max_tokens=2000, device="cpu", quiet=True)
    print(f"{sum(run.info['coverage'][0]['tokens'].values())} tokens")
except BadInput as error:
    print(f"rejected: {error}")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def save_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words(200_000)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def words(size: int) -> str:
    """Return random words of two to nine letters without a line end."""
    generator = np.random.default_rng(0)
    letters = generator.integers(ord("a"), ord("z") + 1, size, dtype=np.uint8)
    letters[generator.random(size) < 0.2] = ord(" ")
    return letters.tobytes().decode()


def peak(model: Path, text: Path, out: Path) -> tuple[str, int, float]:
    """Return what came of it, bytes of resident memory at the most, and seconds, in its own process."""
    start = time.perf_counter()
    command = [sys.executable, "-c", ONE_TRACE, str(model), str(text), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result, memory = done.stdout.splitlines()[-2:]
    return result, int(memory), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--jsonl", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        model = save_model(base / "model")
        found = []
        piece = words(100_000)
        for name, pieces in (("small", 1), ("large", given.megabytes * 10)):
            text = base / (f"{name}.jsonl" if given.jsonl else f"{name}.txt")
            with text.open("w") as file:  # piece by piece: a child's peak includes its parent's at the start
                file.write('"' * given.jsonl)
                for _ in range(pieces):
                    file.write(piece)
                file.write('"' * given.jsonl)
            found.append(peak(model, text, base / f"run-{name}"))
    (_, baseline, _), (result, reached, seconds) = found
    print(f"{given.megabytes} MB in one line, --max-tokens 2000: {result}")
    print(
        f"peak {reached / 1e9:.2f} GB, {(reached - baseline) / 1e9:.2f} GB above the baseline of "
        f"{baseline / 1e9:.2f} GB; {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
