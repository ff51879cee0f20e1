"""Texts to train on, by domain, parted into training and validation by document.

The embedded corpus is the Python installation itself, so nothing is downloaded: sources of the standard
library, its manual and docstrings,
C headers where they are installed, and two domains that are generated. Its identity is a hash, since another
Python has other sources.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from moescope.errors import BadInput

BYTES_A_DOMAIN = 1_000_000
VALIDATION_SHARE = 0.1
NO_SOURCES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "pydoc_data",
    "ensurepip",
    "__pycache__",
}
LONGEST = 2**16  # characters of an embedded document: beyond, one file would be most of a domain
SHORTEST_DOCSTRINGS = 200  # characters of prose below which a module has too little to be a document
LINES_A_DOCUMENT = 40  # of what is generated
LONG_LINE = 40  # characters from which a line says enough to be told from another


@dataclass(frozen=True)
class Document:
    """One text.

    Documents of one group (a module's source and its docstrings, topics that repeat each other) are never
    parted by the split.
    """

    domain: str
    group: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training and validation texts of every domain, in an order that depends on their content alone."""

    domains: tuple[str, ...]
    train: dict[str, list[str]]
    validation: dict[str, list[str]]
    identity: str  # hash of all texts, their domains and sides
    cut: tuple[str, ...] = ()  # domains of one document, whose end is their validation text

    def sizes(self) -> dict[str, dict[str, int]]:
        """Documents and bytes of every domain, for run.json."""
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
    bytes_a_domain: int = BYTES_A_DOMAIN, validation_share: float = VALIDATION_SHARE
) -> Corpus:
    """The corpus of this Python installation: code, prose, C headers if present, arithmetic, records."""
    found: list[Document] = []
    for domain, read in EMBEDDED.items():
        taken = list(limited(read(), bytes_a_domain))
        if not taken and domain not in MAY_BE_ABSENT:
            raise BadInput(
                f"embedded corpus: this Python has no text for the domain {domain}; give text "
                "files as domains"
            )
        found += taken
    return split(found, validation_share)


def corpus_of(
    domains: dict[str, Callable[[], Iterable[str]]], validation_share: float = VALIDATION_SHARE
) -> Corpus:
    """A corpus of the user's texts.

    Equal texts stay on one side of the split; a domain of one text is cut near its end.
    """
    found: list[Document] = []
    for domain, read in domains.items():
        texts = [text for text in read() if text.strip()]
        if not texts:
            raise BadInput(f"domain {domain!r}: no text in it; give another path")
        found += [Document(domain, text, text) for text in texts]
    return split(found, validation_share)


def split(documents: list[Document], validation_share: float) -> Corpus:
    """Part documents by a hash of their group.

    So that neither order nor a document added elsewhere moves another.
    """
    if not 0 < validation_share < 1:
        raise BadInput(f"validation_share {validation_share}: must lie between 0 and 1, such as 0.1")
    domains = tuple(dict.fromkeys(document.domain for document in documents))
    train: dict[str, list[str]] = {}
    validation: dict[str, list[str]] = {}
    cut: list[str] = []
    for domain in domains:
        own = sorted((place(d.group), d.text) for d in documents if d.domain == domain)
        held = [text for at, text in own if at < validation_share]
        kept = [text for at, text in own if at >= validation_share]
        if not held or not kept:
            held, kept = few_documents(domain, own, validation_share)
        if len({at for at, _ in own}) == 1:
            cut.append(domain)
        train[domain], validation[domain] = kept, held
    digest = hashlib.blake2b(digest_size=16)
    for side in (train, validation):
        for domain in domains:
            for text in side[domain]:
                digest.update(f"{domain}\0{len(text)}\0{text}\0".encode())
        digest.update(b"\1")
    return Corpus(domains, train, validation, digest.hexdigest(), tuple(cut))


def few_documents(domain: str, own: list[tuple[float, str]], share: float) -> tuple[list[str], list[str]]:
    """Validation and training of a domain too small for the hash.

    The first group against the rest, or one text cut at a line's end.
    """
    first = [text for at, text in own if at == own[0][0]]
    rest = [text for at, text in own if at != own[0][0]]
    if rest:
        return first, rest
    text = first[0]
    cut = text.rfind("\n", 0, max(int(len(text) * (1 - share)), 1)) + 1 or int(len(text) * (1 - share))
    if cut < 1 or cut >= len(text):
        raise BadInput(f"domain {domain!r}: too little text to hold some back for validation; give more")
    return [text[cut:]], [text[:cut]]


def place(group: str) -> float:
    """Where in [0, 1) a group falls."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "big") / 2**64


def shuffled(name: str) -> float:
    """An order by hash that has nothing to do with the split's.

    Taking the first of it must not take one side.
    """
    return place(f"order {name}")


def limited(documents: Iterable[Document], most: int) -> Iterator[Document]:
    """Documents until that many bytes are reached."""
    left = most
    for document in documents:
        if left <= 0:
            return
        yield document
        left -= len(document.text.encode())


# --- the domains of the embedded corpus


def modules() -> list[tuple[str, Path]]:
    """Every module of the standard library by name, in the order of a hash.

    A part of them is a sample, not the letter A.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [(path.relative_to(folder), path) for path in folder.rglob("*.py")]
    named = [
        (".".join(place.with_suffix("").parts), path)
        for place, path in found
        if not NO_SOURCES & set(place.parts)
    ]
    return sorted(named, key=lambda module: shuffled(module[0]))


def readable(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")[:LONGEST]
    except (OSError, UnicodeDecodeError):
        return None


def code() -> Iterator[Document]:
    for name, path in modules():
        if (text := readable(path)) is not None and text.strip():
            yield Document("code", name, text)


def prose() -> Iterator[Document]:
    """The manual's topics, then docstrings, module by module.

    A module's docstrings stay with its source in the split.
    """
    from pydoc_data.topics import topics

    groups = topic_groups(topics)
    for name in sorted(topics, key=shuffled):
        yield Document("prose", groups[name], topics[name])
    for name, path in modules():
        text = docstrings(path)
        if len(text) >= SHORTEST_DOCSTRINGS:
            yield Document("prose", name, text)


def topic_groups(topics: dict[str, str]) -> dict[str, str]:
    """The group of every topic; topics that have a passage in common, over however many others, are one
    group.

    Some topics are the sections of a longer one word for word: split by themselves, validation would be read
    in training. A passage is
    two long lines that follow one another. A group goes by the member that the split puts farthest from
    validation, so it is held
    back only where each of its topics would have been.
    """
    holders: dict[tuple[str, str], str] = {}
    joined = {name: {name} for name in topics}  # each name's whole group, the same set for all of its members
    for name in sorted(topics):
        lines = [line for line in map(str.strip, topics[name].splitlines()) if len(line) >= LONG_LINE]
        for passage in pairwise(lines):
            other = holders.setdefault(passage, name)
            if joined[other] is not joined[name]:
                joined[other] |= joined[name]
                for member in joined[name]:
                    joined[member] = joined[other]
    return {name: max((f"topic {member}" for member in joined[name]), key=place) for name in topics}


def docstrings(path: Path) -> str:
    source = readable(path)
    try:
        tree = ast.parse(source or "")
    except (SyntaxError, ValueError):  # cut in the middle, or for another Python
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)


def headers() -> Iterator[Document]:
    folder = Path(sysconfig.get_paths()["include"])
    for path in sorted(folder.rglob("*.h"), key=lambda path: shuffled(path.relative_to(folder).as_posix())):
        if (text := readable(path)) is not None and text.strip():
            yield Document("headers", f"header {path.relative_to(folder).as_posix()}", text)


def arithmetic() -> Iterator[Document]:
    """Sums, differences, products and quotients of small numbers, without end."""
    number = 0
    while True:
        draw = random.Random(f"arithmetic {number}")
        yield Document(
            "arithmetic",
            f"arithmetic {number}",
            "\n".join(calculation(draw) for _ in range(LINES_A_DOCUMENT)) + "\n",
        )
        number += 1


def calculation(draw: random.Random) -> str:
    a, b = draw.randrange(1, 10 ** draw.randint(1, 3)), draw.randrange(1, 10 ** draw.randint(1, 2))
    sign = draw.choice("+-*/")
    if sign == "/":
        a = a * b  # quotients come out even
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    return f"{a} {sign} {b} = {result}"


TOWNS = ("Aldermoor", "Brackwell", "Carnmore", "Dunhallow", "Eastferry", "Fenwick", "Glenrook", "Harrowby")
GOODS = ("barley", "copper", "flax", "iron", "linen", "rope", "salt", "timber", "wool", "wax")
NAMES = ("Ada", "Bram", "Clara", "Dov", "Edda", "Finn", "Greta", "Hugo", "Ines", "Jonas")


def records() -> Iterator[Document]:
    """Made-up shipments, each document in one of three notations, without end."""
    number = 0
    while True:
        draw = random.Random(f"records {number}")
        write = draw.choice((as_json, as_table, as_settings))
        rows = [shipment(draw) for _ in range(LINES_A_DOCUMENT // 2)]
        yield Document("records", f"records {number}", write(rows))
        number += 1


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
    import json

    return "".join(json.dumps(row) + "\n" for row in rows)


def as_table(rows: list[dict[str, str | int]]) -> str:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    return "\n".join(lines) + "\n"


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
MAY_BE_ABSENT = ("headers",)  # a Python without its development files has none
