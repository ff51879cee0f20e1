"""Texts as users name them.

Files, folders, JSON lines, datasets of the hub, standard input, lists of token ids; read one document at a
time.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moescope.errors import BadInput
from moescope.execution.hub_texts import SPELLING, find_hub_text, is_hub_text

STDIN = "-"
PIECE = (
    2**20
)  # bytes or token ids of a document at most: a longer one is read as several, so that memory stays flat
LINES = (".jsonl", ".ndjson")
Content = str | list[Any]  # a text, messages of a chat, or token ids


@dataclass(frozen=True)
class Source:
    """One domain's texts. `read` starts from the beginning each time it is called."""

    domain: str
    read: Callable[[], Iterator[Content]]
    identity: list[Any]  # what must be equal for a run to be taken up again


def sources(text: Iterable[str | Path], domain: Iterable[str], token_ids: str | Path | None) -> list[Source]:
    """The domains to read, from the three ways of naming them, of which just one is to be used."""
    texts, domains = list(text), list(domain)
    ways = [
        name
        for name, given in (("--text", texts), ("--domain", domains), ("--token-ids", token_ids))
        if given
    ]
    if len(ways) != 1:
        said = " and ".join(ways) if ways else "no text"
        raise BadInput(
            f"{said} given; give one of --text PATH, --domain NAME=PATH, --token-ids FILE or --recorded FILE"
        )
    if token_ids:
        file = existing(str(token_ids))
        return [Source("text", lambda: read_ids(file), [fact(file)])]
    if texts:
        return [text_source("text", [str(path) for path in texts])]
    by_name: dict[str, list[str]] = {}
    for item in domains:
        name, equals, path = str(item).partition("=")
        if not equals or not name.strip() or not path:
            raise BadInput(f"domain {item!r}: write it as NAME=PATH, such as code=src")
        by_name.setdefault(name.strip(), []).append(path)
    return [text_source(name, paths) for name, paths in by_name.items()]


def text_source(domain: str, paths: list[str]) -> Source:
    if STDIN in paths:
        content = sys.stdin.buffer.read()  # kept, since several models may read it
        stdin = decoded(content, "standard input")
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    here = [path for path in paths if path != STDIN and not is_hub_text(path)]
    files = [file for path in here for file in files_of(existing(path))]
    hub = [find_hub_text(path) for path in paths if is_hub_text(path)]

    def read() -> Iterator[Content]:
        if STDIN in paths:
            yield stdin
        for file in files:
            yield from read_file(file)
        for dataset in hub:
            yield from dataset.read()

    identity: list[Any] = [fact(file) for file in files]
    identity += [[dataset.address] for dataset in hub]
    return Source(domain, read, identity + ([digest] if STDIN in paths else []))


def existing(path: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise BadInput(
            f"{path}: no such file or folder; give a text file, a folder, a .jsonl file, "
            f"{SPELLING}, or - for standard input"
        )
    return found


def fact(file: Path) -> list[Any]:
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def files_of(path: Path) -> list[Path]:
    """The file itself, or every file below a folder in order of name.

    Those that are hidden or hold no text left out.
    """
    if not path.is_dir():
        return [path]
    inside = sorted(file for file in path.rglob("*") if file.is_file())
    found = [
        file
        for file in inside
        if not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
        and is_text(file)
    ]
    if not found:
        raise BadInput(f"{path}: no text files in this folder; give another one")
    return found


def is_text(file: Path) -> bool:
    if file.suffix == ".gz":
        return True
    with file.open("rb") as opened:
        return b"\0" not in opened.read(4096)


def read_file(file: Path) -> Iterator[Content]:
    """A plain file is one document, or several of a megabyte cut at line ends; each line of a .jsonl file is
    one.

    A line holds its text under "text", or a chat under "messages".
    """
    plain = file.with_suffix("") if file.suffix == ".gz" else file
    try:
        if plain.suffix in LINES:
            with opened(file) as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield line_content(decoded(line, f"{file}, line {number}"), file, number)
        else:
            with opened(file) as whole:
                yield from (decoded(piece, str(file)) for piece in pieces(whole))
    except (OSError, EOFError) as error:
        raise BadInput(f"{file}: cannot be read ({error}); check the file") from None


def pieces(file: Any) -> Iterator[bytes]:
    """The file whole.

    Or if it is longer than a megabyte in pieces that end at a line's end (or where they must).
    """
    held = b""
    while True:
        read = file.read(PIECE)
        held += read
        if len(read) < PIECE:
            if held:
                yield held
            return
        end = held.rfind(b"\n") + 1
        if end:
            yield held[:end]
            held = held[end:]


def opened(file: Path) -> Any:
    return io.BufferedReader(gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{where}: not UTF-8 text at byte {error.start}; convert it, or give another file"
        ) from None


def line_content(line: str, file: Path, number: int) -> Content:
    try:
        value = json.loads(line)
        if (
            "\\ud" in line.lower()
        ):  # half of a pair, as a text cut in the middle has it, is no letter: no tokenizer takes it
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except ValueError:
        raise BadInput(
            f"{file}, line {number}: not valid JSON; each line must be an object with a text"
        ) from None
    found = value if isinstance(value, str) else None
    if isinstance(value, dict):
        found = next(
            (value[key] for key in ("text", "content", "messages") if isinstance(value.get(key), str | list)),
            None,
        )
    if found is None:
        raise BadInput(
            f'{file}, line {number}: no "text" in it; each line must be an object like {{"text": "..."}}'
        )
    return found


def read_ids(file: Path) -> Iterator[Content]:
    """Token ids: a .npy array (one document, or one a row), or a .jsonl file with one list a line."""
    if file.suffix == ".npy":
        import numpy as np

        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            raise BadInput(f"{file}: not a .npy array; write one with numpy.save") from None
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
            raise BadInput(
                f"{file}: shape {list(array.shape)} of {array.dtype}; give whole numbers, one "
                "document or one a row"
            )
        for row in array[None] if array.ndim == 1 else array:
            yield from (row[start : start + PIECE].tolist() for start in range(0, len(row), PIECE))
        return
    with opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                value = value.get("input_ids") or value.get("ids")
            whole = isinstance(value, list) and all(
                isinstance(part, int) and not isinstance(part, bool) for part in value
            )
            if not whole or not isinstance(value, list):
                raise BadInput(
                    f"{file}, line {number}: not a list of token ids; write one list a line, "
                    "such as [1, 2, 3]"
                )
            yield value
