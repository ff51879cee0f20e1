"""Where a checkpoint is: a folder, a file, a repository on the hub, a URL."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from moescope.checkpoint.files import GGUF, INDEX_NAMES, SUFFIXES, Files, first_line, folder_tensors
from moescope.checkpoint.local import LocalFiles
from moescope.errors import BadInput

HUB_ID = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(@(?P<revision>[\w./-]+))?")
HUB_PAGE = re.compile(
    r"https?://(?:www\.)?huggingface\.co/(?P<id>[\w.-]+/[\w.-]+)(?:/tree/(?P<revision>[^/]+))?/?"
)
WEIGHTS = ("*.safetensors", "*.bin", "*.json")


@dataclass(frozen=True)
class Location:
    text: str  # what the user typed
    address: str  # absolute, without revision
    name: str
    files: Files
    one_file: str | None = None
    revision: str | None = None


def find_location(model: str | Path, revision: str | None = None) -> Location:
    """Resolve what the user typed. A folder or file of that name takes precedence over a hub id."""
    text = str(model)
    if page := HUB_PAGE.fullmatch(text):  # as copied from a browser
        return hub_location(page["id"], revision or page["revision"])
    if text.startswith("hf://") or (isinstance(model, str) and may_be_hub_id(text)):
        return hub_location(text, revision)
    if revision is not None:
        raise BadInput(
            f"{hide_credentials(text)}: a revision ({revision}) needs a hub id such as owner/name; remove it"
        )
    if "://" in text and not text.startswith("file://"):
        return url_location(text)
    return local_location(text)


def may_be_hub_id(text: str) -> bool:
    """Whether this is owner/name and neither it nor a folder named like the owner exists here."""
    match = HUB_ID.fullmatch(text)
    if match is None or match["owner"].startswith("."):
        return False
    return not os.path.exists(text) and not os.path.isdir(match["owner"])


def local_location(text: str) -> Location:
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
    if not is_folder and path.exists():
        raise BadInput(f"{text}: a pipe or device; give a folder or a .safetensors file")
    if not is_folder:
        raise missing
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
    """Return the URL without user name, password and query."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    plain = url.removesuffix(f"?{parts.query}") if parts.scheme in ("http", "https") else url
    return plain.replace(f"{user}@", "", 1) if user else plain


def url_location(url: str) -> Location:
    import fsspec

    from moescope.checkpoint.remote import RemoteFiles

    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    query = f"?{parts.query}" if parts.query and parts.scheme in ("http", "https") else ""
    plain, shown = url.removesuffix(query), hide_credentials(url).rstrip("/")
    try:
        filesystem, path = fsspec.core.url_to_fs(plain)
    except Exception as error:  # each file system has its own errors; fsspec names the package it needs
        raise BadInput(f"{shown}: {first_line(error)[:200]}; check the address") from None
    root, name = path.rstrip("/"), shown.rsplit("/", 1)[-1]
    secrets = tuple(secret for secret in (f"{user}@", query) if len(secret) > 1)
    if not name.endswith(SUFFIXES):
        return Location(url, shown, name, RemoteFiles(filesystem, root, shown, query, secrets))
    files = RemoteFiles(filesystem, root.rsplit("/", 1)[0], shown.rsplit("/", 1)[0], query, secrets)
    return Location(url, shown, name.rsplit(".", 1)[0], files, one_file=name)


def hub_location(text: str, revision: str | None) -> Location:
    """Return a repository at one commit: from the local hub cache if complete, else read in byte ranges."""
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
    files: Files
    if cached is not None:
        files = LocalFiles(cached)
    else:
        import fsspec

        from moescope.checkpoint.remote import RemoteFiles

        label = f"hf://{repository}@{commit[:12]}"
        files = RemoteFiles(fsspec.filesystem("hf"), f"{repository}@{commit}", label)
    name = match["name"] + (f"@{wanted.replace('/', '-')}" if wanted else "")
    return Location(text, f"hf://{repository}", name, files, revision=commit)


def hub_commit(repository: str, revision: str | None) -> tuple[str | None, str]:
    """Return the commit that the revision currently names; None and the reason if the hub gives none."""
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    label = f"{repository}@{revision}" if revision else repository
    try:
        return HfApi().model_info(repository, revision=revision).sha, ""
    except hub.RevisionNotFoundError:
        raise BadInput(f"{label}: the hub has no such revision of it; check its name") from None
    except hub.GatedRepoError:
        raise BadInput(f"{label}: request access on the hub first; then `hf auth login`") from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        return None, "the hub has no such model, or it is private: check the name, or `hf auth login`"
    except Exception as error:  # no network, a proxy, a time-out: each HTTP library has its own
        return None, (
            f"the hub cannot be reached ({first_line(error)[:120]}); download it on a connected machine and "
            "give its folder"
        )


def cached_folder(repository: str, revision: str | None) -> Path | None:
    """Return the folder of that revision in the local hub cache if it holds all weights."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                repository, revision=revision, local_files_only=True, allow_patterns=list(WEIGHTS)
            )
        )
        files = LocalFiles(folder)
        names = {info.file_name for info in folder_tensors(files).values()}
    except (BadInput, OSError, ValueError):
        return None
    # Single downloaded files are in the cache too: a shard without its index is not the model.
    indexed = any(files.exists(index) for index in INDEX_NAMES)
    is_shard = any(re.search(r"-of-\d+\.", name) for name in names) and not indexed
    return folder if files.exists("config.json") and not is_shard else None
