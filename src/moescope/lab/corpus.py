"""Texts to train on, by domain, split into training and validation by document.

The embedded corpus comes from the Python installation, so nothing is downloaded: sources of the standard
library, its manual and docstrings, C headers if installed, and two generated domains. Its identity is a hash,
since another Python has other sources.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import math
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from moescope.decoder.vocabulary import Vocabulary, load_vocabulary, make_vocabulary
from moescope.errors import BadInput
from moescope.execution.texts import STDIN, Source, existing, is_hub_text, sources
from moescope.lab.config import DataConfig, LabConfig

BYTES_PER_DOMAIN = 1_000_000
VALIDATION_BYTES = 60_000  # per domain, saved with the run for tracing
FEW_UNUSED = 20  # warn if more than 1 in this many vocabulary entries is unused
NO_SOURCES = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "pydoc_data", "ensurepip", "__pycache__"),
}
LONGEST = 2**16  # characters of an embedded document, so that no file dominates a domain
SHORTEST_DOCSTRINGS = 200  # characters of prose that make a module a document
LINES_PER_DOCUMENT = 40  # of generated text
LONG_LINE = 40  # characters that make a line distinctive


@dataclass(frozen=True)
class Document:
    """One text. The split keeps a group together: a module's source and docstrings, overlapping topics."""

    domain: str
    group: str
    text: str


Text = TypeVar("Text", Document, str)


@dataclass(frozen=True)
class Corpus:
    """Training and validation texts of every domain, ordered by their content."""

    domains: tuple[str, ...]
    train: dict[str, list[str]]
    validation: dict[str, list[str]]
    identity: str  # hash of all texts, their domains and sides
    cut: tuple[str, ...] = ()  # domains of one document, whose end is its validation text
    unseen: dict[str, list[str]] = field(default_factory=dict)  # validation texts of domains without training

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return documents and bytes of every domain, for run.json."""
        return {
            domain: {
                "train_documents": len(self.train[domain]),
                "validation_documents": len(self.validation[domain]),
                "train_bytes": sum(len(text.encode()) for text in self.train[domain]),
                "validation_bytes": sum(len(text.encode()) for text in self.validation[domain]),
            }
            for domain in self.domains
        }


def embedded_corpus(
    bytes_per_domain: int = BYTES_PER_DOMAIN, validation_share: float = DataConfig.validation_share
) -> Corpus:
    """Return the corpus of this Python installation: code, prose, C headers, arithmetic, records."""
    documents: list[Document] = []
    for domain, read in EMBEDDED.items():
        chosen = list(limited(read(), bytes_per_domain))
        if not chosen and domain not in MAY_BE_ABSENT:
            raise BadInput(
                f"embedded corpus: this Python has no text for the domain {domain}; set [data] domains"
            )
        documents += chosen
    return split(documents, validation_share)


def held_out(domain: str, validation_share: float = DataConfig.validation_share) -> Iterator[str]:
    """Yield the documents of an embedded domain that no training reads, however much text it takes."""
    return (document.text for document in EMBEDDED[domain]() if place(document.group) < validation_share)


def corpus_of(
    domains: dict[str, Iterable[str]], validation_share: float = DataConfig.validation_share
) -> Corpus:
    """Return a corpus of the user's texts.

    Equal texts stay on one side of the split; a domain of one text is cut near its end.
    """
    documents: list[Document] = []
    for domain, given in domains.items():
        texts = [text for text in given if text.strip()]
        if not texts:
            raise BadInput(f"domain {domain!r}: it has no text; set another path")
        documents += [Document(domain, text, text) for text in texts]
    return split(documents, validation_share)


def split(documents: list[Document], validation_share: float) -> Corpus:
    """Split documents by a hash of their group, independent of their order and of other documents."""
    domains = tuple(dict.fromkeys(document.domain for document in documents))
    placed = {
        name: sorted((place(d.group), d.text) for d in documents if d.domain == name) for name in domains
    }
    train: dict[str, list[str]] = {}
    validation: dict[str, list[str]] = {}
    for domain, texts in placed.items():
        validation[domain] = [text for at, text in texts if at < validation_share]
        train[domain] = [text for at, text in texts if at >= validation_share]
        if not validation[domain] or not train[domain]:
            validation[domain], train[domain] = split_few(domain, texts, validation_share)
    cut = tuple(domain for domain, texts in placed.items() if len({at for at, _ in texts}) == 1)
    return Corpus(domains, train, validation, identity_of(train, validation), cut)


def identity_of(*sides: dict[str, list[str]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for side in sides:
        for domain, texts in side.items():
            for text in texts:
                digest.update(f"{domain}\0{len(text)}\0{text}\0".encode())
        digest.update(b"\1")
    return digest.hexdigest()


def corpus_of_sides(train: dict[str, list[str]], held_out: dict[str, list[str]]) -> Corpus:
    """Return a corpus whose validation texts were given separately.

    A text that is on both sides is removed from training. Domains of `held_out` alone are unseen ones.
    """
    both = {text for texts in held_out.values() for text in texts}
    train = {name: [text for text in texts if text not in both] for name, texts in train.items()}
    held_out = {**held_out}
    for name, side in (("", train), ("validation ", held_out)):
        for domain, texts in side.items():
            side[domain] = sorted(filter(str.strip, texts), key=lambda text: (place(text), text))
            if not side[domain]:
                raise BadInput(f"{name}domain {domain!r}: it has no text; set another path")
    validation = {domain: held_out[domain] for domain in train}
    unseen = {domain: texts for domain, texts in held_out.items() if domain not in train}
    identity = identity_of(train, validation, *([unseen] if unseen else []))
    return Corpus(tuple(train), train, validation, identity, unseen=unseen)


def split_few(domain: str, placed: list[tuple[float, str]], share: float) -> tuple[list[str], list[str]]:
    """Split a domain too small for the hash: the first group against the rest, or one text cut at a line."""
    first = [text for at, text in placed if at == placed[0][0]]
    rest = [text for at, text in placed if at != placed[0][0]]
    if rest:
        return first, rest
    text = first[0]
    cut = text.rfind("\n", 0, max(int(len(text) * (1 - share)), 1)) + 1 or int(len(text) * (1 - share))
    if cut < 1 or cut >= len(text):
        raise BadInput(f"domain {domain!r}: too little text to hold some out for validation; add more")
    return [text[cut:]], [text[:cut]]


def place(group: str) -> float:
    """Return the hash of a group in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "big") / 2**64


def shuffled(name: str) -> float:
    """Return a hash independent of the split's, so that a prefix of this order has both sides."""
    return place(f"order {name}")


def limited(documents: Iterable[Text], most: float) -> Iterator[Text]:
    """Yield documents or texts until that many bytes are reached."""
    for document in documents:
        if most <= 0:
            return
        yield document
        most -= len((document.text if isinstance(document, Document) else document).encode())


# --- the text of a training


def read_corpus(data: DataConfig) -> Corpus:
    """Return the embedded corpus, or that of the config's text."""
    if not data.text and not data.domains:
        each = max(data.max_bytes // len(EMBEDDED), 1) if data.max_bytes else BYTES_PER_DOMAIN
        return embedded_corpus(each, data.validation_share)
    opened = sources(data.text, [f"{name}={path}" for name, path in data.domains.items()], None)
    most = max(data.max_bytes // len(opened), 1) if data.max_bytes else math.inf
    if data.validation:
        held_out = sources((), [f"{name}={path}" for name, path in data.validation.items()], None)
        return corpus_of_sides(
            {source.domain: list(texts_of(source, most)) for source in opened},
            {source.domain: list(texts_of(source, math.inf)) for source in held_out},
        )
    return corpus_of({source.domain: texts_of(source, most) for source in opened}, data.validation_share)


def check_texts(data: DataConfig) -> None:
    """Reject missing files without reading any; standard input and hub datasets are not checked."""
    for path in [*data.text, *data.domains.values(), *data.validation.values()]:
        if path != STDIN and not is_hub_text(path):
            existing(path)


def text_warnings(config: LabConfig, corpus: Corpus, vocabulary: Vocabulary) -> list[str]:
    """Return warnings about unused vocabulary entries and domains of a single document."""
    entries, size = config.model.vocabulary, vocabulary.size
    remedy = "give more text" if config.data.vocabulary == "bpe" else 'set vocabulary = "bpe" in [data]'
    warnings = [
        f"domain {name} is one document: its end is the validation text, perhaps easier than another document"
        for name in corpus.cut
    ]
    if (entries - size) * FEW_UNUSED <= entries:
        return warnings
    few = f"the vocabulary has {size:,} entries, not the {entries:,} of [model] vocabulary; lower it, or "
    return [few + remedy, *warnings]


def texts_of(source: Source, most: float) -> Iterator[str]:
    """Yield a source's texts, of a conversation its turns, until that many bytes are reached."""
    turns = ([{"content": one}] if isinstance(one, str) else one for one in source.read())
    texts = ("\n".join(str(turn.get("content", "")) for turn in of if isinstance(turn, dict)) for of in turns)
    return limited(texts, most)


def training_vocabulary(config: LabConfig, corpus: Corpus, origin: str | None = None) -> Vocabulary:
    """Return the vocabulary of the checkpoint to start from, else one made from the training text."""
    if origin is not None:
        return load_vocabulary(Path(origin))
    texts = (text for domain in corpus.domains for text in corpus.train[domain])
    return make_vocabulary(config.data.vocabulary, config.model.vocabulary, texts)


def save_validation(folder: Path, corpus: Corpus) -> None:
    """Write some validation documents of each domain as JSON lines for `trace`."""
    folder.mkdir(exist_ok=True)
    for domain in corpus.domains:
        left, lines = VALIDATION_BYTES, []
        for text in corpus.validation[domain]:
            if left <= 0:
                break
            lines.append(json.dumps({"text": text[:left]}, ensure_ascii=False))
            left -= len(text)
        (folder / f"{domain}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# --- the domains of the embedded corpus


@cache
def modules() -> Sequence[tuple[str, Path]]:
    """Return name and path of every module of the standard library, ordered by hash."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in folder.rglob("*.py") if not NO_SOURCES & set(path.relative_to(folder).parts)]
    named = [(".".join(path.relative_to(folder).with_suffix("").parts), path) for path in paths]
    return sorted(named, key=lambda module: shuffled(module[0]))


def readable(path: Path) -> str:
    """Return a file's text, cut short; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")[:LONGEST]
    except (OSError, UnicodeDecodeError):
        return ""


def code() -> Iterator[Document]:
    for name, path in modules():
        if (text := readable(path)).strip():
            yield Document("code", name, text)


def prose() -> Iterator[Document]:
    """Yield the manual's topics, then docstrings by module; the split keeps those with the source."""
    from pydoc_data.topics import topics

    groups = topic_groups(topics)
    for name in sorted(topics, key=shuffled):
        yield Document("prose", groups[name], topics[name])
    for name, path in modules():
        if len(text := docstrings(path)) >= SHORTEST_DOCSTRINGS:
            yield Document("prose", name, text)


def topic_groups(topics: dict[str, str]) -> dict[str, str]:
    """Return the group of every topic: those connected by shared passages of two consecutive long lines.

    Some topics repeat sections of a longer one: split separately, training would see validation text. A
    group's place is that of its member farthest from validation.
    """
    from scipy.cluster.hierarchy import DisjointSet

    holders: dict[tuple[str, str], str] = {}
    groups = DisjointSet(topics)
    for name in sorted(topics):
        lines = [line for line in map(str.strip, topics[name].splitlines()) if len(line) >= LONG_LINE]
        for passage in itertools.pairwise(lines):
            groups.merge(holders.setdefault(passage, name), name)
    return {name: max((f"topic {member}" for member in groups.subset(name)), key=place) for name in topics}


def docstrings(path: Path) -> str:
    try:
        tree = ast.parse(readable(path))
    except (SyntaxError, ValueError):  # truncated, or of another Python version
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in texts if text)


def headers() -> Iterator[Document]:
    folder = Path(sysconfig.get_paths()["include"])
    for path in sorted(folder.rglob("*.h"), key=lambda path: shuffled(path.relative_to(folder).as_posix())):
        if (text := readable(path)).strip():
            yield Document("headers", f"header {path.relative_to(folder).as_posix()}", text)


def arithmetic() -> Iterator[Document]:
    """Yield sums, differences, products and quotients of small numbers, endlessly."""
    for number in itertools.count():
        draw = random.Random(f"arithmetic {number}")
        text = "\n".join(calculation(draw) for _ in range(LINES_PER_DOCUMENT)) + "\n"
        yield Document("arithmetic", f"arithmetic {number}", text)


def calculation(draw: random.Random) -> str:
    a, b = draw.randrange(1, 10 ** draw.randint(1, 3)), draw.randrange(1, 10 ** draw.randint(1, 2))
    sign = draw.choice("+-*/")
    a = a * b if sign == "/" else a  # quotients are integers
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    return f"{a} {sign} {b} = {result}"


TOWNS = ("Aldermoor", "Brackwell", "Carnmore", "Dunhallow", "Eastferry", "Fenwick", "Glenrook", "Harrowby")
GOODS = ("barley", "copper", "flax", "iron", "linen", "rope", "salt", "timber", "wool", "wax")
NAMES = ("Ada", "Bram", "Clara", "Dov", "Edda", "Finn", "Greta", "Hugo", "Ines", "Jonas")


def records() -> Iterator[Document]:
    """Yield invented shipments, each document in one of three notations, endlessly."""
    for number in itertools.count():
        draw = random.Random(f"records {number}")
        write = draw.choice((as_json, as_table, as_settings))
        rows = [shipment(draw) for _ in range(LINES_PER_DOCUMENT // 2)]
        yield Document("records", f"records {number}", write(rows))


def shipment(draw: random.Random) -> dict[str, str | int]:
    day = f"{draw.randint(1990, 2025)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"
    return {
        "id": draw.randint(1000, 9999),
        "date": day,
        "town": draw.choice(TOWNS),
        "clerk": draw.choice(NAMES),
        "goods": draw.choice(GOODS),
        "crates": draw.randint(1, 40),
    }


def as_json(rows: list[dict[str, str | int]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_table(rows: list[dict[str, str | int]]) -> str:
    return "".join(",".join(map(str, line)) + "\n" for line in (rows[0], *(row.values() for row in rows)))


def as_settings(rows: list[dict[str, str | int]]) -> str:
    return "\n".join(
        f"[shipment {row['id']}]\n"
        + "".join(f"{key} = {value}\n" for key, value in row.items() if key != "id")
        for row in rows
    )


EMBEDDED: dict[str, Callable[[], Iterator[Document]]] = {
    "code": code,
    "prose": prose,
    "headers": headers,
    "arithmetic": arithmetic,
    "records": records,
}
MAY_BE_ABSENT = ("headers",)  # without Python's development files
