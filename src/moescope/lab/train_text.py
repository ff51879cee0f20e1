"""The text a training reads: the Python installation's own, or the user's files.

And what of it is kept for tracing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.execution.texts import STDIN, Source, existing, is_hub_text, sources

if TYPE_CHECKING:
    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.config import LabConfig
    from moescope.lab.corpus import Corpus

VALIDATION_BYTES = 60_000  # of each domain, kept beside the run for tracing
FEW_UNUSED = 20  # entries of a vocabulary of which one may be unused without a word: a size may be rounded up


def read_corpus(config: LabConfig) -> Corpus:
    from moescope.lab.corpus import BYTES_A_DOMAIN, EMBEDDED, corpus_of, embedded_corpus

    data = config.data
    if not data.text and not data.domains:
        share = max(data.max_bytes // len(EMBEDDED), 1) if data.max_bytes else BYTES_A_DOMAIN
        return embedded_corpus(share, data.validation_share)
    reading = sources(data.text, [f"{name}={path}" for name, path in data.domains.items()], None)
    most = max(data.max_bytes // len(reading), 1) if data.max_bytes else None
    return corpus_of({source.domain: texts_of(source, most) for source in reading}, data.validation_share)


def check_texts(config: LabConfig) -> None:
    """Refuse files that are not there, reading none.

    Standard input and datasets of the hub are not looked at.
    """
    for path in [*config.data.text, *config.data.domains.values()]:
        if path != STDIN and not is_hub_text(path):
            existing(path)


def text_warnings(config: LabConfig, corpus: Corpus, vocabulary: Vocabulary) -> list[str]:
    """What of the text is not as one would think."""
    found = []
    entries, size = config.model.vocabulary, vocabulary.size
    if (entries - size) * FEW_UNUSED > entries:
        remedy = "give more text" if config.data.vocabulary == "bpe" else 'set vocabulary = "bpe" in [data]'
        found.append(
            f"the vocabulary has {size:,} entries, not the {entries:,} of [model] vocabulary: "
            f"the others never occur; lower it, or {remedy}"
        )
    if corpus.cut:
        which = (
            f"domain {corpus.cut[0]} is"
            if len(corpus.cut) == 1
            else f"domains {', '.join(corpus.cut)} are each"
        )
        found.append(
            f"{which} one document: it is trained on up to near its end, and validated on the "
            "rest, which may be easier than another document"
        )
    return found


def texts_of(source: Source, most: int | None) -> Callable[[], list[str]]:
    def read() -> list[str]:
        found, left = [], most
        for content in source.read():
            if left is not None and left <= 0:
                break
            text = (
                content
                if isinstance(content, str)
                else "\n".join(str(part.get("content", "")) for part in content if isinstance(part, dict))
            )
            found.append(text)
            left = None if left is None else left - len(text.encode())
        return found

    return read


def vocabulary_of(config: LabConfig, corpus: Corpus, origin: str | None = None) -> Vocabulary:
    """The vocabulary of the checkpoint whose weights come first, since its embeddings know no other.

    Else one for this text.
    """
    from moescope.decoder.vocabulary import load_vocabulary, make_vocabulary

    if origin is not None:
        return load_vocabulary(Path(origin))
    texts = (text for domain in corpus.domains for text in corpus.train[domain])
    return make_vocabulary(config.data.vocabulary, config.model.vocabulary, texts)


def keep_validation(folder: Path, corpus: Corpus) -> None:
    """Some validation documents of each domain, as the JSON lines that `trace` reads."""
    folder.mkdir(exist_ok=True)
    for domain in corpus.domains:
        left, lines = VALIDATION_BYTES, []
        for text in corpus.validation[domain]:
            if left <= 0:
                break
            lines.append(json.dumps({"text": text[:left]}, ensure_ascii=False))
            left -= len(text)
        (folder / f"{domain}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
