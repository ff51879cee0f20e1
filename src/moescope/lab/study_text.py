"""The text of a study, read once and kept in its folder.

Every training reads the same, wherever and whenever it runs.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.lab.train import data_of
from moescope.storage import check_disk, sync_file, sync_folder

if TYPE_CHECKING:
    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.config import LabConfig
    from moescope.lab.corpus import Corpus
    from moescope.lab.document_losses import DocumentSample
    from moescope.lab.training import Data

FOLDER = "text"


@dataclass(frozen=True)
class StudyText:
    """What all trainings of a study share."""

    corpus: Corpus
    vocabulary: Vocabulary
    data: Data
    documents: DocumentSample


def keep_text(folder: Path, corpus: Corpus, vocabulary: Vocabulary) -> None:
    """Write corpus and tokenizer below the folder, whole or not at all.

    What is there already is of the same study and stays.
    """
    target = folder / FOLDER
    if target.exists():
        return
    content = json.dumps(asdict(corpus), ensure_ascii=False).encode()
    check_disk(folder, len(content))
    partial = folder / f"{FOLDER}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    (partial / "corpus.json").write_bytes(content)
    vocabulary.save(partial)
    for file in partial.iterdir():
        sync_file(file)
    partial.rename(target)
    sync_folder(folder)


_KEPT: dict[tuple[object, ...], StudyText] = {}  # of the study this process works for


def study_text(folder: Path, identity: str, config: LabConfig) -> StudyText:
    """The text of the study in that folder, read and cut into rows once a process.

    `identity` is the corpus's.
    """
    train, layout = config.train, config.data.layout
    key = (folder, identity, train.sequence_length, train.evaluation_rows, layout)
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = read_text(folder / FOLDER, config)
    return _KEPT[key]


def read_text(folder: Path, config: LabConfig) -> StudyText:
    from moescope.decoder.vocabulary import load_vocabulary
    from moescope.lab.corpus import Corpus
    from moescope.lab.document_losses import WINDOWS, DocumentSample

    content = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    corpus = Corpus(**{**content, **{name: tuple(content.get(name, ())) for name in ("domains", "cut")}})
    vocabulary = load_vocabulary(folder)
    windows = 1 if config.data.layout == "documents" else WINDOWS
    documents = DocumentSample.of(corpus.validation, vocabulary, config.train.sequence_length, windows)
    return StudyText(corpus, vocabulary, data_of(config, corpus, vocabulary), documents)
