"""Vocabularies: bytes, or byte-pair encoding by the tokenizers library, saved as a standard tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moescope.checkpoint.writing import SMALL_FILE_BYTES
from moescope.errors import BadInput, unknown_name

END, PAD = "<end>", "<pad>"  # after every document; after shorter ones
SPECIALS = (END, PAD)
KINDS = ("bytes", "bpe")
BYTES = 256
SMALLEST = BYTES + len(SPECIALS)
FILE = "tokenizer.json"


class Vocabulary(Protocol):
    """What the lab needs of a vocabulary."""

    @property
    def size(self) -> int:
        """Number of tokens."""

    @property
    def end(self) -> int:
        """Id of the token after every document."""

    @property
    def pad(self) -> int:
        """Id of the token after shorter documents."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text, without special tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of these ids; special tokens have none."""

    def save(self, folder: Path) -> None:
        """Save it so that `load_vocabulary` and transformers load it."""


@dataclass(frozen=True)
class Bytes:
    """Token b is byte b of the UTF-8 text; two more tokens end a document and pad."""

    size: int = BYTES + len(SPECIALS)
    end: int = BYTES
    pad: int = BYTES + 1

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < BYTES).decode("utf-8", errors="replace")

    def byte_counts(self) -> NDArray[np.int64]:
        """Return how many bytes of text each token stands for; 0 for special tokens."""
        return (np.arange(self.size) < BYTES).astype(np.int64)

    def save(self, folder: Path) -> None:
        """Save it as byte-level BPE without merges, which tokenizers and transformers load."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        write(
            folder,
            {
                "version": "1.0",
                **dict.fromkeys(("truncation", "padding")),
                "added_tokens": [
                    {"id": at, "content": name, **off, "special": True}
                    for at, name in enumerate(SPECIALS, BYTES)
                ],
                "normalizer": None,
                "pre_tokenizer": level,
                "post_processor": None,
                "decoder": level,
                "model": {
                    "type": "BPE",
                    **dict.fromkeys(
                        ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
                    ),
                    **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
                    "vocab": {letter: byte for byte, letter in sorted(byte_letters().items())},
                    "merges": [],
                },
            },
        )


@dataclass(frozen=True)
class Pairs:
    """Byte-pair encoding over bytes (Sennrich et al. 2016), learned from the training texts alone."""

    tokenizer: Any  # tokenizers.Tokenizer

    @classmethod
    def learned(cls, texts: Iterable[str], size: int) -> Pairs:
        tokenizers = library()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        letters = [letter for _, letter in sorted(byte_letters().items())]  # sorted: deterministic
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIALS), initial_alphabet=letters, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls.of(tokenizer.to_str())

    @classmethod
    def of(cls, content: str) -> Pairs:
        tokenizer = library().Tokenizer.from_str(content)
        tokenizer.no_padding()  # which could be to any length
        tokenizer.encode_special_tokens = True  # a literal "<pad>" in a text is five letters
        return cls(tokenizer)

    @property
    def size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def end(self) -> int:
        return int(self.tokenizer.token_to_id(END))

    @property
    def pad(self) -> int:
        return int(self.tokenizer.token_to_id(PAD))

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_all(self, texts: list[str]) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens of each text, encoded on all cores."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return (np.array(encoding.ids, dtype=np.int64) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def byte_counts(self) -> NDArray[np.int64]:
        """Return how many bytes each token stands for: one letter of the byte-level alphabet is one byte."""
        tokens = [self.tokenizer.id_to_token(number) for number in range(self.size)]
        return np.array([0 if token in SPECIALS else len(token or "") for token in tokens], dtype=np.int64)

    def save(self, folder: Path) -> None:
        write(folder, json.loads(self.tokenizer.to_str()))


def check_vocabulary(kind: str, size: int) -> None:
    """Reject an impossible vocabulary before any text is read."""
    if kind not in KINDS:
        raise unknown_name("vocabulary", kind, list(KINDS))
    if size < SMALLEST:
        raise BadInput(
            f"[model] vocabulary {size}: {kind} needs at least {SMALLEST} entries (bytes and two special "
            "tokens); raise it"
        )
    if kind == "bpe":
        library()


def make_vocabulary(kind: str, size: int, texts: Iterable[str]) -> Vocabulary:
    """Return a vocabulary of that kind; bytes need no texts and have a fixed size."""
    check_vocabulary(kind, size)
    return Bytes() if kind == "bytes" else Pairs.learned(texts, size)


def load_vocabulary(folder: Path) -> Bytes | Pairs:
    """Return the vocabulary saved with a lab checkpoint."""
    return Bytes() if kind_of(folder) == "bytes" else Pairs.of(read_tokenizer(folder))


def read_tokenizer(folder: Path) -> str:
    """Return the saved tokenizer; a pipe or a device would never end."""
    path = folder / FILE
    if not path.is_file() or path.stat().st_size > SMALL_FILE_BYTES:
        raise BadInput(f"{path}: not a tokenizer of the lab; pass a lab checkpoint")
    return path.read_text(encoding="utf-8")


def kind_of(folder: Path) -> str:
    """Return the kind of the saved vocabulary."""
    try:
        model = json.loads(read_tokenizer(folder))["model"]
        return "bytes" if not model["merges"] and len(model["vocab"]) == BYTES else "bpe"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(f"{folder / FILE}: not a tokenizer of the lab; pass a lab checkpoint") from None


def byte_letters() -> dict[int, str]:
    """Return the printable letter of each byte in byte-level tokenizers: itself, else one from 256 on."""
    ranges = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))  # first and last
    printable = [byte for first, last in ranges for byte in range(ord(first), ord(last) + 1)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(BYTES + at) for at, byte in enumerate(others)}


def write(folder: Path, content: dict[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise BadInput(
            'vocabulary "bpe" needs the tokenizers library: pip install "moescope[hf]", or use "bytes"'
        ) from None
    return tokenizers
