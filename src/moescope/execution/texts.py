"""Texts as users name them: files, folders, JSON lines, hub datasets, standard input, token ids.

Every source is read one document at a time; hub datasets are streamed and never downloaded completely.
"""

from __future__ import annotations

import atexit
import codecs
import gzip
import hashlib
import io
import json
import os
import re
import stat
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from moescope.checkpoint.location import hub_commit
from moescope.errors import BadInput, one_line, reject_if

STDIN = "-"
CHUNK = 2**20  # bytes, characters or token ids per document at most: longer ones are split
LONGEST_LINE = 2**25  # bytes of a JSON line
LONGEST_NAME = 100  # characters of a domain's name
OPEN_FILES = 32  # read in turn
MOST_UNPACKED, UNPACKED_BYTES = 200, 2**26  # of a packed file: times its size, and what is read anyway
MOST_LISTED = 10  # files of a text in run.json
LINES = (".jsonl", ".ndjson")
TEXT_FIELDS = ("text", "content", "messages")
Content = str | list[Any]  # a text, messages of a chat, or token ids

HUB_PREFIX = "hf://datasets/"
HUB_SPELLING = f"{HUB_PREFIX}OWNER/NAME[@REVISION][/CONFIG][:SPLIT][#COLUMN]"
HUB_ADDRESS = re.compile(
    re.escape(HUB_PREFIX) + r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<config>[^:#/]+))?(?::(?P<split>[\w.-]+))?(?:#(?P<column>.+))?"
)


class Part(NamedTuple):
    """One file or dataset."""

    name: str  # without the folders above the one that the user gave, so equal wherever that is
    read: Callable[[], Iterator[Content]]


@dataclass(frozen=True)
class Source:
    """The texts of one domain. Reading starts from the beginning each time."""

    domain: str
    parts: list[Part]
    identity: list[Any]  # what must be equal for a run to be resumed

    def read(self) -> Iterator[Content]:
        """Yield all documents, file by file."""
        for part in self.parts:
            yield from part.read()

    def read_in_turn(self) -> Iterator[Content]:
        """Yield one document of each file in turn, from a fixed random order of the files.

        So the first documents represent all files. At most 32 are open at once.
        """
        waiting = deque(sorted(self.parts, key=lambda part: hashlib.blake2b(os.fsencode(part.name)).digest()))
        opened: deque[Iterator[Content]] = deque()
        while waiting or opened:
            from_waiting = waiting and len(opened) < OPEN_FILES
            reader = waiting.popleft().read() if from_waiting else opened.popleft()
            for content in reader:
                yield content
                opened.append(reader)
                break


@dataclass(frozen=True)
class ReadSettings:
    """How a model reads a text."""

    max_tokens: int | None = None
    dtype: str = "auto"
    batch_size: int = 8
    chat_template: bool = False
    trust_remote_code: bool = False


def sources(text: Iterable[str | Path], domain: Iterable[str], token_ids: str | Path | None) -> list[Source]:
    """Return the domains to read; exactly one of the three options must be used."""
    texts, domains = list(text), list(domain)
    options = {"--text": texts, "--domain": domains, "--token-ids": token_ids}
    used = [name for name, value in options.items() if value]
    reject_if(
        len(used) != 1,
        f"{' and '.join(used) or 'no text'} given; give one of --text PATH, --domain NAME=PATH or "
        "--token-ids FILE",
    )
    if token_ids:
        file = existing(str(token_ids))
        reject_if(file.is_dir(), f"{file}: a folder; give one file of token ids, .npy or .jsonl")
        part = Part(file.name, partial(read_ids, file))
        return [Source("text", [part], [file_identity(file)])]
    if texts:
        return [text_source("text", [str(path) for path in texts])]
    by_name: dict[str, list[str]] = {}
    for item in domains:
        name, equals, path = str(item).partition("=")
        name = name.strip()
        reject_if(
            not equals or not name or not path, f"domain {item!r}: write it as NAME=PATH, such as code=src"
        )
        reject_if(
            len(name) > LONGEST_NAME or not name.isprintable(),
            f"domain {name[:LONGEST_NAME]!r}: its name has {len(name)} characters; give at most "
            f"{LONGEST_NAME}, all printable",
        )
        by_name.setdefault(name, []).append(path)
    return [text_source(name, paths) for name, paths in by_name.items()]


def text_source(domain: str, paths: list[str]) -> Source:
    parts: list[Part] = []
    identity: list[Any] = []
    for path in dict.fromkeys(paths):
        if path == STDIN:
            copy, digest = copy_stdin()
            parts.append(Part(path, partial(read_file, Path(copy.name), "standard input")))
            identity.append(digest)
        elif is_hub_text(path):
            parts.append(find_hub_text(path))
            identity.append([parts[-1].name])
        else:
            root = existing(path)
            for file in text_files(root):
                parts.append(Part(f"{root.name}/{file.relative_to(root)}", partial(read_file, file)))
                identity.append(file_identity(file))
    return Source(domain, parts, shortened(identity))


def shortened(identity: list[Any]) -> list[Any]:
    """Return the identity; of more than MOST_LISTED files their number, a hash of all, and the first."""
    if len(identity) <= MOST_LISTED:
        return identity
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
    return [{"files": len(identity), "hash": digest, "first": identity[:MOST_LISTED]}]


def copy_stdin() -> tuple[Any, str]:
    """Copy standard input to a temporary file, since it may be read more than once; also return its hash."""
    copy = tempfile.NamedTemporaryFile(prefix="moescope-text-")  # noqa: SIM115 (closed at exit)
    atexit.register(copy.close)
    digest = hashlib.blake2b(digest_size=16)
    with one_line(f"standard input: cannot be copied to {copy.name}", "give a file", OSError):
        while piece := sys.stdin.buffer.read(CHUNK):
            copy.write(piece)
            digest.update(piece)
        copy.flush()
    return copy, digest.hexdigest()


def existing(path: str) -> Path:
    """Return the path if it is a folder or a regular file: reading a pipe or a device may never end."""
    kinds = f"give a text file, a folder, a .jsonl file, {HUB_SPELLING}, or - for standard input"
    with one_line(f"{path[:100]}: its name is not UTF-8", "rename it", UnicodeEncodeError):
        path.encode()  # run.json and the report are UTF-8
    # a name can be too long or hold a zero byte
    with one_line(f"{path[:100]}: cannot be read", kinds, (OSError, ValueError)):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            raise BadInput(f"{path or repr(path)}: no such file or folder; {kinds}") from None
    reject_if(not stat.S_ISREG(mode) and not stat.S_ISDIR(mode), f"{path}: a pipe or device; {kinds}")
    return Path(path)


def file_identity(file: Path) -> list[Any]:
    status = file.stat()
    return [os.fsencode(file.resolve()).decode(errors="backslashreplace"), status.st_size, status.st_mtime_ns]


def text_files(path: Path) -> list[Path]:
    """Return the file itself, or every text file below a folder by name; hidden ones are skipped."""
    if not path.is_dir():
        return [path]
    files = [
        file
        for file in sorted(file for file in path.rglob("*") if file.is_file())
        if not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
        and is_text(file)
    ]
    reject_if(not files, f"{path}: no text files in this folder; give another one")
    return files


def is_text(file: Path) -> bool:
    with readable(file), file.open("rb") as opened:
        return file.suffix == ".gz" or b"\0" not in opened.read(4096)


def readable(file: Path) -> AbstractContextManager[None]:
    return one_line(
        f"{file}: cannot be read", "check the file, or remove it", (OSError, EOFError, zlib.error)
    )


def read_file(file: Path, name: str = "") -> Iterator[Content]:
    """Yield the file's documents: each line of a .jsonl file, pieces of at most a megabyte of another one.

    A line is a string, or holds its text under "text" or "content", or a chat under "messages".
    """
    plain = file.with_suffix("") if file.suffix == ".gz" else file
    with readable(file), open_bytes(file) as opened:
        if plain.suffix in LINES:
            for where, line in lines(opened, file):
                yield from split_content(line_content(decoded(line, where), where), where)
        else:
            yield from read_pieces(opened, name or str(file))


def lines(opened: Any, file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (where, line) for every line that is not blank."""
    for number, line in enumerate(iter(partial(opened.readline, LONGEST_LINE + 1), b""), start=1):
        where = f"{file}, line {number}"
        if len(line) > LONGEST_LINE:
            raise BadInput(f"{where}: over {LONGEST_LINE // 2**20} MiB; split it into shorter documents")
        if line.strip():
            yield where, line


def read_pieces(opened: Any, where: str) -> Iterator[str]:
    """Yield the text in pieces of about a megabyte, cut at the end of a line or else between characters."""
    waiting, start = b"", 0
    while read := opened.read(CHUNK):
        waiting += read
        # of the bytes of a character that is not complete, none are consumed
        end = waiting.rfind(b"\n") + 1 or codecs.utf_8_decode(waiting, "ignore")[1]
        end = end if len(read) == CHUNK else len(waiting)
        yield decoded(waiting[:end], where, start)
        waiting, start = waiting[end:], start + end
    if waiting:
        yield decoded(waiting, where, start)


def split_content(content: Content, where: str) -> Iterator[Content]:
    """Yield a long text or list of ids in pieces, as a long file; chats cannot be cut."""
    if isinstance(content, str):
        start = 0
        while len(content) - start > CHUNK:
            end = content.rfind("\n", start, start + CHUNK) + 1 or start + CHUNK
            yield content[start:end]
            start = end
        yield content[start:]
    elif is_ids(content):
        for start in range(0, len(content), CHUNK):
            yield check_range(content[start : start + CHUNK], where)
    elif len(repr(content)) > 2 * CHUNK:
        raise BadInput(f"{where}: a chat of over a million characters; give shorter ones")
    else:
        yield content


def is_ids(content: Content) -> bool:
    return isinstance(content, list) and all(type(part) is int for part in content)


def open_bytes(file: Path) -> Any:
    return io.BufferedReader(TextOfGzip(file)) if file.suffix == ".gz" else file.open("rb")


class TextOfGzip(gzip.GzipFile):
    """A packed text. Texts shrink to a twentieth at best, zeros to a thousandth: those never end."""

    def read(self, size: int | None = -1) -> bytes:
        read = super().read(size)
        packed = os.fstat(self.fileno()).st_size
        if self.tell() > max(UNPACKED_BYTES, MOST_UNPACKED * packed):
            raise OSError(f"unpacked, it is over {MOST_UNPACKED} times as large; give a text")
        return read


def decoded(content: bytes, where: str, start: int = 0) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{where}: not UTF-8 text at byte {start + error.start}; convert it, or give another file"
        ) from None


def line_content(line: str, where: str) -> Content:
    remedy = 'each line must be an object like {"text": "..."}'
    with one_line(f"{where}: not valid JSON", remedy, (ValueError, RecursionError)):
        value = json.loads(line)
        if "\\ud" in line.lower():  # no tokenizer accepts half of a surrogate pair
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    if isinstance(value, str):
        value = {"text": value}
    fields = [value.get(key) for key in TEXT_FIELDS] if isinstance(value, dict) else []
    content = next((field for field in fields if isinstance(field, str | list)), None)
    if content is None:
        raise BadInput(f'{where}: no "text" in it; {remedy}')
    return content


def read_ids(file: Path) -> Iterator[Content]:
    """Yield token ids: a .npy array (one document, or one per row) or a .jsonl file (one list per line)."""
    if file.suffix == ".npy":
        array = open_array(file)
        for row in array[None] if array.ndim == 1 else array:
            for start in range(0, len(row), CHUNK):
                yield check_range(row[start : start + CHUNK].tolist(), str(file))
        return
    with readable(file), open_bytes(file) as opened:
        for where, line in lines(opened, file):
            value: Any = None
            with suppress(ValueError, RecursionError):
                value = json.loads(line)
            if isinstance(value, dict):
                value = value.get("input_ids", value.get("ids"))
            reject_if(
                not is_ids(value),
                f"{where}: not a list of token ids; write one list per line, such as [1, 2, 3]",
            )
            yield from split_content(value, where)


def open_array(file: Path) -> Any:
    """Map a .npy array of whole numbers; nothing is read yet, and nothing in it is executed."""
    import numpy as np

    remedy = "give whole numbers, one document or one per row"
    with one_line(f"{file}: no .npy array of numbers", f"{remedy}, written with numpy.save"):
        array = np.lib.format.open_memmap(file, mode="r")
    reject_if(
        array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer),
        f"{file}: shape {list(array.shape)} of {array.dtype}; {remedy}",
    )
    return array


def check_range(ids: list[int], where: str) -> list[int]:
    """Reject ids that no vocabulary has; the model's own is checked where it is known."""
    worst = max(max(ids), -min(ids)) if ids else 0
    reject_if(
        worst >= 2**31,
        f"{where}: token id {worst}: beyond every vocabulary; give ids of the model's tokenizer",
    )
    return ids


def check_not_empty(reading: list[Source]) -> None:
    """Reject a domain without text before a model is loaded for it."""
    for source in reading:
        if not any(content.strip() if isinstance(content, str) else content for content in source.read()):
            where = f"domain {source.domain!r}" if len(reading) > 1 else "the text"
            raise BadInput(f"{where} holds no token; give a longer one")


# --- hub datasets


def is_hub_text(path: str) -> bool:
    return path.startswith("hf://")


def read_rows(address: str, rows: Iterable[dict[str, Any]], column: str) -> Iterator[Content]:
    """Yield every row's text or messages; empty rows are skipped."""
    with readable_dataset(address):
        for content in (row[column] for row in rows):
            if isinstance(content, str | list) and content:
                yield from split_content(content, address)


def find_hub_text(address: str) -> Part:
    """Resolve an address; an error names what is missing: dataset, revision, config, split or column.

    The part's name is the complete address, which names the same rows at any time.
    """
    match = HUB_ADDRESS.fullmatch(address.rstrip("/"))
    if match is None:
        raise BadInput(f"{address}: not a dataset of the hub; write {HUB_SPELLING}")
    extra = "install moescope with its extra: pip install 'moescope[hf]'"
    reject_if(find_spec("datasets") is None, f"{address}: the package datasets is not installed; {extra}")
    import datasets

    repository = f"{match['owner']}/{match['name']}"
    commit, problem = hub_commit(repository, match["revision"], "dataset")
    reject_if(commit is None, f"{address}: {problem}")
    with readable_dataset(address):
        names = datasets.get_dataset_config_names(repository, revision=commit)
        default = datasets.get_dataset_default_config_name(repository, revision=commit)
        config = choose(address, "config", "/CONFIG", names, match["config"], default)
        splits = datasets.load_dataset(repository, config, revision=commit, streaming=True)
        only = next(iter(splits)) if len(splits) == 1 else None
        default = "train" if "train" in splits else only
        split = choose(address, "split", ":SPLIT", splits, match["split"], default)
        row: dict[str, Any] = next(iter(splits[split].take(1)), {})
    reject_if(not row, f"{address}: split {split} has no row; name another one with :SPLIT")
    column = choose_column(address, row, match["column"])
    complete = f"{HUB_PREFIX}{repository}@{commit}/{config}:{split}#{column}"
    return Part(complete, partial(read_rows, address, splits[split], column))


def choose(
    address: str, kind: str, spelling: str, known: Iterable[str], wanted: str | None, default: str | None
) -> str:
    """Return the requested config, split or column, or the default one."""
    name, known = wanted or default or "", [str(each) for each in known]
    listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    reject_if(not name, f"{address}: name its {kind} as {spelling}: {listed}")
    reject_if(name not in known, f"{address}: no {kind} {name!r} in it; known: {listed}")
    return name


def choose_column(address: str, row: dict[str, Any], wanted: str | None) -> str:
    """Return the requested column; by default text, content or messages. It must hold text or a chat."""
    # text, messages, token ids, or empty as the first row may be
    readable = [name for name, value in row.items() if value is None or isinstance(value, str | list)]
    default = next((name for name in TEXT_FIELDS if name in readable), None)
    column = choose(address, "column", "#COLUMN", row, wanted, default)
    kind = type(row[column]).__name__
    reject_if(
        column not in readable, f"{address}: column {column!r} holds no text ({kind}); name another one"
    )
    return column


@contextmanager
def readable_dataset(address: str) -> Iterator[None]:
    """Turn whatever the library raises (its own, HTTP and file format errors) into one line.

    Its progress bars are disabled meanwhile; moescope has its own.
    """
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    restore = (lambda: None) if are_progress_bars_disabled() else enable_progress_bars
    disable_progress_bars()
    try:
        with one_line(f"{address}: cannot be read", "check the dataset, or give a file"):
            yield
    finally:
        restore()
