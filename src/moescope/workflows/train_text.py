"""The text a training reads: the Python installation's own, or the user's files; and what of it is kept for tracing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.workflows.texts import Source, sources

if TYPE_CHECKING:
    from moescope.lab.config import LabConfig
    from moescope.lab.corpus import Corpus
    from moescope.lab.vocabulary import Vocabulary

VALIDATION_BYTES = 60_000  # of each domain, kept beside the run for tracing


def read_corpus(config: LabConfig) -> Corpus:
    from moescope.lab.corpus import BYTES_A_DOMAIN, EMBEDDED, corpus_of, embedded_corpus

    data = config.data
    if not data.text and not data.domains:
        share = max(data.max_bytes // len(EMBEDDED), 1) if data.max_bytes else BYTES_A_DOMAIN
        return embedded_corpus(share, data.validation_share)
    reading = sources(data.text, [f"{name}={path}" for name, path in data.domains.items()], None)
    most = max(data.max_bytes // len(reading), 1) if data.max_bytes else None
    return corpus_of({source.domain: texts_of(source, most) for source in reading}, data.validation_share)


def texts_of(source: Source, most: int | None) -> Callable[[], list[str]]:
    def read() -> list[str]:
        found, left = [], most
        for content in source.read():
            if left is not None and left <= 0:
                break
            text = content if isinstance(content, str) else "\n".join(str(part.get("content", "")) for part in content if isinstance(part, dict))  # fmt: skip
            found.append(text)
            left = None if left is None else left - len(text.encode())
        return found

    return read


def vocabulary_of(config: LabConfig, corpus: Corpus, origin: str | None = None) -> Vocabulary:
    """The vocabulary of the checkpoint whose weights come first, since its embeddings know no other; else one for this text."""
    from moescope.lab.vocabulary import load_vocabulary, make_vocabulary

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
