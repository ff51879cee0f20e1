"""Texts as users name them: files, folders, JSON lines, hub datasets, standard input, token ids.

Every source is read one document at a time; hub datasets are streamed and never downloaded completely.
"""

from __future__ import annotations

import atexit
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import stat
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from moescope.checkpoint.files import first_line
from moescope.errors import BadInput

STDIN = "-"
CHUNK = 2**20  # bytes, characters or token ids per document at most: longer ones are split
LONGEST_LINE = 2**25  # bytes of a JSON line
LONGEST_NAME = 100  # characters of a domain's name
OPEN_FILES = 32  # read in turn
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
            if waiting and len(opened) < OPEN_FILES:
                reader = waiting.popleft().read()
            else:
                reader = opened.popleft()
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
    if len(used) != 1:
        raise BadInput(
            f"{' and '.join(used) or 'no text'} given; give one of --text PATH, --domain NAME=PATH or "
            "--token-ids FILE"
        )
    if token_ids:
        file = existing(str(token_ids))
        if file.is_dir():
            raise BadInput(f"{file}: a folder; give one file of token ids, .npy or .jsonl")
        part = Part(file.name, partial(read_ids, file))
        return [Source("text", [part], [file_identity(file)])]
    if texts:
        return [text_source("text", [str(path) for path in texts])]
    by_name: dict[str, list[str]] = {}
    for item in domains:
        name, equals, path = str(item).partition("=")
        name = name.strip()
        if not equals or not name or not path:
            raise BadInput(f"domain {item!r}: write it as NAME=PATH, such as code=src")
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise BadInput(
                f"domain {name[:LONGEST_NAME]!r}: its name has {len(name)} characters; give at most "
                f"{LONGEST_NAME}, all printable"
            )
        by_name.setdefault(name, []).append(path)
    return [text_source(name, paths) for name, paths in by_name.items()]


def text_source(domain: str, paths: list[str]) -> Source:
    parts: list[Part] = []
    identity: list[Any] = []
    for path in dict.fromkeys(paths):
        if path == STDIN:
            copy, digest = copy_stdin()
            parts.append(Part(path, partial(read_copy, copy)))
            identity.append(digest)
        elif is_hub_text(path):
            dataset = find_hub_text(path)
            parts.append(Part(dataset.address, dataset.read))
            identity.append([dataset.address])
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
    try:
        while piece := sys.stdin.buffer.read(CHUNK):
            copy.write(piece)
            digest.update(piece)
        copy.flush()
    except OSError as error:
        raise BadInput(f"standard input: cannot be copied to {copy.name} ({error}); give a file") from None
    return copy, digest.hexdigest()


def read_copy(copy: Any) -> Iterator[Content]:
    with open(copy.name, "rb") as opened:
        yield from read_pieces(opened, "standard input")


def existing(path: str) -> Path:
    """Return the path if it is a folder or a regular file: reading a pipe or a device may never end."""
    try:
        path.encode()  # run.json and the report are UTF-8
        mode = os.stat(path).st_mode
    except UnicodeEncodeError:
        raise BadInput(f"{path[:100]}: its name is not UTF-8; rename it") from None
    except FileNotFoundError:
        raise BadInput(
            f"{path or repr(path)}: no such file or folder; give a text file, a folder, a .jsonl file, "
            f"{HUB_SPELLING}, or - for standard input"
        ) from None
    except (OSError, ValueError) as error:  # a name that is too long or holds a zero byte
        raise BadInput(f"{path[:100]}: cannot be read ({reason(error)}); give another path") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise BadInput(f"{path}: a pipe or device; give a file or folder, or - for standard input")
    return Path(path)


def reason(error: Exception) -> str:
    """Return the error without its path."""
    return (isinstance(error, OSError) and error.strerror) or first_line(error)[:100]


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
    if not files:
        raise BadInput(f"{path}: no text files in this folder; give another one")
    return files


def is_text(file: Path) -> bool:
    if file.suffix == ".gz":
        return True
    with readable(file), file.open("rb") as opened:
        return b"\0" not in opened.read(4096)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{file}: cannot be read ({reason(error)}); check the file, or remove it") from None


def read_file(file: Path) -> Iterator[Content]:
    """Yield the file's documents: each line of a .jsonl file, pieces of at most a megabyte of another one.

    A line is a string, or holds its text under "text" or "content", or a chat under "messages".
    """
    plain = file.with_suffix("") if file.suffix == ".gz" else file
    with readable(file), open_bytes(file) as opened:
        if plain.suffix in LINES:
            for where, line in lines(opened, file):
                yield from split_content(line_content(decoded(line, where), where), where)
        else:
            yield from read_pieces(opened, str(file))


def lines(opened: Any, file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (where, line) for every line that is not blank."""
    for number in itertools.count(1):
        line = opened.readline(LONGEST_LINE + 1)
        where = f"{file}, line {number}"
        if len(line) > LONGEST_LINE:
            raise BadInput(f"{where}: over {LONGEST_LINE // 2**20} MiB; split it into shorter documents")
        if not line:
            return
        if line.strip():
            yield where, line


def read_pieces(opened: Any, where: str) -> Iterator[str]:
    """Yield the text in pieces of about a megabyte, cut at the end of a line or else between characters."""
    waiting, start = b"", 0
    while True:
        read = opened.read(CHUNK)
        waiting += read
        if not waiting:
            return
        end = waiting.rfind(b"\n") + 1 or characters_end(waiting) if len(read) == CHUNK else len(waiting)
        yield decoded(waiting[:end], where, start)
        waiting, start = waiting[end:], start + end


def characters_end(content: bytes) -> int:
    """Return where the last complete UTF-8 character of the bytes ends."""
    for back, byte in enumerate(reversed(content[-4:]), start=1):
        if byte & 0xC0 != 0x80:  # the first byte of a character tells its length
            length = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return len(content) - back if back < length else len(content)
    return len(content)


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
    return io.BufferedReader(gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def decoded(content: bytes, where: str, start: int = 0) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{where}: not UTF-8 text at byte {start + error.start}; convert it, or give another file"
        ) from None


def line_content(line: str, where: str) -> Content:
    try:
        value = json.loads(line)
        if "\\ud" in line.lower():  # no tokenizer accepts half of a surrogate pair
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: not valid JSON; each line must be an object with a text") from None
    if isinstance(value, str):
        return value
    for key in TEXT_FIELDS if isinstance(value, dict) else ():
        if isinstance(value.get(key), str | list):
            content: Content = value[key]
            return content
    raise BadInput(f'{where}: no "text" in it; each line must be an object like {{"text": "..."}}')


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
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                value = value.get("input_ids", value.get("ids"))
            if not is_ids(value):
                raise BadInput(
                    f"{where}: not a list of token ids; write one list per line, such as [1, 2, 3]"
                )
            yield from split_content(value, where)


def open_array(file: Path) -> Any:
    """Map a .npy array of whole numbers; nothing is read yet, and nothing in it is executed."""
    import numpy as np

    remedy = "give whole numbers, one document or one per row"
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # a damaged header can raise anything
        if "objects" in str(error):
            raise BadInput(f"{file}: an array of Python objects; {remedy}, or lists in .jsonl") from None
        raise BadInput(f"{file}: not a .npy array ({reason(error)}); write one with numpy.save") from None
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
        raise BadInput(f"{file}: shape {list(array.shape)} of {array.dtype}; {remedy}")
    return array


def check_range(ids: list[int], where: str) -> list[int]:
    """Reject ids that no vocabulary has; the model's own is checked where it is known."""
    if ids and (worst := max(max(ids), -min(ids))) >= 2**31:
        raise BadInput(
            f"{where}: token id {worst}: beyond every vocabulary; give ids of the model's tokenizer"
        )
    return ids


def check_not_empty(reading: list[Source]) -> None:
    """Reject a domain without text before a model is loaded for it."""
    for source in reading:
        if not any(content.strip() if isinstance(content, str) else content for content in source.read()):
            where = f"domain {source.domain!r}" if len(reading) > 1 else "the text"
            raise BadInput(f"{where} holds no token; give a longer one")


# --- hub datasets


@dataclass(frozen=True)
class HubText:
    """One column of one split of a dataset, at one commit."""

    name: str  # as the user wrote it
    repository: str
    commit: str
    config: str
    split: str
    column: str

    @property
    def address(self) -> str:
        """The complete address, which names the same rows at any time."""
        return f"{HUB_PREFIX}{self.repository}@{self.commit}/{self.config}:{self.split}#{self.column}"

    def read(self) -> Iterator[Content]:
        """Yield every row's text or messages; empty rows are skipped."""
        with one_line_errors(self.name):
            for row in stream(self.repository, self.config, self.commit)[self.split]:
                content = row[self.column]
                if isinstance(content, str | list) and content:
                    yield from split_content(content, self.name)


def is_hub_text(path: str) -> bool:
    return path.startswith("hf://")


def find_hub_text(address: str) -> HubText:
    """Resolve an address; an error names what is missing: dataset, revision, config, split or column."""
    match = HUB_ADDRESS.fullmatch(address.rstrip("/"))
    if match is None:
        raise BadInput(f"{address}: not a dataset of the hub; write {HUB_SPELLING}")
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise BadInput(
            f"{address}: the package datasets is not installed; install moescope with its extra: "
            "pip install 'moescope[hf]'"
        ) from None
    repository = f"{match['owner']}/{match['name']}"
    commit = dataset_commit(address, repository, match["revision"])
    with one_line_errors(address):
        config = choose_config(address, repository, commit, match["config"])
        splits = stream(repository, config, commit)
        split = choose_split(address, list(splits), match["split"])
        first = next(iter(splits[split].take(1)), None)
    if first is None:
        raise BadInput(f"{address}: split {split} has no row; name another one with :SPLIT")
    return HubText(address, repository, commit, config, split, choose_column(address, first, match["column"]))


def dataset_commit(address: str, repository: str, revision: str | None) -> str:
    """Return the commit that the revision names now; the run stores it."""
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    try:
        return str(HfApi().dataset_info(repository, revision=revision).sha)
    except hub.RevisionNotFoundError:
        raise BadInput(f"{address}: the hub has no revision {revision} of it; check its name") from None
    except hub.GatedRepoError:
        raise BadInput(f"{address}: request access on the hub first; then `hf auth login`") from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        raise BadInput(
            f"{address}: the hub has no such dataset, or it is private; check the name, or `hf auth login`"
        ) from None
    except Exception as error:  # no network, a proxy, a time-out: each HTTP library has its own
        raise BadInput(
            f"{address}: the hub cannot be reached ({first_line(error)[:120]}); download the text "
            "elsewhere and give its file"
        ) from None


def choose_config(address: str, repository: str, commit: str, wanted: str | None) -> str:
    import datasets

    with without_bars():
        known = datasets.get_dataset_config_names(repository, revision=commit)
        default = datasets.get_dataset_default_config_name(repository, revision=commit)
    config = wanted or default
    if config is None:
        raise BadInput(f"{address}: has several configs; name one as /CONFIG: {listed(known)}")
    if config not in known:
        raise BadInput(f"{address}: no config {config!r} in it; known: {listed(known)}")
    return str(config)


def choose_split(address: str, known: list[str], wanted: str | None) -> str:
    """Return the requested split; by default the training split, or the only one."""
    split = wanted or ("train" if "train" in known else known[0] if len(known) == 1 else None)
    if split is None:
        raise BadInput(f"{address}: has several splits; name one as :SPLIT: {listed(known)}")
    if split not in known:
        raise BadInput(f"{address}: no split {split!r} in it; known: {listed(known)}")
    return split


def choose_column(address: str, row: dict[str, Any], wanted: str | None) -> str:
    """Return the requested column; by default text, content or messages. It must hold text or a chat."""
    column = wanted or next((name for name in TEXT_FIELDS if name in row and holds_text(row[name])), None)
    if column is None:
        raise BadInput(
            f"{address}: no column text, content or messages in it; name one as #COLUMN: {listed(row)}"
        )
    if column not in row:
        raise BadInput(f"{address}: no column {column!r} in it; known: {listed(row)}")
    if not holds_text(row[column]):
        kind = type(row[column]).__name__
        raise BadInput(
            f"{address}: column {column!r} holds no text ({kind}); name another one as #COLUMN: {listed(row)}"
        )
    return column


def holds_text(value: Any) -> bool:
    """Whether a value is text, messages, token ids, or empty as the first row may be."""
    return value is None or isinstance(value, str | list)


def listed(names: Iterable[str]) -> str:
    """Join the names, at most twenty of them."""
    words = [str(name) for name in names]
    return ", ".join(words[:20]) + (f" and {len(words) - 20} more" if len(words) > 20 else "")


def stream(repository: str, config: str, commit: str) -> Any:
    """Return split -> its rows, read on demand."""
    import datasets

    with without_bars():
        return datasets.load_dataset(repository, config, revision=commit, streaming=True)


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the library's progress bars; moescope has its own."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


@contextmanager
def one_line_errors(address: str) -> Iterator[None]:
    """Turn whatever the library raises (its own, HTTP and file format errors) into one line."""
    try:
        yield
    except (BadInput, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        raise BadInput(
            f"{address}: cannot be read ({first_line(error)[:200]}); check the dataset, or give a file"
        ) from None
