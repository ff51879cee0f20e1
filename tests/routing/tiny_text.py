"""Tiny models that can read.

A random model and a tokenizer of its own, saved side by side as a user would have them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from families.tiny_models import tiny_model

WORDS = [f"word{number}" for number in range(50)]


def save_tokenizer(folder: Path, chat_template: bool = False) -> None:
    """A word tokenizer of 64 tokens: three special ones, fifty words, and fillers no text holds."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS, *(f"<filler{number}>" for number in range(10))]
    tokenizer = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat_template:
        fast.chat_template = "{% for message in messages %}<s> {{ message['content'] }} </s>{% endfor %}"
    fast.save_pretrained(folder)


def save_model(
    folder: Path,
    kind: str = "mixtral",
    tokenizer: bool = True,
    chat_template: bool = False,
    nudge: float = 0.0,
) -> Path:
    """A tiny random model on disk; `nudge` moves its weights a little, as training would."""
    import torch

    model = tiny_model(kind).model
    if nudge:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(nudge * torch.randn(parameter.shape, generator=generator))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder, chat_template)
    return folder


def texts(count: int, seed: int = 0, first: int = 0, words: int = 50) -> list[str]:
    """Documents of 3 to 30 words; `first` and `words` choose which, so that domains can differ."""
    generator = np.random.default_rng(seed)
    return [
        " ".join(WORDS[first + word] for word in generator.integers(0, words, generator.integers(3, 31)))
        for _ in range(count)
    ]


def write_jsonl(file: Path, documents: list[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return file
