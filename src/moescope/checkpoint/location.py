"""Where a checkpoint is: a folder, a file, a repository on the hub, a URL."""

from __future__ import annotations

import difflib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moescope.checkpoint.files import (
    GGUF,
    INDEX_NAMES,
    MAX_HEADER_BYTES,
    SUFFIXES,
    Files,
    Index,
    StoredTensor,
    check_text_size,
    folder_tensors,
    safetensors_headers,
)
from moescope.checkpoint.local import LocalFiles
from moescope.errors import CREDENTIALS, BadInput, one_line, reason

if TYPE_CHECKING:
    from torch import Tensor

# --- files on a server, through fsspec: headers, then only the byte ranges of requested tensors

FIRST_BYTES = 65536  # first request: holds the header's length and usually all of the header
ATTEMPTS = 4  # a scan of hours should survive a dropped connection
SILENT_ATTEMPTS = 2  # a server that accepts a connection and stays silent is waited for each time
SILENCE = 30.0  # seconds; a file's size is asked for in two ways, so an attempt takes a minute
VERSION_FIELDS = (
    "ETag", "etag", "blob_id", "md5", "mtime", "LastModified", "last_modified", "Last-Modified", "created",
)  # fmt: skip
NOT_TRANSIENT = (NotImplementedError, ValueError)

Value = TypeVar("Value")


class FileMissing(BadInput):
    """The server was reached and has no such file."""


@dataclass(frozen=True)
class RemoteFiles(Files):
    filesystem: Any  # fsspec's
    root: str  # the folder, as that file system names it
    shown: str  # and as messages name it, without credentials
    query: str = ""  # appended to a file's name, such as a signature
    secrets: tuple[str, ...] = field(default=(), repr=False)  # never shown
    infos: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    stored: dict[str, dict[str, StoredTensor]] = field(default_factory=dict, repr=False, compare=False)
    opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    parallel: int = 8

    def label(self, name: str) -> str:
        return f"{self.shown}/{name}"

    def path(self, name: str) -> str:
        return f"{self.root}/{name}{self.query}"

    def names(self) -> list[str]:
        try:
            listed = self.filesystem.ls(self.root, detail=False)
        except Exception:  # many servers list nothing; the index or the standard name decides then
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)

    def info(self, name: str) -> dict[str, Any]:
        if name not in self.infos:
            self.infos[name] = self.retry(name, lambda: self.filesystem.info(self.path(name)))
        return self.infos[name]

    def exists(self, name: str) -> bool:
        try:
            return self.info(name).get("type", "file") == "file"
        except FileMissing:
            return False

    def raw(self, name: str) -> bytes | None:
        if not self.exists(name):
            return None
        check_text_size(self, name)
        return bytes(self.retry(name, lambda: self.filesystem.cat_file(self.path(name))))

    def size(self, name: str) -> int:
        size = self.info(name).get("size")
        if not isinstance(size, int):
            raise BadInput(
                f"{self.label(name)}: the server does not report its size; download it and give its folder"
            )
        return size

    def stamp(self, name: str) -> str:
        info = self.info(name)
        versions = (str(info[key]) for key in VERSION_FIELDS if info.get(key) is not None)
        return " ".join([str(self.size(name)), *versions])  # the fingerprint too: no blocks are requested

    def headers(self, name: str) -> dict[str, StoredTensor]:
        """Fetch the header alone, and write it into a sparse file so that safetensors can check it."""
        from safetensors import SafetensorError

        if not name.endswith(".safetensors"):
            raise BadInput(
                f"{self.label(name)}: only safetensors can be read from a server; download it and give its "
                "folder"
            )
        size = self.size(name)
        start = self.fetch(name, 0, min(size, FIRST_BYTES))
        length = int.from_bytes(start[:8], "little")
        if 8 + length > min(size, MAX_HEADER_BYTES):
            raise BadInput(
                f"{self.label(name)}: not a complete safetensors file (its header would be {length} bytes "
                "long); upload it again"
            )
        header = (start + self.fetch(name, len(start), 8 + length))[: 8 + length]
        kinds = (SafetensorError, OSError, ValueError)
        damaged = one_line(f"{self.label(name)}: not a complete safetensors file", "upload it again", kinds)
        with damaged, tempfile.TemporaryDirectory() as folder:
            sparse = Path(folder) / "sparse.safetensors"
            with sparse.open("wb") as file:
                file.write(header)
                file.truncate(size)
            self.stored[name] = safetensors_headers(sparse, header)
        return self.stored[name]

    def read(self, name: str, tensor: str, index: Index = None) -> Tensor:
        import torch

        place = self.stored[name][tensor].part(index)
        data = bytearray(self.fetch(name, place.start, place.end))  # torch wants no empty buffer
        return place.from_bytes(
            torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        )

    def fetch(self, name: str, start: int, end: int) -> bytes:
        """Fetch this byte range of the file and nothing else."""
        if end <= start:
            return b""
        data = self.retry(name, lambda: self.fetch_once(name, start, end))
        if len(data) != end - start:
            raise BadInput(
                f"{self.label(name)}: the server sent {len(data):,} bytes instead of {end - start:,}; it "
                "changed, or the server does not serve byte ranges: download it and give its folder"
            )
        return data

    def fetch_once(self, name: str, start: int, end: int) -> bytes:
        with self.lock:
            if name not in self.opened:
                # No read-ahead: the next tensor requested is rarely the next one in the file. And the HTTP
                # file system would ask for the size at every opening.
                size = {"size": self.size(name)} if "http" in self.filesystem.protocol else {}
                file = self.filesystem.open(self.path(name), "rb", cache_type="none", **size)
                self.opened[name] = (file, threading.Lock())
            file, file_lock = self.opened[name]
        try:
            with file_lock:
                file.seek(start)
                return bytes(file.read(end - start))
        except Exception:
            with self.lock:
                self.opened.pop(name, None)  # a dropped connection is opened again
            raise

    def retry(self, name: str, request: Callable[[], Value], attempts: int = ATTEMPTS) -> Value:
        """Return the answer, repeating the request after connection failures, after silence once."""
        try:
            return request()
        except BadInput:
            raise
        except Exception as error:  # each file system has its own errors
            failure, cause = permanent_failure(error), error.__cause__ or error
        silent = isinstance(cause, TimeoutError)
        if silent and failure is None:
            failure = f"no answer within {SILENCE:g} seconds"
        if silent and attempts > ATTEMPTS + 1 - SILENT_ATTEMPTS:
            logging.getLogger("moescope").warning(f"moescope: {self.label(name)}: {failure}; asking again")
            return self.retry(name, request, attempts - 1)
        if failure is None and attempts > 1:
            time.sleep(0.5 * 2 ** (ATTEMPTS - attempts))
            return self.retry(name, request, attempts - 1)
        why = failure or reason(cause)
        for secret in self.secrets:  # a library's message may quote the address with a password
            why = why.replace(secret, "")
        if failure == "no such file":
            raise FileMissing(f"{self.label(name)}: no such file; check the address")
        if "range requests" in why:  # fsspec's words; a host may be called orange
            raise BadInput(
                f"{self.label(name)}: the server does not serve byte ranges; download it and give its folder"
            )
        raise BadInput(f"{self.label(name)}: cannot be fetched ({why}); check the address and your access")

    def release(self) -> None:
        """Close the files, and raise if one changed on the server since its header was read."""
        with self.lock:
            names = list(self.opened)
            for file, file_lock in self.opened.values():
                with file_lock:
                    file.close()
            self.opened.clear()
        for name in names:
            before = self.stamp(name)
            del self.infos[name]
            if self.stamp(name) != before:
                raise BadInput(
                    f"{self.label(name)}: has changed on the server since its header was read; start again"
                )


def permanent_failure(error: BaseException) -> str | None:
    """Return why the request will never succeed; None if repeating it may help."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or isinstance(error, PermissionError):
        return "no permission; log in with `hf auth login` or the tool of that store"
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None and status is None:
        return permanent_failure(error.__cause__)  # fsspec calls every failure of a web server "not found"
    if status == 404 or isinstance(error, FileNotFoundError):
        return "no such file"
    return reason(error)[:160] if isinstance(error, NOT_TRANSIENT) else None


# --- what a user typed, as a place

HUB_ID = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(@(?P<revision>[\w./-]+))?")
HUB_PAGE = re.compile(
    r"https?://(?:www\.)?huggingface\.co/(?P<id>[\w.-]+/[\w.-]+)(?:/tree/(?P<revision>[^/]+))?/?"
)
QUERY = re.compile(r"(https?://[^?#]*)(\?[^#]*)")
WEIGHTS = ["*.safetensors", "*.bin", "*.json"]


@dataclass(frozen=True)
class Location:
    text: str  # what the user typed
    address: str  # absolute, without revision
    name: str
    files: Files
    one_file: str | None = None
    revision: str | None = None


def find_location(model: str | Path, revision: str | None = None) -> Location:
    """Resolve what the user typed. A folder of the id's or owner's name takes precedence over a hub id."""
    text = str(model)
    if page := HUB_PAGE.fullmatch(text):  # as copied from a browser
        return hub_location(page["id"], revision or page["revision"])
    match = HUB_ID.fullmatch(text) if isinstance(model, str) and not os.path.exists(text) else None
    is_id = match is not None and not match["owner"].startswith(".") and not os.path.isdir(match["owner"])
    if is_id or text.startswith("hf://"):
        return hub_location(text, revision)
    if revision is not None:
        raise BadInput(
            f"{hide_credentials(text)}: a revision ({revision}) needs a hub id such as owner/name; remove it"
        )
    if "://" in text and not text.startswith("file://"):
        return url_location(text)
    return local_location(text)


def local_location(text: str) -> Location:
    try:
        text.encode()  # run.json and the report are UTF-8
    except UnicodeEncodeError:
        raise BadInput(f"{text}: its name is not UTF-8; rename it") from None
    similar = similar_names(text)
    missing = BadInput(
        f"{text}: no such folder or file; " + (f"did you mean {similar[0]}?" if similar else "check the path")
    )
    try:
        path = Path(text.removeprefix("file://")).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (RuntimeError, ValueError, OSError):  # no such user; a zero byte; a name that is too long
        raise missing from None
    if is_file:
        if path.suffix == ".gguf":
            raise BadInput(f"{path}: {GGUF}")
        if path.suffix not in SUFFIXES:
            raise BadInput(f"{path}: not a .safetensors file; give a folder or a .safetensors file")
        address = path.parent.resolve() / path.name  # not resolved: the hub's cache consists of links
        return Location(str(path), str(address), path.stem, LocalFiles(path.parent), one_file=path.name)
    if not is_folder:
        pipe = BadInput(f"{text}: a pipe or device; give a folder or a .safetensors file")
        raise pipe if path.exists() else missing
    return Location(str(path), str(path.resolve()), path.resolve().name, LocalFiles(path))


def similar_names(text: str) -> list[str]:
    """Return existing paths in the same folder with nearly that name."""
    try:
        path = Path(text)
        stem = path.name.split("@")[0]
        if path.with_name(stem).exists():
            return [str(path.with_name(stem))]
        entries = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        return [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, entries, 1, 0.7)]
    except (OSError, ValueError):
        return []


def hide_credentials(url: str) -> str:
    """Return the URL, or each of a chain of them, without user name, password and query."""
    return QUERY.sub(r"\1", CREDENTIALS.sub("", url))


def web_timeout() -> Any:
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)


def url_location(url: str) -> Location:
    import fsspec

    asked = QUERY.search(url)
    query = asked[2] if asked and url.endswith(asked[2]) else ""
    plain, shown = url.removesuffix(query), hide_credentials(url).rstrip("/")
    secrets = tuple(secret for secret in (*CREDENTIALS.findall(url), query) if len(secret) > 1)
    # each file system has its own errors; fsspec names the package it needs
    with one_line(f"{shown}: cannot be opened", "check the address"):
        web = [protocol for protocol in ("http", "https") if f"{protocol}://" in plain]
        settings = {protocol: {"client_kwargs": {"timeout": web_timeout()}} for protocol in web}
        filesystem, path = fsspec.core.url_to_fs(plain, **settings)
    root, name = path.rstrip("/"), shown.rsplit("/", 1)[-1]
    if not name.endswith(SUFFIXES):
        return Location(url, shown, name, RemoteFiles(filesystem, root, shown, query, secrets))
    files = RemoteFiles(filesystem, root.rsplit("/", 1)[0], shown.rsplit("/", 1)[0], query, secrets)
    return Location(url, shown, name.rsplit(".", 1)[0], files, one_file=name)


def hub_location(text: str, revision: str | None) -> Location:
    """Return a repository at one commit: from the local hub cache if complete, else read in byte ranges."""
    import fsspec

    match = HUB_ID.fullmatch(text.removeprefix("hf://").rstrip("/"))
    if match is None:
        raise BadInput(f"{text}: not a hub id; write owner/name or owner/name@revision")
    if revision and match["revision"] and revision != match["revision"]:
        raise BadInput(f"{text}: two revisions, {match['revision']} and {revision}; give one")
    repository, wanted = f"{match['owner']}/{match['name']}", revision or match["revision"]
    commit, problem = hub_commit(repository, wanted)
    cached = cached_folder(repository, commit or wanted)
    if commit is None:
        if cached is None:
            raise BadInput(f"{text}: no such folder or file here, and {problem}")
        commit = cached.name
    root, label = f"{repository}@{commit}", f"hf://{repository}@{commit[:12]}"
    files = LocalFiles(cached) if cached else RemoteFiles(fsspec.filesystem("hf"), root, label)
    name = match["name"] + (f"@{wanted.replace('/', '-')}" if wanted else "")
    return Location(text, f"hf://{repository}", name, files, revision=commit)


def hub_commit(repository: str, revision: str | None, kind: str = "model") -> tuple[str | None, str]:
    """Return the commit that the revision currently names; None and the reason if the hub gives none.

    `kind` is "model" or "dataset".
    """
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    label = f"{repository}@{revision}" if revision else repository
    try:
        found = HfApi().repo_info(repository, revision=revision, repo_type=kind, timeout=SILENCE)
        return found.sha, ""
    except hub.RevisionNotFoundError:
        raise BadInput(f"{label}: the hub has no such revision of it; check its name") from None
    except hub.GatedRepoError:
        raise BadInput(f"{label}: request access on the hub first; then `hf auth login`") from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        return None, f"the hub has no such {kind}, or it is private: check the name, or `hf auth login`"
    except Exception as error:  # no network, a proxy, a time-out: each HTTP library has its own
        return None, (
            f"the hub cannot be reached ({reason(error)[:120]}); download it on a connected machine and "
            "give its folder"
        )


def cached_folder(repository: str, revision: str | None) -> Path | None:
    """Return the folder of that revision in the local hub cache if it holds all weights."""
    from huggingface_hub import snapshot_download

    try:
        files = LocalFiles(
            Path(
                snapshot_download(
                    repository, revision=revision, local_files_only=True, allow_patterns=WEIGHTS
                )
            )
        )
        names = {info.file_name for info in folder_tensors(files).values()}
    except (BadInput, OSError, ValueError):
        return None
    # Single downloaded files are in the cache too: a shard without its index is not the model.
    whole = any(map(files.exists, INDEX_NAMES)) or not any(re.search(r"-of-\d+\.", name) for name in names)
    return files.folder if whole and files.exists("config.json") else None
